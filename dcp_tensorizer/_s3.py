"""A checkpoint's directory in S3, or in what speaks its protocol: multipart uploads and range reads by many threads.

s3fs is asked what the user's URL and ``storage_options`` mean; the bytes go through botocore, which it is built on.
In threads that moves a byte with half of the CPU time that s3fs's event loop takes (0.6 against 1.1 s/GB for reads,
1.1 against 2.0 for writes), takes parts from the buffers they are in, and forks and stops with its process.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from ._retry import waits
from ._storage import TAKEN, RangeReader, Sink, Storage, redact, scatter
from .errors import CheckpointError, ReadError, WriteError

__all__ = ["S3Storage"]

_PART = 8 << 20  # larger ones are no faster, and take more memory; S3's least is 5 MiB
_MOST_PARTS = 10_000
_CONCURRENCY = 8
_PIECE = 1 << 20
_REMOVALS = 16

# For whatever the user's own config_kwargs leave open.
_CONFIG: dict[str, Any] = {
    "connect_timeout": 20,  # botocore also allows so much for sending a piece of a body
    "read_timeout": 60,
    "retries": {"mode": "standard", "total_max_attempts": 6},
    "max_pool_connections": 300,
    # Over https it is off by default. Over http nothing that is read back is signed either, and hashing each part once
    # more would cost as much as the save's own hashes. Parts have a CRC-32 in any case.
    "s3": {"payload_signing_enabled": False},
}
_ASYNC_CONFIG = {"connector_args", "http_session_cls"}  # of aiobotocore's, which botocore's does not know
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken"}
_MISSING = {"404", "NoSuchKey", "NotFound"}
_DENIED = {"401", "403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"} | _EXPIRED


class S3Storage(Storage):
    """Objects below a prefix of a bucket. The bucket must exist.

    Args:
        filesystem: s3fs's, which is not connected.
        root: Bucket and prefix.
        url: The directory, as the user named it.
        scrub: Removes credentials from a text.
    """

    read_threads = 32
    gap_bytes = 512 << 10
    file_bytes = 64 << 30  # of 8,192 parts

    def __init__(self, filesystem: Any, root: str, url: str, scrub: Callable[[str], str]) -> None:
        self.bucket, prefix, _ = filesystem.split_path(root.rstrip("/") + "/")
        self._prefix = prefix.rstrip("/") + "/" if prefix.strip("/") else ""
        self._client = _Client(filesystem)
        self._scrub = scrub
        self.path = redact(url)
        self.location = url

    def scrub(self, text: str) -> str:
        return self._scrub(text)

    def make_directory(self) -> None:
        """There are none."""

    def create(self, name: str, nbytes: int, *, sync: bool) -> Sink:
        return _S3Sink(self, name, nbytes)

    def sync_directory(self) -> None:
        """An object is durable with its name."""

    def publish(self, name: str, data: bytes, *, sync: bool, replace: bool = True) -> None:
        condition = {} if replace else {"IfNoneMatch": "*"}
        try:
            try:
                self.call("put_object", name, Body=data, **condition)
            except FileExistsError:
                if self.read(name) != data:  # an answer that was lost, and a retry that met its own object
                    raise
        except Exception as error:
            raise WriteError(self.scrub(f"cannot write {self.path}/{name}: {error}")) from None

    def read(self, name: str) -> bytes | None:
        try:
            body = _S3Reader(self, name)
            return b"".join(bytes(piece) for piece in body.pieces(0, None))
        except _NoSuchObject:
            return None
        except Exception as error:
            raise self._read_error(name, error) from None

    def size(self, name: str) -> int | None:
        try:
            return int(self.call("head_object", name)["ContentLength"])
        except _NoSuchObject:
            return None
        except Exception as error:
            raise self._read_error(name, error) from None

    def open(self, name: str) -> RangeReader:
        return _S3Reader(self, name)

    def remove(self, *names: str) -> None:
        if len(names) == 1:
            self.call("delete_object", names[0])
        elif names:
            with ThreadPoolExecutor(_REMOVALS, thread_name_prefix="remove") as pool:
                list(pool.map(lambda name: self.call("delete_object", name), names))

    def discard(self, *names: str) -> None:
        """Removes objects, and aborts the uploads to their keys, of which nobody may be left who knows."""
        for name in names:
            with suppress(FileNotFoundError):
                found = self._client.call("list_multipart_uploads", Bucket=self.bucket, Prefix=self._prefix + name)
                for upload in found.get("Uploads", []):
                    if upload["Key"] == self._prefix + name:
                        self.call("abort_multipart_upload", name, UploadId=upload["UploadId"])
        self.remove(*names)

    def call(self, operation: str, name: str, **arguments: Any) -> Any:
        """One request about an object.

        Raises:
            FileNotFoundError: it does not exist; or its bucket, and then the error says so.
            OSError: anything else that the server says, or that happens on the way to it.
        """
        return self._client.call(operation, Bucket=self.bucket, Key=self._prefix + name, **arguments)

    def _read_error(self, name: str, error: Exception) -> CheckpointError:
        return ReadError(self.scrub(f"cannot read {self.path}/{name}: {error}"))


class _Client:
    """botocore's client, made of what an s3fs filesystem was given.

    botocore retries what is worth it (5xx, slow-down, resets, timeouts), with backoff, and refreshes credentials that
    it can refresh. When a token has expired all the same, a fresh client looks for credentials anew, once a request.
    """

    def __init__(self, filesystem: Any) -> None:
        self._filesystem = filesystem
        self._lock = threading.Lock()
        self._botocore = self._connect()

    def call(self, operation: str, **arguments: Any) -> Any:
        import botocore.exceptions

        client = self._botocore
        arguments = self._extra(client, operation) | arguments
        try:
            try:
                return getattr(client, operation)(**arguments)
            except botocore.exceptions.ClientError as error:
                if _code(error) not in _EXPIRED:
                    raise
                if isinstance(body := arguments.get("Body"), _Body):
                    body.seek(0)
                return getattr(self._renewed(client), operation)(**arguments)
        except (botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError) as error:
            raise _translated(error, arguments) from None

    def _renewed(self, expired: Any) -> Any:
        with self._lock:
            if self._botocore is expired:
                self._botocore = self._connect()
            return self._botocore

    def _connect(self) -> Any:
        import botocore
        import botocore.config
        import botocore.session

        given = self._filesystem
        config = _CONFIG | {key: value for key, value in given.config_kwargs.items() if key not in _ASYNC_CONFIG}
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
        client = session.create_client("s3", config=botocore.config.Config(**config), **options)
        weakref.finalize(self, client.close)
        return client

    def _extra(self, client: Any, operation: str) -> dict[str, Any]:
        """What the user wants every request to say (server-side encryption, requester pays), where it can be said."""
        given = dict(self._filesystem.s3_additional_kwargs) | dict(self._filesystem.req_kw)
        if not given:
            return {}
        model = client.meta.service_model.operation_model(client.meta.method_to_api_mapping[operation])
        return {key: value for key, value in given.items() if key in model.input_shape.members}


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _translated(error: Any, arguments: Mapping[str, Any]) -> OSError:
    """An error of botocore's as one of Python's, with what the server said."""
    response = getattr(error, "response", None)
    if response is None:
        return OSError(f"{type(error).__name__}: {error}")
    code = _code(error)
    if code == "NoSuchBucket":
        return FileNotFoundError(f"the bucket {arguments['Bucket']!r} does not exist")
    if code in _MISSING:
        return _NoSuchObject("it does not exist")
    if code in ("PreconditionFailed", "ConditionalRequestConflict", "412"):
        return FileExistsError(TAKEN)
    if code in ("InvalidRange", "416"):
        return _PastEnd("the file ends before that")
    tries = 1 + response.get("ResponseMetadata", {}).get("RetryAttempts", 0)
    said = f"{code}: {response.get('Error', {}).get('Message', '')} ({error.operation_name}, tried {tries} times)"
    return PermissionError(said) if code in _DENIED else OSError(said)


class _NoSuchObject(FileNotFoundError):
    """Not its bucket."""


class _PastEnd(OSError, EOFError):
    """A range begins where the file has ended."""


class _S3Reader:
    """Range reads of an object. A body that breaks off is read on from where it broke."""

    def __init__(self, storage: S3Storage, name: str) -> None:
        self._storage = storage
        self._name = name

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        wanted = sum(buffer.nbytes for buffer in buffers)
        if wanted:
            done = scatter(self.pieces(offset, offset + wanted), buffers)
            if done != wanted:
                raise EOFError(f"the file ends {wanted - done:,} bytes too early")

    def pieces(self, start: int, stop: int | None) -> Iterator[memoryview]:
        """The bytes from ``start`` to before ``stop``, None for the end of the object."""
        failures = iter(waits())
        while True:
            error: Exception | None = None
            for data in self._body(start, stop):
                if isinstance(data, Exception):
                    error = data
                    break
                start += data.nbytes
                yield data
            if error is None:
                return
            wait = next(failures, None)
            if wait is None:
                raise OSError(f"the connection broke off again and again: {type(error).__name__}: {error}")
            time.sleep(wait)

    def _body(self, start: int, stop: int | None) -> Iterator[memoryview | Exception]:
        """One response's data, and if it breaks off, why."""
        import botocore.exceptions

        whole = start == 0 and stop is None
        selection = {} if whole else {"Range": f"bytes={start}-" + ("" if stop is None else str(stop - 1))}
        body = self._storage.call("get_object", self._name, **selection)["Body"]
        try:
            while data := body.read(_PIECE):
                yield memoryview(data)
        except (botocore.exceptions.BotoCoreError, OSError) as error:
            yield error
        finally:
            body.close()

    def close(self) -> None:
        """Nothing is open between requests."""


class _Body:
    """A part as a file, read in pieces that are views of it.

    Given the bytes themselves, botocore would send them in one call, whose timeout is then for all of them.
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


class _S3Sink:
    """An object of one part that is put, or of many that make a multipart upload."""

    concurrency = _CONCURRENCY
    in_order = False

    def __init__(self, storage: S3Storage, name: str, nbytes: int) -> None:
        self._storage = storage
        self._name = name
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self._etags: dict[int, str] = {}
        self._is_open = True
        self._upload: str | None = None
        self.part_bytes = max(_PART, -(-nbytes // _MOST_PARTS))
        self.bytes_written = 0
        self.write_seconds = 0.0
        self.close_seconds = 0.0
        if nbytes > self.part_bytes:
            self._upload = storage.call("create_multipart_upload", name)["UploadId"]

    def put(self, number: int, data: memoryview) -> None:
        started = time.perf_counter()
        if self._upload is None:
            self._storage.call("put_object", self._name, Body=_Body(data))
        else:
            answer = self._storage.call(
                "upload_part", self._name, UploadId=self._upload, PartNumber=number + 1, Body=_Body(data)
            )
            self._etags[number + 1] = answer["ETag"]
        with self._lock:
            self.bytes_written += data.nbytes
            self.write_seconds += time.perf_counter() - started

    def close(self) -> None:
        """Makes one object of the parts. Idempotent."""
        if not self._is_open:
            return
        started = time.perf_counter()
        if self._upload is not None:
            self._complete()
        elif not self._nbytes:
            self._storage.call("put_object", self._name, Body=b"")
        self._is_open = False
        self.close_seconds += time.perf_counter() - started

    def abort(self) -> None:
        """Drops the object. Idempotent; does nothing after `close`."""
        if self._is_open:
            self._is_open = False
            with suppress(OSError):
                if self._upload is None:
                    self._storage.remove(self._name)
                else:
                    self._storage.call("abort_multipart_upload", self._name, UploadId=self._upload)

    def _complete(self) -> None:
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in sorted(self._etags.items())]
        try:
            self._storage.call(
                "complete_multipart_upload", self._name, UploadId=self._upload, MultipartUpload={"Parts": parts}
            )
        except OSError:
            # A lost answer makes botocore ask again, and the upload is gone when it was completed the first time.
            if self._storage.size(self._name) != self._nbytes:
                raise
