"""The house: what lies where. Its list is in ``docs/architecture.md``, who may import whom in ``pyproject.toml``."""

from __future__ import annotations

import ast
import re
from collections import Counter

from ..lab.processes import PACKAGE


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


OTHER_WORDS = re.compile(
    r"\b(let(s|ting)?[ _]go|the most seconds|go(es|ing)?[ _]on[ _]from|under[ _]way|(is|are) (not )?waited for|"
    r"somebody|nobody|excludes? each other|makes? no sense|and is (int|str|none)|mend(s|ed|ing)?)\b",
    re.IGNORECASE,
)


# Only on pages and in the examples.
OTHER_WORDS_OF_PAGES = re.compile(r"\b(says? so|the one that|in vain|nevertheless|no harm)\b|; None if", re.IGNORECASE)


def test_one_word_for_one_thing() -> None:
    """Code and pages keep to the words of ``docs/architecture.md``, also where a phrase runs over the end of a line."""
    root = PACKAGE.parent
    files = [
        *PACKAGE.rglob("*.py"),
        *(root / "docs").rglob("*.md"),
        *root.glob("*.md"),
        *(root / "examples").rglob("*.py"),
    ]
    texts = {path: re.sub(r"\s+(#\s+)?", " ", path.read_text(encoding="utf-8")) for path in files}
    uses = {path: [found[0] for found in OTHER_WORDS.finditer(text)] for path, text in texts.items()}
    for path, text in texts.items():
        if PACKAGE not in path.parents:
            uses[path] += [found[0] for found in OTHER_WORDS_OF_PAGES.finditer(text)]
    page = root / "docs" / "architecture.md"  # which names the words that are not used
    assert {str(path.relative_to(root)): words for path, words in uses.items() if words and path != page} == {}
