"""Tests of read plans against a naive reference, which executes them on files in memory."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dcp_tensorizer._loading.plan import (
    MAX_SCRATCH_BYTES,
    MAX_SEGMENTS,
    ReadLimits,
    ReadOperation,
    ReadTarget,
    Segment,
    plan_reads,
)
from dcp_tensorizer._storage.base import ReadTuning
from dcp_tensorizer._tensor_file import names as layout_module
from dcp_tensorizer._tensor_file.names import StoredItem, block_size
from dcp_tensorizer._tensor_file.regions import Region

from ...lab.checkpoints import regions

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
    """Sets a small block size, so that small tensors have many blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_module, "_MIN_BLOCK", nbytes)
        yield


# --- a reference that knows nothing of runs, blocks and operations ---------------------------------------------------


def bytes_of_box(request: ReadTarget) -> np.ndarray:
    """Returns the positions of a region's bytes in the tensor's data, in C order."""
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
    """Executes a plan; fails if a byte of a target is never written, or gets another byte's value."""
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
    """Plans and executes reads, and checks every promise of the plan."""
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
    """Returns the longest run of bytes that a plan reads, and neither a target nor its block's digest needs."""
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
def plans(draw: st.DrawFn) -> list[ReadTarget]:
    """Generates regions of several tensors in several files; the tensors do not overlap, and have odd offsets."""
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
    """For any regions and limits, the plan is exact, ordered and within the limits, and reads no byte twice."""
    with blocks_of(small.block):
        check_plan(requests, verify=verify, bounds=small)


@given(plans())
def test_real_limits_read_small_tensors_of_a_file_at_once(requests: list[ReadTarget]) -> None:
    """Small tensors within the largest gap of each other are one operation per file."""
    operations = check_plan(requests, verify=True, bounds=REAL)
    assert len(operations) == len({request.item.file for request in requests})


def request_of(
    shape: tuple[int, ...], region: Region, *, itemsize: int = 1, in_place: bool = False, at: int = 0
) -> ReadTarget:
    item = StoredItem(FILES[0], "t", at, math.prod(shape) * itemsize, DTYPES[itemsize], "tensor", b"")
    return ReadTarget("t", item, shape, region, NO_TENSOR, in_place)


@pytest.mark.parametrize("verify", [True, False])
def test_a_whole_tensor_goes_straight_to_its_target(verify: bool) -> None:
    """A large contiguous target is read in operations of 8 MiB, without scratch memory."""
    shape = (10 << 20,)
    operations = check_plan([request_of(shape, Region((0,), shape), in_place=True)], verify=verify, bounds=REAL)
    segments = [segment for operation in operations for segment in operation.segments]
    assert [segment.target_offset for segment in segments] == [segment.start for segment in segments]
    assert max(operation.nbytes for operation in operations) <= 8 << 20
    assert sum(operation.nbytes for operation in operations) == 10 << 20


def test_a_verified_row_slice_reads_at_most_two_blocks_more_than_it_needs() -> None:
    """Only the blocks at the ends of the slice use scratch memory; the rest is read into the target."""
    shape = (1000, 1000)
    request = request_of(shape, Region((301, 0), (400, 1000)), itemsize=4, in_place=True)
    operations = check_plan([request], verify=True, bounds=REAL)
    segments = [segment for operation in operations for segment in operation.segments]
    step = block_size(request.item.length)
    assert sum(s.nbytes for s in segments) < 1_600_000 + 2 * step
    assert sum(s.nbytes for s in segments if s.target_offset is None) <= 2 * step
    assert sum(s.nbytes for s in segments if s.target_offset is not None) > 1_600_000 - 2 * step


def test_an_unverified_row_slice_reads_exactly_its_bytes() -> None:
    """Without verify, exactly the bytes of the slice are read."""
    request = request_of((1000, 1000), Region((301, 0), (400, 1000)), itemsize=4, in_place=True)
    (operation,) = check_plan([request], verify=False, bounds=REAL)
    assert (operation.offset, operation.nbytes) == (301 * 4000, 400 * 4000)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), min_size=1, max_size=8),
    st.integers(0, 50),
    st.integers(1, 80),
)
def test_batches_are_the_operation(runs: list[tuple[int, int]], begin: int, most: int) -> None:
    """Batches have all segments in order, as many as fit each; a segment that is too large is alone."""
    operation = ReadOperation("f", begin)
    limits = ReadLimits(40, 10_000)
    for gap, nbytes in runs:
        begin += gap if operation.segments else 0
        item = StoredItem("f", "t", begin, nbytes, "uint8", "tensor", b"")
        assert operation.take(Segment(item, 0, nbytes, (), 0), limits)
        begin += nbytes
    batches = [operation.segments[batch] for batch in operation.batches(most)]
    assert [segment for batch in batches for segment in batch] == operation.segments
    sizes = [batch[-1].offset + batch[-1].nbytes - batch[0].offset for batch in batches]
    assert all(size <= most for size, batch in zip(sizes, batches, strict=True) if len(batch) > 1)
    for one, other in itertools.pairwise(batches):  # the next one's first segment did not fit
        assert other[0].offset + other[0].nbytes - one[0].offset > most


def test_overlapping_requests_share_one_read() -> None:
    """Bytes that two targets need, as of tied weights and replicas, are read once."""
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
    """A slice of several runs is not read as the run that encloses it if its gaps exceed the largest gap."""
    request = request_of(shape, region)
    operations = check_plan([request], verify=verify, bounds=REAL)
    assert longest_run_for_nothing([request], operations, verify) <= REAL.gap


@given(plans(), st.booleans(), small_limits)
@example([request_of((2, 50, 4), Region((0, 0, 1), (2, 1, 2)))], False, Limits(4096, 8, 512, 16))
def test_runs_for_nothing_are_bounded(requests: list[ReadTarget], verify: bool, small: Limits) -> None:
    """No operation reads a longer run than the largest gap that neither a target nor the digest of a block needs."""
    with blocks_of(small.block):
        operations = plan_reads(requests, small.of_planner, verify=verify)
        assert longest_run_for_nothing(requests, operations, verify) <= small.gap


def test_small_tensors_far_apart_are_read_apart() -> None:
    """A gap of 64 KiB is read, and a larger one is skipped."""
    small = Region((0,), (100,))
    near = [request_of((100,), small, at=0), request_of((100,), small, at=100 + REAL.gap)]
    far = [request_of((100,), small, at=0), request_of((100,), small, at=101 + REAL.gap)]
    assert len(check_plan(near, verify=True, bounds=REAL)) == 1
    assert len(check_plan(far, verify=True, bounds=REAL)) == 2


def test_an_operation_has_no_more_segments_than_one_preadv_takes() -> None:
    """An operation has at most 512 segments, so that with gaps it has at most 1,024 buffers."""
    requests = [request_of((10,), Region((0,), (10,)), at=11 * number) for number in range(2000)]
    operations = check_plan(requests, verify=True, bounds=REAL)
    assert [len(operation.segments) for operation in operations] == [512, 512, 512, 464]


def test_nothing_wanted_is_nothing_read() -> None:
    """An empty load has no operations."""
    assert plan_reads([], ReadLimits(0), verify=True) == []


def test_zero_dimensional_tensors_are_read_straight() -> None:
    """A 0-dim tensor is one element, in one segment that is read into the target."""
    request = request_of((), Region((), ()), itemsize=8, in_place=True, at=24)
    (operation,) = check_plan([request], verify=True, bounds=REAL)
    assert [(s.start, s.stop, s.target_offset) for s in operation.segments] == [(0, 8, 0)]
