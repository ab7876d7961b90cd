"""Edits of a checkpoint's `.metadata`, with every digest computed again, but not the MAC, which needs the key."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from dcp_tensorizer._index.container import IndexFile, read_head
from dcp_tensorizer._index.schema import decode_entries, decode_places, encode_rows

_START = 80
_DECODERS = {"entries": decode_entries, "places": decode_places}


def edit_index(path: Path, kind: str, change: Callable[[Any], object]) -> None:
    """Changes the rows of the first section of a kind, or the ``head``; the MAC stays as it is."""
    data = path.read_bytes()
    head = read_head(data, str(path))
    index = IndexFile(str(path), head, data)
    contents = [bytes(index.section(section)) for section in head.sections]
    for number, section in enumerate(head.sections):
        if section.kind == kind:
            rows = _DECODERS[kind](contents[number])
            change(rows)
            contents[number] = encode_rows(rows)
            break
    offset = 0
    for section, content in zip(head.sections, contents, strict=True):
        section.offset, section.nbytes = offset, len(content)
        section.digest = xxhash.xxh3_128_digest(content)
        if section.strong is not None:
            section.strong = hashlib.blake2b(content, digest_size=32).digest()
        offset += len(content)
    if kind == "head":
        change(head)
    packed = msgspec.msgpack.encode(head)
    fixed = struct.pack("<8sQQQ", data[:8], 1, len(packed), _START + len(packed) + offset)
    mac = data[48:_START]
    path.write_bytes(fixed + xxhash.xxh3_128_digest(fixed + mac + packed) + mac + packed + b"".join(contents))
