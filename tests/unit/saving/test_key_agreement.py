"""Ranks with other keys than the coordinator's: no checkpoint, and nothing left of the save."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from dcp_tensorizer import WriteError
from dcp_tensorizer._format.encryption import Cipher
from dcp_tensorizer._format.layout import StoredItem, data_file_name
from dcp_tensorizer._saving.key_agreement import agree_on_key
from dcp_tensorizer._storage.open import open_storage

CIPHER = Cipher(bytes(range(32)))
OTHER = Cipher(bytes(32))


def result(rank: int, cipher: Cipher | None, *, empty: bool = False) -> WriteResult:
    """What a rank with a key says of an item."""
    file = data_file_name(rank, 0, "a" * 32)
    stored = StoredItem.empty("int8") if empty else StoredItem(file, "w", 0, 8, "int8", "tensor", b"12345678")
    check = b"" if cipher is None else cipher.check_value()
    return WriteResult(MetadataIndex("w", torch.Size([rank])), stored.length, (stored.to_tuple(), 100, check))


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    names = [data_file_name(rank, 0, "a" * 32) for rank in range(2)]
    for name in (*names, "notes.txt"):
        (tmp_path / name).touch()
    return names


def test_one_key_is_accepted(tmp_path: Path, files: list[str]) -> None:
    """Ranks that wrote nothing have no say; and nothing is removed."""
    agree_on_key(CIPHER, [[result(0, CIPHER)], [], [result(2, CIPHER)]], open_storage(tmp_path))
    assert set(os.listdir(tmp_path)) == {*files, "notes.txt"}


def test_no_keys_are_accepted(tmp_path: Path, files: list[str]) -> None:
    """And nothing is removed."""
    agree_on_key(None, [[result(0, None)], [result(1, None)]], open_storage(tmp_path))
    assert set(os.listdir(tmp_path)) == {*files, "notes.txt"}


@pytest.mark.parametrize(
    ("first", "second"), [(CIPHER, OTHER), (CIPHER, None), (None, CIPHER)], ids=["other", "missing", "superfluous"]
)
def test_another_key_fails_the_save(
    tmp_path: Path, files: list[str], first: Cipher | None, second: Cipher | None
) -> None:
    """The rank is named, and the files of all ranks are removed, and no others."""
    results = [[result(0, first)], [result(1, second), result(1, second, empty=True)]]
    with pytest.raises(WriteError, match=r"^rank 1 has another encryption key.*EncryptionParams\.from_string"):
        agree_on_key(first, results, open_storage(tmp_path))
    assert os.listdir(tmp_path) == ["notes.txt"]
