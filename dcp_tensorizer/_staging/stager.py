"""Staging: a copy of a rank's state dict in shared memory, safe from everything training does next.

`Stager.stage` copies the state dict's structure, and marks the moment in the devices' queues. With overlapping staging,
training waits only for that. Then the tensors are copied into a shared buffer. A buffer is used again when its save is
over; see `StagedSave`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from .._runtime.gc_pause import collector_paused
from .._runtime.ranks import world_size_of_job
from .._runtime.threads import is_running
from .._runtime.torch_compat import is_plain
from .._tensor_file.dtypes import is_plain_class
from ..errors import StagingError
from .buffer_pool import StagedSaves
from .device import CUDA, Device, settle_other_devices
from .shared_mappings import SharedTensors
from .shared_memory import SharedBuffer, aligned
from .staged_save import StagedSave, StagedStateDict, StagingState
from .state_tree import DtypeOf, TensorList, copy_items, fill_tensors
from .tensor_copy import DEFAULT_LIMITS, Copies, GatherLimits, Layout, allocation_order
from .ways import BUFFER, BufferWay

_RETURN_SECONDS = 0.005  # several times what ``async_save`` takes from staging until it returns


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A state dict at one moment: everything except the elements of its tensors."""

    structure: dict[str, Any]  # the state dict, copied except for its tensors
    listed: list[torch.Tensor]  # the plain tensors in it
    tensors: list[torch.Tensor]  # the same memory, whatever training assigns to ``data`` if it goes on meanwhile
    in_place: set[int]  # numbers of the tensors that are written from shared memory, without a copy
    omitted: set[int]  # numbers of the tensors that other ranks write; tensors without memory stand for them
    shared: SharedTensors | None  # the tensors of `in_place`, if any
    sources: list[torch.Tensor]  # the tensors to copy
    dtypes: list[torch.dtype]  # of their copies
    dtype_of: DtypeOf | None  # what those are that are cast
    described: list[str]  # keys of tensors that describe their parts
    places: list[int | None]  # the device of each source; None for host memory

    @property
    def devices(self) -> list[int]:
        return [index for index in dict.fromkeys(self.places) if index is not None]

    @property
    def nbytes(self) -> int:
        if not self.devices:  # nothing is cast
            return sum(map(aligned, map(attrgetter("nbytes"), self.sources)))
        pairs = zip(self.sources, self.dtypes, strict=True)
        return sum(aligned(source.numel() * dtype.itemsize) for source, dtype in pairs)

    def layout(self) -> Layout:
        """Returns what decides where the sources are copied to, and how."""
        placed = list(zip(self.sources, self.places, strict=True))
        return (
            self.places,
            self.dtypes,
            list(map(attrgetter("shape"), self.sources)),
            list(map(attrgetter("dtype"), self.sources)),
            [0 if place is None else source.data_ptr() for source, place in placed],
            [place is not None and is_plain(source) for source, place in placed],
        )

    @collector_paused()
    def fill(self, copied: Iterable[torch.Tensor]) -> dict[str, Any]:
        staged = copied
        if self.in_place or self.omitted:
            others = iter(copied)
            staged = (
                t
                if n in self.in_place
                else torch.empty(t.shape, dtype=t.dtype, device="meta")  # can be planned, and has no values
                if n in self.omitted
                else next(others)
                for n, t in enumerate(self.tensors)
            )
        return fill_tensors(self.structure, self.listed, staged, self.dtype_of)  # type: ignore[no-any-return]


class Stager:
    """Copies state dicts into shared memory that is kept between saves.

    Args:
        saves: The staged saves and buffers, shared with other stagers; by default its own.
        cache_staged_state_dict: Keep the buffer after a save. Otherwise memory is freed between saves, and each save
            allocates.
        thread_count: How many threads copy on the host, if torch itself has only one (as ``torchrun`` sets it).
        way: Which tensors are copied, and by which process.
        overlap_staging: `stage` returns before the staged state dict is complete: see `StagedSave.wait_copied` and
            `StagedSave.wait_released`.
        device: The kind of accelerator that tensors may be on.
        limits: Limits of what is gathered on a device before it is copied to the host.

    Attributes:
        dtype_of: The dtype as which tensors of a dtype are staged, if this process copies them from a device, which
            casts them before they cross the bus. Others are staged as they are. None: so are all.
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

        Raises `StagingError` if memory is short, or if a tensor cannot be saved; then it names the key.
        """
        self.saves.reclaim()
        snapshot = self._snapshot(state_dict)
        pin_for = self._pin_for(snapshot.devices)
        self.saves.prewarm(snapshot.nbytes, lambda nbytes: SharedBuffer(nbytes, pin_for))

    def stage(
        self, state_dict: Mapping[str, Any], omitted: frozenset[str] = frozenset(), *, is_kept: bool = False
    ) -> StagedStateDict:
        """Copies everything, except the tensors of ``omitted`` keys, into a buffer that no save uses.

        Never fails because of the contents of the state dict: if one rank raised here, the others would wait in a
        collective. The result's `StagedSave` keeps the error, and its save raises it where DCP sends errors to all
        ranks (see `StagedStateDict`).
        """
        self.saves.reclaim()
        staged = self._empty()
        staged_save = staged.staged_save
        try:
            self.saves.add(staged_save)
            staged_save.distributed = world_size_of_job() > 1
            staged_save.omitted = omitted
            snapshot = self._snapshot(state_dict, omitted)
            staged_save.shared, staged_save.described = snapshot.shared, snapshot.described
            if snapshot.devices:
                self._device.side_streams.follow(snapshot.sources)
            settle_other_devices(snapshot.sources)
            if self._overlap_staging:
                if staged_save.shared is not None:  # in case its save ends without writing anything
                    threading.Thread(target=staged_save.wait_released, name="release", daemon=True).start()
                copying = threading.Thread(target=self._copy_beside, args=(snapshot, staged, is_kept), name="stage")
                staged_save.stager = copying
                copying.start()
            else:
                self._copy(snapshot, staged, is_kept)
        except Exception as error:
            staged_save.fail(error)
            staged_save.finish()
        except BaseException as error:  # such as a KeyboardInterrupt: no save follows
            self.saves.remove(staged_save)
            is_copying = staged_save.stager is not threading.current_thread() and is_running(staged_save.stager)
            if not is_copying:  # others may wait for it before they stage theirs
                staged_save.fail(error)
                staged_save.finish()
            raise
        return staged

    def refuse(self, error: StagingError) -> StagedStateDict:
        """Returns the result of a staging that was not tried: its save fails with ``error``."""
        staged = self._empty()
        staged.staged_save.fail(error)
        staged.staged_save.finish()
        self.saves.add(staged.staged_save)  # added last, and complete, so that no thread waits for it
        return staged

    def written(self, staged_save: StagedSave) -> None:
        """Releases the buffer of a save that has written. Without a cache its memory is freed when the save is over."""
        if not self._keeps_buffer and staged_save.buffer is not None:
            staged_save.buffer.close()

    def wait_released(self) -> None:
        """Waits until training may change everything that was staged."""
        for staged_save in self.saves.of(self):
            staged_save.wait_released()

    def hold_training(self) -> None:
        """Keeps later work of the calling thread from changing anything that is still being copied.

        Raises `StagingError` while a CUDA graph is captured.
        """
        if self._overlap_staging and self._device.is_capturing:
            raise StagingError(
                "a CUDA graph is being captured, and its replays would not wait for the copies of a save. Take "
                "writer.lock() around graph.replay(), not inside the capture."
            )
        for staged_save in self.saves.of(self):
            staged_save.hold_training()

    def _empty(self) -> StagedStateDict:
        staged_save = StagedSave(self, keeps_buffer=self._keeps_buffer)
        return StagedStateDict({}, staged_save, functools.partial(self.saves.wait_turn, self))

    def _copy_beside(self, snapshot: _Snapshot, staged: StagedStateDict, is_kept: bool) -> None:
        # It would take the interpreter from ``async_save``, so it begins when the save's thread waits for it: that is
        # the last thing that ``async_save`` starts.
        staged.staged_save.wait_for_consumer(_RETURN_SECONDS)
        self._copy(snapshot, staged, is_kept)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _copy(self, snapshot: _Snapshot, staged: StagedStateDict, is_kept: bool) -> None:
        """Copies the tensors and builds the staged state dict; an error is kept in the staged save.

        The dict is built while devices copy, before any other wait. Outside of inference mode, because what is made in
        it can only be written in it: other threads copy, too, and the next save may not be in it.
        """
        staged_save = staged.staged_save
        try:
            pin_for = self._pin_for(snapshot.devices)
            buffer = staged_save.buffer = self.saves.take_buffer(snapshot.nbytes, pin_for)
            buffer.is_kept = is_kept
            copies = staged_save.copies = Copies(self._device.side_streams, self._thread_count, self._limits)
            layout = self._repeat_batches(snapshot, buffer, copies)
            tensors = self._begin_copies(snapshot, buffer, copies)
            is_elsewhere = not self.way.copies_from_devices and bool(copies.on_device)
            if not is_elsewhere:
                copies.queue_from_devices()
                if layout is not None:
                    buffer.batches = copies.plan(layout)
            staged.update(snapshot.fill(tensors))
            staged_save.reach(StagingState.BUILT)
            if is_elsewhere and not self.way.copy_elsewhere(buffer, copies):  # then this process copies
                buffer.pin(self._device, snapshot.devices[0])
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

    def _repeat_batches(self, snapshot: _Snapshot, buffer: SharedBuffer, copies: Copies) -> Layout | None:
        """Queues what can be copied by the addresses of the last state in the buffer, if this one has the same: the bus
        is busy before there are staged tensors. Returns the layout; None if there are no batches.
        """
        streams = self._device.side_streams
        if not self.way.copies_from_devices or not any(streams[index].has_batches for index in snapshot.devices):
            return None
        layout = snapshot.layout()
        if buffer.batches is not None and buffer.batches.layout == layout:
            copies.repeat(buffer.batches)
        buffer.batches = None
        return layout

    @collector_paused()
    def _begin_copies(self, snapshot: _Snapshot, buffer: SharedBuffer, copies: Copies) -> list[torch.Tensor]:
        sources, dtypes, places = snapshot.sources, snapshot.dtypes, snapshot.places
        shapes = list(map(attrgetter("shape"), sources))
        if snapshot.devices:
            order = allocation_order(sources, dtypes, self._device, self._limits)
            made = buffer.allocate_all([dtypes[n] for n in order], [shapes[n] for n in order])
            of_number = dict(zip(order, made, strict=True))
            staged = [of_number[n] for n in range(len(sources))]
        else:
            staged = buffer.allocate_all(dtypes, shapes)
        copies.add(staged, sources, places)
        return staged

    @collector_paused()
    @torch.no_grad()
    def _snapshot(self, state_dict: Mapping[str, Any], omitted: frozenset[str] = frozenset()) -> _Snapshot:
        tensors = TensorList(omitted)
        structure = dict(copy_items(state_dict, "", tensors))
        listed, omitted_tensors = list(tensors), tensors.omitted
        if self._overlap_staging or self.way.holds_training:
            tensors[:] = [t.data if is_plain_class(t) else t for t in listed]
        in_place, shared = self.way.shared(tensors, omitted_tensors)
        elsewhere = in_place | omitted_tensors
        sources = [t for n, t in enumerate(tensors) if n not in elsewhere] if elsewhere else list(tensors)
        places = list(map(self._device.index_of, sources))
        dtypes = list(map(attrgetter("dtype"), sources))
        if any(place is not None for place in places) and self.dtype_of is not None and self.way.copies_from_devices:
            fixed = {id(tensors[number]) for number in tensors.inner}
            for number, (source, place) in enumerate(zip(sources, places, strict=True)):
                if place is not None and id(source) not in fixed:
                    dtypes[number] = self.dtype_of(source.dtype)
        of_sources = sources, dtypes, self.dtype_of, tensors.described, places
        return _Snapshot(structure, listed, tensors, in_place, omitted_tensors, shared, *of_sources)

    def _pin_for(self, devices: Sequence[int]) -> tuple[Device, int] | None:
        """Returns the first device from which this process copies anything."""
        return (self._device, devices[0]) if self.way.copies_from_devices and devices else None
