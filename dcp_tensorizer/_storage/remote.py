"""What storages behind a URL have in common: their errors as the package's own, without credentials."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from ..errors import CheckpointError, ReadError, WriteError
from .base import TAKEN, RangeReader, ReadTuning, Refused, Storage
from .redact import redact
from .retry import Retries

__all__ = ["Ranges", "RemoteStorage"]

_T = TypeVar("_T")


class RemoteStorage(Storage):
    """A directory behind a URL.

    Args:
        url: The directory, as the user named it.
        root: The directory, as the server names it.
        scrub: Removes credentials from a text.
        timeout: Seconds after which a request is not tried again.
    """

    # 512 KiB arrive in the time that a request takes, if it takes 5 ms and a connection brings 100 MB/s.
    reads = ReadTuning(max_gap_bytes=512 << 10)
    missing: type[Exception] = FileNotFoundError
    """Raised for a file that does not exist."""

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

    @abc.abstractmethod
    def _read(self, name: str, most: int | None) -> bytes:
        """A file's contents, ``most`` bytes of them at most; raises `missing`."""

    @abc.abstractmethod
    def _head(self, name: str) -> int:
        """A file's size; raises `missing`."""

    def _full(self, name: str) -> str:
        """A file's name as the server knows it."""
        return f"{self._root}/{name}"

    def _ask(self, name: str, ask: Callable[[str], _T]) -> _T | None:
        with self._translated(ReadError, f"cannot read {self.path}/{name}"):
            try:
                return ask(name)
            except self.missing:
                return None

    @contextmanager
    def _translated(self, kind: type[CheckpointError], what: str) -> Iterator[None]:
        """Raises the library's errors as ours. Their tracebacks may show credentials, and are left out."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            raise self._error(kind, what, error) from None

    @contextmanager
    def _putting(self, name: str, data: bytes, *, is_new: bool = False) -> Iterator[Callable[[], None]]:
        """Translates the errors of a block that puts a file in place. The block announces each attempt with a call.

        The server may still carry out an attempt whose answer was lost, whatever happens to the next one.

        Args:
            name: Of the file.
            data: Its contents.
            is_new: Check first that there is no such file, for servers that ignore the condition of a put.
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
                # An attempt may have met the file of the one before it, whose answer was lost.
                if not attempts or self.read(name) != data:
                    raise FileExistsError(TAKEN) from None
        except Exception as error:
            is_final = isinstance(error, FileExistsError) or (attempts == 1 and self._is_refusal(error))
            kind = Refused if is_final or not attempts else WriteError
            raise self._error(kind, f"cannot write {self.path}/{name}", error) from None

    def _is_refusal(self, error: Exception) -> bool:
        """Whether the server answered that it does not do what it was asked."""
        return isinstance(error, FileNotFoundError | PermissionError)

    def _error(self, kind: type[CheckpointError], what: str, error: Exception) -> CheckpointError:
        return kind(self.scrub(f"{what}: {self._described(error)}"))

    def _described(self, error: Exception) -> str:
        return f"{type(error).__name__}: {error}"


class Ranges(RangeReader):
    """Reads ranges with a function that returns the bytes from a start to a stop."""

    def __init__(self, get: Callable[[int, int], bytes]) -> None:
        self._get = get

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        nbytes = sum(buffer.nbytes for buffer in buffers)
        data = memoryview(self._get(offset, offset + nbytes))
        if data.nbytes > nbytes:
            raise OSError("the server answers a request for a range with more than that: it knows no ranges")
        if data.nbytes < nbytes:
            raise EOFError(f"the file ends {nbytes - data.nbytes:,} bytes too early")
        for buffer in buffers:
            buffer[:] = data[: buffer.nbytes]
            data = data[buffer.nbytes :]
