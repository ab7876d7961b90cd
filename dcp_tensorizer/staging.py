"""Staging: a copy of a rank's state dict in shared memory, safe from everything training does next.

`ArenaStager.stage` walks the state dict twice: once for the sizes, and once to build a twin whose tensors live in an
arena. Nothing in the twin aliases live memory. A buffer is written to again when the save that uses it is over:
see `Lease`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch

from ._arena import Arena, aligned, check_headroom
from ._copying import copy_all
from ._lease import Lease, StagedStateDict
from ._twins import build, dense_tensors
from .errors import StagingError

__all__ = ["ArenaStager", "Lease", "StagedStateDict"]

# In PROCESS mode the save before may not have been taken because torch is still starting its process. Only a save's
# own thread waits so long for it, and only once.
_START_SECONDS = 60.0


class ArenaStager:
    """Copies state dicts into shared memory that is kept between saves.

    Args:
        cache: Keep the buffer after a save. Without it, memory is given back between saves, and each save allocates.
        threads: That copy on the host, where torch itself has only one (as ``torchrun`` sets it).
    """

    def __init__(self, *, cache: bool = True, threads: int = 1) -> None:
        self._cache = cache
        self._threads = threads
        self._leases: list[Lease] = []
        self._idle: Arena | None = None
        self._warming: Future[Arena] | None = None

    def prewarm(self, state_dict: Mapping[str, Any]) -> None:
        """Allocates the buffer for state dicts of this size ahead of the first save, in the background.

        Raises:
            StagingError: memory is short, or a tensor is of a kind that cannot be saved; names the key.
        """
        self._reclaim()
        nbytes = _nbytes(list(dense_tensors(state_dict, "")))
        self._settle_warming()
        if self._leases or (self._idle is not None and self._idle.fits(nbytes)):
            return
        self._give_back_idle()
        check_headroom(nbytes)
        self._warming = Future()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
        threading.Thread(target=_warm, args=(nbytes, device, self._warming), name="prewarm", daemon=True).start()

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
        return all(lease.wait_over(timeout) for lease in list(self._leases) if lease.wait_claimed() and lease.thread)

    def stage(self, state_dict: Mapping[str, Any]) -> StagedStateDict:
        """Copies everything into a buffer that no save uses.

        Never fails for what the state dict holds: one rank that raised here would leave the others waiting in a
        collective. The error is kept in the lease of the (then empty) result, and the save raises it where DCP hands
        errors round.

        Returns:
            The twin of the state dict, with its ``lease``.
        """
        self._reclaim()
        lease = Lease()
        distributed = torch.distributed
        lease.distributed = (
            distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
        )
        self._leases.append(lease)
        try:
            content = self._copy(state_dict, lease)
        except StagingError as error:
            lease.error = StagingError(str(error))  # without the traceback, whose frames hold the live tensors
            content = {}
        except BaseException:  # a KeyboardInterrupt: there will be no save
            self._leases.remove(lease)
            raise
        return StagedStateDict(content, lease, self.wait_turn)

    def refuse(self, error: StagingError) -> StagedStateDict:
        """The result of a staging that was not even tried: its save fails with ``error``."""
        lease = Lease()
        lease.error = error
        self._leases.append(lease)
        return StagedStateDict({}, lease, self.wait_turn)

    def begin_save(self) -> Lease | None:
        """The lease that the calling thread has taken and not begun to save; None: it saves something unstaged."""
        for lease in list(self._leases):
            if lease.thread is threading.current_thread() and not lease.begun:
                lease.begun = True
                return lease
        return None

    def _copy(self, state_dict: Mapping[str, Any], lease: Lease) -> dict[str, Any]:
        try:
            with torch.no_grad():
                sources = list(dense_tensors(state_dict, ""))
                lease.arena, self._idle = self._arena_for(_nbytes(sources)), None
                twins = [lease.arena.allocate(tensor.dtype, tensor.shape) for _, tensor in sources]
                copy_all(list(zip(twins, (tensor for _, tensor in sources), strict=True)), self._threads)
                remaining = iter(twins)
                return {key: build(value, key, remaining) for key, value in state_dict.items()}
        except StagingError:
            raise
        except Exception as error:
            raise StagingError(f"the state dict could not be copied: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Gives the buffers back; those that a save still uses follow when it lets go of its state dict."""
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
            with suppress(StagingError):  # memory has become short since; staging says so, if it still is
                self._idle = warming.result()

    def _arena_for(self, nbytes: int) -> Arena:
        self._settle_warming()
        arena = self._idle
        if arena is not None and arena.fits(nbytes):
            arena.reset()
            return arena
        self._give_back_idle()
        return Arena(nbytes, pin=True)

    def _give_back_idle(self) -> None:
        """Frees the buffer that no save uses: a larger one takes its place."""
        if self._idle is not None:
            self._idle.close()
            self._idle = None

    def _reclaim(self) -> None:
        """Takes back the buffers of saves that are over, and keeps the largest."""
        for lease in [lease for lease in self._leases if lease.over()]:
            self._leases.remove(lease)
            spare, lease.arena = lease.arena, None
            if spare is not None and self._cache and (self._idle is None or spare.nbytes > self._idle.nbytes):
                spare, self._idle = self._idle, spare
            if spare is not None:
                spare.close()


def _warm(nbytes: int, device: int, future: Future[Arena]) -> None:
    try:
        with torch.cuda.device(device):  # what is pinned is pinned for a device; -1 for none
            future.set_result(Arena(nbytes, pin=True))
    except Exception as error:
        future.set_exception(error)


def _nbytes(sources: list[tuple[str, torch.Tensor]]) -> int:
    return sum(aligned(tensor.nbytes) for _, tensor in sources)
