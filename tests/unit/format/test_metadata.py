"""`.metadata` as it is read: whatever is damaged, foreign or makes no sense is refused, and no code is run."""

import dataclasses
import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint import FileSystemWriter

from dcp_tensorizer._format.layout import ENCRYPTED_VERSION, FORMAT, FORMAT_VERSION, StoredItem, data_file_name
from dcp_tensorizer._format.metadata import decode, encode
from dcp_tensorizer._loading.metadata_reader import read_metadata
from dcp_tensorizer._saving.commit import commit
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer.errors import MetadataError, UntrustedObject

from ...checkpoints import INDEX, metadata_of


def test_every_flipped_byte_is_found():
    """Whichever byte of `.metadata` changes, it is refused."""
    content = {"format": FORMAT, "version": FORMAT_VERSION, "save_id": "s", "files": {}, "items": {}}
    data = encode(dataclasses.replace(metadata_of(), storage_data=content))
    assert decode(data, "x").storage_data == content
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0x20
        with pytest.raises(MetadataError):
            decode(bytes(damaged), "x")
    for length in range(len(data)):
        with pytest.raises(MetadataError):
            decode(data[:length], "x")


def test_code_is_not_run(tmp_path):
    """A pickle that names a function is refused by name, with a right digest too, and it is not called."""
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(marker),)

    body = pickle.dumps(Evil())
    data = body + b"\x00DCPTZR1" + xxhash.xxh3_128_digest(body)
    with pytest.raises(UntrustedObject, match="mkdir"):
        decode(data, "x")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "version 99"),
        ({"format": "other"}, "does not describe"),
        ({"files": {"../../etc/passwd": 1}}, "passwd"),
        ({"files": {"/etc/passwd": 1}}, "passwd"),
    ],
)
def test_foreign_contents_are_refused(change, message):
    """Another version, another format, and files outside the checkpoint's directory are errors that say so."""
    content = {"format": FORMAT, "version": FORMAT_VERSION, "save_id": "s", "files": {}, "items": {}} | change
    with pytest.raises(MetadataError, match=message):
        decode(encode(dataclasses.replace(metadata_of(), storage_data=content)), "x")


ITEM = (data_file_name(0, 0, "a" * 32), "w", 300_000, 8, "bfloat16", "tensor", b"12345678")


@pytest.mark.parametrize(
    "change",
    [
        {"files": None},
        {"files": 5},
        {"files": {5: 5}},
        {"items": None},
        {"items": []},
        {"version": None},
        {"items": {("w", (0,)): ITEM[:5]}},
        {"items": {("w", (0,)): ("../../etc/passwd", *ITEM[1:])}},
        {"items": {("w", (0,)): (data_file_name(0, 0, "b" * 32), *ITEM[1:])}},
        {"items": {("w", (0,)): (*ITEM[:4], "nonsense", *ITEM[5:])}},
        {"items": {("w", (0,)): (*ITEM[:4], "load", *ITEM[5:])}},
        {"items": {("w", (0,)): (*ITEM[:5], "nonsense", *ITEM[6:])}},
        {"items": {("w", (0,)): (*ITEM[:2], -1, *ITEM[3:])}},
        {"items": {("w", (0,)): (*ITEM[:2], "1", *ITEM[3:])}},
    ],
    ids=repr,
)
def test_contents_that_make_no_sense_are_refused(change):
    """What has a right digest and is not what a writer writes is a MetadataError, not whatever it leads to later."""
    content = {"format": FORMAT, "version": FORMAT_VERSION, "save_id": "s", "files": {ITEM[0]: 300_008}}
    content |= {"items": {("w", (0,)): ITEM}}
    assert decode(encode(dataclasses.replace(metadata_of(), storage_data=content)), "x").storage_data == content
    content |= change
    content = {key: value for key, value in content.items() if value is not None}
    with pytest.raises(MetadataError):
        decode(encode(dataclasses.replace(metadata_of(), storage_data=content)), "x")


ENCRYPTED_ITEM = (*ITEM, bytes(24 + 16))
CHECK = bytes(56)


def encrypted_content(**change):
    """What an encrypted checkpoint of one item has in its metadata."""
    content = {"format": FORMAT, "version": ENCRYPTED_VERSION, "save_id": "s", "files": {ITEM[0]: 300_008}}
    content |= {"items": {("w", (0,)): ENCRYPTED_ITEM}, "encryption": {"derivation": None, "check": CHECK}} | change
    return {key: value for key, value in content.items() if value is not None}


def test_encrypted_checkpoints_have_a_version_of_their_own(tmp_path):
    """Releases that know nothing of encryption refuse them; what is said of the key comes back as it was."""
    record = {"derivation": (1, 8192, 2, b"sixteen of salt."), "check": CHECK}
    (item,) = (StoredItem(*ENCRYPTED_ITEM),)
    storage = open_storage(tmp_path)
    (tmp_path / item.file).write_bytes(bytes(300_008))
    commit(storage, metadata_of(), [(INDEX, item, 300_008)], rank=None, sync=True, encryption=record)
    content = read_metadata(storage).storage_data
    assert content == encrypted_content(encryption=record)
    assert content["version"] == 2


@pytest.mark.parametrize(
    "change",
    [
        {"encryption": None},
        {"encryption": b"key"},
        {"encryption": {"derivation": None}},
        {"encryption": {"derivation": None, "check": "x"}},
        {"encryption": {"derivation": (1, 2, 3), "check": CHECK}},
        {"encryption": {"derivation": (1, 2, 3, "salt"), "check": CHECK}},
        {"items": {("w", (0,)): ITEM}},
        {"items": {("w", (0,)): (*ITEM, b"")}},
        {"items": {("w", (0,)): (*ITEM, None)}},
        {"items": {("w", (0,)): (*ITEM, ENCRYPTED_ITEM[-1][:-1])}},
        {"items": {("w", (0,)): (*ITEM, ENCRYPTED_ITEM[-1] + bytes(16))}},
        {"version": FORMAT_VERSION},
    ],
    ids=repr,
)
def test_what_is_not_encrypted_as_it_should_be_is_refused(change):
    """An item without a nonce and MACs in an encrypted checkpoint would be believed, whoever put it there."""
    good, bad = encrypted_content(), encrypted_content(**change)
    assert decode(encode(dataclasses.replace(metadata_of(), storage_data=good)), "x").storage_data == good
    with pytest.raises(MetadataError):
        decode(encode(dataclasses.replace(metadata_of(), storage_data=bad)), "x")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_torch_is_told_apart(tmp_path):
    """`.metadata` of torch's own writer is refused with the name of the reader to use."""
    dcp.save({"w": torch.zeros(3)}, storage_writer=FileSystemWriter(tmp_path))
    with pytest.raises(MetadataError, match="FileSystemReader"):
        read_metadata(open_storage(tmp_path))
