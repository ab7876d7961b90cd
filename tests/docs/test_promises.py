"""Each row of README's guarantees and of the tables of docs/failures.md has a name, and one test that proves it."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_NAME = re.compile(r"<!-- promise: ([a-z-]+) --> \|$")
_SECTIONS = {
    "README.md": {"What is guaranteed"},
    "docs/failures.md": {
        "Saves",
        "Loads",
        "Models and versions for inference",
        "Jobs with a manager",
        "Forked children",
    },
}
"""The sections whose tables say what happens. The other tables explain, or count."""


def _rows() -> Iterator[str]:
    """The rows of the tables in these sections, without their heads."""
    for page, titles in _SECTIONS.items():
        found = set()
        for section in (ROOT / page).read_text("utf-8").split("\n## ")[1:]:
            title, *lines = section.splitlines()
            if title in titles:
                found.add(title)
                yield from [line for line in lines if line.startswith("|")][2:]
        assert found == titles, page


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


def test_each_row_is_a_promise() -> None:
    """Each row ends with a name of its own, and no other row of the two pages has one."""
    rows = list(_rows())
    assert [row for row in rows if not _NAME.search(row)] == []
    names = [_NAME.findall(row)[0] for row in rows]
    assert len(names) == len(set(names))
    pages = "".join((ROOT / page).read_text("utf-8") for page in _SECTIONS)
    assert pages.count("<!-- promise:") == len(rows)


def test_each_promise_has_one_home() -> None:
    """A second home gives a reason, and no test names what is not promised."""
    homes = _homes()
    assert homes.keys() == {name for row in _rows() for name in _NAME.findall(row)}
    assert [name for name, reasons in homes.items() if reasons.count(False) != 1] == []
