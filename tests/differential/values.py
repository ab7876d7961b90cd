"""Values of state dicts as descriptions: what a case says of them, and how a rank makes them.

A description is plain data with a readable ``repr``. It is built once for torch's storage and once for ours.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.two_tensor import TwoTensor

from ..lab.states import filled
from .objects import OBJECTS, Books, Pair, TaggedDict, TaggedList

__all__ = [
    "Box",
    "Described",
    "HOW_DESCRIBED",
    "Maker",
    "Object",
    "Odd",
    "Seq",
    "Sharded",
    "Slice",
    "Spec",
    "Tensor",
    "ODD_TENSORS",
]


@dataclass(frozen=True)
class Tensor:
    """A plain tensor; ``view`` says how it lies in memory, ``by_rank`` that each rank has values of its own.

    With ``grows`` the ranks disagree about its shape: each has a row more than the rank before.
    """

    dtype: str
    shape: tuple[int, ...]
    view: str = "whole"
    seed: int = 0
    kind: str = "tensor"
    by_rank: bool = False
    grows: bool = False


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
    """A letter for each dimension of the mesh: ``r`` (replicated), or the dimension that is sharded. ``rows``. ``ss``:
    rows that are sharded by the second dimension of the mesh first."""
    seed: int = 0


@dataclass(frozen=True)
class Described:
    """A tensor over all ranks whose parts have attributes that describe them: blocks of rows, in an order of their own.

    The blocks are dealt to the ranks in turn, ``pieces`` to each, from the rank ``shift`` on. The last ones may be
    shorter, or empty.
    """

    dtype: str
    shape: tuple[int, ...]
    how: str
    """See `HOW_DESCRIBED`."""
    pieces: int = 1
    shift: int = 0
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


Spec = Tensor | Slice | Sharded | Described | Odd | Object | Box | Seq


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
        if isinstance(spec, Described):
            return _described(spec, self.rank, None if self._mesh is None else self._mesh[1])
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
        if spec.placements == "ss" and len(full) % mesh.size() == 0:
            return _strided(full, mesh)
        placements: list[Placement] = [
            Replicate() if p == "r" else Shard(0 if p == "s" else int(p)) for p in spec.placements
        ]
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
    shape = (spec.shape[0] + rank, *spec.shape[1:]) if spec.grows and spec.shape else spec.shape
    tensor = _viewed(getattr(torch, spec.dtype), shape, spec.view, seed)
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


def _strided(full: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Rows that tensor parallelism has sharded first, and FSDP what is left of them."""
    outer, inner = mesh.get_coordinate() or (0, 0)
    local = full.chunk(mesh.size(1))[inner].chunk(mesh.size(0))[outer].clone()
    placements = [_StridedShard(0, split_factor=mesh.size(1)), Shard(0)]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


# --- tensors that describe their part ---------------------------------------------------------------------------------


class SelfDescribed(torch.Tensor):
    """A subclass with bytes of its own, whose class describes its part."""

    part: _Part

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        return self.part.items(fqn)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self.part.chunks

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.part.shard(index)


class _Part:
    """The answers of a tensor to DCP, all of them about its own memory."""

    def __init__(self, tensor: torch.Tensor, size: torch.Size, blocks: list[tuple[int, int]]) -> None:
        self.tensor = tensor
        self.size = size
        self.starts = [start for start, _ in blocks]
        self.lengths = [length for _, length in blocks]
        self.chunks = [
            ChunkStorageMetadata(torch.Size([start, *(0 for _ in size[1:])]), torch.Size([length, *size[1:]]))
            for start, length in blocks
        ]

    def items(self, key: str) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.tensor)
        return [
            WriteItem(
                MetadataIndex(key, c.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(c, properties, self.size),
            )
            for c in self.chunks
        ]

    def shard(self, index: MetadataIndex) -> torch.Tensor:
        number = next(number for number, chunk in enumerate(self.chunks) if chunk.offsets == index.offset)
        begin = sum(self.lengths[:number])
        return self.tensor.as_subclass(torch.Tensor)[begin : begin + self.lengths[number]]

    def by_methods(self, tensor: torch.Tensor) -> None:
        tensor.__create_write_items__ = lambda key, value: self.items(key)  # type: ignore[attr-defined]
        tensor.__create_chunk_list__ = lambda: self.chunks  # type: ignore[attr-defined]
        tensor.__get_tensor_shard__ = self.shard  # type: ignore[attr-defined]

    def by_two_methods(self, tensor: torch.Tensor) -> None:
        self.by_methods(tensor)
        del tensor.__get_tensor_shard__  # type: ignore[attr-defined]

    def by_fields(self, tensor: torch.Tensor) -> None:
        others = [0 for _ in self.size[1:]]
        tensor.global_shape = tuple(self.size)  # type: ignore[attr-defined]
        tensor.global_offsets = tuple((start, *others) for start in self.starts)  # type: ignore[attr-defined]
        begins = [sum(self.lengths[:number]) for number in range(len(self.lengths))]
        tensor.local_offsets = tuple((begin, *others) for begin in begins)  # type: ignore[attr-defined]
        tensor.local_sizes = tuple((length, *self.size[1:]) for length in self.lengths)  # type: ignore[attr-defined]


HOW_DESCRIBED = {
    "methods": _Part.by_methods,
    "methods of a local tensor": _Part.by_methods,
    "two methods of a local tensor": _Part.by_two_methods,
    "a class": None,
}
if find_spec("torch.distributed.checkpoint.protocol") is not None:  # from torch 2.14 on
    HOW_DESCRIBED["fields"] = _Part.by_fields


def _described(spec: Described, rank: int, mesh: DeviceMesh | None) -> torch.Tensor:
    full = filled(getattr(torch, spec.dtype), spec.shape, spec.seed)
    size = 1 if mesh is None else mesh.size()
    pieces = 1 if spec.how.startswith("two") else spec.pieces
    length = -(-len(full) // (size * pieces))
    numbers = [piece * size + (rank + spec.shift) % size for piece in range(pieces)]
    starts = [min(number * length, len(full)) for number in numbers]
    blocks = [(start, min(length, len(full) - start)) for start in starts]
    blocks = [block for number, block in enumerate(blocks) if block[1] or number == 0]
    local = torch.cat([full[start : start + count] for start, count in blocks])
    if spec.how == "a class":
        local = local.as_subclass(SelfDescribed)
        local.part = _Part(local, full.shape, blocks)  # type: ignore[attr-defined]
        return local
    tensor: torch.Tensor = local
    if "local" in spec.how and mesh is not None:
        tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())
        local = tensor._local_tensor
    describe = HOW_DESCRIBED[spec.how]
    assert describe is not None
    describe(_Part(local, full.shape, blocks), local)
    return tensor


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
