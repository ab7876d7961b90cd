"""The life cycle of a staged state dict: its buffer, its save, and when the buffer may be reused.

Copying goes through the states of `StagingState`. Concurrently a save takes the staged state dict, and ends. The buffer
may be reused when both are over.
"""

from __future__ import annotations

import concurrent.futures
import enum
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from .._runtime.forks import Finalizer, free_in_child, limit_advice
from .._runtime.process_context import ProcessContext
from .._runtime.threads import NEVER, Deadline, is_running
from .._runtime.torch_compat import group_of_save
from ..errors import StagingError
from .shared_mappings import SharedTensors
from .shared_memory import SharedBuffer
from .tensor_copy import Copies

_STEP_SECONDS = 0.02  # between two checks whether a save is over
_END_SECONDS = 0.005  # between two checks whether a save's thread has ended: the thread does not notify on exit


class StagingState(enum.IntEnum):
    """States of copying, in order. An error skips some."""

    STAGING = 0
    """The staged state dict does not exist yet."""
    BUILT = 1
    """The staged state dict exists. Its tensors may not have their values yet."""
    QUEUED = 2
    """Host memory is copied. Copies from devices may still be pending on the side streams."""
    COPIED = 3
    """The staged tensors have their values: the save may read them."""
    RELEASED = 4
    """Nothing reads the live state: training may change it."""


class StagedSave:
    """A staged state dict, its buffer and its save.

    DCP takes the staged state dict (`StagedStateDict`) on the save's thread: it calls ``items``, or in PROCESS mode
    pickles the dict. The save is over when that thread has ended, or when nothing refers to the staged state dict and
    its tensors.

    Attributes:
        owners: The stager that staged the state dict, and the stager of the writer that saves the state dict.
        group: The name of the process group of its save; None if unknown.
        buffer: Holds the staged tensors. None before it is allocated, and after `StagedSaves.reclaim` has taken it
            back.
        copies: The copies in progress.
        error: The reason why there is nothing to save. The save raises it.
        shared: The tensors that are written from training's own memory, until the state is released. None if all are
            copied: then the state is released when the copies end.
        thread: The save's thread, once it has taken the staged state dict.
        begun: Whether DCP has called the save's first hook.
        abandoned: Whether other saves no longer wait for this one: either the wait for its start has timed out, or no
            save is to take the state.
        distributed: Whether the job had several ranks when staging began.
        stager: The thread that copies.
        context: The process context when staging began. Relative paths of the save are relative to the working
            directory of this context.
        description: The `SaveDescription` for the layers above.
        ties: For saves of models: by the name of each tied tensor, the name of the tensor that it equals.
        described: The keys of tensors that describe their parts (`describes_part`).
        on_written: Called when the save is written, with the digests of the written items by offset and size in the
            buffer. If items are encrypted, there are no digests.
    """

    def __init__(self, owner: object = None, *, keeps_buffer: bool = True) -> None:
        self.owners: tuple[object, ...] = (owner,)
        self.keeps_buffer = keeps_buffer
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
        self.description: Any = None
        self.ties: Mapping[str, str] = {}
        self.described: Sequence[str] = ()
        self.on_written: Callable[[Mapping[tuple[int, int], bytes]], object] | None = None
        # All waits use this condition. Its lock is reentrant, because a signal handler that closes the writer, or the
        # garbage collector that drops a staged state dict, may interrupt the holder.
        self._changed = free_in_child(threading.Condition())
        self._progress = StagingState.STAGING
        self._is_awaited = False  # a thread waits, or has waited, for progress
        self._dropped = False  # nothing refers to the staged state dict
        self._future: Callable[[], StagingFuture | None] = _no_future

    @property
    def is_on_own_thread(self) -> bool:
        """Returns whether the calling thread, which is the save's, is not the one that staged the state."""
        return self.staged_on is not threading.current_thread()

    def drop(self) -> None:
        """Records that nothing refers to the staged state dict any more: no save can take it."""
        with self._changed:
            self._dropped = True
            self._changed.notify_all()

    # --- copying ------------------------------------------------------------------------------------------------

    def reach(self, progress: StagingState) -> None:
        with self._changed:
            self._progress = max(self._progress, progress)
            self._changed.notify_all()

    def finish(self) -> None:
        """Waits for the copies in progress. Then releases the state, unless the save reads tensors of training."""
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
        """Records an error, which the save raises where DCP sends errors to all ranks."""
        # Without the traceback, whose frames hold the live tensors.
        words = str(error)
        if not isinstance(error, StagingError):
            words = f"the state dict could not be copied: {type(error).__name__}: {error}{limit_advice(error)}"
        self.error = self.error or StagingError(words)

    @property
    def is_interrupted(self) -> bool:
        """Returns whether the caller is a signal handler that has interrupted the copying. Copying continues only after
        the handler returns.
        """
        return self._progress < StagingState.COPIED and self.stager is threading.current_thread()

    def wait_built(self, timeout: float | None = None) -> bool:
        """Waits until the staged state dict exists or never will. Returns False on timeout."""
        return self._wait_for(StagingState.BUILT, timeout)

    def wait_copied(self) -> None:
        """Waits until the staged tensors have their values. Raises `StagingError` if they could not be copied."""
        self._wait_for(StagingState.COPIED)
        if self.error is not None:
            raise StagingError(str(self.error))  # a new error, because a traceback would keep this save's frames alive

    def wait_for_consumer(self, timeout: float) -> None:
        """Waits up to ``timeout`` seconds until a thread, such as that of the save, waits for this copy."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_awaited, timeout)

    def wait_unused(self, deadline: Deadline) -> bool:
        """Waits for running copies. Returns False on timeout, or in a signal handler that has interrupted them."""
        return not self.is_interrupted and self._wait_for(StagingState.COPIED, deadline.left)

    def _wait_for(self, progress: StagingState, timeout: float | None = None) -> bool:
        if self.is_interrupted:
            raise StagingError(
                "a signal handler has interrupted the staging of a save. Set a flag in the handler, and save after the "
                "handler has returned."
            )
        with self._changed:
            self._is_awaited = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._progress >= progress, timeout)

    # --- training may change the state --------------------------------------------------------------------------

    def release(self) -> None:
        """Releases the live state: training may change it. Idempotent.

        While copies are running, the live state is not released yet: `finish` releases it when they have ended.
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
        with self._changed:
            self._future = weakref.ref(future)
            released = self._progress == StagingState.RELEASED
        if released:
            future.complete()

    def wait_released(self) -> None:
        """Waits until the state is released, or the save is over: training may then change the state."""
        while not self._wait_for(StagingState.RELEASED, _STEP_SECONDS):
            if self.over():
                self.release()

    def hold_training(self) -> None:
        """Prevents later work of the calling thread from changing the state before it is released.

        Waits for copies of host memory. For copies from GPUs, makes the thread's current CUDA streams wait instead. If
        the save reads tensors of training, waits until the state is released.
        """
        self._wait_for(StagingState.QUEUED)
        copies = self.copies
        if copies is not None and self.shared is None:
            copies.hold()
        else:
            self.wait_released()

    # --- the save -----------------------------------------------------------------------------------------------

    def take(self) -> None:
        with self._changed:
            if self.thread is not None:
                return
            self.thread = threading.current_thread()
            future = self._future()
            if future is not None:
                future.release()
                if self._progress < StagingState.RELEASED:
                    # From now on the save holds the staged state dict. This object holds the future, to complete it.
                    self._future = lambda: future
            self._changed.notify_all()

    def over(self) -> bool:
        """Returns whether no save can use the staged state dict, and no copy to its buffer is running."""
        if self._progress < StagingState.COPIED:
            return False
        thread = self.thread
        if thread is not None and not is_running(thread):
            return True
        # The save has no thread that ends with it: no save took the dict, or the calling thread or another long-lived
        # thread did. Then the save is over when nothing refers to the dict.
        return self._dropped and (self.buffer is None or not self.buffer.in_use)

    def wait_taken(self, timeout: float) -> bool:
        """Waits until a save has taken the staged state dict, or none can. Returns False on timeout.

        The timeout begins when the staged state dict exists.
        """
        self.wait_built()
        with self._changed:
            return self._changed.wait_for(lambda: self.thread is not None or self._dropped, timeout)

    def wait_over(self, deadline: Deadline = NEVER) -> bool:
        """Waits until the save is over. Returns False on timeout."""
        while not self.over():
            thread = self.thread
            if thread is threading.current_thread():
                return True  # the save ran on the calling thread, and has returned
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
    """Returns the name of the process group of the save on this thread, or None if unknown.

    A name does not keep the group alive.
    """
    group = group_of_save()
    return None if group is None else group.group_name


def _no_future() -> StagingFuture | None:
    return None


# --- the staged state dict of a save, or its error --------------------------------------------------------------------


class StagedStateDict(dict[str, Any]):
    """A staged state dict that knows which thread saves it.

    ``storage_meta()`` gets no arguments, so it cannot distinguish the save of a staged state dict from a concurrent
    ``dcp.save`` with the same writer on another thread. But DCP first calls ``items()`` of the dict that it saves, on
    the save's thread and before any collective; in PROCESS mode it pickles the dict there. Both bind the save to the
    dict, wait for the save's turn (`StagedSaves.wait_turn`), and wait until the dict is copied.
    """

    def __init__(
        self, content: Mapping[str, Any], staged_save: StagedSave, wait_turn: Callable[[StagedSave], None]
    ) -> None:
        super().__init__(content)
        self.staged_save = staged_save
        self._wait_turn = wait_turn
        Finalizer(self, staged_save.drop).atexit = False

    def items(self) -> Any:
        error = self._take()
        return super().items() if error is None else _failed(error).items()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        error = self._take()
        if error is None and self.staged_save.described:
            error = (
                f"{self.staged_save.described[0]!r} describes which part of a tensor it is, and cannot be pickled. "
                f"Save it with async_checkpointer_type=AsyncCheckpointerType.THREAD."
            )
        if self.staged_save.buffer is not None:  # torch.multiprocessing moves the tensors to other memory
            self.staged_save.buffer.forget()
        return (dict, (list(super().items()),)) if error is None else (_failed, (error,))

    def _take(self) -> str | None:
        """Takes the dict for the calling thread, and waits until everything is copied.

        Returns the error, or None on success.
        """
        if self.staged_save.thread is None:
            self.staged_save.take()
            self._wait_turn(self.staged_save)
        try:
            self.staged_save.wait_copied()
        except StagingError as error:  # raising it here would leave other ranks waiting in a collective
            return str(error)
        return None


class _Failed:
    """A placeholder that raises the error of staging when DCP plans or pickles it."""

    def __init__(self, error: str) -> None:
        self._error = error

    def __create_write_items__(self, name: str, value: object) -> NoReturn:  # DCP's planners call this first
        raise StagingError(self._error)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:  # other planners pickle the value
        raise StagingError(self._error)


def _failed(error: str) -> dict[str, Any]:
    return {"staging": _Failed(error)}


class StagingFuture(concurrent.futures.Future[dict[str, Any]]):
    """The future that `stage` returns when it does not wait. Done when training may change the state.

    `result` returns before that, because the save needs the result to make progress, and the release may depend on that
    progress. The save itself waits for the copies.
    """

    def __init__(self, staged: StagedStateDict) -> None:
        super().__init__()
        self._staged: StagedStateDict | None = staged
        staged.staged_save.watch(self)

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Returns the staged state dict; once a save has taken it, an empty dict.

        The tensors are complete when `StagedSave.wait_copied` returns. Raises `TimeoutError` if the dict does not exist
        within ``timeout`` seconds.
        """
        staged = self._staged
        if staged is None:
            return {}
        if not staged.staged_save.wait_built(timeout):
            raise concurrent.futures.TimeoutError
        return staged

    def release(self) -> None:
        """Drops the staged state dict, because a save has taken it."""
        self._staged = None

    def complete(self) -> None:
        """Marks the future as done: training may change the state."""
        with suppress(concurrent.futures.InvalidStateError):  # cancelled, or done
            self.set_result({})
