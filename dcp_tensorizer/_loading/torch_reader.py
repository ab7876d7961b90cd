"""Loads checkpoints of torch's own ``FileSystemWriter`` and ``FsspecWriter``, without running code from them.

torch's readers unpickle ``.metadata`` and every object, whatever they contain. This one builds only DCP's own records
from ``.metadata``, and checks objects like those of this package.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from .._formats.torch_metadata import read_pickled
from .._runtime.gc_pause import collector_paused
from .._runtime.torch_compat import ExtensionRegistry, StorageInfo, StreamTransformExtension
from .._storage.base import Storage
from .._tensor_file.names import metadata_file_name
from .._trust.torch_archive import check_saved
from ..errors import CheckpointError, MetadataError, ReadError, UntrustedObject, describe
from .deliver import check_trust, copy_to_target, deliver_object
from .foreign_reader import ForeignReader
from .validate import not_committed, nothing_committed, warn_of_empty_dicts


class TorchReader(ForeignReader):
    """Loads a checkpoint of torch's own format.

    ``allow_pickle`` unpickles ``.metadata`` and objects of any type. ``extensions`` decode streams of torch's writer;
    None: torch's.
    """

    def __init__(
        self, storage: Storage, *, allow_pickle: bool = False, extensions: ExtensionRegistry | None = None
    ) -> None:
        super().__init__(storage)
        self._allows_pickle = allow_pickle
        self._extensions = extensions

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Checks, before any target changes, that the files have the bytes that the plan asks for.

        Raises `MetadataError` if an item has no place, and `ReadError` if a file is missing or too short; both name the
        key.
        """
        sizes: dict[str, int | None] = {}
        for item in plan.items:
            info = self._place(item)
            if info.relative_path not in sizes:
                sizes[info.relative_path] = self._storage.head(info.relative_path)
            nbytes = sizes[info.relative_path]
            if nbytes is None or info.offset + info.length > nbytes:
                found = "does not exist" if nbytes is None else f"has {nbytes:,} bytes"
                raise ReadError(
                    f"{self._storage.path}/{info.relative_path} {found}, and {item.storage_index.fqn!r} is at byte "
                    f"{info.offset:,} to {info.offset + info.length:,} of it. Load another checkpoint."
                )
        return plan

    def _load(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Reads in the order of files and offsets.

        Raises `ReadError`, naming key and file, if bytes cannot be read or do not fit their target, and
        `UntrustedObject`, before any target changes, if objects could run code.
        """
        warn_of_empty_dicts(self._storage.path, planner)
        items = sorted(plan.items, key=lambda item: (self._place(item).relative_path, self._place(item).offset))
        objects = [(item, self._content(item)) for item in items if item.type == LoadItemType.BYTE_IO]
        if not self._allows_pickle:
            check_trust(self._storage.path, objects)
        for item in items:
            if item.type != LoadItemType.BYTE_IO:
                content = self._content(item)
                with self._naming(item):
                    copy_to_target(planner, item, _tensor(content))
        for item, content in objects:
            deliver_object(self._storage.path, planner, item, content)

    def _read_metadata(self, rank: int | None) -> Metadata:
        name = metadata_file_name(rank)
        pickled = self._storage.read(name)
        if pickled is None:
            raise not_committed(self._storage.path) if rank is None else nothing_committed(self._storage)
        path = f"{self._storage.path}/{name}"
        if not self._allows_pickle:
            try:
                with collector_paused():
                    return read_pickled(pickled, path)
            except UntrustedObject as error:
                raise UntrustedObject(
                    f"{error}. If you trust the checkpoint as you trust a program, pass allow_pickle=True to the "
                    f"reader."
                ) from None
        try:
            metadata = pickle.loads(pickled)
        except Exception as error:
            raise MetadataError(f"{path} cannot be read: {describe(error)}") from error
        if not isinstance(metadata, Metadata):
            raise MetadataError(f"{path} holds a {type(metadata).__name__}, and no checkpoint's metadata")
        return metadata

    def _place(self, item: ReadItem) -> StorageInfo:
        info: StorageInfo | None = (self._metadata.storage_data or {}).get(item.storage_index)
        if info is None:
            raise MetadataError(f"{self._storage.path}/.metadata has no data for {item.storage_index.fqn!r}")
        return info

    def _content(self, item: ReadItem) -> bytes:
        """The stored bytes of an item, decoded."""
        info = self._place(item)
        content = self._storage.read_range(info.relative_path, info.offset, info.length)
        # torch before 2.7 does not have this field.
        if descriptors := getattr(info, "transform_descriptors", None):
            with self._naming(item):
                return self._decode(content, descriptors)
        return content

    def _decode(self, content: bytes, descriptors: Sequence[str]) -> bytes:
        stream: IO[bytes] = io.BytesIO(content)
        for extension in (self._extensions or ExtensionRegistry()).from_descriptor_list(descriptors):
            if isinstance(extension, StreamTransformExtension):
                stream = extension.transform_from(stream)
        return stream.read(-1)

    @contextmanager
    def _naming(self, item: ReadItem) -> Iterator[None]:
        """Translates errors for an item, and adds its key and file."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            path = f"{self._storage.path}/{self._place(item).relative_path}"
            raise ReadError(f"{item.dest_index.fqn!r} in {path} cannot be loaded: {describe(error)}") from error


def _tensor(content: bytes) -> torch.Tensor:
    """A tensor from its ``torch.save`` bytes; raises any exception if they are damaged or something else."""
    check_saved(io.BytesIO(content), len(content))
    tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a {type(tensor).__name__} where a tensor belongs")
    return tensor
