"""Ranks with other keys than the coordinator's: no checkpoint, and nothing left of the save."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dcp_tensorizer import WriteError
from dcp_tensorizer._index.locations import RankLocations
from dcp_tensorizer._saving.commit import agree_on_key
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._tensor_file.encryption import Cipher
from dcp_tensorizer._tensor_file.names import data_file_name

CIPHER = Cipher(bytes(range(32)))
OTHER = Cipher(bytes(32))


def part(rank: int, cipher: Cipher | None) -> RankLocations:
    """What a rank with a key says of what it has written."""
    check = b"" if cipher is None else cipher.check_value()
    return RankLocations.of(rank, {}, {data_file_name(rank, 0, "a" * 32): 100}, check=check)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    names = [data_file_name(rank, 0, "a" * 32) for rank in range(2)]
    for name in (*names, "notes.txt"):
        (tmp_path / name).touch()
    return names


def test_one_key_is_accepted(tmp_path: Path, files: list[str]) -> None:
    """And nothing is removed."""
    agree_on_key(CIPHER, [part(0, CIPHER), part(2, CIPHER)], open_storage(tmp_path))
    assert set(os.listdir(tmp_path)) == {*files, "notes.txt"}


def test_no_keys_are_accepted(tmp_path: Path, files: list[str]) -> None:
    """And nothing is removed."""
    agree_on_key(None, [part(0, None), part(1, None)], open_storage(tmp_path))
    assert set(os.listdir(tmp_path)) == {*files, "notes.txt"}


@pytest.mark.parametrize(
    ("first", "second"), [(CIPHER, OTHER), (CIPHER, None), (None, CIPHER)], ids=["other", "missing", "superfluous"]
)
def test_another_key_fails_the_save(
    tmp_path: Path, files: list[str], first: Cipher | None, second: Cipher | None
) -> None:
    """The rank is named, and the files of all ranks are removed, and no others."""
    with pytest.raises(WriteError, match=r"^rank 1 has another encryption key.*EncryptionParams\.from_string"):
        agree_on_key(first, [part(0, first), part(1, second)], open_storage(tmp_path))
    assert os.listdir(tmp_path) == ["notes.txt"]
