"""Threads that work through operations: each once, and how many threads there are."""

import itertools
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dcp_tensorizer._loading import thread_pool
from dcp_tensorizer._loading.thread_pool import work_through

from .support import forget


def noted(done: list[int]) -> Callable[[int], int]:
    """Does nothing with an operation but to note it down."""

    def run(operation: int) -> int:
        done.append(operation)
        return 1

    return run


@pytest.mark.parametrize("count", [0, 1, 5, 1000])
def test_every_operation_is_carried_out_once(count: int) -> None:
    """However many there are; nothing to do is done at once."""
    done: list[int] = []
    work_through(range(count), noted(done), first=3, most=4)
    assert sorted(done) == list(range(count))


def test_they_are_begun_in_their_order() -> None:
    """One thread does them one after the other."""
    done: list[int] = []
    work_through(range(100), noted(done), first=1, most=1)
    assert done == list(range(100))


def test_threads_join_those_that_wait() -> None:
    """Where the first one waits for the storage there are soon as many as it can use."""
    all_there = threading.Barrier(4)
    begun = itertools.count(1)

    def run(operation: int) -> int:
        number = next(begun)
        if number <= 3:
            threading.Event().wait(0.02)  # the storage's latency
        elif number <= 7:
            all_there.wait(30)  # breaks if there are not four of them
        return 1

    work_through(range(10), run, first=1, most=4)
    assert next(begun) == 11


def test_no_threads_join_those_that_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes from the page cache keeps each thread busy, and more of them would only be in the way."""
    monkeypatch.setattr(thread_pool.time, "thread_time", thread_pool.time.perf_counter)
    read = itertools.count(step=64 << 10)  # the file's own table of blocks, say, while what is in them is cached
    monkeypatch.setattr(thread_pool, "_read_from_disk", lambda: next(read))
    threads: set[str] = set()

    def run(operation: int) -> int:
        threads.add(threading.current_thread().name)
        return 8 << 20

    work_through(range(1000), run, first=2, most=8)
    assert len(threads) <= 2


def test_threads_join_those_that_read_from_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they are busy all the time, as when they decrypt what they have read."""
    monkeypatch.setattr(thread_pool.time, "thread_time", thread_pool.time.perf_counter)
    read = itertools.count(step=8 << 20)
    monkeypatch.setattr(thread_pool, "_read_from_disk", lambda: next(read))
    all_there = threading.Barrier(4)
    begun = itertools.count(1)

    def run(operation: int) -> int:
        if 3 < next(begun) <= 7:
            all_there.wait(30)  # breaks if there are not four of them
        return 1 << 20

    work_through(range(100), run, first=1, most=4)
    assert next(begun) == 101


def test_what_comes_from_a_disk_is_counted_and_what_comes_from_the_page_cache_is_not(tmp_path: Path) -> None:
    """By the kernel, for each thread."""
    path = tmp_path / "file"
    path.write_bytes(bytes(4 << 20))
    forget(path)
    before = thread_pool._read_from_disk()
    path.read_bytes()
    cold = thread_pool._read_from_disk()
    path.read_bytes()
    assert (cold - before >= 4 << 20, thread_pool._read_from_disk() - cold) == (True, 0)


def test_one_operation_that_waits_among_many_that_are_busy_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that was interrupted once, just before it looks (after the 64th), does not wait for the storage."""
    wall = busy = 0.0
    names: set[str] = set()

    def run(operation: int) -> int:
        nonlocal wall, busy
        names.add(threading.current_thread().name)
        wall, busy = wall + (10.0 if operation == 63 else 1.0), busy + 1.0
        return 1

    monkeypatch.setattr(thread_pool.time, "perf_counter", lambda: wall)
    monkeypatch.setattr(thread_pool.time, "thread_time", lambda: busy)
    work_through(range(100), run, first=1, most=8)
    assert len(names) == 1


@pytest.mark.parametrize("threads", [1, 4])
def test_an_error_is_raised_and_ends_the_work(threads: int) -> None:
    """It is the operation's own, and of what is left nothing is begun."""
    begun = itertools.count(1)
    failed = threading.Event()

    def run(operation: int) -> int:
        number = next(begun)
        if number == 5:
            failed.set()
            raise EOFError("too short")
        if number > 5:
            assert failed.wait(30)
        return 1

    with pytest.raises(EOFError, match="too short"):
        work_through(range(1000), run, first=threads, most=threads)
    assert next(begun) < 1000 / 2


def test_an_interrupt_ends_the_work() -> None:
    """Ctrl-C reaches who waits for the threads: they finish what they are doing, and begin nothing more."""
    begun = itertools.count(1)

    class Interrupted(KeyboardInterrupt):
        """Told from one that somebody types."""

    def run(operation: int) -> int:
        if next(begun) == 3:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        threading.Event().wait(0.001)  # all of them would take 20 s
        return 1

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(Interrupted):
            work_through(range(20_000), run, first=1, most=1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert next(begun) < 20_000
