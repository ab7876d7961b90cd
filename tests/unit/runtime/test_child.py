"""Processes that are killed are waited for, also those that take their time."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from dcp_tensorizer._runtime import child


class Slow(subprocess.Popen[bytes]):
    """A process that nobody sees end before it is told to."""

    may_end = False

    def wait(self, timeout: float | None = None) -> int:
        if not self.may_end:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return super().wait(timeout)

    def poll(self) -> int | None:
        return super().wait(10) if self.may_end else None


def started(kind: type[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    return kind([sys.executable, "-S", "-c", "import time; time.sleep(60)"])


def test_what_does_not_end_in_time_is_waited_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the next one is killed; until then it is kept, for Python warns of one that is dropped."""
    monkeypatch.setattr(child, "_unended", [])
    slow = started(Slow)
    assert child.kill(slow) is None
    assert child._unended == [slow]
    assert child.kill(started(subprocess.Popen)) == -signal.SIGKILL
    assert child._unended == [slow]
    Slow.may_end = True
    assert child.kill(started(subprocess.Popen)) == -signal.SIGKILL
    assert child._unended == []
    assert slow.returncode == -signal.SIGKILL
