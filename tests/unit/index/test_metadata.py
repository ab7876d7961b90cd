"""Tests that DCP's metadata is equal after encoding and decoding, and that damaged or invalid indexes are errors."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_tensorizer import MetadataError, WriteError
from dcp_tensorizer._formats import own as module
from dcp_tensorizer._formats.own import decode, read_metadata
from dcp_tensorizer._index.container import IndexFile, Part, pack, read_head
from dcp_tensorizer._index.schema import (
    Entries,
    Head,
    Layout,
    ObjectEntry,
    Properties,
    TensorEntry,
    decode_entries,
    decode_places,
    encode_rows,
)
from dcp_tensorizer._index.write import encode
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._tensor_file.encryption import Cipher
from dcp_tensorizer._tensor_file.names import StoredItem, data_file_name

from ...lab.checkpoints import metadata_of, parts_of

FILES = {data_file_name(rank, 0, "a" * 32): 400_000 for rank in range(3)}
NAMES = list(FILES)


def item(file: int, length: int = 8, dtype: str = "float32", kind: str = "tensor", name: str = "x") -> StoredItem:
    return StoredItem(NAMES[file], name, 300_000, length, dtype, kind, b"12345678")


def entry(size: tuple[int, ...], *chunks: tuple[tuple[int, ...], tuple[int, ...]], **properties: Any) -> Any:
    made = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks]
    return TensorStorageMetadata(TensorProperties(**properties), torch.Size(size), made)


def metadata_with(entries: dict[Any, Any], items: dict[Any, StoredItem], **fields: Any) -> Metadata:
    meta = fields.pop("storage_meta", StorageMeta("/x", "s"))
    return Metadata(entries, storage_data={"files": FILES, "items": items}, storage_meta=meta, **fields)


def encoded(metadata: Metadata, **options: Any) -> bytes:
    """Returns the index of metadata, and of the items in its ``storage_data``."""
    content = metadata.storage_data or {"files": {}, "items": {}}
    parts = parts_of(content["files"], content["items"], named=content["items"])
    return encode(dataclasses.replace(metadata, storage_data=None), parts, **options)


def section_of(data: bytes, section: Any, path: str) -> bytes:
    return bytes(IndexFile(path, read_head(data, path), data).section(section))


EVERYTHING = metadata_with(
    {
        "plain": entry((2,), ((0,), (2,))),
        "sharded": entry((4, 1), ((0, 0), (2, 1)), ((2, 0), (2, 1)), dtype=torch.bfloat16, requires_grad=True),
        "scalar": entry((), ((), ())),
        "empty": entry((0, 3), ((0, 0), (0, 3))),
        "nowhere": entry((2,), ((0,), (2,)), memory_format=torch.channels_last, pin_memory=True),
        "sparse": entry((2,), layout=torch.sparse_coo),
        "object": BytesStorageMetadata(),
        "\ud800": BytesStorageMetadata(),
        5: BytesStorageMetadata(),
        ("a", 1): entry((2,), ((0,), (2,))),
    },
    {
        ("plain", (0,)): item(0, name="plain"),
        ("sharded", (0, 0)): item(0, 4, "bfloat16"),
        ("sharded", (2, 0)): item(1, 4, "bfloat16"),
        ("scalar", ()): item(2, 4),
        ("empty", (0, 0)): StoredItem.empty("float8_e4m3fn"),
        ("object", None): item(2, kind="object", dtype="uint8"),
        ("\ud800", None): item(2, kind="object", dtype="uint8"),
        (5, None): item(2, kind="object", dtype="uint8"),
        (("a", 1), (0,)): item(0),
        ("of no entry", (7, 7)): item(1, dtype="uint8", kind="wrapper"),
        ("of no entry", None): item(1),
    },
    planner_data={"plain": ("pl", 0, "ain"), "object": ("object",)},
    version="1.0.0",
    storage_meta=StorageMeta("/caf\udce9", "s", "l", ["m"]),
)


def test_everything_comes_back() -> None:
    """Entries in order, keys of all types, all fields of torch's classes, and all locations are equal."""
    before = time.time_ns()
    read = decode(encoded(EVERYTHING, rank=4), "x")
    content = read.storage_data
    assert dataclasses.replace(read, storage_data=None) == dataclasses.replace(EVERYTHING, storage_data=None)
    assert list(read.state_dict_metadata) == list(EVERYTHING.state_dict_metadata)
    assert content["files"] == FILES
    assert content["items"] == EVERYTHING.storage_data["items"]
    assert all(type(stored) is StoredItem for stored in content["items"].values())
    assert (content["rank"], content["torch"]) == (4, torch.__version__)
    assert before <= content["saved_at"] <= time.time_ns()
    assert "encryption" not in content


def test_the_metadata_given_is_not_changed() -> None:
    """With plan caching DCP passes the same object to every save."""
    given = metadata_of()
    before = dataclasses.replace(given)
    encode(given, [])
    assert given == before


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Metadata)])
def test_no_field_of_torch_is_lost(field: str) -> None:
    """The test fails if a release of torch adds a field that the index lacks."""
    assert field in ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version")


def test_each_rank_has_a_section_of_its_own() -> None:
    """The section has the rank's locations, and the head has its file names once."""
    data = encoded(EVERYTHING)
    head = read_head(data, "x")
    sections = {section.rank: section for section in head.sections if section.kind == "places"}
    assert set(sections) == {0, 1, 2}
    assert len(decode_places(section_of(data, sections[1], "x")).hashes) == 8 * 3
    assert [data.count(name.encode()) for name in NAMES] == [1, 1, 1]


def test_metadata_without_some_parts() -> None:
    """The planner's data, `StorageMeta`, or all entries may be missing."""
    for planner_data in (None, {}):
        bare = metadata_with({}, {}, planner_data=planner_data, storage_meta=None)
        assert dataclasses.replace(decode(encoded(bare), "x"), storage_data=None) == dataclasses.replace(
            bare, storage_data=None
        )


@pytest.mark.parametrize(
    "data",
    [{"a": ["list"]}, {1: 2}, [1, {"x": torch.Size([1])}], "text", {"a": ("b", 2**80)}, {"\ud800": ("\ud800",)}],
    ids=repr,
)
def test_what_a_custom_planner_records(data: Any) -> None:
    """Data of common types is equal after decoding."""
    metadata = dataclasses.replace(metadata_of(), planner_data=data, storage_data=NOTHING)
    assert decode(encoded(metadata), "x").planner_data == data


NOTHING: dict[str, Any] = {"files": {}, "items": {}}


class Foreign:
    pass


def test_planner_data_that_no_reader_would_load() -> None:
    """The save refuses such data, and names its type."""
    with pytest.raises(WriteError, match=r"the planner's data holds an object that no reader would load.*Foreign"):
        encoded(dataclasses.replace(metadata_of(), planner_data={"a": Foreign()}, storage_data=NOTHING))
    with pytest.raises(WriteError, match="cannot be stored"):
        encoded(dataclasses.replace(metadata_of(), planner_data={"a": (n for n in ())}, storage_data=NOTHING))


@pytest.mark.parametrize(
    ("key", "described", "message"),
    [
        (frozenset([1]), BytesStorageMetadata(), r"frozenset\(\{1\}\) cannot be described.*keys must be strings"),
        ("w", Foreign(), r"'w' cannot be described.*Foreign"),
        ("w", entry((4,), ((0, 0), (4, 1))), "'w' cannot be described.*does not have as many dimensions"),
    ],
    ids=["key", "entry", "dimensions"],
)
def test_what_no_reader_would_read_is_not_written(key: Any, described: Any, message: str) -> None:
    """The error names the key."""
    with pytest.raises(WriteError, match=message):
        encoded(metadata_with({key: described}, {}))


def test_every_flipped_byte_is_found() -> None:
    """An index with any changed byte, or truncated anywhere, is an error."""
    data = encoded(dataclasses.replace(metadata_of(), storage_data=NOTHING))
    assert decode(data, "x").planner_data == {"w": ("w",)}
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0x20
        with pytest.raises(MetadataError):
            decode(bytes(damaged), "x")
    for length in range(len(data)):
        with pytest.raises(MetadataError):
            decode(data[:length], "x")


# --- contents that are invalid -------------------------------------------------------------------------------------

GOOD = metadata_with(
    {"w": entry((2,), ((0,), (2,))), "o": BytesStorageMetadata()},
    {("w", (0,)): item(0, name="w"), ("o", None): item(0, dtype="uint8", kind="object")},
    planner_data={},
)


def rewritten(data: bytes, head: dict[str, Any] | None = None, **contents: bytes) -> bytes:
    """Returns an index with other fields in its head, and other sections, with valid digests."""
    old = read_head(data, "x")
    parts = [
        Part(
            section.kind,
            section.rank,
            contents.get(section.kind if section.rank in (None, 0) else "", section_of(data, section, "x")),
            tuple(section.files),
        )
        for section in old.sections
    ]
    fields = msgspec.structs.asdict(old) | {"sections": []} | (head or {})
    return pack(Head(**fields), parts)


def places(**changes: Any) -> dict[str, bytes]:
    """Returns the section of locations of `GOOD`, with other columns."""
    data = encoded(GOOD)
    (section,) = [section for section in read_head(data, "x").sections if section.rank == 0]
    rows = decode_places(section_of(data, section, "x"))
    return {"places": encode_rows(list((msgspec.structs.asdict(rows) | changes).values()))}


def column(dtype: str, *numbers: int) -> bytes:
    return np.array(numbers, dtype=dtype).tobytes()


def entries(*rows: Any, layout: Any = ((2,), 1, None, None), owners: Any = ((0, 0, 1),)) -> dict[str, bytes]:
    properties = Properties("float32", "strided", False, "contiguous_format", False)
    return {"entries": encode_rows(Entries([properties], [Layout(*layout)], [list(owners)], list(rows)))}


W = TensorEntry("w", 0, 0, 0, True)


@pytest.mark.parametrize(
    "contents",
    [
        places(files=column("<i4", 3, 0)),
        places(files=column("<i4", -2, 0)),
        places(files=column("<i4", 0)),
        places(files="../../etc/passwd"),
        places(offsets=column("<i8", -1, 300_000)),
        places(offsets=column("<i8", 399_999, 300_000)),
        places(offsets=b"1"),
        places(sizes=column("<i8", 1 << 62, 8)),
        places(sizes=column("<i8", -1, 8)),
        places(hashes=column("<u8", 5, 5)),
        places(hashes=column("<u8", 5)),
        places(hashes=column("<u8", 5, 6)),
        places(dtype_numbers=b"\0\x09"),
        places(kinds=b"\0\3"),
        places(kinds=b"\1\1"),
        places(kinds=b"\0"),
        places(names={7: "x"}),
        places(names={0: 5}),
        places(keys={7: ["x", None]}),
        places(digests="text"),
        places(digests=b"1234"),
        places(digest_sizes=column("<u4", 1 << 31, 1 << 31)),
        places(seals=bytes(40)),
        places(seals=bytes(40), seal_sizes=column("<u4", 40, 0)),
        {"places": b"\xc0"},
        {"places": b"\xdd\xff\xff\xff\xff"},
        {"places": b"\x91" * 100_000},
        {"paths": b"\x91" * 100_000},
        {"paths": msgspec.msgpack.encode({"w": ["w", ["deep"]]})},
        {"paths": msgspec.msgpack.encode({5: ["w"]})},
        {"entries": b"\x94\x90\x91" * 100_000},
        entries(TensorEntry("w", 1, 0, 0, True)),
        entries(TensorEntry("w", 0, 1, 0, True)),
        entries(TensorEntry("w", 0, 0, 1, True)),
        entries(W, layout=((-2,), 1, None, None)),
        entries(W, layout=((1,) * 256, 1, None, None)),
        entries(W, layout=((2,), 2, [[(0, 1, 2)]], [[(1, 0, 2)]])),
        entries(W, layout=((2,), 1, [[(0, 0, 1)], [(0, 0, 1)]], [[(2, 0, 1)], [(1, 0, 1)]])),
        entries(W, layout=((2,), 1, [[(-1, 0, 1)]], [[(2, 0, 1)]])),
        entries(W, layout=((2,), 2, [[(0, -1, 2)]], [[(2, 0, 2)]]), owners=[(0, 0, 2)]),
        entries(W, layout=((2,), 1 << 62, [[(0, 1, 1 << 62)]], [[(1, 0, 1 << 62)]]), owners=[(0, 0, 1 << 62)]),
        entries(W, layout=((2,), 1, [[(0, 1 << 62, 1)]], [[(0, 1, 1)]])),
        entries(W, layout=((), 1 << 62, [], []), owners=[(0, 0, 1)]),
        entries(W, owners=[(7, 0, 1)]),
        entries(W, owners=[(-1, -1, 2)]),
        entries(ObjectEntry("w", 0), ObjectEntry("w", 0)),
        entries(ObjectEntry("w", 2)),
        entries(ObjectEntry("nowhere", 0)),
        entries(ObjectEntry(msgspec.msgpack.Ext(2, b"\x91" * 100), 0)),
        entries(ObjectEntry(msgspec.msgpack.Ext(7, b""), 0)),
    ],
    ids=lambda contents: repr(contents)[:60],
)
def test_contents_that_make_no_sense_are_refused(contents: dict[str, bytes]) -> None:
    """Invalid contents with valid digests raise `MetadataError`, not a later error."""
    data = encoded(GOOD)
    assert decode(rewritten(data), "x").storage_data["items"] == GOOD.storage_data["items"]
    with pytest.raises(MetadataError, match="x is not a valid dcp_tensorizer index"):
        decode(rewritten(data, **contents), "x")


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({"save_id": msgspec.msgpack.Ext(2, b"\xc0")}, "a MessagePack extension that is not a string"),
    ],
)
def test_heads_that_make_no_sense_are_refused(head: dict[str, Any], message: str) -> None:
    """Invalid heads are errors, although their digests are valid."""
    with pytest.raises(MetadataError, match=message):
        decode(rewritten(encoded(GOOD), head), "x")


@pytest.mark.parametrize("dtype", ["load", "float3_of_tomorrow"])
def test_dtypes_that_this_torch_has_not_are_named(dtype: str) -> None:
    """The error recommends a newer release of torch."""
    properties = Properties(dtype, "strided", False, "contiguous_format", False)
    content = encode_rows(Entries([properties], [Layout((2,), 1, None, None)], [[(0, 0, 1)]], [W]))
    with pytest.raises(MetadataError, match=f"dtype '{dtype}', which torch .* lacks. Install a newer torch."):
        decode(rewritten(encoded(GOOD), entries=content), "x")


def test_a_file_that_is_named_twice() -> None:
    """The two entries may have different sizes."""
    data = encoded(GOOD)
    parts = [Part(s.kind, s.rank, section_of(data, s, "x"), tuple(s.files) * 2) for s in read_head(data, "x").sections]
    with pytest.raises(MetadataError, match="names a data file twice"):
        decode(pack(msgspec.structs.replace(read_head(data, "x"), sections=[]), parts), "x")


def test_another_release_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases whose `TensorProperties` have fewer fields read this index, and the other way round."""

    @dataclasses.dataclass
    class Fewer:
        dtype: torch.dtype

    data = encoded(GOOD)
    described = {"w": dataclasses.replace(GOOD.state_dict_metadata["w"], properties=Fewer(torch.float32))}
    of_fewer = encoded(dataclasses.replace(GOOD, state_dict_metadata=described))
    assert decode(of_fewer, "x").state_dict_metadata["w"] == GOOD.state_dict_metadata["w"]
    monkeypatch.setattr(module, "TensorProperties", Fewer)
    monkeypatch.setattr(module, "_FIELDS", {"dtype"})
    assert decode(data, "x").state_dict_metadata["w"].properties == Fewer(torch.float32)


def test_no_class_and_no_name_of_torch_is_in_it() -> None:
    """Dtypes and layouts are stored by their plain names."""
    data = encoded(GOOD)
    assert b"torch." not in data.replace(torch.__version__.encode(), b"")
    (section,) = [section for section in read_head(data, "x").sections if section.kind == "entries"]
    assert decode_entries(section_of(data, section, "x")).properties[0].layout == "strided"


# --- encryption ------------------------------------------------------------------------------------------------------

CIPHER = Cipher(bytes(range(32)))
SEALED = item(0, name="w")._replace(nonce_and_macs=bytes(24 + 16))
ENCRYPTED = metadata_with({"w": entry((2,), ((0,), (2,)))}, {("w", (0,)): SEALED})


def test_what_is_said_of_a_key_comes_back() -> None:
    """The index has a check value, the derivation of the key, and a seal."""
    record = decode(encoded(ENCRYPTED, cipher=CIPHER), "x").storage_data["encryption"]
    assert CIPHER.opens(record["check"])
    assert record["derivation"] is None
    assert CIPHER.sign(record["seal"].fingerprint) == record["seal"].mac


@pytest.mark.parametrize("sealed", [b"", bytes(39), bytes(56)], ids=len)
def test_what_is_not_encrypted_as_it_should_be_is_refused(sealed: bytes) -> None:
    """An attacker could add an item without nonce and MACs to an encrypted checkpoint."""
    items = {("w", (0,)): SEALED._replace(nonce_and_macs=sealed)}
    with pytest.raises(MetadataError, match="the data of 'w' is not encrypted in the same way as"):
        decode(encoded(metadata_with(ENCRYPTED.state_dict_metadata, items), cipher=CIPHER), "x")
    with pytest.raises(MetadataError, match="the data of 'w' is not encrypted in the same way as"):
        decode(encoded(ENCRYPTED), "x")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_torch_is_told_apart(tmp_path: Any) -> None:
    """The error for torch's own `.metadata` names the reader to use."""
    dcp.save({"w": torch.zeros(3)}, storage_writer=FileSystemWriter(tmp_path))
    with pytest.raises(MetadataError, match="open_reader"):
        read_metadata(open_storage(tmp_path))


def test_metadata_of_another_rank_is_told_apart(tmp_path: Any) -> None:
    """Files that were swapped or renamed are an error on the wrong rank."""
    (tmp_path / "__1.metadata").write_bytes(encoded(GOOD, rank=0))
    with pytest.raises(MetadataError, match=r"__1\.metadata is the metadata of rank 0"):
        read_metadata(open_storage(tmp_path), 1)
    os.rename(tmp_path / "__1.metadata", tmp_path / ".metadata")
    with pytest.raises(MetadataError, match="is the metadata of rank 0"):
        read_metadata(open_storage(tmp_path))
