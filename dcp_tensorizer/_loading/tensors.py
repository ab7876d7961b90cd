"""Tensors: the planner says where each one goes, it is read there, and the planner hears of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from .._format.index_reader import Piece
from .._memory.garbage import collector_paused
from .._memory.tensor_bytes import is_wrapper, named_dtype
from .._torch_compat import is_fake
from .read_target import ReadTarget

__all__ = ["delivers_at_once", "read_tensors"]

_Items = Sequence[tuple[ReadItem, Sequence[Piece]]]
_DELIVERY = ("resolve_tensor", "lookup_tensor", "transform_tensor", "commit_tensor")


def read_tensors(
    items: _Items,
    planner: LoadPlanner,
    targets_of: Callable[[ReadItem, Sequence[Piece], torch.Tensor], list[ReadTarget]],
    read: Callable[..., int],
    progress: Callable[[int, int], object],
) -> int:
    """Reads tensors to where the planner wants them.

    All at once, if the planner is one of torch's own, or this package's. Others may give one scratch buffer for each
    tensor, and empty it when they hear of that: they get one tensor after the other, as from torch's own reader.

    Args:
        items: What to read, and where each is stored.
        planner: Resolves and commits.
        targets_of: Checks that an item fits a tensor, and says what to read.
        read: Reads targets as `executor.fetch` does.
        progress: Called with the bytes that are done and the bytes in all.

    Returns:
        How many bytes were read.
    """
    # An estimate: parts may be less, whole blocks more.
    total = sum(piece.item.length for _, pieces in items for piece in pieces)
    done = 0
    for batch in _batches(items, planner):
        with collector_paused():
            tensors = [planner.resolve_tensor(read_item).detach() for read_item, _ in batch]
            places = [_place_for(tensor, pieces) for tensor, (_, pieces) in zip(tensors, batch, strict=True)]
            wanted = zip(batch, places, strict=True)  # of a fake tensor the shape is wanted, which is known
            targets = [t for item, place in wanted if not is_fake(place) for t in targets_of(*item, place)]
        tell = progress if len(batch) == len(items) else _within(progress, done, total)
        done += read(targets, progress=tell)
        for (read_item, _), tensor, place in zip(batch, tensors, places, strict=True):
            if place is not tensor:
                tensor.copy_(place)
            planner.commit_tensor(read_item, tensor)
    return done


def _place_for(tensor: torch.Tensor, pieces: Sequence[Piece]) -> torch.Tensor:
    """Where the elements of a tensor are read to: into itself, unless it is made of other tensors.

    Such a one may have any elements in them, as scaled ones. Its class copies plain ones into it, all at once.
    """
    if not pieces or not is_wrapper(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=named_dtype(pieces[0].item.dtype), device="cpu")


def delivers_at_once(planner: LoadPlanner) -> bool:
    """Whether a planner gets all tensors at once: it is one of torch's own, or `planner.LoadPlanner`."""
    known = getattr(planner, "delivers_as_torch", DefaultLoadPlanner)  # `planner.LoadPlanner` names itself there
    return all(getattr(type(planner), name, None) is getattr(known, name) for name in _DELIVERY)


def _batches(items: _Items, planner: LoadPlanner) -> Iterator[_Items]:
    """What is resolved before anything of it is committed."""
    if delivers_at_once(planner):
        yield items
    else:
        yield from ([item] for item in items)


def _within(progress: Callable[[int, int], object], before: int, total: int) -> Callable[[int, int], object]:
    """The progress of a read that is a part of a longer one."""
    return lambda done, _: progress(before + done, max(total, before + done))
