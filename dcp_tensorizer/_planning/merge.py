"""The plans of all ranks as one: which rank writes what several have, and what the checkpoint then holds."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from torch.distributed.checkpoint.planner import WriteItemType

from ..errors import WriteError
from .columns import KINDS, Columns, Integers, Spec

__all__ = ["Merged", "merge"]

_Value = TypeVar("_Value", bound=Hashable)

_SHARD, _BYTE_IO = KINDS.index(WriteItemType.SHARD), KINDS.index(WriteItemType.BYTE_IO)


@dataclass(frozen=True, eq=False)
class Merged:
    """The items of all ranks, one after the other.

    Attributes:
        keys: The names of keys.
        specs: All specs.
        key, kind, spec, dims, starts, sizes: Of each item, see `Columns`.
        rank: Of each item.
        kept: Whether its rank writes it.
        hint: The number of its chunk among those of its tensor; -1 where there is none.
    """

    keys: list[str]
    specs: list[Spec]
    key: Integers
    kind: Integers
    spec: Integers
    dims: Integers
    starts: Integers
    sizes: Integers
    rank: Integers
    kept: np.ndarray
    hint: Integers

    def by_key(self) -> Iterator[tuple[int, Integers]]:
        """The items that are written, key by key, in the order in which keys come first."""
        rows = np.flatnonzero(self.kept)
        rows = rows[np.argsort(self.key[rows], kind="stable")]
        parts = np.split(rows, np.flatnonzero(np.diff(self.key[rows])) + 1) if len(rows) else []
        for part in sorted(parts, key=lambda part: int(part[0])):
            yield int(self.key[part[0]]), part


def merge(plans: Sequence[Columns], *, to_lowest_rank: bool) -> Merged:
    """Chooses for each item that several ranks have the one that writes it, as torch's ``dedup_save_plans`` does.

    Raises:
        WriteError: two ranks disagree on what a key is; names it.
    """
    keys: dict[str, int] = {}
    specs: dict[Spec, int] = {}
    numbers: dict[int, tuple[Integers, Integers]] = {}  # of a table's keys and specs; most ranks share one table
    for plan in plans:
        table = plan.table
        if id(table) not in numbers:
            key_numbers, spec_numbers = _numbers(table.keys, keys), _numbers(table.specs, specs)
            numbers[id(table)] = np.array(key_numbers, dtype=np.int64), np.array([*spec_numbers, -1])  # -1: an object
    width = max((plan.starts.shape[1] for plan in plans), default=0)
    key = np.concatenate([numbers[id(plan.table)][0][plan.table.key_numbers] for plan in plans])
    spec = np.concatenate([numbers[id(plan.table)][1][plan.table.spec_numbers] for plan in plans])
    kind = np.concatenate([plan.table.kinds for plan in plans])
    dims = np.concatenate([plan.dims for plan in plans])
    starts, sizes = (np.concatenate([_widened(getattr(p, name), width) for p in plans]) for name in ("starts", "sizes"))
    rank = np.repeat(np.arange(len(plans)), [len(plan) for plan in plans])
    groups = _group([*starts.T[::-1], dims, key])
    kept = _writers(groups, rank, np.array([_weight(spec) for spec in specs] + [1])[spec], to_lowest_rank, len(plans))
    names = list(keys)
    hint = _hints(names, np.where(kept, key, -1), kind)
    return Merged(names, list(specs), key, kind, spec, dims, starts, sizes, rank, kept, hint)


def _numbers(values: list[_Value], known: dict[_Value, int]) -> list[int]:
    """The number of each value; new ones get the next numbers. Most are known already."""
    numbers = list(map(known.get, values))
    return [known.setdefault(v, len(known)) if n is None else n for v, n in zip(values, numbers, strict=True)]


def _widened(rows: Integers, width: int) -> Integers:
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])))


def _weight(spec: Spec) -> int:
    """What torch takes an item for: the bytes of its whole tensor. Plans are balanced by it."""
    return (math.prod(spec.shape) * spec.properties[0].itemsize) or 1


def _group(columns: list[Integers]) -> Integers:
    """The number of the group of each row: rows of a group are equal. Groups are numbered as they come first."""
    count = len(columns[0])
    if not count:
        return np.zeros(0, dtype=np.int64)
    order = np.lexsort(columns)
    differs = np.zeros(count, dtype=bool)
    for column in columns:
        differs[1:] |= np.diff(column[order]) != 0
    sorted_groups = np.cumsum(differs)
    firsts = order[np.flatnonzero(np.diff(sorted_groups, prepend=-1))]  # the sort is stable
    renumbered = np.empty(len(firsts), dtype=np.int64)
    renumbered[np.argsort(firsts)] = np.arange(len(firsts))
    groups = np.empty(count, dtype=np.int64)
    groups[order] = renumbered[sorted_groups]
    return groups


def _writers(groups: Integers, rank: Integers, weight: Integers, to_lowest_rank: bool, ranks: int) -> np.ndarray:
    """Which items are written: of each group those of one rank, the one whose plan is the lightest so far."""
    order = np.argsort(groups, kind="stable")
    bounds = np.flatnonzero(np.diff(groups[order], prepend=-1))
    ends = np.append(bounds[1:], len(order))
    kept = np.ones(len(groups), dtype=bool)
    loads = [0] * ranks
    weights = weight[order[ends - 1]].tolist() if len(order) else []  # of its last item, as in torch
    lone = rank[order[bounds]] == rank[order[ends - 1]] if len(order) else np.zeros(0, dtype=bool)
    owners = rank[order[bounds]] if len(order) else order
    begin = 0
    for number in np.flatnonzero(~lone).tolist():
        _add_loads(loads, owners[begin:number], weights[begin:number])
        rows = order[bounds[number] : ends[number]]
        holders = rank[rows]
        # A set, as torch has it: the first of several that are as light is the first of the set.
        candidates = set(holders.tolist())
        chosen = min(candidates) if to_lowest_rank else min(candidates, key=loads.__getitem__)
        loads[chosen] += weights[number]
        kept[rows] = holders == chosen
        begin = number + 1
    return kept


def _add_loads(loads: list[int], owners: Integers, weights: list[int]) -> None:
    for owner, weight in zip(owners.tolist(), weights, strict=True):
        loads[owner] += weight


def _hints(keys: list[str], key: Integers, kind: Integers) -> Integers:
    """The number of each chunk among those of its tensor. ``key`` is -1 for items that are not written.

    Raises:
        WriteError: what is no shard is not the only one of its key.
    """
    order = np.argsort(key, kind="stable")
    bounds = np.flatnonzero(np.diff(key[order], prepend=-2))
    number = np.arange(len(order)) - np.repeat(bounds, np.diff(np.append(bounds, len(order))))
    hint = np.empty(len(key), dtype=np.int64)
    hint[order] = number
    wrong = (hint > 0) & (kind != _SHARD) & (key >= 0)
    starts_with_object = np.zeros(len(key), dtype=bool)
    starts_with_object[order] = np.repeat(kind[order[bounds]] == _BYTE_IO, np.diff(np.append(bounds, len(order))))
    wrong |= (hint > 0) & starts_with_object & (key >= 0)
    if wrong.any():
        name = keys[int(key[wrong.argmax()])]
        raise WriteError(
            f"{name!r} cannot be saved: the ranks plan several parts of it, and not all of them are shards of one "
            f"tensor. It has to be of one type and shape on all ranks."
        )
    hint[(key < 0) | (kind == _BYTE_IO)] = -1
    return hint
