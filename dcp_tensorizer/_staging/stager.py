"""Staging: a copy of a rank's state dict in shared memory, safe from everything training does next.

`ArenaStager.stage` takes the state dict's structure and marks the moment in the devices' queues, which is all that
training has to wait for if it overlaps; then it makes a twin whose tensors live in an arena. A buffer is written to
again when the save that uses it is over: see `Lease`.
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
from .._memory.garbage import garbage_stays
from .._memory.memory_limit import check_headroom
from .._memory.shared_buffer import Arena, aligned
from .._memory.shared_mappings import SharedMappings
from ..errors import StagingError
from .staged_save import Lease, StagedStateDict, Staging
from .state_tree import OTHER_TENSORS, fill, freeze
from .tensor_copy import Copies, order

__all__ = ["ArenaStager", "Lease", "StagedStateDict", "Staging"]

logger = logging.getLogger("dcp_tensorizer")

# In PROCESS mode the save before may not have been taken because torch is still starting its process. Only a save's
# own thread waits so long for it, and only once.
_START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A state dict at one moment: everything but the elements of its tensors.

    Attributes:
        content: The state dict, copied but for its tensors.
        tensors: The plain tensors in it.
        shared: Where to find those that are in shared memory already, if they are their own twins.
        in_place: Their numbers.
    """

    content: dict[str, Any]
    tensors: list[torch.Tensor]
    shared: SharedMappings | None
    in_place: set[int]

    @property
    def sources(self) -> list[torch.Tensor]:
        """What is copied."""
        return [tensor for number, tensor in enumerate(self.tensors) if number not in self.in_place]

    @garbage_stays()
    def twin(self, copied: Iterable[torch.Tensor]) -> dict[str, Any]:
        """The twin, once, from those of the `sources`."""
        others = iter(copied)
        twins = iter([t if n in self.in_place else next(others) for n, t in enumerate(self.tensors)])
        content: dict[str, Any] = fill(self.content, twins)
        if next(twins, None) is not None:
            raise StagingError(OTHER_TENSORS)
        return content


class ArenaStager:
    """Copies state dicts into shared memory that is kept between saves.

    Args:
        cache: Keep the buffer after a save. Without it, memory is given back between saves, and each save allocates.
        threads: That copy on the host, where torch itself has only one (as ``torchrun`` sets it).
        in_place: Tensors that are in shared memory already are not copied: their twins are themselves, and the state
            is released when the save has written them.
        elsewhere: Makes the copies from devices to an arena in another way; False if it cannot.
        overlap: `stage` returns before the twin is made: see `Lease.wait_copied` and `Lease.wait_released`.
        device: Where tensors may be, apart from host memory.
    """

    def __init__(
        self,
        *,
        cache: bool = True,
        threads: int = 1,
        in_place: bool = False,
        elsewhere: Callable[[Arena, Copies], bool] | None = None,
        overlap: bool = False,
        device: Device = CUDA,
    ) -> None:
        self._cache = cache
        self._threads = threads
        self._in_place = in_place
        self._elsewhere = elsewhere
        self._overlap = overlap
        self._device = device
        self._streams = SideStreams(device)
        self._leases: list[Lease] = []
        self._idle: Arena | None = None
        self._warming: Future[Arena] | None = None

    def prewarm(self, state_dict: Mapping[str, Any]) -> None:
        """Allocates the buffer for state dicts of this size ahead of the first save, in the background.

        Raises:
            StagingError: memory is short, or a tensor is of a kind that cannot be saved; names the key.
        """
        self._reclaim()
        sources = self._freeze(state_dict).sources
        nbytes = _nbytes(sources)
        self._settle_warming()
        if self._leases or (self._idle is not None and self._idle.fits(nbytes)):
            return
        self._give_back_idle()
        check_headroom(nbytes)
        self._warming = Future()
        arguments = nbytes, self._device, self._pin_for(sources), self._warming
        threading.Thread(target=_warm, args=arguments, name="prewarm", daemon=True).start()

    def wait_turn(self, before: Lease | None = None) -> None:
        """Waits until the saves that were staged earlier, all or those before a given one, are over.

        A staged state dict that no save takes is not waited for: its buffer is left alone, and the next one is new.
        """
        earlier = list(self._leases)
        for lease in earlier[: earlier.index(before)] if before in earlier else earlier:
            if lease.abandoned:
                continue
            if not (lease.wait_claimed() if before is None else lease.wait_claimed(_START_SECONDS)):
                lease.abandoned = before is not None
            elif lease.thread is not None:
                lease.wait_over()

    def drain(self, timeout: float | None) -> bool:
        """Waits for the saves that have been started; False if one is not over after ``timeout`` seconds."""
        for lease in list(self._leases):
            if not lease.wait_twinned(timeout):
                return False
            if lease.wait_claimed() and lease.thread and not lease.wait_over(timeout):
                return False
        return True

    def stage(self, state_dict: Mapping[str, Any]) -> StagedStateDict:
        """Copies everything into a buffer that no save uses.

        Never fails for what the state dict holds: one rank that raised here would leave the others waiting in a
        collective. The error is kept in the lease of the result, and the save raises it where DCP hands errors round.

        Returns:
            The twin of the state dict, with its ``lease``; empty if it could not be made.
        """
        self._reclaim()
        lease = Lease()
        distributed = torch.distributed
        lease.distributed = (
            distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
        )
        staged = StagedStateDict({}, lease, self.wait_turn)
        self._leases.append(lease)
        try:
            snapshot = self._freeze(state_dict)
            lease.shared, lease.in_place = snapshot.shared, bool(snapshot.in_place)
            self._streams.follow(snapshot.sources)
            if self._overlap:
                if lease.in_place:  # whose save may end without having written anything
                    threading.Thread(target=lease.wait_released, name="release", daemon=True).start()
                threading.Thread(target=self._copy, args=(snapshot, lease, staged), name="stage").start()
            else:
                self._copy(snapshot, lease, staged)
        except Exception as error:
            lease.fail(error)
            lease.finish()
        except BaseException:  # a KeyboardInterrupt: there will be no save
            self._leases.remove(lease)
            raise
        return staged

    def refuse(self, error: StagingError) -> StagedStateDict:
        """The result of a staging that was not even tried: its save fails with ``error``."""
        lease = Lease()
        lease.fail(error)
        lease.finish()
        self._leases.append(lease)
        return StagedStateDict({}, lease, self.wait_turn)

    def begin_save(self) -> Lease | None:
        """The lease that the calling thread has taken and not begun to save; None: it saves something unstaged."""
        for lease in list(self._leases):
            if lease.thread is threading.current_thread() and not lease.begun:
                lease.begun = True
                return lease
        return None

    def written(self, lease: Lease) -> None:
        """The save needs the buffer no more: without a cache its memory is given back when the save is over."""
        if not self._cache and lease.arena is not None:
            lease.arena.close()

    def wait_released(self) -> None:
        """Returns when training may change everything that was staged."""
        for lease in list(self._leases):
            lease.wait_released()

    def hold_training(self) -> None:
        """Keeps what the calling thread does next from changing anything that is still being copied."""
        for lease in list(self._leases):
            lease.hold_training()

    @torch.no_grad()
    def _copy(self, snapshot: _Snapshot, lease: Lease, staged: StagedStateDict) -> None:
        """Makes the twin, and has its tensors filled; what fails is kept as the lease's error."""
        try:
            sources = snapshot.sources
            arena, self._idle = self._arena_for(_nbytes(sources)), None
            lease.arena = arena
            if (index := self._pin_for(sources)) is not None:
                arena.pin(self._device, index)
            copied = self._twins(sources, arena)
            elsewhere = None if self._elsewhere is None else functools.partial(self._elsewhere, arena)
            copies = Copies(zip(copied, sources, strict=True), self._streams, self._threads, elsewhere)
            lease.start(copies, lambda: staged.update(snapshot.twin(copied)))
        except BaseException as error:
            lease.fail(error)
            if not self._overlap and not isinstance(error, Exception):
                raise
        finally:
            lease.finish()
        if lease.error is not None and self._overlap:
            logger.error("staging failed, and so will the save: %s", str(lease.error))
        elif lease.error is not None:
            staged.clear()

    @garbage_stays()
    def _twins(self, sources: Sequence[torch.Tensor], arena: Arena) -> list[torch.Tensor]:
        """Memory for a copy of each."""
        twins: dict[int, torch.Tensor] = {}
        for number in order(sources, self._device):
            twins[number] = arena.allocate(sources[number].dtype, sources[number].shape)
        return [twins[number] for number in range(len(sources))]

    @garbage_stays()
    @torch.no_grad()
    def _freeze(self, state_dict: Mapping[str, Any]) -> _Snapshot:
        tensors: list[torch.Tensor] = []
        content = {key: freeze(value, str(key), tensors) for key, value in state_dict.items()}
        shared = SharedMappings() if self._in_place else None
        in_place = {n for n, t in enumerate(tensors) if shared is not None and shared.locate(t) is not None}
        return _Snapshot(content, tensors, shared, in_place)

    def _pin_for(self, sources: Sequence[torch.Tensor]) -> int | None:
        """The first device that any of these are copied from, by this process."""
        if self._elsewhere is not None:
            return None
        return next((index for tensor in sources if (index := self._device.index_of(tensor)) is not None), None)

    def close(self) -> None:
        """Gives the buffers back; those that a save still uses follow when it lets go of its state dict."""
        for lease in self._leases:
            with suppress(StagingError):
                lease.wait_copied()
        self._settle_warming()
        for arena in (self._idle, *(lease.arena for lease in self._leases)):
            if arena is not None:
                arena.close()
        self._idle = None
        self._leases.clear()

    def _settle_warming(self) -> None:
        """Waits for the buffer that `prewarm` has begun."""
        warming, self._warming = self._warming, None
        if warming is not None:
            with suppress(Exception):  # memory has become short since, say; staging says so, if it still is
                self._idle = warming.result()

    def _arena_for(self, nbytes: int) -> Arena:
        self._settle_warming()
        arena = self._idle
        if arena is not None and arena.fits(nbytes):
            arena.reset()
            return arena
        self._give_back_idle()
        return Arena(nbytes)

    def _give_back_idle(self) -> None:
        """Frees the buffer that no save uses: a larger one takes its place."""
        if self._idle is not None:
            self._idle.close()
            self._idle = None

    def _reclaim(self) -> None:
        """Takes back the buffers of saves that are over, and keeps the largest."""
        for lease in self._leases:
            lease.wait_twinned()  # it takes the idle buffer before that, on a thread of its own
        for lease in [lease for lease in self._leases if lease.over()]:
            self._leases.remove(lease)
            spare, lease.arena = lease.arena, None
            if spare is not None and self._cache and (self._idle is None or spare.nbytes > self._idle.nbytes):
                spare, self._idle = self._idle, spare
            if spare is not None:
                spare.close()


def _warm(nbytes: int, device: Device, index: int | None, future: Future[Arena]) -> None:
    try:
        arena = Arena(nbytes)
        if index is not None:
            arena.pin(device, index)
        future.set_result(arena)
    except Exception as error:
        future.set_exception(error)


def _nbytes(sources: Sequence[torch.Tensor]) -> int:
    return sum(aligned(tensor.nbytes) for tensor in sources)
