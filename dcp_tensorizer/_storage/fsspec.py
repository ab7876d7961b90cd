"""Opens URLs with fsspec's filesystems: those of S3 as an `S3Storage`, all others as a `StreamStorage`."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import datetime, timezone
from typing import Any

from .._runtime.forks import free_in_child
from .._runtime.process_context import environment
from .._runtime.threads import in_threads
from ..errors import WriteError
from .base import TAKEN, FileInfo, RangeReader, Sink, Storage
from .redact import Scrubber, redact
from .remote import Ranges, RemoteStorage, is_transient, silence_timeout
from .s3 import S3Storage
from .urls import check_writable, is_in_process, protocols_of

_AZURE = ("az", "abfs", "abfss")
# The environment variables from which Azure's library reads keys, proxies and certificates. Other variables are
# ignored, because each combination of values needs a filesystem, which is never freed.
_AZURE_VARIABLES = re.compile("(AZURE|IDENTITY|MSI|IMDS|SSL|REQUESTS|CURL)_|.*_PROXY$|HOME$", re.IGNORECASE)
_shared_filesystems: dict[str, Any] = {}
_sharing = free_in_child(threading.Lock())


def is_known(url: str) -> bool:
    import fsspec

    return {*fsspec.available_protocols(), *fsspec.registry}.issuperset(protocols_of(url))


def check_url(url: str) -> str:
    """Returns the first protocol of a URL.

    Raises `WriteError` if a part before ``::`` cannot open another filesystem, `ValueError` for an unknown protocol,
    and `ImportError` if a library is missing.
    """
    import fsspec

    for part in url.split("::")[:-1]:  # fsspec splits every URL there, and would ignore the rest of gs://bucket/a::1
        if not any(map(_opens_another, protocols_of(f"{part}::"))):
            raise WriteError(
                f"cannot open {redact(url)}: its path contains ::, which chains filesystems, as in simplecache::gs://. "
                f"Choose a path without ::, or pass a local path as a pathlib.Path."
            )
    for behind in protocols_of(url):
        fsspec.get_filesystem_class(behind)
    protocol: str = fsspec.utils.get_protocol(url)
    return protocol


def _opens_another(protocol: str) -> bool:
    import fsspec

    try:
        classes = fsspec.get_filesystem_class(protocol).__mro__
    except ImportError:  # the library of an object store: fsspec itself has the filesystems that open another one
        return False
    return any("target_protocol" in inspect.signature(kind.__init__).parameters for kind in classes)


def open_url(url: str, options: Mapping[str, Any], scrub: Scrubber, timeout: float) -> Storage:
    """Opens the storage that a URL names. Raises any error of the filesystem.

    Creates new filesystems instead of taking them from fsspec's cache, so that they have the current credentials and no
    old listings. Azure's filesystems are shared, because adlfs never frees one, and each has its own connections. No
    request is retried after ``timeout`` seconds.
    """
    import fsspec.core

    protocol = check_url(url)
    waits: dict[str, float] = {}
    if protocol in ("gs", "gcs"):
        waits = {"requests_timeout": timeout / 2}  # the duration of a whole request, not of silence
    elif protocol in _AZURE:
        waits = dict.fromkeys(("connection_timeout", "read_timeout"), math.ceil(silence_timeout(timeout)))
    options = {"skip_instance_cache": True} | waits | dict(options)
    if protocol in _AZURE:
        filesystem, root = _shared_filesystem(protocol, url, options)
    else:  # bypasses fsspec's cache for each filesystem of a chain except Azure's
        behind = protocols_of(url)[1:] if "::" in url else []
        anew = {name: {"skip_instance_cache": name not in _AZURE} | dict(options.get(name) or {}) for name in behind}
        filesystem, root = fsspec.core.url_to_fs(url, **(options | anew))
    if protocol in ("s3", "s3a") and "session" not in options:  # only s3fs can use an aiobotocore session
        return S3Storage(filesystem, root, url, scrub, timeout)
    return StreamStorage(filesystem, root, url, scrub, timeout)


def _shared_filesystem(protocol: str, url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    import fsspec

    kind = fsspec.get_filesystem_class(protocol)
    arguments = kind._get_kwargs_from_urls(url) | dict(options)
    variables = {name: value for name, value in environment().items() if _AZURE_VARIABLES.match(name)}
    # With the process id, because a forked child has no thread for the event loop.
    key = fsspec.utils.tokenize(kind, os.getpid(), arguments, variables)
    with _sharing:
        if key not in _shared_filesystems:
            _shared_filesystems[key] = kind(**arguments)
        filesystem = _shared_filesystems[key]
    filesystem.invalidate_cache()
    return filesystem, kind._strip_protocol(url)


# --- a directory in any fsspec filesystem: streams to write, ranges to read -------------------------------------------

_FOR_THREADS = {"memory", "hdfs", "arrow_hdfs"}
"""Protocols of thread-safe filesystems that have no event loop."""
_RETRYING = {"gs", "gcs", *_AZURE}
"""Protocols whose libraries retry requests for minutes, whatever the timeout."""
_swapping = free_in_child(threading.Lock())  # held while a file in this process's memory is replaced


class StreamStorage(RemoteStorage):
    """A directory in any fsspec filesystem. Uses only methods that all filesystems have.

    Google Cloud Storage and Azure show an object only when its stream is closed. Others may show an incomplete data
    file. That is harmless, because no reader reads a data file before ``.metadata`` names it.
    """

    def __init__(self, filesystem: Any, root: str, url: str, scrub: Callable[[str], str], timeout: float) -> None:
        super().__init__(url, root, scrub, timeout)
        protocol = filesystem.protocol
        self.filesystem = filesystem
        self._environment = environment()  # in which the filesystem was created
        protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        self.in_process = is_in_process(url)
        self._turn: AbstractContextManager[Any] = nullcontext()
        if not type(filesystem).async_impl and protocols.isdisjoint(_FOR_THREADS):
            self._turn = free_in_child(threading.RLock())
            self.reads = dataclasses.replace(self.reads, max_threads=1)
        self._interrupts = type(filesystem).async_impl and not protocols.isdisjoint(_RETRYING)

    def _list(self) -> tuple[list[FileInfo], list[str]]:
        self.filesystem.invalidate_cache(self._root)
        try:
            entries = self._call("ls", self._root, detail=True)
        except NotADirectoryError as error:
            raise FileNotFoundError(str(error)) from None
        named = [(entry["name"].rstrip("/").rpartition("/")[2], entry) for entry in entries]
        listed = [(name, int(e["size"] or 0), _modified(e)) for name, e in named if e["type"] == "file" and name]
        files = [FileInfo(name, nbytes, modified, modified) for name, nbytes, modified in listed]
        return files, [name for name, entry in named if entry["type"] == "directory"]

    def make_directory(self) -> None:
        check_writable(self.location)
        with self._translated(WriteError, f"cannot create {self.path}"):
            self._call("makedirs", self._root, exist_ok=True)

    def create(self, name: str, nbytes: int, *, sync: bool) -> Sink:
        check_writable(self.location)
        return _StreamSink(self.filesystem, self._full(name), self._turn)

    def _put_file(self, name: str, data: bytes, *, sync: bool, replace: bool) -> None:
        mode = {} if replace else {"mode": "create"}

        def put() -> None:
            try:
                self._attempt("pipe_file", self._full(name), data, **mode)
            except OSError as error:
                # If the condition fails because another job has written the file, s3fs reports an invalid argument.
                answer = getattr(error.__cause__, "response", None) or {}
                if answer.get("Error", {}).get("Code") in ("PreconditionFailed", "ConditionalRequestConflict"):
                    raise FileExistsError(TAKEN) from None
                raise

        self._retried(put)

    def put_if(self, name: str, expected: bytes | None, data: bytes, *, sync: bool = True, save_id: str = "") -> bool:
        with _swapping if self.in_process else nullcontext():
            return super().put_if(name, expected, data, sync=sync, save_id=save_id)

    def open(self, name: str) -> RangeReader:
        return Ranges(lambda start, stop: self._call("cat_file", self._full(name), start=start, end=stop))

    def remove(self, *names: str) -> None:
        def remove(name: str) -> None:
            with suppress(FileNotFoundError):
                self._call("rm_file", self._full(name))

        in_threads(remove, names)

    def _read(self, name: str, most: int | None) -> bytes:
        limits = {} if most is None else {"start": 0, "end": most}
        return bytes(self._call("cat_file", self._full(name), **limits))

    def _head(self, name: str) -> int:
        self.filesystem.invalidate_cache(self._root)  # some filesystems return sizes from a cached listing
        return int(self._call("info", self._full(name))["size"] or 0)  # adlfs reports no size of a directory

    def _is_refusal(self, error: Exception) -> bool:
        return False  # filesystems retry requests: an attempt whose response was lost may have succeeded

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._retried(lambda: self._attempt(method, *args, **kwargs))

    def _attempt(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the filesystem. If its library retries requests, the call ends after half the timeout."""
        if not self._interrupts:
            return getattr(self.filesystem, method)(*args, **kwargs)
        from fsspec.asyn import sync
        from fsspec.exceptions import FSTimeoutError

        coroutine = getattr(self.filesystem, f"_{method}")
        try:
            return sync(self.filesystem.loop, coroutine, *args, timeout=self.retries.timeout / 2, **kwargs)
        except FSTimeoutError:
            raise TimeoutError("the request timed out") from None

    def _retried(self, operation: Callable[[], Any]) -> Any:
        def in_turn() -> Any:
            with self._turn:
                return operation()

        def may_succeed(error: Exception) -> bool:  # later, or with a filesystem of the current environment
            is_final = isinstance(error, FileNotFoundError | FileExistsError)
            return is_transient(error) or (not is_final and environment() != self._environment)

        return self.retries.call(in_turn, may_succeed, self._renew)

    def _renew(self) -> None:
        """Replaces the filesystem, to get new connections and the current credentials."""
        old, self._environment = self.filesystem, environment()
        self.filesystem = type(old)(*old.storage_args, **old.storage_options, skip_instance_cache=True)


def _modified(entry: Mapping[str, Any]) -> float | None:
    for key in ("LastModified", "last_modified", "mtime", "updated", "modified", "created"):
        value = entry.get(key)
        with suppress(ValueError):
            value = datetime.fromisoformat(value.replace("Z", "+00:00")) if isinstance(value, str) else value
        if isinstance(value, datetime):
            return (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
        if isinstance(value, int | float):
            return float(value)
    return None


class _StreamSink(Sink):
    part_bytes = 8 << 20
    in_order = True

    def __init__(self, filesystem: Any, path: str, turn: AbstractContextManager[Any]) -> None:
        super().__init__()
        self._filesystem = filesystem
        self._path = path
        self._turn = turn
        with turn:
            self._stream = filesystem.open(path, "wb", block_size=2 * self.part_bytes)

    def _put_part(self, number: int, data: memoryview) -> None:
        assert number * self.part_bytes == self.bytes_written, "parts must come in order"
        with self._turn:
            self._stream.write(data)

    def _complete(self) -> None:
        with self._turn:
            self._stream.close()

    def _abort(self) -> None:
        with self._turn:
            with suppress(Exception):
                self._stream.discard()
            with suppress(Exception):
                self._stream.closed = True  # otherwise fsspec completes the object when the stream is garbage-collected
            self._filesystem.rm_file(self._path)
