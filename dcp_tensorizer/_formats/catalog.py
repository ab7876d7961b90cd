"""The contents of a checkpoint in any format: DCP's metadata, and the locations of a load plan's items."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from .._index.layouts import ChunkLayout
from .._tensor_file.dtypes import named_dtype
from .._tensor_file.names import StoredItem
from .._tensor_file.regions import Region, covers
from ..errors import MetadataError


class Piece(NamedTuple):
    """A region of a stored chunk, and the part of the requested region that it fills."""

    item: StoredItem
    shape: tuple[int, ...]  # of the chunk
    region: Region  # in the chunk
    part: Region  # in the requested region


class Coder(Protocol):
    """The decoder of a tensor whose elements are not stored as they are."""

    def memory_for(self, target: torch.Tensor) -> torch.Tensor:
        """Returns the memory to read the stored form into: the target itself if no decoding is needed.

        Raises `ReadError`.
        """

    def decode(self, stored: torch.Tensor, target: torch.Tensor) -> None:
        """Fills the target from the stored form, in the memory that `memory_for` returned. Raises `ReadError`."""


class Catalog(abc.ABC):
    """The contents of a checkpoint.

    Attributes:
        path: The path of the checkpoint, or of its metadata file, for messages.
        files: The size of each data file in bytes, by name; empty if the format does not record it.
        in_memory: The contents of files that exist only in the catalog, by name.
        encryption: The description of the key (see `encryption.unlock`); None if the checkpoint is not encrypted.
        has_digests: Whether each stored item has digests, so that reads can be verified.
    """

    path: str
    files: Mapping[str, int] = MappingProxyType({})
    in_memory: Mapping[str, bytes] = MappingProxyType({})
    encryption: Mapping[str, Any] | None = None
    has_digests = False

    @abc.abstractmethod
    def metadata(self) -> Metadata:
        """Returns DCP's metadata for a load."""

    @abc.abstractmethod
    def locate(self, items: Sequence[ReadItem]) -> list[list[Piece]]:
        """Returns the stored chunks of each item. Raises `MetadataError` or `ReadError`, naming the key."""

    def incomplete_layouts(self) -> Mapping[Any, ChunkLayout]:
        """Returns, by key, the layouts of the tensors that `check_coverage` must check."""
        return {}

    def coder(self, item: ReadItem) -> Coder | None:
        """Returns the coder of a tensor whose elements are not stored as they are. For other items, returns None.

        Objects have no coder: see `decoded`. Raises `ReadError`.
        """
        return None

    def decoded(self, item: ReadItem, content: bytes) -> bytes:
        """Returns the ``torch.save`` bytes of an object, from its stored bytes. Raises `ReadError`."""
        return content

    def check_unreplaced(self) -> None:  # noqa: B027
        """Raises `ReadError` if a file was replaced after the catalog was made: its data may not match the catalog."""


def check_length(path: str, key: str, item: StoredItem, shape: tuple[int, ...]) -> None:
    """Raises `MetadataError`, naming the key, unless a stored tensor has the size of its shape and dtype."""
    if math.prod(shape) * named_dtype(item.dtype).itemsize != item.length:
        raise MetadataError(
            f"{path}: {key!r} of shape {shape} has {item.length:,} bytes stored, which do not match its shape and dtype"
        )


def no_data(path: str, key: Any, offset: Sequence[int] | None) -> MetadataError:
    """Returns the error for a chunk without a location, or, if ``offset`` is None, for an object without one."""
    at = "" if offset is None else f" at offset {tuple(offset)}"
    return MetadataError(f"{path} has no data for {key!r}{at}")


def check_chunks(path: str, key: str, shape: Sequence[int], regions: Sequence[Region]) -> None:
    """Raises `MetadataError`, naming the key, unless the stored chunks of a tensor hold each of its elements once."""
    if not covers(shape, regions):
        held = sum(math.prod(region.size) for region in regions)
        raise MetadataError(
            f"{path}: the stored chunks of {key!r} do not make up its {math.prod(shape):,} elements: they hold "
            f"{held:,} in total, so a rank's part is missing or stored twice"
        )


def check_coverage(path: str, catalog: Catalog, keys: Iterable[str]) -> None:
    """Checks those tensors among ``keys`` that are in `Catalog.incomplete_layouts`, as `check_chunks` does."""
    incomplete = catalog.incomplete_layouts()
    for key in incomplete.keys() & keys:
        check_chunks(path, key, incomplete[key].shape, incomplete[key].regions)


def copy_part(item: ReadItem, tensor: torch.Tensor, target: torch.Tensor) -> None:
    """Copies the part of a stored tensor that an item describes. Raises `ValueError` if it does not fit the target."""
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        if length < tensor.size(dim):  # only if needed: some classes do not support `narrow`
            tensor = tensor.narrow(dim, start, length)
    if target.shape != tensor.shape:  # `copy_` might broadcast it
        raise ValueError(f"it is of shape {tuple(tensor.shape)}, but its target is of shape {tuple(target.shape)}")
    target.copy_(tensor)
