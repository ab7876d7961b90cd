"""Checks a URL and its storage options before anything is opened."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .._runtime.validation import did_you_mean
from ..errors import WriteError
from .redact import redact

_READ_ONLY = frozenset(("data", "git", "github", "http", "https"))  # fsspec's protocols


def protocols_of(url: str) -> list[str]:
    """The protocols of a URL: one, or several that are chained by ``::``. A path has none.

    As in fsspec, a word in a chain is a protocol, and a single letter is a Windows drive.
    """
    parts = url.split("::")
    words = [part for part in parts if len(parts) > 1 and re.fullmatch("[a-z]{2,}", part)]
    return words + [part.partition("://")[0] for part in parts if part.find("://") > 1]


def is_in_process(url: str) -> bool:
    """Returns whether a URL names the memory of this process, directly or behind a cache. No other can reach it."""
    return "memory" in protocols_of(url)


def check_writable(url: str) -> None:
    """Raises `WriteError` if fsspec can only read a URL; does nothing for paths."""
    if read_only := _READ_ONLY.intersection(protocols_of(url)):
        raise WriteError(
            f"nothing can be written to {redact(url)}, because {' and '.join(sorted(read_only))} is read-only: save to "
            f"a local path, or to a URL such as s3:// or sftp://"
        )


# --- the names of storage options -------------------------------------------------------------------------------------
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
