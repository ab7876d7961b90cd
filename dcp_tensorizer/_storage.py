"""One checkpoint's directory, on local disk or behind any fsspec URL; the only module that knows fsspec.

Names are literal: no globbing, no listing, and off local disks no rename (fsspec's copies, and globs).
"""

from __future__ import annotations

import abc
import os
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ._direct_io import LocalFile, LocalSink
from .errors import ReadError, WriteError

__all__ = ["RangeReader", "Sink", "Storage", "open_storage", "redact"]


class Sink(Protocol):
    """A file that is written in parts of equal size, in any order and by several threads."""

    part_bytes: int
    """Size of every part but the last."""
    concurrency: int
    """Parts that are worth writing at once."""
    bytes_written: int
    """Bytes taken so far: it grows as long as the write makes progress."""
    write_seconds: float
    """Time spent in `put`, added up over threads."""
    close_seconds: float
    """Time spent in `close`, when everything else is done."""

    def put(self, number: int, data: memoryview) -> None:
        """Takes a part; ``data`` begins on a page, and is the caller's again afterwards. Raises `OSError`."""

    def close(self) -> None:
        """Completes the file, and makes it durable; raises `OSError`, and then there is no file."""

    def abort(self) -> None:
        """Drops the file."""


class RangeReader(Protocol):
    """An open file to read ranges of, from several threads."""

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fills ``buffers`` from ``offset`` on; raises `EOFError` or `OSError`."""

    def close(self) -> None: ...


class Storage(abc.ABC):
    """A checkpoint's directory.

    Attributes:
        path: For messages and metadata: without credentials.
        location: What `open_storage` takes to open the same directory in another process.
        in_process: The data lives in this process's memory, so another process cannot write it.
        read_threads: How many reads at once reach its full speed.
    """

    path: str
    location: str
    in_process = False
    read_threads = 16

    @abc.abstractmethod
    def make_directory(self) -> None:
        """Creates the directory and its parents, durably; raises `WriteError`."""

    @abc.abstractmethod
    def create(self, name: str, nbytes: int, *, sync: bool) -> Sink:
        """Creates a new file of ``nbytes`` bytes."""

    @abc.abstractmethod
    def sync_directory(self) -> None:
        """Makes the names of new files durable."""

    @abc.abstractmethod
    def publish(self, name: str, data: bytes, *, sync: bool) -> None:
        """Puts a small file in place as a whole, replacing an old one; raises `WriteError`."""

    @abc.abstractmethod
    def read(self, name: str) -> bytes | None:
        """A small file's contents, None if it does not exist; raises `ReadError`."""

    @abc.abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes in a file, None if it does not exist; raises `ReadError`."""

    @abc.abstractmethod
    def open(self, name: str) -> RangeReader:
        """Opens a file for range reads; raises `OSError`."""

    @abc.abstractmethod
    def remove(self, name: str) -> None:
        """Removes a file; one that is not there is no error."""

    def scrub(self, text: str) -> str:
        """``text`` without credentials, for messages that quote another library."""
        return redact(text)


def open_storage(path: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Storage:
    """The storage that ``path`` names: a local path, or any URL that fsspec opens.

    Args:
        path: Local path (``str`` or path-like, taken literally) or URL.
        options: Passed to the fsspec filesystem; ignored for local paths.

    Raises:
        WriteError: the URL's protocol is unknown, or its library is missing.
    """
    text = os.fspath(path)
    if isinstance(path, os.PathLike) or ("://" not in text and "::" not in text):
        return _LocalStorage(Path(os.path.abspath(text)))
    try:
        import fsspec.core
        from fsspec.implementations.local import LocalFileSystem

        filesystem, root = fsspec.core.url_to_fs(text, **dict(options or {}))
    except (ImportError, ValueError, TypeError, OSError) as error:
        message = _Scrubber(options)(f"cannot open {text}: {type(error).__name__}: {error}")
        raise WriteError(
            f"{message} (is the package for this kind of URL installed, and are storage_options right?)"
        ) from None
    if type(filesystem) is LocalFileSystem:
        return _LocalStorage(Path(root))
    return _FsspecStorage(filesystem, root, text, _Scrubber(options))


def redact(text: str) -> str:
    """``text`` with the ``user:password@`` of every URL in it removed."""
    return re.sub(r"([A-Za-z][A-Za-z0-9+.-]*://)[^/\s]*@", r"\1", text)


class _LocalStorage(Storage):
    def __init__(self, root: Path) -> None:
        self._root = root
        self.path = self.location = str(root)
        self.read_threads = min(8, 2 * len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4)

    def make_directory(self) -> None:
        created = [folder for folder in (self._root, *self._root.parents) if not folder.exists()]
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            for folder in created:
                _sync_directory(folder.parent)
        except OSError as error:
            raise WriteError(f"cannot create the checkpoint directory {self.path}: {error}") from error

    def create(self, name: str, nbytes: int, *, sync: bool) -> Sink:
        return LocalSink(self._root / name, nbytes, sync=sync)

    def sync_directory(self) -> None:
        _sync_directory(self._root)

    def publish(self, name: str, data: bytes, *, sync: bool) -> None:
        temporary = self._root / f"{name}.{uuid.uuid4().hex}.tmp"
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            os.replace(temporary, self._root / name)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise WriteError(f"cannot write {self._root / name}: {error}") from error
        if sync:
            self.sync_directory()

    def read(self, name: str) -> bytes | None:
        try:
            return (self._root / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ReadError(f"cannot read {self._root / name}: {error}") from error

    def size(self, name: str) -> int | None:
        try:
            return (self._root / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ReadError(f"cannot read {self._root / name}: {error}") from error

    def open(self, name: str) -> RangeReader:
        return LocalFile(self._root / name)

    def remove(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)


class _FsspecStorage(Storage):
    """Anything else that fsspec opens. A file is spooled on local disk and put in one request when it is complete."""

    def __init__(self, filesystem: Any, root: str, url: str, scrub: _Scrubber) -> None:
        protocol = filesystem.protocol
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self._scrub = scrub
        self.path = redact(url)
        self.location = url
        self.in_process = "memory" in ((protocol,) if isinstance(protocol, str) else protocol)

    def scrub(self, text: str) -> str:
        return self._scrub(text)

    def make_directory(self) -> None:
        try:
            self._filesystem.makedirs(self._root, exist_ok=True)
        except Exception as error:
            raise WriteError(self.scrub(f"cannot create {self.path}: {type(error).__name__}: {error}")) from None

    def create(self, name: str, nbytes: int, *, sync: bool) -> Sink:
        return _SpoolSink(lambda spool: self._filesystem.put_file(spool, self._full(name)))

    def sync_directory(self) -> None:
        """A put object is durable with its name."""

    def publish(self, name: str, data: bytes, *, sync: bool) -> None:
        try:
            self._filesystem.pipe_file(self._full(name), data)
        except Exception as error:
            raise WriteError(self.scrub(f"cannot write {self.path}/{name}: {type(error).__name__}: {error}")) from None

    def read(self, name: str) -> bytes | None:
        try:
            return bytes(self._filesystem.cat_file(self._full(name)))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise ReadError(self.scrub(f"cannot read {self.path}/{name}: {type(error).__name__}: {error}")) from None

    def size(self, name: str) -> int | None:
        try:
            return int(self._filesystem.info(self._full(name))["size"])
        except FileNotFoundError:
            return None
        except Exception as error:
            raise ReadError(self.scrub(f"cannot read {self.path}/{name}: {type(error).__name__}: {error}")) from None

    def open(self, name: str) -> RangeReader:
        return _FsspecReader(self._filesystem, self._full(name))

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._filesystem.rm_file(self._full(name))

    def _full(self, name: str) -> str:
        return f"{self._root}/{name}"


class _FsspecReader:
    def __init__(self, filesystem: Any, path: str) -> None:
        self._filesystem = filesystem
        self._path = path

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        wanted = sum(buffer.nbytes for buffer in buffers)
        data = memoryview(self._filesystem.cat_file(self._path, start=offset, end=offset + wanted))
        if data.nbytes != wanted:
            raise EOFError(f"the file ends {wanted - data.nbytes:,} bytes too early")
        for buffer in buffers:
            buffer[:] = data[: buffer.nbytes]
            data = data[buffer.nbytes :]

    def close(self) -> None:
        """Nothing is open between requests."""


class _SpoolSink:
    """A temporary local file that is put to its destination as a whole when it is closed."""

    part_bytes = 4 << 20
    concurrency = 1

    def __init__(self, put: Callable[[str], object]) -> None:
        self._spool = tempfile.NamedTemporaryFile(prefix="dcp_tensorizer-", suffix=".spool")  # noqa: SIM115
        self._put = put
        self.bytes_written = 0
        self.write_seconds = 0.0
        self.close_seconds = 0.0

    def put(self, number: int, data: memoryview) -> None:
        started = time.perf_counter()
        self._spool.seek(number * self.part_bytes)
        self._spool.write(data)
        self.write_seconds += time.perf_counter() - started
        self.bytes_written += data.nbytes

    def close(self) -> None:
        """Puts the file. Idempotent."""
        if not self._spool.closed:
            started = time.perf_counter()
            with self._spool:
                self._spool.flush()
                self._put(self._spool.name)
            self.close_seconds += time.perf_counter() - started

    def abort(self) -> None:
        """Drops the file. Idempotent; does nothing after `close`."""
        self._spool.close()


class _Scrubber:
    """Removes credentials from a text: those in URLs, and every longer string among the storage options."""

    def __init__(self, options: Mapping[str, Any] | None) -> None:
        self._secrets = sorted(_strings(options or {}), key=len, reverse=True)

    def __call__(self, text: str) -> str:
        text = redact(text)
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


_OPEN_KEY = re.compile("endpoint|region")


def _strings(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [text for key, item in value.items() if not _OPEN_KEY.search(str(key)) for text in _strings(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _strings(item)]
    return (
        [value] if isinstance(value, str) and len(value) >= 6 and not value.startswith(("http://", "https://")) else []
    )


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
