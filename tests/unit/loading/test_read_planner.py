"""Plans against a naive reference: executed on files in memory, they bring exactly what was asked for."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensorizer import TensorDeserializer

from dcp_tensorizer._format import layout as layout_module
from dcp_tensorizer._format.chunks import Region, covers, regions_of_range
from dcp_tensorizer._format.encoder import encode
from dcp_tensorizer._format.layout import INDEX_CAPACITY, StoredItem, block_size, index_entry_size, is_data_file_name
from dcp_tensorizer._format.tensorizer_file import lay_out
from dcp_tensorizer._loading.read_planner import (
    MAX_SCRATCH_BYTES,
    MAX_SEGMENTS,
    ReadLimits,
    ReadOperation,
    Segment,
    plan_reads,
)
from dcp_tensorizer._loading.read_target import ReadTarget
from dcp_tensorizer._memory.tensor_bytes import host_bytes
from dcp_tensorizer._saving import file_planner
from dcp_tensorizer._saving.file_planner import plan_files, stored_names
from dcp_tensorizer._storage.base import ReadTuning
from dcp_tensorizer._writer_process.messages import TensorSource

from ...support import BufferSink, filled, same

SAVE = "0" * 32
FILES = [f"__{rank}_0_{SAVE}.tensors" for rank in range(3)]
DTYPES = {1: "uint8", 2: "int16", 4: "float32", 8: "int64", 16: "complex128"}
NO_TENSOR = torch.empty(0)


@dataclass
class Limits:
    operation: int
    gap: int
    segments: int
    block: int
    times: int = 1  # as much may be read at once where it is read into its target

    @property
    def of_planner(self) -> ReadLimits:
        return ReadLimits(self.gap, self.times * self.operation, self.operation, self.segments)


REAL = Limits(MAX_SCRATCH_BYTES, ReadTuning.max_gap_bytes, MAX_SEGMENTS, layout_module._MIN_BLOCK)


@contextmanager
def blocks_of(nbytes: int) -> Iterator[None]:
    """Small blocks, so that small tensors have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_module, "_MIN_BLOCK", nbytes)
        yield


# --- a reference that knows nothing of runs, blocks and operations ---------------------------------------------------


def bytes_of_box(request: ReadTarget) -> np.ndarray:
    """The positions, in the tensor's data, of a region's bytes in C order."""
    elements = np.arange(math.prod(request.shape)).reshape(request.shape)
    part = elements[tuple(slice(a, a + n) for a, n in zip(request.region.start, request.region.size, strict=True))]
    return (part.reshape(-1, 1) * request.itemsize + np.arange(request.itemsize)).reshape(-1)


def contents_of_files(requests: Sequence[ReadTarget]) -> dict[str, np.ndarray]:
    ends: dict[str, int] = {}
    for request in requests:
        item = request.item
        ends[item.file] = max(ends.get(item.file, 0), item.offset + item.length)
    generator = np.random.default_rng(0)
    return {file: generator.integers(0, 256, end, dtype=np.uint8) for file, end in ends.items()}


def execute(operations: Sequence[ReadOperation], requests: Sequence[ReadTarget]) -> list[np.ndarray]:
    """Carries a plan out; fails where a byte of a target is never written, or is written with another one's value."""
    files = contents_of_files(requests)
    wanted = {request: bytes_of_box(request) for request in requests}
    targets = {request: np.full(positions.size, -1, dtype=np.int16) for request, positions in wanted.items()}
    for operation in operations:
        data = files[operation.file][operation.offset : operation.offset + operation.nbytes]
        assert data.size == operation.nbytes, "an operation reads past the end of its file"
        for segment in operation.segments:
            run = data[segment.offset - operation.offset :][: segment.nbytes]
            if segment.target_offset is not None:
                (request,) = segment.targets
                assert segment.target_offset >= 0
                targets[request][segment.target_offset : segment.target_offset + segment.nbytes] = run
                continue
            for request in segment.targets:
                inside = (wanted[request] >= segment.start) & (wanted[request] < segment.stop)
                targets[request][inside] = run[wanted[request][inside] - segment.start]
    for request, positions in wanted.items():
        assert (targets[request] >= 0).all(), f"{request} was not read in full"
        assert np.array_equal(targets[request], files[request.item.file][request.item.offset + positions])
    return list(targets.values())


def check_plan(requests: Sequence[ReadTarget], *, verify: bool, bounds: Limits) -> list[ReadOperation]:
    """Plans, executes, and checks every promise of the plan."""
    operations = plan_reads(requests, bounds.of_planner, verify=verify)
    execute(operations, requests)
    places = [(operation.file, operation.offset) for operation in operations]
    assert places == sorted(places)
    for a, b in itertools.pairwise(operations):
        assert a.file != b.file or a.offset + a.nbytes <= b.offset, "a byte is read twice"
    for operation in operations:
        assert len(operation.segments) <= bounds.segments
        largest = max(segment.nbytes for segment in operation.segments)
        alone = largest if len(operation.segments) == 1 else 0
        assert operation.nbytes <= max(bounds.times * bounds.operation, alone)
        scratch = sum(segment.nbytes for segment in operation.segments if segment.target_offset is None)
        assert scratch == operation.scratch_bytes <= max(bounds.operation, alone)
        for a, b in itertools.pairwise(operation.segments):
            assert 0 <= b.offset - (a.offset + a.nbytes) <= bounds.gap
        for segment in operation.segments:
            check_segment(segment, verify=verify, bounds=bounds)
    return operations


def check_segment(segment: Segment, *, verify: bool, bounds: Limits) -> None:
    step = block_size(segment.item.length)
    assert 0 <= segment.start < segment.stop <= segment.item.length
    most = bounds.operation * (1 if segment.target_offset is None else bounds.times)
    assert segment.nbytes <= (max(most, step) if verify else most)
    assert segment.targets, "bytes that nobody wants"
    if verify:
        assert segment.start % step == 0
        assert segment.stop % step == 0 or segment.stop == segment.item.length
    if segment.target_offset is not None:
        (request,) = segment.targets
        assert request.in_place
        positions = bytes_of_box(request)
        assert np.array_equal(
            positions[segment.target_offset : segment.target_offset + segment.nbytes],
            np.arange(segment.start, segment.stop),
        )


def longest_run_for_nothing(requests: Sequence[ReadTarget], operations: Sequence[ReadOperation], verify: bool) -> int:
    """The longest run of bytes that a plan reads though no request needs them (nor, with digests, their block)."""
    longest = 0
    needed = {file: np.zeros(data.size, dtype=bool) for file, data in contents_of_files(requests).items()}
    for request in requests:
        item, positions = request.item, bytes_of_box(request)
        if verify:
            step = block_size(item.length)
            for block in np.unique(positions // step):
                stop = min((block + 1) * step, item.length)
                needed[item.file][item.offset + block * step : item.offset + stop] = True
        else:
            needed[item.file][item.offset + positions] = True
    for operation in operations:
        wanted = np.flatnonzero(needed[operation.file][operation.offset : operation.offset + operation.nbytes])
        edges = np.concatenate(([-1], wanted, [operation.nbytes]))
        longest = max(longest, int(np.diff(edges).max()) - 1)
    return longest


# --- strategies ------------------------------------------------------------------------------------------------------


@st.composite
def regions(draw: st.DrawFn, shape: Sequence[int]) -> Region:
    bounds = [sorted(draw(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)))) for n in shape]
    return Region(tuple(a for a, _ in bounds), tuple(b - a + 1 for a, b in bounds))


@st.composite
def plans(draw: st.DrawFn) -> list[ReadTarget]:
    """Boxes of several tensors in several files; tensors lie in their files without overlapping, at odd offsets."""
    ends: Counter[str] = Counter()
    requests = []
    for _ in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
        itemsize = draw(st.sampled_from([1, 2, 4, 8, 16]))
        file = draw(st.sampled_from(FILES))
        length = math.prod(shape) * itemsize
        offset = ends[file] + draw(st.integers(0, 70))
        ends[file] = offset + length
        item = StoredItem(file, "t", offset, length, DTYPES[itemsize], "tensor", b"")
        for region in draw(st.lists(regions(shape), min_size=1, max_size=3)):
            requests.append(ReadTarget("t", item, shape, region, NO_TENSOR, draw(st.booleans())))
    return draw(st.permutations(requests))


small_limits = st.builds(
    Limits,
    times=st.sampled_from([1, 2, 5]),
    operation=st.sampled_from([16, 64, 256, 4096]),
    gap=st.sampled_from([0, 8, 64]),
    segments=st.sampled_from([1, 2, 512]),
    block=st.sampled_from([16, 48, 128]),
)


# --- reading ---------------------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(plans(), st.booleans(), small_limits)
def test_executing_a_plan_gives_exactly_the_boxes(requests: list[ReadTarget], verify: bool, small: Limits) -> None:
    """Any regions of any tensors, under any limits: bit-exact, no byte read twice, in order, within the bounds."""
    with blocks_of(small.block):
        check_plan(requests, verify=verify, bounds=small)


@given(plans())
def test_real_limits_read_small_tensors_of_a_file_at_once(requests: list[ReadTarget]) -> None:
    """Whatever lies within the largest gap of each other is one operation a file."""
    operations = check_plan(requests, verify=True, bounds=REAL)
    assert len(operations) == len({request.item.file for request in requests})


def request_of(
    shape: tuple[int, ...], region: Region, *, itemsize: int = 1, in_place: bool = False, at: int = 0
) -> ReadTarget:
    item = StoredItem(FILES[0], "t", at, math.prod(shape) * itemsize, DTYPES[itemsize], "tensor", b"")
    return ReadTarget("t", item, shape, region, NO_TENSOR, in_place)


@pytest.mark.parametrize("verify", [True, False])
def test_a_whole_tensor_goes_straight_to_its_target(verify: bool) -> None:
    """A large contiguous target is read into in operations of 8 MiB, without any scratch memory."""
    shape = (10 << 20,)
    operations = check_plan([request_of(shape, Region((0,), shape), in_place=True)], verify=verify, bounds=REAL)
    segments = [segment for operation in operations for segment in operation.segments]
    assert [segment.target_offset for segment in segments] == [segment.start for segment in segments]
    assert max(operation.nbytes for operation in operations) <= 8 << 20
    assert sum(operation.nbytes for operation in operations) == 10 << 20


def test_a_verified_row_slice_reads_at_most_two_blocks_more_than_it_needs() -> None:
    """Only the blocks at the ends of the slice go through scratch memory, the rest straight to the target."""
    shape = (1000, 1000)
    request = request_of(shape, Region((301, 0), (400, 1000)), itemsize=4, in_place=True)
    operations = check_plan([request], verify=True, bounds=REAL)
    segments = [segment for operation in operations for segment in operation.segments]
    step = block_size(request.item.length)
    assert sum(s.nbytes for s in segments) < 1_600_000 + 2 * step
    assert sum(s.nbytes for s in segments if s.target_offset is None) <= 2 * step
    assert sum(s.nbytes for s in segments if s.target_offset is not None) > 1_600_000 - 2 * step


def test_an_unverified_row_slice_reads_exactly_its_bytes() -> None:
    """Without digests, not a byte more than is wanted."""
    request = request_of((1000, 1000), Region((301, 0), (400, 1000)), itemsize=4, in_place=True)
    (operation,) = check_plan([request], verify=False, bounds=REAL)
    assert (operation.offset, operation.nbytes) == (301 * 4000, 400 * 4000)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), min_size=1, max_size=8),
    st.integers(0, 50),
    st.integers(1, 80),
)
def test_batches_are_the_operation(runs: list[tuple[int, int]], begin: int, most: int) -> None:
    """Every segment is in one, in order; each batch has as many as fit, and one that is too large is alone."""
    operation = ReadOperation("f")
    for gap, nbytes in runs:
        begin += gap if operation.segments else 0
        item = StoredItem("f", "t", begin, nbytes, "uint8", "tensor", b"")
        operation.add(Segment(item, 0, nbytes, (), 0))
        begin += nbytes
    batches = [operation.segments[batch] for batch in operation.batches(most)]
    assert [segment for batch in batches for segment in batch] == operation.segments
    sizes = [batch[-1].offset + batch[-1].nbytes - batch[0].offset for batch in batches]
    assert all(size <= most for size, batch in zip(sizes, batches, strict=True) if len(batch) > 1)
    for one, other in itertools.pairwise(batches):  # the next one's first segment did not fit
        assert other[0].offset + other[0].nbytes - one[0].offset > most


def test_overlapping_requests_share_one_read() -> None:
    """Two targets that want the same bytes (tied weights, replicas) have them read once."""
    shape = (1 << 20,)
    requests = [
        request_of(shape, Region((0,), shape), in_place=True),
        request_of(shape, Region((5,), (1000,)), in_place=True),
    ]
    operations = check_plan(requests, verify=True, bounds=REAL)
    assert sum(operation.nbytes for operation in operations) == 1 << 20


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    ("shape", "region"),
    [
        ((16, 1 << 20), Region((0, 0), (16, 1 << 18))),  # a few long rows, cut by column
        ((8, 256, 4096), Region((0, 32, 0), (8, 32, 4096))),  # experts, cut by row
        ((8, 256, 4096), Region((0, 32, 1024), (8, 32, 1024))),  # experts, cut by row and column
        ((2, 1 << 20, 4), Region((0, 0, 1), (2, 1, 2))),  # small inner gaps, a large outer one
    ],
    ids=["columns", "experts-rows", "experts-both", "two-levels"],
)
def test_what_lies_between_wanted_runs_is_not_read_where_it_is_long(
    shape: tuple[int, ...], region: Region, verify: bool
) -> None:
    """A slice that is many runs is not read as the one run that encloses it, when its gaps exceed the largest gap."""
    request = request_of(shape, region)
    operations = check_plan([request], verify=verify, bounds=REAL)
    assert longest_run_for_nothing([request], operations, verify) <= REAL.gap


@given(plans(), st.booleans(), small_limits)
@example([request_of((2, 50, 4), Region((0, 0, 1), (2, 1, 2)))], False, Limits(4096, 8, 512, 16))
def test_runs_for_nothing_are_bounded(requests: list[ReadTarget], verify: bool, small: Limits) -> None:
    """No operation reads a run longer than the largest gap that neither a request nor the digest of a block needs."""
    with blocks_of(small.block):
        operations = plan_reads(requests, small.of_planner, verify=verify)
        assert longest_run_for_nothing(requests, operations, verify) <= small.gap


def test_small_tensors_far_apart_are_read_apart() -> None:
    """A gap of 64 KiB is read over, a larger one is not."""
    small = Region((0,), (100,))
    near = [request_of((100,), small, at=0), request_of((100,), small, at=100 + REAL.gap)]
    far = [request_of((100,), small, at=0), request_of((100,), small, at=101 + REAL.gap)]
    assert len(check_plan(near, verify=True, bounds=REAL)) == 1
    assert len(check_plan(far, verify=True, bounds=REAL)) == 2


def test_an_operation_has_no_more_segments_than_one_preadv_takes() -> None:
    """2,000 small tensors in a row: several operations, with gaps counted no more than 1,024 buffers each."""
    requests = [request_of((10,), Region((0,), (10,)), at=11 * number) for number in range(2000)]
    operations = check_plan(requests, verify=True, bounds=REAL)
    assert [len(operation.segments) for operation in operations] == [512, 512, 512, 464]


def test_nothing_wanted_is_nothing_read() -> None:
    """An empty load needs no operation."""
    assert plan_reads([], ReadLimits(0), verify=True) == []


@st.composite
def partitions(draw: st.DrawFn, whole: Region, depth: int = 4) -> list[Region]:
    """Regions that fill one: it is cut in two again and again, along one dimension or another; a part may be empty."""
    if not depth or not whole.size or draw(st.booleans()):
        return [whole]
    dim = draw(st.integers(0, len(whole.size) - 1))
    at = draw(st.integers(0, whole.size[dim]))
    parts = []
    for begin, end in ((0, at), (at, whole.size[dim])):
        start, size = list(whole.start), list(whole.size)
        start[dim], size[dim] = start[dim] + begin, end - begin
        parts += draw(partitions(Region(tuple(start), tuple(size)), depth - 1))
    return parts


@given(data=st.data(), shape=st.lists(st.integers(1, 6), max_size=3).map(tuple))
def test_a_partition_covers_and_nothing_else_does(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Compared with counting how often each element is there: for partitions, and for what is damaged in them."""
    chunks = data.draw(partitions(Region((0,) * len(shape), shape)))
    assert covers(shape, chunks)
    number = data.draw(st.integers(0, len(chunks) - 1))
    changed = chunks[:number] + data.draw(st.lists(regions(shape), max_size=2)) + chunks[number + 1 :]
    times = np.zeros(shape, dtype=int)
    for chunk in changed:
        times[tuple(slice(a, a + n) for a, n in zip(chunk.start, chunk.size, strict=True))] += 1
    assert covers(shape, changed) == bool((times == 1).all())


def test_chunks_outside_their_tensor_do_not_cover() -> None:
    """However many elements they hold."""
    assert not covers((4,), [Region((0,), (2,)), Region((4,), (2,))])
    assert not covers((2, 2), [Region((-1, 0), (2, 2))])


def test_nothing_is_covered_by_nothing() -> None:
    """A tensor without elements needs no chunks, and may have some without elements."""
    assert covers((0, 3), [])
    assert covers((0, 3), [Region((0, 0), (0, 3))])
    assert not covers((1, 3), [])


def test_zero_dimensional_tensors_are_read_straight() -> None:
    """A 0-dim tensor is one element, in one direct segment."""
    request = request_of((), Region((), ()), itemsize=8, in_place=True, at=24)
    (operation,) = check_plan([request], verify=True, bounds=REAL)
    assert [(s.start, s.stop, s.target_offset) for s in operation.segments] == [(0, 8, 0)]


# --- regions --------------------------------------------------------------------------------------------------------


@given(st.data())
def test_boxes_of_a_range_cover_it_exactly_and_in_order(data: st.DataObject) -> None:
    """The regions' elements, one after the other, are the elements of the range; regions are few."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=4)))
    count = math.prod(shape)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, count), st.integers(0, count))))
    elements = np.arange(count).reshape(shape)
    found = list(regions_of_range(start, stop, shape))
    parts = [elements[tuple(slice(a, a + n) for a, n in zip(b.start, b.size, strict=True))] for b in found]
    assert np.concatenate([part.reshape(-1) for part in parts] or [[]]).tolist() == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@given(st.data())
def test_intersections_are_those_of_sets(data: st.DataObject) -> None:
    """The intersection of two regions holds exactly the elements that both hold; None if there are none."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=3)))
    a, b = data.draw(regions(shape)), data.draw(regions(shape))
    elements = np.arange(math.prod(shape)).reshape(shape)

    def members(region: Region | None) -> set[int]:
        if region is None:
            return set()
        return set(elements[tuple(slice(s, s + n) for s, n in zip(region.start, region.size, strict=True))].reshape(-1))

    assert members(a.intersect(b)) == members(a) & members(b)


# --- names and files -------------------------------------------------------------------------------------------------

any_text = st.text(st.characters(codec=None), max_size=8)


@given(st.lists(any_text | st.sampled_from(["", "\0", "\x1ea", "__item_0__", "__item_1__", "__item_1___", "a"])))
def test_stored_names_are_unique_and_storable(keys: list[str]) -> None:
    """Whatever the keys, each item has a name of its own that tensorizer can hold."""
    names = stored_names(keys)
    assert len(names) == len(keys)
    assert len(set(names)) == len(names)
    assert all(0 < len(name.encode()) <= 1100 and not name.startswith("\x1e") for name in names)


def test_ordinary_keys_are_stored_under_their_own_names() -> None:
    """Stock tensorizer then finds the tensors of a model under the keys of its state dict."""
    keys = ["model.layers.0.weight", "a/b", "\N{SNOWMAN}", "nul\0", "x" * 1024]
    assert stored_names(keys) == keys


def test_keys_that_tensorizer_cannot_hold_get_short_names() -> None:
    """Empty, overlong, unencodable, taken and specially marked keys are stored under a number."""
    keys = ["", "x" * 1025, "\ud800", "\x1epath", "a", "a"]
    assert stored_names(keys) == ["__item_0__", "__item_1__", "__item_2__", "__item_3__", "a", "__item_5__"]


def source(name: str, *, ndim: int = 1, dtype: str = "uint8") -> TensorSource:
    return TensorSource(name, dtype, (1,) * ndim, 0, 0, getattr(torch, dtype).itemsize)


@given(st.lists(st.tuples(st.integers(1, 1024), st.integers(0, 60)), max_size=80), st.integers(0, 99_999))
def test_files_hold_all_sources_in_order_and_no_index_overflows(sizes: list[tuple[int, int]], rank: int) -> None:
    """A rank's shard continues in a further file exactly when the index of one is full."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_planner, "INDEX_CAPACITY", 4096)
        sources = [source("n" * length, ndim=ndim) for length, ndim in sizes]
        files = plan_files(sources, rank, SAVE)
    assert [s for file in files for s in file.tensors] == sources
    assert [file.name for file in files] == [f"__{rank}_{n}_{SAVE}.tensors" for n in range(len(files))]
    used = [[index_entry_size(s.name, len(s.shape)) for s in file.tensors] for file in files]
    assert all(sum(entries) <= 4096 for entries in used)
    assert all(sum(a) + b[0] > 4096 for a, b in itertools.pairwise(used))


def test_3000_tensors_with_long_names_fit_their_files(tmp_path: Path) -> None:
    """Every file is as full as the plan makes it, and stock tensorizer opens it."""
    dtypes = ["uint8", "float8_e4m3fnuz", "bfloat16", "complex64"]
    sources = [source(f"{n:0180}", ndim=n % 4, dtype=dtypes[n % 4]) for n in range(3000)]
    files = plan_files(sources, 0, SAVE)
    assert len(files) == 4
    assert all(is_data_file_name(file.name) for file in files)
    file = max(files, key=lambda file: len(file.tensors))
    tensors = [(s.name, filled(getattr(torch, s.dtype), s.shape, seed=n)) for n, s in enumerate(file.tensors)]
    layout = lay_out(file.tensors)
    sink = BufferSink()
    encode(layout, [functools.partial(host_bytes, tensor) for _, tensor in tensors], sink, threads=1)
    path = tmp_path / "full.tensors"
    path.write_bytes(sink.content)
    with TensorDeserializer(path, device="cpu", verify_hash=True) as loaded:
        assert all(same(loaded[name], tensor) for name, tensor in tensors)
        assert len(loaded) == len(tensors)


def test_a_file_holds_no_more_bytes_than_it_should() -> None:
    """A tensor that would make it too large begins another file; one that is too large alone has one to itself."""
    sizes = [4, 4, 2, 100, 1, 9, 1]
    sources = [TensorSource(str(n), "uint8", (size,), 0, 0, size) for n, size in enumerate(sizes)]
    files = plan_files(sources, 0, SAVE, 10)
    assert [[source.nbytes for source in file.tensors] for file in files] == [[4, 4, 2], [100], [1, 9], [1]]


def test_nothing_to_write_is_no_file() -> None:
    """A rank without data writes no data file."""
    assert plan_files([], 0, SAVE) == ()
    assert INDEX_CAPACITY == 256 * 1024
