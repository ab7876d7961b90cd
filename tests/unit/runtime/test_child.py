"""`kill` reaps processes, also those that end late."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from dcp_tensorizer._runtime import child


class Slow(subprocess.Popen[bytes]):
    """A process whose end is not visible before `may_end` is set."""

    may_end = False

    def wait(self, timeout: float | None = None) -> int:
        if not self.may_end:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return super().wait(timeout)

    def poll(self) -> int | None:
        return super().wait(10) if self.may_end else None


def started(kind: type[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    return kind([sys.executable, "-S", "-c", "import time; time.sleep(60)"])


def test_a_killed_process_that_has_not_ended_is_reaped_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """`kill` retains a process that has not ended, and a later call of `kill` reaps it."""
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
