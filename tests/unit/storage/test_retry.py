"""Failed requests are repeated if that may help, a bounded number of times and for a bounded time."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from dcp_tensorizer._storage.remote import Retries, is_transient, silence_timeout


class Status(Exception):
    """An error with a status, as HTTP libraries raise."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the server says {status}")
        self.status = status


class Clock:
    """A clock that only `sleep` and the tests move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


TRANSIENT = [Status(503), Status(429), Status(500), Status(401), ConnectionResetError(), TimeoutError(), EOFError()]
LASTING = [Status(403), Status(404), Status(400), PermissionError("403"), FileNotFoundError("x"), ValueError("x")]


def failing(times: int, error: Exception) -> tuple[Callable[[], str], list[int]]:
    """Returns an operation that fails a number of times, and the list of its attempts."""
    attempts: list[int] = []

    def operation() -> str:
        attempts.append(len(attempts))
        if len(attempts) <= times:
            raise error
        return "done"

    return operation, attempts


@pytest.mark.parametrize("error", TRANSIENT, ids=repr)
def test_transient_failures_are_repeated(error: Exception) -> None:
    """Overload, resets, timeouts and expired tokens are retried, each after `recover`."""
    operation, attempts = failing(2, error)
    recoveries: list[int] = []
    retries = Retries(600.0, first_wait=0.0)
    assert retries.call(operation, recover=lambda: recoveries.append(len(attempts))) == "done"
    assert (len(attempts), recoveries) == (3, [1, 2])


@pytest.mark.parametrize("error", LASTING, ids=repr)
def test_lasting_failures_are_not_repeated(error: Exception) -> None:
    """Denials, missing objects and invalid arguments are raised after one attempt."""
    operation, attempts = failing(2, error)
    with pytest.raises(type(error)):
        Retries(600.0).call(operation)
    assert len(attempts) == 1
    assert not is_transient(error)


def test_attempts_are_bounded() -> None:
    """The sixth failure is raised."""
    operation, attempts = failing(100, ConnectionResetError("reset by peer"))
    with pytest.raises(ConnectionResetError, match="reset by peer"):
        Retries(600.0, first_wait=0.0).call(operation)
    assert len(attempts) == 6


def test_attempts_that_only_the_timeout_ends() -> None:
    """Without a limit of attempts, retries continue every five to ten seconds."""
    clock = Clock()
    operation, attempts = failing(10_000, ConnectionResetError("reset by peer"))
    with pytest.raises(ConnectionResetError, match="reset by peer"):
        Retries(20_000.0, attempts=math.inf, clock=clock, sleep=clock.sleep).call(operation)
    assert 15_990 <= clock.now <= 16_000
    assert 1_600 <= len(attempts) <= 3_210


def test_waits_grow_and_are_bounded() -> None:
    """Waits double from 0.2 s to 10 s, less a random share."""
    waits = list(Retries(600.0).waits())
    assert len(waits) == 5
    for number, wait in enumerate(waits):
        assert 0.1 * 2**number <= wait <= min(0.2 * 2**number, 10.0)
    assert max(Retries(600.0, first_wait=100.0).waits()) <= 10.0


def test_attempts_end_in_time() -> None:
    """No attempt begins that could end in the last tenth of the timeout at a silent server."""
    clock = Clock()
    begun: list[float] = []

    def silent() -> None:
        begun.append(clock.now)
        clock.now += silence_timeout(1.0)
        raise TimeoutError

    with pytest.raises(TimeoutError):
        Retries(1.0, clock=clock, sleep=clock.sleep).call(silent)
    assert 2 <= len(begun) <= 4
    assert begun[-1] <= 0.8
    assert list(Retries(0.1).waits()) == []


def test_the_first_attempt_counts_as_well() -> None:
    """The timeout begins with the first attempt: if one takes half of it, the second is the last."""
    clock = Clock()
    begun: list[float] = []

    def slow() -> None:
        begun.append(clock.now)
        clock.now += 50.0
        raise TimeoutError

    with pytest.raises(TimeoutError):
        Retries(100.0, clock=clock, sleep=clock.sleep).call(slow)
    assert len(begun) == 2
    assert clock.now < 101.0
