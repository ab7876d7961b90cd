"""The wheel, as `pip install` brings it into an environment that has nothing else."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """The interpreter of a clean environment in which the built wheel is installed."""
    folder = tmp_path_factory.mktemp("clean")
    _run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
    (wheel,) = folder.glob("dcp_tensorizer-*.whl")
    _run(sys.executable, "-m", "venv", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    # Not all of torch is imported: it need not be compiled.
    _run(python, "-m", "pip", "install", "--quiet", "--no-compile", "--constraint", ROOT / "constraints.txt", wheel)
    return python


def _run(*command, cwd=None):
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_clean_environment_runs_the_readme(clean, tmp_path):
    """The README's first example saves and loads with what the wheel requires, and what it requires fits together."""
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[:1]
    (tmp_path / "snippet.py").write_text(snippet)
    _run(clean, "snippet.py", cwd=tmp_path)
    assert list(tmp_path.rglob(".metadata"))
    assert "No broken requirements" in _run(clean, "-m", "pip", "check")


def test_the_page_of_a_package_index_has_no_relative_links(clean):
    """The README in the wheel leads to the repository, and so does its picture."""
    code = "from importlib.metadata import metadata; print(metadata('dcp_tensorizer').get_payload())"
    readme = _run(clean, "-c", code)
    targets = re.findall(r"\]\(([^)#][^)]*)\)", readme)
    assert len(targets) > 20
    assert [target for target in targets if not target.startswith("https://")] == []
    assert re.search(r"!\[[^\]]*\]\(https://raw\.githubusercontent\.com/[^)]*/benchmarks/results/save\.png\)", readme)


def test_the_command_line_says_what_it_needs(clean, tmp_path):
    """Without its extra it names that; nothing else of the package needs it."""
    done = subprocess.run(
        [clean.with_name("dcp-tensorizer"), "ls", tmp_path], capture_output=True, text=True, timeout=600
    )
    assert done.returncode != 0
    assert "dcp_tensorizer[cli]" in done.stdout + done.stderr
