"""Requests to S3: botocore's client, its retries and its errors; the only module that imports it."""

from __future__ import annotations

import base64
import functools
import http.client
import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from isal.isal_zlib import crc32

from .base import TAKEN
from .retry import patience_of

__all__ = ["NoSuchObject", "S3Client", "receive", "shared_client"]

# For whatever the user's own config_kwargs leave open.
_CONFIG: dict[str, Any] = {
    "max_pool_connections": 300,
    # Over https it is off by default. Over http nothing that is read back is signed either, and hashing each part once
    # more would cost as much as the save's own hashes. Parts have a CRC-32 in any case.
    "s3": {"payload_signing_enabled": False},
}
_PIECE = 1 << 20  # what is lost when a body breaks off
_ASYNC_CONFIG = {"connector_args", "http_session_cls"}  # of aiobotocore's, which botocore's does not know
_EXPIRED = {
    "ExpiredToken",
    "ExpiredTokenException",
    "TokenRefreshRequired",
    "InvalidToken",
    "400",
}  # a HEAD has no words
_MISSING = {"404", "NoSuchKey", "NotFound"}
_DENIED = {"401", "403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"} | _EXPIRED

_SHARED: weakref.WeakValueDictionary[str, S3Client] = weakref.WeakValueDictionary()
_SHARING = threading.Lock()


def shared_client(filesystem: Any, timeout: float) -> S3Client:
    """The client that is in use for what a filesystem was given; a new one takes 20 ms, and connections of its own."""
    environment = sorted((name, value) for name, value in os.environ.items() if name.startswith("AWS_"))
    process = os.getpid()  # a child that was forked must not use its parent's connections
    given = repr((filesystem.storage_args, filesystem.storage_options, timeout, environment, process))
    with _SHARING:
        return _SHARED.setdefault(given, S3Client(filesystem, timeout))


class S3Client:
    """botocore's client, made of what an s3fs filesystem was given.

    botocore retries what is worth it (5xx, slow-down, resets, timeouts), with backoff, and refreshes credentials that
    it can refresh. When a token has expired all the same, a fresh client looks for credentials anew, once a request.

    Args:
        filesystem: s3fs's, which is not connected.
        timeout: Seconds after which a request that is not answered is given up.
    """

    def __init__(self, filesystem: Any, timeout: float) -> None:
        self._filesystem = filesystem
        patience = patience_of(timeout)
        self._waiting = {
            "connect_timeout": patience,  # botocore takes it also for sending a piece of a body
            "read_timeout": patience,
            "retries": {"mode": "standard", "total_max_attempts": _attempts(timeout)},
        }
        self._lock = threading.Lock()
        self._botocore: Any = None

    def call(self, operation: str, **arguments: Any) -> Any:
        import botocore.exceptions

        client = self._connected(None)
        arguments = self._extra(client, operation) | arguments
        try:
            try:
                return getattr(client, operation)(**arguments)
            except botocore.exceptions.ClientError as error:
                if _code(error) in _DENIED:
                    self._retire()
                if _code(error) not in _EXPIRED:
                    raise
                body = arguments.get("Body")
                if body is not None and hasattr(body, "seek"):
                    body.seek(0)
                return getattr(self._connected(client), operation)(**arguments)
        except (botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError) as error:
            raise _translated(error, arguments) from None

    def checksum(self, data: memoryview) -> dict[str, str]:
        """The CRC-32 of a body, which botocore takes ten times as long to find; nothing if the user wants it otherwise.

        Over http botocore would go through the body before it is sent, and over https it would copy it.
        """
        is_wanted = getattr(self._connected(None).meta.config, "request_checksum_calculation", "") == "when_supported"
        if not is_wanted or any(name.startswith("Checksum") for name in self._filesystem.s3_additional_kwargs):
            return {}
        return {"ChecksumCRC32": base64.b64encode(crc32(data).to_bytes(4, "big")).decode()}

    def names_of_part(self) -> list[str]:
        """Tag, and the checksum if the user has chosen an algorithm: AWS wants it said twice then."""
        chosen = self._filesystem.s3_additional_kwargs.get("ChecksumAlgorithm")
        return ["ETag"] if chosen is None else ["ETag", f"Checksum{chosen}"]

    def _retire(self) -> None:
        """Whoever comes next looks for credentials anew: the user may have mended them."""
        with _SHARING:
            for given, client in list(_SHARED.items()):
                if client is self:
                    del _SHARED[given]

    def _connected(self, expired: Any) -> Any:
        """The client: the first one if there is none, and a fresh one if it is the one that has expired."""
        with self._lock:
            if self._botocore is expired:
                self._botocore = self._connect()
            return self._botocore

    def _connect(self) -> Any:
        import botocore
        import botocore.config
        import botocore.session

        given = self._filesystem
        wanted = {key: value for key, value in given.config_kwargs.items() if key not in _ASYNC_CONFIG}
        config = _CONFIG | self._waiting | wanted
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
        weakref.finalize(self, client.close)
        return client

    def _extra(self, client: Any, operation: str) -> dict[str, Any]:
        """What the user wants every request to say (server-side encryption, requester pays), where it can be said."""
        given = dict(self._filesystem.s3_additional_kwargs) | dict(self._filesystem.req_kw)
        if not given:
            return {}
        model = client.meta.service_model.operation_model(client.meta.method_to_api_mapping[operation])
        return {key: value for key, value in given.items() if key in model.input_shape.members}


def _attempts(timeout: float) -> int:
    """Up to six, and so few that they end in time: botocore waits up to 1, 2, 4, ... seconds between them."""
    return max([1] + [n for n in range(2, 7) if n * patience_of(timeout) + 2 ** (n - 1) - 1 <= timeout])


def receive(answer: Any, buffers: Iterable[memoryview]) -> int:
    """Fills buffers with an answer's body; returns how many bytes there were before it ended or broke off.

    From the connection itself: by way of botocore and urllib3 each byte is copied three times more.
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
            response.release_conn()  # others may use the connection
    except (OSError, http.client.HTTPException):
        pass
    finally:
        answer["Body"].close()
    return done


@functools.cache
def _models() -> Any:
    """botocore's descriptions of S3's interface: reading them takes 0.1 s, too much for each save of a trainer."""
    import botocore.session

    return botocore.session.Session().get_component("data_loader")


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
        return NoSuchObject("it does not exist")
    if code in ("PreconditionFailed", "ConditionalRequestConflict", "412"):
        return FileExistsError(TAKEN)
    if code in ("InvalidRange", "416"):
        return _PastEnd("the file ends before that")
    tries = 1 + response.get("ResponseMetadata", {}).get("RetryAttempts", 0)
    said = f"{code}: {response.get('Error', {}).get('Message', '')} ({error.operation_name}, tried {tries} times)"
    # A denial after a request without an answer does not say what has become of that one.
    return PermissionError(said) if code in _DENIED and tries == 1 else OSError(said)


class NoSuchObject(FileNotFoundError):
    """Not its bucket."""


class _PastEnd(OSError, EOFError):
    """A range begins where the file has ended."""
