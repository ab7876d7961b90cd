"""Retries: of what may go better the next time, with growing waits, and a bounded number of them and of seconds."""

from __future__ import annotations

import asyncio
import errno
import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

__all__ = ["is_transient", "patience_of", "retry", "waits"]

_T = TypeVar("_T")

_ATTEMPTS = 6
_FIRST_WAIT = 0.2
_LONGEST_WAIT = 10.0
_TRIES = 10  # so that requests can be tried again, with waits between, before time is up

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
# Of libraries that this package does not import, by the names of their classes.
_NAMES = {"ClientConnectionError", "ClientPayloadError", "ServiceRequestError", "ServiceResponseError", "SSHException"}


def patience_of(timeout: float) -> float:
    """Seconds of silence after which a request is given up, of an operation that may take ``timeout`` in all."""
    return timeout / _TRIES


def waits(timeout: float) -> Iterator[float]:
    """Seconds to wait before each retry, drawn so that many ranks do not come back at once.

    They end when another attempt, at a server that stays silent, would not be over ``timeout`` seconds from now.
    """
    end = time.monotonic() + timeout - patience_of(timeout)
    for number in range(_ATTEMPTS - 1):
        wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2**number) * random.uniform(0.5, 1.0)
        if time.monotonic() + wait > end:
            return
        yield wait


def retry(
    operation: Callable[[], _T],
    transient: Callable[[Exception], bool],
    timeout: float,
    recover: Callable[[], object] = lambda: None,
) -> _T:
    """The result of an operation, tried again, after ``recover``, as long as it fails in a way that may pass.

    Args:
        operation: What to do.
        transient: Whether a failure may pass.
        timeout: Seconds after which it is not tried again.
        recover: What to do before another attempt.

    Raises:
        Exception: what the operation raised last.
    """
    left = waits(timeout)
    while True:
        try:
            return operation()
        except Exception as error:
            wait = next(left, None) if transient(error) else None
            if wait is None:
                raise
        time.sleep(wait)
        recover()


def is_transient(error: Exception) -> bool:
    """Whether a failed request is worth another try: connections, timeouts and overload, not what was asked for.

    fsspec's backends raise errors of their own libraries. What those have in common is a status, an ``errno``, or
    descent from one of Python's own errors.
    """
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
