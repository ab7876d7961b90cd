"""Checkpoints of torch's own ``FileSystemWriter`` and ``FsspecWriter``."""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from .._runtime.interpreter import collector_paused
from .._runtime.torch_compat import ExtensionRegistry, StorageInfo, StreamTransformExtension
from .._tensor_file.names import StoredItem
from .._tensor_file.regions import Region
from ..errors import CheckpointError, MetadataError, ReadError, describe
from .catalog import Catalog, Coder, Piece, copy_part
from .torch_archive import check_saved
from .torch_metadata import read_pickled

if TYPE_CHECKING:
    from .._storage.base import Storage


class TorchCatalog(Catalog):
    """A checkpoint in torch's own format: the ``torch.save`` bytes of each item, and a pickle with their locations.

    Args:
        name: The name of its metadata file.
        pickled: The contents of the metadata file.
        allow_pickle: Unpickle the metadata without checks.
        extensions: The decoders of streams that torch's writer has encoded; None: torch's own.

    Raises:
        UntrustedObject: the metadata refers to something that does not belong in it, and that might run code.
        MetadataError: the metadata is damaged.
    """

    def __init__(
        self,
        storage: Storage,
        name: str,
        pickled: bytes,
        *,
        allow_pickle: bool = False,
        extensions: ExtensionRegistry | None = None,
    ) -> None:
        self.path = f"{storage.path}/{name}"
        self._storage = storage
        self._extensions = extensions
        self._size_of = functools.cache(storage.head)
        with collector_paused():
            if allow_pickle:
                try:
                    metadata = pickle.loads(pickled)
                except Exception as error:
                    raise MetadataError(f"{self.path} cannot be read: {describe(error)}") from error
                if not isinstance(metadata, Metadata):
                    kind = type(metadata).__name__
                    raise MetadataError(f"{self.path} must hold a checkpoint's metadata, got an object of type {kind}.")
            else:
                metadata = read_pickled(pickled, self.path)
        self._metadata = metadata

    def metadata(self) -> Metadata:
        return self._metadata

    def locate(self, items: Sequence[ReadItem]) -> list[list[Piece]]:
        """Returns the location of each item's ``torch.save`` bytes.

        Raises `MetadataError` if an item is not stored, and `ReadError` if its file is missing or too short.
        """
        return [[self._archive(item.storage_index)] for item in items]

    def coder(self, item: ReadItem) -> Coder | None:
        return None if item.type == LoadItemType.BYTE_IO else _TensorArchive(self, item)

    def decoded(self, item: ReadItem, content: bytes) -> bytes:
        if not (descriptors := self.transforms(item)):
            return content
        stream: IO[bytes] = io.BytesIO(content)
        try:
            for extension in (self._extensions or ExtensionRegistry()).from_descriptor_list(descriptors):
                if isinstance(extension, StreamTransformExtension):
                    stream = extension.transform_from(stream)
            return stream.read(-1)
        except Exception as error:
            raise self.not_loaded(item, error) from error

    def transforms(self, item: ReadItem) -> Sequence[str]:
        return self.info(item.storage_index).transform_descriptors or ()

    def info(self, index: MetadataIndex) -> StorageInfo:
        """Returns an item's file, offset and length. Raises `MetadataError`, naming the key, if it is not stored."""
        info: StorageInfo | None = (self._metadata.storage_data or {}).get(index)
        if info is None:
            raise MetadataError(f"{self.path} has no data for {index.fqn!r}")
        return info

    def not_loaded(self, item: ReadItem, error: Exception) -> CheckpointError:
        """Returns the error for an item that cannot be loaded, naming its key and file.

        Returns an error of this package unchanged.
        """
        if isinstance(error, CheckpointError):
            return error
        path = f"{self._storage.path}/{self.info(item.storage_index).relative_path}"
        return ReadError(f"{item.dest_index.fqn!r} in {path} cannot be loaded: {describe(error)}")

    def _archive(self, index: MetadataIndex) -> Piece:
        info = self.info(index)
        nbytes, end = self._size_of(info.relative_path), info.offset + info.length
        if nbytes is None or end > nbytes:
            found = "does not exist" if nbytes is None else f"has {nbytes:,} bytes"
            raise ReadError(
                f"{self._storage.path}/{info.relative_path} {found}, but {index.fqn!r} is at bytes {info.offset:,} to "
                f"{end:,}. Load another checkpoint."
            )
        whole = Region((0,), (info.length,))
        item = StoredItem(info.relative_path, index.fqn, info.offset, info.length, "uint8", "object", b"")
        return Piece(item, whole.size, whole, whole)


class _TensorArchive:
    """The coder of a tensor, or a part of one, that ``torch.save`` has stored."""

    def __init__(self, catalog: TorchCatalog, item: ReadItem) -> None:
        self._catalog, self._item, self._stored = catalog, item, io.BytesIO()

    def memory_for(self, target: torch.Tensor) -> torch.Tensor:
        nbytes = self._catalog.info(self._item.storage_index).length
        self._stored = io.BytesIO(bytes(nbytes))
        # The stream's own buffer: `torch.load` reads it without another copy in memory.
        return torch.frombuffer(self._stored.getbuffer(), dtype=torch.uint8) if nbytes else torch.empty(0)

    def decode(self, stored: torch.Tensor, target: torch.Tensor) -> None:
        catalog, stream = self._catalog, self._stored
        if catalog.transforms(self._item):
            stream = io.BytesIO(catalog.decoded(self._item, stream.getvalue()))
        try:
            nbytes = stream.seek(0, io.SEEK_END)
            stream.seek(0)
            check_saved(stream, nbytes)
            stream.seek(0)
            tensor = torch.load(stream, map_location="cpu", weights_only=True)
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"the stored value must be a tensor, got a {type(tensor).__name__}")
            copy_part(self._item, tensor, target)
        except Exception as error:
            raise catalog.not_loaded(self._item, error) from error
