"""The base class of storages behind a URL. It translates errors, and removes credentials from them."""

from __future__ import annotations

import abc
import copy
import errno
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from ..errors import CheckpointError, NotCommitted, ReadError, WriteError, describe
from .base import TAKEN, FileInfo, RangeReader, ReadTuning, Refused, Storage
from .redact import redact

_T = TypeVar("_T")


class RemoteStorage(Storage):
    """A directory behind a URL.

    Args:
        url: The directory, as the user names it.
        root: The directory, as the server names it.
        scrub: Removes credentials from a text.
        timeout: Seconds after which a request is no longer retried.
    """

    # At 100 MB/s, 512 KiB take as long as a request of 5 ms.
    reads = ReadTuning(max_gap_bytes=512 << 10)
    missing: type[Exception] = FileNotFoundError
    """The exception that `_read`, `_head` and `_list` raise if the file or the directory does not exist."""

    def __init__(self, url: str, root: str, scrub: Callable[[str], str], timeout: float) -> None:
        self.path = redact(url)
        self.location = url
        self.retries = Retries(timeout)
        self._root = root.rstrip("/")
        self._scrub = scrub

    def scrub(self, text: str) -> str:
        return self._scrub(text)

    def child(self, name: str) -> Storage:
        child = copy.copy(self)
        child._root = self._full(name)
        child.path, child.location = f"{self.path}/{name}", f"{self.location}/{name}"
        return child

    def read(self, name: str, most: int | None = None) -> bytes | None:
        return self._ask(name, lambda name: self._read(name, most))

    def head(self, name: str) -> int | None:
        return self._ask(name, self._head)

    def listing(self) -> tuple[list[FileInfo], list[str]]:
        with self._translated(ReadError, f"cannot list {self.path}"):
            try:
                return self._list()
            except self.missing:
                raise NotCommitted(f"{self.path} does not exist") from None

    def put(self, name: str, data: bytes, *, sync: bool, replace: bool = True, save_id: str = "") -> None:
        with self._putting(name, data, is_new=not replace) as begin:
            begin()
            self._put_file(name, data, sync=sync, replace=replace)

    @abc.abstractmethod
    def _read(self, name: str, most: int | None) -> bytes:
        """Returns a file's contents, or at most the first ``most`` bytes of them; raises `missing`."""

    @abc.abstractmethod
    def _head(self, name: str) -> int:
        """Returns a file's size in bytes; raises `missing`."""

    @abc.abstractmethod
    def _list(self) -> tuple[list[FileInfo], list[str]]:
        """Returns the files and the names of the subdirectories; if the directory does not exist, raises `missing`."""

    def _put_file(self, name: str, data: bytes, *, sync: bool, replace: bool) -> None:
        """Writes a small file for `put`, atomically. A storage that defines `put` itself does not need this method.

        Raises:
            FileExistsError: the file exists, and ``replace`` is False. `put` has already checked that it did not
                exist. On servers with conditional writes, only one of several jobs that put at the same time succeeds.
            FileNotFoundError, PermissionError: the file was not written (see `_is_refusal`).
            Exception: the outcome is unknown.
        """
        raise NotImplementedError(f"{type(self).__name__} defines neither _put_file nor put")

    def _full(self, name: str) -> str:
        """Returns a file's path on the server."""
        return f"{self._root}/{name}"

    def _ask(self, name: str, ask: Callable[[str], _T]) -> _T | None:
        with self._translated(ReadError, f"cannot read {self.path}/{name}"):
            try:
                return ask(name)
            except self.missing:
                return None

    @contextmanager
    def _translated(self, kind: type[CheckpointError], what: str) -> Iterator[None]:
        """Translates the library's errors into this package's, without tracebacks, which may show credentials."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            raise self._error(kind, what, error) from None

    @contextmanager
    def _putting(self, name: str, data: bytes, *, is_new: bool = False) -> Iterator[Callable[[], None]]:
        """Translates the errors of a block that puts a file. The block calls the yielded function before each attempt.

        If the response to an attempt is lost, the server may still carry out the attempt, so a later refusal is not
        final. With ``is_new``, first checks that the file does not exist, for servers that ignore the condition of a
        put.
        """
        attempts = 0

        def begin() -> None:
            nonlocal attempts
            attempts += 1

        try:
            try:
                if is_new and self.head(name) is not None:
                    raise FileExistsError
                yield begin
            except FileExistsError:
                # An earlier attempt, whose response was lost, may have written this file.
                if not attempts or self.read(name) != data:
                    raise FileExistsError(TAKEN) from None
        except Exception as error:
            is_final = isinstance(error, FileExistsError) or (attempts == 1 and self._is_refusal(error))
            kind = Refused if is_final or not attempts else WriteError
            raise self._error(kind, f"cannot write {self.path}/{name}", error) from None

    def _is_refusal(self, error: Exception) -> bool:
        """Returns whether the server has refused the request permanently."""
        return isinstance(error, FileNotFoundError | PermissionError)

    def _error(self, kind: type[CheckpointError], what: str, error: Exception) -> CheckpointError:
        return kind(self.scrub(f"{what}: {self._described(error)}"))

    def _described(self, error: Exception) -> str:
        return describe(error)


class Ranges(RangeReader):
    """Reader of a file's ranges. ``get`` returns the bytes from a start to a stop."""

    def __init__(self, get: Callable[[int, int], bytes]) -> None:
        self._get = get

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        nbytes = sum(buffer.nbytes for buffer in buffers)
        data = memoryview(self._get(offset, offset + nbytes))
        if data.nbytes > nbytes:
            raise OSError("the server sent more bytes than the requested range: it does not support ranges")
        if data.nbytes < nbytes:
            raise EOFError(f"the file ends too early: {nbytes - data.nbytes:,} bytes are missing")
        for buffer in buffers:
            buffer[:] = data[: buffer.nbytes]
            data = data[buffer.nbytes :]


# --- retries of requests that may succeed later -----------------------------------------------------------------------

_ATTEMPTS = 6
_LONGEST_WAIT = 10.0
_SILENCES = 10  # a silent attempt times out after a tenth of the timeout, so that several attempts fit in the timeout

_STATUS = {401, 408, 425, 429, 500, 502, 503, 504}  # 401: the token has expired; a new filesystem gets a new one
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
# Classes of errors by name, so that their libraries need not be imported here.
_NAMES = {"ClientConnectionError", "ClientPayloadError", "ServiceRequestError", "ServiceResponseError", "SSHException"}


def silence_timeout(timeout: float) -> float:
    """Returns the seconds of silence after which one attempt of an operation with this timeout times out."""
    return timeout / _SILENCES


def is_transient(error: Exception) -> bool:
    """Returns whether a request that failed with ``error`` may succeed later, as after a lost connection."""
    import asyncio  # not at the top: the writer process imports it only if a request fails

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
    """Retries of failed attempts, with exponential backoff.

    No attempt starts after ``timeout`` seconds. The first wait takes at most ``first_wait`` seconds. This limit doubles
    with each attempt, up to `_LONGEST_WAIT`.
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
        """Calls ``operation``, and ``recover`` before each retry; raises the error of the last attempt."""
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
        """Yields the seconds to wait before each retry, with jitter, so that ranks do not retry at the same moment.

        Ends after ``attempts`` attempts, or when another attempt, if the server does not respond to it, would end in
        the last tenth of the timeout. The timeout begins with this call. The caller needs its last tenth to report the
        failure.
        """
        return self._waits(self.clock() + self.timeout - 2 * silence_timeout(self.timeout))

    def _waits(self, end: float) -> Iterator[float]:
        longest, made = self.first_wait, 1
        while made < self.attempts:
            wait = min(_LONGEST_WAIT, longest) * random.uniform(0.5, 1.0)
            if self.clock() + wait > end:
                return
            yield wait
            longest, made = 2 * longest, made + 1
