"""A row of README's guarantees or of docs/failures.md that has a name has one test that proves it, its home."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
_NAME = re.compile(r"<!-- promise: ([a-z-]+) --> \|$")


def _promised() -> list[str]:
    lines = [
        line for page in ("README.md", "docs/failures.md") for line in (ROOT / page).read_text("utf-8").splitlines()
    ]
    return [match[1] for line in lines if line.startswith("|") and (match := _NAME.search(line))]


def _homes() -> dict[str, list[bool]]:
    """For each promise that a test names, whether its tests give a reason."""
    found = defaultdict(list)
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            for mark in getattr(node, "decorator_list", ()):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.promise":
                    (name,) = mark.args
                    found[ast.literal_eval(name)].append(any(keyword.arg == "reason" for keyword in mark.keywords))
    return dict(found)


def test_each_promise_has_one_home() -> None:
    """A second home gives a reason, and no test names what is not promised."""
    names, homes = _promised(), _homes()
    assert len(names) == len(set(names)) >= 26
    assert homes.keys() == set(names)
    assert [name for name, reasons in homes.items() if reasons.count(False) != 1] == []
