"""Copies what was read into scratch memory to the tensors that want parts of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .._format.chunks import regions_of_range
from .._memory.tensor_bytes import named_dtype
from .pinned_pool import Slot
from .read_planner import Segment
from .read_target import ReadTarget, part_of

__all__ = ["copy_elements", "scatter"]


def scatter(segment: Segment, data: memoryview | torch.Tensor, slot: Slot | None = None) -> None:
    """Copies to each target what it wants of a segment.

    Args:
        segment: What was read.
        data: Its bytes, on any device if they are a tensor of uint8.
        slot: Where they lie, if some targets are on a GPU: copies to those are queued.
    """
    for target in segment.targets:
        queued = slot is not None and slot.pool.is_for(target)
        # Rows of a few bytes each would cross the bus by way of unpinned memory: all that encloses them does instead.
        sent = slot.send(data, target) if queued and slot is not None and target.run is None else data
        for destination, source in _parts(target, segment, sent):
            if queued:
                assert slot is not None
                slot.copy(destination, source)
            else:
                destination.copy_(source)


def _parts(
    target: ReadTarget, segment: Segment, data: memoryview | torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of a target and of a segment's elements, which belong there."""
    content = data if isinstance(data, torch.Tensor) else torch.frombuffer(data, dtype=torch.uint8)
    elements = content.view(named_dtype(target.item.dtype))
    first = segment.start // target.itemsize
    strides = _strides(target.shape)
    for run in regions_of_range(first, first + elements.numel(), target.shape):
        region = run.intersect(target.region)
        if region is None:
            continue
        offset = sum(start * stride for start, stride in zip(region.start, strides, strict=True)) - first
        source = elements.as_strided(region.size, strides, elements.storage_offset() + offset)
        yield _with_copy_kernel(part_of(target.tensor, region, target.region), source)


def copy_elements(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target.copy_(source)``, for every dtype."""
    target, source = _with_copy_kernel(target, source)
    target.copy_(source)


def _with_copy_kernel(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensors as bytes if their elements are bytes: torch has no copy kernel for some one-byte dtypes."""
    if target.dtype == source.dtype and source.itemsize == 1:
        return target.view(torch.uint8), source.view(torch.uint8)
    return target, source


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a C-ordered array."""
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))
