"""One process plays many ranks, to measure DCP's hooks on one rank and on the coordinator, without any data.

Only this module knows the internals of the storage writers. Each rank's results are made up, and the data files have
the right sizes, but no contents.
"""

from __future__ import annotations

import functools
import gc
import os
import pickle
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, empty
from torch.testing._internal.distributed.fake_pg import FakeStore

from dcp_tensorizer import SavePlanner, TensorizerStorageReader, TensorizerStorageWriter
from dcp_tensorizer._index.schema import item_key
from dcp_tensorizer._planning.columns import columns_of
from dcp_tensorizer._planning.plan import CompactPlan, History, Items
from dcp_tensorizer._saving.write_plan import Item, plan_files, write_results
from dcp_tensorizer._tensor_file.names import StoredItem, block_size
from dcp_tensorizer._writer_process.protocol import FileRequest, FileResult, WriteDone

from .model import Model, Piece, pieces
from .summary import PLANNED, TORCH
from .watch import Opens, bytes_read, limits, peak, reset_peak

_ALIGNMENT = 64
_FILE_HEAD = 300_000  # bytes before the first tensor of a tensorizer file, for its index
_OBJECT_BYTES = 1_000


def write_checkpoint(contender: str, folder: Path, ranks: int, model: Model) -> None:
    with _save(contender, folder, ranks, model) as save:
        save.run()


def time_coordination(contender: str, folder: Path, ranks: int, model: Model) -> dict[str, dict[str, float]]:
    """Measures a first save and a repeated one, without writing the data; leaves the checkpoint.

    Returns:
        For each: ``coordinator`` and ``rank``, the seconds there; ``sent``, the bytes from each rank; ``broadcast``,
        the bytes of the metadata that DCP then sends to all ranks.
    """
    with _save(contender, folder, ranks, model) as save:
        return {"first": save.run(), "repeat": save.run()}


def time_load(contender: str, folder: Path, rank: int, ranks: int, model: Model) -> dict[str, float]:
    """Measures what one rank does before it reads the first byte of a tensor, with the same sharding as the save.

    Returns:
        ``seconds``; ``read``, bytes; ``memory``, the peak in bytes beyond the memory before the load; ``opened``, the
        number of opened files of metadata.
    """
    state, opens = targets(rank, ranks, model), _opens()
    reader = _reader(contender, folder)
    gc.collect()
    read_before, memory_before, started = bytes_read(), reset_peak(), time.perf_counter()
    with limits(), opens.of(folder):
        _load(reader, state, rank)
    assert opens.first_byte_at is not None, "it read nothing"
    return {
        "seconds": opens.first_byte_at - started,
        "read": bytes_read() - read_before,
        "memory": peak() - memory_before,
        "opened": opens.count,
    }


@functools.cache
def _opens() -> Opens:
    return Opens()


def targets(rank: int, ranks: int, model: Model) -> dict[str, Any]:
    """Returns a state to load into: tensors with untouched memory, and no objects, which DCP would read first."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    values: dict[tuple[str, ...], torch.Tensor] = {
        path: empty(shape, device_mesh=mesh, placements=[Shard(0)]) for path, shape in model.tensors().items()
    }
    state: dict[str, Any] = {}
    for path, value in (values | {path: torch.empty(()) for path in model.scalars()}).items():
        at = state
        for part in path[:-1]:
            at = at.setdefault(part, {})
        at[path[-1]] = value
    return state


def _reader(contender: str, folder: Path) -> Any:
    return FileSystemReader(folder) if contender == TORCH else TensorizerStorageReader(folder)


def _load(reader: Any, state: dict[str, Any], rank: int) -> None:
    """Calls DCP's hooks in their order, up to the read."""
    planner, is_coordinator = DefaultLoadPlanner(), rank == 0
    reader.reset()
    metadata = reader.read_metadata()
    planner.set_up_planner(state, metadata, is_coordinator)
    reader.set_up_storage_reader(metadata, is_coordinator, rank=rank, use_collectives=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()


@contextmanager
def _save(contender: str, folder: Path, ranks: int, model: Model) -> Iterator[_Save]:
    writer = _Torch(folder) if contender == TORCH else _Ours(folder)
    try:
        yield _Save(writer, ranks, model, _Plans(ranks, model) if contender == PLANNED else None)
    finally:
        writer.storage_writer.close()


class _Save:
    """The saves of one writer, with all of its ranks in this process."""

    def __init__(self, writer: _Writer, ranks: int, model: Model, plans: _Plans | None) -> None:
        self._writer = writer
        self._plans = plans
        self._ranks = ranks
        self._model = model

    def run(self) -> dict[str, float]:
        self._writer.begin()
        seconds, sent = [], []
        for rank in range(self._ranks):
            written = self._writer.written(rank, list(pieces(self._model, rank, self._ranks)))
            started = time.perf_counter()
            sent.append(pickle.dumps(self._writer.results(written)))
            seconds.append(time.perf_counter() - started)
        metadata = describe(self._model, self._ranks) if self._plans is None else self._plans.global_plan()
        gc.collect()
        with limits():
            started = time.perf_counter() - (0.0 if self._plans is None else self._plans.seconds)
            self._writer.storage_writer.finish(metadata, [pickle.loads(results) for results in sent])
            coordinator = time.perf_counter() - started
        return {
            "coordinator": coordinator,
            "rank": statistics.median(seconds),
            "sent": statistics.median(map(len, sent)),
            "broadcast": len(pickle.dumps(metadata)),
        }


def describe(model: Model, ranks: int) -> Metadata:
    """Returns DCP's metadata, as the planner makes it on the coordinator."""
    found: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    shapes = model.tensors() | dict.fromkeys(model.scalars(), ())
    for rank in range(ranks):
        for piece in pieces(model, rank, ranks):
            key = piece.key
            if key not in found:
                paths[key] = piece.path
                found[key] = BytesStorageMetadata()
                if piece.kind == "tensor":
                    size = torch.Size(shapes[piece.path])
                    found[key] = TensorStorageMetadata(_properties(size), size, [])
            if piece.kind == "tensor":
                found[key].chunks.append(ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.shape)))
    return Metadata(found, planner_data=paths)


@functools.cache
def _properties(shape: tuple[int, ...]) -> TensorProperties:
    """Returns the properties of a tensor that is sharded by rows: they have the strides of the whole tensor."""
    return TensorProperties.create_from_tensor(torch.empty(shape, device="meta"))


class _Plans:
    """Plans of all ranks, made as `SavePlanner` makes them, with a separate history for each rank.

    Attributes:
        seconds: The coordinator's time for the last global plan, from decoding plans to encoding answers.
    """

    def __init__(self, ranks: int, model: Model) -> None:
        self.seconds = 0.0
        shapes = model.tensors() | dict.fromkeys(model.scalars(), ())
        self._columns = []
        for rank in range(ranks):
            own = {piece.path: piece for piece in pieces(model, rank, ranks)} | {
                path: Piece(path, "tensor" if path in shapes else "object", (), (), 0)
                for path in (*model.scalars(), *model.objects())
            }
            paths = {piece.key: path for path, piece in own.items()}
            self._columns.append(columns_of((_write_item(p, shapes.get(p.path)) for p in own.values()), paths)[0])
        self._histories = [History() for _ in range(ranks)]
        self._planner = SavePlanner()

    def global_plan(self) -> Metadata:
        """Makes the global plan of the pickled plans of all ranks; returns the coordinator's metadata."""
        sent = []
        for columns, history in zip(self._columns, self._histories, strict=True):
            history.begin()
            sent.append(pickle.dumps(CompactPlan.of(Items(columns, history=history), None)))
        gc.collect()
        with limits():
            started = time.perf_counter()
            plans, metadata = self._planner.create_global_plan([pickle.loads(plan) for plan in sent])
            answers = [pickle.dumps(plan) for plan in plans]
            self.seconds = time.perf_counter() - started
        for answer, history in zip(map(pickle.loads, answers), self._histories, strict=True):
            history.answered(answer.items.reference)
        return metadata


def _write_item(piece: Piece, shape: tuple[int, ...] | None) -> WriteItem:
    if shape is None:
        return WriteItem(MetadataIndex(piece.key), WriteItemType.BYTE_IO)
    chunk = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.shape))
    kind = WriteItemType.SHARD if shape else WriteItemType.TENSOR
    data = TensorWriteData(chunk, _properties(shape), torch.Size(shape))
    return WriteItem(MetadataIndex(piece.key, chunk.offsets), kind, tensor_data=data)


class _Writer(Protocol):
    """A storage writer, and results as if its ranks had written their data."""

    @property
    def storage_writer(self) -> Any:
        """The writer."""

    def begin(self) -> None:
        """Calls the coordinator's hooks up to the write."""

    def written(self, rank: int, own: list[Piece]) -> Any:
        """Makes what a rank knows when its data is durable."""

    def results(self, written: Any) -> list[WriteResult]:
        """Returns what the rank sends to the coordinator."""


def _index(piece: Piece) -> MetadataIndex:
    is_object = piece.kind == "object"
    return MetadataIndex(piece.key) if is_object else MetadataIndex(piece.key, torch.Size(piece.offsets), piece.number)


def _tensor(piece: Piece) -> torch.Tensor:
    """Returns a tensor of the right size. Only small tensors have memory."""
    if piece.kind == "object":
        return torch.zeros(_OBJECT_BYTES, dtype=torch.uint8)
    return torch.empty(piece.shape, device="meta") if piece.shape else torch.zeros(())


class _Ours:
    """This package's writer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._save_id = ""
        self.storage_writer = TensorizerStorageWriter(folder)

    def begin(self) -> None:
        writer = self.storage_writer
        self._save_id = writer.storage_meta().save_id
        writer.set_up_storage_writer(True, rank=0, use_collectives=True)
        (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(SavePlan([]))])
        writer.write_data(plan, DefaultSavePlanner()).wait()

    def written(self, rank: int, own: list[Piece]) -> tuple[list[Item], WriteDone, int]:
        items = [Item(item_key(_index(p)), p.key, p.kind, _tensor(p), is_whole=not p.offsets) for p in own]
        requests = plan_files((item.source() for item in items if item.has_bytes), rank, self._save_id)
        files = tuple(map(_file, requests))
        for file in files:
            with open(self._folder / file.name, "wb") as created:
                created.truncate(file.nbytes)
        return items, WriteDone(files, 0.0, 0.0, 0.0), rank

    def results(self, written: tuple[list[Item], WriteDone, int]) -> list[WriteResult]:
        return write_results(*written)


def _file(request: FileRequest) -> FileResult:
    """Makes the result for a complete file, with random digests."""
    items, offset = [], _FILE_HEAD
    for source in request.tensors:
        name, nbytes = source.name, source.nbytes
        blocks = -(-nbytes // block_size(nbytes))
        digests = os.urandom(8 * (blocks + (blocks > 1)))
        items.append(StoredItem(request.name, name, offset, nbytes, source.dtype, source.kind, digests))
        offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return FileResult(request.name, offset, tuple(items))


class _Torch:
    """torch's own writer. It makes its results while it writes, so nothing is left for `results`."""

    def __init__(self, folder: Path) -> None:
        self.storage_writer = FileSystemWriter(folder)

    def begin(self) -> None:
        writer = self.storage_writer
        writer.set_up_storage_writer(True, rank=0, use_collectives=True)
        writer.prepare_local_plan(SavePlan([]))

    def written(self, rank: int, own: list[Piece]) -> list[WriteResult]:
        results, offset = [], 0
        for piece in own:
            nbytes = _tensor(piece).nbytes + _OBJECT_BYTES  # what torch.save adds to each tensor, roughly
            place = _StorageInfo(f"__{rank}_0.distcp", offset, nbytes)
            results.append(WriteResult(_index(piece), nbytes, place))
            offset += nbytes
        return results

    def results(self, written: list[WriteResult]) -> list[WriteResult]:
        return written
