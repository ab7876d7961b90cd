"""Tests of the container of `.metadata`: each section is checked by itself, and other files are recognised."""

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
from dcp_tensorizer._index.container import (
    FIRST_BYTES,
    INDEX_VERSION,
    IndexFile,
    Part,
    committed,
    open_index,
    pack,
    read_head,
)
from dcp_tensorizer._index.schema import DataFile, Head, KeyRecord, SaveRecord, Section
from dcp_tensorizer._tensor_file.names import data_file_name

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
        "encryption": None,
        "sections": [],
    }
    return Head(**fields | changes)  # type: ignore[arg-type]


def index_of(*contents: bytes, **changes: Any) -> bytes:
    files = [(DataFile(data_file_name(3, n, "a" * 32), 7),) for n in range(len(contents))]
    places = [Part("places", 3, content, of) for content, of in zip(contents, files, strict=True)]
    return pack(head_of(**changes), [Part("entries", None, b"one"), *places])


def section_of(data: bytes, section: Section, path: str) -> bytes:
    return bytes(IndexFile(path, read_head(data, path), data).section(section))


def with_head(data: bytes, head: Any) -> bytes:
    """Returns an index with another head, and valid digests."""
    _, version, head_nbytes, _ = struct.unpack_from("<8sQQQ", data)
    packed = msgspec.msgpack.encode(head)
    rest = data[START + head_nbytes :]
    fixed = struct.pack("<8sQQQ", data[:8], version, len(packed), START + len(packed) + len(rest))
    return fixed + xxhash.xxh3_128_digest(fixed + data[48:START] + packed) + data[48:START] + packed + rest


def test_the_layout_that_is_documented() -> None:
    """Each field is where `docs/reference/format.md` describes it."""
    data = index_of(b"two", b"three")
    magic, version, head_nbytes, nbytes = struct.unpack_from("<8sQQQ", data)
    assert (magic, version, nbytes) == (b"\x89DCPTZR\n", INDEX_VERSION, len(data))
    assert data[32:48] == xxhash.xxh3_128_digest(data[:32] + data[48 : START + head_nbytes])
    assert data[48:START] == bytes(32)
    head = msgspec.msgpack.decode(data[START : START + head_nbytes])
    assert [row[6] for row in head["sections"]] == [[], [[FILE, 7]], [[data_file_name(3, 1, "a" * 32), 7]]]
    assert [row[:4] for row in head["sections"]] == [["entries", None, 0, 3], ["places", 3, 3, 3], ["places", 3, 6, 5]]
    assert data[START + head_nbytes :] == b"onetwothree"
    assert head["sections"][2][4:6] == [xxhash.xxh3_128_digest(b"three"), None]


def test_sections_are_read_by_themselves() -> None:
    """A damaged section is an error; the other sections and the names of files are still read."""
    data = bytearray(index_of(b"two", b"three"))
    data[-1] ^= 1
    head = read_head(bytes(data), "m")
    assert section_of(bytes(data), head.sections[1], "m") == b"two"
    assert IndexFile("m", head, b"").files[FILE] == 7
    with pytest.raises(MetadataError, match=r"m is damaged, or was overwritten.*: a checksum does not match"):
        section_of(bytes(data), head.sections[2], "m")


OLD = pickle.dumps({}) + b"\x00DCPTZR1" + bytes(16)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (OLD, "is a pickle that dcp_tensorizer wrote before its first release"),
        (
            pickle.dumps({"a": 1}),
            "FileSystemWriter writes. Load the checkpoint with open_reader, inspect it with `dcp-tensorizer report`",
        ),
        (b"{}", "was not written by dcp_tensorizer, or is damaged at its beginning"),
        (b"", "was not written by dcp_tensorizer"),
        (index_of()[:20], "is damaged: it ends after 20 bytes"),
        (index_of()[:100], "is damaged: its head is incomplete"),
        (index_of()[:-1], "is damaged: it has [0-9,]+ bytes instead of"),
        (index_of() + b"x", "is damaged: it has [0-9,]+ bytes instead of"),
    ],
    ids=["old", "torch", "other", "empty", "start", "head", "cut", "longer"],
)
def test_what_is_no_index_is_named(data: bytes, message: str) -> None:
    """The error names the kind of file, and what to do."""
    with pytest.raises(MetadataError, match=f"/c/.metadata .*{message}"):
        read_head(data, "/c/.metadata")


def test_a_newer_version_is_told_from_a_damaged_one() -> None:
    """Every version has its digest at the same offset."""
    data = bytearray(index_of())
    data[8] = 7
    with pytest.raises(MetadataError, match="damaged"):
        read_head(bytes(data), "m")
    data[32:48] = xxhash.xxh3_128_digest(bytes(data[:32] + data[48:-3]))
    with pytest.raises(MetadataError, match=r"m has format version 7, and this release reads version 1\. Install"):
        read_head(bytes(data), "m")


def section(**changes: Any) -> list[Any]:
    fields: dict[str, Any] = {
        "kind": "entries",
        "rank": None,
        "offset": 0,
        "nbytes": 3,
        "digest": xxhash.xxh3_128_digest(b"one"),
        "strong": None,
        "files": [],
    }
    return list((fields | changes).values())


@pytest.mark.parametrize(
    "change",
    [
        {"sections": [section(files=[["../../etc/passwd", 1]])]},
        {"sections": [section(files=[["/etc/passwd", 1]])]},
        {"sections": [section(files=[[FILE, -1]])]},
        {"sections": [section(files=[[FILE, 1 << 63]])]},
        {"sections": [section(files=[[FILE, True]])]},
        {"sections": [section(files=[FILE])]},
        {"sections": [section(files={FILE: 1})]},
        {"sections": [section(files=[[FILE, 1], [FILE, 2]])]},
        {"sections": [section(nbytes=0, kind="places", rank=0), section()]},
        {
            "sections": [
                section(),
                section(offset=3, nbytes=0, kind="paths"),
                section(offset=3, nbytes=0, kind="planner"),
            ]
        },
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
    """Invalid types, file names, and sections that do not fill the file are errors, also with valid digests."""
    data = index_of()
    head = msgspec.msgpack.decode(msgspec.msgpack.encode(read_head(data, "m")))
    assert read_head(with_head(data, head), "m").sections == [Section(*section())]
    with pytest.raises(MetadataError, match="m is not a valid dcp_tensorizer index"):
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
    head, head_end = read_head(data, "m"), len(data) - 3
    assert IndexFile("m", head, data).seal == (signed[0], b"m" * 32)
    assert signed == [hashlib.blake2b(data[:32] + data[START:head_end], digest_size=32).digest()]
    (only,) = head.sections
    assert only.strong == hashlib.blake2b(b"one", digest_size=32).digest()
    changed = msgspec.structs.replace(only, digest=xxhash.xxh3_128_digest(b"ONE"))
    with pytest.raises(MetadataError, match=re.escape("BLAKE2b")):  # XXH3 alone could be forged
        IndexFile("m", head, data[:head_end] + b"ONE").section(changed)


class Reads:
    """A file that records the ranges that are read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.ranges: list[tuple[int, int]] = []

    def __call__(self, offset: int, nbytes: int) -> bytes:
        self.ranges.append((offset, nbytes))
        return self.data[offset : offset + nbytes]

    def open(self) -> IndexFile:
        return open_index("m", self.data[:FIRST_BYTES], self)


def test_a_small_index_is_read_at_once() -> None:
    """The first bytes hold the whole index, so that nothing else is read."""
    reads = Reads(index_of(b"two"))
    assert [bytes(reads.open().section(section)) for section in reads.open().head.sections] == [b"one", b"two"]
    assert reads.ranges == []


@pytest.mark.parametrize("large", ["head", "entries", "places"])
def test_of_a_large_index_places_are_read_when_they_are_wanted(large: str) -> None:
    """All sections but the locations take one more request, or two if the head is large."""
    entries = bytes(2 * FIRST_BYTES if large == "entries" else 10)
    places = [b"a" * (FIRST_BYTES if large == "places" else 10), b"b" * 10]
    modules = ["m" * 2 * FIRST_BYTES] if large == "head" else []
    data = pack(head_of(modules=modules), [Part("entries", None, entries), *(Part("places", 3, p) for p in places)])
    reads = Reads(data)
    index = reads.open()
    assert len(reads.ranges) == {"head": 2, "entries": 1, "places": 0}[large]
    assert bytes(index.section(index.head.sections[0])) == entries
    before = len(reads.ranges)
    assert bytes(index.section(index.head.sections[2])) == places[1]
    assert reads.ranges[before:] == [(len(data) - 10, 10)]


class File:
    """A directory with an index whose size may differ from the number of its bytes."""

    path = "/ckpt"

    def __init__(self, data: bytes, nbytes: int) -> None:
        self.data, self.nbytes = data, nbytes

    def read(self, name: str, most: int | None = None) -> bytes | None:
        return self.data[: self.nbytes][:most]

    def read_range(self, name: str, offset: int, nbytes: int) -> bytes:
        assert offset + nbytes <= self.nbytes, "there is no more"
        return self.data[offset : offset + nbytes]

    def head(self, name: str) -> int | None:
        return self.nbytes


def test_nothing_is_asked_for_beyond_the_end_of_an_index() -> None:
    """A truncated file, and one that claims more bytes than there is memory, are damaged."""
    data = pack(head_of(), [Part("entries", None, bytes(10)), Part("places", 3, bytes(2 * FIRST_BYTES))])
    whole = committed(File(data, len(data)), ".metadata")
    assert whole is not None and len(whole.section(whole.head.sections[1])) == 2 * FIRST_BYTES
    for nbytes in (FIRST_BYTES, len(data) - 1):
        with pytest.raises(MetadataError, match=f"/ckpt/.metadata is damaged: it has {nbytes:,} bytes instead of "):
            committed(File(data, nbytes), ".metadata")
    claims = bytearray(data)
    struct.pack_into("<Q", claims, 16, 1 << 50)  # the bytes in the head
    with pytest.raises(MetadataError, match="bytes instead of"):
        committed(File(bytes(claims), len(data)), ".metadata")


def test_a_section_that_was_overwritten_meanwhile_is_found() -> None:
    """The digest of a section of another checkpoint does not match."""
    data = pack(head_of(), [Part("entries", None, b"one"), Part("places", 3, bytes(FIRST_BYTES))])
    reads = Reads(data)
    index = reads.open()
    reads.data = data[:-1] + b"x"
    with pytest.raises(MetadataError, match="was overwritten while it was read: a checksum does not match"):
        index.section(index.head.sections[1])


def test_what_a_manager_says_comes_back() -> None:
    """The record is one field of the head, also with NaN; a head without it is read as before."""
    record = SaveRecord(7, "s" * 32, (("", 0), ("b" * 32, 5)), {"loss": 0.5, "n": 3.0, "odd": float("nan")})
    assert repr(read_head(index_of(record=record), "x").record) == repr(record)
    data = index_of()
    head = msgspec.msgpack.decode(data[START : START + struct.unpack_from("<8sQQQ", data)[2]])
    assert head.pop("record") is None
    assert read_head(with_head(data, head), "x").record is None


@pytest.mark.parametrize(
    "record", [[-1, None, [], {}], [1, 2, [], {}], [1, None, [["a"]], {}], [1, None, [], {"a": "b"}], 7]
)
def test_records_that_make_no_sense_are_refused(record: Any) -> None:
    """Records with values of other types are errors."""
    data = index_of()
    head = msgspec.msgpack.decode(data[START : START + struct.unpack_from("<8sQQQ", data)[2]])
    with pytest.raises(MetadataError, match="not a valid dcp_tensorizer index"):
        read_head(with_head(data, head | {"record": record}), "x")
