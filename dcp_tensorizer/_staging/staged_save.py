"""Leases: which buffer a staged state dict is in, which save it belongs to, and when what may happen to either.

Three moments follow one another. The copies are complete, and the save may read them; the state is released, and
training may change it; the save is over, and the buffer may be written to again.
"""

from __future__ import annotations

import concurrent.futures
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from .._memory.shared_buffer import SharedBuffer
from .._memory.shared_mappings import SharedMappings
from ..errors import StagingError
from .tensor_copy import Copies

__all__ = ["StagedSave", "StagedStateDict", "StagingFuture"]

# The save's thread starts when `async_save` returns and takes its staged state dict first of all: a second is a
# thousand times what that takes, and bounds what a staged state dict that nobody saves can cost.
_CLAIM_SECONDS = 1.0
_STEP_SECONDS = 0.02  # between two looks at a thread, whose end wakes nobody


class StagedSave:
    """One staged state dict: the buffer it is in, and the save it belongs to.

    A save takes the staged state dict (`StagedStateDict`) first of all. DCP does so on the save's own thread, or in
    PROCESS mode when it pickles it there. The save is over when that thread has ended, or when nothing refers to the
    staged state dict and its tensors any more, whichever is first.
    """

    def __init__(self) -> None:
        self.buffer: SharedBuffer | None = None
        self.error: StagingError | None = None
        self.thread: threading.Thread | None = None
        self.shared: SharedMappings | None = None  # where to find what is written in place, in shared memory
        self.in_place = False  # some of it is written from training's own memory, so copies alone do not release it
        self.begun = False
        self.abandoned = False
        self.distributed = False
        self.started_at = 0.0  # time.time() when staging began
        self.stage_seconds = 0.0
        self._changed = threading.Condition()
        self._alive = True
        self._copies: Copies | None = None
        self._copied = threading.Event()
        self._twinned = threading.Event()
        self._queued = threading.Event()
        self._released = threading.Event()
        self._staging: weakref.ref[StagingFuture] | None = None
        self._taken: StagingFuture | None = None

    def attach(self, staged: StagedStateDict) -> None:
        """Ties the staged save to the life of the staged state dict."""
        weakref.finalize(staged, self._drop).atexit = False

    # --- copying ------------------------------------------------------------------------------------------------

    def start(self, copies: Copies, make_twin: Callable[[], object]) -> None:
        """Begins copies, whose place in training's streams is settled, and has the twin made meanwhile."""
        self._copies = copies

        def meanwhile() -> None:
            make_twin()
            self._twinned.set()

        copies.start(meanwhile)
        self._queued.set()

    def finish(self) -> None:
        """Waits for the copies that were started, if any were; then the state is released, unless it is `in_place`."""
        try:
            if self._copies is not None:
                self._copies.wait()
        except Exception as error:
            self.fail(error)
        self._copies = None
        self._twinned.set()
        self._queued.set()
        self._copied.set()
        if not self.in_place or self.error is not None:
            self.release()

    def fail(self, error: BaseException) -> None:
        """Keeps an error for the save, which raises it where DCP hands errors round."""
        # Without its traceback, whose frames hold the live tensors.
        said = (
            str(error)
            if isinstance(error, StagingError)
            else (f"the state dict could not be copied: {type(error).__name__}: {error}")
        )
        self.error = self.error or StagingError(said)

    def wait_twinned(self, timeout: float | None = None) -> bool:
        """Waits until the twin has been made, if it can be; False if it has not after ``timeout`` seconds."""
        return self._twinned.wait(timeout)

    def wait_copied(self) -> None:
        """Returns when the staged tensors have their values.

        Raises:
            StagingError: they could not be copied.
        """
        self._copied.wait()
        if self.error is not None:
            raise StagingError(str(self.error))  # one of its own: a traceback would keep this save's frames alive

    # --- training may change the state --------------------------------------------------------------------------

    def release(self) -> None:
        """Training may change the state from now on. Idempotent."""
        with self._changed:
            first = not self._released.is_set()
            self._released.set()
            staging = self._staging() if self._staging is not None else None
            self._taken = None
        if first and staging is not None:
            staging.complete()

    def watch(self, staging: StagingFuture) -> None:
        """Has a future completed on release."""
        with self._changed:
            self._staging = weakref.ref(staging)
            released = self._released.is_set()
        if released:
            staging.complete()

    def wait_released(self) -> None:
        """Returns when training may change the state: when it is released, or the save is over without."""
        while not self._released.wait(_STEP_SECONDS):
            if self.over():
                self.release()

    def hold_training(self) -> None:
        """Keeps what the calling thread does next from changing the state.

        Where all that is left is copies from a GPU, its streams wait for them and the thread does not.
        """
        self._queued.wait()
        copies = self._copies
        if copies is not None and not self.in_place:
            copies.hold()
        else:
            self.wait_released()

    # --- the save -----------------------------------------------------------------------------------------------

    def take(self) -> None:
        """Called when a save takes the staged state dict, on the save's thread."""
        with self._changed:
            if self.thread is None:
                self.thread = threading.current_thread()
                # From here on the save keeps the state dict alive, and this the future that tells of its release.
                self._taken = self._staging() if self._staging is not None else None
                if self._taken is not None:
                    self._taken.let_go()
                self._changed.notify_all()

    def over(self) -> bool:
        """Whether no save can use the staged state dict any more, and nothing is copied to its buffer."""
        if not self._copied.is_set():
            return False
        thread = self.thread
        if thread is not None and not thread.is_alive():
            return True
        # No save has a thread of its own here: nobody took the staged state dict, or the thread that asks did, or
        # one that lives on. Then it is over when nothing is left of it.
        return not self._alive and (self.buffer is None or not self.buffer.in_use)

    def wait_taken(self, timeout: float = _CLAIM_SECONDS) -> bool:
        """Waits until a save has taken it, or none can any more; False if neither happened in time.

        The time begins when there is something to take.
        """
        self.wait_twinned()
        with self._changed:
            return self._changed.wait_for(lambda: self.thread is not None or not self._alive, timeout)

    def wait_over(self, timeout: float | None = None) -> bool:
        """Waits until the save is over; False if it is not after ``timeout`` seconds."""
        while not self.over():
            thread = self.thread
            if thread is threading.current_thread():
                return True  # a save that ran on the thread that asks has returned
            if timeout is not None and timeout <= 0:
                return False
            if not self._copied.is_set():
                self._copied.wait(_STEP_SECONDS)
            elif thread is not None:
                thread.join(_STEP_SECONDS)
            else:
                self.wait_taken(_STEP_SECONDS)
            timeout = None if timeout is None else timeout - _STEP_SECONDS
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

    def __init__(
        self, content: Mapping[str, Any], staged_save: StagedSave, wait_turn: Callable[[StagedSave], None]
    ) -> None:
        super().__init__(content)
        self.staged_save = staged_save
        self._wait_turn = wait_turn
        staged_save.attach(self)

    def items(self) -> Any:
        self._take()
        return super().items()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        self._take()
        with suppress(StagingError):  # the copy of the writer that travels with it has the error
            self.staged_save.wait_copied()
        return dict, (list(super().items()),)

    def _take(self) -> None:
        if self.staged_save.thread is None:
            self.staged_save.take()
            self._wait_turn(self.staged_save)


class StagingFuture(concurrent.futures.Future[dict[str, Any]]):
    """What `stage` returns when it does not wait: done when training may change the state.

    Its result is there before that, its tensors possibly still without their values: so DCP's save plans while they
    are copied, and what training waits for may even be a part of the save.
    """

    def __init__(self, staged: StagedStateDict) -> None:
        super().__init__()
        self._staged: StagedStateDict | None = staged
        staged.staged_save.watch(self)

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """The staged state dict, until a save takes it; complete when `StagedSave.wait_copied` returns."""
        staged = self._staged
        if staged is None:
            return {}
        # Until copies are under way, a planner would keep their thread from the interpreter, and training waiting.
        if not staged.staged_save.wait_twinned(timeout):
            raise concurrent.futures.TimeoutError
        return staged

    def let_go(self) -> None:
        """Called when a save has taken the staged state dict."""
        self._staged = None

    def complete(self) -> None:
        """Training may change the state."""
        with suppress(concurrent.futures.InvalidStateError):  # cancelled, or done
            self.set_result({})
