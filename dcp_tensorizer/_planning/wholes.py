"""Checks that ranks agree on tensors that are not sharded, for planners that do not check it themselves.

torch's planner keeps the tensor of one rank, and drops those of others before a storage sees the plans. So each rank
sends its whole tensors to the coordinator beside its plan. `SavePlanner` has them in its columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch.distributed.checkpoint.planner import SavePlan

from .columns import EncodedColumns, Row, Table, Unsupported, columns_of_rows, encode, row_of
from .global_plan import merge
from .plan import CompactPlan


class Wholes(NamedTuple):
    """A rank's whole tensors, sent in ``SavePlan.storage_data`` together with the storage's own message."""

    columns: EncodedColumns
    message: Any


def wholes_of(plan: SavePlan, message: Any) -> Any:
    """A message that also has the whole tensors of a rank's plan, unless `SavePlanner` has made the plan."""
    if isinstance(plan, CompactPlan):
        return message
    return Wholes(encode(columns_of_rows(_rows(plan), None)[0]), message)


def _rows(plan: SavePlan) -> Iterator[Row]:
    for item in plan.items:
        data = item.tensor_data
        if data is not None and data.chunk is not None and data.chunk.sizes == data.size:
            try:
                yield row_of(item)
            except Unsupported:  # of a user's planner
                continue


def checked_messages(messages: Sequence[Any]) -> list[Any]:
    """The messages of the ranks by themselves; raises `WriteError`, as `merge` does, if ranks disagree on a tensor."""
    sent = {message.columns.digest: message.columns for message in messages if isinstance(message, Wholes)}
    if len(sent) > 1:
        tables: dict[bytes, Table] = {}
        nothing, _ = columns_of_rows((), None)
        merge([m.columns.decode(tables) if isinstance(m, Wholes) else nothing for m in messages], to_lowest_rank=True)
    return [message.message if isinstance(message, Wholes) else message for message in messages]
