"""The targets of a load: a region of each stored tensor, and the tensor that receives it."""

from __future__ import annotations

import logging
import math
import pickle
import uuid
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from .._formats.catalog import Piece, check_length
from .._index.layouts import Region
from .._runtime.torch_compat import is_fake, is_plain
from .._tensor_file.dtypes import named_dtype
from .._tensor_file.names import StoredItem
from ..errors import ReadError, listed

logger = logging.getLogger("dcp_tensorizer")

Casts = dict[tuple[torch.dtype, torch.dtype], list[str]]
"""The keys of tensors that are converted while they are loaded, by the stored dtype and the target's."""


@dataclass(slots=True, eq=False)  # two targets of the same region are not equal
class ReadTarget:
    """A region of a stored tensor, and the tensor that receives it."""

    key: str  # for messages
    item: StoredItem
    shape: tuple[int, ...]  # of the stored tensor
    region: Region  # not empty
    tensor: torch.Tensor  # of the region's shape; of any dtype, device and strides, unless `in_place`
    in_place: bool  # the stored bytes can be read into its memory as they are
    shared: bool = False  # other ranks most likely read the same bytes

    @classmethod
    def of(cls, key: str, item: StoredItem, shape: tuple[int, ...], region: Region, tensor: torch.Tensor) -> ReadTarget:
        """A target that is read in place if its tensor allows that."""
        return cls(key, item, shape, region, tensor, can_read_in_place(tensor, named_dtype(item.dtype)))

    @classmethod
    def of_bytes(cls, key: str, item: StoredItem, start: int, tensor: torch.Tensor) -> ReadTarget:
        """A target for stored bytes as they are, from the byte ``start`` on: a uint8 tensor in host memory."""
        region = Region((start,), (tensor.numel(),))
        return cls(key, item._replace(dtype="uint8"), (item.length,), region, tensor, in_place=True)

    @property
    def itemsize(self) -> int:
        """The size of a stored element in bytes."""
        return named_dtype(self.item.dtype).itemsize

    @property
    def has_stored_layout(self) -> bool:
        """Returns whether its elements have the stored dtype, and their bytes are one run here and in the stored
        tensor.
        """
        is_same = self.tensor.dtype == named_dtype(self.item.dtype) and is_plain(self.tensor)
        return is_same and self.run is not None

    @property
    def run(self) -> tuple[int, int] | None:
        """The region's first byte in the stored tensor and the one after its last, if its bytes are one run; otherwise
        None.
        """
        if self.region.size == self.shape:
            return 0, self.item.length
        first, stop = self.region.span(self.shape)
        is_run = stop - first == math.prod(self.region.size)
        return (first * self.itemsize, stop * self.itemsize) if is_run else None


def can_read_in_place(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Returns whether stored elements of ``dtype`` can be read into a tensor's memory as they are."""
    return tensor.is_cpu and tensor.dtype == dtype and is_plain(tensor)


def is_object(pieces: Sequence[Piece]) -> bool:
    """Returns whether a value was stored by ``torch.save``."""
    return bool(pieces) and pieces[0].item.kind != "tensor"


def targets_of(
    path: str,
    metadata: Metadata,
    world_size: int,
    casts: Casts,
    read_item: ReadItem,
    pieces: Sequence[Piece],
    tensor: torch.Tensor,
) -> list[ReadTarget]:
    """The targets of one item of a load plan, after checking that it fits; none for a fake tensor, whose shape is
    known.

    ``pieces`` are its stored chunks, and ``tensor`` receives it. ``casts`` gets the key if the tensor has another
    dtype. Raises `ReadError` if it does not fit the tensor, and `MetadataError` if the metadata contradicts itself;
    both name the key.
    """
    key = read_item.dest_index.fqn
    if world_size == 1 and len(pieces) == 1 and type(tensor) is torch.Tensor:
        item, shape, region, _ = pieces[0]  # most items: one whole tensor, and a target of its dtype and shape
        is_same = region.size == shape == tensor.shape and tensor.nbytes == item.length
        if is_same and can_read_in_place(tensor, named_dtype(item.dtype)):
            return [ReadTarget(key, item, shape, region, tensor, True)]
    if is_fake(tensor):
        return []
    size = tuple(read_item.lengths)
    entry = metadata.state_dict_metadata.get(read_item.storage_index.fqn) if not pieces or world_size > 1 else None
    whole_size = entry.size if isinstance(entry, TensorStorageMetadata) else None
    if not pieces and isinstance(entry, TensorStorageMetadata):
        _check_fit(key, size, entry.properties.dtype, tensor, casts)
    targets = []
    for piece in pieces:
        _check_fit(key, size, named_dtype(piece.item.dtype), tensor, casts)
        check_length(path, key, piece.item, piece.shape)
        part = tensor if piece.part.size == size else part_of(tensor, piece.part, Region((0,) * len(size), size))
        target = ReadTarget.of(key, piece.item, piece.shape, piece.region, part)
        # Other ranks may read the same bytes: of a replicated tensor, or of a tensor of which they want other columns.
        target.shared = world_size > 1 and (size == whole_size or target.run is None)
        targets.append(target)
    return targets


def part_of(tensor: torch.Tensor, region: Region, whole: Region) -> torch.Tensor:
    """The view of ``region`` in a tensor that holds the region ``whole``."""
    for dim, (start, size, origin) in enumerate(zip(region.start, region.size, whole.start, strict=True)):
        tensor = tensor.narrow(dim, start - origin, size)
    return tensor


def _check_fit(key: str, size: tuple[int, ...], stored_dtype: torch.dtype, tensor: torch.Tensor, casts: Casts) -> None:
    if tensor.shape != size:
        raise ReadError(f"{key!r}: stored {size} do not fit a target of {tuple(tensor.shape)}")
    if _is_expanded(tensor):
        raise ReadError(f"{key!r}: the elements of its target share memory (it is expanded): load into a clone of it")
    if tensor.dtype == stored_dtype:
        return
    if not torch.can_cast(stored_dtype, tensor.dtype):
        raise ReadError(
            f"{key!r} is stored as {stored_dtype}, which does not convert to the {tensor.dtype} of its target: "
            f"load it into a tensor of {stored_dtype}"
        )
    keys = casts.setdefault((stored_dtype, tensor.dtype), [])
    if key not in keys[-1:]:  # this is called for each chunk of a tensor
        keys.append(key)


def warn_of_casts(path: str, casts: Casts) -> None:
    """Warns, once for each pair of dtypes, of tensors that were converted while they were loaded."""
    for (stored_dtype, dtype), keys in casts.items():
        logger.warning(
            "%s: %s stored as %s and converted to the %s of the target: %s",
            path,
            "1 tensor is" if len(keys) == 1 else f"{len(keys):,} tensors are",
            stored_dtype,
            dtype,
            listed(keys),
        )


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Returns whether elements of a tensor share memory."""
    if tensor.is_contiguous():
        return False
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def in_turns(targets: Sequence[ReadTarget]) -> Iterator[Sequence[ReadTarget]]:
    """The groups of targets that may be read at the same time, in order.

    Targets that share memory, such as tied weights, are read one by one, in the order of the plan. So the last one is
    whole, as with torch's reader. Reads at the same time would mix.
    """
    shared = overlapping(targets)
    alone = [target for target in targets if target not in shared] if shared else targets
    if alone:
        yield alone
    yield from ([target] for target in targets if target in shared)


def overlapping(targets: Sequence[ReadTarget]) -> set[ReadTarget]:
    """The targets whose memory overlaps that of another one."""
    if all(target.in_place for target in targets):  # most loads: one look at all of them
        starts = np.array([target.tensor.data_ptr() for target in targets], dtype=np.int64)
        stops = starts + np.array([target.tensor.nbytes for target in targets], dtype=np.int64)
        order = np.argsort(starts)
        if (stops[order[:-1]] <= starts[order[1:]]).all():
            return set()
    placed = sorted((*_memory(t), n) for n, t in enumerate(targets) if t.in_place or type(t.tensor) is torch.Tensor)
    overlapping: set[ReadTarget] = set()
    furthest = reached_device = reached = -1
    for device, start, stop, number in placed:
        if device != reached_device or start >= reached:
            furthest, reached_device, reached = number, device, stop
            continue
        overlapping |= {targets[furthest], targets[number]}
        if stop > reached:
            furthest, reached = number, stop
    return overlapping


def _memory(target: ReadTarget) -> tuple[int, int, int]:
    """The number of a target's GPU, or -1; the address of its first element, and the one after its last."""
    tensor = target.tensor
    first = tensor.data_ptr()
    if target.in_place:
        return -1, first, first + tensor.nbytes
    if tensor.is_contiguous():
        return tensor.get_device(), first, first + tensor.nbytes
    elements = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.get_device(), first, first + elements * tensor.itemsize


# --- a load plan whose items stay on their rank -----------------------------------------------------------------------
#
# DCP sends the plans of all ranks to the coordinator and back. A planner may change them there, but hardly any does. So
# the items travel as one piece. It is decoded only if a planner accesses it, and comes back only then.

_at_home: WeakValueDictionary[str, RetainedPlan] = WeakValueDictionary()
"""The plans that ranks of this process have made and still have."""


class RetainedPlan(LoadPlan):
    """A load plan whose items stay on their rank. The plan that `keep` returns must be kept until it has come back.

    Its fields are those of `LoadPlan`. To change the items elsewhere, set them, or make a new plan.
    """

    def __init__(self, items: list[ReadItem], storage_data: Any = None, planner_data: Any = None) -> None:
        self._items: list[ReadItem] | None = items
        self._packed = b""
        self._token = ""
        self._rank = -1
        self.storage_data = storage_data
        self.planner_data = planner_data

    @classmethod
    def keep(cls, plan: LoadPlan, rank: int, storage_data: Any) -> RetainedPlan:
        """The plan of a rank, with other ``storage_data``."""
        kept = cls(plan.items, storage_data, plan.planner_data)
        kept._token, kept._rank = uuid.uuid4().hex, rank
        _at_home[kept._token] = kept
        return kept

    @property
    def items(self) -> list[ReadItem]:
        if self._items is None:
            self._items = pickle.loads(zlib.decompress(self._packed))
        if _at_home.get(self._token) is not self:
            self._token = ""  # the caller may change them, so these are sent from now on
        return self._items

    @items.setter
    def items(self, items: list[ReadItem]) -> None:
        self._items, self._token = items, ""

    def send_to(self, rank: int) -> None:
        """Sends the items along if a planner has given the plan to another rank than the one that made it."""
        if rank != self._rank:
            self.items = self.items

    def __reduce__(self) -> tuple[Any, ...]:
        data = self.storage_data, self.planner_data
        if not self._token:
            return RetainedPlan, (self.items, *data)
        if self._items is None:
            return _back, (self._token, *data)
        return _sent, (self._token, self._rank, zlib.compress(pickle.dumps(self._items), 1), *data)


def _sent(token: str, rank: int, packed: bytes, storage_data: Any, planner_data: Any) -> RetainedPlan:
    """Rebuilds the plan on the coordinator, with its items in one piece."""
    plan = RetainedPlan([], storage_data, planner_data)
    plan._items, plan._packed, plan._token, plan._rank = None, packed, token, rank
    return plan


def _back(token: str, storage_data: Any, planner_data: Any) -> RetainedPlan:
    """Rebuilds the plan on the rank that made it, with the items that it has kept."""
    return RetainedPlan(_at_home[token].items, storage_data, planner_data)
