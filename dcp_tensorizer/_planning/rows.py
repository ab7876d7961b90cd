"""A state dict as rows of write items: what torch's planner makes of it, with few of its objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import TensorProperties

from .._torch_compat import layout_of, plain_local
from .columns import SHARD, Row, row_of, row_of_tensor, spec_of

__all__ = ["rows_of"]

_Part = tuple[tuple[int, ...], tuple[int, ...]]


def rows_of(state_dict: Mapping[str, Any], *, is_coordinator: bool) -> Iterator[Row]:
    """The rows of a state dict; each may be dropped before the next one is made.

    Which part of a DTensor a rank has, torch works out anew for each, in as long as all the rest takes. Here it does so
    once for all DTensors of one layout.

    Raises:
        Unsupported: an item is more than a row can hold.
    """
    parts: dict[Any, _Part] = {}
    for key, value in state_dict.items():
        row = row_of_tensor(key, value) or _row_of_dtensor(key, value, parts)
        if row is not None:
            yield row
            continue
        rows = list(map(row_of, create_default_local_save_plan({key: value}, is_coordinator).items))
        layout = layout_of(value)
        if layout is not None and [(row.kind, row.hint) for row in rows] == [(SHARD, -1)]:
            parts[layout] = rows[0].start, rows[0].size
        yield from rows


def _row_of_dtensor(key: str, value: Any, parts: Mapping[Any, _Part]) -> Row | None:
    """The row of a DTensor of a layout that is known; None for any other value."""
    local, part = plain_local(value), parts.get(layout_of(value))
    if local is None or part is None or type(key) is not str:
        return None
    return Row(key, SHARD, spec_of(value.shape, TensorProperties.create_from_tensor(local)), *part, -1)
