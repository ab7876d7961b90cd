"""Tests of the parts of a file, also when a signal handler interrupts the thread that fills them."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from dcp_tensorizer._tensor_file.encode import FileParts, PartMemory

from ...lab.waiting import WAIT

PART = 4096


class _Sink:
    """A sink that sets an event when it has a part."""

    part_bytes, concurrency, in_order = PART, 1, False

    def __init__(self) -> None:
        self.has_part = threading.Event()

    def put_part(self, number: int, data: memoryview) -> None:
        self.has_part.set()

    def complete(self) -> None:
        """Does nothing."""

    def abort(self) -> None:
        """Does nothing."""


@pytest.mark.parametrize("is_taken", [True, False], ids=["a thread has the part", "no thread has it"])
def test_an_interruption_while_a_part_is_handed_over(monkeypatch: pytest.MonkeyPatch, is_taken: bool) -> None:
    """The exception is raised without a deadlock, and the next file gets all memory."""
    sink, memory = _Sink(), PartMemory(kept_bytes=2 * PART)
    submit = ThreadPoolExecutor.submit

    def interrupted(pool: ThreadPoolExecutor, *arguments: Any) -> Future[Any]:
        if is_taken:
            submit(pool, *arguments)
            assert sink.has_part.wait(WAIT)
        raise KeyboardInterrupt

    parts = FileParts(2 * PART, sink, filling=1, writing=1, memory=memory)
    with monkeypatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            parts.fill(0, np.zeros(PART, dtype=np.uint8))
    parts.abandon(caught.value)
    memory.allow(PART, 2)
    with memory.changed:
        assert [memory.take() is not None for _ in range(3)] == [True, True, False]


class _Kept(_Sink):
    """A sink that keeps the bytes of the parts."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[int, bytes] = {}

    def put_part(self, number: int, data: memoryview) -> None:
        self.parts[number] = bytes(data)


def test_pairs_of_runs_fill_parts_with_little_memory() -> None:
    """Pairs may cross the border of two parts; each part is sent before another one is waited for."""
    content = bytes(np.random.default_rng(0).integers(0, 256, 5 * PART + 100, dtype=np.uint8))
    bounds = [
        0,
        10,
        700,
        1000,
        PART - 5,
        PART,
        PART + 1,
        2 * PART - 3,
        3 * PART + 5,
        4 * PART,
        5 * PART + 99,
        len(content),
    ]
    sink = _Kept()
    parts = FileParts(len(content), sink, filling=1, writing=1)
    parts.fill_pairs(
        (start, content[start : (start + stop) // 2], memoryview(content)[(start + stop) // 2 : stop])
        for start, stop in itertools.pairwise(bounds)
    )
    parts.finish()
    assert b"".join(sink.parts[number] for number in range(6)) == content
