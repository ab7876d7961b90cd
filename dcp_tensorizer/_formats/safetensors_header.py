"""The header of a safetensors file, and the index of a directory of such files. Does not import torch.

8 bytes   length of the header
header    JSON: for each tensor its dtype, its shape, and the start and end of its bytes, relative to the data
data      the tensors' elements, without gaps
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import Raw, Struct

SINGLE = "model.safetensors"
"""The file of a model that fits into one file."""
ADAPTER = "adapter_model.safetensors"
"""The file of a PEFT adapter, which has no index."""
INDEX = "model.safetensors.index.json"
"""The index, which maps each tensor to its file."""
LENGTH = struct.Struct("<Q")
MAX_HEADER = 100_000_000
"""The safetensors library's own limit for a header."""

_MAX_NESTING = 500  # what every release of Python can decode; since 3.14 the interpreter's own limit is in the millions
_STEPS = np.zeros(256, np.int8)
_STEPS[[*b"[{"]] = 1
_STEPS[[*b"]}"]] = -1
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_MAX_NAME = 255
_T = TypeVar("_T")


class _Index(Struct):
    weight_map: dict[str, str]
    metadata: Raw = Raw(b"{}")


class _DeltaNotes(Struct):
    version: str
    base_version: str
    delta_encoding: str


_decode_index = msgspec.json.Decoder(_Index).decode
_decode_delta = msgspec.json.Decoder(_DeltaNotes).decode


def encode_header(described: Mapping[str, Any]) -> bytes:
    """Returns a file up to its first tensor. ``described`` becomes the JSON of its header."""
    text = json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // LENGTH.size) * LENGTH.size)
    return LENGTH.pack(len(text)) + text


def files_named(index: bytes | None) -> set[str]:
    """Returns the safetensors files that an index names in its own directory; an empty set if there is no index.

    Raises `ValueError` if the content is not an index.
    """
    names = set() if index is None else set(read_index(index)[0].values())
    return {name for name in names if is_plain_name(name) and name.endswith(".safetensors")}


def is_plain_name(name: str) -> bool:
    """Returns whether a string can name a visible file in a directory, without a path before the name."""
    is_short = 0 < len(name.encode("utf-8", "surrogatepass")) <= _MAX_NAME
    return is_short and not name.startswith(".") and not any(sign in name for sign in "/\\\0")


def read_index(content: bytes) -> tuple[dict[str, str], str | None]:
    """Returns the file of each tensor that an index names, and the version whose delta it describes.

    The version is None for the index of a model. Raises `ValueError` if the content is not an index.
    """
    index, version = decode_json(_decode_index, content), None
    with suppress(ValueError):
        version = decode_json(_decode_delta, bytes(index.metadata)).version.lstrip("0")
    return index.weight_map, version


def decode_json(decode: Callable[[bytes], _T], content: bytes) -> _T:
    """Decodes JSON that another program may have written. Raises `ValueError` for any fault.

    ``decode`` is the method of a `msgspec.json.Decoder`, which raises different errors for different faults.
    """
    if _nesting(content) > _MAX_NESTING < _nesting(_STRING.sub(b"", content)):
        raise ValueError("it is nested too deeply")
    try:
        return decode(content)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: {error}") from None
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _nesting(content: bytes) -> int:
    """Returns the greatest nesting depth of brackets, including those in strings; 0 for up to `_MAX_NESTING` bytes."""
    most = depth = 0
    marks = np.frombuffer(content, np.uint8)
    for start in range(0, len(marks) if len(marks) > _MAX_NESTING else 0, 1 << 20):
        depths = np.cumsum(_STEPS[marks[start : start + (1 << 20)]], dtype=np.int32) + depth
        most, depth = max(most, int(depths.max())), int(depths[-1])
    return most
