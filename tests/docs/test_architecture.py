"""The page on the architecture names folders, modules and functions that exist."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from .pages import DOCS, ROOT

PACKAGE = ROOT / "dcp_tensorizer"
MOST_FOLDERS = 6
MOST_MODULES = 20
HOOKS = {"writer", "reader"}  # where DCP calls

_PAGE = (DOCS / "architecture.md").read_text(encoding="utf-8")
_ROW = re.compile(r"^\| \d+ \| ([^|]+) \| ([^|]*) \|", re.MULTILINE)


def _section(title: str) -> str:
    return _PAGE.partition(f"## {title}")[2].partition("\n## ")[0]


def _names(cell: str) -> list[str]:
    return re.findall(r"`([\w.]+)`", cell)


def _walk(title: str) -> list[tuple[list[str], list[str]]]:
    """Of each step: the modules' paths below the package, and the functions."""
    steps = []
    for place, functions in _ROW.findall(_section(title)):
        folder, *modules = _names(place)
        paths = [f"{folder}/{module}.py" for module in modules] or [f"{folder}.py"]
        steps.append((paths, _names(functions)))
    return steps


WALKS = [
    "The path of one byte: from `stage()` to the file",
    "The path of one byte: from the file to the target",
]
STEPS = [(paths, functions) for title in WALKS for paths, functions in _walk(title)]


def test_the_walk_is_there() -> None:
    """Both directions have their steps, so that the tests below look at something."""
    assert [len(_walk(title)) > 10 for title in WALKS] == [True, True]


@pytest.mark.parametrize(("paths", "functions"), STEPS, ids=["-".join(s[0] + s[1]) for s in STEPS])
def test_a_step_of_the_walk_is_code(paths: list[str], functions: list[str]) -> None:
    """The modules of a step exist, and define the functions that it names."""
    code = "".join((PACKAGE / path).read_text(encoding="utf-8") for path in paths)
    for name in [part for function in functions for part in function.split(".")]:
        assert re.search(rf"^ *(?:def|class) {name}\b", code, re.MULTILINE), f"{name} is not in {paths}"


@pytest.mark.parametrize("title", WALKS)
def test_a_byte_passes_few_folders(title: str) -> None:
    """One direction can be followed without getting lost."""
    folders = {path.partition("/")[0] for paths, _ in _walk(title) for path in paths if "/" in path}
    assert len(folders) <= MOST_FOLDERS


@pytest.mark.parametrize("title", WALKS)
def test_a_byte_passes_as_many_modules_as_the_page_says(title: str) -> None:
    """Not so many that nobody remembers them."""
    modules = {path for paths, _ in _walk(title) for path in paths}
    said = re.search(r"passes through (\d+) modules", _section(title))
    assert said is not None
    assert len(modules) == int(said[1]) <= MOST_MODULES


@pytest.mark.parametrize("title", WALKS)
def test_a_byte_goes_up_only_where_dcp_calls(title: str) -> None:
    """All other steps are in the layer of the one before, or below."""
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \| [^|]+ \|$", _section("The layers"), re.MULTILINE)
    layers = {name: int(layer) for layer, row in rows for name in _names(row)}
    steps = [paths[0].partition("/")[0].removesuffix(".py") for paths, _ in _walk(title)]
    up = [after for before, after in pairwise(steps) if layers[after] > layers[before] and after not in HOOKS]
    assert up == []


def test_the_nouns_are_classes_of_their_modules() -> None:
    """Whoever looks for one finds it where the page says, and there are not too many of them."""
    rows = re.findall(r"^\| ([a-z, ]+) \| ([^|]+) \| [^|]+ \|$", _section("The nouns"), re.MULTILINE)
    assert 10 < len(rows) < 25
    for _, where in rows:
        for names, module in re.findall(r"((?:`\w+`(?: and )?)+) in `([\w/]+)`", where):
            code = (PACKAGE / f"{module}.py").read_text(encoding="utf-8")
            for name in _names(names):
                assert re.search(rf"^class {name}\b", code, re.MULTILINE), f"{name} is not in {module}"


def test_the_source_layout_is_the_package() -> None:
    """The tree shows each folder and module directly below the package, and nothing else."""
    shown = set(re.findall(r"^  (\w+)(?:\.py|/) ", _section("Source layout"), re.MULTILINE))
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert shown == there


def test_the_layers_are_those_that_are_checked() -> None:
    """The table has the layers of import-linter's contract, from the lowest to the highest."""
    contract = re.search(r"^layers = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M | re.S)
    assert contract is not None
    checked = [set(line.split(" | ")) for line in re.findall(r'"([^"]+)"', contract[1])]
    table = re.findall(r"^\| \d+ \| ([^|]+) \| [^|]+ \|$", _section("The layers"), re.MULTILINE)
    assert [set(_names(row)) for row in table] == checked[::-1]
