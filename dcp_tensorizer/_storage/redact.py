"""Removes credentials from messages, logs and metadata."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

_SHORTEST_SECRET = 6  # shorter values occur in messages by chance
_PUBLIC_OPTIONS = re.compile("endpoint|region")  # server addresses are not secret, and help to understand a message
# A value in a URL's query that grants access to the URL, without the punctuation that follows it in a message.
_SIGNED = re.compile(r"([?&;](?:sig|[\w-]*(?:signature|token|credential))=)(?!\*\*\*)[^&\s'\"<>]+\b", re.IGNORECASE)


def redact(text: str) -> str:
    """Removes the ``user:password@`` of URLs in a text, and the values that sign URLs, as in ``?sig=...``."""
    return _SIGNED.sub(r"\1***", _without_users(text))


def _without_users(text: str) -> str:
    """Removes ``user:password@``. Passwords may contain spaces; SFTP passwords also slashes, if not percent-encoded."""
    text = re.sub(r"\b((?:sftp|ssh)://)[^\s/@]*:(?!\d+/)[^\s/@]*/\S*@", r"\1", text)
    return re.sub(r"([A-Za-z][A-Za-z0-9+.-]*://)[^/\n]*@", r"\1", text)


class Scrubber:
    """Filter that removes credentials from a text: those in URLs, and values of options that may be secret."""

    def __init__(self, options: Mapping[str, Any] | None) -> None:
        self._secrets = sorted(_possible_secrets(options or {}), key=len, reverse=True)

    def __call__(self, text: str) -> str:
        text = _without_users(text)
        for secret in self._secrets:  # before signatures, so that a signed URL among the options is removed as a whole
            text = text.replace(secret, "***")
        return _SIGNED.sub(r"\1***", text)


def shown(
    owner: object, path: str | os.PathLike[str] | None, options: Mapping[str, Any], arguments: Mapping[str, Any]
) -> str:
    """Returns the ``repr`` of a writer or reader, without credentials, and with only the names of storage options."""
    location = None if path is None else Scrubber(options)(os.fspath(path))
    listed = {"storage_options": sorted(options), **arguments}
    return f"{type(owner).__name__}({location!r}, {', '.join(f'{name}={value!r}' for name, value in listed.items())})"


def _possible_secrets(value: Any) -> list[str]:
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
