"""Values of state dicts as descriptions: what a case says of them, and how a rank makes them.

A description is plain data with a readable ``repr``. It is built once for torch's storage and once for ours.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from ..support import filled
from .objects import OBJECTS, Books, Pair, TaggedDict, TaggedList

__all__ = ["Box", "Maker", "Object", "Odd", "Seq", "Sharded", "Slice", "Spec", "Tensor", "ODD_TENSORS"]


@dataclass(frozen=True)
class Tensor:
    """A plain tensor; ``view`` says how it lies in memory, ``by_rank`` that each rank has values of its own."""

    dtype: str
    shape: tuple[int, ...]
    view: str = "whole"
    seed: int = 0
    kind: str = "tensor"
    by_rank: bool = False


@dataclass(frozen=True)
class Slice:
    """A part of memory that all slices of the same number share: tied weights, where they are equal."""

    number: int
    start: int
    length: int


@dataclass(frozen=True)
class Sharded:
    """A tensor over all ranks: a DTensor, or a ShardedTensor of rows. Without a process group it is a plain one."""

    dtype: str
    shape: tuple[int, ...]
    placements: str
    """A letter for each dimension of the mesh: ``r`` (replicated), or the dimension that is sharded. ``rows``."""
    seed: int = 0


@dataclass(frozen=True)
class Odd:
    """A tensor that is none of the above: see `ODD_TENSORS`."""

    name: str


@dataclass(frozen=True)
class Object:
    """No tensor: see `OBJECTS`."""

    name: str


@dataclass(frozen=True)
class Box:
    """A mapping."""

    kind: str
    items: tuple[tuple[Any, Spec], ...]


@dataclass(frozen=True)
class Seq:
    """A list or tuple."""

    kind: str
    members: tuple[Spec, ...]


Spec = Tensor | Slice | Sharded | Odd | Object | Box | Seq


class Named(torch.Tensor):
    """A subclass that is nothing but a name."""


def _wrapper() -> torch.Tensor:
    return TwoTensor(torch.arange(4.0), torch.arange(4.0) + 1)


ODD_TENSORS = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.qint8),
    "quantised by channel": lambda: torch.quantize_per_channel(
        torch.arange(4.0).view(2, 2), torch.tensor([0.5, 0.25]), torch.tensor([0, 0]), 0, torch.quint8
    ),
    "meta": lambda: torch.empty(3, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "bits8": lambda: torch.arange(4, dtype=torch.uint8).view(torch.bits8),
    "bits16": lambda: torch.arange(4, dtype=torch.int16).view(torch.bits16),
    "uint4": lambda: torch.arange(4, dtype=torch.uint8).view(torch.uint4),
    "subclass": lambda: torch.arange(4.0).as_subclass(Named),
    "wrapper": _wrapper,
    "buffer": lambda: torch.nn.Buffer(torch.arange(3.0)),
    "uninitialised": torch.nn.UninitializedParameter,
    "lazy": lambda: torch.zeros(3, dtype=torch.complex64).conj().imag,
}


class Maker:
    """Makes the values of one state dict on one rank."""

    def __init__(self, rank: int, mesh: Meshes | None) -> None:
        self.rank = rank
        self._mesh = mesh
        self._memory: dict[int, torch.Tensor] = {}

    def make(self, spec: Spec) -> Any:
        if isinstance(spec, Tensor):
            return _tensor(spec, self.rank)
        if isinstance(spec, Slice):
            memory = self._memory.setdefault(spec.number, filled(torch.float32, (64,), spec.number))
            return memory[spec.start : spec.start + spec.length]
        if isinstance(spec, Sharded):
            return self._sharded(spec)
        if isinstance(spec, Odd):
            return ODD_TENSORS[spec.name]()
        if isinstance(spec, Object):
            return OBJECTS[spec.name]()
        if isinstance(spec, Box):
            return _box(spec.kind, [(key, self.make(value)) for key, value in spec.items])
        return _seq(spec.kind, [self.make(member) for member in spec.members])

    def _sharded(self, spec: Sharded) -> torch.Tensor:
        full = filled(getattr(torch, spec.dtype), spec.shape, spec.seed)
        if self._mesh is None:
            return full
        if spec.placements == "rows":
            return _sharded_rows(full, self.rank)
        mesh = self._mesh[len(spec.placements)]
        placements: list[Placement] = [Replicate() if p == "r" else Shard(int(p)) for p in spec.placements]
        return distribute_tensor(full, mesh, placements, src_data_rank=None)


class Meshes:
    """The meshes over all ranks of a world, made when they are asked for: on all ranks in the same order."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._made: dict[int, DeviceMesh] = {}

    def __getitem__(self, dimensions: int) -> DeviceMesh:
        if dimensions not in self._made:
            size = self._world_size
            shape = (size,) if dimensions == 1 else (2, size // 2) if size % 2 == 0 else (1, size)
            self._made[dimensions] = init_device_mesh("cpu", shape)
        return self._made[dimensions]


def _tensor(spec: Tensor, rank: int) -> torch.Tensor:
    seed = spec.seed + (1000 * rank if spec.by_rank else 0)
    tensor = _viewed(getattr(torch, spec.dtype), spec.shape, spec.view, seed)
    if spec.kind == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=_can_require(tensor))
    if spec.kind == "requires grad" and _can_require(tensor):
        return tensor.detach().requires_grad_()
    if spec.kind == "computed" and _can_require(tensor) and spec.dtype == "float32":
        return tensor.detach().requires_grad_() * 2
    return tensor


def _can_require(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _viewed(dtype: torch.dtype, shape: tuple[int, ...], view: str, seed: int) -> torch.Tensor:
    """A tensor of that shape that lies in memory as ``view`` says, if it can."""
    if view == "meta":
        return torch.empty(shape, dtype=dtype, device="meta")
    if view == "transposed" and shape:
        return filled(dtype, shape[::-1], seed).permute(*range(len(shape) - 1, -1, -1))
    if view == "stepped" and shape:
        return filled(dtype, (*shape[:-1], 2 * shape[-1]), seed)[..., ::2]
    if view == "inner" and shape:
        return filled(dtype, (shape[0] + 5, *shape[1:]), seed)[3 : 3 + shape[0]]
    if view == "expanded" and shape:
        return filled(dtype, (1, *shape[1:]), seed).expand(shape)
    if view == "conj" and dtype.is_complex:
        return filled(dtype, shape, seed).conj()
    if view == "neg" and dtype in (torch.float32, torch.float64):
        return torch._neg_view(filled(dtype, shape, seed))
    if view == "shared":
        return filled(dtype, shape, seed).share_memory_()
    if view == "odd strides" and 1 in shape:
        strides = [977 if size == 1 else 1 for size in shape]
        return (
            torch.as_strided(filled(dtype, shape, seed), shape, strides)
            if shape.count(1) == len(shape)
            else (filled(dtype, shape, seed))
        )
    return filled(dtype, shape, seed)


def _sharded_rows(full: torch.Tensor, rank: int) -> Any:
    """A ShardedTensor of a run of rows for each rank; the last rank may have fewer, or none."""
    size = dist.get_world_size()
    per_rank = -(-len(full) // size)
    start = min(rank * per_rank, len(full))
    local = full[start : start + per_rank].clone()
    offsets = [start, *(0 for _ in full.shape[1:])]
    shards = [LocalShard.from_tensor_and_offsets(local, offsets, rank)] if len(local) else []
    return init_from_local_shards(shards, list(full.shape))


def _box(kind: str, items: list[tuple[Any, Any]]) -> Any:
    if kind == "OrderedDict":
        return collections.OrderedDict(items)
    if kind == "defaultdict":
        return collections.defaultdict(list, items)
    if kind == "UserDict":
        return collections.UserDict(dict(items))
    if kind == "proxy":
        return types.MappingProxyType(dict(items))
    if kind in ("stateful", "nested stateful"):
        return Books(dict(items))
    if kind == "tagged":
        tagged = TaggedDict()
        tagged.update(items)
        return tagged
    return dict(items)


def _seq(kind: str, members: list[Any]) -> Any:
    if kind == "tuple":
        return tuple(members)
    if kind == "namedtuple":
        return Pair(*[*members, None, None][:2])
    if kind == "tagged":
        tagged = TaggedList()
        tagged.extend(members)
        return tagged
    return members


def tensors_in(value: Any, seen: set[int] | None = None) -> list[torch.Tensor]:
    """The tensors in a value, in its order, those that hold others as one."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        return [value]
    value = value.state if isinstance(value, Books) else value
    if id(value) in seen or not isinstance(value, Mapping | list | tuple):
        return []
    seen.add(id(value))
    members = list(value.values()) if isinstance(value, Mapping) else value
    return [tensor for member in members for tensor in tensors_in(member, seen)]
