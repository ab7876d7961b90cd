"""The coordinator's part of planning: decides which rank writes which item, and makes DCP's ``Metadata``."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from .._index.entries import StateRules
from .._index.layouts import ChunkLayout
from .._index.schema import Layout, encode_rows
from .._runtime.interpreter import collector_paused
from .._tensor_file.regions import Integers, overlapping_pair
from ..errors import WriteError
from .columns import (
    KINDS,
    Columns,
    EncodedColumns,
    Row,
    Spec,
    Table,
    Unsupported,
    columns_of,
    columns_of_rows,
    encode,
    merge_paths,
    pack,
    pack_integers,
    pack_paths,
    row_of,
    unpack,
    unpack_integers,
    unpack_paths,
    with_keys,
)
from .plan import CompactPlan, Items, WrittenItems, choose


@dataclass(frozen=True, eq=False)
class GlobalPlan:
    choices: list[WrittenItems]  # the items that each rank writes
    rules: StateRules  # the entries of ``Metadata.state_dict_metadata``
    planner_data: Any  # of all ranks

    def metadata(self) -> RuleMetadata:
        """Returns DCP's metadata, made anew at each call, so that the caller may change it."""
        return RuleMetadata.of(self.rules, None if self.planner_data is None else dict(self.planner_data))


def encoded(plan: SavePlan) -> EncodedColumns:
    """Returns a rank's plan as encoded columns. Raises `Unsupported` if columns cannot hold the plan."""
    items = plan.items
    if type(plan) not in (SavePlan, CompactPlan) or not plan.usable:
        raise Unsupported
    if not isinstance(items, Items) or items.is_changed:
        return encode(columns_of(items, plan.planner_data)[0])
    if isinstance(items.source, EncodedColumns) and items.choice is None and "planner_data" not in plan.__dict__:
        return items.source
    return encode(items.chosen[0].with_data(plan.planner_data))


def make_global_plan(plans: Sequence[Columns], *, to_lowest_rank: bool, merges_paths: bool) -> GlobalPlan:
    """Chooses which rank writes which item, and checks that each tensor's chunks lie inside it and do not overlap.

    With several ranks, also checks that the chunks cover the tensor. Raises `WriteError`, naming the keys and the
    problems, if a check fails, or as `merge` does.
    """
    merged = merge(plans, to_lowest_rank=to_lowest_rank)
    ends = np.cumsum([len(plan) for plan in plans])[:-1]
    rows, hints = np.split(merged.is_written, ends), np.split(merged.hint, ends)
    choices = [choose(is_written, hint[is_written]) for is_written, hint in zip(rows, hints, strict=True)]
    with collector_paused():
        planner_data = merge_paths(plan.table.data for plan in plans) if merges_paths else None
        return GlobalPlan(choices, _rules(merged, is_complete=len(plans) > 1), planner_data)


def _rules(merged: Merged, *, is_complete: bool) -> StateRules:
    """Returns the entries of ``state_dict_metadata``. Checks tensors of one shape and sharding only once."""
    layouts: dict[tuple[Any, ...], int] = {}
    properties: dict[tuple[Any, ...], int] = {}
    made: list[ChunkLayout] = []
    keys, numbers, problems = [], [], []
    columns = merged.columns
    table = columns.table
    for key, rows in merged.by_key():
        keys.append(table.keys[key])
        spec = int(table.spec_numbers[rows[0]])
        if spec < 0:
            numbers.append((-1, -1))
            continue
        shape, fields = table.specs[spec]
        chunks = columns.dims[rows], columns.starts[rows], columns.sizes[rows]
        pattern = (shape, *[column.tobytes() for column in chunks])
        if pattern not in layouts:
            problem = _problem(shape, *chunks, is_complete=is_complete)
            if problem is not None:
                problems.append((table.keys[key], problem[0], merged.rank[rows[problem[1]]].tolist()))
                continue
            layouts[pattern] = len(made)
            made.append(ChunkLayout.of_rows(shape, *(column[:, : len(shape)] for column in chunks[1:])))
        numbers.append((properties.setdefault(fields, len(properties)), layouts[pattern]))
    if problems:
        raise WriteError(_shown(problems))
    rows_of_keys = np.array(numbers, dtype=np.int64).reshape(-1, 2)
    return StateRules(keys, rows_of_keys, [TensorProperties(*fields) for fields in properties], made)


def _problem(
    shape: tuple[int, ...], dims: Integers, starts: Integers, sizes: Integers, *, is_complete: bool
) -> tuple[str, list[int]] | None:
    """Returns a description of the fault in a tensor's chunks, and the faulty chunks' numbers; None without a fault."""
    odd = np.flatnonzero(dims != len(shape))
    if len(odd):
        return f"a part is {dims[odd[0]]}-dimensional, and the tensor is {len(shape)}-dimensional", [int(odd[0])]
    if not shape:
        return None
    starts, sizes = starts[:, : len(shape)], sizes[:, : len(shape)]
    # Compares the difference, because the sum may overflow 64 bits.
    beyond = np.flatnonzero(
        ((starts < 0) | (sizes < 0) | (sizes > np.array(shape) - np.maximum(starts, 0))).any(axis=1)
    )
    if len(beyond):
        part = _shown_chunk(starts, sizes, beyond[0])
        return f"a part lies outside the tensor's shape {shape}: {part}", [int(beyond[0])]
    pair = overlapping_pair(starts, starts + sizes)
    if pair is not None:
        one, other = sorted(pair)
        parts = [_shown_chunk(starts, sizes, row) for row in (one, other)]
        return f"two parts overlap: {parts[0]}, and {parts[1]}", [one, other]
    elements, held = int(np.prod(shape)), int(sizes.prod(axis=1).sum())
    if is_complete and held != elements:
        return f"its parts hold {held:,} of its {elements:,} elements: a rank's part is missing", []
    return None


def _shown_chunk(starts: Integers, sizes: Integers, row: int) -> str:
    return f"{tuple(sizes[row].tolist())} at {tuple(starts[row].tolist())}"


def _shown(problems: list[tuple[str, str, list[int]]]) -> str:
    lines = []
    for key, problem, found in problems[:_SHOWN]:
        ranks = list(dict.fromkeys(found))  # one rank may have planned both parts
        of = f" (planned by rank{'s' if len(ranks) > 1 else ''} {' and '.join(map(str, ranks))})" if ranks else ""
        lines.append(f"{key!r} cannot be saved: {problem}{of}")
    more = len(problems) - _SHOWN
    others = "1 other key has" if more == 1 else f"{more} other keys have"
    return "; ".join([*lines, *([f"and {others} such faults"] if more > 0 else [])])


_SHOWN = 3  # keys, or ranks, shown in an error


# --- the global plan: removes duplicates, and describes the checkpoint ------------------------------------------------

_Value = TypeVar("_Value", bound=Hashable)

_SHARD, _BYTE_IO = KINDS.index(WriteItemType.SHARD), KINDS.index(WriteItemType.BYTE_IO)


@dataclass(frozen=True, eq=False)
class Merged:
    """The items of all ranks, in the order of the ranks."""

    columns: Columns
    rank: Integers  # of each item
    is_written: np.ndarray  # by its rank
    hint: Integers  # the number of its chunk in its tensor; -1: none

    def by_key(self) -> Iterator[tuple[int, Integers]]:
        """Yields each key with the rows of its written items, in the order of each key's first item."""
        keys, rows = self.columns.table.key_numbers, np.flatnonzero(self.is_written)
        rows = rows[np.argsort(keys[rows], kind="stable")]
        parts = np.split(rows, np.flatnonzero(np.diff(keys[rows])) + 1) if len(rows) else []
        for part in sorted(parts, key=lambda part: int(part[0])):
            yield int(keys[part[0]]), part


def merge(plans: Sequence[Columns], *, to_lowest_rank: bool) -> Merged:
    """Chooses the writing rank of each item that several ranks have, like torch's ``dedup_save_plans``.

    Raises `WriteError`, naming the key, if ranks disagree on the tensor of a key, or as `_hints` does.
    """
    keys: dict[str, int] = {}
    specs: dict[Spec, int] = {}
    # the numbers of keys and specs, by table; most ranks share one table
    numbers: dict[int, tuple[Integers, Integers]] = {}
    for plan in plans:
        table = plan.table
        if id(table) not in numbers:
            key_numbers, spec_numbers = _numbers(table.keys, keys), _numbers(table.specs, specs)
            numbers[id(table)] = np.array(key_numbers, dtype=np.int64), np.array([*spec_numbers, -1])  # -1 for objects
    width = max((plan.starts.shape[1] for plan in plans), default=0)
    key = np.concatenate([numbers[id(plan.table)][0][plan.table.key_numbers] for plan in plans])
    spec = np.concatenate([numbers[id(plan.table)][1][plan.table.spec_numbers] for plan in plans])
    kind = np.concatenate([plan.table.kinds for plan in plans])
    dims = np.concatenate([plan.dims for plan in plans])
    unused = [((0, 0), (0, width - plan.starts.shape[1])) for plan in plans]
    starts = np.concatenate([np.pad(plan.starts, added) for plan, added in zip(plans, unused, strict=True)])
    sizes = np.concatenate([np.pad(plan.sizes, added) for plan, added in zip(plans, unused, strict=True)])
    rank = np.repeat(np.arange(len(plans)), [len(plan) for plan in plans])
    groups = _group([*starts.T[::-1], dims, key])
    _check_alike(list(keys), list(specs), key, spec, groups, rank)
    # An item's weight when torch balances plans: the bytes of its whole tensor.
    weights = np.array([*((math.prod(s.shape) * s.properties[0].itemsize) or 1 for s in specs), 1])
    is_written = _writers(groups, rank, weights[spec], to_lowest_rank, len(plans))
    table = Table(list(keys), key, kind, spec, list(specs), None)
    hint = _hints(table.keys, np.where(is_written, key, -1), kind)
    return Merged(Columns(table, dims, starts, sizes), rank, is_written, hint)


def _check_alike(
    keys: list[str], specs: list[Spec], key: Integers, spec: Integers, groups: Integers, rank: Integers
) -> None:
    """Checks that all tensors of a key have one shape, and all replicas of a chunk one dtype.

    One rank writes what several ranks have: if ranks disagreed, all but one would silently lose their values. Other
    properties, such as ``requires_grad``, may differ.
    """
    rows = np.flatnonzero(spec >= 0)
    for field, of in (("shape", key), ("dtype", groups)):
        values: dict[object, int] = {}
        found = [values.setdefault(s.shape if field == "shape" else s.properties[0], len(values)) for s in specs]
        value = np.array([*found, -1])[spec]
        of_first = np.empty(1 + of.max(initial=-1), dtype=np.int64)
        of_first[of[rows[::-1]]] = value[rows[::-1]]  # the last assignment, of the first row, wins
        wrong = rows[value[rows] != of_first[of[rows]]]
        if len(wrong):
            like = rows[of[rows] == of[wrong[0]]]
            texts = list(values)
            numbers = dict.fromkeys(value[like].tolist())
            held = (f"{texts[number]} on {_ranks(rank[like[value[like] == number]])}" for number in numbers)
            raise WriteError(
                f"{keys[int(key[wrong[0]])]!r} cannot be saved: the ranks do not agree on its {field}: "
                f"{', '.join(held)}. Give each rank's tensor a separate key, for example with DataParallelState."
            )


def _ranks(ranks: Integers) -> str:
    """Formats ranks: ``rank 0``, ``ranks 1, 2, 3 and 5 others``."""
    numbers = list(dict.fromkeys(ranks.tolist()))
    others = len(numbers) - _SHOWN
    more = f" and {others} other{'s' if others > 1 else ''}" if others > 0 else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:_SHOWN]))}{more}"


def _numbers(values: list[_Value], known: dict[_Value, int]) -> list[int]:
    """Returns the number of each value, and adds new values to ``known``. Most values are in ``known``."""
    numbers = list(map(known.get, values))
    return [known.setdefault(v, len(known)) if n is None else n for v, n in zip(values, numbers, strict=True)]


def _group(columns: list[Integers]) -> Integers:
    """Returns, for each row, the number of its group. Groups are numbered in order of first appearance.

    The rows of a group are equal.
    """
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
    """Selects the items to write: of each group, those of its lowest rank, or of its rank with the lightest plan."""
    order = np.argsort(groups, kind="stable")
    bounds = np.flatnonzero(np.diff(groups[order], prepend=-1))
    ends = np.append(bounds[1:], len(order))
    is_written = np.ones(len(groups), dtype=bool)
    loads = [0] * ranks
    weights = weight[order[ends - 1]].tolist() if len(order) else []  # of the group's last item, as in torch
    lone = rank[order[bounds]] == rank[order[ends - 1]] if len(order) else np.zeros(0, dtype=bool)
    owners = rank[order[bounds]] if len(order) else order
    begin = 0
    for number in np.flatnonzero(~lone).tolist():
        for owner, added in zip(owners[begin:number].tolist(), weights[begin:number], strict=True):
            loads[owner] += added
        rows = order[bounds[number] : ends[number]]
        holders = rank[rows]
        # A set, as in torch: among equally light plans, the first of the set is chosen.
        candidates = set(holders.tolist())
        chosen = min(candidates) if to_lowest_rank else min(candidates, key=loads.__getitem__)
        loads[chosen] += weights[number]
        is_written[rows] = holders == chosen
        begin = number + 1
    return is_written


def _hints(keys: list[str], key: Integers, kind: Integers) -> Integers:
    """Returns the number of each chunk in its tensor. ``key`` is -1 for items that are not written.

    Raises `WriteError` if a key has several items that are not all shards.
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
            f"tensor. Give it one type and shape on all ranks."
        )
    hint[(key < 0) | (kind == _BYTE_IO)] = -1
    return hint


# --- torch's Metadata, sent from rank to rank in compact form ---------------------------------------------------------
#
# DCP broadcasts the coordinator's metadata at the end of each save, and most ranks never use it. So the entries are
# made on first access.

_FIELDS = [field.name for field in dataclasses.fields(Metadata)]
_UNDERSTOOD = _FIELDS == ["state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"]
_decode_layouts = msgspec.msgpack.Decoder(list[Layout]).decode


class RuleMetadata(Metadata):
    """torch's ``Metadata`` with a small pickle.

    If a storage writer has set ``storage_data``, the pickle is that of torch's ``Metadata``.
    """

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def of(cls, rules: StateRules, planner_data: Any) -> RuleMetadata:
        metadata = cls.__new__(cls)
        metadata.__dict__.update(
            _rules=rules, planner_data=planner_data, storage_data=None, storage_meta=None, version=None
        )
        return metadata

    @property
    def rules(self) -> StateRules | None:
        """The entries in compact form. None after an access to the entries, which the caller may have changed."""
        return None if "state_dict_metadata" in self.__dict__ else self._rules

    @functools.cached_property
    def _rules(self) -> StateRules:
        keys, rows, properties, layouts = unpack(self.__dict__["_content"][0])
        made = [ChunkLayout.from_row(row) for row in _decode_layouts(layouts)]
        return StateRules(keys, unpack_integers(rows).reshape(-1, 2), properties, made)

    @functools.cached_property
    def state_dict_metadata(self) -> dict[str, Any]:  # type: ignore[override]
        with collector_paused():
            return self._rules.described()

    @functools.cached_property
    def planner_data(self) -> Any:
        return unpack_paths(with_keys(unpack(self.__dict__["_content"][1]), self._rules.keys))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Metadata):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _FIELDS)

    def __reduce__(self) -> tuple[Any, ...]:
        others = {name: value for name, value in vars(self).items() if name not in _FIELDS and name[0] != "_"} or None
        try:
            if self.storage_data is not None or not _UNDERSTOOD:
                raise Unsupported
            return self._received, (self._packed(), self.storage_meta, self.version), others
        except Unsupported:  # also for checkpoints of torch's writer, which must load without this package
            return Metadata, tuple(getattr(self, name) for name in _FIELDS), others

    @classmethod
    def _received(
        cls, content: tuple[bytes, bytes], storage_meta: StorageMeta | None, version: str | None
    ) -> RuleMetadata:
        metadata = cls.__new__(cls)
        metadata.__dict__.update(_content=content, storage_data=None, storage_meta=storage_meta, version=version)
        return metadata

    def _packed(self) -> tuple[bytes, bytes]:
        """Returns the rules and the planner's data as bytes. Raises `Unsupported` for entries that are not torch's."""
        untouched = not {"state_dict_metadata", "planner_data"} & self.__dict__.keys()
        if untouched:
            content: tuple[bytes, bytes] = self.__dict__["_content"]
            return content
        rules = self.rules
        if rules is None:
            if not all(map(_is_torchs, self.state_dict_metadata.values())):
                raise Unsupported
            try:
                rules = StateRules.of(self.state_dict_metadata)
            except WriteError as error:
                raise Unsupported from error
        layouts = encode_rows([layout.to_row() for layout in rules.layouts])
        packed = pack((rules.keys, pack_integers(rules.rows), rules.properties, layouts))
        return packed, pack(pack_paths(self.planner_data, rules.keys))


def _is_torchs(entry: Any) -> bool:
    return type(entry) is BytesStorageMetadata or (
        type(entry) is TensorStorageMetadata
        and type(entry.properties) is TensorProperties
        and type(entry.chunks) is list
        and all(type(chunk) is ChunkStorageMetadata for chunk in entry.chunks)
    )


# --- unsharded tensors on which ranks disagree, with planners that do not check for that ------------------------------
#
# torch's planner retains the write item of one rank, and drops those of the others before the storage writer receives
# the plans. So each rank sends the items of its whole tensors, as columns, to the coordinator with its plan. The
# columns of `SavePlanner` already have them.


class Wholes(NamedTuple):
    """The items of a rank's whole tensors, sent in ``SavePlan.storage_data`` with the message of the storage writer."""

    columns: EncodedColumns
    message: Any


def wholes_of(plan: SavePlan, message: Any) -> Any:
    """Returns a message with the items of a plan's whole tensors; ``message`` itself for a plan of `SavePlanner`."""
    if isinstance(plan, CompactPlan):
        return message

    def rows() -> Iterator[Row]:
        for item in plan.items:
            data = item.tensor_data
            if data is not None and data.chunk is not None and data.chunk.sizes == data.size:
                try:
                    yield row_of(item)
                except Unsupported:  # of a user's planner
                    continue

    return Wholes(encode(columns_of_rows(rows(), None)[0]), message)


def checked_messages(messages: Sequence[Any]) -> list[Any]:
    """Returns the storage writer's own messages.

    Raises `WriteError`, as `merge` does, if ranks disagree on a tensor.
    """
    sent = {message.columns.digest: message.columns for message in messages if isinstance(message, Wholes)}
    if len(sent) > 1:
        tables: dict[bytes, Table] = {}
        nothing, _ = columns_of_rows((), None)
        merge([m.columns.decode(tables) if isinstance(m, Wholes) else nothing for m in messages], to_lowest_rank=True)
    return [message.message if isinstance(message, Wholes) else message for message in messages]
