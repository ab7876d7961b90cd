"""The helpers that all storages share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_tensorizer._storage.base import Sink, rest_of


@given(st.lists(st.integers(0, 20), max_size=6), st.integers(0, 130))
def test_the_rest_of_buffers_is_what_follows(sizes: list[int], count: int) -> None:
    """The rest has views of the same memory, none of them empty."""
    content = bytearray(range(sum(sizes)))
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    buffers = [memoryview(content)[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    rest = rest_of(buffers, count)
    assert b"".join(rest) == bytes(content[count:])
    assert all(buffer.nbytes and buffer.obj is content for buffer in rest)


class RecordingSink(Sink):
    """A sink that records its calls and raises where the test tells it to."""

    part_bytes = 4

    def __init__(self, fails: str = "") -> None:
        super().__init__()
        self.fails = fails
        self.done: list[str] = []

    def _do(self, what: str) -> None:
        self.done.append(what)
        if self.fails == what:
            raise OSError(f"cannot {what}")

    def _put_part(self, number: int, data: memoryview) -> None:
        self._do(f"put {number}")

    def _complete(self) -> None:
        self._do("complete")

    def _abort(self) -> None:
        self._do("abort")


def test_a_sink_is_completed_once() -> None:
    """After `complete`, further calls of `complete` and `abort` do nothing."""
    sink = RecordingSink()
    sink.put_part(0, memoryview(b"1234"))
    sink.put_part(1, memoryview(b"5"))
    for end in (sink.complete, sink.complete, sink.abort):
        end()
    assert sink.done == ["put 0", "put 1", "complete"]
    assert sink.bytes_written == 5
    assert min(sink.write_seconds, sink.complete_seconds) > 0


def test_a_sink_is_aborted_once() -> None:
    """After `abort`, further calls do nothing. An error during `abort` does not hide the first error."""
    sink = RecordingSink(fails="abort")
    for end in (sink.abort, sink.abort, sink.complete):
        end()
    assert sink.done == ["abort"]


@pytest.mark.parametrize("fails", ["put 0", "complete"])
def test_a_sink_that_fails_can_be_aborted(fails: str) -> None:
    """A failed part raises its error and does not count as written, and `abort` removes the file."""
    sink = RecordingSink(fails)

    def write() -> None:
        sink.put_part(0, memoryview(b"1234"))
        sink.complete()

    with pytest.raises(OSError, match=f"cannot {fails}"):
        write()
    assert sink.bytes_written == (0 if fails == "put 0" else 4)
    sink.abort()
    assert sink.done[-2:] == [fails, "abort"]
