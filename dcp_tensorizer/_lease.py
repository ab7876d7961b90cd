"""Leases: which buffer a staged state dict is in, which save it belongs to, and when that save is over."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ._arena import Arena
from .errors import StagingError

__all__ = ["Lease", "StagedStateDict"]

# The save's thread starts when `async_save` returns and takes its staged state dict first of all: a second is a
# thousand times what that takes, and bounds what a staged state dict that nobody saves can cost.
_CLAIM_SECONDS = 1.0


class Lease:
    """One staged state dict: the buffer it is in, and the save it belongs to.

    A save has its lease when it takes the staged state dict (`StagedStateDict`), which DCP does first of all on the
    save's own thread, or in PROCESS mode when it pickles it there. The save is over when that thread has ended, or
    when nothing refers to the staged state dict and its tensors any more, whichever is first.
    """

    def __init__(self) -> None:
        self.arena: Arena | None = None
        self.error: StagingError | None = None
        self.thread: threading.Thread | None = None
        self.begun = False
        self.abandoned = False
        self.distributed = False
        self.stage_seconds = 0.0
        self._changed = threading.Condition()
        self._alive = True

    def attach(self, staged: StagedStateDict) -> None:
        """Ties the lease to the life of the staged state dict."""
        weakref.finalize(staged, self._drop).atexit = False

    def claim(self) -> None:
        """Called when a save takes the staged state dict, on the save's thread."""
        with self._changed:
            if self.thread is None:
                self.thread = threading.current_thread()
                self._changed.notify_all()

    def over(self) -> bool:
        """Whether no save can use the staged state dict any more."""
        thread = self.thread
        if thread is not None and not thread.is_alive():
            return True
        # No save has a thread of its own here: nobody took the staged state dict, or the thread that asks did, or
        # one that lives on. Then it is over when nothing is left of it.
        return not self._alive and (self.arena is None or not self.arena.in_use)

    def wait_claimed(self, timeout: float = _CLAIM_SECONDS) -> bool:
        """Waits until a save has taken it, or none can any more; False if neither happened in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self.thread is not None or not self._alive, timeout)

    def wait_over(self, timeout: float | None = None) -> bool:
        """Waits until the save is over; False if it is not after ``timeout`` seconds."""
        step = 0.02
        while not self.over():
            thread = self.thread
            if thread is threading.current_thread():
                return True  # a save that ran on the thread that asks has returned
            if timeout is not None and timeout <= 0:
                return False
            if thread is not None:
                thread.join(step)
            else:
                self.wait_claimed(step)
            timeout = None if timeout is None else timeout - step
        return True

    def _drop(self) -> None:
        with self._changed:
            self._alive = False
            self._changed.notify_all()


class StagedStateDict(dict[str, Any]):
    """A staged state dict that knows which thread takes it to save it.

    ``dcp.save`` goes through ``items()`` before anything else, in particular before any collective, and PROCESS mode
    pickles it; there the save waits until the ones staged before are over. So saves run one at a time, in the order
    in which they were staged, on every rank the same.
    """

    def __init__(self, content: Mapping[str, Any], lease: Lease, wait_turn: Callable[[Lease], None]) -> None:
        super().__init__(content)
        self.lease = lease
        self._wait_turn = wait_turn
        lease.attach(self)

    def items(self) -> Any:
        self._take()
        return super().items()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        self._take()
        return dict, (list(super().items()),)

    def _take(self) -> None:
        if self.lease.thread is None:
            self.lease.claim()
            self._wait_turn(self.lease)
