"""The tests with commands of their own, whose packages are not here: what they import of this project exists."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import dcp_tensorizer
import dcp_tensorizer.tools

ROOT = Path(__file__).parents[2]
APART = [
    path
    for name in ("browser", "clouds", "frameworks", "gpu", "hosts")
    for path in (ROOT / "tests" / name).glob("*.py")
]


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """The names that a module imports of this project, each with where it takes it from."""
    package = path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            start = [*package[: -node.level]] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            if module.partition(".")[0] in ("tests", "dcp_tensorizer", "benchmarks", "examples"):
                yield from ((module, alias.name) for alias in node.names)


def has(module: str, name: str) -> bool:
    """Whether a module has a name, or a package a module of that name. Nothing of it is imported, if possible."""
    spec = find_spec(module)
    assert spec is not None, f"there is no {module}"
    if name in top_level(Path(spec.origin or "")):
        return True
    if spec.submodule_search_locations and find_spec(f"{module}.{name}") is not None:
        return True
    lazy = {package.__name__: package.__all__ for package in (dcp_tensorizer, dcp_tensorizer.tools)}
    return name in lazy.get(module, ())


def top_level(file: Path) -> set[str]:
    """The names that a module defines or imports at its top."""
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names.update((alias.asname or alias.name).partition(".")[0] for alias in aliases)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return names


@pytest.mark.parametrize("path", APART, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_they_import_exists(path: Path) -> None:
    """A name that moves would break them, and nobody would see it until somebody runs them."""
    assert [f"{module}.{name}" for module, name in imported(path) if not has(module, name)] == []


def test_a_name_that_is_gone_is_found() -> None:
    """The check itself: of names, of modules, and of names of packages."""
    assert has("tests.lab.processes", "open_descriptors") and not has("tests.lab.processes", "gone")
    assert has("dcp_tensorizer", "LoadPlanner") and has("dcp_tensorizer", "tools") and not has("dcp_tensorizer", "gone")
    assert has("dcp_tensorizer.integrations.lightning", "TensorizerStrategy") and not has(
        "dcp_tensorizer.integrations.lightning", "gone"
    )
    found = dict(reversed(list(imported(ROOT / "tests" / "frameworks" / "test_lightning.py"))))
    assert {"tests.lab.processes", "tests.frameworks.jobs", "dcp_tensorizer.integrations.lightning"} <= found.keys()
