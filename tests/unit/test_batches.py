"""Reads cut into batches: nothing is left out, nothing is read twice."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from dcp_tensorizer._format.layout import StoredItem
from dcp_tensorizer._loading.batches import batches, with_gaps
from dcp_tensorizer._loading.read_planner import ReadOperation, Segment

RUNS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), min_size=1, max_size=8)


def operation_of(runs: list[tuple[int, int]], begin: int) -> ReadOperation:
    """An operation of segments with so many bytes of gap before each, but the first, and so many of its own."""
    operation = ReadOperation("f")
    for number, (gap, nbytes) in enumerate(runs):
        begin += gap if number else 0
        item = StoredItem("f", "t", begin, nbytes, "uint8", "tensor", b"")
        operation.add(Segment(item, 0, nbytes, (number,), 0))
        begin += nbytes
    return operation


@given(RUNS, st.integers(0, 50), st.integers(1, 80))
def test_batches_are_the_operation(runs: list[tuple[int, int]], begin: int, most: int) -> None:
    """Every segment is in one, in order; none is larger than it may be, unless it is one segment."""
    operation = operation_of(runs, begin)
    found = [operation.segments[batch] for batch in batches(operation, most)]
    assert [segment for batch in found for segment in batch] == operation.segments
    sizes = [batch[-1].offset + batch[-1].nbytes - batch[0].offset for batch in found]
    assert all(size <= most for size, batch in zip(sizes, found, strict=True) if len(batch) > 1)
    for one, other in itertools.pairwise(found):  # the next one's first segment did not fit
        assert other[0].offset + other[0].nbytes - one[0].offset > most


@given(RUNS, st.integers(0, 50))
def test_gaps_lie_between_the_places(runs: list[tuple[int, int]], begin: int) -> None:
    """Filled in order, each place has its segment's bytes."""
    operation = operation_of(runs, begin)
    content = bytes(number % 251 for number in range(begin + operation.nbytes))
    places = [memoryview(bytearray(nbytes)) for _, nbytes in runs]
    position = begin
    for buffer in with_gaps(operation.segments, places):
        buffer[:] = content[position : position + buffer.nbytes]
        position += buffer.nbytes
    assert position == operation.offset + operation.nbytes
    for segment, place in zip(operation.segments, places, strict=True):
        assert place == content[segment.offset : segment.offset + segment.nbytes]
