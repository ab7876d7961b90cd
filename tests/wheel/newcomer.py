"""Uses the package as a newcomer does, in an environment that has the wheel and what it requires, and nothing else.

    python -I tests/wheel/newcomer.py

It runs the README's first example, and the tutorial's script twice: the second run loads what the first has saved.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def blocks(page: str) -> list[str]:
    """The Python code of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def run(code: str, folder: Path) -> str:
    """Runs a script in a folder; returns what it prints."""
    script = folder / "script.py"
    script.write_text(code, encoding="utf-8")
    done = subprocess.run([sys.executable, script], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the script ended with {done.returncode}:\n{code}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def main() -> None:
    """Runs both pages in a folder of their own, and ends with an error unless they do what they promise."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(blocks("README.md")[0], folder)
        tutorial = next(code for code in blocks("docs/tutorial.md") if "__main__" in code)
        outputs = [run(tutorial, folder) for _ in range(2)]
        saved = "2 ranks have saved checkpoints/step-4\n"
        if outputs != [saved, "2 ranks have loaded checkpoints/step-4\n" + saved]:
            sys.exit(f"the tutorial printed {outputs}")
        found = sorted(str(path.parent.relative_to(folder)) for path in folder.rglob(".metadata"))
    sys.stdout.write(f"README and tutorial have saved and loaded {', '.join(found)}\n")


if __name__ == "__main__":
    main()
