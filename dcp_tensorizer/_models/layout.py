"""The layout of a model's files: the location of each tensor, and the rank that writes each block of a file.

Coordinator: the plans of all ranks -> `plan_model` -> `ModelPlan` -> `rank_layout` -> `RankLayout`, for all ranks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from .._formats.rename import Box, Placed, Renaming, Rules, place, wrong_way_back
from .._formats.safetensors import MAX_SHARD_BYTES, NAMES, PAIRS, SafetensorsLayout, fault_of, lay_out, shards
from .._index.layouts import ChunkLayout, expand, runs_of
from .._index.schema import Layout, Run
from .._publish.delta import zstd
from .._publish.publisher import Publish
from .._runtime.validation import check_count, check_flags, check_type
from .._tensor_file.regions import Integers, Region, regions_of_range
from .._writer_process.shared_job import SharedFilePart
from ..errors import WriteError, listed

_ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The options of a model: see `SafetensorsStorageWriter`. Raises `TypeError` or `ValueError`."""

    dtype: torch.dtype | None = None
    rename: Rules = field(default_factory=dict)
    max_shard_bytes: int = MAX_SHARD_BYTES
    files: Sequence[str | os.PathLike[str]] = ()  # becomes absolute paths
    overwrite: bool = False
    publish: Publish | None = None

    def __post_init__(self) -> None:
        rename, files = self.rename or {}, self.files
        check_flags(self)
        check_type("rename", rename, Mapping)
        if isinstance(files, str | os.PathLike) or not all(isinstance(file, str | os.PathLike) for file in files):
            raise TypeError(f"files must be a list of paths, got {files!r}")
        object.__setattr__(self, "files", tuple(os.path.abspath(os.path.expanduser(file)) for file in files))
        object.__setattr__(self, "rename", dict(rename))
        if self.publish is not None:
            check_type("publish", self.publish, Publish)
            if self.is_adapter:
                raise ValueError(f"publish= takes whole models, and files= contains {_ADAPTER_CONFIG}. Omit publish=.")
            zstd()
        if self.dtype is not None:
            check_type("dtype", self.dtype, torch.dtype)
            if not self.dtype.is_floating_point or self.dtype == PAIRS or self.dtype not in NAMES:
                names = ", ".join(sorted(str(dtype) for dtype in NAMES if dtype.is_floating_point and dtype != PAIRS))
                raise ValueError(
                    f"dtype must be a floating-point dtype of safetensors, got {self.dtype}. Use one of {names}."
                )
        check_count("max_shard_bytes", self.max_shard_bytes)
        Renaming(self.rename).inverse()

    @property
    def is_adapter(self) -> bool:
        """Returns whether the model is a PEFT adapter: whether ``files`` contains an adapter's configuration."""
        names = (os.path.join(file, _ADAPTER_CONFIG) if os.path.isdir(file) else file for file in self.files)
        return any(os.path.basename(name) == _ADAPTER_CONFIG and os.path.exists(name) for name in names)

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `SafetensorsStorageWriter`."""
        return {field.name: getattr(self, field.name) for field in fields(ModelOptions)}

    def stored_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype in which tensors of ``dtype`` are written."""
        return self.dtype if self.dtype is not None and dtype.is_floating_point and dtype != PAIRS else dtype


class _Chunk(NamedTuple):
    """A part of a tensor, and the rank that holds it."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    rank: int


class _Saved(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[_Chunk]


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor of the model."""

    key: str  # in the files
    dtype: torch.dtype  # as written
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]  # of the tensors in the state dict that it is made of
    chunks: tuple[_Chunk, ...]


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The files of a model, in order."""

    files: tuple[SafetensorsLayout[ModelTensor], ...]
    dropped: frozenset[str]  # names, in the state dict, of tensors that are tied to others
    ranks: int  # number of ranks that write


def plan_model(
    plans: Sequence[SavePlan],
    options: ModelOptions,
    *,
    path: str,
    order: Mapping[str, int],
    ties: Sequence[Mapping[str, str]],
) -> ModelPlan:
    """Lays out the model of the ranks' plans.

    ``order`` has the number of each name in the coordinator's state dict. ``ties`` maps, for each rank, the name of
    each tied tensor to the name of the tensor that it is tied to. Raises `WriteError`, naming keys, if the format
    cannot hold the model, or two tensors would have the same name.
    """
    tensors: dict[str, _Saved] = {}
    objects: dict[str, None] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data = item.tensor_data
            if item.type == WriteItemType.BYTE_IO or data is None:
                objects[item.index.fqn] = None
                continue
            known = tensors.setdefault(item.index.fqn, _Saved(data.properties.dtype, tuple(data.size), []))
            known.chunks.append(_Chunk(tuple(data.chunk.offsets), tuple(data.chunk.sizes), rank))
    if objects:
        raise WriteError(
            f"{path}: {listed(list(objects))} {'is' if len(objects) == 1 else 'are'} not of tensors, which "
            f"safetensors cannot hold. Leave {'it' if len(objects) == 1 else 'them'} out of the state dict."
        )
    dropped = _dropped(ties, tensors)
    kept = sorted((fqn for fqn in tensors if fqn not in dropped), key=lambda fqn: order.get(fqn, len(order)))
    found = []
    layouts: dict[int, ChunkLayout] = {}
    for key, placed in _placed({fqn: tensors[fqn].shape for fqn in kept}, options.rename, path).items():
        sources = [tensors[box.source] for box in placed.boxes]
        dtypes = {options.stored_dtype(source.dtype) for source in sources}
        if len(dtypes) > 1:
            raise WriteError(
                f"{path}: {placed.boxes[0].source!r} and others become {key!r}, and "
                f"differ in their dtypes. Convert them to one dtype."
            )
        (stored,) = dtypes
        if (fault := fault_of(key, stored, placed.shape)) is not None:
            raise WriteError(f"{path}: {placed.boxes[0].source!r} {fault}")
        pairs = zip(placed.boxes, sources, strict=True)
        chunks = [chunk for box, source in pairs for chunk in _carried(box, source, layouts)]
        found.append(ModelTensor(key, stored, placed.shape, tuple(placed.boxes), tuple(chunks)))
    files = tuple(lay_out(of_file) for of_file in shards(found, options.max_shard_bytes))
    return ModelPlan(files, dropped, len(plans))


def _carried(box: Box, saved: _Saved, layouts: dict[int, ChunkLayout]) -> list[_Chunk]:
    """Returns the chunks of a saved tensor in a box, with their offsets in the file's tensor.

    ``layouts`` caches the layout of each saved tensor by its `id`, because every box of the tensor needs the layout.
    """
    if box.is_same:
        return saved.chunks
    if (layout := layouts.get(id(saved))) is None:
        pairs = [(chunk.offset, chunk.size) for chunk in saved.chunks]
        layout = layouts[id(saved)] = ChunkLayout.of(saved.shape, pairs)
    found = []
    for number in layout.touched_by(box.there):
        chunk = saved.chunks[number]
        if (region := box.carry(Region(chunk.offset, chunk.size))) is not None:
            found.append(_Chunk(*region, chunk.rank))
    return found


def _dropped(ties: Sequence[Mapping[str, str]], tensors: Mapping[str, object]) -> frozenset[str]:
    """Returns the names of tensors that are tied to others, and are not written.

    Ranks that hold elements of such a tensor check that it is tied on that rank. For each dropped name, a name that it
    is tied to stays, even if ranks list the names in different orders.
    """
    dropped: dict[str, str] = {}
    for fqn, first in (tie for of_rank in ties for tie in of_rank.items()):
        while first in dropped:
            first = dropped[first]
        if fqn in tensors and first in tensors and fqn != first:
            dropped[fqn] = first
    return frozenset(dropped)


def _placed(shapes: Mapping[str, tuple[int, ...]], rules: Rules, path: str) -> dict[str, Placed]:
    """Returns the tensors of the files.

    Raises `WriteError` if two tensors would have one name, a rule matches no tensor, or a load could not reverse a
    rule.
    """
    renaming = Renaming(rules)
    try:
        placed = place(renaming, shapes)
        wrong = wrong_way_back(renaming, placed) if rules else None
    except ValueError as error:
        raise WriteError(f"{path}: {error}") from None
    if renaming.unused:
        unused = listed(list(map(str, renaming.unused)))
        raise WriteError(f"{path}: no tensor matches {unused}, which rename= has. Remove these rules.")
    if wrong is not None:
        raise WriteError(
            f"{path}: {wrong[0]!r} would be {wrong[1]!r}, and a load with the same rename= would take that for "
            f"{wrong[2]!r}: make rename= reversible: every new name must map back to one key"
        )
    return placed


# --- the layout for the ranks -----------------------------------------------------------------------------------------
#
# Names are sent as hashes, and shardings as rules, so that the layout is small for any number of ranks.


class ChunkOwners(NamedTuple):
    """A sharding: the chunks of tensors of one shape, and the rank of each chunk."""

    chunks: Layout
    ranks: list[Run]


class TensorPlace(NamedTuple):
    """The location of a tensor of the state dict, or of a part of it, inside a larger or reshaped tensor of a file."""

    shape: tuple[int, ...]  # of the tensor in the file
    box: Box  # without the name of its source


@dataclass(frozen=True, slots=True, eq=False)
class RankLayout:
    """The layout of all files, the same for all ranks.

    Columns have one row per tensor, in ascending order of ``hashes``. A tensor that goes to several tensors of the
    files has several rows.
    """

    save_id: str  # the coordinator's
    ranks: int  # number of ranks that write
    files: tuple[SharedFilePart, ...]
    headers: tuple[int, ...]  # the size of each file's header
    hashes: np.ndarray  # column: hash of the tensor's name
    file: Integers  # column: number of the tensor's file; -1 if the tensor is not written
    start: Integers  # column: offset in the file
    dtype: Integers  # column: index into ``dtypes``
    dtypes: tuple[torch.dtype, ...]
    owner: Integers  # column: index into ``owners``; -1 if the tensor has no elements, or is not written
    owners: tuple[ChunkOwners, ...]  # the shardings; empty if no block of a file has a single writer
    place: Integers  # column: index into ``places``; -1 if the file has the tensor unchanged
    places: tuple[TensorPlace, ...]

    @property
    def nbytes(self) -> int:
        """Total size of the files."""
        return sum(part.file.nbytes for part in self.files)

    @property
    def has_granules(self) -> bool:
        """Returns whether some file is written in blocks of one writer each."""
        return self.ranks > 1 and any(part.granule > 1 for part in self.files)

    def dropped(self, fqns: Iterable[str]) -> list[str]:
        """Returns the names among ``fqns`` that are not written, because their tensors are tied to others."""
        hashes = set(self.hashes[self.file < 0].tolist())
        return [fqn for fqn in fqns if _hash(fqn) in hashes] if hashes else []

    def find(self, fqns: Sequence[str]) -> list[range]:
        """Returns the rows of each tensor. Raises `KeyError` if a name is unknown."""
        wanted = np.array([_hash(fqn) for fqn in fqns], dtype=np.uint64)
        first, stop = (np.searchsorted(self.hashes, wanted, side).tolist() for side in ("left", "right"))
        for fqn, a, b in zip(fqns, first, stop, strict=True):
            if a == b:
                raise KeyError(fqn)
        return list(map(range, first, stop))


def rank_layout(plan: ModelPlan, files: Sequence[SharedFilePart], save_id: str) -> RankLayout:
    """Returns the layout for the ranks. The files must have been begun."""
    with_owners = plan.ranks > 1 and any(part.granule > 1 for part in files)
    owners: dict[object, int] = {}
    rows: list[ChunkOwners] = []
    dtypes: dict[torch.dtype, int] = {}
    places: dict[TensorPlace, int] = {}
    hashes, columns = [], []
    for number, layout in enumerate(plan.files):
        for tensor, start in zip(layout.tensors, layout.starts, strict=True):
            owner = -1
            if with_owners and 0 not in tensor.shape:
                sharding = tensor.shape, tensor.chunks
                if (known := owners.get(sharding)) is None:
                    known = owners[sharding] = len(rows)
                    chunks = ChunkLayout.of(tensor.shape, [(begin, size) for begin, size, _ in tensor.chunks])
                    rows.append(ChunkOwners(chunks.to_row(), runs_of(np.array([rank for *_, rank in tensor.chunks]))))
                owner = known
            dtype = dtypes.setdefault(tensor.dtype, len(dtypes))
            for box in tensor.boxes:
                where = -1
                if not box.is_same:
                    where = places.setdefault(TensorPlace(tensor.shape, box._replace(source="")), len(places))
                hashes.append(_hash(box.source))
                columns.append((number, start, dtype, owner, where))
    for fqn in plan.dropped:
        hashes.append(_hash(fqn))
        columns.append((-1, 0, 0, -1, -1))
    sorted_hashes = np.array(hashes, dtype=np.uint64)
    order = np.argsort(sorted_hashes, kind="stable")
    file, start, dtype_column, owner_column, place_column = np.array(columns, dtype=np.int64).reshape(-1, 5)[order].T
    return RankLayout(
        save_id,
        plan.ranks,
        tuple(files),
        tuple(len(layout.header) for layout in plan.files),
        sorted_hashes[order],
        file,
        start,
        dtype_column,
        tuple(dtypes),
        owner_column,
        tuple(rows),
        place_column,
        tuple(places),
    )


def _hash(fqn: str) -> int:
    return xxhash.xxh3_64_intdigest(fqn.encode("utf-8", "surrogatepass"))


class GranuleOwners:
    """The assignment of the blocks of files to the ranks that write them.

    Every rank computes the same assignment without communication: the ranks that hold bytes of a block's first tensor
    take turns from block to block. The coordinator writes the blocks that begin in the header.
    """

    def __init__(self, layout: RankLayout) -> None:
        self._layout = layout
        rows = np.flatnonzero(layout.owner >= 0)
        self._of_file: list[tuple[Integers, Integers]] = []
        for number in range(len(layout.files)):
            here = rows[layout.file[rows] == number]
            here = here[np.argsort(layout.start[here], kind="stable")]
            self._of_file.append((here, layout.start[here]))
        self._shardings: dict[int, tuple[ChunkLayout, Integers]] = {}
        self._known: dict[tuple[int, int], int] = {}

    def owner(self, file: int, granule: int) -> int:
        """Returns the rank that writes the block number ``granule`` of a file."""
        if (known := self._known.get((file, granule))) is None:
            known = self._known[file, granule] = self._find(file, granule)
        return known

    def _find(self, file: int, granule: int) -> int:
        layout = self._layout
        size = layout.files[file].granule
        begin, end = granule * size, min((granule + 1) * size, layout.files[file].file.nbytes)
        if begin < layout.headers[file]:
            return 0
        rows, starts = self._of_file[file]
        position = int(np.searchsorted(starts, begin, side="right")) - 1
        row = int(rows[position])  # other rows with this start are of the same tensor of the file, or have no elements
        number = int(layout.owner[row])
        if number not in self._shardings:
            sharding = layout.owners[number]
            self._shardings[number] = ChunkLayout.from_row(sharding.chunks), expand(sharding.ranks)
        chunks, ranks = self._shardings[number]
        itemsize = layout.dtypes[int(layout.dtype[row])].itemsize
        count: int = math.prod(chunks.shape)
        first = (begin - int(starts[position])) // itemsize
        stop = min(count, max(first + 1, (end - int(starts[position])) // itemsize))
        holders: set[int] = set()
        for region in regions_of_range(first, stop, chunks.shape):
            holders.update(ranks[chunks.touched_by(region)].tolist())
        candidates = sorted(holders)
        return int(candidates[granule % len(candidates)])
