"""Counts the saves that were not committed, so that a failure is reported even if its future is dropped."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

import torch.distributed as dist

from .._threads import is_running
from ..errors import WriteError, describe

__all__ = ["FailureCounter"]

logger = logging.getLogger("dcp_tensorizer")
_UNTOLD = "it was interrupted, or another rank or a collective failed: whoever saved has got the error"
_END_SECONDS = 5.0  # for the thread of a save that is over, at the end of the program
_DESTROYED = (
    "the process group was destroyed before it was over: close the writer or the manager, or leave its `with` block, "
    "before destroy_process_group()"
)


@dataclass(slots=True)
class _Save:
    path: str
    """Empty if nobody has given one."""
    error: str = _UNTOLD
    is_coordinator: bool | None = None
    """None before DCP has said so."""
    is_distributed: bool = field(default_factory=lambda: dist.is_available() and dist.is_initialized())
    """There was a process group when it began."""

    @property
    def cause(self) -> str:
        """Why it failed, as far as that is known here."""
        is_destroyed = self.is_distributed and not dist.is_initialized()
        return _DESTROYED if self.error is _UNTOLD and is_destroyed else self.error

    @property
    def name(self) -> str:
        return f"the save to {self.path}" if self.path else "a save without a path"


class FailureCounter:
    """Counts failed saves in a row, of all writers of a process. Frameworks make a writer for every save.

    A save belongs to the thread that it runs on. It has failed when it is over and `committed` was not called. Only
    the coordinator can know; on other ranks nothing is counted.
    """

    def __init__(self) -> None:
        self._saves: dict[threading.Thread, _Save] = {}
        self._is_coordinator: bool | None = None
        self._failures = 0
        self._last_error = ""
        self._last_committed = "none"

    def begin(self, path: str) -> None:
        """A save begins on the calling thread, so the one before is over."""
        self.end()
        self._saves[threading.current_thread()] = _Save(path)

    def set_coordinator(self, is_coordinator: bool) -> None:
        """Says whether this rank is the coordinator of the calling thread's save, and of later ones that fail early."""
        self._is_coordinator = is_coordinator
        save = self._saves.get(threading.current_thread())
        if save is not None:
            save.is_coordinator = is_coordinator

    def failed(self, error: BaseException) -> None:
        """The calling thread's save fails on this rank."""
        save = self._saves.get(threading.current_thread())
        if save is not None:
            save.error = describe(error)
            logger.error("%s failed: %s", save.name, save.error)

    def committed(self) -> None:
        """The calling thread's save is the checkpoint at its path now."""
        save = self._saves.pop(threading.current_thread(), None)
        if save is not None:
            self._last_committed = save.path
        self._failures = 0

    def end(self) -> None:
        """Saves of the calling thread, and of threads that have ended, are over: unless committed, they failed."""
        for thread in list(self._saves):
            if thread is threading.current_thread() or not is_running(thread):
                save = self._saves.pop(thread, None)
                if save is not None and self._coordinates(save):
                    self._failures += 1
                    self._last_error = save.cause
                    logger.error("%s was not committed: %s", save.name, save.cause)

    def end_at_exit(self) -> None:
        """Says at the end of the program which saves in the background were not committed, if nothing has said why."""
        for thread, save in list(self._saves.items()):
            if thread is threading.current_thread():
                continue
            thread.join(_END_SECONDS)
            if not is_running(thread) and save.error is _UNTOLD and self._coordinates(save):
                logger.error("%s was not committed: %s", save.name, save.cause)

    def check(self, limit: int | None) -> None:
        """Raises `WriteError` when that many saves in a row have failed; None is no limit."""
        if limit is not None and self._failures >= limit:
            raise WriteError(
                f"{self._failures} saves in a row were not committed. The last error was: {self._last_error}. The last "
                f"checkpoint that was committed: {self._last_committed}. Mend the cause; "
                f"SaveLimits(max_consecutive_failures=None) trains on without checkpoints."
            )

    def _coordinates(self, save: _Save) -> bool:
        is_coordinator = self._is_coordinator if save.is_coordinator is None else save.is_coordinator
        if is_coordinator is not None:
            return is_coordinator
        # A save that failed before DCP named its coordinator: that is rank 0.
        return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
