"""Runs the blocks of one page in their order: in a process and a directory of their own.

Python blocks share a namespace. One with a ``__main__`` guard is run as a script, because it starts processes that
import it. One that begins with ``# NAME.py`` is that file. A pyproject.toml is installed. Commands are run by bash. Of
a console block each command must end as the output under it says, and show the same table.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.docs.pages import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

DAMAGED_OR_DIFFERENT, NOT_DONE = 1, 2
PORT = "29511"  # of the tutorial's process group; somebody else may use it on this machine at the same time


class PageError(Exception):
    """A block does not do what the page says."""


def main(page: Path, steps: list[dict[str, Any]]) -> None:
    """Runs the steps, and says which one failed."""
    namespace: dict[str, Any] = {"__name__": "page"}
    for step in steps:
        where = f"{page.relative_to(ROOT)}:{step['line']}"
        try:
            run = {"python": run_python, "bash": run_bash, "console": run_console, "toml": install}[step["language"]]
            run(step["code"], namespace, f"{page}:{step['line']}")
        except BaseException:
            traceback.print_exc()
            sys.exit(f"{where}: this block failed")
    sys.stdout.write(f"{len(steps)} blocks of {page.relative_to(ROOT)} ran\n")


def run_python(code: str, namespace: dict[str, Any], where: str) -> None:
    """In the page's namespace, or as a script, or not yet: a file that others import."""
    if named := re.match(r"# (\w+\.py)$", code, re.MULTILINE):
        Path(named[1]).write_text(code)
        return
    if "__main__" not in code:
        exec(compile(code, where, "exec"), namespace)
        return
    script = Path("script.py")
    script.write_text(code.replace(PORT, str(free_port())))
    subprocess.run(["python", str(script)], check=True)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def install(code: str, namespace: dict[str, Any], where: str) -> None:
    """Has the project in the working directory found as `pip install --editable .` would, which needs a network."""
    project = tomllib.loads(code)["project"]
    name, version = project["name"], project["version"]
    info = Path(f"{name.replace('-', '_')}-{version}.dist-info")
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = [
        "\n".join([f"[{group}]", *(f"{entry} = {value}" for entry, value in entries.items()), ""])
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups))


def run_bash(code: str, namespace: dict[str, Any], where: str) -> None:
    """All commands of a block must succeed."""
    subprocess.run(["bash", "-e", "-c", code], check=True)


def run_console(code: str, namespace: dict[str, Any], where: str) -> None:
    """Each command behind a prompt."""
    for part in re.split(r"^\$ ", code, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        if done.returncode != exit_code(output):
            raise PageError(f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        said = [" ".join(line.split()) for line in (done.stdout + done.stderr).splitlines()]
        for head in heads(output):
            if head not in said:
                raise PageError(f"{command} does not show {head!r}:\n" + "\n".join(said))


def exit_code(output: str) -> int:
    """What the output that a page shows says of the command's end."""
    if told := re.search(r'^  "exit_code": (\d+)$', output, re.MULTILINE):
        return int(told[1])
    if re.search(r"^error: ", output, re.MULTILINE):
        return NOT_DONE
    return DAMAGED_OR_DIFFERENT if re.search(r"^(DAMAGED|different): ", output, re.MULTILINE) else 0


def heads(output: str) -> list[str]:
    """The lines of a shown output that are the same for every checkpoint: heads of tables, which hold no digit."""
    lines = [line for line in output.splitlines() if re.search(r"\S {2,}\S", line)]
    return [" ".join(line.split()) for line in lines if not re.search(r"\d", line) and "  is " not in line]


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
