"""Staging: a copy of a rank's state dict in shared memory, safe from everything training does next.

`Stager.stage` copies the state dict's structure and marks the moment in the devices' queues. That is all that training
has to wait for if staging overlaps. Then the staged copy is made, whose tensors live in a shared buffer. A buffer is
written to again when the save that uses it is over: see `StagedSave`.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from .._memory.device import CUDA, Device, SideStreams
from .._memory.garbage import collector_paused
from .._memory.memory_limit import check_headroom
from .._memory.shared_buffer import SharedBuffer, aligned
from .._memory.shared_mappings import SharedMappings
from .._threads import NEVER, Deadline, in_background
from ..errors import StagingError
from .staged_save import Progress, StagedSave, StagedStateDict, StagingFuture
from .state_tree import copy_structure, fill_tensors
from .tensor_copy import DEFAULT_LIMITS, Copies, GatherLimits, allocation_order

__all__ = ["Stager", "StagedSave", "StagedStateDict", "StagingFuture"]

logger = logging.getLogger("dcp_tensorizer")

# The save's thread starts when `async_save` returns and takes its staged state dict first of all: a second is a
# thousand times what that takes, and bounds what a staged state dict that nobody saves can cost.
_TAKE_SECONDS = 1.0
# In PROCESS mode the save before may not have been taken because torch is still starting its process. Only a save's
# own thread waits so long for it, and only once.
_START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A state dict at one moment: everything but the elements of its tensors.

    Attributes:
        structure: The state dict, copied but for its tensors.
        tensors: The plain tensors in it.
        in_place: The numbers of those that are written from where they are, in shared memory.
        shared: Where to find these; None if there are none.
    """

    structure: dict[str, Any]
    tensors: list[torch.Tensor]
    in_place: set[int]
    shared: SharedMappings | None

    @property
    def sources(self) -> list[torch.Tensor]:
        """What is copied."""
        return [tensor for number, tensor in enumerate(self.tensors) if number not in self.in_place]

    @collector_paused()
    def fill(self, copied: Iterable[torch.Tensor]) -> dict[str, Any]:
        """The staged state dict, once, with the copies of the `sources` in their places."""
        others = iter(copied)
        staged = [t if n in self.in_place else next(others) for n, t in enumerate(self.tensors)]
        return fill_tensors(self.structure, staged)  # type: ignore[no-any-return]


class Stager:
    """Copies state dicts into shared memory that is kept between saves.

    Args:
        cache: Keep the buffer after a save. Without it, memory is given back between saves, and each save allocates.
        threads: How many copy on the host, where torch itself has only one (as ``torchrun`` sets it).
        in_place: Tensors that are in shared memory already are not copied. The save writes them from where they are,
            and the state is released when it has.
        copy_from_devices: Makes the copies from devices to a shared buffer in another way; False if it cannot.
        overlap: `stage` returns before the staged state dict is there: see `StagedSave.wait_copied` and
            `StagedSave.wait_released`.
        device: Where tensors may be, apart from host memory.
        limits: What is gathered on a device before it is copied to the host.

    Attributes:
        take_seconds: How long a save is waited for that has not taken what was staged for it.
        start_seconds: How long a later save waits for that, once.
    """

    def __init__(
        self,
        *,
        cache: bool = True,
        threads: int = 1,
        in_place: bool = False,
        copy_from_devices: Callable[[SharedBuffer, Copies], bool] | None = None,
        overlap: bool = False,
        device: Device = CUDA,
        limits: GatherLimits = DEFAULT_LIMITS,
    ) -> None:
        self.take_seconds = _TAKE_SECONDS
        self.start_seconds = _START_SECONDS
        self._cache = cache
        self._threads = threads
        self._in_place = in_place
        self._copy_from_devices = copy_from_devices
        self._overlap = overlap
        self._device = device
        self._limits = limits
        self._streams = SideStreams(device)
        self._saves: list[StagedSave] = []
        self._idle: SharedBuffer | None = None
        self._prewarming: Future[SharedBuffer] | None = None

    def prewarm(self, state_dict: Mapping[str, Any]) -> None:
        """Allocates the buffer for state dicts of this size ahead of the first save, in the background.

        Raises:
            StagingError: memory is short, or a tensor is of a kind that cannot be saved; names the key.
        """
        self._reclaim()
        sources = self._snapshot(state_dict).sources
        nbytes = _nbytes(sources)
        self.wait_prewarmed()
        if self._saves or (self._idle is not None and self._idle.fits(nbytes)):
            return
        self._give_back_idle()
        check_headroom(nbytes)
        make = functools.partial(_new_buffer, nbytes, self._device, self._pin_for(sources))
        self._prewarming = in_background(make, name="prewarm", daemon=True)

    def wait_prewarmed(self, deadline: Deadline = NEVER) -> None:
        """Waits for the buffer that `prewarm` has begun, and not for longer than until a deadline."""
        prewarming, self._prewarming = self._prewarming, None
        if prewarming is not None:
            with suppress(Exception):  # memory has become short since, say; staging says so, if it still is
                self._idle = prewarming.result(deadline.left)

    def wait_turn(self, before: StagedSave | None = None) -> None:
        """Waits until the saves that were staged earlier, all or those before a given one, are over.

        A staged state dict that no save takes is not waited for: its buffer is left alone, and the next one is new.
        """
        earlier = list(self._saves)
        for staged_save in earlier[: earlier.index(before)] if before in earlier else earlier:
            if staged_save.abandoned:
                continue
            if not staged_save.wait_taken(self.take_seconds if before is None else self.start_seconds):
                staged_save.abandoned = before is not None
            elif staged_save.thread is not None:
                staged_save.wait_over()

    def drain(self, deadline: Deadline) -> bool:
        """Waits for the saves that have been started; False if one is not over in time, or cannot end meanwhile."""
        for staged_save in list(self._saves):
            if staged_save.is_interrupted or not staged_save.wait_built(deadline.left):
                return False
            taken = staged_save.wait_taken(deadline.within(self.take_seconds)) and staged_save.thread is not None
            if taken and not staged_save.wait_over(deadline):
                return False
        return True

    def stage(self, state_dict: Mapping[str, Any]) -> StagedStateDict:
        """Copies everything into a buffer that no save uses.

        Never fails for what the state dict holds: one rank that raised here would leave the others waiting in a
        collective. The result's `StagedSave` keeps the error, and the save raises it where DCP hands errors round.

        Returns:
            The staged copy of the state dict, with its ``staged_save``; empty if it could not be made.
        """
        self._reclaim()
        staged_save = StagedSave()
        distributed = torch.distributed
        staged_save.distributed = (
            distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
        )
        staged = StagedStateDict({}, staged_save, self.wait_turn)
        self._saves.append(staged_save)
        try:
            snapshot = self._snapshot(state_dict)
            staged_save.shared = snapshot.shared
            self._streams.follow(snapshot.sources)
            if self._overlap:
                if staged_save.shared is not None:  # its save may end without having written anything
                    threading.Thread(target=staged_save.wait_released, name="release", daemon=True).start()
                copying = threading.Thread(target=self._copy, args=(snapshot, staged_save, staged), name="stage")
                staged_save.stager = copying
                copying.start()
            else:
                self._copy(snapshot, staged_save, staged)
        except Exception as error:
            staged_save.fail(error)
            staged_save.finish()
        except BaseException:  # a KeyboardInterrupt: there will be no save
            with suppress(ValueError):  # the writer has been closed
                self._saves.remove(staged_save)
            raise
        return staged

    def refuse(self, error: StagingError) -> StagedStateDict:
        """The result of a staging that was not even tried: its save fails with ``error``."""
        staged_save = StagedSave()
        staged_save.fail(error)
        staged_save.finish()
        self._saves.append(staged_save)
        return StagedStateDict({}, staged_save, self.wait_turn)

    def begin_save(self) -> StagedSave | None:
        """What the calling thread has taken and not begun to save; None: it saves something unstaged."""
        for staged_save in list(self._saves):
            if staged_save.thread is threading.current_thread() and not staged_save.begun:
                staged_save.begun = True
                return staged_save
        return None

    def written(self, staged_save: StagedSave) -> None:
        """The save needs the buffer no more: without a cache its memory is given back when the save is over."""
        if not self._cache and staged_save.buffer is not None:
            staged_save.buffer.close()

    def wait_released(self) -> None:
        """Returns when training may change everything that was staged."""
        for staged_save in list(self._saves):
            staged_save.wait_released()

    def hold_training(self) -> None:
        """Keeps what the calling thread does next from changing anything that is still being copied."""
        for staged_save in list(self._saves):
            staged_save.hold_training()

    @torch.no_grad()
    def _copy(self, snapshot: _Snapshot, staged_save: StagedSave, staged: StagedStateDict) -> None:
        """Copies the tensors and builds the staged state dict; what fails is kept as the staged save's error.

        The staged state dict is built while devices copy, and before anything else is waited for: the save plans then.
        """
        try:
            sources = snapshot.sources
            buffer = staged_save.buffer = self._take_buffer(sources)
            if (index := self._pin_for(sources)) is not None:
                buffer.pin(self._device, index)
            tensors = self._allocate(sources, buffer)
            copies = Copies(zip(tensors, sources, strict=True), self._streams, self._threads, self._limits)
            staged_save.copies = copies
            copy_from_devices = self._copy_from_devices if copies.on_device else None
            if copy_from_devices is None:
                copies.queue_from_devices()
            staged.update(snapshot.fill(tensors))
            staged_save.reach(Progress.BUILT)
            if copy_from_devices is not None and not copy_from_devices(buffer, copies):
                copies.queue_from_devices()
            copies.copy_from_host()
            staged_save.reach(Progress.QUEUED)
        except BaseException as error:
            staged_save.fail(error)
            if not self._overlap and not isinstance(error, Exception):
                raise
        finally:
            staged_save.finish()
        if staged_save.error is not None and self._overlap:
            logger.error("staging failed, and so will the save: %s", str(staged_save.error))
        elif staged_save.error is not None:
            staged.clear()

    @collector_paused()
    def _allocate(self, sources: Sequence[torch.Tensor], buffer: SharedBuffer) -> list[torch.Tensor]:
        """Memory for a copy of each."""
        tensors: dict[int, torch.Tensor] = {}
        for number in allocation_order(sources, self._device, self._limits):
            tensors[number] = buffer.allocate(sources[number].dtype, sources[number].shape)
        return [tensors[number] for number in range(len(sources))]

    @collector_paused()
    @torch.no_grad()
    def _snapshot(self, state_dict: Mapping[str, Any]) -> _Snapshot:
        tensors: list[torch.Tensor] = []
        structure = {key: copy_structure(value, str(key), tensors) for key, value in state_dict.items()}
        shared = SharedMappings() if self._in_place else None
        in_place = {n for n, t in enumerate(tensors) if shared is not None and shared.locate(t) is not None}
        return _Snapshot(structure, tensors, in_place, shared if in_place else None)

    def _pin_for(self, sources: Sequence[torch.Tensor]) -> int | None:
        """The first device that any of these are copied from, by this process."""
        if self._copy_from_devices is not None:
            return None
        return next((index for tensor in sources if (index := self._device.index_of(tensor)) is not None), None)

    def close(self, deadline: Deadline = NEVER) -> None:
        """Gives the buffers back; those that a save still uses follow when it lets go of its state dict.

        So does one to which something is still copied at the deadline.
        """
        unused = [staged_save.buffer for staged_save in self._saves if staged_save.wait_unused(deadline)]
        self.wait_prewarmed(deadline)
        for buffer in (self._idle, *unused):
            if buffer is not None:
                buffer.close()
        self._idle = None
        self._saves.clear()

    def _take_buffer(self, sources: Sequence[torch.Tensor]) -> SharedBuffer:
        """The idle buffer, or a new one if that is too small."""
        nbytes = _nbytes(sources)
        self.wait_prewarmed()
        if self._idle is not None and self._idle.fits(nbytes) and self._idle.can_be_sent:
            buffer, self._idle = self._idle, None
            buffer.reset()
            return buffer
        self._give_back_idle()
        return SharedBuffer(nbytes)

    def _give_back_idle(self) -> None:
        """Frees the buffer that no save uses: a larger one takes its place."""
        if self._idle is not None:
            self._idle.close()
            self._idle = None

    def _reclaim(self) -> None:
        """Takes back the buffers of saves that are over, and keeps the largest."""
        for staged_save in self._saves:
            staged_save.wait_built()  # it takes the idle buffer before that, on a thread of its own
        for staged_save in [staged_save for staged_save in self._saves if staged_save.over()]:
            self._saves.remove(staged_save)
            spare, staged_save.buffer = staged_save.buffer, None
            if spare is not None and self._cache and (self._idle is None or spare.nbytes > self._idle.nbytes):
                spare, self._idle = self._idle, spare
            if spare is not None:
                spare.close()


def _new_buffer(nbytes: int, device: Device, index: int | None) -> SharedBuffer:
    buffer = SharedBuffer(nbytes)
    if index is not None:
        buffer.pin(device, index)
    return buffer


def _nbytes(sources: Sequence[torch.Tensor]) -> int:
    return sum(aligned(tensor.nbytes) for tensor in sources)
