"""Rooms: a test looks inside the folder of the package that it is of, and into no other but where rooms meet.

Then a change inside a room changes that room's tests. ``foreign_rooms.txt`` has the tests that look into other rooms,
and may only become shorter: ``python -m tests.unit.test_rooms`` writes it anew.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from ..lab.processes import PACKAGE, ROOT

SEAMS = (
    "_runtime",
    "_storage.base",
    "_storage.local",
    "_storage.open",
    "_tensor_file.dtypes",
    "_tensor_file.names",
    "_tensor_file.regions",
    "_index.layouts",
    "_version",
)
"""What rooms take from each other, and so all tests may."""

LIST = Path(__file__).with_name("foreign_rooms.txt")


def room_of(test: str) -> str | None:
    """The folder of the package that a test is of; None for tests of the whole, as in ``tests/e2e``."""
    _, suite, *rest = Path(test).parts
    if suite not in ("unit", "integration"):
        return "integrations" if suite == "frameworks" else None
    return next((name for name in (f"_{rest[0]}", rest[0]) if (PACKAGE / name).is_dir()), None)


def private_imports(code: str) -> Iterator[str]:
    """What is imported of the package's private parts: dotted, without the package's own name."""
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.ImportFrom(module=str(module), names=aliases, level=0):
                found = [f"{module}.{alias.name}" for alias in aliases]
            case ast.Import(names=aliases):
                found = [alias.name for alias in aliases]
            case _:
                continue
        for name in found:
            package, _, rest = name.partition(".")
            if package == PACKAGE.name and any(part.startswith("_") for part in rest.split(".")):
                yield rest


def foreign_rooms(test: str, code: str) -> set[str]:
    """The rooms that a test looks into, and is not of."""
    foreign = {
        name.partition(".")[0]
        for name in private_imports(code)
        if not any(f"{name}.".startswith(f"{seam}.") for seam in SEAMS)
    }
    return foreign - {room_of(test)}


def found() -> list[str]:
    """The lines of the list as they should be; `tests.lab` is what rooms share, and may look anywhere."""
    lines = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        test = path.relative_to(ROOT).as_posix()
        if not test.startswith("tests/lab/"):
            rooms = foreign_rooms(test, path.read_text(encoding="utf-8"))
            lines += [f"{test}: {room}" for room in sorted(rooms)]
    return lines


def test_tests_look_into_their_own_room() -> None:
    """What they need of others they take from ``tests/lab``: the list gets no new line, and keeps none for nothing."""
    lines, known = found(), LIST.read_text(encoding="utf-8").splitlines()
    new, gone = sorted(set(lines) - set(known)), sorted(set(known) - set(lines))
    assert not new, f"take what these need of other rooms from tests/lab: {new}"
    assert not gone, f"no longer so, python -m tests.unit.test_rooms writes the list anew: {gone}"
    assert lines == known


def test_which_rooms_are_foreign() -> None:
    """By both kinds of imports, also of private names of public modules."""
    code = """
from dcp_tensorizer import TensorizerStorageWriter, _index
from dcp_tensorizer._saving.save import Save
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer.tools._view import whole
from dcp_tensorizer.integrations.torchft import _state_id
def f():
    import dcp_tensorizer._memory.keeper
"""
    all_of_them = {"_index", "_saving", "tools", "integrations", "_memory"}
    assert foreign_rooms("tests/e2e/test_ends.py", code) == all_of_them
    assert foreign_rooms("tests/unit/saving/test_save.py", code) == all_of_them - {"_saving"}
    assert foreign_rooms("tests/integration/tools/formats/test_dcp.py", code) == all_of_them - {"tools"}
    assert foreign_rooms("tests/frameworks/test_torchft.py", code) == all_of_them - {"integrations"}


if __name__ == "__main__":
    LIST.write_text("".join(f"{line}\n" for line in found()), encoding="utf-8")
