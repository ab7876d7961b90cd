"""Models in Hugging Face's layout: safetensors files, with tensors possibly renamed, reshaped, in parts or quantised.

For a quantised FP8 weight, a second tensor has one scale for each block of elements. The weight is read as stored, and
multiplied by the scales when it is copied to a target whose dtype is not FP8.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from .._tensor_file.dtypes import dtype_name, named_dtype
from .._tensor_file.names import MAX_NUMBER, StoredItem
from .._tensor_file.regions import Region
from ..errors import MetadataError, ReadError, listed
from .catalog import Catalog, Coder, Piece, check_chunks, check_length
from .rename import Box, Placed, Renaming, Rules, Shape, place
from .safetensors import SHARDING, in_torch, saved_offsets
from .weight_files import StoredBytes, WeightFile, check_located, check_unreplaced, read_weight_files

if TYPE_CHECKING:
    from .._storage.base import Storage

_SCALE = "_scale_inv"
_BLOCK = (128, 128)  # of DeepSeek's models, and torch's default
_FP8 = ("float8_e4m3fn", "float8_e5m2")
_CONFIG = "config.json"


class ModelCatalog(Catalog):
    """The model in a directory's safetensors files, which `read_weight_files` chooses.

    Args:
        rename: The rules by which the model was saved, applied in reverse.
        files: The headers of the files to read, instead of those that `read_weight_files` would choose. No index is
            read.

    Raises:
        NotCommitted: there are no safetensors files.
        UnsupportedFormat: the index is that of a delta.
        MetadataError: the index or a header is damaged, they are inconsistent, or ``rename`` is given for files that
            torch's writer has not consolidated.
        ReadError: ``rename`` does not fit the model.
    """

    def __init__(
        self, storage: Storage, rename: Rules | None = None, files: Sequence[WeightFile] | None = None
    ) -> None:
        self.path = storage.path
        self._storage = storage
        self._files, file_of = read_weight_files(storage) if files is None else (files, {})
        self._items: dict[str, tuple[StoredItem, Shape]] = {}
        self._quantised: dict[str, _Quantised] = {}
        self._scales: tuple[str, torch.Tensor] | None = None  # cached for the next item of the same weight
        tensors = list(self._chosen(file_of))
        parts = next((file for file in self._files if file.notes.get(SHARDING)), None)
        if parts is None:
            self._placed = self._renamed(tensors, rename or {})
        elif rename is None:
            self._placed = self._joined(tensors)
        else:
            raise MetadataError(
                f"{self.path}/{parts.name} may have only parts of tensors: torch's HuggingFaceStorageWriter wrote it "
                f"without consolidation. Consolidate the files, or load them without rename=."
            )

    def metadata(self) -> Metadata:
        return Metadata({key: self._described(placed) for key, placed in self._placed.items()})

    def locate(self, items: Sequence[ReadItem]) -> list[list[Piece]]:
        return [list(self._pieces(item)) for item in items]

    def coder(self, item: ReadItem) -> Coder | None:
        boxes = self._placed[item.storage_index.fqn].boxes
        weights = [self._quantised[box.source] for box in boxes if box.source in self._quantised]
        if not weights:
            return None
        if len(boxes) > 1 or not boxes[0].is_same:  # the blocks would no longer match the scales
            raise ReadError(
                f"{self.path}: {weights[0].name!r} is quantised, so rename= cannot cut it, or join it with others. "
                f"Load it as one tensor."
            )
        return _BlockCoder(self, weights[0], (*item.storage_offsets, 0, 0)[:2])

    def check_unreplaced(self) -> None:
        for file in self._files:
            check_unreplaced(self._storage, file)

    @functools.cached_property
    def block(self) -> tuple[int, int]:
        """The size of a quantised block in the model's configuration; by default 128 x 128."""
        with suppress(ValueError, TypeError, LookupError, RecursionError):
            content = json.loads(self._storage.read(_CONFIG) or b"{}")
            rows, columns = content["quantization_config"]["weight_block_size"]
            if type(rows) is int and type(columns) is int and rows > 0 and columns > 0:
                return rows, columns
        return _BLOCK

    def scales_of(self, weight: _Quantised) -> torch.Tensor:
        """Returns the scales of a weight's blocks, in float32. Raises `ReadError`."""
        if self._scales is None or self._scales[0] != weight.name:
            item = weight.scales
            content = bytearray(self._storage.read_range(item.file, item.offset, item.length))
            scales = torch.frombuffer(content, dtype=torch.uint8).view(named_dtype(item.dtype))
            self._scales = weight.name, scales.view(weight.scales_shape).float()
        return self._scales[1]

    def _chosen(self, file_of: dict[str, str]) -> Iterator[tuple[WeightFile, StoredBytes]]:
        """Yields the tensors of all files. If the index gives a tensor's file, ignores the tensor in other files."""
        check_located(self.path, file_of, self._files)
        for file in self._files:
            for tensor in file.tensors:
                if file_of.get(tensor.key, file.name) == file.name:
                    yield file, tensor

    def _renamed(self, tensors: Sequence[tuple[WeightFile, StoredBytes]], rename: Rules) -> dict[str, Placed]:
        for file, tensor in tensors:
            if tensor.key in self._items:
                raise MetadataError(
                    f"{self.path} has {tensor.key!r} in two files, one of which is {file.name}. Remove the files that "
                    f"do not belong to the model."
                )
            self._items[tensor.key] = self._stored(file, tensor)
        self._quantised = {
            name: _Quantised(name, item, shape, *self._items[name + _SCALE])
            for name, (item, shape) in self._items.items()
            if item.dtype in _FP8 and name + _SCALE in self._items
        }
        try:
            placed = place(Renaming(rename).inverse(), {key: shape for key, (_, shape) in self._items.items()})
        except ValueError as error:
            raise ReadError(f"{self.path} cannot be loaded with these rules of rename=: {error}") from None
        for key, of_key in placed.items():
            sources = [box.source for box in of_key.boxes]
            if len({self._items[source][0].dtype for source in sources}) > 1:
                raise ReadError(
                    f"{self.path}: {listed(sources)} make up {key!r}, but differ in their dtypes. Load them as "
                    f"separate tensors."
                )
        return placed

    def _joined(self, tensors: Sequence[tuple[WeightFile, StoredBytes]]) -> dict[str, Placed]:
        """Joins the parts of each tensor, which torch's ``HuggingFaceStorageWriter`` may write to several files."""
        offsets: dict[str, dict[str, tuple[int, ...]]] = {}
        for file in self._files:
            try:
                offsets[file.name] = saved_offsets(file.notes)
            except ValueError as error:
                raise MetadataError(
                    f"{self.path}/{file.name}: its metadata entry {SHARDING} is damaged: {error}"
                ) from None
        placed: dict[str, Placed] = {}
        for file, tensor in tensors:
            source = f"{file.name}\0{tensor.key}"
            self._items[source] = item, shape = self._stored(file, tensor)
            origin = (0,) * len(shape)
            offset = offsets[file.name].get(tensor.key, () if file.notes.get(SHARDING) else origin)
            ends = [start + size for start, size in zip(offset, shape, strict=False)]
            if len(offset) != len(shape) or max(ends, default=0) > MAX_NUMBER:
                raise MetadataError(
                    f"{self.path}/{file.name}: its metadata entry {SHARDING} has no valid offset for {tensor.key!r}"
                )
            whole = placed.setdefault(tensor.key, Placed((0,) * len(shape)))
            first = self._items[whole.boxes[0].source][0] if whole.boxes else item
            if first.dtype != item.dtype or len(whole.shape) != len(shape):
                raise MetadataError(
                    f"{self.path}/{file.name}: its part of {tensor.key!r} differs in the dtype or the number of "
                    f"dimensions from the parts in other files. The files may belong to different models. "
                    f"Copy the whole model again."
                )
            whole.shape = tuple(map(max, whole.shape, ends))
            whole.boxes.append(Box(source, Region(origin, shape), Region(offset, shape)))
        for key, whole in placed.items():
            check_chunks(self.path, key, whole.shape, [box.here for box in whole.boxes])
        return placed

    def _stored(self, file: WeightFile, tensor: StoredBytes) -> tuple[StoredItem, Shape]:
        path = f"{self.path}/{file.name}"
        try:
            dtype, shape = in_torch(tensor.dtype, tensor.shape)
        except ValueError as error:
            raise MetadataError(f"{path}: {tensor.key!r} {error}") from None
        item = StoredItem(file.name, tensor.key, tensor.offset, tensor.nbytes, dtype_name(dtype), "tensor", b"")
        check_length(path, tensor.key, item, shape)
        return item, shape

    def _described(self, placed: Placed) -> TensorStorageMetadata:
        dtype = named_dtype(self._items[placed.boxes[0].source][0].dtype)
        size = torch.Size(placed.shape)
        whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        return TensorStorageMetadata(TensorProperties(dtype=dtype), size, [whole])

    def _pieces(self, item: ReadItem) -> Iterator[Piece]:
        wanted = Region(tuple(item.storage_offsets), tuple(item.lengths))
        placed = self._placed.get(item.storage_index.fqn)
        if placed is None:
            raise MetadataError(f"{self.path} has no data for {item.storage_index.fqn!r}")
        for box in placed.boxes:
            here, there = box.here.intersect(wanted), box.fetch(wanted)
            if here is None or there is None:
                continue
            stored, shape = self._items[box.source]
            part = here.within(wanted)
            if len(shape) < len(part.size):  # the target is a stack of stored tensors
                shape, there = (1, *shape), Region((0, *there.start), (1, *there.size))
            elif len(shape) > len(part.size):  # the stored tensor is a stack
                nbytes = stored.length // shape[0]
                stored = stored._replace(offset=stored.offset + there.start[0] * nbytes, length=nbytes)
                shape, there = shape[1:], Region(there.start[1:], there.size[1:])
            yield Piece(stored, shape, there, part)


class _Quantised(NamedTuple):
    name: str
    item: StoredItem
    shape: Shape
    scales: StoredItem
    scales_shape: Shape


class _BlockCoder:
    """The coder of a part of a weight, from row and column ``start`` on: multiplies elements by their block's scale."""

    def __init__(self, catalog: ModelCatalog, weight: _Quantised, start: tuple[int, int]) -> None:
        self._catalog, self._weight, self._start = catalog, weight, start

    def memory_for(self, target: torch.Tensor) -> torch.Tensor:
        """Returns the target itself if it is of the stored dtype, otherwise memory for the stored elements.

        Raises `ReadError`, naming the weight, if the target has another FP8 dtype, or if the target has no FP8 dtype
        and the scales do not fit the weight.
        """
        path, weight = self._catalog.path, self._weight
        dtype = named_dtype(weight.item.dtype)
        if target.dtype.is_floating_point and target.dtype.itemsize == 1:
            if target.dtype != dtype:
                raise ReadError(
                    f"{path}: {weight.name!r} is stored as {weight.item.dtype}, whose scales do not fit a target of "
                    f"{target.dtype}. Pass a target of the same dtype, or of a dtype with more bits."
                )
            return target
        rows, columns = self._catalog.block
        blocks = tuple(-(-extent // size) for extent, size in zip(weight.shape, (rows, columns), strict=False))
        if len(weight.shape) != 2 or weight.scales_shape != blocks:
            raise ReadError(
                f"{path}: {weight.name!r} has shape {weight.shape} and its scales have shape {weight.scales_shape}, "
                f"which do not match blocks of {rows} x {columns}: weight_block_size in {_CONFIG} is wrong, or the "
                f"weight is quantised in another way. Pass a target of {weight.item.dtype} to load it as stored."
            )
        return torch.empty(target.shape, dtype=dtype, device="cpu")

    def decode(self, stored: torch.Tensor, target: torch.Tensor) -> None:
        if not stored.numel():
            return
        scales, (rows, columns) = self._catalog.scales_of(self._weight), self._catalog.block
        first, left = self._start
        of_columns = torch.arange(left, left + stored.shape[1]) // columns
        at = 0
        while at < stored.shape[0]:
            number = (first + at) // rows
            end = min(stored.shape[0], (number + 1) * rows - first)
            target[at:end].copy_(stored[at:end].float() * scales[number, of_columns])
            at = end
