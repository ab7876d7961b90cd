"""The names of the formats, and the guess at a misspelt one: known without an import of torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

FORMATS = ("dcp_tensorizer", "tensorizer", "safetensors", "torch", "dcp")


def did_you_mean(given: str, choices: Iterable[str]) -> str:
    """Returns the end of a message about a name that is none of the choices: the closest one, if one is close."""
    close = difflib.get_close_matches(given, list(choices), n=1, cutoff=0.5)
    return f": did you mean {close[0]!r}?" if close else ""
