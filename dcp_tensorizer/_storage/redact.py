"""Keeps credentials out of messages, logs and metadata."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import unquote

from .._runtime.validation import did_you_mean
from ..errors import WriteError

_SHORTEST_SECRET = 6  # shorter options occur in messages by chance
_PUBLIC_OPTIONS = re.compile("endpoint|region")  # addresses of servers, which help the reader of a message
# A value in a URL's query that lets anyone use the URL. It ends before the punctuation of the sentence around it.
_SIGNED = re.compile(r"([?&;](?:sig|[\w-]*(?:signature|token|credential))=)(?!\*\*\*)[^&\s'\"<>]+\b", re.IGNORECASE)


def redact(text: str) -> str:
    """``text`` without the ``user:password@`` of URLs, and without the values that sign them, as in ``?sig=...``."""
    return _without_signatures(_without_users(text))


def _without_users(text: str) -> str:
    """Removes ``user:password@``. A password may have spaces; an SFTP password that is not percent-encoded may have
    slashes.
    """
    text = re.sub(r"\b((?:sftp|ssh)://)[^\s/@]*:(?!\d+/)[^\s/@]*/\S*@", r"\1", text)
    return re.sub(r"([A-Za-z][A-Za-z0-9+.-]*://)[^/\n]*@", r"\1", text)


def _without_signatures(text: str) -> str:
    return _SIGNED.sub(r"\1***", text)


class Scrubber:
    """Removes credentials from a text: those in URLs, and every longer string or number among the storage options."""

    def __init__(self, options: Mapping[str, Any] | None) -> None:
        self._secrets = sorted(_possible_secrets(options or {}), key=len, reverse=True)

    def __call__(self, text: str) -> str:
        text = _without_users(text)
        for secret in self._secrets:  # a signed URL is removed as a whole, before its signature is
            text = text.replace(secret, "***")
        return _without_signatures(text)


def shown(
    owner: object, path: str | os.PathLike[str] | None, options: Mapping[str, Any], arguments: Mapping[str, Any]
) -> str:
    """The ``repr`` of a writer or a reader: its path without credentials, and only the names of its storage options."""
    place = None if path is None else Scrubber(options)(os.fspath(path))
    listed = {"storage_options": sorted(options), **arguments}
    return f"{type(owner).__name__}({place!r}, {', '.join(f'{name}={value!r}' for name, value in listed.items())})"


def _possible_secrets(value: Any) -> list[str]:
    """The strings in options, except addresses of servers, which are known by the option's name."""
    if isinstance(value, Mapping):
        secret = (item for name, item in value.items() if not _PUBLIC_OPTIONS.search(str(name)))
        return [text for item in secret for text in _possible_secrets(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _possible_secrets(item)]
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)  # a password of digits
    if not isinstance(value, str):
        return []
    # Errors may quote a part of a connection string ("AccountKey=...;...") or of a signed URL ("?sv=...&sig=...").
    parts = re.findall(r"=([^;&]+)", value)
    return [text for text in (value, *parts, *map(unquote, parts)) if len(text) >= _SHORTEST_SECRET]


# --- checking the names of storage options ----------------------------------------------------------------------------
#
# Some libraries ignore unknown options, and use other credentials.

# Of fsspec itself, for every filesystem.
_COMMON = frozenset(("skip_instance_cache", "use_listings_cache", "listings_expiry_time", "max_paths", "batch_size"))
_S3 = frozenset({"profile"})  # of botocore's session
_GOOGLE = frozenset({"retry_timeout", "retry_initial", "retry_maximum", "retry_multiplier"})
_AZURE = frozenset(  # of azure-identity's default credentials
    (
        *("authority", "additionally_allowed_tenants", "process_timeout", "managed_identity_client_id"),
        *("workload_identity_client_id", "workload_identity_tenant_id"),
        *(f"exclude_{kind}_credential" for kind in ("cli", "developer_cli", "environment", "managed_identity")),
        *(f"exclude_{kind}_credential" for kind in ("powershell", "shared_token_cache", "workload_identity")),
    )
)
_PASSED_ON: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("s3", "s3a"), _S3),
    **dict.fromkeys(("gs", "gcs"), _GOOGLE),
    **dict.fromkeys(("az", "abfs", "abfss"), _AZURE),
}


def check_names(protocol: str, kind: type, options: Mapping[str, Any]) -> None:
    """Raises `ValueError` for an option that the filesystem class ``kind`` does not know, for S3, Google and Azure.

    The constructors of the class and its bases name the known options.
    """
    if protocol in _PASSED_ON:
        constructors = [base.__dict__["__init__"] for base in kind.__mro__ if "__init__" in base.__dict__]
        known = _COMMON | _PASSED_ON[protocol] | names_of(*constructors)
        refuse_unknown(options, known)


def names_of(*functions: Callable[..., Any]) -> frozenset[str]:
    """The names of the arguments that functions take."""
    found: set[str] = set()
    for function in functions:
        parameters = inspect.signature(function).parameters.values()
        found |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return frozenset(found - {"self"})


def refuse_unknown(options: Iterable[str], known: Iterable[str]) -> None:
    """Raises `ValueError` if an option is not among those known; the message lists these."""
    unknown = sorted(map(str, set(options) - set(known)))
    if not unknown:
        return
    hint = did_you_mean(unknown, known) or "."
    raise ValueError(
        f"unknown storage option{'s' * (len(unknown) > 1)} {', '.join(map(repr, unknown))}{hint} "
        f"The options are {', '.join(sorted(known))}"
    )


# --- checking a URL before anything is opened or imported -------------------------------------------------------------

_READ_ONLY = frozenset(("data", "git", "github", "http", "https"))  # of fsspec


def protocols_of(url: str) -> list[str]:
    """The protocols of a URL: one, or several that are chained by ``::``. A path has none.

    As in fsspec, a word in a chain is a protocol, and a single letter is a Windows drive.
    """
    parts = url.split("::")
    words = [part for part in parts if len(parts) > 1 and re.fullmatch("[a-z]{2,}", part)]
    return words + [part.partition("://")[0] for part in parts if part.find("://") > 1]


def is_in_process(url: str) -> bool:
    """Returns whether a URL names the memory of this process, which no other can reach, also behind a cache."""
    return "memory" in protocols_of(url)


def check_writable(url: str) -> None:
    """Raises `WriteError` if fsspec can only read a URL; does nothing for paths."""
    if read_only := _READ_ONLY.intersection(protocols_of(url)):
        raise WriteError(
            f"nothing can be written to {redact(url)}, because {' and '.join(sorted(read_only))} is read-only: save to "
            f"a local path, or to a URL such as s3:// or sftp://"
        )
