"""A checkpoint's directory behind any fsspec filesystem: files are written as streams and read by ranges."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

from .._threads import in_threads
from ..errors import CheckpointError, NotCommitted, ReadError, WriteError
from .base import TAKEN, FileInfo, RangeReader, Ranges, Refused, Sink, Storage
from .redact import redact
from .retry import is_transient, retry

__all__ = ["StreamStorage"]


class StreamStorage(Storage):
    """What every filesystem of fsspec can do.

    Google Cloud Storage and Azure make an object visible when its stream is closed. With others a data file may be
    seen while it is being written, which no reader of a checkpoint looks at before ``.metadata`` names it.

    Args:
        filesystem: fsspec's.
        root: The directory, as the filesystem names it.
        url: The directory, as the user named it.
        scrub: Removes credentials from a text.
        timeout: Seconds after which a request is not tried again.
    """

    # 512 KiB arrive in the time that a request takes, where it takes 5 ms and a connection brings 100 MB/s.
    max_gap_bytes = 512 << 10

    def __init__(self, filesystem: Any, root: str, url: str, scrub: Callable[[str], str], timeout: float) -> None:
        protocol = filesystem.protocol
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self._scrub = scrub
        self._timeout = timeout
        self.path = redact(url)
        self.location = url
        self.in_process = "memory" in ((protocol,) if isinstance(protocol, str) else protocol)

    def scrub(self, text: str) -> str:
        return self._scrub(text)

    def child(self, name: str) -> Storage:
        child = copy.copy(self)
        child._root, child.path, child.location = (
            f"{where}/{name}" for where in (self._root, self.path, self.location)
        )
        return child

    def listing(self) -> tuple[list[FileInfo], list[str]]:
        try:
            self._filesystem.invalidate_cache(self._root)
            entries = self._call("ls", self._root, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            raise NotCommitted(f"there is nothing at {self.path}") from None
        except Exception as error:
            raise ReadError(self.scrub(f"cannot list {self.path}: {type(error).__name__}: {error}")) from None
        named = [(entry["name"].rstrip("/").rpartition("/")[2], entry) for entry in entries]
        files = [FileInfo(name, int(e["size"] or 0), _modified(e)) for name, e in named if e["type"] == "file" and name]
        return files, [name for name, entry in named if entry["type"] == "directory"]

    def make_directory(self) -> None:
        try:
            self._call("makedirs", self._root, exist_ok=True)
        except Exception as error:
            raise WriteError(self.scrub(f"cannot create {self.path}: {type(error).__name__}: {error}")) from None

    def create(self, name: str, nbytes: int, *, sync: bool) -> Sink:
        return _StreamSink(self._filesystem, self._full(name))

    def sync_directory(self) -> None:
        """An object is durable with its name."""

    def put(self, name: str, data: bytes, *, sync: bool, replace: bool = True) -> None:
        try:
            self._put(name, data, replace)
        except Refused as error:
            raise Refused(self.scrub(f"cannot write {self.path}/{name}: {error}")) from None
        except Exception as error:
            raise WriteError(self.scrub(f"cannot write {self.path}/{name}: {type(error).__name__}: {error}")) from None

    def read(self, name: str) -> bytes | None:
        try:
            return bytes(self._call("cat_file", self._full(name)))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._read_error(name, error) from None

    def head(self, name: str) -> int | None:
        try:
            return int(self._call("info", self._full(name))["size"])
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._read_error(name, error) from None

    def open(self, name: str) -> RangeReader:
        return Ranges(lambda start, stop: self._call("cat_file", self._full(name), start=start, end=stop))

    def remove(self, *names: str) -> None:
        def remove(name: str) -> None:
            with suppress(FileNotFoundError):
                self._call("rm_file", self._full(name))

        in_threads(remove, names)

    def _put(self, name: str, data: bytes, replace: bool) -> None:
        """Puts a small file in place."""
        mode = {} if replace else {"mode": "create"}
        tries = 0

        def put() -> None:
            nonlocal tries
            tries += 1
            self._filesystem.pipe_file(self._full(name), data, **mode)

        try:
            if not replace and self.head(name) is not None:  # also for filesystems that do not know the mode
                raise FileExistsError
            retry(put, is_transient, self._timeout, self._renew)
        except FileExistsError:
            if not tries or self.read(name) != data:  # an answer that was lost, and a retry that met its own file
                raise Refused(f"{FileExistsError.__name__}: {TAKEN}") from None
        except (FileNotFoundError, PermissionError) as error:
            if tries > 1:  # it does not say what has become of a request whose answer was lost
                raise
            raise Refused(f"{type(error).__name__}: {error}") from None

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return retry(
            lambda: getattr(self._filesystem, method)(*args, **kwargs), is_transient, self._timeout, self._renew
        )

    def _renew(self) -> None:
        """Takes a fresh filesystem: with new connections, and with credentials as they are now."""
        old = self._filesystem
        self._filesystem = type(old)(*old.storage_args, **old.storage_options, skip_instance_cache=True)

    def _full(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _read_error(self, name: str, error: Exception) -> CheckpointError:
        return ReadError(self.scrub(f"cannot read {self.path}/{name}: {type(error).__name__}: {error}"))


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


class _StreamSink:
    """A stream of fsspec's, which takes the parts in their order and sends them as it goes."""

    part_bytes = 8 << 20
    concurrency = 1
    in_order = True

    def __init__(self, filesystem: Any, path: str) -> None:
        self._filesystem = filesystem
        self._path = path
        self._stream = filesystem.open(path, "wb", block_size=2 * self.part_bytes)
        self._is_open = True
        self.bytes_written = 0
        self.write_seconds = 0.0
        self.complete_seconds = 0.0

    def put_part(self, number: int, data: memoryview) -> None:
        assert number * self.part_bytes == self.bytes_written, "parts come in their order"
        started = time.perf_counter()
        self._stream.write(data)
        self.write_seconds += time.perf_counter() - started
        self.bytes_written += data.nbytes

    def complete(self) -> None:
        """Completes the object. Idempotent."""
        if self._is_open:
            started = time.perf_counter()
            self._stream.close()
            self._is_open = False
            self.complete_seconds += time.perf_counter() - started

    def abort(self) -> None:
        """Drops the object. Idempotent; does nothing after `complete`."""
        if self._is_open:
            self._is_open = False
            with suppress(Exception):
                self._stream.discard()
            with suppress(Exception):
                self._stream.closed = True  # or else fsspec completes the object when it collects the stream
            with suppress(Exception):
                self._filesystem.rm_file(self._path)
