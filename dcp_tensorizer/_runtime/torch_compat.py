"""torch's private names, each with the reason why no public one will do. Only this module uses them.

Names that are rarely needed are imported on first use: those for conversion take half a second.
"""

from __future__ import annotations

import inspect
import io
import math
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Any, TypeGuard

import torch

# The names that torch's weights-only unpickler trusts. `get_unsafe_globals_in_checkpoint` lists only other names.
from torch._weights_only_unpickler import _get_allowed_globals

# The result of a functional collective: a tensor whose elements may not have arrived yet.
from torch.distributed._functional_collectives import AsyncCollectiveTensor

# FSDP1 still makes ShardedTensors, which have no public module.
from torch.distributed._shard.metadata import ShardMetadata as ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor as ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.shard import Shard as Shard

# What DCP's planners ask of one value. Their public functions ask it of a whole state dict.
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

# The value of ``Metadata.version``, which is a constant of one of torch's modules.
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION as DCP_VERSION
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.utils import find_state_dict_object, find_tensor_shard

# A group's store and its timeout, which ``ProcessGroup`` does not have in every release.
from torch.distributed.distributed_c10d import (
    _get_process_group_store,
    _new_process_group_helper,
    _set_pg_timeout,
    _world,
)
from torch.distributed.remote_device import _remote_device
from torch.distributed.tensor import DTensor as DTensor

if TYPE_CHECKING:
    from datetime import timedelta
    from types import FrameType

    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.distributed.checkpoint._extension import ExtensionRegistry as ExtensionRegistry
    from torch.distributed.checkpoint._extension import StreamTransformExtension as StreamTransformExtension
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader as FsspecReader
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter as FsspecWriter
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict as flatten_state_dict
    from torch.distributed.checkpoint._traverse import set_element as set_element
    from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
    from torch.distributed.checkpoint.filesystem import _StoragePrefix as StoragePrefix
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys as load_state_dict_from_keys
    from torch.distributed.distributed_c10d import ProcessGroup, Store

__all__ = [
    "DCP_VERSION",
    "StorageInfo",
    "StoragePrefix",
    "load_state_dict_from_keys",
]  # other names in torch

# Public from torch 2.15 on.
_FSSPEC = "torch.distributed.checkpoint.fsspec_filesystem"
if find_spec(_FSSPEC) is None:
    _FSSPEC = "torch.distributed.checkpoint._fsspec_filesystem"

# For torch's own checkpoints: the places in their ``.metadata``, and decoding their streams. For conversion: fake
# tensors (see ``torch.serialization.skip_data``), the flattening of nested state dicts, and torch's writer for URLs.
# For benchmarks: torch's reader. For loads: setting a value in a nested state dict, and loading without a target.
_ON_USE = {
    "ExtensionRegistry": ("torch.distributed.checkpoint._extension", "ExtensionRegistry"),
    "StreamTransformExtension": ("torch.distributed.checkpoint._extension", "StreamTransformExtension"),
    "FakeTensor": ("torch._subclasses.fake_tensor", "FakeTensor"),
    "FakeTensorMode": ("torch._subclasses.fake_tensor", "FakeTensorMode"),
    "FsspecReader": (_FSSPEC, "FsspecReader"),
    "FsspecWriter": (_FSSPEC, "FsspecWriter"),
    "StorageInfo": ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    "StoragePrefix": ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    "flatten_state_dict": ("torch.distributed.checkpoint._nested_dict", "flatten_state_dict"),
    "load_state_dict_from_keys": ("torch.distributed.checkpoint.state_dict_loader", "_load_state_dict_from_keys"),
    "set_element": ("torch.distributed.checkpoint._traverse", "set_element"),
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Imports rarely needed names on first use."""
        if name not in _ON_USE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, attribute = _ON_USE[name]
        return getattr(import_module(module), attribute)


STORAGE_SETUP = "_storage_setup"
"""The function by which DCP's saver and loader choose a storage if they are given none."""

PROCESS_EXECUTOR = "_ProcessBasedAsyncCheckpointExecutor"
"""The class with which DCP's saver runs a save in a process of torch's."""

GET_LAYOUT = "torch.serialization._get_layout"

OLD_PROPERTIES = "torch.distributed._shard.sharded_tensor.metadata"
"""The module of ``TensorProperties`` in a ``.metadata`` from before torch 2.3."""

tensor_makers = frozenset({"torch", "torch._utils", "torch._tensor"})
"""The modules whose functions and classes a pickle calls to make tensors and shapes."""


REBUILD_SUBCLASS = "torch._tensor._rebuild_from_type_v2"
"""Called by pickled tensors with attributes or of a subclass; it calls its first argument with its third."""

REBUILD_PREFIX = "torch._utils._rebuild_"
"""The prefix of the names of functions that other pickled tensors call."""


NEVER_FAKE = frozenset(
    f"{REBUILD_PREFIX}{kind}" for kind in ("sparse_tensor", "qtensor", "nested_tensor", "meta_tensor_no_storage")
)
"""Called by pickled tensors that have no storage, or that torch cannot make as fake tensors."""


def trusted_globals() -> Set[str]:
    """The names of the classes and functions that ``torch.load(weights_only=True)`` trusts by itself."""
    return frozenset(_get_allowed_globals())


def pickle_of(file: IO[bytes]) -> bytes:
    """The pickle in a file that ``torch.save`` wrote, as ``torch.load`` finds it.

    Raises `ValueError` if ``torch.load`` would take the file for something else, or would decompress it.
    """
    nbytes = file.seek(0, io.SEEK_END)
    file.seek(0)
    if file.read(4) != b"PK\3\4":
        raise ValueError("it is not in the format of torch.save")
    file.seek(0)
    try:
        entries = zipfile.ZipFile(file).infolist()
        file.seek(0)
        archive = torch._C.PyTorchFileReader(file)
        names = archive.get_all_records()
    except Exception as error:
        raise ValueError(f"it is damaged ({_first_line(error)})") from None
    if len(names) != len(entries) or sum(entry.file_size for entry in entries) > nbytes:
        raise ValueError("it is compressed")
    if "constants.pkl" in names:
        raise ValueError("it is a TorchScript program")
    try:
        return bytes(archive.get_record("data.pkl"))
    except RuntimeError as error:
        raise ValueError(f"it is damaged ({_first_line(error)})") from None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, non_blocking: bool = False) -> None:
    """Copies many tensors in one call, which takes a tenth of the time of as many ``copy_`` calls."""
    torch._foreach_copy_(list(targets), list(sources), non_blocking=non_blocking)


def allocator_settings() -> str:
    """The settings of torch's allocators that were set last, also at run time; empty if torch has no getter."""
    getter = getattr(torch._C, "_accelerator_getAllocatorSettings", str)
    return str(getter())


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's memory is its values in C order: contiguous, and not lazily conjugated or negated.

    `Tensor.is_conj` and `Tensor.is_neg` release the interpreter. Called for each tensor on a save's thread, they wait
    for a training loop that holds it, 0.03 ms per call on average. What ``torch.save`` writes of both does not.
    """
    return tensor.is_contiguous() and not torch._C._get_tensor_metadata(tensor)  # type: ignore[attr-defined]


def awaited(tensor: torch.Tensor) -> torch.Tensor:
    """Waits for the result of a functional collective, and returns it; returns any other tensor as it is."""
    return tensor.wait() if type(tensor) is AsyncCollectiveTensor else tensor


def is_fake(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has a shape but no elements, like those made under ``FakeTensorMode``."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    return fakes is not None and isinstance(tensor, fakes.FakeTensor)


def real_tensors() -> AbstractContextManager[object]:
    """Makes tensors have elements in a block, also under ``FakeTensorMode``."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    return nullcontext() if fakes is None else fakes.unset_fake_temporarily()


def negated_view(tensor: torch.Tensor) -> torch.Tensor:
    """A view whose elements are lazily negated, as ``.conj().imag`` is."""
    return torch._neg_view(tensor)


def cpu_placement(metadata: ShardMetadata) -> _remote_device:
    """The placement in host memory of a shard of the same rank."""
    assert metadata.placement is not None
    return _remote_device(f"rank:{metadata.placement.rank()}/cpu")


def rebuild_sharded_tensor(like: ShardedTensor, shards: list[Shard], metadata: ShardedTensorMetadata) -> ShardedTensor:
    """A ShardedTensor of other local shards, made without a collective."""
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=like._process_group, init_rrefs=False
    )


def rebuild_dtensor(like: DTensor, local: torch.Tensor) -> DTensor:
    """Makes a DTensor like another one, of a local tensor of the same shape and dtype.

    It takes a quarter of the time of ``__tensor_unflatten__``, which computes the layout again.
    """
    return DTensor(local, like._spec, requires_grad=like.requires_grad)


# --- tensors that describe their part: DCP asks them which part of which tensor they hold ----------------------------

PART_NAMES = frozenset(
    {
        "__create_write_items__",
        "__create_chunk_list__",
        "__get_tensor_shard__",
        # Of ``CheckpointableTensor``, from torch 2.14 on.
        "global_shape",
        "global_offsets",
        "local_offsets",
        "local_sizes",
    }
)
"""The attributes by which a tensor describes its part. DCP also asks a DTensor's local tensor for the first three."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def describes_part(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has any of `PART_NAMES`, so that its class, shape and placements do not tell its part.

    Such a tensor is planned by torch, and staged with torch's answers. Nothing of it is assumed or remembered.
    """
    if not PART_NAMES.isdisjoint(tensor.__dict__):
        return True
    if type(tensor) in _PLAIN:
        return False
    if isinstance(tensor, DTensor):
        return describes_part(tensor._local_tensor)
    return any(hasattr(type(tensor), name) for name in PART_NAMES)


def is_whole(value: object) -> TypeGuard[torch.Tensor]:
    """Returns whether a value is a tensor of torch's own class that does not describe a part."""
    return type(value) is torch.Tensor and PART_NAMES.isdisjoint(value.__dict__)


def write_items(key: str, value: object, *, is_coordinator: bool = True) -> list[WriteItem]:
    """The items that DCP's planner makes of a value."""
    return create_default_local_save_plan({key: value}, is_coordinator).items


def written_shards(key: str, tensor: torch.Tensor) -> list[tuple[WriteItem, torch.Tensor]]:
    """The items that DCP's planner makes of a tensor, each with the tensor that DCP writes for it."""
    return [(item, awaited(find_state_dict_object({key: tensor}, item.index))) for item in write_items(key, tensor)]


def part_described(tensor: torch.Tensor) -> str:
    """A text that is equal for tensors that describe equal parts; empty for all tensors that describe none."""
    return repr(write_items("", tensor)) if describes_part(tensor) else ""


def local_parts(tensor: torch.Tensor) -> Iterator[tuple[torch.Size, torch.Tensor]]:
    """The parts of a tensor on this rank, as DCP loads them: the offsets of each, and its elements."""
    for chunk in _create_chunk_list(tensor):
        yield chunk.offsets, find_tensor_shard(tensor, MetadataIndex("", chunk.offsets))


def whole_size(tensor: torch.Tensor) -> torch.Size:
    """The size of the whole tensor, of which a tensor may hold a part: what DCP compares with the stored size."""
    return torch.Size(tensor.global_shape) if _is_checkpointable(tensor) else tensor.size()  # type: ignore[attr-defined]


def _is_checkpointable(tensor: torch.Tensor) -> bool:
    if not describes_part(tensor) or find_spec("torch.distributed.checkpoint.protocol") is None:
        return False
    protocol = import_module("torch.distributed.checkpoint.protocol")
    return isinstance(tensor, protocol.CheckpointableTensor)


def plain_local(value: object) -> torch.Tensor | None:
    """The local tensor of a DTensor, if ``to_local`` would return that very tensor; None otherwise.

    ``to_local`` records an operation for autograd, which takes ten times as long as everything else here. None, too, if
    the DTensor describes its part: then DCP may take another tensor than the local one.
    """
    if type(value) is not DTensor or not PART_NAMES.isdisjoint(value.__dict__):
        return None
    local = value._local_tensor
    return local if is_whole(local) and not value.requires_grad else None


def plain_tensor_at(index: MetadataIndex, state_dict: Mapping[str, Any]) -> torch.Tensor | None:
    """The tensor of a state dict to which an index refers: a plain tensor, or the local one of a DTensor.

    None for everything else: torch's planners find it, and take longer.
    """
    value = state_dict.get(index.fqn)
    if is_whole(value):
        return None if any(index.offset or ()) else value
    return plain_local(value)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor; any other tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def layout_of(value: object) -> tuple[Any, ...] | None:
    """A value that tells which part of a DTensor is on this rank; equal layouts have equal values.

    None if it describes that itself, and for values that are not DTensors.
    """
    if type(value) is not DTensor or describes_part(value):
        return None
    return value.shape, id(value.device_mesh), value.placements


def local_elements(target: Any, within: torch.Size) -> int:
    """The number of a tensor's elements on this rank that lie inside of ``within``, a size of the whole tensor."""
    if isinstance(target, torch.Tensor) and describes_part(target):
        return sum(_elements(chunk.offsets, chunk.sizes, within) for chunk in _create_chunk_list(target))
    if isinstance(target, ShardedTensor):
        return sum(shard.tensor.numel() for shard in target.local_shards())
    if not isinstance(target, torch.Tensor):
        return 0
    sizes, offsets = target.size(), [0] * target.dim()
    if isinstance(target, DTensor):
        if target.device_mesh.get_coordinate() is None:
            return 0
        sizes = target._local_tensor.size()  # `to_local` would record an operation for autograd
        if target.size() != within:
            offsets = list(target.__create_chunk_list__()[0].offsets) if target._local_tensor.numel() else offsets
    if target.size() == within:
        return math.prod(sizes)
    return _elements(offsets, sizes, within)


def _elements(offsets: Sequence[int], sizes: Sequence[int], within: Sequence[int]) -> int:
    return math.prod(max(0, min(end - at, n)) for end, at, n in zip(within, offsets, sizes, strict=True))


def group_devices(group: ProcessGroup) -> Set[str]:
    """The types of devices whose memory a group's collectives use directly.

    gloo says that it supports GPUs, but copies their tensors to the host and back.
    """
    kinds = group._device_types
    return {kind.type for kind in kinds if kind.type == "cpu" or group._get_backend(kind).name() != "gloo"}


def group_of_save() -> ProcessGroup | None:
    """The process group of the save on this thread; None if unknown.

    DCP passes its group to no hook of a storage or a stager. So the group is found on the stack, as the argument
    ``process_group`` of ``dcp.save`` or ``dcp.async_save``.
    """
    frame = _frame_of_save()
    if frame is None or "process_group" not in frame.f_code.co_varnames:
        return None
    group: ProcessGroup | None = frame.f_locals["process_group"] or torch.distributed.group.WORLD
    return group


def state_of_save() -> Any:
    """The state dict of the save on this thread, as DCP has it; None if unknown.

    DCP passes it to planners, but to no hook of a storage.
    """
    frame = _frame_of_save()
    return None if frame is None else frame.f_locals.get("state_dict")


def path_of_save() -> Any:
    """The ``checkpoint_id`` of the save on this thread; None if it has none, or is unknown.

    DCP passes it to the storage only after staging.
    """
    frame = _frame_of_save()
    return None if frame is None else frame.f_locals.get("checkpoint_id")


def _frame_of_save() -> FrameType | None:
    from torch.distributed.checkpoint.state_dict_saver import async_save, save

    codes = inspect.unwrap(save).__code__, inspect.unwrap(async_save).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame


def group_store(group: ProcessGroup) -> Store:
    """The store by which the ranks of a group have found each other. Its keys are the group's own."""
    return _get_process_group_store(group)


def new_gloo_group(like: ProcessGroup, timeout: timedelta) -> ProcessGroup:
    """Makes a gloo group of the ranks of ``like``, which alone call this, each as often as the others.

    ``new_group(use_local_synchronization=True)`` would name it by the number of the process's groups. A name that comes
    back after a group was destroyed leads to the old addresses in the store. So the ranks count in the store of
    ``like``.
    """
    ranks, store = torch.distributed.get_process_group_ranks(like), group_store(like)
    name = f"{like.group_name}/dcp_tensorizer/{store.add(f'dcp_tensorizer/groups/{like.rank()}', 1)}"
    made, _ = _new_process_group_helper(len(ranks), like.rank(), ranks, "gloo", store, name, timeout=timeout)  # type: ignore[arg-type]
    _world.pg_group_ranks[made] = {rank: number for number, rank in enumerate(ranks)}
    return made  # type: ignore[no-any-return]


def store_host(group: ProcessGroup) -> str | None:
    """The host of a group's store; None if the store is not a server."""
    store = group_store(group)
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return getattr(store, "host", None)


def group_timeout(group: ProcessGroup) -> timedelta:
    """The time that a collective of a group waits for a missing rank."""
    kinds = {kind.type: kind for kind in group._device_types}
    for name in sorted(kinds, key=lambda name: name != "cpu"):
        options = getattr(group._get_backend(kinds[name]), "options", None)
        if options is not None and hasattr(options, "_timeout"):
            return options._timeout  # type: ignore[no-any-return]
    return group_store(group).timeout  # type: ignore[attr-defined, no-any-return] # `init_process_group` was given it


def set_group_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Sets how long a group's next collectives wait."""
    _set_pg_timeout(timeout, group)


def release_ipc_counter(arguments: tuple[Any, ...]) -> None:
    """Returns a handle to GPU memory, from which ``reduce_tensor`` made these arguments."""
    _, _, _, _, storage_class, _, device, _, _, _, _, counter, offset, _, _ = arguments
    storage_class._release_ipc_counter(counter, offset, device=device)


def checkpoint_offset(tensor: torch.Tensor) -> int:
    """The offset at which ``torch.load`` found a fake tensor's bytes in its file."""
    return getattr(tensor.untyped_storage(), "_checkpoint_offset", None) or 0
