"""Staging: copying a rank's state dict to shared memory, where training does not change the copy.

`Stager.stage` copies the state dict's structure, and records events on the devices' current streams, for which the side
streams wait. With overlapping staging, training waits only for these two. Then the tensors are copied to a shared
buffer, which a later save may reuse when this save is over (`StagedSave`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from typing import Any

import torch

from .._runtime.interpreter import collector_paused
from .._runtime.ranks import world_size_of_job
from .._runtime.threads import is_running
from .._runtime.torch_compat import real_tensors
from .._tensor_file.dtypes import is_plain_class
from ..errors import StagingError
from .device import CUDA, Device, synchronize_other_devices
from .saves import StagedSaves
from .shared_mappings import SharedTensors
from .shared_memory import SharedBuffer
from .staged_save import StagedSave, StagedStateDict, StagingState
from .state_tree import DtypeOf, TensorList, copy_items
from .tensor_copy import DEFAULT_LIMITS, Copies, GatherLimits
from .ways import BUFFER, BufferWay

# How long copying waits at most for ``async_save`` to return: several times what that takes after `Stager.stage`.
_RETURN_SECONDS = 0.005


class Stager:
    """Copier of state dicts to shared memory.

    Args:
        saves: The staged saves and buffers, which stagers may share. If None, the stager makes its own.
        cache_staged_state_dict: Retain the buffer after a save. Otherwise each save allocates and frees its memory.
        thread_count: The number of threads that copy on the host if torch itself has only one, as by default
            under ``torchrun``.
        way: Which tensors are copied, and by which process.
        overlap_staging: Whether `stage` returns before the staged state dict is complete; see `StagedSave.wait_copied`
            and `StagedSave.wait_released`.
        device: The kind of accelerator that tensors may be on.
        limits: Limits of gathering on a device before the copy to the host.

    Attributes:
        dtype_of: Returns the staged dtype for the dtype of a tensor on a device. If this process copies the tensor, the
            device casts it before the copy, unless it is one of `TensorList.inner`. Other tensors are not cast. If
            None, no tensor is cast.
    """

    def __init__(
        self,
        saves: StagedSaves | None = None,
        *,
        cache_staged_state_dict: bool = True,
        thread_count: int = 1,
        way: BufferWay = BUFFER,
        overlap_staging: bool = False,
        device: Device = CUDA,
        limits: GatherLimits = DEFAULT_LIMITS,
    ) -> None:
        self.saves = saves or StagedSaves()
        self._keeps_buffer = cache_staged_state_dict
        self._thread_count = thread_count
        self.way = way
        self._overlap_staging = overlap_staging
        self._device = device
        self._limits = limits
        self.dtype_of: DtypeOf | None = None

    def prewarm(self, state_dict: Mapping[str, Any]) -> None:
        """Allocates the buffer for state dicts of this size ahead of the first save, in the background.

        Raises `StagingError` if there is not enough memory, or, naming the key, if a value cannot be staged.
        """
        self.saves.reclaim()
        _, _, copies = self._list(state_dict)
        pin_for = self._pin_for(copies)
        self.saves.prewarm(copies.nbytes, lambda nbytes: SharedBuffer(nbytes, pin_for))

    def stage(
        self, state_dict: Mapping[str, Any], omitted: frozenset[str] = frozenset(), *, is_kept: bool = False
    ) -> StagedStateDict:
        """Stages everything except the tensors of ``omitted`` keys, in a buffer that no other save uses.

        ``is_kept`` becomes `SharedBuffer.is_kept`.

        Never raises because of the contents of the state dict: the other ranks would hang in a collective. The
        `StagedSave` of the result records the error, and its save raises it where DCP sends errors to all ranks (see
        `StagedStateDict`).
        """
        self.saves.reclaim()
        staged = self._empty()
        staged_save = staged.staged_save
        try:
            self.saves.add(staged_save)
            staged_save.distributed = world_size_of_job() > 1
            tensors, staged_save.shared, copies = self._list(state_dict, omitted)
            staged_save.described = tensors.described
            if copies.devices:
                self._device.side_streams.follow(copies.sources)
            synchronize_other_devices(copies.sources)
            if self._overlap_staging:
                if staged_save.shared is not None:  # to release the state even if its save ends without writing
                    threading.Thread(target=staged_save.wait_released, name="release", daemon=True).start()
                copying = threading.Thread(target=self._copy, args=(tensors, copies, staged, is_kept), name="stage")
                staged_save.stager = copying
                copying.start()
            else:
                self._copy(tensors, copies, staged, is_kept)
        except Exception as error:
            staged_save.fail(error)
            staged_save.finish()
        except BaseException as error:  # such as a KeyboardInterrupt: no save follows
            self.saves.remove(staged_save)
            is_copying = staged_save.stager is not threading.current_thread() and is_running(staged_save.stager)
            if not is_copying:  # other stagings may wait for this one
                staged_save.fail(error)
                staged_save.finish()
            raise
        return staged

    def refuse(self, error: StagingError) -> StagedStateDict:
        """Returns a staged state dict whose save fails with ``error``."""
        staged = self._empty()
        staged.staged_save.fail(error)
        staged.staged_save.finish()
        self.saves.add(staged.staged_save)  # complete when it is added, so that no thread waits for it
        return staged

    def wait_released(self) -> None:
        """Waits until all states that this stager has staged are released: training may then change them."""
        for staged_save in self.saves.of(self):
            staged_save.wait_released()

    def hold_training(self) -> None:
        """Prevents later work of the calling thread from changing a staged state before it is released.

        With ``overlap_staging``, raises `StagingError` if the calling thread's current stream is being captured into a
        CUDA graph.
        """
        if self._overlap_staging and self._device.is_capturing:
            raise StagingError(
                "a CUDA graph is being captured, and its replays would not wait for the copies of a save. Enter "
                "writer.lock() around graph.replay(), not inside the capture."
            )
        for staged_save in self.saves.of(self):
            staged_save.hold_training()

    def _empty(self) -> StagedStateDict:
        staged_save = StagedSave(self, keeps_buffer=self._keeps_buffer)
        return StagedStateDict({}, staged_save, functools.partial(self.saves.wait_turn, self))

    @real_tensors()
    @torch.inference_mode(False)
    @torch.no_grad()
    def _copy(self, tensors: TensorList, copies: Copies, staged: StagedStateDict, is_kept: bool) -> None:
        """Copies the tensors and builds the staged state dict. Records an error in the staged save.

        Builds the dict before it waits for any copy, so that copies that have begun run meanwhile. Builds it outside
        inference mode: other threads, and the next save, could not write to tensors made in inference mode.
        """
        staged_save = staged.staged_save
        if self._overlap_staging:
            # Copying would take the GIL from ``async_save``. So copying starts when the save's thread, which
            # ``async_save`` starts last, waits for the copy, or at the latest after `_RETURN_SECONDS`.
            staged_save.wait_for_consumer(_RETURN_SECONDS)
        try:
            buffer = staged_save.buffer = self.saves.take_buffer(copies.nbytes, self._pin_for(copies))
            buffer.is_kept = is_kept
            staged_save.copies = copies
            if self.way.copies_from_devices:
                copies.repeat(buffer)
            copied = copies.begin(buffer)
            is_elsewhere = not self.way.copies_from_devices and bool(copies.on_device)
            if not is_elsewhere:
                copies.queue_from_devices()
                buffer.batches = copies.batches
            staged.update(tensors.fill(copied, self.dtype_of))
            staged_save.reach(StagingState.BUILT)
            if is_elsewhere and not self.way.copy_elsewhere(buffer, copies):  # this process copies instead
                buffer.pin(self._device, copies.devices[0])
                copies.queue_from_devices()
            copies.copy_from_host()
            staged_save.reach(StagingState.QUEUED)
        except BaseException as error:
            staged_save.fail(error)
            if not self._overlap_staging and not isinstance(error, Exception):
                raise
        finally:
            staged_save.finish()
        if staged_save.error is not None and not self._overlap_staging:
            staged.clear()

    @collector_paused()
    @real_tensors()
    @torch.no_grad()
    def _list(
        self, state_dict: Mapping[str, Any], omitted: frozenset[str] = frozenset()
    ) -> tuple[TensorList, SharedTensors | None, Copies]:
        """Copies a state dict as it is at one moment, except for the elements of its tensors.

        Returns the list of its tensors, the tensors that are written from shared memory, and the copies to make.
        """
        tensors = TensorList(omitted)
        tensors.structure = dict(copy_items(state_dict, "", tensors))
        is_live = self._overlap_staging or self.way.holds_training
        tensors.memory = [t.data if is_live and is_plain_class(t) else t for t in tensors]
        omitted_tensors = tensors.omitted
        tensors.in_place, shared = self.way.shared(tensors.memory, omitted_tensors)
        elsewhere = tensors.in_place | omitted_tensors
        sources = [t for n, t in enumerate(tensors.memory) if n not in elsewhere] if elsewhere else tensors.memory
        copies = Copies(self._device.side_streams, sources, threads=self._thread_count, limits=self._limits)
        if copies.devices and self.dtype_of is not None and self.way.copies_from_devices:
            fixed = {id(tensors.memory[number]) for number in tensors.inner}
            for number, (source, index) in enumerate(zip(sources, copies.indices, strict=True)):
                if index is not None and id(source) not in fixed:
                    copies.dtypes[number] = self.dtype_of(source.dtype)
        return tensors, shared, copies

    def _pin_for(self, copies: Copies) -> tuple[Device, int] | None:
        return (self._device, copies.devices[0]) if self.way.copies_from_devices and copies.devices else None
