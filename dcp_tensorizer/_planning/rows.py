"""A state dict as rows of write items: what torch's planner makes of it, with few of its objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import TensorProperties

from .._torch_compat import DTensor, plain_local
from .columns import SHARD, Row, row_of, row_of_tensor, spec_of

__all__ = ["rows_of"]

_Layout = tuple[Any, ...]
"""What says which part of a DTensor is here: its shape, the mesh's id, and the placements."""
_Part = tuple[tuple[int, ...], tuple[int, ...]]


def rows_of(state_dict: Mapping[str, Any], *, is_coordinator: bool) -> Iterator[Row]:
    """The rows of a state dict; each may be dropped before the next one is made.

    Which part of a DTensor a rank has, torch works out anew for each, in as long as all the rest takes. Here it does so
    once for all DTensors of one layout.

    Raises:
        Unsupported: an item is more than a row can hold.
    """
    parts: dict[_Layout, _Part] = {}
    for key, value in state_dict.items():
        row = row_of_tensor(key, value) or _row_of_dtensor(key, value, parts)
        if row is not None:
            yield row
            continue
        rows = list(map(row_of, create_default_local_save_plan({key: value}, is_coordinator).items))
        if type(value) is DTensor and [(row.kind, row.hint) for row in rows] == [(SHARD, -1)]:
            parts[_layout(value)] = rows[0].start, rows[0].size
        yield from rows


def _row_of_dtensor(key: str, value: Any, parts: Mapping[_Layout, _Part]) -> Row | None:
    """The row of a DTensor of a layout that is known; None for any other value."""
    if type(value) is not DTensor or type(key) is not str:
        return None
    local, part = plain_local(value), parts.get(_layout(value))
    if local is None or part is None:
        return None
    return Row(key, SHARD, spec_of(value.shape, TensorProperties.create_from_tensor(local)), *part, -1)


def _layout(tensor: DTensor) -> _Layout:
    return tensor.shape, id(tensor.device_mesh), tensor.placements
