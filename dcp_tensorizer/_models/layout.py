"""The layout of a model's files: the location of each tensor, and the rank that writes each block of a file.

Coordinator: the plans of all ranks -> `plan_model` -> `ModelPlan` -> `rank_layout` -> `RankLayout`, for all ranks.
"""

from __future__ import annotations

import functools
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

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
from .._runtime.validation import check_count, check_flags, check_paths, check_type, set_fields
from .._tensor_file.regions import Integers, Region, regions_of_range
from .._writer_process.shared_job import SharedFilePart
from ..errors import WriteError, listed

_ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The options of a model: see `SafetensorsStorageWriter`."""

    dtype: torch.dtype | None = None
    rename: Rules = field(default_factory=dict)
    max_shard_bytes: int = MAX_SHARD_BYTES
    files: Sequence[str | os.PathLike[str]] = ()  # becomes absolute paths
    overwrite: bool = False
    publish: Publish | None = None

    def __post_init__(self) -> None:
        check_flags(self)
        set_fields(
            self,
            rename=dict(check_type("rename", self.rename or {}, Mapping)),  # type: ignore[type-abstract]
            files=tuple(os.path.abspath(os.path.expanduser(file)) for file in check_paths("files", self.files)),
            publish=None if self.publish is None else check_type("publish", self.publish, Publish),
            max_shard_bytes=check_count("max_shard_bytes", self.max_shard_bytes),
        )
        if self.publish is not None:
            if self.is_adapter:
                raise ValueError(
                    f"publish= cannot publish adapters, and files= contains {_ADAPTER_CONFIG}. Omit publish=."
                )
            zstd()
        if self.dtype is not None:
            check_type("dtype", self.dtype, torch.dtype)
            if not self.dtype.is_floating_point or self.dtype == PAIRS or self.dtype not in NAMES:
                names = ", ".join(sorted(str(dtype) for dtype in NAMES if dtype.is_floating_point and dtype != PAIRS))
                raise ValueError(
                    f"dtype must be a floating-point dtype of safetensors, got {self.dtype}. Use one of {names}."
                )
        Renaming(self.rename).inverse()

    @property
    def is_adapter(self) -> bool:
        """Returns whether ``files`` contains a PEFT adapter's configuration."""
        names = (os.path.join(file, _ADAPTER_CONFIG) if os.path.isdir(file) else file for file in self.files)
        return any(os.path.basename(name) == _ADAPTER_CONFIG and os.path.exists(name) for name in names)

    def arguments(self) -> dict[str, Any]:
        """Returns the options as keyword arguments of `SafetensorsStorageWriter`."""
        return {field.name: getattr(self, field.name) for field in fields(ModelOptions)}

    def stored_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype if self.dtype is not None and dtype.is_floating_point and dtype != PAIRS else dtype


_Chunk = tuple[Region, int]
"""A part of a tensor, and the rank that holds it."""


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor of the state dict, or of the files."""

    key: str
    dtype: torch.dtype  # for a tensor of the files, the dtype in which it is written
    shape: tuple[int, ...]
    chunks: Sequence[_Chunk]
    boxes: tuple[Box, ...] = ()  # for a tensor of the files: its parts, each from a tensor of the state dict


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The plan of a model's files. A file's number is its index in ``files``."""

    files: tuple[SafetensorsLayout[ModelTensor], ...]
    dropped: frozenset[str]  # names, in the state dict, of tied tensors that are not written
    ranks: int  # number of ranks that write


def plan_model(
    plans: Sequence[SavePlan],
    options: ModelOptions,
    *,
    path: str,
    order: Mapping[str, int],
    ties: Sequence[Mapping[str, str]],
) -> ModelPlan:
    """Lays out the files of the model that the ranks' plans make up.

    ``order`` maps the names in the coordinator's state dict to their positions there. ``ties`` has a mapping for each
    rank, from the name of each tied tensor to the name of the tensor that it is tied to.
    """
    tensors: dict[str, ModelTensor] = {}
    chunks: dict[str, list[_Chunk]] = defaultdict(list)
    objects: dict[str, None] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data = item.tensor_data
            if item.type == WriteItemType.BYTE_IO or data is None:
                objects[item.index.fqn] = None
                continue
            fqn = item.index.fqn
            chunks[fqn].append((Region(tuple(data.chunk.offsets), tuple(data.chunk.sizes)), rank))
            if fqn not in tensors:
                tensors[fqn] = ModelTensor(fqn, data.properties.dtype, tuple(data.size), chunks[fqn])
    if objects:
        raise WriteError(
            f"{path}: {listed(list(objects))} {'is not a tensor' if len(objects) == 1 else 'are not tensors'}, and "
            f"safetensors holds only tensors. Leave {'it' if len(objects) == 1 else 'them'} out of the state dict."
        )
    dropped = _dropped(ties, tensors)
    kept = sorted((fqn for fqn in tensors if fqn not in dropped), key=lambda fqn: order.get(fqn, len(order)))
    found = []
    layouts: dict[str, ChunkLayout] = {}
    for key, placed in _placed({fqn: tensors[fqn].shape for fqn in kept}, options.rename, path).items():
        sources = [tensors[box.source] for box in placed.boxes]
        dtypes = {options.stored_dtype(source.dtype) for source in sources}
        if len(dtypes) > 1:
            raise WriteError(
                f"{path}: {placed.boxes[0].source!r} and others become {key!r}, but have the dtypes "
                f"{' and '.join(sorted(map(str, dtypes)))}. Convert them to one dtype."
            )
        (stored,) = dtypes
        if (fault := fault_of(key, stored, placed.shape)) is not None:
            renamed_from = "" if placed.boxes[0].source == key else f" (renamed from {placed.boxes[0].source!r})"
            raise WriteError(f"{path}: {key!r}{renamed_from} {fault}")
        pairs = zip(placed.boxes, sources, strict=True)
        carried = tuple(chunk for box, source in pairs for chunk in _carried(box, source, layouts))
        found.append(ModelTensor(key, stored, placed.shape, carried, tuple(placed.boxes)))
    try:
        files = tuple(lay_out(of_file) for of_file in shards(found, options.max_shard_bytes))
    except ValueError as error:
        raise WriteError(f"{path}: {error}") from None
    return ModelPlan(files, dropped, len(plans))


def _carried(box: Box, source: ModelTensor, layouts: dict[str, ChunkLayout]) -> Sequence[_Chunk]:
    """Returns the parts of a source tensor's chunks that are in a box, as regions of the file's tensor.

    ``layouts`` caches the layouts by key: several boxes may have the same source tensor.
    """
    if box.is_same:
        return source.chunks
    if (layout := layouts.get(source.key)) is None:
        layout = layouts[source.key] = ChunkLayout.of(source.shape, [region for region, _ in source.chunks])
    touched = (source.chunks[number] for number in layout.touched_by(box.there))
    carried = ((box.carry(region), rank) for region, rank in touched)
    return [(region, rank) for region, rank in carried if region is not None]


def _dropped(ties: Sequence[Mapping[str, str]], tensors: Mapping[str, object]) -> frozenset[str]:
    """Returns the names of tensors that are tied to others, and are not written.

    Each rank that holds elements of such a tensor checks that the tensor is tied on that rank. For each dropped name, a
    name that it is tied to is written, even if ranks list the names in different orders.
    """
    dropped: dict[str, str] = {}
    for fqn, first in (tie for of_rank in ties for tie in of_rank.items()):
        while first in dropped:
            first = dropped[first]
        if fqn in tensors and first in tensors and fqn != first:
            dropped[fqn] = first
    return frozenset(dropped)


def _placed(shapes: Mapping[str, tuple[int, ...]], rules: Rules, path: str) -> dict[str, Placed]:
    """Raises `WriteError` if two tensors would have one name, a rule matches no tensor or one of unsuitable shape, or a
    load could not reverse the rules.
    """
    renaming = Renaming(rules)
    try:
        placed = place(renaming, shapes)
        wrong = wrong_way_back(renaming, placed) if rules else None
    except ValueError as error:
        raise WriteError(f"{path}: {error}") from None
    if renaming.unused:
        unused = listed(list(map(str, renaming.unused)))
        raise WriteError(f"{path}: no tensor matches these rules of rename=: {unused}. Pass rename= without them.")
    if wrong is not None:
        raise WriteError(
            f"{path}: {wrong[0]!r} would become {wrong[1]!r}, which a load with the same rename= would map back to "
            f"{wrong[2]!r}. Make rename= reversible: every new name must map back to one key."
        )
    return placed


# --- the layout for the ranks -----------------------------------------------------------------------------------------
#
# Names are sent as hashes, and shardings as runs of numbers, so that the layout is small for any number of ranks.


@dataclass(frozen=True, slots=True, eq=False)
class RankLayout:
    """The layout of all files, the same for all ranks.

    Columns have one row for each box of a tensor of the files, and one for each tensor of the state dict that is not
    written. The rows are in ascending order of ``hashes``. Several rows may be of one tensor of the state dict.
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
    sharding: Integers  # column: index into ``shardings``; -1 if the tensor has no elements, or is not written
    shardings: tuple[tuple[Layout, list[Run]], ...]  # chunks and their ranks; empty if no block needs a single writer
    box: Integers  # column: index into ``boxes``; -1 if the file has the tensor unchanged
    boxes: tuple[tuple[tuple[int, ...], Box], ...]  # the shape of a file's tensor, and a box in it, without the source

    @property
    def nbytes(self) -> int:
        return sum(part.file.nbytes for part in self.files)

    @property
    def has_granules(self) -> bool:
        """Returns whether any file is written in blocks that each have a single writer."""
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
    """Returns the layout for the ranks. ``files`` are the files that the coordinator has created."""
    has_owners = plan.ranks > 1 and any(part.granule > 1 for part in files)
    numbers: dict[object, int] = {}  # of shardings
    shardings: list[tuple[Layout, list[Run]]] = []
    dtypes: dict[torch.dtype, int] = {}
    boxes: dict[tuple[tuple[int, ...], Box], int] = {}
    hashes, columns = [], []
    for number, layout in enumerate(plan.files):
        for tensor, start in zip(layout.tensors, layout.starts, strict=True):
            sharding = -1
            if has_owners and 0 not in tensor.shape:
                sharding = numbers.setdefault((tensor.shape, tensor.chunks), len(shardings))
                if sharding == len(shardings):
                    chunks = ChunkLayout.of(tensor.shape, [region for region, _ in tensor.chunks])
                    shardings.append((chunks.to_row(), runs_of(np.array([rank for _, rank in tensor.chunks]))))
            dtype = dtypes.setdefault(tensor.dtype, len(dtypes))
            for box in tensor.boxes:
                in_file = -1 if box.is_same else boxes.setdefault((tensor.shape, box._replace(source="")), len(boxes))
                hashes.append(_hash(box.source))
                columns.append((number, start, dtype, sharding, in_file))
    for fqn in plan.dropped:
        hashes.append(_hash(fqn))
        columns.append((-1, 0, 0, -1, -1))
    sorted_hashes = np.array(hashes, dtype=np.uint64)
    order = np.argsort(sorted_hashes, kind="stable")
    file, start, dtype_column, sharding_column, box_column = np.array(columns, dtype=np.int64).reshape(-1, 5)[order].T
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
        sharding_column,
        tuple(shardings),
        box_column,
        tuple(boxes),
    )


def _hash(fqn: str) -> int:
    return xxhash.xxh3_64_intdigest(fqn.encode("utf-8", "surrogatepass"))


def granule_owners(layout: RankLayout, blocks: Iterable[tuple[int, int]]) -> Integers:
    """Returns the rank that writes each block. ``blocks`` has each block's file and its number in that file.

    Every rank computes the same result without communication. The number of a block selects one of the ranks that hold
    the block's part of its first tensor. The coordinator writes the blocks that begin in the header of their file.
    """
    rows = np.flatnonzero(layout.sharding >= 0)
    of_file = []  # the rows of each file in the order of their offsets, and the offsets
    for number in range(len(layout.files)):
        here = rows[layout.file[rows] == number]
        here = here[np.argsort(layout.start[here], kind="stable")]
        of_file.append((here, layout.start[here]))
    decoded: dict[int, tuple[ChunkLayout, Integers]] = {}

    @functools.cache
    def owner(file: int, granule: int) -> int:
        size = layout.files[file].granule
        begin, end = granule * size, min((granule + 1) * size, layout.files[file].file.nbytes)
        if begin < layout.headers[file]:
            return 0
        here, starts = of_file[file]
        position = int(np.searchsorted(starts, begin, side="right")) - 1
        row = here[position]  # other rows with this start are of the same tensor
        sharding = int(layout.sharding[row])
        if sharding not in decoded:
            chunks_row, ranks_row = layout.shardings[sharding]
            decoded[sharding] = ChunkLayout.from_row(chunks_row), expand(ranks_row)
        chunks, ranks = decoded[sharding]
        itemsize = layout.dtypes[int(layout.dtype[row])].itemsize
        first = (begin - int(starts[position])) // itemsize
        stop = min(math.prod(chunks.shape), max(first + 1, (end - int(starts[position])) // itemsize))
        regions = regions_of_range(first, stop, chunks.shape)
        holders = sorted({rank for region in regions for rank in ranks[chunks.touched_by(region)].tolist()})
        return int(holders[granule % len(holders)])

    return np.array([owner(*block) for block in blocks], dtype=np.int64)
