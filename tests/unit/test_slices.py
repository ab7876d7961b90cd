"""Reads cut into slices: nothing is left out, nothing is read twice."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from dcp_tensorizer._layout import StoredItem
from dcp_tensorizer._plan import ReadOperation, Segment
from dcp_tensorizer._slices import slices


def operation_of(runs: list[tuple[int, int]], begin: int) -> ReadOperation:
    """An operation of segments with so many bytes of gap before each, but the first, and so many of its own."""
    operation = ReadOperation("f")
    for number, (gap, nbytes) in enumerate(runs):
        begin += gap if number else 0
        item = StoredItem("f", "t", begin, nbytes, "uint8", "tensor", b"")
        operation.add(Segment(item, 0, nbytes, (number,), 0))
        begin += nbytes
    return operation


RUNS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), min_size=1, max_size=8)


@given(RUNS, st.integers(0, 50), st.integers(1, 50))
def test_slices_are_the_operation(runs: list[tuple[int, int]], begin: int, most: int) -> None:
    """They follow each other from its first byte to its last, and their pieces are the segments' places in order."""
    operation = operation_of(runs, begin)
    places = [memoryview(bytearray(nbytes)) for _, nbytes in runs]
    found = list(slices(operation, places, most))
    ends = [part.offset + sum(buffer.nbytes for buffer in part.buffers) for part in found]
    assert [part.offset for part in found] == [begin, *ends[:-1]]
    assert ends[-1] == operation.offset + operation.nbytes
    for byte, part in enumerate(found):
        for _, piece in part.pieces:
            piece[:] = bytes([byte + 1]) * piece.nbytes
    pieces = [(number, piece.nbytes) for part in found for number, piece in part.pieces]
    assert [number for number, _ in pieces] == sorted(number for number, _ in pieces)
    for number, place in enumerate(places):
        assert sum(nbytes for owner, nbytes in pieces if owner == number) == place.nbytes
        assert 0 not in bytes(place)
        assert list(place) == sorted(place)


@given(RUNS, st.integers(1, 50))
def test_slices_keep_to_their_size(runs: list[tuple[int, int]], most: int) -> None:
    """But for gaps, which are read with what follows them; small neighbours share one."""
    places = [memoryview(bytearray(nbytes)) for _, nbytes in runs]
    found = list(slices(operation_of(runs, 0), places, most))
    sizes = [sum(piece.nbytes for _, piece in part.pieces) for part in found]
    assert max(sizes) <= most
    whole = {number for number, place in enumerate(places) if place.nbytes <= most}
    for one, other in itertools.pairwise(found):
        if {one.pieces[-1][0], other.pieces[0][0]} <= whole:  # both could not have been in one
            assert sum(piece.nbytes for _, piece in one.pieces + other.pieces[:1]) > most
