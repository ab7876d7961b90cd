"""A checkpoint's directory in S3, or on a server with S3's protocol: multipart uploads, range reads by many threads.

s3fs interprets the user's URL and ``storage_options``, and botocore, on which s3fs is built, transfers the bytes.
Threads that call botocore take half of the CPU time of s3fs's event loop (0.6 instead of 1.1 s/GB for reads, 1.1
instead of 2.0 for writes), send parts without a copy, and need no event loop, which a fork or the end of the process
would break. obstore can neither list nor abort multipart uploads, so an incomplete upload would stay if a process is
killed or a response is lost. Its uploads fail when a token expires, and it does not read the profiles in ``~/.aws``.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import http.client
import math
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from isal.isal_zlib import crc32

from .._runtime.forks import Finalizer, free_in_child
from .._runtime.process_context import environment
from .._runtime.threads import in_background, in_threads
from ..errors import ReadError
from .base import (
    TAKEN,
    FileIdentity,
    FileInfo,
    RangeReader,
    Refused,
    SharedFile,
    Sink,
    Storage,
    rest_of,
)
from .remote import RemoteStorage, Retries, is_transient, silence_timeout

# --- the client: botocore's, whose errors become built-in ones --------------------------------------------------------

# Defaults for the user's config_kwargs.
_CONFIG: dict[str, Any] = {
    "max_pool_connections": 300,
    # This is botocore's default over https. Over http, signing would hash each part once more, which costs as much as
    # the save's own hashes. The bodies of responses are not signed either, and parts have a CRC-32 unless the user
    # chooses otherwise.
    "s3": {"payload_signing_enabled": False},
}
_PIECE = 1 << 20  # the largest number of bytes that are lost when a body breaks off
_ASYNC_CONFIG = {"connector_args", "http_session_cls"}  # options of aiobotocore that botocore rejects
# The response to a HEAD request has no error code, only the status 400.
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "400"}
_TAKEN = {"PreconditionFailed", "ConditionalRequestConflict", "412"}
# Retryable codes, whatever the status: some come with 400.
_LATER = {"RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests"}
_LATER |= {"RequestLimitExceeded", "BandwidthLimitExceeded"}
_UNAVAILABLE = 503
_MISSING = {"404", "NoSuchKey", "NotFound"}
_DENIED = {"401", "403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"} | _EXPIRED

_shared_clients: weakref.WeakValueDictionary[str, S3Client] = weakref.WeakValueDictionary()
_sharing = free_in_child(threading.Lock())


def shared_client(filesystem: Any, timeout: float) -> S3Client:
    """Returns a client for a filesystem's options: one that is in use, or a new one.

    Storages share clients, because creating botocore's client takes 20 ms.
    """
    # botocore reads keys, profiles, proxies and certificates from the environment. The program of a
    # ``credential_process`` may read any variable.
    variables = sorted(environment().items())
    process = os.getpid()  # a forked child must not use its parent's connections
    key = repr((filesystem.storage_args, filesystem.storage_options, timeout, variables, process))
    with _sharing:
        return _shared_clients.setdefault(key, S3Client(filesystem, timeout))


class S3Client:
    """A botocore client with the options of an s3fs filesystem. The filesystem itself never connects.

    botocore refreshes credentials if it can. If a token expires nevertheless, or the server denies access after the
    environment has changed, the request creates a new botocore client, which reads the credentials again.
    """

    def __init__(self, filesystem: Any, timeout: float) -> None:
        self._filesystem = filesystem
        silence = silence_timeout(timeout)
        self._waiting = {
            "connect_timeout": silence,  # botocore also applies this to sending a piece of a body
            "read_timeout": silence,
        }
        chosen: dict[str, Any] = {"mode": "standard"} | dict(filesystem.config_kwargs.get("retries") or {})
        repeats = chosen.pop("max_attempts", None)  # botocore's older option: the attempts after the first
        self.attempts: int | None = chosen.get("total_max_attempts", None if repeats is None else repeats + 1)
        """The user's limit of attempts for a request, if any."""
        self._retries = chosen | {"total_max_attempts": 1}  # because `Retries` retries requests
        self.has_answered = False
        """True after the server has responded to any request."""
        self._lock = free_in_child(threading.Lock())
        self._botocore: Any = None
        self._environment: Mapping[str, str] = {}  # in which the client was created

    def call(self, operation: str, **arguments: Any) -> Any:
        """Sends a request; raises `OSError`. If access is denied, and new credentials may help, sends it once more."""
        import botocore.exceptions

        client = self._connected(None)
        extra = self._extra(client, operation)
        if "Metadata" in arguments:
            arguments["Metadata"] = extra.pop("Metadata", {}) | arguments["Metadata"]
        arguments = extra | arguments
        try:
            try:
                answer = getattr(client, operation)(**arguments)
                self.has_answered = True
                return answer
            except botocore.exceptions.ClientError as error:
                self.has_answered = True
                if _code(error) in _DENIED:
                    self._retire()
                is_outdated = _code(error) in _DENIED and self._environment != environment()
                if not is_outdated and _code(error) not in _EXPIRED:
                    raise
                body = arguments.get("Body")
                if body is not None and hasattr(body, "seek"):
                    body.seek(0)
                return getattr(self._connected(client), operation)(**arguments)
        except (botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError) as error:
            raise translated(error, arguments.get("Bucket")) from None

    def checksum(self, data: memoryview) -> dict[str, str]:
        """Returns the CRC-32 of a body as arguments of a request, unless the user has chosen another checksum or none.

        botocore takes ten times as long to compute it, and over https it copies the body.
        """
        is_wanted = getattr(self._connected(None).meta.config, "request_checksum_calculation", "") == "when_supported"
        if not is_wanted or any(name.startswith("Checksum") for name in self._filesystem.s3_additional_kwargs):
            return {}
        return {"ChecksumCRC32": base64.b64encode(crc32(data).to_bytes(4, "big")).decode()}

    def names_of_part(self) -> list[str]:
        chosen = self._filesystem.s3_additional_kwargs.get("ChecksumAlgorithm")
        return ["ETag"] if chosen is None else ["ETag", f"Checksum{chosen}"]

    def _retire(self) -> None:
        """Makes the next storage that is opened read the credentials again: the user may have corrected them."""
        with _sharing:
            for key, client in list(_shared_clients.items()):
                if client is self:
                    del _shared_clients[key]

    def _connected(self, expired: Any) -> Any:
        """Returns the botocore client. If there is none yet, or it is ``expired``, creates one."""
        with self._lock:
            if self._botocore is expired:
                self._environment = environment()
                self._botocore = self._connect()
            return self._botocore

    def _connect(self) -> Any:
        import botocore
        import botocore.config
        import botocore.session

        given = self._filesystem
        wanted = {key: value for key, value in given.config_kwargs.items() if key not in _ASYNC_CONFIG}
        config = _CONFIG | self._waiting | wanted
        config["retries"] = self._retries
        config["s3"] = _CONFIG["s3"] | dict(given.config_kwargs.get("s3") or {})
        named = {
            "aws_access_key_id": given.key,
            "aws_secret_access_key": given.secret,
            "aws_session_token": given.token,
            "endpoint_url": given.endpoint_url,
            "use_ssl": given.use_ssl,
        }
        options = {key: value for key, value in named.items() if value is not None} | dict(given.client_kwargs)
        if given.anon:
            config["signature_version"] = botocore.UNSIGNED
            options = {key: value for key, value in options.items() if not key.startswith("aws_")}
        session = botocore.session.Session(**given.kwargs)
        session.register_component("data_loader", _models())
        client = session.create_client("s3", config=botocore.config.Config(**config), **options)
        Finalizer(self, client.close)
        return client

    def _extra(self, client: Any, operation: str) -> dict[str, Any]:
        """Returns the user's arguments for all requests (encryption, requester pays) that an operation accepts."""
        given = dict(self._filesystem.s3_additional_kwargs) | dict(self._filesystem.req_kw)
        if not given:
            return {}
        model = client.meta.service_model.operation_model(client.meta.method_to_api_mapping[operation])
        return {key: value for key, value in given.items() if key in model.input_shape.members}


def receive(answer: Any, buffers: Iterable[memoryview]) -> int:
    """Fills buffers with a response's body; returns the number of bytes that arrived before it ended or broke off.

    Reads directly from the connection, because botocore and urllib3 would copy each byte three more times.
    """
    response = answer["Body"]._raw_stream
    done = 0
    try:
        for buffer in buffers:
            for start in range(0, buffer.nbytes, _PIECE):
                piece = buffer[start : start + _PIECE]
                count: int = response._fp.readinto(piece)
                done += count
                if count < piece.nbytes:
                    return done
        if done == answer.get("ContentLength"):
            response.release_conn()  # other requests may use the connection
    except (OSError, http.client.HTTPException):
        pass
    finally:
        answer["Body"].close()
    return done


@functools.cache
def _models() -> Any:
    """Returns a loader of botocore's descriptions of S3's API. Clients share it, because reading them takes 0.1 s."""
    import botocore.session

    return botocore.session.Session().get_component("data_loader")


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def translated(error: Any, bucket: object = None) -> OSError:
    from botocore.exceptions import (
        ConnectionError as NotConnected,
    )  # not a subclass of the built-in error, nor of HTTPClientError
    from botocore.exceptions import HTTPClientError, SSLError

    if getattr(error, "response", None) is None:
        is_of_connection = isinstance(error, HTTPClientError | NotConnected) and not isinstance(error, SSLError)
        return (ConnectionError if is_of_connection else OSError)(f"{type(error).__name__}: {error}")
    code = _code(error)
    if code in _TAKEN:
        return FileExistsError(TAKEN)
    if code == "NoSuchBucket":
        return FileNotFoundError(f"the bucket {bucket!r} does not exist")
    if code in _MISSING:
        return NoSuchObject("it does not exist")
    if code in ("InvalidRange", "416"):
        return PastEnd("the file ends before the requested range")
    message = f"{code}: {error.response.get('Error', {}).get('Message', '')} ({error.operation_name})"
    if code == "NoSuchUpload":
        return FileNotFoundError(message)
    if code in _DENIED:
        return PermissionError(message)
    answered = _Answered(message)
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    answered.status = _UNAVAILABLE if code in _LATER else status
    return answered


class _Answered(OSError):
    """A server's error. ``status`` determines whether the request is retried."""

    status = 0


class NoSuchObject(FileNotFoundError):
    """The object does not exist. After a HEAD request, its bucket may not exist either."""


class PastEnd(OSError, EOFError):
    """The file ends before the end of a range. Never retried."""

    status = 416


_T = TypeVar("_T")

_PART = 8 << 20  # larger parts are no faster, and take more memory; S3's minimum is 5 MiB
_MOST_PARTS = 10_000
_PART_STEP = 64 << 10  # so that parts end at a page boundary and between two elements
_CONCURRENCY = 8
_NOT_IMPLEMENTED = 501
_SAVE = "dcp-tensorizer-save"  # key in an object's metadata, with the id of the save or sink that uploaded its parts


class S3Storage(RemoteStorage):
    """Objects below a prefix of a bucket. The bucket must exist."""

    # Each request takes as long as the transfer of a few MiB.
    reads = dataclasses.replace(RemoteStorage.reads, max_threads=32, max_coalesced_bytes=16 << 20)
    max_file_bytes = 64 << 30  # 8,192 parts
    uploads_are_hidden = True
    adopts = True
    max_adopted_bytes = 5 << 30  # S3 copies no larger object in one request
    missing = NoSuchObject
    uploads_per_page = 1000
    """The maximum number of uploads that the server lists in one response."""

    def __init__(self, filesystem: Any, root: str, url: str, scrub: Callable[[str], str], timeout: float) -> None:
        self.bucket, prefix, version = filesystem.split_path(root.rstrip("/") + "/")
        if version is not None:
            raise ValueError("versionId= names a single object, but a checkpoint has several. Remove it from the URL")
        super().__init__(url, prefix, scrub, timeout)
        self._client = self.connection = shared_client(filesystem, timeout)
        self.retries = Retries(timeout, self._client.attempts or Retries.attempts, first_wait=1.0)
        self._clean_up_timeout = silence_timeout(timeout)

    def _list(self) -> tuple[list[FileInfo], list[str]]:
        files: list[FileInfo] = []
        folders: list[str] = []
        prefix = self._full("")
        for page in self._pages("list_objects_v2", "", ["ContinuationToken"], Delimiter="/"):
            for entry in page.get("Contents", []):
                if name := entry["Key"].removeprefix(prefix):  # the AWS console creates an object for the prefix itself
                    modified = entry["LastModified"].timestamp()
                    files.append(FileInfo(name, entry["Size"], modified, modified))
            for entry in page.get("CommonPrefixes", []):
                if name := entry["Prefix"].removeprefix(prefix).rstrip("/"):  # a key may begin with a slash
                    folders.append(name)
        if not files and not folders:
            raise NoSuchObject
        return files, folders

    def create(self, name: str, nbytes: int, *, sync: bool) -> Sink:
        return _S3Sink(self, name, nbytes)

    def granule_of(self, nbytes: int) -> int:
        return max(_PART, -(-nbytes // (_MOST_PARTS * _PART_STEP)) * _PART_STEP)

    def begin_shared(self, name: str, nbytes: int, *, save_id: str) -> SharedFile:
        beginnings = 0

        def begin() -> dict[str, Any]:
            nonlocal beginnings
            beginnings += 1
            return self.create_upload(name, save_id)

        try:
            answer = self.call_until_timeout(begin)
        except OSError:
            self.abort_uploads(name)  # a request whose response was lost may have created an upload
            raise
        upload = str(answer["UploadId"])
        if beginnings > 1:
            # An earlier request, whose response was lost, may have created another upload.
            self.abort_uploads(name, but=upload)
        return SharedFile(name, upload, nbytes, save_id)

    def open_shared(self, file: SharedFile, *, sync: bool) -> Sink:
        return _S3Sink(self, file.name, file.nbytes, file.token)

    def complete_shared(self, file: SharedFile, parts: Mapping[int, Mapping[str, str]], *, replace: bool) -> None:
        if not replace and self.head(file.name) is not None:
            raise FileExistsError(TAKEN)
        self.complete_upload(file.name, file.token, parts, file.save_id)

    def owner(self, name: str) -> str | None:
        with suppress(OSError):
            metadata = self.call("head_object", name).get("Metadata", {})
            return next((value for key, value in metadata.items() if key.lower() == _SAVE), None)
        return None

    def abort_shared(self, file: SharedFile) -> None:
        for upload in [file.token] if file.token else self._uploads_to(file.name):
            with suppress(FileNotFoundError):
                self.call("abort_multipart_upload", file.name, UploadId=upload)

    def create_upload(self, name: str, owner: str) -> dict[str, Any]:
        """Starts an upload, without retries; raises `OSError`. The object's metadata will contain ``owner``."""
        answer: dict[str, Any] = self.once("create_multipart_upload", name, Metadata={_SAVE: owner})
        return answer

    def complete_upload(self, name: str, upload: str, parts: Mapping[int, Mapping[str, str]], owner: str) -> None:
        listed = [{"PartNumber": number, **part} for number, part in sorted(parts.items())]
        whole = {"MultipartUpload": {"Parts": listed}, "UploadId": upload}
        try:
            self.call_until_timeout(lambda: self.once("complete_multipart_upload", name, **whole))
        except OSError:
            # If the response to the first request was lost, the retry finds no upload: the first request completed it.
            # Check the owner, because the upload is also gone if another job has aborted it and put its own object.
            if self.owner(name) != owner:
                raise

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
        self._put(name, data, {} if replace else {"IfNoneMatch": "*"}, is_new=not replace)

    def put_if(self, name: str, expected: bytes | None, data: bytes, *, sync: bool = True, save_id: str = "") -> bool:
        if expected is None:
            return super().put_if(name, None, data, sync=sync, save_id=save_id)
        tag = self._ask(name, lambda name: self.call("head_object", name)["ETag"])
        if tag is None or self.read(name) != expected:  # read after the tag, so that the tag is that of these contents
            return False
        try:
            self._put(name, data, {"IfMatch": tag})
        except Refused:
            if self.read(name) != expected:  # another writer was faster
                return False
            raise
        return True

    def open(self, name: str) -> RangeReader:
        return S3Reader(self, name)

    def remove(self, *names: str) -> None:
        in_threads(lambda name: self.call("delete_object", name), names)

    def discard(self, *names: str) -> None:
        """Removes objects, and aborts all uploads to their keys, including those of other processes."""
        for name in names:
            self.abort_uploads(name)
        self.remove(*names)

    def uploads(self) -> list[FileInfo]:
        with self._translated(ReadError, f"cannot list the uploads to {self.path}"):
            begun = [(upload["Key"], upload["Initiated"].timestamp()) for upload in self._uploads("")]
        return [FileInfo(key.removeprefix(self._full("")), 0, moment, moment) for key, moment in begun]

    def abort_uploads(self, name: str, but: str = "") -> None:
        """Aborts all uploads to a file except ``but``. Ignores errors."""
        with suppress(OSError):
            for upload in self._uploads_to(name):
                if upload != but:
                    self.call("abort_multipart_upload", name, UploadId=upload)

    def call(self, operation: str, name: str, **arguments: Any) -> Any:
        """Sends a request about an object, and retries transient errors a few times.

        Raises `NoSuchObject` if the object does not exist, `FileNotFoundError` if its bucket or its upload does not
        exist, and `OSError` for all other errors.
        """
        return self.retries.call(lambda: self.once(operation, name, **arguments))

    def once(self, operation: str, name: str, **arguments: Any) -> Any:
        """Like `call`, without retries."""
        return self._client.call(operation, Bucket=self.bucket, Key=self._full(name), **arguments)

    def call_until_timeout(self, request: Callable[[], _T]) -> _T:
        """Sends a request about a data file, and retries transient errors until the timeout. Returns the result.

        With only six attempts, half of all outages of 8 s would fail one of the eight parts in progress, and so the
        save. If the server has never responded, six attempts are enough, because its address is most likely wrong. If
        the user sets ``retries``, that is the limit, except for bodies that break off.

        If the request fails nevertheless, with a transient error, its save or load has failed, and only the clean-up
        follows. This storage then retries all further requests for only a tenth of the timeout.
        """
        chosen, failures = self._client.attempts, 0

        def may_succeed(error: Exception) -> bool:
            nonlocal failures
            if isinstance(error, _BrokenOff):
                return True
            failures += 1
            is_patient = chosen is None and self._client.has_answered
            return (is_patient or failures < self.retries.attempts) and is_transient(error)

        most = math.inf if chosen is None else max(chosen, Retries.attempts)
        try:
            return dataclasses.replace(self.retries, attempts=most).call(request, may_succeed)
        except OSError as error:
            if is_transient(error):
                self.retries = dataclasses.replace(self.retries, timeout=self._clean_up_timeout)
            raise

    def send(self, operation: str, name: str, data: memoryview, **arguments: Any) -> Any:
        return self.once(operation, name, Body=_Body(data), **self._client.checksum(data), **arguments)

    def part(self, answer: Mapping[str, Any]) -> dict[str, str]:
        return {name: answer[name] for name in self._client.names_of_part() if name in answer}

    def _put(self, name: str, data: bytes, condition: Mapping[str, str], *, is_new: bool = False) -> None:
        """Puts an object, under the ``condition`` if there is one and the server has conditional writes.

        Retries only a few times, not for as long as the timeout allows: an attempt whose response was lost may have put
        the object, and another job may have replaced it since. A late attempt would bring back the metadata of a
        checkpoint whose files that job has removed.
        """
        with self._putting(name, data, is_new=is_new) as begin:

            def put() -> None:
                begin()
                try:
                    self.once("put_object", name, Body=data, **condition)
                except OSError as error:
                    if not condition or getattr(error, "status", None) != _NOT_IMPLEMENTED:
                        raise
                    self.once("put_object", name, Body=data)

            self.retries.call(put)

    def _read(self, name: str, most: int | None) -> bytes:
        return S3Reader(self, name).read(most)

    def _head(self, name: str) -> int:
        return int(self.call("head_object", name)["ContentLength"])

    def _full(self, name: str) -> str:
        return f"{self._root}/{name}" if self._root else name

    def _described(self, error: Exception) -> str:
        return str(error)  # the message of `translated` names botocore's error or the server's code where necessary

    def _uploads_to(self, name: str) -> list[str]:
        return [str(upload["UploadId"]) for upload in self._uploads(name) if upload["Key"] == self._full(name)]

    def _uploads(self, start: str) -> Iterator[dict[str, Any]]:
        markers = ("KeyMarker", "UploadIdMarker")
        for page in self._pages("list_multipart_uploads", start, markers, MaxUploads=self.uploads_per_page):
            yield from page.get("Uploads", [])

    def _pages(self, operation: str, start: str, markers: Sequence[str], **query: Any) -> Iterator[dict[str, Any]]:
        query |= {"Bucket": self.bucket, "Prefix": self._full(start)}
        while True:
            page = self.retries.call(functools.partial(self._client.call, operation, **query))
            yield page
            following = {name: page[f"Next{name}"] for name in markers if page.get(f"Next{name}")}
            if not page.get("IsTruncated") or not following:  # SeaweedFS returns only one of two markers
                return
            query |= following


class S3Reader(RangeReader):
    """Reader of the ranges of an object. When a response's body breaks off, the reader requests the rest."""

    def __init__(self, storage: S3Storage, name: str) -> None:
        self._storage = storage
        self._name = name
        self._first: dict[str, str] = {}  # fields of the first response

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        stop = offset + sum(buffer.nbytes for buffer in buffers)

        def receive_rest() -> None:
            nonlocal buffers, offset
            count = self._receive(buffers, offset, stop)
            buffers, offset = rest_of(buffers, count), offset + count
            if offset < stop:
                raise _BrokenOff("the connection broke repeatedly")

        if offset < stop:
            self._storage.call_until_timeout(receive_rest)

    def read(self, most: int | None) -> bytes:
        limits = {} if most is None else {"Range": f"bytes=0-{most - 1}"}
        answer = self._storage.retries.call(lambda: self._get(**limits))
        if "ContentLength" not in answer:  # some proxies send chunked responses
            return bytes(answer["Body"].read())
        content = memoryview(bytearray(answer["ContentLength"]))
        count = receive(answer, [content])
        self.read_into([content[count:]], count)
        return bytes(content)

    def _get(self, **limits: str) -> Any:
        """Requests the object. If it was replaced since the first request, raises `OSError`."""
        answer = self._storage.once("get_object", self._name, **limits)
        tag = answer.get("ETag")
        if tag is not None and self._first.setdefault("ETag", tag) != tag:
            answer["Body"].close()
            raise OSError("it was replaced while it was being read")
        return answer

    def _receive(self, buffers: Sequence[memoryview], offset: int, stop: int) -> int:
        wanted = f"bytes={offset}-{stop - 1}"
        answer = self._get(Range=wanted)
        if offset and not str(answer.get("ContentRange", "")).startswith(f"bytes {offset}-"):
            answer["Body"].close()
            raise OSError("the server sent the whole object instead of the requested range")
        count, sent = receive(answer, buffers), answer.get("ContentLength", stop - offset)
        if count == sent < stop - offset:
            raise PastEnd(f"the file ends too early: {stop - offset - sent:,} bytes are missing")
        return count


class _BrokenOff(ConnectionError):
    """The connection was lost while a body was received."""


class _Body:
    """A part as a file object, which botocore sends in pieces.

    If the part were bytes, botocore would send it in one call, and the timeout would apply to the whole part.
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
    """Sink that puts a file of one part, or uploads a file of several parts.

    ``shared`` is the id of an upload to which several processes send parts. The sink does not complete or abort that
    upload.
    """

    concurrency = _CONCURRENCY

    def __init__(self, storage: S3Storage, name: str, nbytes: int, shared: str = "") -> None:
        super().__init__()
        self._storage = storage
        self._name = name
        self._nbytes = nbytes
        self._shared = shared
        self._owner = uuid.uuid4().hex
        self._upload: Future[dict[str, Any]] | None = None
        self._beginnings = 0
        self.part_bytes = storage.granule_of(nbytes)
        if nbytes > self.part_bytes and not shared:
            self._upload = in_background(functools.partial(storage.call_until_timeout, self._begin))

    def _begin(self) -> dict[str, Any]:
        if self.is_aborted:  # `_abort` waits for this thread
            raise OSError("the upload was aborted before it started")
        self._beginnings += 1
        return self._storage.create_upload(self._name, self._owner)

    def _put_part(self, number: int, data: memoryview) -> None:
        storage, nbytes = self._storage, min(self.part_bytes, self._nbytes - number * self.part_bytes)
        if self._shared and data.nbytes != nbytes:
            raise OSError(f"part {number} must have {nbytes:,} bytes, got {data.nbytes:,}")
        if self._upload is None and not self._shared:
            storage.call_until_timeout(lambda: storage.send("put_object", self._name, data))
        else:
            part = {"PartNumber": number + 1, **self._id()}
            answer = storage.call_until_timeout(lambda: storage.send("upload_part", self._name, data, **part))
            self.parts[number + 1] = storage.part(answer)

    def _complete(self) -> None:
        if self._shared:
            return
        if self._upload is not None:
            self._storage.complete_upload(self._name, self._id()["UploadId"], self.parts, self._owner)
            self._abort_others(self._upload)
        elif not self._nbytes:
            self._storage.call("put_object", self._name, Body=b"")

    def _abort(self) -> None:
        if self._shared:
            return
        if self._upload is None:
            self._storage.remove(self._name)
            return
        with suppress(OSError):
            self._storage.call("abort_multipart_upload", self._name, **self._id())
        self._abort_others(self._upload)

    def _id(self) -> dict[str, Any]:
        """Waits for the start of the upload, and returns its id as an argument of a request; raises `OSError`."""
        if self._shared:
            return {"UploadId": self._shared}
        assert self._upload is not None
        return {"UploadId": self._upload.result()["UploadId"]}

    def _abort_others(self, upload: Future[dict[str, Any]]) -> None:
        """Aborts uploads whose ids are unknown, because the response that named them was lost."""
        if self._beginnings > 1 or upload.exception():
            self._storage.abort_uploads(self._name)
