"""Tests of the pieces of a model's files: the ranks write each byte once, and one rank writes each block."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from dcp_tensorizer._models import pieces as model_pieces
from dcp_tensorizer._models.layout import ModelOptions, RankLayout, plan_model, rank_layout
from dcp_tensorizer._models.pieces import PieceExchange, fill_of, pieces_of, round_count, split
from dcp_tensorizer._storage.base import SharedFile
from dcp_tensorizer._tensor_file.regions import Region
from dcp_tensorizer._writer_process.shared_job import Pieces, SharedFilePart

Chunk = tuple[tuple[int, ...], tuple[int, ...]]


class Ranks:
    """Collectives of threads, each of which is a rank."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.box: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.box[rank] = value
        self.barrier.wait()
        values = list(self.box)
        self.barrier.wait()
        return values


class Member:
    """One rank of `Ranks`, with the methods of `RankGroup`."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank, self.size = ranks, rank, ranks.size

    def gather(self, numbers: Sequence[int]) -> np.ndarray:
        return np.array(self.ranks.exchange(self.rank, list(numbers)), dtype=np.int64)

    def swap(self, content: np.ndarray, sent: Sequence[int], received: Sequence[int]) -> np.ndarray:
        offsets = np.cumsum([0, *sent])
        assert offsets[-1] == len(content)
        parts = [content[a:b].copy() for a, b in itertools.pairwise(offsets)]
        came = [of_rank[self.rank] for of_rank in self.ranks.exchange(self.rank, parts)]
        assert [len(part) for part in came] == list(received)
        return np.concatenate(came)


def sharded(shape: tuple[int, ...], dim: int, count: int) -> list[Chunk]:
    """Returns even chunks along a dimension, as torch cuts them; the last ones may be smaller, or empty."""
    step = -(-shape[dim] // count)
    chunks = []
    for number in range(count):
        first = min(number * step, shape[dim])
        size = min(step, shape[dim] - first)
        start = tuple(first if d == dim else 0 for d in range(len(shape)))
        chunks.append((start, tuple(size if d == dim else n for d, n in enumerate(shape))))
    return chunks


def model(ranks: int) -> dict[str, tuple[tuple[int, ...], torch.dtype, dict[int, Chunk]]]:
    """Returns tensors, and the chunk that each rank has of them."""
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype, dict[int, Chunk]]] = {}
    for n in range(3):
        tensors[f"rows.{n}"] = (41, 130), torch.float32, dict(enumerate(sharded((41, 130), 0, ranks)))
        tensors[f"columns.{n}"] = (64, 37), torch.bfloat16, dict(enumerate(sharded((64, 37), 1, ranks)))
    tensors["few"] = (2, 3), torch.float32, dict(enumerate(sharded((2, 3), 0, ranks)))
    tensors["one"] = (), torch.int64, {ranks - 1: ((), ())}
    tensors["none"] = (0, 4), torch.float32, {0: ((0, 0), (0, 4))}
    tensors["whole"] = (999,), torch.uint8, {ranks // 2: ((0,), (999,))}
    grid = {}
    if ranks % 2 == 0:
        for rank in range(ranks):
            row, column = divmod(rank, ranks // 2)
            grid[rank] = (row * 8, column * 6), (8, 6)
        tensors["grid"] = (16, 3 * ranks), torch.float32, grid
    return tensors


def planned(ranks: int) -> list[SavePlan]:
    items: list[list[WriteItem]] = [[] for _ in range(ranks)]
    for key, (shape, dtype, chunks) in model(ranks).items():
        for rank, (start, size) in chunks.items():
            chunk = ChunkStorageMetadata(torch.Size(start), torch.Size(size))
            data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(shape))
            items[rank].append(WriteItem(MetadataIndex(key), WriteItemType.SHARD, tensor_data=data))
    return [SavePlan(of_rank) for of_rank in items]


def write(
    layout: RankLayout, headers: list[bytes], rank: int, ranks: Ranks, files: list[np.ndarray]
) -> tuple[Pieces, list[set[tuple[int, int]]]]:
    """Writes one rank's part; returns the pieces that the rank has written, and the blocks of each exchange."""
    contents: list[np.ndarray] = []
    found: list[Pieces] = []
    for key, (shape, dtype, chunks) in model(ranks.size).items():
        if rank not in chunks:
            continue
        ((number,),) = layout.find([key])
        start, size = chunks[rank]
        whole = values(key, shape, dtype)
        contents.append(np.ascontiguousarray(whole[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]))
        found.append(pieces_of(layout, number, shape, Region(start, size), len(contents) - 1))
    for number, header in enumerate(headers if rank == 0 else []):
        contents.append(np.frombuffer(header, dtype=np.uint8))
        columns = number, 0, len(header), len(contents) - 1, 0
        found.append(Pieces(*(np.array([column], dtype=np.int64) for column in columns)))

    def fill(source: int, start: int, memory: np.ndarray) -> None:
        memory[:] = contents[source].reshape(-1).view(np.uint8)[start : start + memory.nbytes]

    written = []

    def put(pieces: Pieces, give: Any) -> None:
        written.append(pieces)
        for file, offset, nbytes, source, start in zip(
            *(column.tolist() for column in (pieces.file, pieces.offset, pieces.nbytes, pieces.source, pieces.start)),
            strict=True,
        ):
            give(source, start, files[file][offset : offset + nbytes])

    member: Any = Member(ranks, rank)
    own, shared = split(Pieces.joined(found), layout)
    put(own, fill)
    exchanged: list[set[tuple[int, int]]] = []
    if layout.has_granules:
        exchange = PieceExchange(shared, layout, member, fill)
        for number in range(round_count(layout)):
            own, others, content = exchange.swap(number, member.gather(exchange.counts(number)))
            exchanged.append(blocks_of(own, layout) | blocks_of(others, layout))
            put(own, fill)

            def came(_: int, start: int, memory: np.ndarray, content: np.ndarray = content) -> None:
                memory[:] = content[start : start + memory.nbytes]

            put(others, came)
    return Pieces.joined(written), exchanged


def blocks_of(pieces: Pieces, layout: RankLayout) -> set[tuple[int, int]]:
    """Returns the blocks in which pieces begin: the number of the file, and the number in the file."""
    blocks = zip(pieces.file.tolist(), pieces.offset.tolist(), strict=True)
    return {(file, offset // layout.files[file].granule) for file, offset in blocks}


def values(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> np.ndarray:
    """Returns the elements of a tensor, as integers of their size."""
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[dtype.itemsize]
    return np.random.default_rng(len(key) + ord(key[0])).integers(0, 250, shape or None, dtype=kind).reshape(shape)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("granule", [1, 64, 4096, 1 << 20])
def test_each_byte_is_written_once_and_each_block_by_one_rank(
    ranks: int, granule: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of rows, columns and grids, uneven, empty and 0-dim, are exact after exchanges in several windows."""
    monkeypatch.setattr(model_pieces, "_WINDOW", 8192)
    plan = plan_model(planned(ranks), ModelOptions(max_shard_bytes=40_000), path="p", order={}, ties=[{}] * ranks)
    shared = [SharedFilePart(SharedFile(f"f{n}", "", of.nbytes, ""), granule) for n, of in enumerate(plan.files)]
    layout = rank_layout(plan, shared, "id")
    files = [np.full(of.nbytes, 255, dtype=np.uint8) for of in plan.files]
    together, found = Ranks(ranks), [Pieces.joined([])] * ranks
    exchanged: list[list[set[tuple[int, int]]]] = [[]] * ranks
    headers = [of.header for of in plan.files]

    def run(rank: int) -> None:
        found[rank], exchanged[rank] = write(layout, headers, rank, together, files)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(files) > 1
    for number, of in enumerate(plan.files):
        body = b"".join(values(t.key, t.shape, t.dtype).tobytes() for t in of.tensors)
        assert files[number].tobytes() == of.header + body
    assert sum(int(pieces.nbytes.sum()) for pieces in found) == layout.nbytes
    blocks = [set(zip(p.file.tolist(), (p.offset // granule).tolist(), strict=True)) for p in found]
    ends = [set(zip(p.file.tolist(), ((p.offset + p.nbytes - 1) // granule).tolist(), strict=True)) for p in found]
    for rounds in exchanged:  # a block of an object store is one part, which is sent whole
        assert sum(map(len, rounds)) == len(set().union(*rounds))
    if granule > 1:
        for rank in range(ranks):
            for other in range(rank):
                assert not (blocks[rank] | ends[rank]) & (blocks[other] | ends[other])


def test_converted_tensors_are_cached_while_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor is converted once while its parts are read in order, and again if it is read much later."""
    tensors = [torch.full((8,), float(number)) for number in range(7)]
    converted: list[float] = []

    def host_bytes(tensor: torch.Tensor) -> memoryview:
        converted.append(float(tensor[0]))
        return memoryview(tensor.view(torch.uint8).numpy()).cast("B")

    monkeypatch.setattr(model_pieces, "host_bytes", host_bytes)
    fill, memory = fill_of(tensors, [torch.bfloat16] * 7), np.zeros(8, dtype=np.uint8)
    for number in [*range(7), 0]:
        for start in (0, 8):
            fill(number, start, memory)
            assert torch.from_numpy(memory.copy()).view(torch.bfloat16).tolist() == [float(number)] * 4
    assert converted == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0]
