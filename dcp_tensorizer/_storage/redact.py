"""Removes credentials from messages, logs and metadata."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any
from urllib.parse import quote, quote_plus, unquote

_SHORTEST_SECRET = 6  # shorter values occur in messages by chance
_PUBLIC_OPTIONS = re.compile("endpoint|region")  # server addresses are not secret, and help to understand a message
# A value in a URL's query that grants access to the URL, without the punctuation that follows it in a message.
_SIGNED = re.compile(r"([?&;](?:sig|[\w-]*(?:signature|token|credential))=)(?!\*\*\*)[^&\s'\"<>]+\b", re.IGNORECASE)
_BASE64 = re.compile(r"[\w+/-]{8,}={0,2}", re.ASCII)  # in the standard alphabet, or in that for URLs


def redact(text: str) -> str:
    """Removes the ``user:password@`` of URLs in a text, and the values that sign URLs, as in ``?sig=...``."""
    return _SIGNED.sub(r"\1***", _without_users(text))


def _without_users(text: str) -> str:
    """Removes ``user:password@``. Passwords may contain spaces; SFTP passwords also slashes, if not percent-encoded."""
    text = re.sub(r"\b((?:sftp|ssh)://)[^\s/@]*:(?!\d+/)[^\s/@]*/\S*@", r"\1", text)
    return re.sub(r"([A-Za-z][A-Za-z0-9+.-]*://)[^/\n]*@", r"\1", text)


class Scrubber:
    """Filter that removes credentials from a text: those in URLs, and values of options that may be secret.

    It finds a value as it is, escaped as by ``repr`` or in JSON, percent-encoded, and in base64, alone or with a user.
    """

    def __init__(self, options: Mapping[str, Any] | None) -> None:
        self._secrets = sorted(_possible_secrets(options or {}), key=len, reverse=True)

    def __call__(self, text: str) -> str:
        text = _without_users(text)
        if self._secrets:  # before signatures, so that a signed URL among the options is removed as a whole
            text = _BASE64.sub(self._without_encoded, self._without_secrets(text))
        return _SIGNED.sub(r"\1***", text)

    def _without_secrets(self, text: str) -> str:
        for pattern in self._patterns:
            text = pattern.sub("***", text)
        return text

    def _without_encoded(self, found: re.Match[str]) -> str:
        encoded = found[0].rstrip("=")
        padded = encoded[: len(encoded) - (len(encoded) % 4 == 1)] + "=="  # decoders ignore padding that is not needed
        text = _decoded(base64.b64decode(padded, b"-_" if re.search("[-_]", encoded) else None))
        return found[0] if self._without_secrets(text) == text else "***"

    @cached_property
    def _patterns(self) -> list[re.Pattern[str]]:  # compiled for the first message, not for each storage
        return [re.compile("".join(map(_any_form, re.findall(r"\\+|[^\\]", text)))) for text in self._secrets]


def _any_form(part: str) -> str:
    """Returns a pattern for a character, or for a run of backslashes, that allows any number of escapes."""
    if part.isascii() and part.isalnum():
        return part
    if part[0] == "\\":
        return rf"(?:(?<!\\)\\{{{len(part)},}}|(?i:%(?:25)*5C){{{len(part)}}})"
    content = part.encode("utf-8", "backslashreplace")
    escapes = {ascii(part)[1:-1], json.dumps(part)[1:-1], repr(content)[2:-1]} - {part}
    forms = [r"\\+".join(map(re.escape, escape.split("\\"))) for escape in sorted(escapes)]
    forms += [quote(content, safe="").replace("%", "%(?:25)*"), re.escape(quote_plus(part, errors="replace"))]
    return rf"(?:\\*{re.escape(part)}|(?i:{'|'.join(forms)}))"


def _decoded(value: bytes | bytearray) -> str:
    return value.decode("utf-8", "backslashreplace")


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
    if isinstance(value, bytes | bytearray):
        value = _decoded(value)
    if not isinstance(value, str):
        return []
    # Errors may quote a part of a connection string ("AccountKey=...;...") or of a signed URL ("?sv=...&sig=...").
    parts = re.findall(r"=([^;&]+)", value)
    return [text for text in (value, *parts, *map(unquote, parts)) if len(text) >= _SHORTEST_SECRET]
