"""Tests of the files of models: errors name them, and show no credentials."""

from __future__ import annotations

import traceback
from pathlib import Path

import numpy as np
import pytest

from dcp_tensorizer import ReadError, WriteError
from dcp_tensorizer._publish.model import READ_BYTES, StoredBytes, read_blocks, reading_tensors, written_file
from dcp_tensorizer._storage.local import LocalStorage
from dcp_tensorizer._storage.local_io import LocalSink


class SecretStorage(LocalStorage):
    """A directory whose errors contain a password."""

    def scrub(self, text: str) -> str:
        return text.replace("hunter22", "***")

    def create(self, name: str, nbytes: int, *, sync: bool) -> LocalSink:
        raise OSError("no room for hunter22")


def test_a_file_is_read_in_blocks(tmp_path: Path) -> None:
    """A file is read whole, in order; an empty file has no blocks, and a missing one is an error."""
    content = np.random.default_rng(0).bytes(READ_BYTES + 5)
    (tmp_path / "a").write_bytes(content)
    blocks = list(read_blocks(LocalStorage(tmp_path), "a"))
    assert [len(block) for block in blocks] == [READ_BYTES, 5]
    assert b"".join(blocks) == content
    (tmp_path / "b").touch()
    assert list(read_blocks(LocalStorage(tmp_path), "b")) == []
    with pytest.raises(ReadError, match=f"cannot open {tmp_path}/c: it does not exist"):
        list(read_blocks(LocalStorage(tmp_path), "c"))


def test_an_error_names_its_file(tmp_path: Path) -> None:
    """A read error names its own file, even if another one was opened later."""
    for name in "ab":
        (tmp_path / name).write_bytes(bytes(8))
    storage, block = LocalStorage(tmp_path), np.empty(8, dtype=np.uint8)
    wrong = pytest.raises(ReadError, match=f"cannot read 'w' in {tmp_path}/a: ")
    with reading_tensors(storage, "a") as first, reading_tensors(storage, "b"), wrong:
        first(StoredBytes("w", 4, 8, "U8", (8,)), 0, block)
    with pytest.raises(ReadError, match=f"cannot open {tmp_path}/c: "), reading_tensors(storage, "c"):
        pass


def test_no_traceback_shows_credentials(tmp_path: Path) -> None:
    """The error with the credentials is not the cause of the raised one."""
    with pytest.raises(WriteError) as caught, written_file(SecretStorage(tmp_path), "a", 5):
        pass
    assert str(caught.value) == f"cannot create {tmp_path}/a: OSError: no room for ***"
    assert "hunter22" not in "".join(traceback.format_exception(caught.value))
