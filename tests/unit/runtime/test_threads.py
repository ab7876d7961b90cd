"""Cores of a rank, running threads, thread pools, and timeouts without progress."""

from __future__ import annotations

import concurrent.futures.thread
import gc
import os
import threading
import time
import weakref

import pytest

from dcp_tensorizer._runtime.threads import ProgressTimeout, Workers, cores, is_running

from ...lab.waiting import WAIT, Gate, Interrupted, in_thread, interrupted_inside


@pytest.mark.parametrize(
    ("on_node", "bound_to", "ranks", "expected"),
    [
        (64, 64, None, 64),
        (64, 64, "8", 8),
        (64, 8, "8", 8),  # the launcher has bound each rank to its own cores
        (64, 4, None, 4),
        (2, 2, "32", 1),
        (2, 2, "0", 2),
        (2, 2, "many", 2),
    ],
)
def test_ranks_share_the_cores_of_their_node(
    monkeypatch: pytest.MonkeyPatch, on_node: int, bound_to: int, ranks: str | None, expected: int
) -> None:
    """`cores` divides the node by `LOCAL_WORLD_SIZE`, ignores an invalid value, and respects the CPU affinity."""
    monkeypatch.setattr(os, "cpu_count", lambda: on_node)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(bound_to)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert cores() == expected


def test_a_thread_whose_join_was_interrupted_still_runs() -> None:
    """`is_running` is right after an interrupted `join`, where `is_alive` is not before Python 3.13."""
    gate = Gate()
    thread = threading.Thread(target=gate.pass_through)
    assert not is_running(thread)
    thread.start()
    with interrupted_inside(threading.Thread.join):
        thread.join()
    assert is_running(thread)
    gate.open()
    another = threading.Thread(target=gate.pass_through)
    another.start()
    another.join(WAIT)
    assert not is_running(another)


def test_an_interrupted_shutdown_waits_for_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Workers.shutdown` raises the exception of a signal handler, once the work that has begun is done."""
    gate, interruptions = Gate(), iter([Interrupted, Interrupted])
    workers = Workers(1, "work")
    work = workers.submit(gate.pass_through)
    gate.wait_reached()
    join = threading.Thread.join

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        for interruption in interruptions:
            raise interruption
        gate.open()
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(Interrupted):
        workers.shutdown()
    assert work.done()


def test_an_interrupted_submit_does_not_wait_for_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Workers.submit` raises the exception of a signal handler at once. `shutdown` waits for work that has begun."""
    gate, done, start = Gate(), list[int](), threading.Thread.start

    def work() -> None:
        gate.pass_through()
        done.append(1)

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        gate.wait_reached()
        raise Interrupted

    workers = Workers(1, "work")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(Interrupted):
            workers.submit(work)
    assert done == []
    opener = in_thread(gate.open)
    workers.shutdown()
    assert done == [1]
    opener.join()


def test_work_runs_once_if_the_thread_limit_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool queues work before it starts a thread. The caller runs the work, and a later thread skips it."""
    done: list[int] = []
    with Workers(1, "work") as workers:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", _refuse)
            assert workers.submit(threading.current_thread).result() is threading.current_thread()
            workers.submit(done.append, 1).result()
            with pytest.raises(ValueError, match="no number"):
                workers.submit(int, "no number").result()
        workers.submit(done.append, 2).result()
    assert done == [1, 2]


def test_work_that_a_thread_takes_although_no_other_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """If an earlier thread has taken the work, the future has the result of that thread."""
    with Workers(2, "work") as workers:
        gate = Gate()
        first = workers.submit(gate.pass_through)
        gate.wait_reached()
        taken = threading.Event()

        def work() -> threading.Thread:
            taken.set()
            return threading.current_thread()

        def refuse_late(thread: threading.Thread) -> None:
            gate.open()
            assert taken.wait(WAIT)
            _refuse(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse_late)
        assert workers.submit(work).result(WAIT).name == "work_0"
        assert first.done()


def _refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_an_error_of_work_is_no_cycle() -> None:
    """When an error of work is dropped, its traceback frees what the work referred to, without a garbage collection."""

    class Referred:
        pass

    def fail(referred: Referred) -> None:
        raise ValueError

    gc.disable()
    try:
        with Workers(1, "work") as workers:
            referred = Referred()
            reference = weakref.ref(referred)
            failed = workers.submit(fail, referred)
            del referred
            assert isinstance(failed.exception(WAIT), ValueError)
            del failed
        assert reference() is None
    finally:
        gc.enable()


def test_work_is_done_when_no_more_threads_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the interpreter exits, `submit` runs the work in the calling thread. After `shutdown` it raises."""
    with Workers(2, "work") as workers:
        monkeypatch.setattr(concurrent.futures.thread, "_shutdown", True)
        assert workers.submit(threading.current_thread).result() is threading.current_thread()
        failed = workers.submit(int, "no number")
        monkeypatch.undo()
        with pytest.raises(ValueError, match="no number"):
            failed.result()
        assert workers.submit(threading.current_thread).result() is not threading.current_thread()
    with pytest.raises(RuntimeError, match="after shutdown"):
        workers.submit(int)


def test_a_suspended_caller_does_not_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time between two checks counts only up to the limit, so a job suspended for an hour has not timed out."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    patience = ProgressTimeout(100, 20)
    now += 3600
    assert not patience.is_over()
    assert patience.within(1000) == 80
    for _ in range(7):
        now += 10
        assert not patience.is_over()
    assert patience.within(30) == 10
    patience.renew()
    assert patience.within(1000) == 100
    for _ in range(5):
        now += 50
        is_over = patience.is_over()
    assert is_over


def test_a_short_timeout_takes_several_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single pause between two checks counts for a third of the timeout."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    patience = ProgressTimeout(6, 20)
    checks = 0
    while not patience.is_over():
        now += 1000
        checks += 1
    assert checks == 3
