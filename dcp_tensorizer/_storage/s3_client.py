"""Requests to S3 with botocore's client, its retries, and its errors as Python's. Only this module imports botocore."""

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

from .._forks import Finalizer, free_in_child
from .._process_context import environment
from .base import TAKEN
from .retry import patience_of

__all__ = ["NoSuchObject", "PastEnd", "S3Client", "receive", "shared_client"]

# Defaults for the user's config_kwargs.
_CONFIG: dict[str, Any] = {
    "max_pool_connections": 300,
    # Off by default over https. Over http, to hash each part once more would cost as much as the save's own hashes,
    # and nothing that is read back is signed either. Parts have a CRC-32 in any case.
    "s3": {"payload_signing_enabled": False},
}
_PIECE = 1 << 20  # at most this much is lost when a body breaks off
_ASYNC_CONFIG = {"connector_args", "http_session_cls"}  # only aiobotocore knows these
# An answer to HEAD has no code but its status: 400.
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "400"}
_TAKEN = {"PreconditionFailed", "ConditionalRequestConflict", "412"}
_MISSING = {"404", "NoSuchKey", "NotFound"}
_DENIED = {"401", "403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"} | _EXPIRED

_shared_clients: weakref.WeakValueDictionary[str, S3Client] = weakref.WeakValueDictionary()
_sharing = free_in_child(threading.Lock())


def shared_client(filesystem: Any, timeout: float) -> S3Client:
    """The client in use for a filesystem's options, or a new one, which takes 20 ms and has connections of its own."""
    # Keys, profiles, proxies and certificates are looked for in the environment; keys even by a program of the user's.
    variables = sorted(environment().items())
    process = os.getpid()  # a forked child must not use its parent's connections
    key = repr((filesystem.storage_args, filesystem.storage_options, timeout, variables, process))
    with _sharing:
        return _shared_clients.setdefault(key, S3Client(filesystem, timeout))


class S3Client:
    """botocore's client, made from the options of an s3fs filesystem.

    botocore repeats requests that may succeed later (5xx, slow-down, resets, timeouts), with growing waits, and
    refreshes credentials that it can refresh. If a token has expired all the same, or the environment has changed since
    and the server denies, a request looks for credentials once more, with a new client.

    Args:
        filesystem: s3fs's, which is not connected.
        timeout: Seconds after which a request that is not answered is given up.
    """

    def __init__(self, filesystem: Any, timeout: float) -> None:
        self._filesystem = filesystem
        patience = patience_of(timeout)
        self._waiting = {
            "connect_timeout": patience,  # botocore also applies it to sending a piece of a body
            "read_timeout": patience,
            "retries": {"mode": "standard", "total_max_attempts": _attempts(timeout)},
        }
        self.retries_are_chosen = "retries" in filesystem.config_kwargs
        """By the user."""
        self.has_answered = False
        """The server has, to any request."""
        self._lock = free_in_child(threading.Lock())
        self._botocore: Any = None
        self._environment: Mapping[str, str] = {}  # of the moment when it was made

    def call(self, operation: str, **arguments: Any) -> Any:
        import botocore.exceptions

        client = self._connected(None)
        arguments = self._extra(client, operation) | arguments
        repeats = 0
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
                repeats = _repeats(error)
                body = arguments.get("Body")
                if body is not None and hasattr(body, "seek"):
                    body.seek(0)
                return getattr(self._connected(client), operation)(**arguments)
        except (botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError) as error:
            raise _translated(error, arguments, repeats) from None

    def checksum(self, data: memoryview) -> dict[str, str]:
        """The CRC-32 of a body, as arguments of a request; empty if the user chose otherwise.

        botocore takes ten times as long to compute it, and copies the body over https.
        """
        is_wanted = getattr(self._connected(None).meta.config, "request_checksum_calculation", "") == "when_supported"
        if not is_wanted or any(name.startswith("Checksum") for name in self._filesystem.s3_additional_kwargs):
            return {}
        return {"ChecksumCRC32": base64.b64encode(crc32(data).to_bytes(4, "big")).decode()}

    def names_of_part(self) -> list[str]:
        """What to say of a part when its upload is completed: its tag, and a checksum of the user's own algorithm."""
        chosen = self._filesystem.s3_additional_kwargs.get("ChecksumAlgorithm")
        return ["ETag"] if chosen is None else ["ETag", f"Checksum{chosen}"]

    def _retire(self) -> None:
        """Makes the next storage look for credentials again, because the user may have corrected them."""
        with _sharing:
            for key, client in list(_shared_clients.items()):
                if client is self:
                    del _shared_clients[key]

    def _connected(self, expired: Any) -> Any:
        """The client. Makes one if there is none yet, or if the one there is has expired."""
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
        """The user's arguments for every request (encryption, requester pays), as far as this operation takes them."""
        given = dict(self._filesystem.s3_additional_kwargs) | dict(self._filesystem.req_kw)
        if not given:
            return {}
        model = client.meta.service_model.operation_model(client.meta.method_to_api_mapping[operation])
        return {key: value for key, value in given.items() if key in model.input_shape.members}


def _attempts(timeout: float) -> int:
    """As many attempts as end in time, up to six: botocore waits up to 1, 2, 4, ... seconds between them."""
    return max([1] + [n for n in range(2, 7) if n * patience_of(timeout) + 2 ** (n - 1) - 1 <= timeout])


def receive(answer: Any, buffers: Iterable[memoryview]) -> int:
    """Fills buffers with an answer's body; returns how many bytes came before it ended or broke off.

    It reads from the connection itself, because botocore and urllib3 would copy each byte three more times.
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
    """botocore's descriptions of S3's interface, read once: that takes 0.1 s."""
    import botocore.session

    return botocore.session.Session().get_component("data_loader")


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _repeats(error: Any) -> int:
    """How often botocore has repeated the request before this answer."""
    return int(error.response.get("ResponseMetadata", {}).get("RetryAttempts", 0))


def _translated(error: Any, arguments: Mapping[str, Any], repeats: int) -> OSError:
    """An error of botocore's as one of Python's, with the server's message.

    Args:
        error: The last one.
        arguments: Of the request.
        repeats: How often the request was repeated before botocore began anew with it.
    """
    if getattr(error, "response", None) is None:
        return (ConnectionError if _is_of_connection(error) else OSError)(f"{type(error).__name__}: {error}")
    code = _code(error)
    if code in _TAKEN:
        return FileExistsError(TAKEN)
    tries = 1 + repeats + _repeats(error)
    often = "once" if tries == 1 else f"{tries} times"
    said = f"{code}: {error.response.get('Error', {}).get('Message', '')} ({error.operation_name}, tried {often})"
    if tries > 1 and "Body" in arguments:
        # Whatever this answer says: an attempt before it, whose answer was lost, may have put the object.
        return _answered(error, said)
    if code == "NoSuchBucket":
        return FileNotFoundError(f"the bucket {arguments['Bucket']!r} does not exist")
    if code in _MISSING:
        return NoSuchObject("it does not exist")
    if code in ("InvalidRange", "416"):
        return PastEnd("the file ends before that")
    return PermissionError(said) if code in _DENIED and tries == 1 else _answered(error, said)


def _is_of_connection(error: Exception) -> bool:
    from botocore.exceptions import ConnectionError as NotConnected  # neither a Python error nor an HTTPClientError
    from botocore.exceptions import HTTPClientError, SSLError

    return isinstance(error, HTTPClientError | NotConnected) and not isinstance(error, SSLError)


def _answered(error: Any, said: str) -> OSError:
    """An error with the server's status, which tells whether the request may succeed later."""
    answered = _Answered(said)
    answered.status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return answered


class _Answered(OSError):
    status = 0


class NoSuchObject(FileNotFoundError):
    """The object does not exist, though its bucket may."""


class PastEnd(OSError, EOFError):
    """A range begins, or ends, where the file has ended. To ask again does not help."""

    status = 416
