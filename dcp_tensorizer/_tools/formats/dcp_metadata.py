"""The ``.metadata`` of torch's ``FileSystemWriter``: a pickle, read without reaching a class, and then made anew.

Of each record that torch writes there, only what a conversion needs is taken, and checked for its type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from ..._format.inert_pickle import Made, Named, count_parts, load_inert
from ..._memory.tensor_bytes import named_dtype
from ..._torch_compat import StorageInfo
from ...errors import CheckpointError, MetadataError, UntrustedObject

__all__ = ["DcpMetadata", "read_pickled"]

_CLASSES = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_KNOWN = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (_FILES, "_StorageInfo"),
} | {
    # A path is a class of another module in each release of Python.
    (module, name)
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "PurePosixPath")
}
_MAX_DIMENSIONS = 255
_MAX_KEY = 1000  # values in one that is a tuple

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """What torch's metadata says.

    Attributes:
        entries: By key.
        places: By key and offset of a chunk; the offset is None for an object.
        planner_data: What the planner recorded, not looked at.
    """

    entries: Mapping[Any, TensorStorageMetadata | BytesStorageMetadata]
    places: Mapping[tuple[Any, tuple[int, ...] | None], StorageInfo]
    planner_data: Any


def read_pickled(pickled: bytes, path: str) -> DcpMetadata:
    """Reads ``.metadata``; ``path`` is for messages.

    Raises:
        MetadataError: it is damaged, or something else.
        UntrustedObject: it names something that a checkpoint's metadata has no use for.
    """

    def check_name(named: Named) -> None:
        if named not in _KNOWN and named.module != _CLASSES and _dtype_or_none(named) is None:
            raise UntrustedObject(
                f"{path} refers to {named}, which has no place in a checkpoint's metadata; it was not loaded"
            )

    try:
        metadata = load_inert(pickled, check_name)
        if not isinstance(metadata, Made) or metadata.what != (_CLASSES, "Metadata"):
            raise ValueError("it does not hold a checkpoint's metadata")
        fields = _state(metadata, _CLASSES, "Metadata")
        storage_data = fields.get("storage_data")
        if not isinstance(storage_data, dict):
            raise ValueError("it is not what torch's FileSystemWriter writes")
        return DcpMetadata(
            {key: _entry(entry) for key, entry in _typed(fields["state_dict_metadata"], dict).items()},
            dict(_place(index, info) for index, info in storage_data.items()),
            fields.get("planner_data"),
        )
    except CheckpointError:
        raise
    except Exception as error:
        raise MetadataError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _typed(value: Any, kind: type[_T]) -> _T:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _state(value: Any, module: str, name: str) -> dict[str, Any]:
    """The fields of an object of a class."""
    made = _typed(value, Made)
    if made.what != (module, name):
        raise TypeError(f"a {made.what} where a {module}.{name} belongs")
    state = made.state
    if type(state) is tuple and len(state) == 2:  # of a class with slots: what is in them comes last
        return {name: value for part in state if part is not None for name, value in _typed(part, dict).items()}
    return {} if state is None else _typed(state, dict)


def _entry(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(value, Made) and value.what == (_CLASSES, "BytesStorageMetadata"):
        return BytesStorageMetadata()
    fields = _state(value, _CLASSES, "TensorStorageMetadata")
    size = _size(fields["size"])
    chunks = [_chunk(chunk, len(size)) for chunk in _typed(fields["chunks"], list)]
    return TensorStorageMetadata(TensorProperties(dtype=_dtype(fields["properties"])), size, chunks)


def _chunk(value: Any, dimensions: int) -> ChunkStorageMetadata:
    fields = _state(value, _CLASSES, "ChunkStorageMetadata")
    offsets, sizes = _size(fields["offsets"]), _size(fields["sizes"])
    if not len(offsets) == len(sizes) == dimensions:
        raise ValueError("a chunk with other dimensions than its tensor")
    return ChunkStorageMetadata(offsets, sizes)


def _size(value: Any) -> torch.Size:
    """A shape: a ``torch.Size``, or what makes one."""
    made = _typed(value, Made)
    if made.what != ("torch", "Size") or len(made.arguments) != 1:
        raise TypeError(f"a {made.what} where a torch.Size belongs")
    extents = made.arguments[0]
    if type(extents) not in (tuple, list) or len(extents) > _MAX_DIMENSIONS:
        raise TypeError(f"a shape of more than {_MAX_DIMENSIONS} dimensions, or of another type")
    if any(type(extent) is not int or not 0 <= extent < 2**63 for extent in extents):
        raise ValueError("a shape of something else than sizes")
    return torch.Size(extents)


def _dtype(properties: Any) -> torch.dtype:
    """The dtype in a ``TensorProperties``, whose state is a tuple; releases of torch differ in what else is in it."""
    made = _typed(properties, Made)
    if made.what != (_CLASSES, "TensorProperties"):
        raise TypeError(f"a {made.what} where the properties of a tensor belong")
    state = made.state
    named = state[0] if type(state) is tuple and state else _typed(state, dict)["dtype"]
    dtype = _dtype_or_none(named)
    if dtype is None:
        raise TypeError("properties without a dtype")
    return dtype


def _dtype_or_none(named: Any) -> torch.dtype | None:
    if type(named) is not Named or named.module != "torch":
        return None
    try:
        return named_dtype(named.name)
    except TypeError:
        return None


def _place(index: Any, info: Any) -> tuple[tuple[Any, tuple[int, ...] | None], StorageInfo]:
    """Whose place it is, and the place; what could do harm in that is looked for when it is used."""
    of = _state(index, _CLASSES, "MetadataIndex")
    offset = of.get("offset")
    fields = _state(info, _FILES, "_StorageInfo")
    key = of["fqn"]
    count_parts(key, _MAX_KEY)
    try:
        transforms = fields.get("transform_descriptors")
        place = StorageInfo(
            _typed(fields["relative_path"], str),
            _typed(fields["offset"], int),
            _typed(fields["length"], int),
            None if transforms is None else [_typed(transform, str) for transform in _typed(transforms, list)],
        )
    except (TypeError, LookupError) as error:
        raise ValueError(f"the place of {key!r}: {error}") from error
    return (key, None if offset is None else tuple(_size(offset))), place
