"""How many cores are a rank's; threads that have ended, and work that is done whatever happens."""

from __future__ import annotations

import concurrent.futures.thread
import os
import threading
import time

import pytest

from dcp_tensorizer._runtime import threads
from dcp_tensorizer._runtime.threads import ProgressTimeout, Workers, cores, is_running

from ...lab.waiting import WAIT, Gate, Interrupted, interrupted_inside


@pytest.mark.parametrize(
    ("on_node", "bound_to", "ranks", "expected"),
    [
        (64, 64, None, 64),
        (64, 64, "8", 8),
        (64, 8, "8", 8),  # each rank is bound to its own
        (64, 4, None, 4),
        (2, 2, "32", 1),
        (2, 2, "0", 2),
        (2, 2, "many", 2),
    ],
)
def test_ranks_share_the_cores_of_their_node(
    monkeypatch: pytest.MonkeyPatch, on_node: int, bound_to: int, ranks: str | None, expected: int
) -> None:
    """As `torchrun` says how many they are; what it does not say is no error."""
    monkeypatch.setattr(os, "cpu_count", lambda: on_node)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(bound_to)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert cores() == expected


def test_a_thread_whose_join_was_interrupted_still_runs() -> None:
    """`is_alive` says otherwise before Python 3.13; a thread that is not started or has ended does not run."""
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


def test_an_interrupted_wait_for_workers_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a signal's handler raises comes out when all work that began is done."""
    gate = Gate()
    workers = Workers(1, "work")
    work = workers.submit(gate.pass_through)
    gate.wait_reached()
    looks = 0

    def interrupted(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks < 3:
            raise Interrupted
        gate.open()

    monkeypatch.setattr(threads.time, "sleep", interrupted)
    with pytest.raises(Interrupted):
        workers.shutdown()
    assert looks >= 3
    assert work.done()


def test_work_is_done_when_no_more_threads_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the interpreter ends, the calling thread does it; an error is the work's. A pool that is shut takes none."""
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


def test_who_does_not_look_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that was suspended for an hour has only waited for what counts between two looks."""
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
        looked = patience.is_over()
    assert looked


def test_short_patience_is_for_several_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pause does not use all of it up."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    patience = ProgressTimeout(6, 20)
    looks = 0
    while not patience.is_over():
        now += 1000
        looks += 1
    assert looks == 3
