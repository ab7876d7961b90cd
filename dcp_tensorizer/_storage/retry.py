"""Tries failed requests again: only those that may succeed later, a few times, and with growing waits."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["Retries", "is_transient", "patience_of"]

_T = TypeVar("_T")

_ATTEMPTS = 6
_LONGEST_WAIT = 10.0
_SILENCES = 10  # a timeout's worth: enough for several attempts at a silent server, with waits between them

_STATUS = {401, 408, 425, 429, 500, 502, 503, 504}  # 401: a token has expired, and a fresh filesystem gets a fresh one
_ERRNO = {
    errno.EPIPE,
    errno.ETIMEDOUT,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.ENOTCONN,
}
# Class names of libraries that this package does not import.
_NAMES = {"ClientConnectionError", "ClientPayloadError", "ServiceRequestError", "ServiceResponseError", "SSHException"}


def patience_of(timeout: float) -> float:
    """Seconds of silence after which one attempt ends, if the whole operation may take ``timeout`` seconds."""
    return timeout / _SILENCES


def is_transient(error: Exception) -> bool:
    """Whether a failed request may succeed later: connections, timeouts and overload, not wrong requests.

    fsspec's backends raise the errors of their own libraries. What these have in common is a status, an ``errno``, or
    one of Python's own errors as a base class.
    """
    import asyncio  # the writer process does without it, unless a request fails

    for name in ("status", "status_code", "code"):
        status = getattr(error, name, None)
        if isinstance(status, int) and status >= 400:
            return status in _STATUS
    if isinstance(error, FileNotFoundError | FileExistsError | PermissionError):
        return False
    return (
        isinstance(error, ConnectionError | TimeoutError | asyncio.TimeoutError | EOFError)
        or (isinstance(error, OSError) and error.errno in _ERRNO)
        or any(base.__name__ in _NAMES for base in type(error).__mro__)
    )


@dataclass(frozen=True)
class Retries:
    """When failed attempts are repeated.

    Attributes:
        timeout: Seconds after which there are no more attempts.
        attempts: How many there are at most.
        first_wait: Seconds before the second attempt, at most. Each further wait is twice as long.
        clock, sleep: Of the `time` module, or a test's.
    """

    timeout: float
    attempts: float = _ATTEMPTS
    first_wait: float = 0.2
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def call(
        self,
        operation: Callable[[], _T],
        transient: Callable[[Exception], bool] = is_transient,
        recover: Callable[[], object] = lambda: None,
    ) -> _T:
        """The result of an operation, which is repeated while it fails and may succeed later.

        Args:
            operation: What to do.
            transient: Whether the operation may succeed after this failure.
            recover: What to do before another attempt.

        Raises:
            Exception: what the last attempt raised.
        """
        waits = self.waits()
        while True:
            try:
                return operation()
            except Exception as error:
                wait = next(waits, None) if transient(error) else None
                if wait is None:
                    raise
            self.sleep(wait)
            recover()

    def waits(self) -> Iterator[float]:
        """Seconds to wait before each further attempt, drawn at random so that many ranks do not come back at once.

        They end when another attempt at a silent server could last beyond the timeout.
        """
        end = self.clock() + self.timeout - patience_of(self.timeout)
        longest, made = self.first_wait, 1
        while made < self.attempts:
            wait = min(_LONGEST_WAIT, longest) * random.uniform(0.5, 1.0)
            if self.clock() + wait > end:
                return
            yield wait
            longest, made = 2 * longest, made + 1
