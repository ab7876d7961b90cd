"""The container of `.metadata`: what is not an index is named as what it is, and each part is checked by itself."""

from __future__ import annotations

import hashlib
import pickle
import re
import struct
from typing import Any

import msgspec
import pytest
import xxhash

from dcp_tensorizer import MetadataError
from dcp_tensorizer._format.index import INDEX_VERSION, Part, data_file_names, pack, read_head, read_seal, section_of
from dcp_tensorizer._format.index_rows import DataFile, Head, KeyRecord, Section
from dcp_tensorizer._format.layout import data_file_name

FILE = data_file_name(3, 0, "a" * 32)
START = 80


def head_of(**changes: Any) -> Head:
    fields = {
        "release": "0.1.0",
        "torch": "2.13.0",
        "saved_at": 5,
        "rank": None,
        "has_storage_meta": True,
        "save_id": "s",
        "load_id": None,
        "checkpoint_id": "/c",
        "modules": [],
        "metadata_version": None,
        "files": [DataFile(FILE, 7)],
        "dtypes": ["float32"],
        "encryption": None,
        "sections": [],
    }
    return Head(**fields | changes)  # type: ignore[arg-type]


def index_of(*contents: bytes, **changes: Any) -> bytes:
    return pack(head_of(**changes), [Part("entries", None, b"one"), *(Part("places", 3, c) for c in contents)])


def with_head(data: bytes, head: Any) -> bytes:
    """An index with another head, and right digests."""
    _, version, head_nbytes, _ = struct.unpack_from("<8sQQQ", data)
    packed = msgspec.msgpack.encode(head)
    rest = data[START + head_nbytes :]
    fixed = struct.pack("<8sQQQ", data[:8], version, len(packed), START + len(packed) + len(rest))
    return fixed + xxhash.xxh3_128_digest(fixed + data[48:START] + packed) + data[48:START] + packed + rest


def test_the_layout_that_is_documented() -> None:
    """Magic, version, lengths, digest, MAC, head, sections: each where `docs/reference/format.md` says it is."""
    data = index_of(b"two", b"three")
    magic, version, head_nbytes, nbytes = struct.unpack_from("<8sQQQ", data)
    assert (magic, version, nbytes) == (b"\x89DCPTZR\n", INDEX_VERSION, len(data))
    assert data[32:48] == xxhash.xxh3_128_digest(data[:32] + data[48 : START + head_nbytes])
    assert data[48:START] == bytes(32)
    head = msgspec.msgpack.decode(data[START : START + head_nbytes])
    assert head["files"] == [[FILE, 7]]
    assert [row[:4] for row in head["sections"]] == [["entries", None, 0, 3], ["places", 3, 3, 3], ["places", 3, 6, 5]]
    assert data[START + head_nbytes :] == b"onetwothree"
    assert head["sections"][2][4:] == [xxhash.xxh3_128_digest(b"three"), None]


def test_sections_are_read_by_themselves() -> None:
    """A damaged one does not keep anybody from the others, nor from the names of the files."""
    data = bytearray(index_of(b"two", b"three"))
    data[-1] ^= 1
    head = read_head(bytes(data), "m")
    assert section_of(bytes(data), head.sections[1], "m") == b"two"
    assert data_file_names(bytes(data), "m") == {FILE}
    with pytest.raises(MetadataError, match="m is damaged: its checksum does not match"):
        section_of(bytes(data), head.sections[2], "m")


OLD = pickle.dumps({}) + b"\x00DCPTZR1" + bytes(16)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (OLD, "is a pickle of dcp_tensorizer from before its first release"),
        (pickle.dumps({"a": 1}), "FileSystemWriter writes. Load it with FileSystemReader, or bring it over"),
        (b"{}", "was not written by dcp_tensorizer, or is damaged at its beginning"),
        (b"", "was not written by dcp_tensorizer"),
        (index_of()[:20], "is damaged: it ends after 20 bytes"),
        (index_of()[:100], "is damaged: its head is not whole"),
        (index_of()[:-1], "is damaged: it has [0-9,]+ bytes instead of"),
        (index_of() + b"x", "is damaged: it has [0-9,]+ bytes instead of"),
    ],
    ids=["old", "torch", "other", "empty", "start", "head", "cut", "longer"],
)
def test_what_is_no_index_is_named(data: bytes, message: str) -> None:
    """And what to do about it."""
    with pytest.raises(MetadataError, match=f"/c/.metadata .*{message}"):
        read_head(data, "/c/.metadata")


def test_a_newer_version_is_told_from_a_damaged_one() -> None:
    """Its digest is where this one's is."""
    data = bytearray(index_of())
    data[8] = 7
    with pytest.raises(MetadataError, match="damaged"):
        read_head(bytes(data), "m")
    data[32:48] = xxhash.xxh3_128_digest(bytes(data[:32] + data[48:-3]))
    with pytest.raises(MetadataError, match=r"m is of format version 7, and this release reads version 1: install"):
        read_head(bytes(data), "m")


def section(**changes: Any) -> list[Any]:
    fields: dict[str, Any] = {
        "kind": "entries",
        "rank": None,
        "offset": 0,
        "nbytes": 3,
        "digest": xxhash.xxh3_128_digest(b"one"),
        "strong": None,
    }
    return list((fields | changes).values())


@pytest.mark.parametrize(
    "change",
    [
        {"files": [["../../etc/passwd", 1]]},
        {"files": [["/etc/passwd", 1]]},
        {"files": [[FILE, -1]]},
        {"files": [[FILE, 1 << 63]]},
        {"files": [[FILE, True]]},
        {"files": [FILE]},
        {"files": {FILE: 1}},
        {"sections": []},
        {"sections": [section(offset=1)]},
        {"sections": [section(nbytes=2)]},
        {"sections": [section(nbytes=1 << 62)]},
        {"sections": [section(kind="code")]},
        {"sections": [section(), section(offset=3, nbytes=0)]},
        {"sections": [section(strong=bytes(32))]},
        {"sections": [section(kind="places")]},
        {"encryption": [b"", None]},
        {"encryption": [bytes(56), [1, 2, 3]]},
        {"encryption": [bytes(56), [1, 2, 3, "salt"]]},
        {"rank": "0"},
        {"modules": [[[[]]]]},
        {"saved_at": None},
    ],
    ids=repr,
)
def test_heads_that_make_no_sense_are_refused(change: dict[str, Any]) -> None:
    """With right digests: types, names of files, and sections that do not fill the file."""
    data = index_of()
    head = msgspec.msgpack.decode(msgspec.msgpack.encode(read_head(data, "m")))
    assert read_head(with_head(data, head), "m").sections == [Section(*section())]
    with pytest.raises(MetadataError, match="m is not what any dcp_tensorizer would write"):
        read_head(with_head(data, head | change), "m")
    with pytest.raises(MetadataError):
        read_head(with_head(data, [b"\x91" * 10_000]), "m")


def test_an_encrypted_index_is_signed() -> None:
    """The MAC is of a fingerprint of start and head, and the head holds strong digests of the sections."""
    signed: list[bytes] = []

    def sign(fingerprint: bytes) -> bytes:
        signed.append(fingerprint)
        return b"m" * 32

    data = pack(head_of(encryption=KeyRecord(bytes(56), None)), [Part("entries", None, b"one")], sign)
    head_end = len(data) - 3
    assert read_seal(data) == (signed[0], b"m" * 32)
    assert signed == [hashlib.blake2b(data[:32] + data[START:head_end], digest_size=32).digest()]
    (only,) = read_head(data, "m").sections
    assert only.strong == hashlib.blake2b(b"one", digest_size=32).digest()
    changed = msgspec.structs.replace(only, digest=xxhash.xxh3_128_digest(b"ONE"))
    with pytest.raises(MetadataError, match=re.escape("BLAKE2b")):  # XXH3 alone could be forged
        section_of(data[:-3] + b"ONE", changed, "m")
