"""Wraps torch's private names, each with the reason why no public one suffices. No other module uses private names.

Rarely needed names are imported on first use: importing those for conversion takes half a second.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
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

# The plan of DCP's planners for one value. The planners' public functions plan a whole state dict.
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

# The value of ``Metadata.version``.
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION as DCP_VERSION
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.utils import find_state_dict_object, find_tensor_shard

# A group's store and its timeout: ``ProcessGroup`` lacks them in some releases.
from torch.distributed.distributed_c10d import (
    _get_process_group_store,
    _new_process_group_helper,
    _set_pg_timeout,
    _world,
)
from torch.distributed.remote_device import _remote_device
from torch.distributed.tensor import DTensor as DTensor

# There is no public way to leave a dispatch mode before the end of its ``with`` block.
from torch.utils._python_dispatch import _disable_current_modes

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
]  # names of this module that torch spells differently

# Public since torch 2.15.
_FSSPEC = "torch.distributed.checkpoint.fsspec_filesystem"
if find_spec(_FSSPEC) is None:
    _FSSPEC = "torch.distributed.checkpoint._fsspec_filesystem"

# For torch's own checkpoints: the locations in their ``.metadata``, and decoding their streams. For conversion: fake
# tensors (see ``torch.serialization.skip_data``), flattening nested state dicts, and torch's writer for URLs. For
# benchmarks: torch's reader. For loads: setting a value in a nested state dict, and loading without a target.
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
        if name not in _ON_USE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, attribute = _ON_USE[name]
        return getattr(import_module(module), attribute)


STORAGE_SETUP = "_storage_setup"
"""The function with which DCP's saver and loader choose a storage if the caller passes none."""

PROCESS_EXECUTOR = "_ProcessBasedAsyncCheckpointExecutor"
"""The class with which DCP's saver runs a save in a process that torch starts."""

GET_LAYOUT = "torch.serialization._get_layout"

OLD_PROPERTIES = "torch.distributed._shard.sharded_tensor.metadata"
"""The module of ``TensorProperties`` in a ``.metadata`` from before torch 2.3."""

tensor_makers = frozenset({"torch", "torch._utils", "torch._tensor"})
"""The modules whose functions and classes a pickle calls to make tensors and shapes."""


REBUILD_SUBCLASS = "torch._tensor._rebuild_from_type_v2"
"""The function that rebuilds tensors with attributes or of a subclass. It calls its first argument with its third."""

REBUILD_PREFIX = "torch._utils._rebuild_"
"""The prefix of the names of the functions that rebuild other pickled tensors."""


NEVER_FAKE = frozenset(
    f"{REBUILD_PREFIX}{kind}" for kind in ("sparse_tensor", "qtensor", "nested_tensor", "meta_tensor_no_storage")
)
"""The functions that rebuild tensors without a storage, or tensors that torch cannot make as fake tensors."""


def trusted_globals() -> Set[str]:
    """Returns the names of the classes and functions that ``torch.load(weights_only=True)`` trusts by default."""
    return frozenset(_get_allowed_globals())


def pickle_of(file: IO[bytes]) -> bytes:
    """Returns the pickle in a file that ``torch.save`` wrote, as ``torch.load`` finds it.

    Raises `ValueError` if the file is damaged, or ``torch.load`` would read it as another format.
    """
    file.seek(0)
    if file.read(4) != b"PK\3\4":
        raise ValueError("it is not in the zip format of torch.save")
    file.seek(0)
    try:
        archive = torch._C.PyTorchFileReader(file)
        names, pickled = archive.get_all_records(), bytes(archive.get_record("data.pkl"))
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        raise ValueError(f"it is damaged ({type(error).__name__}: {first_line})") from None
    if "constants.pkl" in names:
        raise ValueError("it is a TorchScript program")
    return pickled


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, non_blocking: bool = False) -> None:
    """Copies many tensors in one call, in a tenth of the time of one ``copy_`` call for each."""
    torch._foreach_copy_(list(targets), list(sources), non_blocking=non_blocking)


def allocator_settings() -> str:
    """Returns the current settings of torch's allocators, or an empty string if torch has no getter."""
    getter = getattr(torch._C, "_accelerator_getAllocatorSettings", str)
    return str(getter())


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's memory holds its values in C order: contiguous, and not lazily conjugated or negated.

    `Tensor.is_conj` and `Tensor.is_neg` release the GIL. Called for each tensor in a save's thread, they then wait for
    a training loop that holds the GIL, 0.03 ms per call on average. The metadata that ``torch.save`` writes for both
    bits is read without releasing the GIL.
    """
    return tensor.is_contiguous() and not torch._C._get_tensor_metadata(tensor)  # type: ignore[attr-defined]


def awaited(tensor: torch.Tensor) -> torch.Tensor:
    """Waits for the result of a functional collective and returns it. Returns any other tensor unchanged."""
    return tensor.wait() if type(tensor) is AsyncCollectiveTensor else tensor


def is_fake(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is fake: it has a shape but no elements, as under ``FakeTensorMode``."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    return fakes is not None and isinstance(tensor, fakes.FakeTensor)


@contextmanager
def real_tensors() -> Iterator[None]:
    """Disables dispatch modes of the calling thread, such as ``FakeTensorMode``, whose results have no elements."""
    with _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext():
        yield


def without_torch_function() -> AbstractContextManager[object]:
    """Disables the ``__torch_function__`` of subclasses: a ShardedTensor's raises an error for most attributes."""
    return torch._C.DisableTorchFunctionSubclass()


def negated_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view whose elements are lazily negated, as those of ``.conj().imag`` are."""
    return torch._neg_view(tensor)


def cpu_placement(metadata: ShardMetadata) -> _remote_device:
    assert metadata.placement is not None
    return _remote_device(f"rank:{metadata.placement.rank()}/cpu")


def rebuild_sharded_tensor(like: ShardedTensor, shards: list[Shard], metadata: ShardedTensorMetadata) -> ShardedTensor:
    """Returns a ShardedTensor of other local shards, without a collective."""
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=like._process_group, init_rrefs=False
    )


def rebuild_dtensor(like: DTensor, local: torch.Tensor) -> DTensor:
    """Returns a DTensor like another one, with a local tensor of the same shape and dtype.

    This takes a quarter of the time of ``__tensor_unflatten__``, which recomputes the layout.
    """
    return DTensor(local, like._spec, requires_grad=like.requires_grad)


# --- tensors that describe their part: DCP asks them which part of which tensor they hold ----------------------------

PART_NAMES = frozenset(
    {
        "__create_write_items__",
        "__create_chunk_list__",
        "__get_tensor_shard__",
        # Of ``CheckpointableTensor``, since torch 2.14.
        "global_shape",
        "global_offsets",
        "local_offsets",
        "local_sizes",
    }
)
"""The attributes with which a tensor describes its part. DCP also reads the first three of a DTensor's local tensor."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def describes_part(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has any of `PART_NAMES`, so that its class, shape and placements do not define its part.

    torch plans such a tensor, and staging uses that plan. No module assumes or caches the part of such a tensor.
    """
    if not PART_NAMES.isdisjoint(tensor.__dict__):
        return True
    if type(tensor) in _PLAIN:
        return False
    if isinstance(tensor, DTensor):
        return describes_part(tensor._local_tensor)
    return any(hasattr(type(tensor), name) for name in PART_NAMES)


def is_whole(value: object) -> TypeGuard[torch.Tensor]:
    """Returns whether a value is of class ``torch.Tensor`` and does not describe a part."""
    return type(value) is torch.Tensor and PART_NAMES.isdisjoint(value.__dict__)


def write_items(key: str, value: object, *, is_coordinator: bool = True) -> list[WriteItem]:
    return create_default_local_save_plan({key: value}, is_coordinator).items


def written_shards(key: str, tensor: torch.Tensor) -> list[tuple[WriteItem, torch.Tensor]]:
    """Returns the items that DCP's planner makes of a tensor, each with the tensor that DCP writes for it."""
    return [(item, awaited(find_state_dict_object({key: tensor}, item.index))) for item in write_items(key, tensor)]


def part_described(tensor: torch.Tensor) -> str:
    """Returns a string that is equal for tensors that describe equal parts. Empty if the tensor describes none."""
    return repr(write_items("", tensor)) if describes_part(tensor) else ""


def local_parts(tensor: torch.Tensor) -> Iterator[tuple[torch.Size, torch.Tensor]]:
    """Yields the offsets and the elements of each part of a tensor on this rank, as DCP loads them."""
    for chunk in _create_chunk_list(tensor):
        yield chunk.offsets, find_tensor_shard(tensor, MetadataIndex("", chunk.offsets))


def whole_size(tensor: torch.Tensor) -> torch.Size:
    """Returns the size of the whole tensor that ``tensor`` may be a part of. DCP compares it with the stored size."""
    if describes_part(tensor) and find_spec("torch.distributed.checkpoint.protocol") is not None:
        protocol = import_module("torch.distributed.checkpoint.protocol")
        if isinstance(tensor, protocol.CheckpointableTensor):
            return torch.Size(tensor.global_shape)
    return tensor.size()


def plain_local(value: object) -> torch.Tensor | None:
    """Returns the local tensor of a DTensor if it is a plain tensor that needs no gradient, otherwise None.

    ``to_local`` records an operation for autograd, which takes ten times as long as everything else here. Also returns
    None if the DTensor describes its part, because DCP may then take a tensor that is not the local one.
    """
    if type(value) is not DTensor or not PART_NAMES.isdisjoint(value.__dict__):
        return None
    local = value._local_tensor
    return local if is_whole(local) and not value.requires_grad else None


def plain_tensor_at(index: MetadataIndex, state_dict: Mapping[str, Any]) -> torch.Tensor | None:
    """Returns the tensor that an index refers to: a plain tensor of a state dict, or the local tensor of a DTensor.

    Returns None for everything else, which torch's planners look up more slowly.
    """
    value = state_dict.get(index.fqn)
    if is_whole(value):
        return None if any(index.offset or ()) else value
    return plain_local(value)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def layout_of(value: object) -> tuple[Any, ...] | None:
    """Returns a value that is equal only for DTensors of which this rank has the same part.

    Compare two values only while both DTensors' meshes exist, because the values contain the ids of the meshes. Returns
    None for a DTensor that describes its part, and for values that are not DTensors.
    """
    if type(value) is not DTensor or describes_part(value):
        return None
    return value.shape, id(value.device_mesh), value.placements


def local_elements(target: Any, within: torch.Size) -> int:
    """Returns the number of a tensor's elements on this rank that lie within ``within``, a size of the whole tensor.

    Of a ShardedTensor, counts all elements on this rank. Returns 0 for a value that is not a tensor.
    """
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
    """Returns the types of devices whose memory a group's collectives use directly.

    gloo claims to support GPUs, but copies their tensors to the host and back.
    """
    kinds = group._device_types
    return {kind.type for kind in kinds if kind.type == "cpu" or group._get_backend(kind).name() != "gloo"}


def group_of_save() -> ProcessGroup | None:
    """Returns the process group of the save in this thread, or None if unknown.

    DCP does not pass its group to hooks of a storage or a stager. So the group is read from the stack: the argument
    ``process_group`` of ``dcp.save`` or ``dcp.async_save``.
    """
    frame = _frame_of_save()
    if frame is None or "process_group" not in frame.f_code.co_varnames:
        return None
    group: ProcessGroup | None = frame.f_locals["process_group"] or torch.distributed.group.WORLD
    return group


def state_of_save() -> Any:
    """Returns the state dict of the save in this thread, as DCP has it, or None if unknown.

    DCP passes it to planners, but not to hooks of a storage.
    """
    frame = _frame_of_save()
    return None if frame is None else frame.f_locals.get("state_dict")


def path_of_save() -> Any:
    """Returns the ``checkpoint_id`` of the save in this thread, or None if it has none or the save is unknown.

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
    """Returns the store with which the ranks of a group have found each other. The store prefixes its keys."""
    return _get_process_group_store(group)


def new_gloo_group(like: ProcessGroup, timeout: timedelta) -> ProcessGroup:
    """Makes a gloo group of the ranks of ``like``. Exactly these ranks must call this function, all equally often.

    ``new_group(use_local_synchronization=True)`` would name the group after the number of groups in the process. After
    a group was destroyed, a new group may get the same name, and then find the old group's addresses in the store. So
    the name contains a counter from the store of ``like``.
    """
    ranks, store = torch.distributed.get_process_group_ranks(like), group_store(like)
    name = f"{like.group_name}/dcp_tensorizer/{store.add(f'dcp_tensorizer/groups/{like.rank()}', 1)}"
    made, _ = _new_process_group_helper(len(ranks), like.rank(), ranks, "gloo", store, name, timeout=timeout)  # type: ignore[arg-type]
    _world.pg_group_ranks[made] = {rank: number for number, rank in enumerate(ranks)}
    return made  # type: ignore[no-any-return]


def store_host(group: ProcessGroup) -> str | None:
    """Returns the host of a group's store, or None if the store has no server."""
    store = group_store(group)
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return getattr(store, "host", None)


def group_timeout(group: ProcessGroup) -> timedelta:
    kinds = {kind.type: kind for kind in group._device_types}
    for name in sorted(kinds, key=lambda name: name != "cpu"):
        options = getattr(group._get_backend(kinds[name]), "options", None)
        if options is not None and hasattr(options, "_timeout"):
            return options._timeout  # type: ignore[no-any-return]
    return group_store(group).timeout  # type: ignore[attr-defined, no-any-return] # `init_process_group` was given it


def set_group_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    _set_pg_timeout(timeout, group)


def release_ipc_counter(arguments: tuple[Any, ...]) -> None:
    """Releases a reference to shared GPU memory, for the arguments that ``reduce_tensor`` made."""
    _, _, _, _, storage_class, _, device, _, _, _, _, counter, offset, _, _ = arguments
    storage_class._release_ipc_counter(counter, offset, device=device)


def checkpoint_offset(tensor: torch.Tensor) -> int:
    """Returns the offset at which ``torch.load`` found a fake tensor's bytes in its file."""
    return getattr(tensor.untyped_storage(), "_checkpoint_offset", None) or 0
