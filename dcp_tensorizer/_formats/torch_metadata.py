"""Reads the ``.metadata`` of torch's ``FileSystemWriter``, a pickle, without importing any class that it names.

Builds only objects of DCP's own dataclasses, with plain values in them, and checks the types of their fields.
"""

from __future__ import annotations

import functools
import os
import pathlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch.distributed.checkpoint import metadata, planner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from .._runtime.torch_compat import GET_LAYOUT, OLD_PROPERTIES, StorageInfo, StoragePrefix
from .._tensor_file.dtypes import named_dtype
from .._tensor_file.names import MAX_DIMENSIONS
from .._trust.inert import MAX_DEPTH, WORK_PER_BYTE, Inert, Made, Named, hash_cost
from ..errors import CheckpointError, MetadataError, UntrustedObject

_MAX_KEY = 1000  # values in a key that is a tuple
_MAX_PATH = 1 << 16  # characters

_T = TypeVar("_T")


def read_pickled(pickled: bytes, path: str) -> Metadata:
    """Reads ``.metadata``. ``path`` is for messages.

    Raises `MetadataError` if it is damaged, or is not a checkpoint's metadata, and `UntrustedObject` if it names
    anything that does not belong in a checkpoint's metadata.
    """
    try:
        found = _Values(len(pickled)).of(_Records(pickled).read())
        if not isinstance(found, Metadata):
            raise ValueError("it does not hold a checkpoint's metadata")
        return found
    except UntrustedObject as error:
        raise UntrustedObject(f"{path} refers to {error}, and was not loaded") from None
    except CheckpointError as error:
        raise MetadataError(f"{path} {error}") from error
    except Exception as error:
        raise MetadataError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


class _Records(Inert):
    """A reader that rejects every name that does not belong in a checkpoint's metadata."""

    def name(self, module: str, name: str) -> Named:
        named = super().name(module, name)
        if named.name not in _MAKERS and named.name != _GETATTR and _dtype_or_none(named) is None:
            raise _untrusted(named.name)
        return named

    def call(self, what: Named, arguments: tuple[Any, ...]) -> Made:
        if what.name == _GETATTR:  # only for members of an enumeration, as Python 3.11.0 to 3.11.3 pickle them
            if len(arguments) != 2 or type(arguments[0]) is not Named or arguments[0].name not in _ENUMS:
                raise _untrusted(_GETATTR)
            return Made(arguments[0].name, arguments[1:])
        if what.name not in _MAKERS:
            raise _untrusted(what.name)
        return Made(what.name, arguments)


def _untrusted(name: str) -> UntrustedObject:
    return UntrustedObject(f"{name}, which does not belong in a checkpoint's metadata")


class _Values:
    """A builder of values from the output of `_Records`. Each value is built once, however often it is used."""

    def __init__(self, nbytes: int) -> None:
        self._made: dict[int, tuple[Any, int]] = {}  # by id: unique while all values of the pickle exist
        self._depth = 0
        self._count = 0  # of values, counted at each reference, because readers of the tree visit each reference
        self._most = 1000 + WORK_PER_BYTE * nbytes

    def of(self, value: Any) -> Any:
        kind = type(value)
        self._count += 1
        if kind in _PLAIN:
            return value
        if (known := self._made.get(id(value))) is not None:
            made, count = known
            self._count += count
        else:
            if self._depth == MAX_DEPTH:
                raise ValueError(f"its values are nested more than {MAX_DEPTH} deep")
            self._depth += 1
            before = self._count
            made = self._make(value, kind)
            self._made[id(value)] = made, self._count - before
            self._depth -= 1
        if self._count > self._most:
            raise ValueError(f"it expands to more than {self._most:,} values, the limit for its size")
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
            raise _untrusted(value.name) if kind is Named else TypeError(f"it holds a value of type {kind.__name__}")
        return dtype


def _typed(value: Any, kind: type[_T]) -> _T:
    if type(value) is not kind:
        raise TypeError(f"a value must be of type {kind.__name__}, got {type(value).__name__}")
    return value


def _record(made: Made, values: _Values) -> Any:
    """Makes an object of one of DCP's dataclasses. The values must have the types of torch's annotations.

    Sets unknown fields on the object, as torch does: frameworks add some to `Metadata`.
    """
    kind = _RECORDS[made.what]
    hints = _hints(kind)
    if made.members:
        raise ValueError(f"a {made.what} must not have members")
    fields: dict[str, Any] = {}
    if made.arguments:  # this package's `SavePlanner` pickles its metadata as a call of the constructor
        fields.update(zip(hints, map(values.of, made.arguments), strict=True))
    if type(made.state) is tuple:  # of `TensorProperties`, whose number of fields depends on the release of torch
        fields.update(zip(hints, map(values.of, made.state), strict=False))
    elif made.state is not None:
        fields.update((_typed(name, str), values.of(value)) for name, value in _typed(made.state, dict).items())
    known = {}
    for name, (hint, kinds) in hints.items():
        if name in fields:
            known[name] = value = fields.pop(name)
            if type(value) not in kinds and not _fits(value, hint):
                raise TypeError(f"{name} of a {kind.__name__} must not be of type {type(value).__name__}")
    if kind is TensorProperties and "dtype" not in known:  # torch would take its default dtype
        raise ValueError("the properties of a tensor lack the dtype")
    record = kind(**known)
    if fields:
        if shadowed := [name for name in fields if hasattr(kind, name)]:
            raise ValueError(f"a {kind.__name__} must not set {shadowed[0]}")
        vars(record).update(fields)
    _check(record)
    return record


@functools.cache
def _hints(kind: type) -> dict[str, tuple[Any, tuple[type, ...]]]:
    """Returns the types of a dataclass's fields, in order, each with the classes that match it directly."""
    hints = get_type_hints(kind)
    if kind is MetadataIndex:
        hints["fqn"] = Any  # keys of a state dict may be of other types
    elif kind is StorageInfo:
        hints = dict.fromkeys(hints, Any)  # `_check_location` checks them, and names the key
    return {name: (hint, get_args(hint) if get_origin(hint) in _UNIONS else (hint,)) for name, hint in hints.items()}


def _fits(value: Any, hint: Any) -> bool:
    if type(value) is hint or hint is Any:
        return True
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in _UNIONS:
        return any(_fits(value, argument) for argument in arguments)
    if origin in (list, dict):
        members = value.values() if type(value) is dict else value
        return type(value) is origin and all(_fits(member, arguments[-1]) for member in members)
    return isinstance(value, origin or hint)


def _check(record: Any) -> None:
    """Checks what the types of an object's fields do not express."""
    if type(record) is ChunkStorageMetadata:
        if len(record.offsets) != len(record.sizes):
            raise ValueError("a chunk has different numbers of offsets and sizes")
    elif type(record) is TensorStorageMetadata:
        if any(len(chunk.sizes) != len(record.size) for chunk in record.chunks):
            raise ValueError("a chunk and its tensor have different numbers of dimensions")
    elif type(record) is MetadataIndex:
        hash_cost(record.fqn, _MAX_KEY)
    elif type(record) is Metadata:
        if type(record.storage_data) is not dict:
            raise ValueError("it has no locations of items, which torch's FileSystemWriter writes")
        for index, info in record.storage_data.items():
            _check_location(_typed(index, MetadataIndex).fqn, _typed(info, StorageInfo))


def _check_location(key: Any, info: StorageInfo) -> None:
    name, offset, length = info.relative_path, info.offset, info.length
    if type(name) is not str or os.path.basename(name) != name or name in ("", ".", "..") or "\0" in name:
        raise MetadataError(f"names a data file for {key!r} that is not in the metadata's directory: {name!r}")
    if any(type(number) is not int or not 0 <= number < 2**63 for number in (offset, length)):
        raise MetadataError(f"gives {key!r} an invalid offset or length: {offset!r} and {length!r}")
    transforms = info.transform_descriptors
    if type(transforms) not in (type(None), list, tuple) or any(type(name) is not str for name in transforms or ()):
        raise MetadataError(f"has invalid transforms for {key!r}")


def _size(made: Made, values: _Values) -> torch.Size:
    (extents,) = made.arguments
    if type(extents) not in (tuple, list) or len(extents) > MAX_DIMENSIONS:
        raise TypeError(f"a shape must be a tuple of at most {MAX_DIMENSIONS} sizes")
    if any(type(extent) is not int or not 0 <= extent < 2**63 for extent in extents):
        raise ValueError("the sizes of a shape must be ints from 0 to 2**63 - 1")
    return torch.Size(extents)


def _layout(made: Made, values: _Values) -> torch.layout:
    (name,) = made.arguments
    layout = vars(torch).get(_typed(name, str).removeprefix("torch."))
    return _typed(layout, torch.layout)


def _member(made: Made, values: _Values) -> Any:
    """Returns a member of an enumeration, by its value or its name."""
    (member,) = made.arguments
    if type(member) not in (int, str) or member not in (members := _ENUMS[made.what]):
        raise ValueError(f"torch has no {made.what} {member!r}")
    return members[member]


def _path(made: Made, values: _Values) -> pathlib.PurePath:
    parts = [_typed(part, str) for part in made.arguments]
    if sum(map(len, parts)) > _MAX_PATH:
        raise ValueError(f"a path has more than {_MAX_PATH:,} characters")
    return pathlib.PureWindowsPath(*parts) if made.what.endswith("WindowsPath") else pathlib.PurePosixPath(*parts)


def _ordered(made: Made, values: _Values) -> OrderedDict[Any, Any]:
    pairs = [tuple(pair) for pair in _typed(made.arguments[0], list)] if made.arguments else []
    pairs += made.members
    return OrderedDict((values.of(key), values.of(value)) for key, value in pairs)


_UNIONS = (Union, UnionType)
_PLAIN = {str, bytes, int, float, bool, type(None)}
_GETATTR = "builtins.getattr"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_RECORDS: Mapping[str, type] = {
    **{
        f"{kind.__module__}.{kind.__qualname__}": kind
        for kind in (*vars(metadata).values(), *vars(planner).values(), StorageInfo)
        if isinstance(kind, type) and is_dataclass(kind)
    },
    "torch.distributed.checkpoint.filesystem._StoragePrefix": StoragePrefix,
    f"{OLD_PROPERTIES}.TensorProperties": TensorProperties,
    # Megatron-Core up to 0.15 has classes of its own, which add a field.
    f"{_MEGATRON}.MCoreMetadata": Metadata,
    f"{_MEGATRON}.MCoreSavePlan": planner.SavePlan,
}
"""DCP's dataclasses, by their names in pickles."""
_FORMATS: Mapping[int | str, Any] = {
    0: torch.contiguous_format,
    1: torch.channels_last,
    2: torch.preserve_format,
    "TORCH_CONTIGUOUS_FORMAT": torch.contiguous_format,
    "TORCH_CHANNELS_LAST": torch.channels_last,
    "TORCH_PRESERVE_FORMAT": torch.preserve_format,
}
_ENUMS: Mapping[str, Mapping[int | str, Any]] = {
    f"{metadata.__name__}._MEM_FORMAT_ENCODING": _FORMATS,
    f"{OLD_PROPERTIES}.MEM_FORMAT_ENCODING": _FORMATS,
    **{
        f"{planner.__name__}.{kind.__name__}": {key: member for member in kind for key in (member.value, member.name)}
        for kind in (planner.WriteItemType, planner.LoadItemType)
    },
}
_MAKERS: Mapping[str, Callable[[Made, _Values], Any]] = {
    **dict.fromkeys(_RECORDS, _record),
    **dict.fromkeys(_ENUMS, _member),
    "torch.Size": _size,
    GET_LAYOUT: _layout,
    "collections.OrderedDict": _ordered,
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
