"""The documentation as the tests read it: its pages, and what is in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(
    r"^(?P<not_run><!-- not run: (?P<reason>[^\n]+) -->\n)?"
    r"(?P<fence>```+)(?P<language>\S*)[^\n]*\n(?P<code>.*?)^(?P=fence)[ \t]*$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        language: What stands behind the fence.
        code: What is in it.
        line: Where it begins, counted from 1.
        not_run: Why it is not run; None if it is.
    """

    language: str
    code: str
    line: int
    not_run: str | None


def pages() -> list[Path]:
    """README.md and every page of the documentation, in their order."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def texts() -> list[Path]:
    """Everything that is written for people."""
    return [*pages(), *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))]


def name_of(page: Path) -> str:
    """A page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, in their order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(found["language"], found["code"], text.count("\n", 0, found.start("fence")) + 1, found["reason"])
        for found in _FENCE.finditer(text)
    ]


def without_quotes(page: Path) -> str:
    """A page's text without its fenced blocks, its comments, and the figures and tables that are quoted of results."""
    text = re.sub(
        r"^<!-- measured: .* -->\n\n(\|.*\n)*", "", _FENCE.sub("", page.read_text(encoding="utf-8")), flags=re.M
    )
    return re.sub(r"<!--.*?-->", "", re.sub(r"[\d.,]*\d<!-- measured: .*? -->", "", text), flags=re.DOTALL)


def without_blocks(page: Path) -> str:
    """A page's text without its fenced blocks and comments."""
    return re.sub(r"<!--.*?-->", "", _FENCE.sub("", page.read_text(encoding="utf-8")), flags=re.DOTALL)
