"""The house: what lies where. Its list is in ``docs/architecture.md``, who may import whom in ``pyproject.toml``."""

from __future__ import annotations

import ast
import re
from collections import Counter

from ..support import PACKAGE


def test_folders_import_nothing_by_themselves() -> None:
    """An ``__init__`` that imported something would bring torch into the writer process; two folders are public."""
    filled = {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("__init__.py") if path.read_text()}
    assert filled == {".", "testing", "tools"}


def test_torchs_private_names_are_in_one_place() -> None:
    """A new release of torch may move them: then one module changes."""
    private = re.compile(
        r"(?:from|import) torch[\w.]*\._|\btorch(?:\.\w+)*\._[a-z]|\._local_tensor\b|_checkpoint_offset"
    )
    found = {
        str(path.relative_to(PACKAGE)): private.findall(path.read_text())
        for path in PACKAGE.rglob("*.py")
        if path != PACKAGE / "_runtime" / "torch_compat.py"
    }
    assert {name: uses for name, uses in found.items() if uses} == {}


def test_no_two_classes_have_one_name() -> None:
    """Whoever reads a name knows which class it is; what takes a framework's place is named as there."""
    nodes = (node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1} == {"TensorizerCheckpointManager", "Config"}
