"""Checks the names of storage options: some libraries pass over what they do not know, and use other credentials."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["check_names", "names_of", "refuse_unknown"]

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
    """Raises `ValueError` for an option of an object store that its filesystem does not know.

    Args:
        protocol: Of the URL. The options of others than S3, Google's and Azure's are not looked at.
        kind: The filesystem's class. Its constructor, and those of its bases, name what it knows.
        options: By name, as the user gave them.
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
    near = [match for name in unknown for match in difflib.get_close_matches(name, known, n=1)]
    hint = f"; did you mean {' and '.join(map(repr, near))}?" if near else "."
    raise ValueError(
        f"unknown storage option{'s' * (len(unknown) > 1)} {', '.join(map(repr, unknown))}{hint} "
        f"The options are {', '.join(sorted(known))}"
    )
