"""Delivers a load plan's items to the planner's targets: first objects, once they are trusted; then tensors."""

from __future__ import annotations

import dataclasses
import functools
import io
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from .._index.layouts import Region
from .._index.read import Index, Piece
from .._runtime.gc_pause import collector_paused
from .._runtime.ranks import world_size_of_job
from .._runtime.spans import Span
from .._runtime.torch_compat import plain_tensor_at, real_tensors
from .._runtime.validation import check_flags
from .._storage.base import Storage
from .._tensor_file.dtypes import detached, is_wrapper, named_dtype
from .._tensor_file.encryption import Cipher
from .._tensor_file.names import StoredItem
from .._trust.objects import advice, unsafe_globals
from ..errors import CheckpointError, ReadError, UntrustedObject, describe
from .exchange import Exchange
from .run import fetch, limits_of
from .targets import Casts, Located, ReadTarget, is_object, targets_of, warn_of_casts
from .validate import check_own_parts

logger = logging.getLogger("dcp_tensorizer")


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """Options of a load; see `TensorizerStorageReader`. Raises `TypeError`."""

    verify: bool
    allow_pickle: bool
    threads: int | None
    page_cache: bool | None

    def __post_init__(self) -> None:
        check_flags(self)


@dataclasses.dataclass(frozen=True)
class LoadSource:
    """The source of a load."""

    storage: Storage
    index: Index
    located: Located  # the items of the plan
    metadata: Metadata  # as DCP has seen it
    cipher: Cipher | None  # for encrypted items
    is_own: bool  # each rank saved for itself
    group: dist.ProcessGroup | None  # the ranks that exchange what they read


def load_items(
    source: LoadSource,
    plan: LoadPlan,
    planner: LoadPlanner,
    options: LoadOptions,
    progress: Callable[[int, int], object],
    note: Callable[[Span], object],
) -> tuple[int, int]:
    """Loads the items of a plan; returns how many bytes were read, and how many came from other ranks.

    ``progress`` gets the bytes of tensors done, and the bytes in all; ``note`` gets the time of each read. Raises
    `CheckpointError`; see `TensorizerStorageReader.read_data`.
    """
    read = functools.partial(
        fetch,
        source.storage,
        threads=options.threads,
        verify=options.verify,
        cipher=source.cipher,
        page_cache=options.page_cache,
        in_memory=source.index.in_memory,
        note=note,
    )
    exchange = None
    if source.group is not None:
        limits = limits_of(source.storage)
        reason = (
            ""
            if delivers_at_once(planner)
            else f"a planner of type {type(planner).__name__} gets one tensor after the other"
        )
        inline = source.index.in_memory
        exchange = Exchange(
            source.group, source.storage.path, read, limits, verify=options.verify, in_memory=inline, reason=reason
        )
    with exchange or nullcontext():
        nbytes = _load(source, plan, planner, options, read, exchange, progress)
    return nbytes, 0 if exchange is None else exchange.received_bytes


def _load(
    source: LoadSource,
    plan: LoadPlan,
    planner: LoadPlanner,
    options: LoadOptions,
    read: Callable[..., int],
    exchange: Exchange | None,
    progress: Callable[[int, int], object],
) -> int:
    path = source.storage.path
    if source.is_own:
        check_own_parts(path, source.metadata, plan, getattr(planner, "state_dict", {}))
    with collector_paused():
        objects, tensors = [], []
        for item, pieces in zip(plan.items, source.located.pieces(plan.items), strict=True):
            if is_object(pieces):
                objects.append((item, pieces[0].item))
            else:
                tensors.append((item, pieces))
    with real_tensors():
        contents, nbytes = read_objects(objects, read if exchange is None else exchange.read)
    if not options.allow_pickle:
        check_trust(path, contents)
    casts: Casts = {}
    nbytes += read_tensors(
        tensors,
        planner,
        functools.partial(targets_of, path, source.metadata, world_size_of_job(), casts),
        exchange.read if exchange is not None and exchange.exchanges_tensors else read,
        progress,
    )
    warn_of_casts(path, casts)
    for read_item, content in contents:
        deliver_object(path, planner, read_item, content)
    return nbytes


# --- objects: reading, checking and delivering them -------------------------------------------------------------------


def read_objects(
    items: Sequence[tuple[ReadItem, StoredItem]], fetch: Callable[[Sequence[ReadTarget]], int]
) -> tuple[list[tuple[ReadItem, bytes]], int]:
    """Reads the bytes of objects without unpickling them; returns each item with its bytes, and how many bytes were
    read.
    """
    objects = [(read_item, _target(read_item, item)) for read_item, item in items]
    nbytes = fetch([target for _, target in objects if target.item.length])
    return [(read_item, bytes(target.tensor.numpy().data)) for read_item, target in objects], nbytes


def _target(read_item: ReadItem, item: StoredItem) -> ReadTarget:
    tensor = torch.empty(item.length, dtype=torch.uint8, device="cpu")
    shape = (item.length,)
    return ReadTarget.of(read_item.dest_index.fqn, item._replace(dtype="uint8"), shape, Region((0,), shape), tensor)


def check_trust(path: str, objects: Sequence[tuple[ReadItem, bytes]]) -> None:
    """Checks that no object needs a type that could run code, before any of them is loaded.

    Raises `UntrustedObject`, which names keys, all types, and what to do.
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
            f"{keys[0]!r}{more} in {path} could run code when loaded: what was saved needs {', '.join(names)}. "
            f"{advice(names)}"
        )


def deliver_object(path: str, planner: LoadPlanner, read_item: ReadItem, content: bytes) -> None:
    """Passes a trusted object to the planner. A tensor that was stored as an object is copied to its target.

    Raises `ReadError`, naming the key, if it cannot be loaded, for example because Python or NumPy lacks a type.
    """
    try:
        _deliver(planner, read_item, content)
    except CheckpointError:
        raise
    except Exception as error:
        raise ReadError(f"{read_item.dest_index.fqn!r} in {path} cannot be loaded: {describe(error)}") from error


def _deliver(planner: LoadPlanner, read_item: ReadItem, content: bytes) -> None:
    if read_item.type == LoadItemType.BYTE_IO:
        planner.load_bytes(read_item, io.BytesIO(content))
        return
    copy_to_target(planner, read_item, torch.load(io.BytesIO(content), map_location="cpu", weights_only=False))


def copy_to_target(planner: LoadPlanner, read_item: ReadItem, tensor: torch.Tensor) -> None:
    """Copies the part of a stored tensor that an item describes to the planner's target."""
    for dim, (start, length) in enumerate(zip(read_item.storage_offsets, read_item.lengths, strict=True)):
        if length < tensor.size(dim):  # only if needed: not every class can be narrowed
            tensor = tensor.narrow(dim, start, length)
    target = planner.resolve_tensor(read_item).detach()
    if target.shape != tensor.shape:  # `copy_` might broadcast it
        raise ValueError(f"it is of shape {tuple(tensor.shape)}, and its target of {tuple(target.shape)}")
    target.copy_(tensor)
    planner.commit_tensor(read_item, target)


# --- tensors: the planner resolves them, they are read, and the planner commits them ----------------------------------

_Items = Sequence[tuple[ReadItem, Sequence[Piece]]]
_DELIVERY = ("resolve_tensor", "lookup_tensor", "transform_tensor", "commit_tensor")


def read_tensors(
    items: _Items,
    planner: LoadPlanner,
    targets_of: Callable[[ReadItem, Sequence[Piece], torch.Tensor], list[ReadTarget]],
    read: Callable[..., int],
    progress: Callable[[int, int], object],
) -> int:
    """Reads tensors to the planner's targets; returns how many bytes were read.

    All are read at once if the planner is one of torch's own or this package's. Other planners may return one scratch
    buffer for each tensor, and empty it when it is committed: they get one tensor after the other, as from torch's own
    reader. ``targets_of`` checks that an item fits a tensor, and returns what to read; ``read`` is `executor.fetch` or
    alike.
    """
    total = sum(_wanted_bytes(piece) for _, pieces in items for piece in pieces)  # whole blocks of them are read
    done = 0
    if total:
        progress(0, total)
    for batch in _batches(items, planner):
        resolved_items, targets = [], []
        with collector_paused():
            for (read_item, pieces), tensor in zip(batch, resolved(batch, planner), strict=True):
                place = _place_for(tensor, pieces)
                targets += targets_of(read_item, pieces, place)
                resolved_items.append((read_item, tensor, place))
        tell = progress if len(batch) == len(items) else _within(progress, done, total)
        done += read(targets, progress=tell)
        for read_item, tensor, place in resolved_items:
            if place is not tensor:
                tensor.copy_(place)
            planner.commit_tensor(read_item, tensor)
    return done


def resolved(items: _Items, planner: LoadPlanner) -> Iterator[torch.Tensor]:
    """The tensors that receive items, in the order of the items.

    torch's planner takes several times as long to find a tensor that an item fills. So it is asked only for others.
    """
    state = getattr(planner, "state_dict", {}) if delivers_at_once(planner) else {}
    for read_item, _ in items:
        whole = plain_tensor_at(read_item.dest_index, state)
        if whole is None or whole.shape != read_item.lengths:
            whole = planner.resolve_tensor(read_item)
        yield detached(whole)


def _place_for(tensor: torch.Tensor, pieces: Sequence[Piece]) -> torch.Tensor:
    """The tensor to read elements into: the target itself, unless it wraps other tensors.

    A wrapper may hold other elements inside, such as scaled ones. Only its class can copy plain elements into it, and
    does so at once.
    """
    if type(tensor) is torch.Tensor or not pieces or not is_wrapper(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=named_dtype(pieces[0].item.dtype), device="cpu")


def delivers_at_once(planner: LoadPlanner) -> bool:
    """Returns whether a planner gets all tensors at once: one that finds its tensors as torch's own does."""
    return all(getattr(type(planner), name, None) is getattr(DefaultLoadPlanner, name) for name in _DELIVERY)


def _batches(items: _Items, planner: LoadPlanner) -> Iterator[_Items]:
    """Batches of items: all of a batch are resolved before any is committed."""
    if delivers_at_once(planner):
        yield items
    else:
        yield from ([item] for item in items)


def _wanted_bytes(piece: Piece) -> int:
    item, shape, region, _ = piece
    if region.size == shape:
        return item.length
    return item.length * math.prod(region.size) // math.prod(shape)


def _within(progress: Callable[[int, int], object], before: int, total: int) -> Callable[[int, int], object]:
    """The progress of a read that is part of a longer one."""
    return lambda done, _: progress(before + done, max(total, before + done))
