"""The life of a staged state dict: which buffer it is in, which save it belongs to, and when what may happen to either.

Two things go on side by side. The copying goes through the states of `Progress`. The save takes the staged state dict
at some moment of that, and ends. The buffer may be written to again when both are over.
"""

from __future__ import annotations

import concurrent.futures
import enum
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from .._runtime.forks import Finalizer, free_in_child
from .._runtime.process_context import ProcessContext
from .._runtime.threads import NEVER, Deadline, is_running
from .._runtime.torch_compat import group_of_save
from ..errors import StagingError
from .shared_mappings import SharedTensors
from .shared_memory import SharedBuffer
from .tensor_copy import Copies

_STEP_SECONDS = 0.02  # between two looks at a save
_END_SECONDS = 0.005  # and at its thread, whose end sends no notice


class StagingState(enum.IntEnum):
    """Stages of copying. They follow one another in this order; an error skips some of them."""

    STAGING = 0
    """There is no staged state dict yet."""
    BUILT = 1
    """The staged state dict is there. Its tensors may still be without their values."""
    QUEUED = 2
    """Host memory is copied. What is left, if anything, is copies in the devices' queues."""
    COPIED = 3
    """The staged tensors have their values, and the save may read them."""
    RELEASED = 4
    """Training may change the state: nothing reads it any more."""


class StagedSave:
    """One staged state dict: the buffer it is in, and the save it belongs to.

    A save takes the staged state dict (`StagedStateDict`) first of all: on its own thread, or in PROCESS mode when DCP
    pickles it there. It is over when that thread has ended, or when nothing refers to the staged state dict and its
    tensors any more.

    Args:
        owner: The stager that stages it.
        keeps_buffer: The buffer is kept for later saves.
        is_kept: See `SharedBuffer.is_kept`.

    Attributes:
        owners: The stager that has staged it, and that of the writer that saves it, if that is another one.
        staged_on: The thread that has staged it.
        group: The name of the process group of its save; None if there is no knowing it.
        buffer: Where the staged tensors are. None before there is one, and after the stager has taken it back.
        copies: Those that are under way.
        error: Why there is nothing to save. The save raises it.
        shared: The tensors that are written from training's own memory, until the state is released. None if everything
            is copied: then the end of the copies releases the state.
        thread: The save's thread, from the moment when it takes the staged state dict.
        begun: The save's first hook has been called.
        abandoned: A later save has waited for this one to be taken, in vain. None waits for it again.
        distributed: It was staged by one of several ranks.
        stager: The thread that copies.
        context: What the process had when staging began. Relative paths of the save are relative to its directory.
        times: When it was staged.
        record: The manager's record for the checkpoint's index; None without a manager.
        files: Takes what a rank has written for the save; None if they are not needed.
        omitted: The keys of tensors that are not staged, because other ranks write them.
        on_written: Called when the save has written it, with the digests of what it wrote, by offset and size in the
            buffer. Empty where files have other digests: those of encrypted tensors.
    """

    def __init__(self, owner: object = None, *, keeps_buffer: bool = True, is_kept: bool = False) -> None:
        self.owners: tuple[object, ...] = (owner,)
        self.keeps_buffer = keeps_buffer
        self.is_kept = is_kept
        self.staged_on = threading.current_thread()
        self.group = name_of_group()
        self.buffer: SharedBuffer | None = None
        self.copies: Copies | None = None
        self.error: StagingError | None = None
        self.shared: SharedTensors | None = None
        self.thread: threading.Thread | None = None
        self.begun = False
        self.abandoned = False
        self.distributed = False
        self.stager = threading.current_thread()
        self.context = ProcessContext.here()
        self.times = StageTimes()
        self.record: Any = None
        self.files: Any = None
        self.omitted: frozenset[str] = frozenset()
        self.on_written: Callable[[Mapping[tuple[int, int], bytes]], object] | None = None
        # All waiting is on this condition. Its lock may be taken twice by one thread: a signal's handler that closes
        # the writer, and the collector that drops a staged state dict, may interrupt whoever holds it.
        self._changed = free_in_child(threading.Condition())
        self._progress = StagingState.STAGING
        self._dropped = False  # nothing refers to the staged state dict any more
        self._future: Callable[[], StagingFuture | None] = _no_future

    def attach(self, staged: StagedStateDict) -> None:
        """Ties the staged save to the life of the staged state dict."""
        Finalizer(staged, self._drop).atexit = False

    def _drop(self) -> None:
        with self._changed:
            self._dropped = True
            self._changed.notify_all()

    # --- copying ------------------------------------------------------------------------------------------------

    def reach(self, progress: StagingState) -> None:
        """The copying has come so far. It never goes back."""
        with self._changed:
            self._progress = max(self._progress, progress)
            self._changed.notify_all()

    def finish(self) -> None:
        """Waits for the copies that were begun, if any were. Then the state is released, unless some is shared."""
        try:
            if self.copies is not None:
                self.copies.wait()
        except Exception as error:
            self.fail(error)
        self.copies = None
        with self._changed:
            still_read = self.shared is not None and self.error is None
            self.reach(StagingState.COPIED)
        if not still_read:
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

    @property
    def is_interrupted(self) -> bool:
        """Returns whether the calling thread copies, and so goes on with that only when it is done with what it does
        now.

        It is in a signal's handler then.
        """
        return self._progress < StagingState.COPIED and self.stager is threading.current_thread()

    def wait_built(self, timeout: float | None = None) -> bool:
        """Waits until the staged state dict is there, if it can be; False if it is not after ``timeout`` seconds."""
        return self._wait_for(StagingState.BUILT, timeout)

    def wait_copied(self) -> None:
        """Returns when the staged tensors have their values.

        Raises:
            StagingError: they could not be copied.
        """
        self._wait_for(StagingState.COPIED)
        if self.error is not None:
            raise StagingError(str(self.error))  # one of its own: a traceback would keep this save's frames alive

    def wait_unused(self, deadline: Deadline) -> bool:
        """Waits until nothing is copied to the buffer; False if that is not so in time."""
        return not self.is_interrupted and self._wait_for(StagingState.COPIED, deadline.left)

    def _wait_for(self, progress: StagingState, timeout: float | None = None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._progress >= progress, timeout)

    # --- training may change the state --------------------------------------------------------------------------

    def release(self) -> None:
        """The save reads nothing from training's own memory any more. Idempotent.

        Training may change the state from now on, or, if copies are still under way, when they are made.
        """
        with self._changed:
            self.shared = None
            if self._progress != StagingState.COPIED:
                return
            self.reach(StagingState.RELEASED)
            future = self._future()
            if self.thread is not None:
                self._future = _no_future
        if future is not None:
            future.complete()

    def watch(self, future: StagingFuture) -> None:
        """Completes a future on release."""
        with self._changed:
            self._future = weakref.ref(future)
            released = self._progress == StagingState.RELEASED
        if released:
            future.complete()

    def wait_released(self) -> None:
        """Returns when training may change the state: when it is released, or the save is over without."""
        while not self._wait_for(StagingState.RELEASED, _STEP_SECONDS):
            if self.over():
                self.release()

    def hold_training(self) -> None:
        """Keeps what the calling thread does next from changing the state.

        Where all that is left is copies from a GPU, its streams wait for them and the thread does not.
        """
        self._wait_for(StagingState.QUEUED)
        copies = self.copies
        if copies is not None and self.shared is None:
            copies.hold()
        else:
            self.wait_released()

    # --- the save -----------------------------------------------------------------------------------------------

    def take(self) -> None:
        """Called when a save takes the staged state dict, on the save's thread."""
        with self._changed:
            if self.thread is not None:
                return
            self.thread = threading.current_thread()
            future = self._future()
            if future is not None:
                future.let_go()
                if self._progress < StagingState.RELEASED:
                    # The save keeps the staged state dict alive from here on, and this the future, to complete it.
                    self._future = lambda: future
            self._changed.notify_all()

    def over(self) -> bool:
        """Returns whether no save can use the staged state dict any more, and nothing is copied to its buffer."""
        if self._progress < StagingState.COPIED:
            return False
        thread = self.thread
        if thread is not None and not is_running(thread):
            return True
        # No save has a thread of its own here: nobody took the staged state dict, or the thread that asks did, or
        # one that lives on. Then it is over when nothing is left of it.
        return self._dropped and (self.buffer is None or not self.buffer.in_use)

    def wait_taken(self, timeout: float) -> bool:
        """Waits until a save has taken it, or none can any more; False if neither happened in time.

        The time begins when there is something to take.
        """
        self.wait_built()
        with self._changed:
            return self._changed.wait_for(lambda: self.thread is not None or self._dropped, timeout)

    def wait_over(self, deadline: Deadline = NEVER) -> bool:
        """Waits until the save is over; False if it is not in time."""
        while not self.over():
            thread = self.thread
            if thread is threading.current_thread():
                return True  # a save that ran on the thread that asks has returned
            if deadline.left == 0.0:
                return False
            if self._progress < StagingState.COPIED:
                self._wait_for(StagingState.COPIED, deadline.within(_STEP_SECONDS))
            elif thread is not None:
                with self._changed:  # not by `join`: see `is_running`
                    self._changed.wait(deadline.within(_END_SECONDS))
            else:
                self.wait_taken(deadline.within(_STEP_SECONDS))
        return True


def name_of_group() -> str | None:
    """The name of the process group of the save on this thread, which lives as long as it would anyway."""
    group = group_of_save()
    return None if group is None else group.group_name


def _no_future() -> StagingFuture | None:
    return None


# --- times of staging -------------------------------------------------------------------------------------------------


class StageTimes(NamedTuple):
    """The times of one staging."""

    started_at: float = 0.0
    """``time.time()`` when it began."""
    wait_seconds: float = 0.0
    """What training waited before that, for the save before to end."""
    stage_seconds: float = 0.0
    """How long it took."""


# --- the staged state dict of a save, or its error --------------------------------------------------------------------
#
# DCP may pass a staged state dict to any storage writer. A writer of this package knows the `StagedSave`, and raises
# its error in DCP's first hook. Other writers do not. So a save gets nothing before everything is copied. If that has
# failed, it gets a value that raises the error when it is planned or pickled. Either way DCP sends the error to every
# rank.


class StagedStateDict(dict[str, Any]):
    """A staged state dict that knows which thread takes it to save it.

    ``storage_meta()`` gets no arguments: it could not tell the save of a staged state dict from a ``dcp.save`` of
    another one that runs on another thread with the same writer. ``items()`` is what DCP calls first on the very dict
    that it saves, on the save's thread and before any collective (PROCESS mode pickles the dict there instead), so it
    ties save and dict together, and waits until the ones staged before are over, and this one is copied.

    So saves run one at a time, in the order in which they were staged, on every rank the same.
    """

    def __init__(
        self, content: Mapping[str, Any], staged_save: StagedSave, wait_turn: Callable[[StagedSave], None]
    ) -> None:
        super().__init__(content)
        self.staged_save = staged_save
        self._wait_turn = wait_turn
        staged_save.attach(self)

    def items(self) -> Any:
        error = self._take()
        return super().items() if error is None else _failed(error).items()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        error = self._take()
        return (dict, (list(super().items()),)) if error is None else (_failed, (error,))

    def _take(self) -> str | None:
        """Waits until everything is copied; returns why it is not."""
        if self.staged_save.thread is None:
            self.staged_save.take()
            self._wait_turn(self.staged_save)
        try:
            self.staged_save.wait_copied()
        except StagingError as error:  # raised here, it would leave other ranks waiting in a collective
            return str(error)
        return None


class _Failed:
    """A value of a state dict that could not be staged."""

    def __init__(self, error: str) -> None:
        self._error = error

    def __create_write_items__(self, name: str, value: object) -> NoReturn:
        """DCP's planners ask a value first of all how it is written."""
        raise StagingError(self._error)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Other planners do not ask, and have it pickled."""
        raise StagingError(self._error)


def _failed(error: str) -> dict[str, Any]:
    """Stands for a state dict that could not be staged."""
    return {"staging": _Failed(error)}


class StagingFuture(concurrent.futures.Future[dict[str, Any]]):
    """The future that `stage` returns when it does not wait: done when training may change the state.

    Its result is there before that: the save takes it, and then waits itself until it is copied. So what training waits
    for may even be a part of the save.
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
        if not staged.staged_save.wait_built(timeout):
            raise concurrent.futures.TimeoutError
        return staged

    def let_go(self) -> None:
        """Called when a save has taken the staged state dict."""
        self._staged = None

    def complete(self) -> None:
        """Training may change the state."""
        with suppress(concurrent.futures.InvalidStateError):  # cancelled, or done
            self.set_result({})
