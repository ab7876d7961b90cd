"""A checkpoint's directory behind any fsspec URL; the only module that knows fsspec."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ._storage import FileInfo, RangeReader, Sink, Storage, redact
from .errors import NotCommitted, ReadError, WriteError

__all__ = ["FsspecStorage", "open_url"]


def open_url(url: str, options: Mapping[str, Any]) -> FsspecStorage | Path:
    """The storage that a URL names, or the local path.

    Raises:
        WriteError: its protocol is unknown, or its library is missing.
    """
    try:
        import fsspec.core
        from fsspec.implementations.local import LocalFileSystem

        filesystem, root = fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError, TypeError, OSError) as error:
        message = Scrubber(options)(f"cannot open {url}: {type(error).__name__}: {error}")
        raise WriteError(
            f"{message} (is the package for this kind of URL installed, and are storage_options right?)"
        ) from None
    if type(filesystem) is LocalFileSystem:
        return Path(root)
    return FsspecStorage(filesystem, root, url, Scrubber(options))


class FsspecStorage(Storage):
    """Anything else that fsspec opens. A file is spooled on local disk and put in one request when it is complete."""

    def __init__(self, filesystem: Any, root: str, url: str, scrub: Scrubber) -> None:
        protocol = filesystem.protocol
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self._scrub = scrub
        self.path = redact(url)
        self.location = url
        self.in_process = "memory" in ((protocol,) if isinstance(protocol, str) else protocol)

    def scrub(self, text: str) -> str:
        return self._scrub(text)

    def child(self, name: str) -> Storage:
        return FsspecStorage(self._filesystem, f"{self._root}/{name}", f"{self.location}/{name}", self._scrub)

    def listing(self) -> tuple[list[FileInfo], list[str]]:
        try:
            self._filesystem.invalidate_cache(self._root)
            entries = self._filesystem.ls(self._root, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            raise NotCommitted(f"there is nothing at {self.path}") from None
        except Exception as error:
            raise ReadError(self.scrub(f"cannot list {self.path}: {type(error).__name__}: {error}")) from None
        named = [(entry["name"].rstrip("/").rpartition("/")[2], entry) for entry in entries]
        files = [FileInfo(name, int(e["size"] or 0), _modified(e)) for name, e in named if e["type"] == "file" and name]
        return files, [name for name, entry in named if entry["type"] == "directory"]

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


def _modified(entry: Mapping[str, Any]) -> float | None:
    """When a file was last written; each file system has a key and a type of its own for it."""
    for key in ("LastModified", "last_modified", "mtime", "updated", "modified", "created"):
        value = entry.get(key)
        with suppress(ValueError):
            value = datetime.fromisoformat(value.replace("Z", "+00:00")) if isinstance(value, str) else value
        if isinstance(value, datetime):
            return (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
        if isinstance(value, int | float):
            return float(value)
    return None


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


class Scrubber:
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
