"""What a value is, as plain data: two values are the same if their descriptions are equal.

Types, order, bits, strides, and which tensor is the very one that was there before.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import io
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from ..lab.states import raw
from .values import Books

__all__ = ["Difference", "Failed", "describe", "describe_metadata", "differences"]


@dataclass(frozen=True)
class Failed:
    """An error. Two errors are the same, whatever they say."""

    what: str = dataclasses.field(compare=False)


@dataclass(frozen=True)
class Difference:
    """Where two descriptions part: a path, and what torch's and ours are there (None: nothing)."""

    path: tuple[Any, ...]
    theirs: Any
    ours: Any

    def __str__(self) -> str:
        return f"{'/'.join(map(str, self.path))}: torch {str(self.theirs)[:300]} | ours {str(self.ours)[:300]}"


def describe(value: Any, before: Sequence[torch.Tensor] = ()) -> Any:
    """Describes a value, and says which of the tensors that were there ``before`` are still in it."""
    return _Describer({id(tensor): number for number, tensor in enumerate(before)}).of(value)


class _Describer:
    def __init__(self, known: Mapping[int, int]) -> None:
        self._known = known
        self._inside: set[int] = set()

    def of(self, value: Any) -> Any:
        if id(value) in self._inside:
            return "itself"
        self._inside.add(id(value))
        try:
            return self._of(value)
        finally:
            self._inside.discard(id(value))

    def _of(self, value: Any) -> Any:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, torch.Tensor):
            return {"type": kind, "number": self._known.get(id(value)), **self._tensor(value)}
        if isinstance(value, torch.Size):
            return (kind, tuple(value))
        if isinstance(value, Mapping):
            factory = getattr(value, "default_factory", None)
            items = {f"{key!r}": (type(key).__name__, self.of(item)) for key, item in value.items()}
            order = tuple(map(repr, value))
            return {"type": kind, "factory": repr(factory), "order": order, "items": items, **self._attributes(value)}
        if isinstance(value, list | tuple | collections.deque):
            limit = getattr(value, "maxlen", None)
            return {"type": kind, "maxlen": limit, "members": tuple(map(self.of, value)), **self._attributes(value)}
        if isinstance(value, io.BytesIO | io.StringIO):
            return (kind, value.getvalue(), value.tell())
        if isinstance(value, np.ndarray | np.generic):
            content = tuple(map(repr, value.flat)) if value.dtype == object else value.tobytes()
            return (kind, repr(value.dtype), np.shape(value), content)
        if isinstance(value, Books):
            return {"type": kind, "state": self.of(value.state), "loaded": self.of(value.loaded)}
        if isinstance(value, torch.nn.Module):
            return {"type": kind, "state": self.of(value.state_dict())}
        if isinstance(value, type | types.FunctionType | enum.Enum):
            return (kind, str(value))
        return (kind, repr(value))

    def _attributes(self, value: Any) -> dict[str, Any]:
        attributes = getattr(value, "__dict__", None)
        if not attributes or isinstance(value, collections.UserDict):
            return {}
        return {"attributes": {name: self.of(item) for name, item in attributes.items()}}

    def _tensor(self, tensor: torch.Tensor) -> dict[str, Any]:
        if isinstance(tensor, DTensor):
            placed = {"placements": repr(tensor.placements), "shape": tuple(tensor.shape)}
            return placed | {"local": self.of(tensor._local_tensor)}
        if isinstance(tensor, ShardedTensor):
            shards = [(repr(s.metadata.shard_offsets), self.of(s.tensor)) for s in tensor.local_shards()]
            return {"shape": tuple(tensor.size()), "shards": tuple(shards)}
        facts = {"dtype": str(tensor.dtype), "requires_grad": tensor.requires_grad, "layout": str(tensor.layout)}
        if isinstance(tensor, torch.nn.parameter.UninitializedParameter):
            return facts
        if tensor.is_nested or tensor.layout is not torch.strided:
            members = tensor.unbind() if tensor.is_nested else [tensor.to_dense()]
            return facts | {"members": tuple(map(self.of, members))}
        facts |= {"shape": tuple(tensor.shape), "stride": tensor.stride(), "device": str(tensor.device)}
        if hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            return facts | {"inner": {name: self.of(getattr(tensor, name)) for name in names}}
        if tensor.is_quantized:
            return facts | {"bits": raw(tensor.int_repr()), "scheme": repr(tensor.qscheme()), "text": repr(tensor)}
        lazy = (tensor.is_conj(), tensor.is_neg())
        return facts | {"lazy": lazy, "bits": None if tensor.is_meta else raw(tensor.as_subclass(torch.Tensor))}


def describe_metadata(metadata: Metadata | None) -> Any:
    """The fields of a checkpoint's metadata. Ids are random: only their types count."""
    if metadata is None:
        return None
    meta = metadata.storage_meta
    ids = {} if meta is None else {name: type(getattr(meta, name)).__name__ for name in ("save_id", "load_id")}
    where = None if meta is None else meta.checkpoint_id
    return {
        "is metadata": isinstance(metadata, Metadata),
        "keys": {repr(key): _plain(entry) for key, entry in metadata.state_dict_metadata.items()},
        "order": tuple(map(repr, metadata.state_dict_metadata)),
        "planner_data": _plain(metadata.planner_data),
        "version": metadata.version,
        "storage_data": _kind_of_storage_data(metadata.storage_data),
        "storage_meta": type(meta).__name__,
        "checkpoint_id": (type(where).__name__, None if where is None else str(where).rpartition("/")[2]),
        "modules": None if meta is None else tuple(meta.modules),
        **ids,
    }


def _kind_of_storage_data(data: Any) -> Any:
    return sorted({type(value).__name__ for value in data.values()}) if isinstance(data, dict) else type(data).__name__


def _plain(value: Any) -> Any:
    """A value with its types, all the way down."""
    kind = type(value).__name__
    if dataclasses.is_dataclass(value):
        return (kind, {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return (kind, {repr(key): _plain(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return (kind, tuple(map(_plain, value)))
    return (kind, repr(value))


def differences(theirs: Any, ours: Any, path: tuple[Any, ...] = ()) -> list[Difference]:
    """Where two descriptions part."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        names = [*theirs, *(name for name in ours if name not in theirs)]
        return [d for n in names for d in differences(theirs.get(n), ours.get(n), (*path, n))]
    if isinstance(theirs, tuple) and isinstance(ours, tuple) and len(theirs) == len(ours):
        return [d for n, (a, b) in enumerate(zip(theirs, ours, strict=True)) for d in differences(a, b, (*path, n))]
    return [] if theirs == ours else [Difference(path, theirs, ours)]
