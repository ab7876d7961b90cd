"""Threads that work through operations: each once, and how many threads there are."""

import functools
import gc
import itertools
import signal
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from dcp_tensorizer._loading.run import Usage, run_all, thread_usage

from ...lab.processes import forget
from ...lab.waiting import WAIT, Gate, Interrupted, in_thread, interrupted_inside

clock = itertools.count(1.0)
"""For threads that wait for all of the time."""


def busy_with(disk_bytes: int) -> Callable[[], Usage]:
    """A thread that has spent all its time on a core whenever it looks, and has read so much from a disk since."""
    looks = itertools.count()

    def usage() -> Usage:
        look = next(looks)
        return Usage(float(look), float(look), look * disk_bytes)

    return usage


def noted(done: list[int]) -> Callable[[int], int]:
    """Does nothing with an operation but to note it down."""

    def run(operation: int) -> int:
        done.append(operation)
        return 1

    return run


def test_what_was_read_is_freed_at_once() -> None:
    """When it returns, nothing refers to what the operations were about, also before the garbage collector comes."""

    class Targets(list[int]):
        pass

    targets = Targets()
    kept = weakref.ref(targets)
    gc.disable()
    try:
        run_all(range(3), functools.partial(_note, targets), min_threads=2, max_threads=2)
        del targets
        assert kept() is None
    finally:
        gc.enable()


def _note(targets: list[int], operation: int) -> int:
    targets.append(operation)
    return 1


@pytest.mark.parametrize("count", [0, 1, 5, 1000])
def test_every_operation_is_carried_out_once(count: int) -> None:
    """However many there are; nothing to do is done at once."""
    done: list[int] = []
    run_all(range(count), noted(done), min_threads=3, max_threads=4)
    assert sorted(done) == list(range(count))


def test_they_are_begun_in_their_order() -> None:
    """One thread does them one after the other."""
    done: list[int] = []
    run_all(range(100), noted(done), min_threads=1, max_threads=1)
    assert done == list(range(100))


def test_threads_join_those_that_wait() -> None:
    """Where the first one waits for the storage there are soon as many as it can use."""
    all_there = threading.Barrier(4)
    begun, looks = itertools.count(1), itertools.count()

    def run(operation: int) -> int:
        if 3 < next(begun) <= 7:
            all_there.wait(30)  # breaks if there are not four of them
        return 1

    run_all(range(10), run, min_threads=1, max_threads=4, usage=lambda: Usage(float(next(looks)), 0.0, 0))
    assert next(begun) == 11


@pytest.mark.parametrize("possible", [0, 1, 3])
def test_a_system_without_more_threads(possible: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that could be started do all of it, or else the calling thread."""
    started = 0
    start = threading.Thread.start

    def bounded(thread: threading.Thread) -> None:
        nonlocal started
        started += 1
        if started > possible:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", bounded)
    done: list[int] = []
    run_all(range(100), noted(done), min_threads=2, max_threads=8, usage=lambda: Usage(next(clock), 0.0, 0))
    assert sorted(done) == list(range(100))
    assert started > possible


def test_no_threads_join_those_that_are_busy() -> None:
    """What comes from the page cache keeps each thread busy, and more of them would only be in the way."""
    threads: set[str] = set()

    def run(operation: int) -> int:
        threads.add(threading.current_thread().name)
        return 8 << 20

    # From the disk comes the file's own table of blocks, say, while what is in the blocks is cached.
    run_all(range(1000), run, min_threads=2, max_threads=8, usage=busy_with(64 << 10))
    assert len(threads) <= 2


def test_threads_join_those_that_read_from_a_disk() -> None:
    """Also where they are busy all the time, as when they decrypt what they have read."""
    all_there = threading.Barrier(4)
    begun = itertools.count(1)

    def run(operation: int) -> int:
        if 3 < next(begun) <= 7:
            all_there.wait(30)  # breaks if there are not four of them
        return 1 << 20

    run_all(range(100), run, min_threads=1, max_threads=4, usage=busy_with(8 << 20))
    assert next(begun) == 101


def test_what_comes_from_a_disk_is_counted_and_what_comes_from_the_page_cache_is_not(tmp_path: Path) -> None:
    """By the kernel, for each thread."""
    path = tmp_path / "file"
    path.write_bytes(bytes(4 << 20))
    forget(path)
    before = thread_usage().disk_bytes
    path.read_bytes()
    cold = thread_usage().disk_bytes
    path.read_bytes()
    assert (cold - before >= 4 << 20, thread_usage().disk_bytes - cold) == (True, 0)


def test_time_on_a_core_is_counted_by_thread() -> None:
    """Waiting takes none of it; what another thread does is not this one's."""
    done = threading.Event()

    def work() -> None:
        while thread_usage().cpu_seconds < 0.05:
            pass
        done.set()

    before = thread_usage()
    threading.Thread(target=work).start()
    assert done.wait(30)
    after = thread_usage()
    assert after.wall_seconds - before.wall_seconds >= 0.05
    assert after.cpu_seconds - before.cpu_seconds < 0.05


def test_one_operation_that_waits_among_many_that_are_busy_shows_nothing() -> None:
    """A thread that was interrupted once, just before it looks (after the 64th), does not wait for the storage."""
    wall = busy = 0.0
    names: set[str] = set()

    def run(operation: int) -> int:
        nonlocal wall, busy
        names.add(threading.current_thread().name)
        wall, busy = wall + (10.0 if operation == 63 else 1.0), busy + 1.0
        return 1

    run_all(range(100), run, min_threads=1, max_threads=8, usage=lambda: Usage(wall, busy, 0))
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
        run_all(range(1000), run, min_threads=threads, max_threads=threads)
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
            run_all(range(20_000), run, min_threads=1, max_threads=1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert next(begun) < 20_000


def test_an_interrupted_load_waits_for_its_threads() -> None:
    """They write to the targets: nobody else may do so before they have ended, however often he is interrupted."""
    gate, written = Gate(), []

    def read(operation: int) -> int:
        gate.pass_through()
        written.append(operation)
        return 1

    with interrupted_inside(Future.result, gate.wait_reached) as interrupted:
        opening = in_thread(lambda: (interrupted.wait(WAIT), gate.open()))
        run_all([1], read, min_threads=1, max_threads=1)
    assert written == [1]
    opening.join(WAIT)


def test_an_interrupted_start_of_a_thread_leaves_no_work_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the thread has begun with it nobody knows: it is done when the exception comes out, or never."""
    started, done = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        started(thread)
        raise Interrupted

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(Interrupted):
        run_all([1], noted(done), min_threads=1, max_threads=1)
    monkeypatch.undo()
    assert done in ([], [1])
    before = list(done)
    run_all([], noted(done), min_threads=1, max_threads=1)
    assert done == before
