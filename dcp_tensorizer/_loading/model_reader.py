"""Loads models as Hugging Face has them, from any storage, also under other names and in other shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from .._formats.placement import Box, Placed, place
from .._formats.rename import Renaming, Rules
from .._formats.safetensors import SHARDING, in_torch
from .._index.layouts import Region
from .._index.read import Piece
from .._publish.model import StoredBytes, WeightFile, check_unreplaced
from .._runtime.ranks import world_size_of_job
from .._storage.base import Storage
from .._tensor_file.dtypes import dtype_name
from .._tensor_file.names import StoredItem
from ..errors import MetadataError, ReadError, listed
from .deliver import LoadOptions, read_tensors
from .dequantise import DequantisingPlanner, Quantised, quantised
from .foreign_reader import ForeignReader
from .run import fetch
from .targets import Casts, targets_of, warn_of_casts
from .validate import check_length


class ModelReader(ForeignReader):
    """Loads a model from the files that its index names, or, without an index, from all safetensors files there.

    ``files`` are these files. ``rename`` are the rules by which the model was saved; they are used the other way round.
    Only the bytes that a rank needs are read.
    """

    def __init__(
        self,
        storage: Storage,
        files: Sequence[WeightFile],
        rename: Rules,
        options: LoadOptions,
        progress: Callable[[int, int], object],
    ) -> None:
        super().__init__(storage)
        self._files = files
        self._renaming = Renaming(rename).inverse()
        self._options = options
        self._progress = progress
        self._items: dict[str, tuple[StoredItem, tuple[int, ...]]] = {}  # the tensors of the files
        self._quantised: dict[str, Quantised] = {}
        self._placed: dict[str, Placed] = {}  # those that can be loaded

    def _read_metadata(self, rank: int | None) -> Metadata:
        self._items = {}
        self._place(self._files)
        return Metadata({key: self._described(placed) for key, placed in self._placed.items()})

    def _load(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        path, casts = self._storage.path, Casts()
        options = self._options
        wanted = functools.partial(targets_of, path, self._metadata, world_size_of_job(), casts)
        read = functools.partial(
            fetch, self._storage, threads=options.threads, verify=False, page_cache=options.page_cache
        )
        weights = [(item, self._weight_of(item)) for item in plan.items]
        plain = [(item, self._pieces(item)) for item, weight in weights if weight is None]
        scaled = {id(item): (item, weight) for item, weight in weights if weight is not None}
        pieces = [(item, self._pieces(item)) for item, _ in scaled.values()]
        sizes = [sum(piece.item.length for _, of_item in part for piece in of_item) for part in (plain, pieces)]
        read_tensors(plain, planner, wanted, read, _share(self._progress, 0, *sizes))
        if scaled:
            dequantising: Any = DequantisingPlanner(self._storage, planner, lambda item: scaled[id(item)][1], read)
            read_tensors(pieces, dequantising, wanted, read, _share(self._progress, sizes[0], sizes[1], 0))
        for file in self._files:
            check_unreplaced(self._storage, file)
        warn_of_casts(path, casts)

    def _place(self, files: Sequence[WeightFile]) -> None:
        """Notes the tensors of the files, and which tensors of the state dict they make up; raises `MetadataError`."""
        path = self._storage.path
        for file in files:
            if SHARDING in file.notes:
                raise MetadataError(
                    f"{path}/{file.name} has parts of tensors, as torch's HuggingFaceStorageWriter leaves them without "
                    f"consolidation: consolidate them, or load them from a local disk without rename="
                )
            for tensor in file.tensors:
                if tensor.key in self._items:
                    raise MetadataError(f"{path} has {tensor.key!r} in two files: {file.name} and another one")
                self._items[tensor.key] = _stored(f"{path}/{file.name}", file.name, tensor)
        self._quantised = quantised(self._items)
        try:
            self._placed = place(self._renaming, {key: shape for key, (_, shape) in self._items.items()})
        except ValueError as error:
            raise ReadError(f"{path} cannot be loaded with these names: {error}") from None
        for key, placed in self._placed.items():
            if len({self._items[box.source][0].dtype for box in placed.boxes}) > 1:
                sources = [box.source for box in placed.boxes]
                raise ReadError(f"{path}: {listed(sources)} are {key!r} together, and differ in their dtypes")

    def _weight_of(self, item: ReadItem) -> Quantised | None:
        """The quantised weight that an item is of; None if it is of none.

        Raises `ReadError` if a rule cuts or joins it: its blocks would no longer be where its scales say.
        """
        boxes = self._placed[item.storage_index.fqn].boxes
        weights = [self._quantised[box.source] for box in boxes if box.source in self._quantised]
        if weights and not (len(boxes) == 1 and boxes[0].is_same):
            raise ReadError(
                f"{self._storage.path}: {weights[0].name!r} is quantised, and rename= cuts it or joins it: load it "
                f"under a name of its own"
            )
        return weights[0] if weights else None

    def _described(self, placed: Placed) -> TensorStorageMetadata:
        dtype = getattr(torch, self._items[placed.boxes[0].source][0].dtype)
        size = torch.Size(placed.shape)
        whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        return TensorStorageMetadata(TensorProperties(dtype=dtype), size, [whole])

    def _pieces(self, item: ReadItem) -> list[Piece]:
        """The parts of stored tensors that an item of a load plan wants."""
        wanted = Region(tuple(item.storage_offsets), tuple(item.lengths))
        placed = self._placed[item.storage_index.fqn]
        return [piece for box in placed.boxes if (piece := self._piece(box, wanted)) is not None]

    def _piece(self, box: Box, wanted: Region) -> Piece | None:
        here, there = box.here.intersect(wanted), box.fetch(wanted)
        if here is None or there is None:
            return None
        item, shape = self._items[box.source]
        part = here.within(wanted)
        if len(shape) < len(part.size):  # a part of what is stacked here
            shape, there = (1, *shape), Region((0, *there.start), (1, *there.size))
        elif len(shape) > len(part.size):  # one of what is stacked there
            nbytes = item.length // shape[0]
            item = item._replace(offset=item.offset + there.start[0] * nbytes, length=nbytes)
            shape, there = shape[1:], Region(there.start[1:], there.size[1:])
        return Piece(item, shape, there, part)


def _share(progress: Callable[[int, int], object], before: int, size: int, after: int) -> Callable[[int, int], object]:
    """Turns the progress of a share of the bytes into that of all of them."""

    def tell(done: int, total: int) -> None:
        progress(before + (size if done >= total else min(done, size)), before + size + after)

    return tell


def _stored(path: str, file: str, tensor: StoredBytes) -> tuple[StoredItem, tuple[int, ...]]:
    """The place of a tensor, and its shape; raises `MetadataError` if its dtype is unknown, or has another size."""
    try:
        dtype, shape = in_torch(tensor.dtype, tensor.shape)
    except ValueError as error:
        raise MetadataError(f"{path}: {tensor.key!r} {error}") from None
    item = StoredItem(file, tensor.key, tensor.offset, tensor.nbytes, dtype_name(dtype), "tensor", b"")
    check_length(path, tensor.key, item, shape)
    return item, shape
