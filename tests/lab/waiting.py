"""Handshakes between threads, instead of sleeping: a test holds a thread back, or waits for one."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.utils._pytree import tree_map

__all__ = [
    "WAIT",
    "Gate",
    "HeldPlanner",
    "HeldTensor",
    "Interrupted",
    "hold_memory",
    "in_thread",
    "interrupted_inside",
    "save_thread",
    "wait_until_inside",
]

WAIT = 300.0
"""Timeout in seconds for threads that hang: far longer than a busy machine needs."""


class Gate:
    """Holds a thread back until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def open(self) -> None:
        self.opened.set()

    def wait_reached(self) -> None:
        assert self.reached.wait(WAIT), "no thread came to the gate"

    def pass_through(self) -> None:
        self.reached.set()
        assert self.opened.wait(WAIT), "the test did not open the gate"


class HeldPlanner(DefaultSavePlanner):
    """A planner that holds the thread of its save back until the gate is opened."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate

    def create_local_plan(self) -> SavePlan:
        self.gate.pass_through()
        return super().create_local_plan()


class HeldTensor(torch.Tensor):
    """A tensor in host memory. Before it is copied, it calls ``before_copy``, which may wait or raise an error."""

    plain: torch.Tensor
    before_copy: Callable[[], object]

    @staticmethod
    def __new__(cls, plain: torch.Tensor, before_copy: Callable[[], object]) -> HeldTensor:
        held: HeldTensor = torch.Tensor._make_subclass(cls, plain)  # type: ignore[assignment]
        held.plain, held.before_copy = plain, before_copy
        return held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._foreach_copy_.default:
            for tensor in args[1]:
                if isinstance(tensor, HeldTensor):
                    tensor.before_copy()
        result = func(*tree_map(_plain, args), **tree_map(_plain, kwargs or {}))
        if func is torch.ops.aten.detach.default:  # staging copies the detached tensor
            return HeldTensor(result, args[0].before_copy)
        return result


def _plain(value: Any) -> Any:
    return value.plain if isinstance(value, HeldTensor) else value


def hold_memory(monkeypatch: pytest.MonkeyPatch, before: Callable[[], object]) -> None:
    """Makes the process call ``before`` before each allocation of memory for a shared buffer."""
    allocate = os.posix_fallocate

    def held(fd: int, offset: int, length: int) -> None:
        before()
        allocate(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", held)


def save_thread(before: set[threading.Thread]) -> threading.Thread:
    """The thread of the save that `async_save` has begun. ``before`` are the threads that ran before that."""
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline:
        for thread in set(threading.enumerate()) - before:
            if thread.is_alive() and thread.name.startswith("AsyncCheckpointExecutor"):  # some are not started yet
                return thread
    raise AssertionError("there is no save")


class Interrupted(BaseException):
    """Exception that a signal handler raises, as Python's own handler does at Ctrl-C."""


@contextmanager
def interrupted_inside(
    function: Callable[..., object], after: Callable[[], object] = lambda: None
) -> Iterator[threading.Event]:
    """Sends the main thread, which must be the calling one, a signal when it waits inside a function.

    The signal's handler raises `Interrupted`, and the block must raise it. ``after`` returns when the signal may be
    sent. Yields an event that is set when the handler is called.
    """
    main, called = threading.main_thread(), threading.Event()
    assert threading.current_thread() is main

    def handle(number: int, frame: object) -> None:
        if not called.is_set():
            called.set()
            raise Interrupted

    def send() -> None:
        after()
        wait_until_inside(main, function)
        # A signal just before the system call does not end the call, but the next signal does.
        while not called.is_set():
            signal.pthread_kill(main.ident or 0, signal.SIGUSR1)
            called.wait(0.1)

    before = signal.signal(signal.SIGUSR1, handle)
    sending = in_thread(send)
    try:
        with pytest.raises(Interrupted):
            yield called
    finally:
        sending.join(WAIT)
        signal.signal(signal.SIGUSR1, before)


def in_thread(target: Callable[[], object]) -> threading.Thread:
    """Runs something on a thread of its own."""
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def wait_until_inside(thread: threading.Thread, function: Callable[..., object]) -> None:
    """Returns when a thread waits inside a function. Fails if the thread ends before that."""
    deadline = time.monotonic() + WAIT
    while not _waits_inside(thread, function):
        assert thread.is_alive(), f"it did not wait in {function.__qualname__}"
        assert time.monotonic() < deadline, f"it is not in {function.__qualname__} yet"
        time.sleep(0.001)


def _waits_inside(thread: threading.Thread, function: Callable[..., object]) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    waits = frame is not None and frame.f_code.co_filename == threading.__file__ and frame.f_code.co_name in _WAITS
    while waits and frame is not None:
        if frame.f_code is function.__code__:  # type: ignore[attr-defined]
            return True
        frame = frame.f_back
    return False


_WAITS = {"wait", "join", "_wait_for_tstate_lock"}
