"""A checkpoint's directory in S3 or a server with its protocol: multipart uploads, and range reads by many threads.

s3fs interprets the user's URL and ``storage_options``. The bytes go through botocore, on which s3fs is built: its
threads take half of the CPU time of s3fs's event loop (0.6 instead of 1.1 s/GB for reads, 1.1 instead of 2.0 for
writes). They also send parts from the buffers that hold them, and need no event loop, which a fork or the end of the
process would break.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from .._threads import in_background, in_threads
from ..errors import NotCommitted, ReadError
from .base import FileIdentity, FileInfo, RangeReader, Refused, Sink, Storage, rest_of
from .remote import RemoteStorage
from .retry import is_transient
from .s3_client import NoSuchObject, PastEnd, receive, shared_client

__all__ = ["S3Storage"]

_T = TypeVar("_T")

_PART = 8 << 20  # larger ones are no faster, and take more memory; S3's least is 5 MiB
_MOST_PARTS = 10_000
_CONCURRENCY = 8
_NOT_IMPLEMENTED = 501


class S3Storage(RemoteStorage):
    """Objects below a prefix of a bucket. The bucket must exist.

    Args:
        filesystem: s3fs's, which is not connected.
        root: Bucket and prefix.
        url: The directory, as the user named it.
        scrub: Removes credentials from a text.
        timeout: Seconds after which a request is given up.
    """

    # Each request costs as much as a few MiB.
    reads = dataclasses.replace(RemoteStorage.reads, max_threads=32, max_coalesced_bytes=16 << 20)
    max_file_bytes = 64 << 30  # 8,192 parts
    adopts = True
    max_adopted_bytes = 5 << 30  # S3 copies no larger object in one request
    missing = NoSuchObject
    uploads_per_page = 1000
    """How many uploads the server lists in one answer."""

    def __init__(self, filesystem: Any, root: str, url: str, scrub: Callable[[str], str], timeout: float) -> None:
        self.bucket, prefix, version = filesystem.split_path(root.rstrip("/") + "/")
        if version is not None:
            raise ValueError("a URL with a versionId is of one object, and a checkpoint is many: leave it out")
        super().__init__(url, prefix, scrub, timeout)
        self._client = self.connection = shared_client(filesystem, timeout)

    def listing(self) -> tuple[list[FileInfo], list[str]]:
        files: list[FileInfo] = []
        folders: list[str] = []
        prefix = self._full("")
        with self._translated(ReadError, f"cannot list {self.path}"):
            for page in self._pages("list_objects_v2", "", ["ContinuationToken"], Delimiter="/"):
                for entry in page.get("Contents", []):
                    if name := entry["Key"].removeprefix(prefix):  # a console makes an object of the prefix itself
                        modified = entry["LastModified"].timestamp()
                        files.append(FileInfo(name, entry["Size"], modified, modified))
                for entry in page.get("CommonPrefixes", []):
                    if name := entry["Prefix"].removeprefix(prefix).rstrip("/"):  # a key may begin with a slash
                        folders.append(name)
        if not files and not folders:
            raise NotCommitted(f"there is nothing at {self.path}")
        return files, folders

    def create(self, name: str, nbytes: int, *, sync: bool) -> Sink:
        return _S3Sink(self, name, nbytes)

    def identity(self, name: str) -> FileIdentity | None:
        with suppress(OSError, KeyError):
            answer = self.call("head_object", name)
            return int(answer["ContentLength"]), str(answer["ETag"])
        return None

    def adopt(
        self, source: Storage, source_name: str, identity: FileIdentity, name: str, *, sync: bool
    ) -> FileIdentity | None:
        if not isinstance(source, S3Storage) or int(identity[0]) > self.max_adopted_bytes:
            return None
        origin = {"Bucket": source.bucket, "Key": source._full(source_name)}
        try:
            if source.identity(source_name) != identity:  # some servers ignore the condition
                return None
            self.call("copy_object", name, CopySource=origin, CopySourceIfMatch=identity[1])
            copied = self.identity(name)
        except OSError:
            return None
        return copied if copied is not None and copied[0] == identity[0] else None

    def put(self, name: str, data: bytes, *, sync: bool, replace: bool = True, save_id: str = "") -> None:
        condition = {} if replace else {"IfNoneMatch": "*"}
        with self._putting(name, data, is_new=not replace) as begin:
            begin()
            # Not patiently: an attempt whose answer was lost may have put the object, and another job may have replaced
            # it since. A late attempt would bring back a checkpoint whose files that job has removed.
            self._put(name, data, condition)

    def put_if(self, name: str, expected: bytes | None, data: bytes, *, sync: bool = True, save_id: str = "") -> bool:
        if expected is None:
            return super().put_if(name, None, data, sync=sync, save_id=save_id)
        tag = self._ask(name, lambda name: self.call("head_object", name)["ETag"])
        if tag is None or self.read(name) != expected:  # in this order: what is replaced must be what was read
            return False
        try:
            with self._putting(name, data) as begin:
                begin()
                self._put(name, data, {"IfMatch": tag})
        except Refused:
            if self.read(name) != expected:  # another one was quicker
                return False
            raise
        return True

    def open(self, name: str) -> RangeReader:
        return _S3Reader(self, name)

    def remove(self, *names: str) -> None:
        in_threads(lambda name: self.call("delete_object", name), names)

    def discard(self, *names: str) -> None:
        """Removes objects, and aborts uploads to their keys, which nobody else may know of."""
        for name in names:
            self.abort_uploads(name)
        self.remove(*names)

    def uploads(self) -> list[FileInfo]:
        with self._translated(ReadError, f"cannot list the uploads to {self.path}"):
            begun = [(upload["Key"], upload["Initiated"].timestamp()) for upload in self._uploads("")]
        return [FileInfo(key.removeprefix(self._full("")), 0, moment, moment) for key, moment in begun]

    def abort_uploads(self, name: str) -> None:
        """Aborts all uploads to a file, as far as the server lets us."""
        with suppress(OSError):
            for upload in list(self._uploads(name)):
                if upload["Key"] == self._full(name):
                    self.call("abort_multipart_upload", name, UploadId=upload["UploadId"])

    def call(self, operation: str, name: str, **arguments: Any) -> Any:
        """One request about an object.

        Raises:
            FileNotFoundError: it does not exist (`NoSuchObject`), or its bucket does not.
            OSError: anything else that the server answers, or that happens on the way to it.
        """
        return self._client.call(operation, Bucket=self.bucket, Key=self._full(name), **arguments)

    def patiently(self, request: Callable[[], _T]) -> _T:
        """The result of a request for a data file, repeated until the timeout: botocore gives up after some seconds.

        Six attempts are soon over where their random waits are short: of eight parts under way one would fail, and
        the save with it, in half of all outages of 8 s. What the user says of ``retries`` holds as it is: then only
        bodies that break off are asked for again. A server that has never answered has a wrong address, most likely.
        """
        if self._client.retries_are_chosen:
            return self.retries.call(request, lambda error: isinstance(error, _BrokenOff))
        retries = dataclasses.replace(self.retries, attempts=math.inf)
        return retries.call(request, lambda error: self._client.has_answered and is_transient(error))

    def send(self, operation: str, name: str, data: memoryview, **arguments: Any) -> Any:
        """`call` with a body."""
        return self.call(operation, name, Body=_Body(data), **self._client.checksum(data), **arguments)

    def part(self, answer: Mapping[str, Any]) -> dict[str, str]:
        """From the answer to a part: what completing the upload has to say of it."""
        return {name: answer[name] for name in self._client.names_of_part() if name in answer}

    def _put(self, name: str, data: bytes, condition: Mapping[str, str]) -> None:
        """Puts an object on a condition, or without it on a server that says that it has no conditional writes."""
        try:
            self.call("put_object", name, Body=data, **condition)
        except OSError as error:
            if not condition or getattr(error, "status", None) != _NOT_IMPLEMENTED:
                raise
            self.call("put_object", name, Body=data)

    def _read(self, name: str, most: int | None) -> bytes:
        return _S3Reader(self, name).read(most)

    def _head(self, name: str) -> int:
        return int(self.call("head_object", name)["ContentLength"])

    def _full(self, name: str) -> str:
        return f"{self._root}/{name}" if self._root else name

    def _described(self, error: Exception) -> str:
        return str(error)  # it begins with botocore's class, or with the server's code

    def _uploads(self, start: str) -> Iterator[dict[str, Any]]:
        """The server's description of each upload to a name that begins like this."""
        markers = ("KeyMarker", "UploadIdMarker")
        for page in self._pages("list_multipart_uploads", start, markers, MaxUploads=self.uploads_per_page):
            yield from page.get("Uploads", [])

    def _pages(self, operation: str, start: str, markers: Sequence[str], **query: Any) -> Iterator[dict[str, Any]]:
        """The server's answers to a question about names that begin like this, page by page."""
        query |= {"Bucket": self.bucket, "Prefix": self._full(start)}
        while True:
            page = self._client.call(operation, **query)
            yield page
            following = {name: page[f"Next{name}"] for name in markers if page.get(f"Next{name}")}
            if not page.get("IsTruncated") or not following:  # SeaweedFS gives one of two markers
                return
            query |= following


class _S3Reader(RangeReader):
    """Reads ranges of an object. When a body breaks off, the rest of it is requested."""

    def __init__(self, storage: S3Storage, name: str) -> None:
        self._storage = storage
        self._name = name

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        stop = offset + sum(buffer.nbytes for buffer in buffers)

        def receive_rest() -> None:
            nonlocal buffers, offset
            count = self._receive(buffers, offset, stop)
            buffers, offset = rest_of(buffers, count), offset + count
            if offset < stop:
                raise _BrokenOff("the connection broke off again and again")

        if offset < stop:
            self._storage.patiently(receive_rest)

    def read(self, most: int | None) -> bytes:
        """The whole object, or its first bytes."""
        limits = {} if most is None else {"Range": f"bytes=0-{most - 1}"}
        answer = self._storage.call("get_object", self._name, **limits)
        if "ContentLength" not in answer:  # some proxies send an answer as they get it
            return bytes(answer["Body"].read())
        content = memoryview(bytearray(answer["ContentLength"]))
        count = receive(answer, [content])
        self.read_into([content[count:]], count)
        return bytes(content)

    def _receive(self, buffers: Sequence[memoryview], offset: int, stop: int) -> int:
        """Requests a range once; returns how many of its bytes arrived."""
        wanted = f"bytes={offset}-{stop - 1}"
        answer = self._storage.call("get_object", self._name, Range=wanted)
        if offset and not str(answer.get("ContentRange", "")).startswith(f"bytes {offset}-"):
            answer["Body"].close()
            raise OSError("the server answers a request for a range with the whole object")
        count, sent = receive(answer, buffers), answer.get("ContentLength", stop - offset)
        if count == sent < stop - offset:
            raise PastEnd(f"the file ends {stop - offset - sent:,} bytes too early")
        return count


class _BrokenOff(ConnectionError):
    """The connection was lost while a body came."""


class _Body:
    """A part as a file whose pieces are views of it.

    botocore would send plain bytes in one call, and the timeout would then be for all of them.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def __len__(self) -> int:
        return self._data.nbytes

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._data.nbytes)[whence]
        return self._position

    def read(self, count: int | None = None) -> memoryview:
        stop = self._data.nbytes if count is None or count < 0 else self._position + count
        piece = self._data[self._position : stop]
        self._position += piece.nbytes
        return piece


class _S3Sink(Sink):
    """Puts an object of one part, or uploads one of many parts."""

    concurrency = _CONCURRENCY

    def __init__(self, storage: S3Storage, name: str, nbytes: int) -> None:
        super().__init__()
        self._storage = storage
        self._name = name
        self._nbytes = nbytes
        self._parts: dict[int, dict[str, str]] = {}
        self._upload: Future[dict[str, Any]] | None = None
        self._beginnings = 0
        self.part_bytes = max(_PART, -(-nbytes // _MOST_PARTS))
        if nbytes > self.part_bytes:
            self._upload = in_background(functools.partial(storage.patiently, self._begin))

    def _begin(self) -> dict[str, Any]:
        if not self._is_open:  # `_abort` waits for this
            raise OSError("the file was given up before the server had answered")
        self._beginnings += 1
        answer: dict[str, Any] = self._storage.call("create_multipart_upload", self._name)
        return answer

    def _put_part(self, number: int, data: memoryview) -> None:
        storage = self._storage
        if self._upload is None:
            storage.patiently(lambda: storage.send("put_object", self._name, data))
        else:
            part = {"PartNumber": number + 1, **self._id()}
            answer = storage.patiently(lambda: storage.send("upload_part", self._name, data, **part))
            self._parts[number + 1] = storage.part(answer)

    def _complete(self) -> None:
        if self._upload is not None:
            self._complete_upload()
            self._abort_others(self._upload)
        elif not self._nbytes:
            self._storage.call("put_object", self._name, Body=b"")

    def _abort(self) -> None:
        if self._upload is None:
            self._storage.remove(self._name)
            return
        with suppress(OSError):
            self._storage.call("abort_multipart_upload", self._name, **self._id())
        self._abort_others(self._upload)

    def _id(self) -> dict[str, Any]:
        """Names the upload in a request. Waits until it has begun, and raises the error if it has not."""
        assert self._upload is not None
        return {"UploadId": self._upload.result()["UploadId"]}

    def _abort_others(self, upload: Future[dict[str, Any]]) -> None:
        """A retry may have begun a second upload: the lost answer named one that nobody else knows of."""
        is_repeated = self._beginnings > 1 or upload.exception()
        if is_repeated or upload.result()["ResponseMetadata"].get("RetryAttempts", 0) > 0:
            self._storage.abort_uploads(self._name)

    def _complete_upload(self) -> None:
        """Makes one object of the parts."""
        parts = [{"PartNumber": number, **part} for number, part in sorted(self._parts.items())]
        whole = {"MultipartUpload": {"Parts": parts}, **self._id()}
        try:
            self._storage.patiently(lambda: self._storage.call("complete_multipart_upload", self._name, **whole))
        except OSError:
            # If an answer was lost, the request is repeated. Then the upload is gone: the first request completed it.
            if self._storage.head(self._name) != self._nbytes:
                raise
