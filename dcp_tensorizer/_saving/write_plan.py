"""The items of a save: DCP's plan as tensors and objects, their files, and the results for DCP."""

from __future__ import annotations

import copy
import functools
import io
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from .._index.locations import InlineItem, RankLocations, checked_hash
from .._index.schema import ItemKey, item_key
from .._runtime.interpreter import collector_paused
from .._runtime.ranks import world_size_of_job
from .._runtime.torch_compat import awaited
from .._staging.shared_mappings import MappedFile
from .._staging.shared_memory import SharedBuffer
from .._storage.base import UNLIMITED
from .._tensor_file.digests import digests_of
from .._tensor_file.dtypes import check_supported, detached, dtype_name, host_bytes, is_ordinary, is_wrapper
from .._tensor_file.encryption import Cipher
from .._tensor_file.layout import reads_empty
from .._tensor_file.names import (
    INDEX_CAPACITY,
    INLINE_BYTES,
    MAX_INLINE_BYTES,
    StoredItem,
    data_file_name,
    index_entry_size,
)
from .._trust.objects import unsafe_globals
from .._writer_process.protocol import FileRequest, TensorSource, WriteDone
from ..errors import CheckpointError, UntrustedObject, WriteError, describe

logger = logging.getLogger("dcp_tensorizer")

# Limits of the search for unsafe types in an object. A longer search would hold the GIL for more than 0.1 s while
# training runs.
_MAX_BYTES = 4 << 20
_MAX_OPCODES = 25_000

_MANY_ITEMS = 2000  # of a rank: for these, torch's planner takes 0.1 s longer than `SavePlanner`


@dataclass(slots=True, eq=False)  # not frozen: frozen items take three times as long to make
class Item:
    """One write item of a plan.

    Attributes:
        key: The item's key, and the offset of its chunk.
        name: The item's name in a tensorizer file.
        kind: See `StoredItem.kind`.
        tensor: The elements of a tensor, or the bytes that ``torch.save`` made of another value.
        is_whole: The item is not one of several chunks.
    """

    key: ItemKey
    name: str
    kind: str
    tensor: torch.Tensor
    is_whole: bool = False

    @property
    def fqn(self) -> Any:
        return self.key[0]

    @property
    def dtype(self) -> str:
        return dtype_name(self.tensor.dtype)

    @property
    def has_bytes(self) -> bool:
        """Returns whether the item has bytes. A load takes items without bytes from the index alone."""
        return self.tensor.numel() > 0

    def source(self, memory: int | MappedFile | None = None, offset: int = 0) -> TensorSource:
        tensor = self.tensor
        return TensorSource(self.name, self.dtype, tuple(tensor.shape), tensor.nbytes, self.kind, memory, offset)


@collector_paused()
def resolve(
    plan: SavePlan,
    planner: SavePlanner,
    staged: SharedBuffer | None = None,
    omitted: Set[str] = frozenset(),
) -> list[Item]:
    """Returns the items of a plan, in its order; raises `CheckpointError`, naming the key, if one cannot be saved.

    All items are written at once. A custom planner may make each tensor in the memory of the previous tensor, so its
    tensors are copied, unless they are in the buffer of the staged state. ``omitted`` are keys that were not staged,
    because other ranks were to write them.
    """
    makes_items = not _is_as_known(planner, ("resolve_data", "lookup_object", "transform_object"))
    resolve_plan = None if makes_items else getattr(_known(planner), "resolve_plan", None)
    # Read once, because some plans make their items on each access.
    wanted = list(plan.items if resolve_plan is None else resolve_plan(planner, plan))
    fqns = [item[0][0] if type(item) is tuple else item.index.fqn for item in wanted]
    if unstaged := next((fqn for fqn in fqns if fqn in omitted), None):
        raise WriteError(
            f"{unstaged!r} is to be written by this rank, which has not staged it: in the previous save, another rank "
            f"wrote it. This save fails, and the next one stages everything."
        )
    if len(wanted) >= _MANY_ITEMS and type(planner) is DefaultSavePlanner:
        _recommend_planner()

    def is_stable(tensor: torch.Tensor) -> bool:
        return not makes_items or (staged is not None and staged.locate(tensor) is not None)

    items = []
    for item, name in zip(wanted, stored_names(fqns), strict=True):
        if type(item) is tuple:
            key, tensor, is_whole = item
            items.append(Item(key, name, "tensor", detached(tensor), is_whole))
        else:
            data = item.tensor_data
            is_whole = data is None or (data.chunk is not None and data.chunk.sizes == data.size)
            items.append(Item(item_key(item.index), name, *_resolve(item, planner, is_stable), is_whole))
    return items


@functools.cache
def _recommend_planner() -> None:
    logger.info(
        "this rank saves thousands of items with torch's planner, which holds the GIL for 55 to 88 us per item while "
        "training runs; dcp_tensorizer.SavePlanner holds it for 13 to 15 us. Make one, and pass it as planner= to all "
        "saves."
    )


def in_files(items: Sequence[Item], *, is_encrypted: bool) -> list[Item]:
    """Returns the items to write to a rank's data files: those with bytes, and tensors without elements.

    Other readers of tensorizer files look up tensors without elements in the files. As with tensorizer, encrypted files
    omit these tensors. Unencrypted files omit only those whose dtype would make the file unreadable. If no item
    has bytes, no file is made.
    """
    written = [item for item in items if item.has_bytes]
    if is_encrypted or not written or len(written) == len(items):
        return written
    return [item for item in items if item.has_bytes or (item.kind == "tensor" and reads_empty(item.dtype))]


def plan_with(plan: SavePlan, storage_data: object) -> SavePlan:
    """Returns a copy of a plan with a message to or from the coordinator."""
    plan = copy.copy(plan)  # `dataclasses.replace` would decode items that are decoded on demand
    object.__setattr__(plan, "storage_data", storage_data)
    return plan


@collector_paused()
def write_results(
    items: Sequence[Item],
    done: WriteDone,
    rank: int,
    planner: SavePlanner | None = None,
    cipher: Cipher | None = None,
    compare: Callable[[Mapping[ItemKey, StoredItem]], tuple[str, ...] | None] | None = None,
) -> list[WriteResult]:
    """Returns the results that DCP sends to the coordinator: one, with a `RankLocations`, for any number of items.

    ``compare`` compares the items with the previous save (`Freshness.compare`). Raises `WriteError`, naming the key, if
    a key cannot be stored.
    """
    written = done.items()
    stored: dict[ItemKey, StoredItem] = {}
    for item in items:
        found = written.get(item.name) if item.has_bytes else None
        stored[item.key] = found or StoredItem.empty(item.dtype, item.kind)
    # A planner that plans in its own way may omit items of the plan from its metadata.
    plans_as_torch = planner is None or _is_as_known(
        planner, ("create_local_plan", "create_global_plan", "finish_plan")
    )
    part = RankLocations.of(
        rank,
        stored,
        {file.name: file.nbytes for file in done.files},
        named=() if plans_as_torch else stored,
        inline=_inline(items, cipher),
        check=b"" if cipher is None else cipher.check_value(),
    )
    if compare is not None:
        part = part._replace(unchanged=compare(stored))
    return [WriteResult(MetadataIndex(f"rank {rank}"), sum(file.nbytes for file in done.files), part)]


def _is_as_known(planner: SavePlanner, methods: Iterable[str]) -> bool:
    """Returns whether a planner's ``methods`` are those of torch's planner, or of this package's."""
    known, own = _known(planner), getattr(planner, "__dict__", {})
    return all(getattr(type(planner), name, None) is getattr(known, name) and name not in own for name in methods)


def _known(planner: SavePlanner) -> type[SavePlanner]:
    """Returns the class whose methods behave as this module expects: torch's planner, or this package's."""
    return getattr(planner, "plans_as_torch", DefaultSavePlanner)  # set by `planner.SavePlanner`


def _inline(items: Sequence[Item], cipher: Cipher | None) -> list[InlineItem]:
    """Returns the small, whole items to store in the index, as many as fit into the rank's share of it."""
    free = max(INLINE_BYTES, MAX_INLINE_BYTES // world_size_of_job())
    small: list[InlineItem] = []
    for item in items:
        nbytes = item.tensor.nbytes
        if item.is_whole and item.kind != "wrapper" and 0 < nbytes <= INLINE_BYTES:
            free -= nbytes
            if free < 0:
                break
            key, offset = item.key
            content, seal = bytes(host_bytes(item.tensor)), b""
            if cipher is not None:
                nonce, encrypted = cipher.new_nonce(), memoryview(bytearray(len(content)))
                seal = nonce + cipher.encrypt(memoryview(content), encrypted, nonce, 0)
                content = bytes(encrypted)
            name = "" if item.name == key else item.name
            stored = StoredItem("", name, 0, len(content), item.dtype, item.kind, digests_of(content), seal)
            small.append(InlineItem(checked_hash(key, offset), stored, content))
    return small


def warn_about_untrusted(items: Sequence[Item], known: set[str]) -> None:
    """Warns about objects that a reader will refuse, at their first save instead of at the load.

    ``known`` has the keys whose objects have been checked. The keys of newly checked objects are added.
    """
    for item in items:
        key = item.fqn
        if item.kind != "object" or key in known or item.tensor.nbytes > _MAX_BYTES:
            continue
        known.add(key)
        try:
            refused = unsafe_globals(bytes(host_bytes(item.tensor)), _MAX_OPCODES)
        except UntrustedObject as error:
            logger.warning("%r will be loaded only with allow_pickle=True: %s", key, error)
            continue
        if refused:
            logger.warning(
                "%r will be loaded only after torch.serialization.add_safe_globals([%s]), or with "
                "allow_pickle=True: loading such a type could run code",
                key,
                ", ".join(refused),
            )


def _resolve(
    item: WriteItem, planner: SavePlanner, is_stable: Callable[[torch.Tensor], bool]
) -> tuple[str, torch.Tensor]:
    """Returns an item's kind, and its tensor or bytes. Copies a tensor whose memory the planner may reuse."""
    key = item.index.fqn
    try:
        data = planner.resolve_data(item)
        if is_ordinary(data) and item.type is not WriteItemType.BYTE_IO:  # fast path for nearly all items
            _check_shape(item, data)
            return "tensor", detached(data) if is_stable(data) else _copy(data)
        expected = io.BytesIO if item.type == WriteItemType.BYTE_IO else torch.Tensor
        if not isinstance(data, expected):
            raise WriteError(
                f"{key!r} cannot be saved: the planner's resolve_data must return an instance of {expected.__name__}, "
                f"and returned {data!r:.80}"
            )
        if isinstance(data, io.BytesIO):
            blob = _blob(data)
            return "object", blob if is_stable(blob) else _copy(blob)
        data = awaited(data)
        if is_wrapper(data):
            pickled = io.BytesIO()
            torch.save(data, pickled)
            return "wrapper", _blob(pickled)
        check_supported(key, data)
        _check_shape(item, data)
        return "tensor", detached(data) if is_stable(data) else _copy(data)
    except CheckpointError:
        raise
    except Exception as error:
        raise WriteError(f"{key!r} cannot be saved: {describe(error)}") from error


def _check_shape(item: WriteItem, tensor: torch.Tensor) -> None:
    """Raises `WriteError` if a tensor does not have the planned shape, which loads rely on."""
    planned = None if item.tensor_data is None or item.tensor_data.chunk is None else item.tensor_data.chunk.sizes
    if planned is not None and planned != tensor.shape:
        raise WriteError(
            f"{item.index.fqn!r}: the planner has planned a part of shape {tuple(planned)}, and its resolve_data "
            f"returned one of shape {tuple(tensor.shape)}. Return the planned part."
        )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _blob(data: object) -> torch.Tensor:
    assert isinstance(data, io.BytesIO)
    content = data.getbuffer()
    return (
        torch.frombuffer(content, dtype=torch.uint8)
        if content.nbytes
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


# --- the files of a rank, and the names in them -----------------------------------------------------------------------

_MAX_NAME = 1024  # longer ones would fill a file's index with a few entries
_JSON_PATH = "\x1e"  # tensorizer reads a name that begins with it as a JSON path


def stored_names(keys: Sequence[Any]) -> list[str]:
    """Returns a unique name in tensorizer files for each key: where possible, the key itself."""
    used: set[str] = set()
    names = []
    for number, key in enumerate(keys):
        try:
            is_storable = isinstance(key, str) and 0 < len(key.encode()) <= _MAX_NAME and not key.startswith(_JSON_PATH)
        except UnicodeEncodeError:
            is_storable = False
        name = key if is_storable and key not in used else f"__item_{number}__"
        while name in used:
            name += "_"
        used.add(name)
        names.append(name)
    return names


def plan_files(
    sources: Iterable[TensorSource],
    rank: int,
    save_id: str,
    max_file_bytes: int = UNLIMITED,
    index_capacity: int = INDEX_CAPACITY,
    first: int = 0,
) -> tuple[FileRequest, ...]:
    """Distributes tensors over files, which are numbered from ``first``.

    Another file begins when the index of a tensorizer file is full, or when a tensor would make the file larger than
    ``max_file_bytes``. A tensor larger than ``max_file_bytes`` gets a separate file.
    """
    files: list[list[TensorSource]] = []
    free = nbytes = 0
    for source in sources:
        entry = index_entry_size(source.name, len(source.shape))
        if entry > free or nbytes + source.nbytes > max_file_bytes:
            files.append([])
            free, nbytes = index_capacity, 0
        files[-1].append(source)
        free -= entry
        nbytes += source.nbytes
    return tuple(FileRequest(data_file_name(rank, n, save_id), tuple(file)) for n, file in enumerate(files, first))
