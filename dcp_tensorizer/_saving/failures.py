"""Counts failed saves in a row, so that their failures are reported even if the futures of the saves are dropped."""

from __future__ import annotations

import logging
import re
import threading
from dataclasses import dataclass, field

from .._runtime.ranks import is_distributed, rank_of_job
from .._runtime.threads import is_running
from ..errors import WriteError, describe

logger = logging.getLogger("dcp_tensorizer")

_UNKNOWN = "the save was interrupted, or another rank or a collective failed: see the error that the save's caller got"
_END_SECONDS = 5.0  # at the end of the program, the timeout for the thread of a save that is over
_DESTROYED = (
    "the process group was destroyed during the save. Close the writer or the manager, or leave its `with` block, "
    "before destroy_process_group()"
)


@dataclass(slots=True)
class _Outcome:
    path: str
    """Empty for a save without a path."""
    group: str | None
    """The name of the save's process group."""
    error: str = _UNKNOWN
    is_coordinator: bool | None = None
    """None before DCP has set it."""
    was_distributed: bool = field(default_factory=is_distributed)
    """A process group existed when the save began."""

    @property
    def cause(self) -> str:
        is_destroyed = self.was_distributed and not is_distributed()
        return _DESTROYED if self.error is _UNKNOWN and is_destroyed else self.error

    @property
    def name(self) -> str:
        return f"the save to {self.path}" if self.path else "a save without a path"


class FailuresInARow:
    def __init__(self) -> None:
        self.count = self._reported = 0
        self.last_error = ""
        self.last_committed = "none"

    def failed(self, error: str) -> None:
        self.count += 1
        self.last_error = error

    def committed(self, path: str) -> None:
        self.count = self._reported = 0
        self.last_committed = path

    @property
    def unreported(self) -> int:
        """The number of failed saves in a row; 0 if `check` has raised the error and no save has failed since."""
        return 0 if self.count == self._reported else self.count

    def refusal(self, limit: int | None, count: int | None = None) -> WriteError | None:
        """Returns the error that refuses the next save, if ``limit`` saves in a row have failed, otherwise None.

        If ``limit`` is None, returns None. ``count`` is another rank's `unreported`, to check instead of this rank's.
        """
        count = self.unreported if count is None else count
        if limit is None or count < limit:
            return None
        saves = "the last save was" if count == 1 else f"{count} saves in a row were"
        cause = f"The last error was: {self.last_error}. " if self.last_error else ""
        return WriteError(
            f"{saves} not committed. {cause}The last checkpoint that was committed: {self.last_committed}. Fix the "
            f"cause before the next save, which is attempted, or pass SaveLimits(max_consecutive_failures=None) to "
            f"keep training without checkpoints."
        )

    def check(self, limit: int | None, count: int | None = None) -> None:
        """Raises the error of `refusal`, if there is one, once: the save after the refused one is attempted."""
        if (refusal := self.refusal(limit, count)) is not None:
            self._reported = self.count if count is None else count
            raise refusal


class FailureCounter:
    """Counter of failed saves in a row, of all writers of an engine, because frameworks make a writer for every save.

    Counts are separate for each process group, and for paths that differ in more than numbers. A save belongs to its
    thread. A save has failed if it is over and `committed` was not called. Only the coordinator knows whether a
    save was committed, so other ranks count nothing.
    """

    def __init__(self) -> None:
        self._saves: dict[threading.Thread, _Outcome] = {}
        self._is_coordinator: dict[str | None, bool] = {}
        self._in_a_row: dict[tuple[str | None, str], FailuresInARow] = {}
        self._last_committed: str | None = None

    def begin(self, path: str, group: str | None = None) -> None:
        self.end()
        self._saves[threading.current_thread()] = _Outcome(path, group)

    def set_coordinator(self, is_coordinator: bool) -> None:
        """Sets whether this rank is the coordinator of the calling thread's save.

        The value also applies to later saves of the same process group that fail before DCP names the coordinator.
        """
        save = self._saves.get(threading.current_thread())
        if save is not None:
            save.is_coordinator = self._is_coordinator[save.group] = is_coordinator

    def failed(self, error: BaseException) -> None:
        save = self._saves.get(threading.current_thread())
        if save is not None:
            save.error = describe(error)
            logger.error("%s failed: %s", save.name, save.error)

    def committed(self) -> None:
        save = self._saves.pop(threading.current_thread(), None)
        if save is not None:
            self._last_committed = save.path
            self._in_a_row.pop(_counted_as(save.path, save.group), None)

    def end(self) -> None:
        """Ends the saves of the calling thread and of ended threads. Saves that are not committed count as failed."""
        for thread in list(self._saves):
            if thread is threading.current_thread() or not is_running(thread):
                save = self._saves.pop(thread, None)
                if save is not None and self._coordinates(save):
                    self._in_a_row.setdefault(_counted_as(save.path, save.group), FailuresInARow()).failed(save.cause)
                    if save.error is _UNKNOWN:  # otherwise `failed` has logged it
                        logger.error("%s was not committed: %s", save.name, save.cause)

    def end_at_exit(self) -> None:
        """Logs, at the end of the program, uncommitted background saves whose errors are not logged yet."""
        for thread, save in list(self._saves.items()):
            if thread is threading.current_thread():
                continue
            thread.join(_END_SECONDS)
            if not is_running(thread) and save.error is _UNKNOWN and self._coordinates(save):
                logger.error("%s was not committed: %s", save.name, save.cause)

    def in_a_row(self, path: str, group: str | None = None) -> FailuresInARow:
        """Returns the failed saves of a process group to paths like ``path``."""
        in_a_row = self._in_a_row.get(_counted_as(path, group)) or FailuresInARow()
        in_a_row.last_committed = self._last_committed or "none"
        return in_a_row

    def _coordinates(self, save: _Outcome) -> bool:
        if save.is_coordinator is not None:
            return save.is_coordinator
        # If a save failed before DCP named its coordinator, the coordinator of the group's earlier saves, or else rank
        # 0, counts the failure.
        return self._is_coordinator.get(save.group, rank_of_job() == 0)


def _counted_as(path: str, group: str | None) -> tuple[str | None, str]:
    """Returns the key under which failures are counted. It ignores numbers, because many paths contain the step."""
    return group, re.sub(r"\d+", "#", path)
