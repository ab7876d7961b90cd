"""The command line's output: tables and lines on stdout, progress and errors on stderr.

With ``--json``, the result or the error is one JSON document on stdout.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import re
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

_PIPE_COLUMNS = 1 << 16  # so that lines that another program reads are never wrapped
_MAX_NAMED_RANKS = 4


class _Console(Console):
    """A rich console that raises `BrokenPipeError`: rich itself would exit with code 1."""

    def on_broken_pipe(self) -> None:
        raise


_console = functools.partial(_Console, highlight=False, markup=False, emoji=False, soft_wrap=True)


def fields(record: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass instance by their names in JSON documents (``nbytes`` is named ``bytes``)."""
    return {field.name.replace("nbytes", "bytes"): getattr(record, field.name) for field in dataclasses.fields(record)}


def print_json(value: Any) -> None:
    """Prints a JSON document: dataclass instances as objects, times in ISO format, NaN and infinities as null."""
    # ASCII, because file names may contain bytes that are not valid UTF-8 (surrogate escapes).
    sys.stdout.write(json.dumps(_plain(value), indent=2, allow_nan=False) + "\n")


def print_line(text: str, style: str = "") -> None:
    console = _console()
    console.print(Text(_folded(text, console), style=style))


def print_error(text: str, hint: str = "") -> None:
    console = _console(stderr=True)
    message = Text(_folded(f"error: {text}", console))
    message.stylize("bold red", 0, len("error:"))
    console.print(message)
    if hint:
        console.print(Text(_folded(hint, console), style="dim"))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> None:
    """Prints a table. Without rows, prints nothing. A ``>`` before a column's name right-aligns its numbers."""
    console = _console()
    cells = [[_visible(_cell(value)) for value in row] for row in rows]
    if not cells:
        return
    if title:
        console.print()
        console.print(Text(_visible(title), style="bold cyan"))
    head, *lines = lay_out(columns, cells, _width(console))
    console.print(Text(head, style="bold"))
    console.print(Text("\n".join(lines)))


@contextmanager
def progress(doing: str, *, hidden: bool) -> Iterator[Any]:
    """Shows a progress bar on a terminal; yields a function that takes the bytes done and the total.

    Ctrl-C interrupts the main thread immediately, and any other thread at its next call to that function.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = _console(stderr=True)
    description = TextColumn("{task.description}")
    columns = description, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    interrupted = threading.Event()

    def interrupt(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def update(done: int, total: int) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        bar.update(task, completed=done, total=total)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with Progress(*columns, console=console, transient=True, disable=hidden or not console.is_terminal) as bar:
            task = bar.add_task(doing, total=None)
            yield update
    except Exception as error:
        if interrupted.is_set():  # a library may have swallowed the KeyboardInterrupt
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, before)


def count(number: int, noun: str) -> str:
    plural = "directories" if noun == "directory" else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def moment(time: datetime | None) -> str:
    with suppress(OverflowError):  # late in the year 9999 UTC, the local year may be 10000
        return "-" if time is None else time.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    return "-"


def shape(extents: Sequence[int]) -> str:
    return " x ".join(map(str, extents)) or "scalar"


def ranks(numbers: Iterable[int | None]) -> str:
    known = sorted({number for number in numbers if number is not None})
    if not known:
        return "-"
    if len(known) > 1 and known[-1] - known[0] == len(known) - 1:
        return f"{known[0]}-{known[-1]}"
    return ", ".join(map(str, known[:_MAX_NAMED_RANKS])) + (", ..." if len(known) > _MAX_NAMED_RANKS else "")


def _width(console: Console) -> int:
    return console.width if console.is_terminal else _PIPE_COLUMNS


def _folded(text: str, console: Console) -> str:
    return "\n".join(folded(_visible(text), _width(console)))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if isinstance(value, float) else str(value)


def _visible(text: str) -> str:
    """Escapes unprintable characters: a key from a checkpoint could contain terminal control sequences."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, datetime):
        return value.isoformat(timespec="milliseconds")
    if dataclasses.is_dataclass(value):
        value = fields(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


# --- tables that fit a terminal ---------------------------------------------------------------------------------------
#
# Names and numbers are never wrapped. Other cells wrap after a dot, a slash or a space.

_GAP = "  "
_NAME = 12  # the minimum width of the names in a table that is too wide
_WORD = re.compile(r"\S*\s*")
_PIECE = re.compile(r"[^\s./]*[\s./]*")  # a piece of a key or a path


def folded(text: str, room: int, pieces: re.Pattern[str] = _WORD) -> list[str]:
    """Wraps a text between pieces into lines of at most ``room`` columns. Never splits a piece, even a longer one."""
    if cell_len(text) <= room:
        return [text]
    lines = [""]
    for piece in filter(None, pieces.findall(text)):
        if lines[-1] and cell_len((lines[-1] + piece).rstrip()) > room:
            lines.append("")
        lines[-1] += piece
    return [line.rstrip() for line in lines]


def lay_out(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Yields the lines of a table, the header first. A line exceeds ``width`` only if wrapping cells is not enough.

    The first cell of a row is its name, which users copy: a name that is too long gets its own line above the other
    cells. Columns whose name begins with ``>`` hold numbers, which are not wrapped.
    """
    heads = [name.lstrip(">") for name in columns]
    numeric = [name.startswith(">") for name in columns]
    cells = list(zip(*rows, strict=True)) if rows else [() for _ in columns]
    widths = [max(map(cell_len, [head, *column])) for head, column in zip(heads, cells, strict=True)]
    if sum(widths) + len(_GAP) * (len(widths) - 1) > width:
        least = [
            whole
            if is_number
            else min(whole, _NAME)
            if number == 0
            else max(cell_len(piece.rstrip()) for cell in (head, *column) for piece in _PIECE.findall(cell))
            for number, (whole, is_number, head, column) in enumerate(zip(widths, numeric, heads, cells, strict=True))
        ]
        while sum(widths) + len(_GAP) * (len(widths) - 1) > width:
            able = [number for number, whole in enumerate(widths) if whole > least[number]]
            if not able:
                break
            widths[max(able, key=widths.__getitem__)] -= 1
    for row in (heads, *rows):
        if not numeric[0] and cell_len(row[0]) > widths[0]:
            yield row[0]
            if not any(row[1:]):
                continue
            row = ["", *row[1:]]
        broken = [folded(cell, room, _PIECE) for cell, room in zip(row, widths, strict=True)]
        for line in itertools.zip_longest(*broken, fillvalue=""):
            spaces = [" " * (width - cell_len(text)) for text, width in zip(line, widths, strict=True)]
            padded = (
                space + text if is_number else text + space
                for text, space, is_number in zip(line, spaces, numeric, strict=True)
            )
            yield _GAP.join(padded).rstrip()
