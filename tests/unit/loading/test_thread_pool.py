"""Tests of the threads of a load: each operation runs once, and threads start while others wait for the storage."""

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
"""The wall clock of threads that never use a core."""


def busy_with(disk_bytes: int) -> Callable[[], Usage]:
    """Returns the usage of a thread that is always on a core, and reads ``disk_bytes`` between two measurements."""
    looks = itertools.count()

    def usage() -> Usage:
        look = next(looks)
        return float(look), float(look), look * disk_bytes

    return usage


def noted(done: list[int]) -> Callable[[int], int]:
    """Returns a function that only records operations."""

    def run(operation: int) -> int:
        done.append(operation)
        return 1

    return run


def test_what_was_read_is_freed_at_once() -> None:
    """When run_all returns, nothing refers to the operations, even before a garbage collection."""

    class Targets(list[int]):
        pass

    targets = Targets()
    kept = weakref.ref(targets)
    gc.disable()
    try:
        run_all(range(3), functools.partial(noted_in, targets), min_threads=2, max_threads=2)
        del targets
        assert kept() is None
    finally:
        gc.enable()


def noted_in(targets: list[int], operation: int) -> int:
    targets.append(operation)
    return 1


@pytest.mark.parametrize("count", [0, 1, 5, 1000])
def test_every_operation_runs_once(count: int) -> None:
    """Any number of operations runs, each once."""
    done: list[int] = []
    run_all(range(count), noted(done), min_threads=3, max_threads=4)
    assert sorted(done) == list(range(count))


def test_operations_start_in_order() -> None:
    """A single thread runs the operations in the given order."""
    done: list[int] = []
    run_all(range(100), noted(done), min_threads=1, max_threads=1)
    assert done == list(range(100))


def test_threads_start_while_others_wait_for_the_storage() -> None:
    """If the first thread waits for the storage, further threads start, up to max_threads."""
    all_there = threading.Barrier(4)
    begun, looks = itertools.count(1), itertools.count()

    def run(operation: int) -> int:
        if 3 < next(begun) <= 7:
            all_there.wait(30)  # breaks if there are not four of them
        return 1

    run_all(range(10), run, min_threads=1, max_threads=4, usage=lambda: (float(next(looks)), 0.0, 0))
    assert next(begun) == 11


@pytest.mark.parametrize("possible", [0, 1, 3])
def test_a_system_without_more_threads(possible: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads that could be started run all operations; without any, the calling thread does."""
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
    run_all(range(100), noted(done), min_threads=2, max_threads=8, usage=lambda: (next(clock), 0.0, 0))
    assert sorted(done) == list(range(100))
    assert started > possible


def test_no_threads_start_while_others_are_busy() -> None:
    """Reads from the page cache keep each thread on a core, so no further thread starts."""
    threads: set[str] = set()

    def run(operation: int) -> int:
        threads.add(threading.current_thread().name)
        return 8 << 20

    # The disk delivers the file's table of blocks, for example, while the blocks themselves are cached.
    run_all(range(1000), run, min_threads=2, max_threads=8, usage=busy_with(64 << 10))
    assert len(threads) <= 2


def test_threads_start_while_others_read_from_a_disk() -> None:
    """Threads that read from a disk get help even if they are always on a core, for example to decrypt."""
    all_there = threading.Barrier(4)
    begun = itertools.count(1)

    def run(operation: int) -> int:
        if 3 < next(begun) <= 7:
            all_there.wait(30)  # breaks if there are not four of them
        return 1 << 20

    run_all(range(100), run, min_threads=1, max_threads=4, usage=busy_with(8 << 20))
    assert next(begun) == 101


def test_reads_from_a_disk_are_counted_and_reads_from_the_page_cache_are_not(tmp_path: Path) -> None:
    """The kernel counts the bytes from disks for each thread."""
    path = tmp_path / "file"
    path.write_bytes(bytes(4 << 20))
    forget(path)
    counts = [thread_usage()[2]]
    for _ in range(2):
        path.read_bytes()
        counts.append(thread_usage()[2])
    before, cold, cached = counts
    assert cold - before >= 4 << 20
    assert cached == cold


def test_time_on_a_core_is_counted_by_thread() -> None:
    """Neither waiting nor the work of another thread counts."""
    done = threading.Event()

    def work() -> None:
        while thread_usage()[1] < 0.05:
            pass
        done.set()

    wall_before, cpu_before, _ = thread_usage()
    threading.Thread(target=work).start()
    assert done.wait(30)
    wall_after, cpu_after, _ = thread_usage()
    assert wall_after - wall_before >= 0.05
    assert cpu_after - cpu_before < 0.05


def test_one_slow_operation_among_many_starts_no_thread() -> None:
    """A thread that was preempted once, just before it measures (after the 64th), does not wait for the storage."""
    wall = busy = 0.0
    names: set[str] = set()

    def run(operation: int) -> int:
        nonlocal wall, busy
        names.add(threading.current_thread().name)
        wall, busy = wall + (10.0 if operation == 63 else 1.0), busy + 1.0
        return 1

    run_all(range(100), run, min_threads=1, max_threads=8, usage=lambda: (wall, busy, 0))
    assert len(names) == 1


@pytest.mark.parametrize("threads", [1, 4])
def test_an_error_is_raised_and_ends_the_work(threads: int) -> None:
    """The operation's error is raised, and no further operation starts."""
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
    """After Ctrl-C in the waiting thread, the others finish their operations and start no further ones."""
    begun = itertools.count(1)

    class Interrupted(KeyboardInterrupt):
        """An interrupt of this test, not the user's."""

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
    """An interrupted load returns only after its threads have ended, because they write to the targets."""
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
    """After the exception, the operation has run, or never runs."""
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
