"""Reads the ``.metadata`` of torch's ``FileSystemWriter``, a pickle, without importing any class that it names.

Only DCP's own records, and plain values in them, are built from it. The type of each of their fields is checked.
"""

from __future__ import annotations

import os
import pathlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from .._format.tensor_bytes import named_dtype
from .._runtime.torch_compat import GET_LAYOUT, OLD_PROPERTIES, StorageInfo
from .._unpickle.inert import Inert, Made, Named, hash_cost
from ..errors import CheckpointError, MetadataError, UntrustedObject

_CLASSES = "torch.distributed.checkpoint.metadata"
_MAX_DIMENSIONS = 255
_MAX_KEY = 1000  # values in a key that is a tuple
_MAX_PATH = 1 << 16  # characters
_MAX_DEPTH = 64  # of nested values; torch's own are less than 10 deep
_WORK_PER_BYTE = 16  # values, counted at each reference; torch's own files have less than 2

_T = TypeVar("_T")


def read_pickled(pickled: bytes, path: str) -> Metadata:
    """Reads ``.metadata``; ``path`` is for messages.

    Raises `MetadataError` if it is damaged or something else, and `UntrustedObject` if it names something that does not
    belong in a checkpoint's metadata.
    """
    try:
        metadata = _Values(len(pickled)).of(_Records(pickled).read())
        if not isinstance(metadata, Metadata):
            raise ValueError("it does not hold a checkpoint's metadata")
        return metadata
    except UntrustedObject as error:
        raise UntrustedObject(f"{path} refers to {error}, and was not loaded") from None
    except CheckpointError as error:
        raise MetadataError(f"{path} {error}") from error
    except Exception as error:
        raise MetadataError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


class _Records(Inert):
    """Refuses every name that has no place in a checkpoint's metadata."""

    def name(self, module: str, name: str) -> Named:
        named = super().name(module, name)
        if named.name not in _MAKERS and named.name != _GETATTR and _dtype_or_none(named) is None:
            raise _untrusted(named.name)
        return named

    def call(self, what: Named, arguments: tuple[Any, ...]) -> Made:
        if what.name == _GETATTR:  # only of a memory format, as Python 3.11.0 to 3.11.3 write it
            if len(arguments) != 2 or type(arguments[0]) is not Named or arguments[0].name not in _ENCODINGS:
                raise _untrusted(_GETATTR)
            return Made(arguments[0].name, arguments[1:])
        if what.name not in _MAKERS:
            raise _untrusted(what.name)
        return Made(what.name, arguments)


def _untrusted(name: str) -> UntrustedObject:
    return UntrustedObject(f"{name}, which has no place in a checkpoint's metadata")


class _Values:
    """Builds values from those that `_Records` reads, each one once, however often the pickle refers to it."""

    def __init__(self, nbytes: int) -> None:
        self._made: dict[int, tuple[Any, int]] = {}  # by identity: the pickle's own values live as long as this
        self._depth = 0
        self._count = 0  # of values, counted at each reference, as every reader of the tree will visit them
        self._most = 1000 + _WORK_PER_BYTE * nbytes

    def of(self, value: Any) -> Any:
        """The value itself if it is plain; otherwise a container, or what its maker builds."""
        kind = type(value)
        self._count += 1
        if kind in _PLAIN:
            return value
        if (known := self._made.get(id(value))) is not None:
            made, count = known
            self._count += count
        else:
            if self._depth == _MAX_DEPTH:
                raise ValueError(f"it holds values in values, more than {_MAX_DEPTH} deep")
            self._depth += 1
            before = self._count
            made = self._make(value, kind)
            self._made[id(value)] = made, self._count - before
            self._depth -= 1
        if self._count > self._most:
            raise ValueError("it holds more values than its size explains")
        return made

    def _make(self, value: Any, kind: type) -> Any:
        if kind is Made:
            return _MAKERS[value.what](value, self)
        if kind is dict:
            return {self.of(key): self.of(member) for key, member in value.items()}
        if kind in (list, tuple, set, frozenset):
            return kind(map(self.of, value))
        dtype = _dtype_or_none(value)
        if dtype is None:
            raise _untrusted(value.name) if kind is Named else TypeError(f"it holds a {kind.__name__}")
        return dtype

    def fields(self, made: Made) -> dict[str, Any]:
        """The fields of an object of a class."""
        if made.arguments or made.members:
            raise ValueError(f"it makes a {made.what} as no writer does")
        state = made.state
        parts = state if type(state) is tuple and len(state) == 2 else (state,)  # the values of slots come last
        return {
            name: self.of(value) for part in parts if part is not None for name, value in _typed(part, dict).items()
        }


def _typed(value: Any, kind: type[_T]) -> _T:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _optional(value: Any, kind: type[_T]) -> _T | None:
    return None if value is None else _typed(value, kind)


def _metadata(made: Made, values: _Values) -> Metadata:
    # `SavePlanner` pickles it as a call of its constructor.
    fields = dict(zip(_FIELDS, map(values.of, made.arguments), strict=True)) if made.arguments else values.fields(made)
    storage_data = fields.get("storage_data")
    if type(storage_data) is not dict:
        raise ValueError("torch's FileSystemWriter does not write such a file")
    for index, info in storage_data.items():
        _check_place(_typed(index, MetadataIndex).fqn, _typed(info, StorageInfo))
    for entry in _typed(fields["state_dict_metadata"], dict).values():
        if type(entry) is not BytesStorageMetadata:
            _typed(entry, TensorStorageMetadata)
    return Metadata(
        fields["state_dict_metadata"],
        fields.get("planner_data"),
        storage_data,
        _optional(fields.get("storage_meta"), StorageMeta),
        _optional(fields.get("version"), str),
    )


def _storage_meta(made: Made, values: _Values) -> StorageMeta:
    fields = values.fields(made)
    checkpoint_id = fields.get("checkpoint_id")
    if not isinstance(checkpoint_id, os.PathLike):
        _optional(checkpoint_id, str)
    save_id, load_id = (_optional(fields.get(name), str) for name in ("save_id", "load_id"))
    return StorageMeta(checkpoint_id, save_id, load_id, [_typed(name, str) for name in fields.get("modules") or []])


def _bytes_metadata(made: Made, values: _Values) -> BytesStorageMetadata:
    values.fields(made)
    return BytesStorageMetadata()


def _tensor_metadata(made: Made, values: _Values) -> TensorStorageMetadata:
    fields = values.fields(made)
    size = _typed(fields["size"], torch.Size)
    chunks = [_typed(chunk, ChunkStorageMetadata) for chunk in _typed(fields["chunks"], list)]
    if any(len(chunk.sizes) != len(size) for chunk in chunks):
        raise ValueError("a chunk with other dimensions than its tensor")
    return TensorStorageMetadata(_typed(fields["properties"], TensorProperties), size, chunks)


def _chunk_metadata(made: Made, values: _Values) -> ChunkStorageMetadata:
    fields = values.fields(made)
    offsets, sizes = _typed(fields["offsets"], torch.Size), _typed(fields["sizes"], torch.Size)
    if len(offsets) != len(sizes):
        raise ValueError("a chunk with other dimensions than its place")
    return ChunkStorageMetadata(offsets, sizes)


def _properties(made: Made, values: _Values) -> TensorProperties:
    """Makes a tensor's properties from the tuple that is their state. Its length depends on the release of torch."""
    state = values.of(made.state)
    if type(state) is tuple:
        state = dict(zip(_PROPERTIES, state, strict=False))
    fields = _typed(state, dict)
    properties = TensorProperties(_typed(fields["dtype"], torch.dtype))
    for name in _PROPERTIES[1:]:
        if name in fields:
            setattr(properties, name, _typed(fields[name], type(getattr(properties, name))))
    return properties


def _index(made: Made, values: _Values) -> MetadataIndex:
    fields = values.fields(made)
    hash_cost(fields["fqn"], _MAX_KEY)
    offset, number = _optional(fields.get("offset"), torch.Size), _optional(fields.get("index"), int)
    return MetadataIndex(fields["fqn"], offset, number)


def _storage_info(made: Made, values: _Values) -> StorageInfo:
    """A place in a data file. `_check_place` checks it, where its key is known."""
    fields = values.fields(made)
    return StorageInfo(fields["relative_path"], fields["offset"], fields["length"], fields.get("transform_descriptors"))


def _check_place(key: Any, info: StorageInfo) -> None:
    """Checks that a place in a data file is harmless."""
    name, offset, length = info.relative_path, info.offset, info.length
    if type(name) is not str or os.path.basename(name) != name or name in ("", ".", "..") or "\0" in name:
        raise MetadataError(f"names a data file {name!r} for {key!r} that is not beside it")
    if any(type(number) is not int or not 0 <= number < 2**63 for number in (offset, length)):
        raise MetadataError(f"has no data for {key!r}, but {length!r} bytes at {offset!r}")
    transforms = info.transform_descriptors
    if type(transforms) not in (type(None), list, tuple) or any(type(name) is not str for name in transforms or ()):
        raise MetadataError(f"does not name the transforms of {key!r}")


def _size(made: Made, values: _Values) -> torch.Size:
    """A shape."""
    (extents,) = made.arguments
    if type(extents) not in (tuple, list) or len(extents) > _MAX_DIMENSIONS:
        raise TypeError(f"a shape of more than {_MAX_DIMENSIONS} dimensions, or of another type")
    if any(type(extent) is not int or not 0 <= extent < 2**63 for extent in extents):
        raise ValueError("a shape of something else than sizes")
    return torch.Size(extents)


def _layout(made: Made, values: _Values) -> torch.layout:
    (name,) = made.arguments
    layout = vars(torch).get(_typed(name, str).removeprefix("torch."))
    return _typed(layout, torch.layout)


def _memory_format(made: Made, values: _Values) -> torch.memory_format:
    """A member of an enumeration, by its value or by its name."""
    (member,) = made.arguments
    if type(member) not in (int, str) or member not in _FORMATS:
        raise ValueError("a memory format that torch does not have")
    return _FORMATS[member]


def _path(made: Made, values: _Values) -> pathlib.PurePath:
    parts = [_typed(part, str) for part in made.arguments]
    if sum(map(len, parts)) > _MAX_PATH:
        raise ValueError(f"a path of more than {_MAX_PATH:,} characters")
    return pathlib.PureWindowsPath(*parts) if made.what.endswith("WindowsPath") else pathlib.PurePosixPath(*parts)


def _ordered(made: Made, values: _Values) -> OrderedDict[Any, Any]:
    pairs = [tuple(pair) for pair in _typed(made.arguments[0], list)] if made.arguments else []
    pairs += made.members
    return OrderedDict((values.of(key), values.of(value)) for key, value in pairs)


_PLAIN = {str, bytes, int, float, bool, type(None)}
_FIELDS = ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version")
_PROPERTIES = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory")
_FORMATS: Mapping[int | str, torch.memory_format] = {
    0: torch.contiguous_format,
    1: torch.channels_last,
    2: torch.preserve_format,
    "TORCH_CONTIGUOUS_FORMAT": torch.contiguous_format,
    "TORCH_CHANNELS_LAST": torch.channels_last,
    "TORCH_PRESERVE_FORMAT": torch.preserve_format,
}
_GETATTR = "builtins.getattr"
_ENCODINGS = (f"{_CLASSES}._MEM_FORMAT_ENCODING", f"{OLD_PROPERTIES}.MEM_FORMAT_ENCODING")
_MAKERS: Mapping[str, Callable[[Made, _Values], Any]] = {
    f"{_CLASSES}.Metadata": _metadata,
    f"{_CLASSES}.StorageMeta": _storage_meta,
    f"{_CLASSES}.BytesStorageMetadata": _bytes_metadata,
    f"{_CLASSES}.TensorStorageMetadata": _tensor_metadata,
    f"{_CLASSES}.ChunkStorageMetadata": _chunk_metadata,
    f"{_CLASSES}.TensorProperties": _properties,
    f"{OLD_PROPERTIES}.TensorProperties": _properties,
    f"{_CLASSES}.MetadataIndex": _index,
    "torch.distributed.checkpoint.filesystem._StorageInfo": _storage_info,
    "torch.Size": _size,
    GET_LAYOUT: _layout,
    "collections.OrderedDict": _ordered,
    **dict.fromkeys(_ENCODINGS, _memory_format),
    # Releases of Python have the classes of paths in different modules.
    **{
        f"{module}.{pure}{system}Path": _path
        for module in ("pathlib", "pathlib._local")
        for pure in ("", "Pure")
        for system in ("Posix", "Windows")
    },
}


def _dtype_or_none(named: Any) -> torch.dtype | None:
    if type(named) is not Named or not named.name.startswith("torch."):
        return None
    try:
        return named_dtype(named.name.removeprefix("torch."))
    except TypeError:
        return None
