"""`verify` finds and names every damage, reports no other, and continues after it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_tensorizer import TensorizerStorageWriter
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._tensor_file.encryption import Cipher
from dcp_tensorizer._tensor_file.names import Derivation, StoredItem, data_file_rank
from dcp_tensorizer._tensor_file.regions import Region
from dcp_tensorizer.errors import MetadataError, ReadError
from dcp_tensorizer.tools._verify import Damage, Verified, verify_files
from dcp_tensorizer.tools._view import read_parts

from ...lab.checkpoints import make_checkpoint
from ...lab.faults import flip
from ...lab.states import filled


@pytest.fixture(params=[None, Cipher(bytes(range(32)), Derivation(1, 8192, 2, bytes(16)))], ids=["plain", "encrypted"])
def checkpoint(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Makes a plain or an encrypted checkpoint of two ranks."""
    tensors = {"a": filled(torch.float32, (5, 4)), "b": filled(torch.bfloat16, (300, 1000), 1), "e": torch.empty(0, 2)}
    chunks = {"b": [Region((0, 0), (200, 1000)), Region((200, 0), (100, 1000))]}
    return make_checkpoint(tmp_path / "checkpoint", tensors, {"step": 7}, chunks, request.param)


def look(checkpoint: Path, full: bool = False) -> Verified:
    storage = open_storage(checkpoint)
    return verify_files(storage, read_parts(storage), full=full)


def data_file(checkpoint: Path, rank: int) -> Path:
    return next(path for path in checkpoint.glob("*.tensors") if data_file_rank(path.name) == rank)


@pytest.mark.parametrize("full", [False, True])
def test_what_is_whole_is_found_whole(checkpoint: Path, full: bool) -> None:
    """`verify` reads all data of an undamaged checkpoint, or with ``full`` every byte of its files."""
    found = look(checkpoint, full)
    sizes = sum(path.stat().st_size for path in checkpoint.glob("*.tensors"))
    assert (found.files, found.items, found.damages) == (2, 4, ())
    assert found.nbytes == sizes if full else 600_000 < found.nbytes < sizes


def test_any_flipped_byte_is_found_in_full(checkpoint: Path) -> None:
    """With ``full``, a flipped byte in the head, index, headers, data or end of a file is found."""
    path = data_file(checkpoint, 0)
    pieces = read_parts(open_storage(checkpoint))[None].storage_data["items"]
    offset = pieces["a", (0, 0)][2]
    size = path.stat().st_size
    for place in (0, 9, 100, 262_100, offset - 1, offset - 40, offset, offset + 79, size - 1):
        flip(path, place)
        found = look(checkpoint, full=True)
        assert len(found.damages) == 1, place
        assert found.damages[0].file == path.name
        assert found.damages[0].key == ("a" if offset - 60 < place < size - 8 else None), place
        flip(path, place)
    assert look(checkpoint, full=True).damages == ()


@pytest.mark.parametrize("sha256", [False, True])
def test_the_hashes_that_there_are_are_checked(tmp_path: Path, sha256: bool) -> None:
    """With ``full``, any changed byte of a header with CRC-32, and SHA-256 if present, is found."""
    checkpoint = make_checkpoint(tmp_path / "c", {"a": torch.ones(3), "b": torch.ones(5, 2)}, sha256=sha256)
    path = data_file(checkpoint, 0)
    assert (b"\x01\x20" in path.read_bytes()) == sha256
    assert look(checkpoint, full=True).damages == ()
    items = read_parts(open_storage(checkpoint))[None].storage_data["items"]
    first, second = (StoredItem(*items[key, (0,) * dims]) for key, dims in (("a", 1), ("b", 2)))
    for place in range(first.offset + first.length, second.offset):
        flip(path, place)
        assert [damage.key for damage in look(checkpoint, full=True).damages] == ["b"], place
        flip(path, place)


@pytest.mark.parametrize("sha256", [False, True])
@pytest.mark.parametrize("order", ["eaz", "aez", "aze", "eaefz"])
def test_tensors_without_elements_are_no_damage(tmp_path: Path, sha256: bool, order: str) -> None:
    """With ``full``, files with empty tensors, which `.metadata` does not locate, are whole; their headers count.

    A damaged index is one damage: it hides no damage of data, and no undamaged data counts as damaged.
    """
    sizes = {"a": (5, 2), "e": (0, 3), "f": (0,), "z": (3,)}
    state = {f"{number}{kind}": torch.ones(sizes[kind]) for number, kind in enumerate(order)}
    with TensorizerStorageWriter(tmp_path, sha256=sha256) as writer:
        dcp.save(state, storage_writer=writer)
    assert look(tmp_path, full=True).damages == ()
    path = data_file(tmp_path, 0)
    name_in_header = path.read_bytes().rindex(f"{order.index('e')}e".encode())
    flip(path, name_in_header)
    assert look(tmp_path, full=True).damages != ()
    flip(path, name_in_header)
    last = next(key for key in state if key.endswith("z"))
    flip(path, StoredItem(*read_parts(open_storage(tmp_path))[None].storage_data["items"][last, (0,)]).offset)
    for place in (0, 5, 20, 41, 57, 100, 262_100):  # in the head, each time beside the damage in the last tensor
        flip(path, place)
        index, data = look(tmp_path, full=True).damages
        assert (index.key, index.what, data.key) == (None, "the index of its tensors is damaged", last), place
        assert "are not what was saved" in data.what
        flip(path, place)


def test_damage_is_named_by_key_file_and_block(checkpoint: Path) -> None:
    """Each damaged block of each tensor is a separate damage with key, file and offset."""
    stored = read_parts(open_storage(checkpoint))[None].storage_data["items"]["b", (0, 0)]
    path = checkpoint / stored[0]
    flip(path, stored[2] + 5)
    flip(path, stored[2] + 3 * 65536 + 1)
    flip(checkpoint / stored[0], read_parts(open_storage(checkpoint))[None].storage_data["items"]["step", None][2])
    found = look(checkpoint)
    places = {(d.key, d.offset) for d in found.damages}
    assert {("b", stored[2]), ("b", stored[2] + 3 * 65536)} < places
    assert {d.key for d in found.damages} == {"b", "step"}
    assert f"bytes {stored[2]:,} to {stored[2] + 65536:,} are not" in next(
        d.what for d in found.damages if d.key == "b"
    )


def test_a_missing_file(checkpoint: Path) -> None:
    """A missing file is one damage that names its keys, and the other file is verified."""
    path = data_file(checkpoint, 1)
    path.unlink()
    found = look(checkpoint)
    assert found.damages == (Damage(path.name, None, 0, "is missing; lost: 'b' (1 in all)"),)
    assert found.nbytes > 0


@pytest.mark.parametrize("saved_again", [True, False])
def test_a_checkpoint_that_is_replaced_meanwhile_is_not_damaged(checkpoint: Path, saved_again: bool) -> None:
    """A checkpoint that is replaced or removed during verification is a ReadError, not damage."""
    storage = open_storage(checkpoint)
    parts, old = read_parts(storage), list(checkpoint.iterdir())
    if saved_again:
        make_checkpoint(checkpoint, {"a": torch.zeros(5, 4)}, {"step": 8})
    for path in old:
        if not saved_again or path.name != ".metadata":
            path.unlink()
    with pytest.raises(ReadError, match=r"was replaced or removed during the verification\. Verify it again\."):
        verify_files(storage, parts)


@pytest.mark.parametrize("full", [False, True])
def test_a_short_file(checkpoint: Path, full: bool) -> None:
    """A truncated file is a damage with its size and the keys at its end; data before that is not damaged."""
    path = data_file(checkpoint, 0)
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.truncate(size - 1000)
    found = look(checkpoint, full)
    assert found.damages[0].what == f"has {size - 1000:,} bytes instead of {size:,}"
    assert [d.key for d in found.damages if d.key] == ["step"]


def test_a_file_that_grew(checkpoint: Path) -> None:
    """A file with extra bytes at its end is one damage, because its data is unchanged."""
    with open(data_file(checkpoint, 0), "ab") as file:
        file.write(b"more")
    assert [(d.key, "instead of" in d.what) for d in look(checkpoint).damages] == [(None, True)]


def test_damaged_metadata_is_an_error(checkpoint: Path) -> None:
    """Damaged metadata is a MetadataError, because there is nothing to compare with."""
    flip(checkpoint / ".metadata", 100)
    with pytest.raises(MetadataError, match="checksum"):
        look(checkpoint)


@pytest.mark.parametrize("full", [False, True])
def test_a_short_file_with_many_tensors(tmp_path: Path, full: bool) -> None:
    """A truncated file is one damage, however many tensors were at its end."""
    make_checkpoint(tmp_path, {f"t{n}": torch.full((1000,), float(n)) for n in range(50)}, {})
    (path,) = tmp_path.glob("*.tensors")
    parts = read_parts(open_storage(tmp_path))
    offsets = sorted(item.offset for part in parts.values() for item in part.storage_data["items"].values())
    with open(path, "r+b") as file:
        file.truncate(offsets[10])
    found = look(tmp_path, full)
    assert len([damage for damage in found.damages if damage.key is not None]) == 0
    assert ", ... (40 in all)" in found.damages[0].what
