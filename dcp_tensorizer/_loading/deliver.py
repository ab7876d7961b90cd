"""Delivers the items of a load plan to the planner's targets.

Reads the objects and checks their types, reads and delivers the tensors, and then delivers the objects.
"""

from __future__ import annotations

import functools
import io
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from .._formats.catalog import Catalog, Coder, Piece, copy_part
from .._runtime.interpreter import collector_paused
from .._runtime.ranks import world_size_of_job
from .._runtime.spans import Span
from .._runtime.torch_compat import is_fake, local_elements, plain_tensor_at, real_tensors
from .._runtime.validation import check_flags
from .._storage.base import Storage
from .._tensor_file.dtypes import detached, is_wrapper, named_dtype
from .._tensor_file.encryption import Cipher
from .._tensor_file.names import StoredItem
from .._trust.objects import advice, loading_object, unsafe_globals
from ..errors import MetadataError, UntrustedObject, listed
from .exchange import Exchange, ReadFrom
from .plan import Casts, ReadTarget, targets_of, warn_of_casts
from .run import fetch, limits_of

logger = logging.getLogger("dcp_tensorizer")


@dataclass(frozen=True)
class LoadOptions:
    """Options of a load; see `TensorizerStorageReader`. Raises `TypeError` if a flag is not a bool."""

    verify: bool
    allow_pickle: bool
    threads: int | None
    page_cache: bool | None

    def __post_init__(self) -> None:
        check_flags(self)


@dataclass
class Load:
    """The load of one rank, once the rank has a plan.

    The constructor raises `MetadataError` if an item of the plan is not stored or the metadata is damaged, and
    `ReadError` if the metadata cannot be read, or if a data file is found to be missing or too short.
    """

    storage: Storage
    catalog: Catalog
    options: LoadOptions
    metadata: Metadata  # as DCP has seen it
    items: Sequence[ReadItem]
    cipher: Cipher | None
    is_own: bool  # each rank saved by itself, or loads a state in memory by itself
    note: Callable[[Span], object]  # called with the time span of each read, by several threads

    def __post_init__(self) -> None:
        self.items = list(self.items)  # the planner may change its list
        self.pieces = self.catalog.locate(self.items)

    @property
    def files(self) -> set[str]:
        return {piece.item.file for pieces in self.pieces for piece in pieces}

    def run(
        self,
        plan: LoadPlan,
        planner: LoadPlanner,
        group: dist.ProcessGroup | None,
        progress: Callable[[int, int], object],
    ) -> tuple[int, int]:
        """Loads the items of the final plan. Returns the numbers of bytes read and of bytes received from other ranks.

        The ranks of ``group`` exchange what all of them need. Calls ``progress`` with the bytes of tensors done and
        their total. Raises `CheckpointError`; see `TensorizerStorageReader.read_data`.
        """
        path, catalog = self.storage.path, self.catalog
        in_memory, verify = catalog.in_memory, self.options.verify and catalog.has_digests
        read = functools.partial(
            fetch,
            self.storage,
            threads=self.options.threads,
            verify=verify,
            cipher=self.cipher,
            page_cache=self.options.page_cache,
            in_memory=in_memory,
            note=self.note,
        )
        exchange = None
        if group is not None:
            one_by_one = f"planner {type(planner).__name__} resolves tensors one at a time"
            reason = "" if delivers_at_once(planner) else one_by_one
            limits = limits_of(self.storage)
            exchange = Exchange(group, path, read, limits, verify=verify, in_memory=in_memory, reason=reason)
        with exchange or nullcontext():
            if self.is_own:
                check_own_parts(path, self.metadata, plan, getattr(planner, "state_dict", {}))
            pieces_of = self.pieces if plan.items == self.items else catalog.locate(plan.items)
            with collector_paused():
                objects: list[tuple[ReadItem, StoredItem]] = []
                tensors: list[_Item] = []
                coded: list[_Item] = []
                coder_of = catalog.coder
                for item, pieces in zip(plan.items, pieces_of, strict=True):
                    coder = coder_of(item)
                    if coder is None and _is_object(pieces):
                        objects.append((item, pieces[0].item))
                    else:
                        (tensors if coder is None else coded).append((item, pieces, coder))
            with real_tensors():
                contents, nbytes = read_objects(objects, read if exchange is None else exchange.read)
            contents = [(item, catalog.decoded(item, content)) for item, content in contents]
            if not self.options.allow_pickle:
                check_trust(path, contents)
            casts: Casts = {}
            nbytes += read_tensors(
                [*tensors, *coded],
                planner,
                functools.partial(targets_of, path, self.metadata, world_size_of_job(), casts),
                exchange.read if exchange is not None and exchange.exchanges_tensors else read,
                progress,
            )
            catalog.check_unreplaced()
            warn_of_casts(path, casts)
            for item, content in contents:
                deliver_object(path, planner, item, content)
        return nbytes, 0 if exchange is None else exchange.received_bytes


# --- checks of a plan, before any target changes ----------------------------------------------------------------------


def check_one_save(path: str, carried: Sequence[object]) -> None:
    """Raises `MetadataError` if the ranks' plans name different saves, or if a plan has lost its ``storage_data``."""
    if len(carried) < 2:
        return
    lost = [rank for rank, data in enumerate(carried) if not isinstance(data, ReadFrom)]
    if lost:
        raise MetadataError(
            f"{path}: the planner's create_global_plan dropped the storage_data of the plan of rank {lost[0]}. "
            f"Make new plans with dataclasses.replace."
        )
    ids = [data.save_id for data in carried if isinstance(data, ReadFrom)]
    others = [rank for rank, save_id in enumerate(ids) if save_id != ids[0]]
    if others:
        raise MetadataError(
            f"{path}: rank {others[0]} and rank 0 found different saves. The checkpoint was overwritten while its "
            f"metadata was read, or the ranks were given different paths. No target has changed. Load the same "
            f"checkpoint again on all ranks, or load another one."
        )


def check_own_parts(path: str, metadata: Metadata, plan: LoadPlan, targets: Mapping[str, Any]) -> None:
    """Checks that a checkpoint that this rank loads by itself has all elements of this rank's targets.

    The checkpoint may lack parts that other ranks saved. If a target is larger than the stored tensor, checks only the
    part that the stored tensor covers. Raises `MetadataError`, naming the key, if elements are missing.
    """
    # A planner may read a part more than once.
    parts = {(i.dest_index.fqn, i.dest_index.offset, i.dest_offsets, i.lengths) for i in plan.items}
    planned: Counter[str] = Counter()
    for key, _, _, lengths in parts:
        planned[key] += math.prod(lengths)
    for key, target in targets.items():
        entry = metadata.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            continue
        needed = local_elements(target, entry.size)
        if planned[key] != needed:
            raise MetadataError(
                f"{path} holds {planned[key]:,} of the {needed:,} elements of {key!r} that this rank loads. The "
                f"checkpoint was saved in memory or with use_collectives=False, each rank by itself, and with another "
                f"sharding or rank order. Load it with the sharding and the rank order of the save."
            )


EMPTY_DICT = (
    "the target state dict has an empty dict in place of the saved one, so nothing is loaded into it. For a new "
    "optimizer, pass the optimizer itself to CheckpointManager.restore, or use get_optimizer_state_dict of "
    "torch.distributed.checkpoint.state_dict. Other dicts must contain the keys that are to be loaded"
)


def recorded_paths(metadata: Metadata) -> Mapping[str, Sequence[str | int]]:
    """Returns the paths of keys in the nested state dict that was saved; empty if the metadata records none."""
    return metadata.planner_data if isinstance(metadata.planner_data, dict) else {}


def keys_below_empty_dicts(state: Mapping[str, Any], keys: Iterable[str], metadata: Metadata) -> list[str]:
    """Returns the keys among ``keys`` that belong to dicts which are empty in the state.

    DCP silently loads nothing into such dicts. ``keys`` are the keys that the checkpoint has and the state lacks.
    """
    empty = set(_empty_dicts(state, ()))
    if not empty:
        return []
    paths = recorded_paths(metadata)
    path_of = {key: tuple(map(str, paths.get(key) or key.split("."))) for key in keys}
    return [key for key, path in path_of.items() if any(path[:depth] in empty for depth in range(1, len(path)))]


def warn_of_empty_dicts(path: str, planner: LoadPlanner) -> None:
    if not isinstance(planner, DefaultLoadPlanner) or not planner.flatten_state_dict or planner.metadata is None:
        return
    more = planner.metadata.state_dict_metadata.keys() - planner.state_dict.keys()
    if more and (lost := sorted(keys_below_empty_dicts(planner.original_state_dict, more, planner.metadata))):
        logger.warning("%s has %s, and %s", path, listed(lost), EMPTY_DICT)


def _empty_dicts(container: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    members = container.items() if isinstance(container, Mapping) else enumerate(container)
    for name, member in members:
        if isinstance(member, Mapping) and not member:
            yield (*path, str(name))
        elif isinstance(member, (Mapping, list)):
            yield from _empty_dicts(member, (*path, str(name)))


# --- objects: reading, checking and delivering them -------------------------------------------------------------------


def read_objects(
    items: Sequence[tuple[ReadItem, StoredItem]], fetch: Callable[[Sequence[ReadTarget]], int]
) -> tuple[list[tuple[ReadItem, bytes]], int]:
    """Reads the bytes of objects without unpickling them."""
    objects = []
    for read_item, item in items:
        memory = torch.empty(item.length, dtype=torch.uint8, device="cpu")
        objects.append((read_item, ReadTarget.of_bytes(read_item.dest_index.fqn, item, 0, memory)))
    nbytes = fetch([target for _, target in objects if target.item.length])
    return [(read_item, bytes(target.tensor.numpy().data)) for read_item, target in objects], nbytes


def check_trust(path: str, objects: Sequence[tuple[ReadItem, bytes]]) -> None:
    """Checks, before any object is loaded, that none needs a type that could run code.

    Raises `UntrustedObject`, with advice. The error names the key of the first invalid object. If all objects are
    valid, it names the first key whose object needs such a type, and all such types.
    """
    checked: dict[bytes, tuple[str, ...]] = {}
    keys: list[str] = []
    for read_item, content in objects:
        key = read_item.dest_index.fqn
        try:
            if content not in checked:
                checked[content] = unsafe_globals(content)
        except UntrustedObject as error:
            raise UntrustedObject(
                f"{key!r} in {path} could run code when it is loaded: {error}. If you trust the checkpoint as you "
                f"trust a program, pass allow_pickle=True to the reader."
            ) from None
        if checked[content]:
            keys.append(key)
    if keys:
        names = sorted({name for refused in checked.values() for name in refused})
        more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        raise UntrustedObject(
            f"{keys[0]!r}{more} in {path} could run code when loaded: the saved data needs {', '.join(names)}. "
            f"{advice(names)}"
        )


def deliver_object(path: str, planner: LoadPlanner, read_item: ReadItem, content: bytes) -> None:
    """Passes a trusted object to the planner. Copies a tensor that was stored as an object to its target.

    Raises `ReadError`, naming the key, if it cannot be loaded.
    """
    with loading_object(read_item.dest_index.fqn, path):
        if read_item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(read_item, io.BytesIO(content))
            return
        target = planner.resolve_tensor(read_item).detach()
        copy_part(read_item, torch.load(io.BytesIO(content), map_location="cpu", weights_only=False), target)
        planner.commit_tensor(read_item, target)


# --- tensors: the planner resolves them, they are read, and the planner commits them ----------------------------------

_Item = tuple[ReadItem, Sequence[Piece], Coder | None]
_Items = Sequence[_Item]
_CODED_BYTES = 64 << 20  # the maximum size of a batch of items with a `Coder`, unless a single item is larger
_DELIVERY = ("resolve_tensor", "lookup_tensor", "transform_tensor", "commit_tensor")


def read_tensors(
    items: _Items,
    planner: LoadPlanner,
    targets_of: Callable[[ReadItem, Sequence[Piece], torch.Tensor], list[ReadTarget]],
    read: Callable[..., int],
    progress: Callable[[int, int], object],
) -> int:
    """Reads tensors into the planner's targets. Returns the number of bytes read.

    ``targets_of`` checks that an item fits a tensor, and returns what to read. ``read`` takes the same arguments as
    `Exchange.read`.
    """
    total = sum(_wanted_bytes(piece) for _, pieces, _ in items for piece in pieces)  # reads may exceed it
    done = 0
    if total:
        progress(0, total)
    for batch in _batches(items, planner):
        resolved_items, targets = [], []
        with collector_paused():
            for (read_item, pieces, coder), tensor in zip(batch, resolved(batch, planner), strict=True):
                coder = None if is_fake(tensor) else coder  # a fake tensor has no elements to decode into
                memory = _memory_for(tensor, pieces, coder)
                if coder is not None and _is_object(pieces):
                    key, item = read_item.dest_index.fqn, pieces[0].item
                    targets += [ReadTarget.of_bytes(key, item, 0, memory)] if item.length else []
                else:
                    targets += targets_of(read_item, pieces, memory)
                resolved_items.append((read_item, tensor, memory, coder))
        report = progress if len(batch) == len(items) else _within(progress, done, total)
        done += read(targets, progress=report)
        for read_item, tensor, memory, coder in resolved_items:
            if memory is not tensor:
                # Only in inference mode may a thread write to tensors that were made in that mode.
                with torch.inference_mode() if tensor.is_inference() else nullcontext():
                    if coder is not None:
                        coder.decode(memory, tensor)
                    else:
                        tensor.copy_(memory)
            planner.commit_tensor(read_item, tensor)
    return done


def resolved(items: _Items, planner: LoadPlanner) -> Iterator[torch.Tensor]:
    """Yields the tensors that receive items, in the order of the items.

    If the planner looks up tensors as torch's own does, this function itself looks up the plain tensors that a single
    item fills. Calling the planner for them would take several times as long.
    """
    state = getattr(planner, "state_dict", {}) if delivers_at_once(planner) else {}
    for read_item, *_ in items:
        whole = plain_tensor_at(read_item.dest_index, state)
        if whole is None or whole.shape != read_item.lengths:
            whole = planner.resolve_tensor(read_item)
        yield detached(whole)


def _is_object(pieces: Sequence[Piece]) -> bool:
    return bool(pieces) and pieces[0].item.kind != "tensor"


def _memory_for(tensor: torch.Tensor, pieces: Sequence[Piece], coder: Coder | None) -> torch.Tensor:
    """Returns the tensor to read into.

    A wrapper may hold its elements in another form, such as scaled. Only its class can copy plain elements into it, all
    of them in one call.
    """
    if coder is not None:
        return coder.memory_for(tensor)
    if type(tensor) is torch.Tensor or not pieces or not is_wrapper(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=named_dtype(pieces[0].item.dtype), device="cpu")


def delivers_at_once(planner: LoadPlanner) -> bool:
    """Returns whether tensors can be read in batches, because the planner looks them up as torch's own does."""
    return all(getattr(type(planner), name, None) is getattr(DefaultLoadPlanner, name) for name in _DELIVERY)


def _batches(items: _Items, planner: LoadPlanner) -> Iterator[_Items]:
    """Yields batches, whose items are all resolved before any is committed. Items with a coder must come last."""
    if not delivers_at_once(planner):
        yield from ([item] for item in items)
        return
    first = next((number for number, item in enumerate(items) if item[2] is not None), len(items))
    if first or not items:
        yield items[:first]
    while first < len(items):
        nbytes, end = 0, first
        while end < len(items) and (size := nbytes + sum(map(_wanted_bytes, items[end][1]))) <= _CODED_BYTES:
            nbytes, end = size, end + 1
        yield items[first : max(end, first + 1)]
        first = max(end, first + 1)


def _wanted_bytes(piece: Piece) -> int:
    item, shape, region, _ = piece
    if region.size == shape:
        return item.length
    return item.length * math.prod(region.size) // math.prod(shape)


def _within(progress: Callable[[int, int], object], before: int, total: int) -> Callable[[int, int], object]:
    return lambda done, _: progress(before + done, max(total, before + done))
