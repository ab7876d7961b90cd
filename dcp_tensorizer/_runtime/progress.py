"""Reports the progress of loads and saves to callbacks of users and to the log."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("dcp_tensorizer")

_SECONDS = 1.0


class TransferProgress:
    """A reporter of the progress of a load or a save to a callback, and every ``log_seconds`` to the log.

    ``doing`` names the work on ``path`` in the log. An exception of the callback is logged, and ends the calls.
    """

    def __init__(
        self, doing: str, path: str, callback: Callable[[int, int], object] | None, log_seconds: float = 10.0
    ) -> None:
        self._doing = f"{doing} {path}"
        self._callback = callback
        self._log_seconds = log_seconds
        self._began = self._logged_at = time.perf_counter()

    def __call__(self, done: int, total: int) -> None:
        """Reports the bytes done and the bytes in total. Not thread-safe."""
        if self._callback is not None:
            try:
                self._callback(done, total)
            except Exception:
                self._callback = None
                logger.exception("on_progress failed while %s, which continues", self._doing)
        now = time.perf_counter()
        if now - self._logged_at >= self._log_seconds:
            self._logged_at = now
            rate = done / 1e9 / max(now - self._began, 1e-9)
            logger.info("%s: %.1f of %.1f GB, %.2f GB/s", self._doing, done / 1e9, total / 1e9, rate)


@contextmanager
def each_second(do: Callable[[], object]) -> Iterator[None]:
    """Calls a function about once a second while a block runs, in a new thread if one can be started."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(_SECONDS):
            do()

    thread = threading.Thread(target=run, name="progress", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is exiting, or the thread limit is reached: run the block without calls
        yield
        return
    try:
        yield
    finally:
        is_over.set()
        thread.join()
