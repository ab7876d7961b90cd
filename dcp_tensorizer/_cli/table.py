"""Tables that fit a terminal: names stay whole, and other cells are broken after a dot, a slash or a space."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from rich.cells import cell_len

__all__ = ["folded", "lay_out"]

_GAP = "  "
_NAME = 12  # columns for the names in a table that is too wide
_WORD = re.compile(r"\S*\s*")
_PIECE = re.compile(r"[^\s./]*[\s./]*")  # of a key or a path


def folded(text: str, room: int, pieces: re.Pattern[str] = _WORD) -> list[str]:
    """The lines of a text that has so much room, broken between pieces; one that is too long stays whole."""
    if cell_len(text) <= room:
        return [text]
    lines = [""]
    for piece in filter(None, pieces.findall(text)):
        if lines[-1] and cell_len((lines[-1] + piece).rstrip()) > room:
            lines.append("")
        lines[-1] += piece
    return [line.rstrip() for line in lines]


def lay_out(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """The lines of a table, its head first; they are as wide as they must be where no break helps.

    What stands first in a row is its name, to be copied: one that is too long has a line of its own above the others.

    Args:
        columns: Their names; one that begins with ``>`` is of numbers, and stays in one piece.
        rows: Their cells.
        width: Of the terminal.
    """
    heads = [name.lstrip(">") for name in columns]
    numeric = [name.startswith(">") for name in columns]
    cells = list(zip(*rows, strict=True)) if rows else [() for _ in columns]
    widths = [max(map(cell_len, [head, *column])) for head, column in zip(heads, cells, strict=True)]
    if sum(widths) + len(_GAP) * (len(widths) - 1) > width:
        least = [
            whole if is_number else min(whole, _NAME) if number == 0 else max(map(_longest_piece, [head, *column]))
            for number, (whole, is_number, head, column) in enumerate(zip(widths, numeric, heads, cells, strict=True))
        ]
        widths = _narrowed(widths, least, width - len(_GAP) * (len(widths) - 1))
    for row in (heads, *rows):
        if not numeric[0] and cell_len(row[0]) > widths[0]:
            yield row[0]
            if not any(row[1:]):
                continue
            row = ["", *row[1:]]
        broken = [folded(cell, room, _PIECE) for cell, room in zip(row, widths, strict=True)]
        for line in itertools.zip_longest(*broken, fillvalue=""):
            padded = (_padded(*cell) for cell in zip(line, widths, numeric, strict=True))
            yield _GAP.join(padded).rstrip()


def _narrowed(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Takes from the widest column again and again, as long as the table is too wide and some column can give."""
    narrowed = list(widths)
    while sum(narrowed) > room:
        able = [number for number, width in enumerate(narrowed) if width > least[number]]
        if not able:
            break
        narrowed[max(able, key=narrowed.__getitem__)] -= 1
    return narrowed


def _longest_piece(cell: str) -> int:
    return max(cell_len(piece.rstrip()) for piece in _PIECE.findall(cell))


def _padded(text: str, width: int, is_number: bool) -> str:
    padding = " " * (width - cell_len(text))
    return padding + text if is_number else text + padding
