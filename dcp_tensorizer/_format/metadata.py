"""``.metadata``: what it holds, written as the pickle that DCP's tools expect, and read with care."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.checkpoint.metadata as dcp_metadata
import xxhash
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from .._memory.garbage import collector_paused
from .._torch_compat import layout_by_name
from ..errors import CheckpointError, MetadataError, UntrustedObject, WriteError
from .layout import (
    ENCRYPTED_VERSION,
    FORMAT,
    FORMAT_VERSION,
    MAC_BYTES,
    NONCE_BYTES,
    Derivation,
    StoredItem,
    is_data_file_name,
)

__all__ = ["ItemKey", "decode", "encode", "is_ours", "item_key", "unpickle", "verified"]

# Behind the pickle's STOP opcode, where ``pickle.load`` does not look.
_TRAILER = b"\x00DCPTZR1"

ItemKey = tuple[str, tuple[int, ...] | None]


def item_key(index: MetadataIndex) -> ItemKey:
    """The key of an item in ``storage_data["items"]``: builtin types only."""
    return index.fqn, None if index.offset is None else tuple(index.offset)


def encode(metadata: Metadata) -> bytes:
    """The contents of ``.metadata``: the pickle that DCP's tools expect, and a digest of it."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=4).dump(metadata)
    body = stream.getvalue()
    return body + _TRAILER + xxhash.xxh3_128_digest(body)


@collector_paused()
def decode(data: bytes, path: str) -> Metadata:
    """Checks and reads what `encode` made; ``path`` is for messages."""
    metadata = unpickle(verified(data, path), path)
    content = metadata.storage_data
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise MetadataError(f"{path} does not describe a dcp_tensorizer checkpoint")
    if content.get("version") not in (FORMAT_VERSION, ENCRYPTED_VERSION):
        raise MetadataError(
            f"{path} is of format version {content.get('version')}, and this release reads versions {FORMAT_VERSION} "
            f"and {ENCRYPTED_VERSION}: install the release of dcp_tensorizer that wrote it, or a newer one"
        )
    _check_content(content, path)
    return metadata


@collector_paused()
def unpickle(pickled: bytes, path: str, also: Mapping[tuple[str, str], Any] | None = None) -> Metadata:
    """DCP's metadata from a pickle, without running code; ``also`` names what else may be in it, by module and name.

    Raises:
        MetadataError: it is damaged, or something else.
        UntrustedObject: it names something that a checkpoint's metadata has no use for.
    """
    try:
        metadata = _Unpickler(io.BytesIO(pickled), path, also or {}).load()
    except CheckpointError:
        raise
    except Exception as error:
        raise MetadataError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(metadata, Metadata):
        raise MetadataError(f"{path} does not hold a checkpoint's metadata")
    return metadata


def is_ours(data: bytes) -> bool:
    """Whether a metadata file is one that `encode` made, if it is whole."""
    return data[-24:-16] == _TRAILER


def verified(data: bytes, path: str) -> bytes:
    """The pickle in a metadata file, checked against its digest."""
    body, trailer = data[:-24], data[-24:]
    if trailer[:8] != _TRAILER:
        raise MetadataError(
            f"{path} was not written by dcp_tensorizer, or is damaged at its end. A checkpoint of torch's own "
            f"FileSystemWriter is loaded with FileSystemReader."
        )
    if xxhash.xxh3_128_digest(body) != trailer[8:]:
        raise MetadataError(f"{path} is damaged: its checksum does not match. Load another checkpoint.")
    return body


def _check_content(content: dict[str, Any], path: str) -> None:
    """Checks what readers rely on, so that they need not."""
    files, items = content.get("files"), content.get("items")
    if not isinstance(files, dict) or not isinstance(items, dict):
        raise MetadataError(f"{path} lacks its lists of files and items")
    for name, nbytes in files.items():
        if not isinstance(name, str) or not is_data_file_name(name) or not isinstance(nbytes, int):
            raise MetadataError(f"{path} names a data file {name!r} that no dcp_tensorizer would write")
    encrypted = content["version"] == ENCRYPTED_VERSION
    if encrypted and not _is_record_of_key(content.get("encryption")):
        raise MetadataError(f"{path} describes its encryption in a way that no dcp_tensorizer would")
    for (key, *_), place in items.items():
        if not _makes_sense(place, files, encrypted):
            raise MetadataError(f"{path} describes the data of {key!r} in a way that no dcp_tensorizer would")


def _is_record_of_key(record: Any) -> bool:
    if not isinstance(record, dict) or not isinstance(record.get("check"), bytes):
        return False
    made = record.get("derivation")
    kinds = (int, int, int, bytes)
    return made is None or (
        isinstance(made, tuple)
        and len(made) == len(Derivation._fields)
        and all(isinstance(value, kind) for value, kind in zip(made, kinds, strict=True))
    )


def _makes_sense(place: Any, files: dict[str, int], encrypted: bool) -> bool:
    fields = len(StoredItem._fields)
    if not isinstance(place, tuple) or len(place) not in ((fields - 1, fields) if encrypted else (fields - 1,)):
        return False
    item = StoredItem(*place)
    return (
        (item.file in files or (not item.file and not item.length))
        and isinstance(item.offset, int)
        and item.offset >= 0
        and isinstance(item.length, int)
        and item.length >= 0
        and isinstance(getattr(torch, str(item.dtype), None), torch.dtype)
        and item.kind in ("tensor", "object", "wrapper")
        and isinstance(item.digests, bytes)
        and (not encrypted or _is_encrypted(item))
    )


def _is_encrypted(item: StoredItem) -> bool:
    """Whether an item of an encrypted checkpoint is encrypted; else what somebody put there would be believed."""
    if not item.length or not isinstance(item.nonce_and_macs, bytes):
        return item.length == 0
    return len(item.nonce_and_macs) == NONCE_BYTES + -(-item.length // item.block) * MAC_BYTES


# The handful of names that a checkpoint's metadata is made of; none of them runs code.
_CLASSES = {(cls.__module__, cls.__qualname__): cls for cls in (OrderedDict, torch.Size)} | {
    (dcp_metadata.__name__, name): getattr(dcp_metadata, name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
}
_STORABLE = (*_CLASSES.values(), torch.dtype, torch.layout)


class _Pickler(pickle.Pickler):
    """Refuses what `_Unpickler` would refuse, so that a planner's own data cannot make a checkpoint unreadable."""

    def reducer_override(self, obj: Any) -> Any:
        # Called for whatever is not of a builtin type; a class or function is itself what would be looked up.
        known = obj in _CLASSES.values() if isinstance(obj, type) else isinstance(obj, _STORABLE)
        if not known and obj is not layout_by_name:
            kind = obj if isinstance(obj, type) or callable(obj) else type(obj)
            raise WriteError(
                f"the planner put a {kind.__module__}.{kind.__qualname__} into it, which no reader would load: "
                f"planner data must be of builtin types"
            )
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    """Resolves the names in `_CLASSES`, dtypes and layouts, and nothing else."""

    def __init__(self, file: io.BytesIO, path: str, also: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(file)
        self._path = path
        self._also = also

    def find_class(self, module: str, name: str) -> Any:
        if (known := _CLASSES.get((module, name)) or self._also.get((module, name))) is not None:
            return known
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) == ("torch.serialization", "_get_layout"):
            return layout_by_name
        raise UntrustedObject(
            f"{self._path} refers to {module}.{name}, which has no place in a checkpoint's metadata; it was not loaded"
        )
