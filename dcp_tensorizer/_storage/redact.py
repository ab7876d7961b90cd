"""Keeps credentials out of messages, logs and metadata."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

__all__ = ["Scrubber", "redact"]


def redact(text: str) -> str:
    """``text`` with the ``user:password@`` of every URL in it removed, spaces and all."""
    return re.sub(r"([A-Za-z][A-Za-z0-9+.-]*://)[^/\n]*@", r"\1", text)


class Scrubber:
    """Removes credentials from a text: those in URLs, and every longer string or number among the storage options."""

    def __init__(self, options: Mapping[str, Any] | None) -> None:
        self._secrets = sorted(_strings(options or {}), key=len, reverse=True)

    def __call__(self, text: str) -> str:
        text = redact(text)
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


_SHORTEST = 6  # of what is taken for a secret: anything shorter occurs in messages by chance


_OPEN_KEY = re.compile("endpoint|region")


def _strings(value: Any) -> list[str]:
    """What may be secret: by their names, addresses of servers are not."""
    if isinstance(value, Mapping):
        return [text for key, item in value.items() if not _OPEN_KEY.search(str(key)) for text in _strings(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _strings(item)]
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)  # a password of digits
    if not isinstance(value, str):
        return []
    # Of connection strings ("AccountKey=...;...") and signed URLs ("?sv=...&sig=...") errors may quote a part.
    parts = re.findall(r"=([^;&]+)", value)
    return [text for text in (value, *parts, *map(unquote, parts)) if len(text) >= _SHORTEST]
