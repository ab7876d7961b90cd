"""From a staged state dict to what a keeper keeps of it: the plan of this rank, and where in memory each item is."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from .._memory.garbage import collector_paused
from .._memory.shared_buffer import SharedBuffer
from .._memory.tensor_bytes import host_bytes
from .._saving.write_items import resolve
from ..planner import SavePlanner
from .messages import Extent, Keep, KeptHead

__all__ = ["KeptItem", "described", "kept_items"]


class KeptItem(NamedTuple):
    """An item of a kept state.

    Attributes:
        plan: What a planner makes of it.
        name, kind, dtype: As in a `StoredItem`.
        extent: The number of its bytes among the extents; None if it has none.
    """

    plan: WriteItem
    name: str
    kind: str
    dtype: str
    extent: int | None


@collector_paused()
def described(head: KeptHead, state_dict: Mapping[str, Any], buffer: SharedBuffer) -> Keep:
    """What a keeper is told of a staged state dict. It is planned as for a save, by this rank alone.

    Args:
        head: What it is.
        state_dict: The staged copy.
        buffer: What it is in.

    Raises:
        CheckpointError: an item cannot be saved; names its key.
    """
    planner = SavePlanner(enable_plan_caching=False)
    planner.set_up_planner(dict(state_dict))
    plan = SavePlan(list(planner.create_local_plan().items))
    items, extents, inline = [], list[Extent](), bytearray()
    for planned, item in zip(plan.items, resolve(plan, planner), strict=True):
        number = None
        if item.has_bytes:
            number, offset = len(extents), buffer.locate(item.tensor)
            extents.append(Extent(offset is None, len(inline) if offset is None else offset, item.tensor.nbytes))
            if offset is None:
                inline += host_bytes(item.tensor)
        items.append(KeptItem(planned, item.name, item.kind, item.dtype, number))
    description = pickle.dumps(items, protocol=pickle.HIGHEST_PROTOCOL)
    return Keep(head, buffer.nbytes, tuple(extents), description, bytes(inline))


def kept_items(state: Keep) -> Sequence[KeptItem]:
    """The items of a kept state. It was kept by a process of this user, or else nobody would have connected to it."""
    items: list[KeptItem] = pickle.loads(state.description)
    return items
