"""Copies of state dicts, made in two steps: one before their tensors are copied, and one after.

`copy_structure` copies containers and plain objects while training waits, and lists the plain tensors. `fill_tensors`
replaces these with staged tensors, in the same order, and rebuilds wrapper subclasses and sharded tensors around them.
The result shares nothing with the live state dict, except tensors that are written from shared memory without a copy.
"""

from __future__ import annotations

import collections
import copy
import types
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, NoReturn, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from .._runtime.interpreter import collector_paused
from .._runtime.torch_compat import (
    PART_NAMES,
    DTensor,
    Shard,
    ShardedTensor,
    ShardMetadata,
    awaited,
    cpu_placement,
    describes_part,
    local_of,
    part_described,
    rebuild_dtensor,
    rebuild_sharded_tensor,
    written_shards,
)
from .._tensor_file.dtypes import check_supported, has_memory, is_ordinary, is_plain_class, is_wrapper
from ..errors import StagingError, describe

_OTHER_TENSORS = (
    "the tensors of the state dict have changed during staging. Do not change the state dict before staging is "
    "complete. A container or tensor subclass that returns different tensors at each access cannot be saved."
)
_SHOWN = 60  # characters of the key of a container that contains itself: the whole key has hundreds of parts
_NO_ANSWER = "has attributes that describe which part of a tensor it is, but DCP cannot plan the tensor with them"
DtypeOf: TypeAlias = Callable[[torch.dtype], torch.dtype]
_Take: TypeAlias = Callable[[torch.Tensor], torch.Tensor]  # the copy of the next listed tensor
_ATOMIC = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class TensorList(list[torch.Tensor]):
    """The plain tensors in a state dict. Those of ``omitted`` keys are not staged.

    A ShardedTensor is always staged, because it cannot be built from shards without memory. If two tensors
    have one key, both are staged: one of them is part of an object, which this rank may write.

    Attributes:
        structure: The state dict, copied except for its tensors.
        memory: The tensors to copy. If training may assign to their ``data`` meanwhile, aliases that still refer to the
            same memory.
        in_place: The numbers of the tensors that are written from shared memory without a copy.
        described: The keys of tensors that describe their parts (`describes_part`).
    """

    def __init__(self, omitted: Set[str] = frozenset()) -> None:
        super().__init__()
        self.structure: dict[str, Any] = {}
        self.memory: list[torch.Tensor] = []
        self.in_place: set[int] = set()
        self.omitted_keys = omitted
        self._omitted: dict[str, range] = {}
        self._inner: list[range] = []
        self.described: list[str] = []

    def add(self, key: str, tensor: torch.Tensor, shards: Sequence[torch.Tensor] | None = None) -> None:
        """Adds the plain tensors inside a tensor, or inside ``shards`` if the tensor describes its part."""
        if shards is None and is_plain_class(tensor) and key not in self.omitted_keys:
            check_supported(key, tensor)
            self.append(tensor)
            return
        first = len(self)
        for part in [tensor] if shards is None else shards:
            self.extend(_inner_tensors(part, key))
        if shards is not None:
            self.described.append(key)
        if shards is not None or not (type(tensor) is DTensor and len(self) == first + 1):
            self._inner.append(range(first, len(self)))
        if key in self.omitted_keys:
            is_staged = key in self._omitted or isinstance(tensor, ShardedTensor)
            self._omitted[key] = range(0) if is_staged else range(first, len(self))

    @property
    def omitted(self) -> set[int]:
        return {number for numbers in self._omitted.values() for number in numbers}

    @property
    def inner(self) -> set[int]:
        """The numbers of the tensors that are not cast, because they are parts of a tensor that may need their dtypes.

        The plain tensor of a DTensor that has only one is cast, unless the DTensor describes its part.
        """
        return {number for numbers in self._inner for number in numbers}

    @collector_paused()
    def fill(self, copied: Iterable[torch.Tensor], dtype_of: DtypeOf | None) -> dict[str, Any]:
        """Returns the staged state dict, given the copies. May be called only once."""
        omitted = self.omitted
        others = iter(copied)
        staged = (
            t
            if n in self.in_place
            else torch.empty(t.shape, dtype=t.dtype, device="meta")  # enough for planning
            if n in omitted
            else next(others)
            for n, t in enumerate(self.memory)
        )
        return fill_tensors(self.structure, self, staged if self.in_place or omitted else copied, dtype_of)  # type: ignore[no-any-return]


def copy_structure(value: Any, key: str, tensors: TensorList) -> Any:
    """Copies a value without its tensors, and adds the plain tensors in it to ``tensors``.

    Raises `StagingError`, naming the key, if something cannot be copied.
    """
    if isinstance(value, torch.Tensor):
        value = awaited(value)
        if describes_part(value):
            try:
                described = _Described(key, value)
            except Exception as error:
                raise StagingError(f"{key!r} {_NO_ANSWER}: {describe(error)}") from error
            tensors.add(key, value, described.shards)
            return described
        tensors.add(key, value)
        return value
    if isinstance(value, _ATOMIC):
        return value
    if isinstance(value, Mapping):
        items = copy_items(value, f"{key}.", tensors)
        if type(value) in (dict, collections.OrderedDict):
            return type(value)(items)  # type: ignore[call-arg]
        return _copy_container(value, items, key) if isinstance(value, dict) else _copy_mapping(value, items)
    if isinstance(value, list | tuple):
        try:
            members = [copy_structure(item, f"{key}.{number}", tensors) for number, item in enumerate(value)]
        except RecursionError as error:
            raise StagingError(
                f"{key[:_SHOWN]!r}... contains itself, or is nested too deeply to be copied. Replace the inner "
                f"reference, or use fewer levels."
            ) from error
        return members if type(value) is list else _copy_container(value, members, key)
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise _cannot_be_copied(key, value, f"{type(error).__name__}: {error}") from error


def copy_items(mapping: Mapping[Any, Any], prefix: str, tensors: TensorList) -> list[tuple[Any, Any]]:
    """Copies the values of a mapping as `copy_structure` does. The keys of its tensors start with ``prefix``."""
    items = []
    has_plain_rule = not tensors.omitted_keys
    for name, item in mapping.items():
        if has_plain_rule and is_ordinary(item):  # true for nearly all items: every call takes time
            tensors.append(item)
        else:
            item = copy_structure(item, f"{prefix}{name}", tensors)
        items.append((name, item))
    return items


class _Described:
    """A tensor that describes its part, with the write items and shards that it had at the time of staging.

    DCP writes the shards of such a tensor. So the shards are staged, and the staged tensor returns the write items of
    the live tensor, and the staged shards. The methods of the live tensor are not called again: training may have
    changed it, and such a tensor often returns views of its own memory.

    The staged tensor has values only if one shard is the whole local tensor. The staged tensor cannot be pickled or
    copied, because its shards are in the memory of one save.
    """

    def __init__(self, key: str, tensor: torch.Tensor) -> None:
        self.key = key
        self.tensor = tensor
        written = written_shards(key, tensor)
        self.items, self.shards = [item for item, _ in written], [shard for _, shard in written]
        fields = {name: getattr(tensor, name) for name in PART_NAMES if hasattr(tensor, name)}
        self.fields = {name: copy.deepcopy(value) for name, value in fields.items() if not callable(value)}

    def filled(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the staged tensor, given the staged shards. May be called only once."""
        tensor, live = self.tensor, self.shards
        local = local_of(tensor)
        whole = next((s.detach() for s, shard in zip(shards, live, strict=True) if _is_same(shard, local)), None)
        if whole is None:
            whole = torch.empty(local.shape, dtype=local.dtype, device="meta")
        staged = rebuild_dtensor(tensor, whole) if isinstance(tensor, DTensor) else whole
        self.shards = list(shards)
        del self.tensor
        staged.__dict__.update(
            self.fields,
            __create_write_items__=self.write_items,
            __create_chunk_list__=self.chunks,
            __get_tensor_shard__=self.shard,
        )
        return staged

    def write_items(self, key: str, value: object) -> list[WriteItem]:
        return [replace(item, index=replace(item.index, fqn=key)) for item in self.items]

    def chunks(self) -> list[ChunkStorageMetadata]:
        return [item.tensor_data.chunk for item in self.items if item.tensor_data is not None]

    def shard(self, index: MetadataIndex) -> torch.Tensor:
        for item, shard in zip(self.items, self.shards, strict=True):
            if item.index.offset == index.offset:
                return shard
        raise StagingError(f"{self.key!r} has no shard at {index.offset}")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StagingError(
            f"{self.key!r} describes which part of a tensor it is, and cannot be pickled or copied once it is staged. "
            f"Put it into a dict or a list, not into a tuple, and use a planner with flatten_state_dict=True."
        )


def _is_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    if tensor is other or not (has_memory(tensor) and has_memory(other)):
        return tensor is other
    layouts = {(t.data_ptr(), t.dtype, t.shape, t.stride(), t.is_conj(), t.is_neg()) for t in (tensor, other)}
    return len(layouts) == 1


def _copy_container(value: Any, members: list[Any], key: str) -> Any:
    """Returns a container of the same class with other members, and with copies of the original's attributes.

    Does not call the constructor, whose arguments are unknown. Raises `StagingError`, naming the key, if the container
    cannot be copied, or its members cannot be set.
    """
    try:
        copied: Any = tuple.__new__(type(value), members) if isinstance(value, tuple) else copy.copy(value)
        if copied is value and not isinstance(value, tuple):
            raise TypeError("a copy of it is the same object")
        for name, attribute in getattr(value, "__dict__", {}).items():
            copied.__dict__[name] = copy.deepcopy(attribute)
        _set_members(copied, members)
    except Exception as error:
        raise _cannot_be_copied(key, value, f"{type(error).__name__}: {error}") from error
    given = [member for _, member in members] if isinstance(value, dict) else members
    held = list(copied.values() if isinstance(value, dict) else copied)
    if len(held) != len(given) or any(a is not b for a, b in zip(held, given, strict=True)):
        raise _cannot_be_copied(key, value, "a copy of it has different items")
    return copied


def _copy_mapping(value: Mapping[Any, Any], items: list[tuple[Any, Any]]) -> Mapping[Any, Any]:
    """Returns a copy of a mapping that is not a dict, with other values.

    The copy is deep, because a shallow copy may share contents with the mapping. If the mapping cannot be copied with
    other values, returns a view of a dict, which DCP can flatten, but cannot pickle as a whole.
    """
    copies = {id(member): item for member, (_, item) in zip(value.values(), items, strict=True)}
    try:
        copied = copy.deepcopy(value, copies)
        held = list(copied.items())
    except Exception:
        return types.MappingProxyType(dict(items))
    same = len(held) == len(items) and all(a is b for (_, a), (_, b) in zip(held, items, strict=True))
    return copied if same else types.MappingProxyType(dict(items))


def _set_members(container: Any, members: list[Any]) -> None:
    """Sets the members of a list, or the items of a dict. A tuple already has its members."""
    if isinstance(container, dict):
        for name, item in members:
            container[name] = item
    elif isinstance(container, list):
        container[:] = members


def _cannot_be_copied(key: str, value: object, why: str) -> StagingError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    is_container = isinstance(value, dict | list | tuple)
    return StagingError(
        f"{key!r} is an object of type {kind}, which cannot be copied ({why}). Leave it out of the state dict, or "
        f"{'replace it with a plain dict, list or tuple' if is_container else 'give it a __deepcopy__'}."
    )


def _inner_tensors(tensor: torch.Tensor, key: str) -> list[torch.Tensor]:
    if isinstance(tensor, ShardedTensor):
        parts = [shard.tensor for shard in tensor.local_shards()]
    elif is_wrapper(tensor) and not tensor.is_nested:
        if hasattr(tensor, "trigger_wait"):  # the result of an asynchronous collective
            tensor.trigger_wait()
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        members = [getattr(tensor, name) for name in names]
        parts = [member for member in members if isinstance(member, torch.Tensor)]
    else:
        check_supported(key, tensor)
        return [tensor.detach()]
    return [inner for part in parts for inner in _inner_tensors(part, key)]


def fill_tensors(
    structure: Any, tensors: Iterable[torch.Tensor], staged: Iterable[torch.Tensor], dtype_of: DtypeOf | None = None
) -> Any:
    """Puts staged tensors into the result of `copy_structure`, in place if possible. Returns the filled structure.

    ``tensors`` are those that `copy_structure` has listed, and ``staged`` their copies, which may have the dtype that
    ``dtype_of`` returns. Raises `StagingError` if the tensors of the structure have changed in number, shape or dtype.
    """
    pairs = zip(tensors, staged, strict=True)

    def take(tensor: torch.Tensor) -> torch.Tensor:
        listed, copied = next(pairs, (None, tensor))
        if listed is not tensor:  # inner tensors may be new objects at each access
            dtypes = tensor.dtype, tensor.dtype if dtype_of is None else dtype_of(tensor.dtype)
            if listed is None or copied.shape != tensor.shape or copied.dtype not in dtypes:
                raise StagingError(_OTHER_TENSORS)
        return copied

    filled = _fill(structure, take)
    if next(pairs, None) is not None:
        raise StagingError(_OTHER_TENSORS)
    return filled


def _fill(structure: Any, take: _Take) -> Any:
    if isinstance(structure, _Described):
        return structure.filled([_rebuild_tensor(shard, take) for shard in structure.shards])
    if isinstance(structure, torch.Tensor):
        return _rebuild_tensor(structure, take)
    if type(structure) is dict:
        for name, item in structure.items():  # nearly all items are plain tensors: every call takes time
            structure[name] = take(item) if is_plain_class(item) else _fill(item, take)
        return structure
    if isinstance(structure, tuple) and not isinstance(structure, _ATOMIC):
        filled = tuple.__new__(type(structure), [_fill(item, take) for item in structure])
        if attributes := getattr(structure, "__dict__", None):
            filled.__dict__.update(attributes)
        return filled
    if isinstance(structure, dict):
        _set_members(structure, [(name, _fill(item, take)) for name, item in structure.items()])
    elif isinstance(structure, Mapping):
        return _copy_mapping(structure, [(name, _fill(item, take)) for name, item in structure.items()])
    elif isinstance(structure, list):
        _set_members(structure, [_fill(item, take) for item in structure])
    return structure


def _rebuild_tensor(tensor: torch.Tensor, take: _Take) -> torch.Tensor:
    if isinstance(tensor, ShardedTensor):
        return _rebuild_sharded(tensor, take)
    if not is_wrapper(tensor):
        return take(tensor)
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: getattr(tensor, name) for name in names}
    rebuilt = {k: _rebuild_tensor(v, take) if isinstance(v, torch.Tensor) else v for k, v in inner.items()}
    if type(tensor) is DTensor:
        return rebuild_dtensor(tensor, rebuilt["_local_tensor"])
    rebuild = type(tensor).__tensor_unflatten__  # type: ignore[attr-defined]
    return rebuild(rebuilt, context, tensor.size(), tensor.stride())  # type: ignore[no-any-return]


def _rebuild_sharded(tensor: ShardedTensor, take: _Take) -> ShardedTensor:
    metadata = copy.deepcopy(tensor.metadata())
    for shard_metadata in metadata.shards_metadata:
        shard_metadata.placement = cpu_placement(shard_metadata)
    shards = []
    for shard in tensor.local_shards():
        where = ShardMetadata(shard.metadata.shard_offsets, shard.metadata.shard_sizes, cpu_placement(shard.metadata))
        shards.append(Shard(_rebuild_tensor(shard.tensor, take), where))
    metadata.tensor_properties.requires_grad = False
    metadata.tensor_properties.pin_memory = bool(shards) and shards[0].tensor.is_pinned()
    return rebuild_sharded_tensor(tensor, shards, metadata)


# --- fingerprints: state dicts with equal fingerprints have equal plans -----------------------------------------------


def fingerprint(value: Any) -> int:
    """Returns a hash of a state's keys, types, shapes, dtypes and shardings, valid in this process.

    Does not read values, and takes a few microseconds per entry. ``value`` is a state dict or a part of one.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        sharding: object = None
        if isinstance(value, DTensor):
            sharding = value.device_mesh, tuple(value.placements)
        elif isinstance(value, ShardedTensor):
            shards = (shard.metadata for shard in value.local_shards())
            sharding = tuple((tuple(shard.shard_offsets), tuple(shard.shard_sizes)) for shard in shards)
        return hash((kind, value.shape, value.dtype, sharding, part_described(value)))
    if isinstance(value, Mapping):
        return hash((kind, tuple((name, fingerprint(member)) for name, member in value.items())))
    if isinstance(value, list | tuple):
        return hash((kind, tuple(map(fingerprint, value))))
    return hash(kind)
