"""The thread that flushes, in the writer process, and only while no save needs that.

It has the priority of the process. With a lower one it would flush nothing on busy cores; and where it holds the
interpreter while it waits for a core, a save that comes meanwhile would wait, too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from .._forks import free_in_child
from .flusher import Flusher
from .target import Target

__all__ = ["FlushThread"]

_BUSY_SECONDS = 0.05
_TROUBLE_SECONDS = 10.0


class FlushThread:
    """Flushes local folders, one after the other, as long as there is something to flush.

    Args:
        is_busy: Whether a save is under way, which has priority.
    """

    def __init__(self, is_busy: Callable[[], bool] = lambda: False) -> None:
        self._is_busy = is_busy
        self._changed = free_in_child(threading.Condition())
        self._requests = 0
        self._flushers: dict[tuple[str, str], Flusher] = {}
        self._thread: threading.Thread | None = None

    def add(self, target: Target) -> None:
        """Has a folder flushed: what is there now, and what comes before that is done. With the newest options."""
        with self._changed:
            self._requests += 1
            flusher = self._flushers.get((target.local, target.name))
            if flusher is None or flusher.target != target:
                self._flushers[target.local, target.name] = Flusher(target, self._gate)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="flush", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                requests, flushers = self._requests, dict(self._flushers)
            waits = {key: _step(flusher) for key, flusher in flushers.items()}
            with self._changed:
                if self._requests == requests:  # or else there may be something new to do
                    self._flushers = {key: flusher for key, flusher in flushers.items() if waits[key] is not None}
                    self._changed.wait(min((wait for wait in waits.values() if wait is not None), default=None))

    def _gate(self) -> None:
        while self._is_busy():
            time.sleep(_BUSY_SECONDS)


def _step(flusher: Flusher) -> float | None:
    try:
        return flusher.step()
    except Exception:  # the local folder cannot be read: perhaps later
        return _TROUBLE_SECONDS
