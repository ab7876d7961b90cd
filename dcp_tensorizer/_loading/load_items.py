"""Brings a load plan's items to where its planner wants them: first objects, when they are trusted; then tensors."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from contextlib import nullcontext

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from .._format.encryption import Cipher
from .._format.index_reader import Index
from .._memory.device import CUDA
from .._memory.garbage import collector_paused
from .._storage.base import Storage
from .._torch_compat import real_tensors
from ..errors import listed
from .exchange import Exchange
from .executor import fetch, limits_of
from .located import Located
from .objects import check_trust, deliver_object, read_objects
from .pinned_pool import PinnedPools
from .read_target import Casts, is_object, targets_of
from .tensors import delivers_at_once, read_tensors
from .validate import check_own_parts

__all__ = ["LoadOptions", "LoadSource", "load_items", "world_size"]

logger = logging.getLogger("dcp_tensorizer")


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """How everything is read, see `TensorizerStorageReader`."""

    verify: bool
    allow_pickle: bool
    threads: int | None
    page_cache: bool | None


@dataclasses.dataclass(frozen=True)
class LoadSource:
    """What is loaded from.

    Attributes:
        storage: The checkpoint's directory.
        index: The checkpoint's.
        located: Where the items of the plan are.
        metadata: What DCP was shown of it.
        cipher: For items that are encrypted.
        is_own: Each rank saved for itself.
        group: The ranks that exchange what they read; None for none.
    """

    storage: Storage
    index: Index
    located: Located
    metadata: Metadata
    cipher: Cipher | None
    is_own: bool
    group: dist.ProcessGroup | None


def world_size() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def load_items(
    source: LoadSource,
    plan: LoadPlan,
    planner: LoadPlanner,
    options: LoadOptions,
    progress: Callable[[int, int], object],
) -> tuple[int, int]:
    """Loads what a plan asks for.

    Args:
        source: What is loaded from.
        plan: The items.
        planner: Says where they go.
        options: How they are read.
        progress: Called with the bytes of tensors that are done, and the bytes in all.

    Returns:
        How many bytes were read, and how many came from other ranks.

    Raises:
        CheckpointError: see `TensorizerStorageReader.read_data`.
    """
    with PinnedPools(CUDA) as pools:
        read = functools.partial(
            fetch,
            source.storage,
            threads=options.threads,
            verify=options.verify,
            cipher=source.cipher,
            page_cache=options.page_cache,
            in_memory=source.index.in_memory,
            pools=pools,
        )
        exchange = None
        if source.group is not None:
            limits = limits_of(source.storage)
            reason = "" if delivers_at_once(planner) else f"a {type(planner).__name__} gets one tensor after the other"
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
    path, pieces_of = source.storage.path, source.located.pieces
    if source.is_own:
        check_own_parts(path, source.metadata, plan, getattr(planner, "state_dict", {}))
    with collector_paused():
        stored = [(item, pieces_of(item)) for item in plan.items]
        objects = [(item, pieces[0].item) for item, pieces in stored if is_object(pieces)]
        tensors = [(item, pieces) for item, pieces in stored if not is_object(pieces)]
    with real_tensors():
        contents, nbytes = read_objects(objects, read if exchange is None else exchange.read)
    if not options.allow_pickle:
        check_trust(path, contents)
    casts: Casts = {}
    nbytes += read_tensors(
        tensors,
        planner,
        functools.partial(targets_of, path, source.metadata, world_size=world_size(), casts=casts),
        exchange.read if exchange is not None and exchange.exchanges_tensors else read,
        progress,
    )
    for (stored_dtype, dtype), keys in casts.items():
        logger.warning(
            "%s: %s stored as %s and converted to the %s of the target: %s",
            *(
                path,
                "1 tensor is" if len(keys) == 1 else f"{len(keys):,} tensors are",
                stored_dtype,
                dtype,
                listed(keys),
            ),
        )
    for read_item, content in contents:
        deliver_object(path, planner, read_item, content)
    return nbytes
