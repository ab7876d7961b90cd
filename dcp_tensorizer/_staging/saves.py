"""The staged saves of all writers of an engine, in the order of staging, and the buffers that these writers share."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from .._runtime.forks import free_in_child
from .._runtime.memory_limit import check_free_memory
from .._runtime.threads import NEVER, Deadline, in_background
from .device import Device
from .shared_memory import SharedBuffer
from .staged_save import StagedSave, name_of_group

# Timeout for a save to take its staged state dict. The save's thread starts just before `async_save` returns, and takes
# the dict within a millisecond. One second is ample, and limits the cost of a state that is staged but never saved.
_TAKE_SECONDS = 1.0
# Timeout of the same wait on the thread of the next save. It is longer, because in PROCESS mode torch may still be
# starting its process. After this timeout, the earlier save is abandoned: no save waits for it again.
_START_SECONDS = 60.0


class StagedSaves:
    """Staged saves in the order of their staging, and their buffers.

    Saves that one stager or one thread has staged run one at a time, in that order. Other saves, and saves of different
    process groups, run concurrently.
    """

    def __init__(self) -> None:
        self.take_seconds = _TAKE_SECONDS
        self.start_seconds = _START_SECONDS
        self._saves: list[StagedSave] = []
        self.spares = weakref.WeakKeyDictionary[object, int]()
        self._idle: list[SharedBuffer] = []
        self._kept: list[SharedBuffer] = []  # needed after their saves (`SharedBuffer.is_kept`)
        self._prewarming: Future[SharedBuffer] | None = None
        # Reentrant, because a signal handler that closes the writer may interrupt the holder. No code blocks while it
        # holds this lock.
        self._lock = free_in_child(threading.RLock())

    def of(self, owner: object) -> list[StagedSave]:
        """Returns the saves that a stager has staged, or that the stager's writer writes."""
        return [staged_save for staged_save in list(self._saves) if owner in staged_save.owners]

    def add(self, staged_save: StagedSave) -> None:
        with self._lock:
            self._saves.append(staged_save)

    def remove(self, staged_save: StagedSave) -> None:
        with self._lock, suppress(ValueError):  # `close` may have removed it
            self._saves.remove(staged_save)

    def begin(self, owner: object) -> StagedSave | None:
        """Begins the first save that has not begun and whose staged state dict the calling thread has taken.

        Returns the save, with ``owner`` added to its owners. If there is none, returns None.
        """
        for staged_save in list(self._saves):
            if staged_save.thread is threading.current_thread() and not staged_save.begun:
                staged_save.begun = True
                if owner not in staged_save.owners:
                    staged_save.owners += (owner,)
                return staged_save
        return None

    def wait_turn(self, owner: object, before: StagedSave | None = None) -> None:
        """Waits until the earlier saves with which the next save must not run concurrently are over.

        The next save is ``before``, or, if that is None, the one that the calling thread is about to stage or begin. If
        no save takes an earlier staged state dict, the next save waits only until a timeout, and gets another buffer.
        """
        earlier = list(self._saves)
        if before is not None:  # if `close` has removed it after a timeout, all remaining saves came later
            del earlier[earlier.index(before) if before in earlier else 0 :]
        thread = threading.current_thread() if before is None else before.staged_on
        group = name_of_group() if before is None else before.group
        for staged_save in earlier:
            in_order = owner in staged_save.owners or staged_save.staged_on is thread
            is_apart = None not in (group, staged_save.group) and group != staged_save.group
            if staged_save.abandoned or is_apart or not in_order:
                continue
            if not staged_save.wait_taken(self.take_seconds if before is None else self.start_seconds):
                staged_save.abandoned = before is not None
            elif staged_save.thread is not None:
                staged_save.wait_over()

    def drain(self, owner: object, deadline: Deadline) -> bool:
        """Waits until a stager's saves are over, except those whose staged state dict no save takes.

        Returns False on timeout, or in a signal handler that has interrupted the staging of one of the saves.
        """
        for staged_save in self.of(owner):
            if staged_save.is_interrupted or not staged_save.wait_built(deadline.left):
                return False
            if staged_save.abandoned and staged_save.thread is None:  # no save will take it
                continue
            taken = staged_save.wait_taken(deadline.within(self.take_seconds)) and staged_save.thread is not None
            if taken and not staged_save.wait_over(deadline):
                return False
        return True

    def drain_at_exit(self) -> None:
        """Waits for the saves in progress when the program exits.

        Python joins their threads anyway. But a `multiprocessing` process joins them only after the exit handlers,
        which end the writer process.
        """
        begin_seconds = self.take_seconds if threading.main_thread().is_alive() else 0.0
        for staged_save in list(self._saves):
            if staged_save.abandoned or not staged_save.wait_taken(begin_seconds):
                continue
            if staged_save.thread is not None:
                staged_save.wait_over()

    def only_of(self, owner: object) -> bool:
        return all(staged_save.owners == (owner,) or staged_save.over() for staged_save in list(self._saves))

    def prewarm(self, nbytes: int, make: Callable[[int], SharedBuffer]) -> None:
        """Makes a buffer in the background, unless an idle buffer is large enough or a save is in progress.

        Raises `StagingError` if there is not enough memory.
        """
        self.wait_prewarmed()
        if self._saves or self.has_buffer(nbytes):
            return
        self._free_idle()
        check_free_memory(nbytes)
        self._prewarming = in_background(lambda: make(nbytes), name="prewarm", daemon=True)

    def wait_prewarmed(self, deadline: Deadline = NEVER) -> None:
        with self._lock:
            prewarming, self._prewarming = self._prewarming, None
        if prewarming is not None:
            with suppress(Exception):  # such as a memory shortage, which staging reports if it persists
                self._idle.append(prewarming.result(deadline.left))

    def take_buffer(self, nbytes: int, pin_for: tuple[Device, int] | None = None) -> SharedBuffer:
        """Returns an idle buffer of at least ``nbytes`` bytes. If there is none, frees all idle ones, and makes one.

        With ``pin_for``, registers the returned buffer for that device.
        """
        self.wait_prewarmed()
        while (buffer := self._take_idle()) is not None:
            if buffer.fits(nbytes):
                buffer.reset()
                if pin_for is not None:
                    buffer.pin(*pin_for)
                return buffer
            buffer.close()
        return SharedBuffer(nbytes, pin_for)

    def has_buffer(self, nbytes: int) -> bool:
        return self._prewarming is not None or any(buffer.fits(nbytes) for buffer in list(self._idle))

    def reclaim(self) -> None:
        """Removes the saves that are over, and takes back their buffers. Retains the largest idle buffers."""
        for staged_save in list(self._saves):
            staged_save.wait_built()  # the staging thread may still take an idle buffer
        unused: list[SharedBuffer] = []
        with self._lock:
            for staged_save in [staged_save for staged_save in self._saves if staged_save.over()]:
                self._saves.remove(staged_save)
                buffer = staged_save.buffer
                if buffer is None or not buffer.is_kept:  # a kept buffer's owner may still get it from the save
                    staged_save.buffer = None
                if buffer is not None:
                    is_wanted = staged_save.keeps_buffer or buffer.is_kept
                    (self._kept if is_wanted else unused).append(buffer)
            self._idle += [buffer for buffer in self._kept if not buffer.is_kept]
            self._kept = [buffer for buffer in self._kept if buffer.is_kept]
            self._idle.sort(key=lambda buffer: -buffer.nbytes)
            spares = max(list(self.spares.values()), default=1)
            unused += self._idle[spares:]
            del self._idle[spares:]
        for buffer in unused:
            buffer.close()

    def close(self, deadline: Deadline = NEVER, owner: object = None) -> None:
        """Frees the buffers. The buffer of a running save is freed when the save releases its state dict.

        A buffer that is still being copied to at the deadline is also freed later. With ``owner``, a stager, the
        unfinished saves of other stagers remain.
        """
        with self._lock:  # `reclaim` takes buffers of the same saves
            saves = [s for s in self._saves if owner is None or owner in s.owners or s.over()]
            for staged_save in saves:
                self._saves.remove(staged_save)
        unused = [staged_save.buffer for staged_save in saves if staged_save.wait_unused(deadline)]
        self.wait_prewarmed(deadline)
        kept, self._kept = self._kept, []
        for buffer in (*unused, *kept):
            if buffer is not None:
                buffer.close()
        self._free_idle()

    def _free_idle(self) -> None:
        while (idle := self._take_idle()) is not None:
            idle.close()

    def _take_idle(self) -> SharedBuffer | None:
        with self._lock:  # a signal handler may also take one
            return self._idle.pop(0) if self._idle else None
