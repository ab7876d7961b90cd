"""The command line's output: tables that fit a terminal, and are never cut in a pipe."""

from __future__ import annotations

import functools
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

__all__ = ["Screen", "count", "size"]

_PIPE_COLUMNS = 1 << 16  # nothing is cut or folded where a program reads
_MAX_NAMED_RANKS = 4


class Screen:
    """Where a command's result goes: tables, or one JSON document, on stdout; what it is doing on stderr."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        plain = functools.partial(Console, highlight=False, markup=False, emoji=False)
        self._out = plain() if plain().is_terminal else plain(width=_PIPE_COLUMNS)
        self._err = plain(stderr=True)

    def json(self, value: Any) -> None:
        # In ASCII: names of files may be no text that can be encoded.
        sys.stdout.write(json.dumps(_plain(value), indent=2, allow_nan=False) + "\n")

    def line(self, text: str, style: str = "") -> None:
        self._out.print(Text(_visible(text), style=style), soft_wrap=True)

    def error(self, text: str) -> None:
        self._err.print(Text.assemble(("error: ", "bold red"), _visible(text)), soft_wrap=True)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> None:
        """Prints a table; a column whose name begins with ``>`` is of numbers."""
        table = Table(box=None, pad_edge=False, header_style="bold", title_style="bold", title_justify="left")
        for name in columns:
            is_number = name.startswith(">")
            justify: Literal["left", "right"] = "right" if is_number else "left"
            table.add_column(name.lstrip(">"), justify=justify, no_wrap=is_number, overflow="fold")
        for row in rows:
            table.add_row(*(Text(_visible(_cell(value))) for value in row))
        if table.row_count:
            if title:
                self._out.print()
                self._out.print(Text(_visible(title), style="bold cyan"), soft_wrap=True)
            self._out.print(table)

    @contextmanager
    def progress(self, doing: str) -> Iterator[Any]:
        """A bar, on a terminal; gives a function to be called with what is done and what there is to do."""
        description = TextColumn("{task.description}")
        columns = description, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
        bar = Progress(*columns, console=self._err, transient=True, disable=not self._err.is_terminal or self.as_json)
        with bar:
            task = bar.add_task(doing, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


def size(nbytes: int) -> str:
    """Bytes, as disks are sold: ``1.5 GB``."""
    if nbytes < 1000:
        return f"{nbytes} B"
    value, units = nbytes / 1000, ["kB", "MB", "GB", "TB", "PB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {units[0]}"


def count(number: int, noun: str) -> str:
    """``1 tensor``, ``2 tensors``."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def moment(seconds: float | None) -> str:
    """A time, local and to the second."""
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def shape(extents: Sequence[int]) -> str:
    """``4 x 3``; of a tensor without dimensions ``scalar``."""
    return " x ".join(map(str, extents)) or "scalar"


def ranks(numbers: Iterable[int | None]) -> str:
    """``0-3``, or ``0, 2``."""
    known = sorted({number for number in numbers if number is not None})
    if not known:
        return "-"
    if len(known) > 1 and known[-1] - known[0] == len(known) - 1:
        return f"{known[0]}-{known[-1]}"
    return ", ".join(map(str, known[:_MAX_NAMED_RANKS])) + (", ..." if len(known) > _MAX_NAMED_RANKS else "")


def _cell(value: object) -> str:
    """A count in full, a difference in three digits, which are enough to judge it by."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if isinstance(value, float) else str(value)


def _visible(text: str) -> str:
    """Escapes what is not printable: keys come from a checkpoint, and could control the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def _plain(value: Any) -> Any:
    """JSON has no numbers for infinities and NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
