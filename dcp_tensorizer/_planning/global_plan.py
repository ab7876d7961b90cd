"""The coordinator's part: from the plans of all ranks to what each of them writes, and to DCP's ``Metadata``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.planner import SavePlan

from .._format.chunk_layout import ChunkLayout
from .._format.chunks import overlapping_pair
from .._format.state_rules import StateRules
from .._memory.garbage import collector_paused
from ..errors import WriteError
from .columns import Columns, Integers, Unsupported, columns_of
from .merge import Merged, merge
from .metadata import RuleMetadata
from .paths import merge_paths
from .plan import Choice, CompactPlan, Items, choose
from .wire import Encoded, encode

__all__ = ["GlobalPlan", "encoded", "make_global_plan"]


@dataclass(frozen=True, eq=False)
class GlobalPlan:
    """What comes of the plans of all ranks.

    Attributes:
        choices: Which of its items each rank writes.
        rules: What is in the state dict, and how it is sharded.
        planner_data: That of all ranks.
    """

    choices: list[Choice]
    rules: StateRules
    planner_data: Any

    def metadata(self) -> RuleMetadata:
        """DCP's, a new one: whoever gets it may change it."""
        return RuleMetadata.of(self.rules, None if self.planner_data is None else dict(self.planner_data))


def encoded(plan: SavePlan) -> Encoded:
    """A rank's plan as columns; of one that was received they are there already.

    Raises:
        Unsupported: it is more than columns can hold.
    """
    items = plan.items
    if type(plan) not in (SavePlan, CompactPlan) or not plan.usable:
        raise Unsupported
    if not isinstance(items, Items) or items.is_changed:
        return encode(columns_of(items, plan.planner_data)[0])
    if isinstance(items.source, Encoded) and items.choice is None and "planner_data" not in plan.__dict__:
        return items.source
    return encode(items.chosen[0].with_data(plan.planner_data))


def make_global_plan(plans: Sequence[Columns], *, to_lowest_rank: bool, merges_paths: bool) -> GlobalPlan:
    """Chooses who writes what, and checks that all of it makes up whole tensors.

    Raises:
        WriteError: it does not; names the keys, and what is wrong.
    """
    merged = merge(plans, to_lowest_rank=to_lowest_rank)
    rows = np.split(merged.kept, np.cumsum([len(plan) for plan in plans])[:-1])
    hints = np.split(merged.hint, np.cumsum([len(plan) for plan in plans])[:-1])
    choices = [choose(kept, hint[kept]) for kept, hint in zip(rows, hints, strict=True)]
    with collector_paused():
        planner_data = merge_paths(plan.table.data for plan in plans) if merges_paths else None
        return GlobalPlan(choices, _rules(merged, is_complete=len(plans) > 1), planner_data)


def _rules(merged: Merged, *, is_complete: bool) -> StateRules:
    """The entries of the state dict. Tensors of one shape are mostly sharded in the same way: that is checked once."""
    layouts: dict[tuple[Any, ...], int] = {}
    properties: dict[tuple[Any, ...], int] = {}
    made: list[ChunkLayout] = []
    keys, numbers, problems = [], [], []
    for key, rows in merged.by_key():
        keys.append(merged.keys[key])
        if int(merged.spec[rows[0]]) < 0:
            numbers.append((-1, -1))
            continue
        shape, fields = merged.specs[int(merged.spec[rows[0]])]
        places = merged.dims[rows], merged.starts[rows], merged.sizes[rows]
        pattern = (shape, *[column.tobytes() for column in places])
        if pattern not in layouts:
            problem = _problem(shape, *places, is_complete=is_complete)
            if problem is not None:
                problems.append((merged.keys[key], problem[0], merged.rank[rows[problem[1]]].tolist()))
                continue
            layouts[pattern] = len(made)
            made.append(ChunkLayout.of_rows(shape, *(column[:, : len(shape)] for column in places[1:])))
        numbers.append((properties.setdefault(fields, len(properties)), layouts[pattern]))
    if problems:
        raise WriteError(_shown(problems))
    rows_of_keys = np.array(numbers, dtype=np.int64).reshape(-1, 2)
    return StateRules(keys, rows_of_keys, [TensorProperties(*fields) for fields in properties], made)


def _problem(
    shape: tuple[int, ...], dims: Integers, starts: Integers, sizes: Integers, *, is_complete: bool
) -> tuple[str, list[int]] | None:
    """What is wrong with the chunks of a tensor, and which of them are meant."""
    odd = np.flatnonzero(dims != len(shape))
    if len(odd):
        return f"a part has {dims[odd[0]]} dimensions, and the tensor has {len(shape)}", [int(odd[0])]
    if not shape:
        return None
    starts, sizes = starts[:, : len(shape)], sizes[:, : len(shape)]
    # As a difference: the sum may be more than 64 bits hold.
    beyond = np.flatnonzero(
        ((starts < 0) | (sizes < 0) | (sizes > np.array(shape) - np.maximum(starts, 0))).any(axis=1)
    )
    if len(beyond):
        return f"a part lies outside its shape {shape}: {_place(starts, sizes, beyond[0])}", [int(beyond[0])]
    pair = overlapping_pair(starts, starts + sizes)
    if pair is not None:
        one, other = sorted(pair)
        return f"two parts overlap: {_place(starts, sizes, one)}, and {_place(starts, sizes, other)}", [one, other]
    elements, held = int(np.prod(shape)), int(sizes.prod(axis=1).sum())
    if is_complete and held != elements:
        return f"its parts hold {held:,} of its {elements:,} elements: a rank's part is missing", []
    return None


def _place(starts: Integers, sizes: Integers, row: int) -> str:
    return f"{tuple(sizes[row].tolist())} at {tuple(starts[row].tolist())}"


def _shown(problems: list[tuple[str, str, list[int]]]) -> str:
    lines = []
    for key, problem, ranks in problems[:_SHOWN]:
        of = f" (of rank{'s' if len(ranks) > 1 else ''} {' and '.join(map(str, ranks))})" if ranks else ""
        lines.append(f"{key!r} cannot be saved: {problem}{of}")
    more = len(problems) - _SHOWN
    return "; ".join([*lines, *([f"and so it is with {more} other keys"] if more > 0 else [])])


_SHOWN = 3  # keys that an error tells of
