"""The staged saves of a process, in their order, and the buffers that they are in; the writers of a process share both.

A buffer is kept when its save is over, and used for a later one, whichever writer asks for that.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from .._runtime.forks import free_in_child
from .._runtime.memory_limit import check_headroom
from .._runtime.threads import NEVER, Deadline, in_background
from .shared_memory import SharedBuffer
from .staged_save import StagedSave, name_of_group

# The save's thread starts when `async_save` returns and takes its staged state dict first of all: a second is a
# thousand times what that takes, and limits the cost of a staged state dict that is never saved.
_TAKE_SECONDS = 1.0
# In PROCESS mode the save before may not have been taken because torch is still starting its process. Only a save's
# own thread waits so long for it, and only once.
_START_SECONDS = 60.0


class StagedSaves:
    """Staged saves in the order of their staging, and the buffers that they are in.

    Saves that one stager has staged, or one thread, run one at a time, in that order: on every rank the same. Others
    run side by side, and so do those of different process groups. Each rank may have staged them in another order, and
    would wait for another one.

    Attributes:
        take_seconds: How long a save is waited for that has not taken what was staged for it.
        start_seconds: How long a later save waits for that, once.
        spares: How many buffers are kept for later saves, as each that needs more than one says.
    """

    def __init__(self) -> None:
        self.take_seconds = _TAKE_SECONDS
        self.start_seconds = _START_SECONDS
        self._saves: list[StagedSave] = []
        self.spares = weakref.WeakKeyDictionary[object, int]()
        self._idle: list[SharedBuffer] = []
        self._kept: list[SharedBuffer] = []  # no save uses them, and what is in them may be asked for
        self._prewarming: Future[SharedBuffer] | None = None
        # A signal's handler may interrupt its holder, and close the writer. Nothing is waited for inside.
        self._lock = free_in_child(threading.RLock())

    def of(self, owner: object) -> list[StagedSave]:
        """The saves that one stager has staged, or saves."""
        return [staged_save for staged_save in list(self._saves) if owner in staged_save.owners]

    def add(self, staged_save: StagedSave) -> None:
        """Adds a save as the last one; in a signal's handler, before the save that the handler interrupts.

        The interrupted staging goes on when the handler returns, and that may wait for the save.
        """
        with self._lock:
            places = (place for place, other in enumerate(self._saves) if other.is_interrupted)
            self._saves.insert(next(places, len(self._saves)), staged_save)

    def remove(self, staged_save: StagedSave) -> None:
        """Removes what was staged: it will not be saved."""
        with suppress(ValueError):  # all have been given up
            self._saves.remove(staged_save)

    def begin(self, owner: object) -> StagedSave | None:
        """Takes what the calling thread has staged and not begun to save, for ``owner`` too from now on.

        None: nothing.
        """
        for staged_save in list(self._saves):
            if staged_save.thread is threading.current_thread() and not staged_save.begun:
                staged_save.begun = True
                if owner not in staged_save.owners:
                    staged_save.owners += (owner,)
                return staged_save
        return None

    def wait_turn(self, owner: object, before: StagedSave | None = None) -> None:
        """Waits until the saves that were staged earlier are over: all, or those before a given one.

        A staged state dict that no save takes is not waited for: its buffer is left alone, and the next one is new.
        """
        earlier = list(self._saves)
        if before is not None:  # it has been given up if it is not there, and was earlier than those that are left
            del earlier[earlier.index(before) if before in earlier else 0 :]
        thread = threading.current_thread() if before is None else before.staged_on
        group = name_of_group() if before is None else before.group
        for staged_save in earlier:
            in_order = owner in staged_save.owners or staged_save.staged_on is thread
            is_apart = None not in (group, staged_save.group) and group != staged_save.group
            if staged_save.abandoned or staged_save.is_interrupted or is_apart or not in_order:
                continue
            if not staged_save.wait_taken(self.take_seconds if before is None else self.start_seconds):
                staged_save.abandoned = before is not None
            elif staged_save.thread is not None:
                staged_save.wait_over()

    def drain(self, owner: object, deadline: Deadline) -> bool:
        """Waits for a stager's saves that have begun; False if one is not over in time, or cannot end meanwhile."""
        for staged_save in self.of(owner):
            if staged_save.is_interrupted or not staged_save.wait_built(deadline.left):
                return False
            if staged_save.abandoned and staged_save.thread is None:  # it is not saved
                continue
            taken = staged_save.wait_taken(deadline.within(self.take_seconds)) and staged_save.thread is not None
            if taken and not staged_save.wait_over(deadline):
                return False
        return True

    def drain_at_exit(self) -> None:
        """Waits for the saves under way, at the end of the program.

        Python itself waits for their threads, and for longer than this. But a process of `multiprocessing` does that
        when all that is called at its exit has been called.
        """
        begin_seconds = self.take_seconds if threading.main_thread().is_alive() else 0.0
        for staged_save in list(self._saves):
            if staged_save.abandoned or staged_save.is_interrupted or not staged_save.wait_taken(begin_seconds):
                continue
            if staged_save.thread is not None:
                staged_save.wait_over()

    def only_of(self, owner: object) -> bool:
        """Returns whether no stager but this one has saves that are not over."""
        return all(staged_save.owners == (owner,) or staged_save.over() for staged_save in list(self._saves))

    def prewarm(self, nbytes: int, make: Callable[[int], SharedBuffer]) -> None:
        """Makes a buffer in the background, unless there is one of that size, or a save is under way.

        Raises:
            StagingError: memory is short.
        """
        self.wait_prewarmed()
        if self._saves or self.has_buffer(nbytes):
            return
        self._give_back_idle()
        check_headroom(nbytes)
        self._prewarming = in_background(lambda: make(nbytes), name="prewarm", daemon=True)

    def wait_prewarmed(self, deadline: Deadline = NEVER) -> None:
        """Waits for the buffer that `prewarm` has begun, and not for longer than until a deadline."""
        prewarming, self._prewarming = self._prewarming, None
        if prewarming is not None:
            with suppress(Exception):  # memory has become short since, say; staging says so, if it still is
                self._idle.append(prewarming.result(deadline.left))

    def take_buffer(self, nbytes: int) -> SharedBuffer:
        """An idle buffer, or a new one if all are too small."""
        self.wait_prewarmed()
        while (buffer := self._take_idle()) is not None:
            if buffer.fits(nbytes) and buffer.can_be_sent:
                buffer.reset()
                return buffer
            buffer.close()
        return SharedBuffer(nbytes)

    def has_buffer(self, nbytes: int) -> bool:
        """Returns whether there is an idle buffer of that size, or one is being made."""
        return self._prewarming is not None or any(buffer.fits(nbytes) for buffer in list(self._idle))

    def reclaim(self) -> None:
        """Takes back the buffers of saves that are over, and keeps the largest ones."""
        for staged_save in list(self._saves):
            if not staged_save.is_interrupted:
                staged_save.wait_built()  # it takes the idle buffer before that, on a thread of its own
        unused: list[SharedBuffer] = []
        with self._lock:
            for staged_save in [staged_save for staged_save in self._saves if staged_save.over()]:
                self._saves.remove(staged_save)
                buffer = staged_save.buffer
                if buffer is None or not buffer.is_kept:  # the keeper may still read it
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
        """Frees the buffers; those of a running save follow when it drops its state dict.

        So does one to which something is still copied at the deadline.

        Args:
            deadline: Of the waiting for what is copied.
            owner: A stager; what others have staged, and is not over, stays. None: nothing stays.
        """
        saves = [s for s in list(self._saves) if owner is None or owner in s.owners or s.over()]
        for staged_save in saves:
            self.remove(staged_save)
        unused = [staged_save.buffer for staged_save in saves if staged_save.wait_unused(deadline)]
        self.wait_prewarmed(deadline)
        kept, self._kept = self._kept, []
        for buffer in (*unused, *kept):
            if buffer is not None:
                buffer.close()
        self._give_back_idle()

    def _give_back_idle(self) -> None:
        """Frees the buffers that no save uses."""
        while (idle := self._take_idle()) is not None:
            idle.close()

    def _take_idle(self) -> SharedBuffer | None:
        """The largest buffer that no save uses, for the caller alone; None if there is none."""
        with self._lock:  # a signal's handler may take it, too
            return self._idle.pop(0) if self._idle else None
