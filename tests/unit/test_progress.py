"""`ProgressLine`."""

from __future__ import annotations

import io
import re

from dcp_tensorizer.progress import ProgressLine


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        return self.getvalue().split("\r\033[K")[1:]


def test_the_first_line_is_there_before_any_byte() -> None:
    """It shows the size of the load and a rate. The line is cleared at the end."""
    terminal = Terminal()
    line = ProgressLine(stream=terminal)
    line(0, 24_000_000_000)
    assert terminal.lines() == ["loading: 0 B of 24.0 GB, 0 B/s"]
    line(24_000_000_000, 24_000_000_000)
    assert terminal.lines() == ["loading: 0 B of 24.0 GB, 0 B/s", ""]


def test_a_line_has_bytes_rate_and_time() -> None:
    """Also the first line of a load that does not report before its first bytes."""
    terminal = Terminal()
    ProgressLine("reading", terminal)(1_000_000_000, 24_000_000_000)
    assert re.fullmatch(r"reading: 1\.00 GB of 24\.0 GB, \S+ [kMGTP]?B/s, \d+ s left", terminal.lines()[0])


def test_lines_are_not_written_faster_than_people_read() -> None:
    """Calls within a tenth of a second write nothing, except the last one. The next load begins again."""
    terminal = Terminal()
    line = ProgressLine(stream=terminal)
    for _ in range(2):
        for done in range(1000):
            line(done, 1000)
        line(1000, 1000)
    lines = terminal.lines()
    assert lines.count("loading: 0 B of 1.00 kB, 0 B/s") == 2
    assert lines[-1] == ""
    assert lines.count("") == 2
    assert len(lines) < 100


def test_only_a_terminal_is_written_to() -> None:
    """Another stream, such as the log file of a scheduler, gets nothing."""
    file = io.StringIO()
    line = ProgressLine(stream=file)
    line(0, 10)
    line(10, 10)
    assert file.getvalue() == ""
