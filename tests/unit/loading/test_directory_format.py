"""What a directory holds, by its names and first bytes."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from dcp_tensorizer import NotCommitted
from dcp_tensorizer._loading.directory_format import contents, format_of
from dcp_tensorizer._storage.open import open_storage

from ...checkpoints import make_checkpoint


def test_a_checkpoint_of_ours(tmp_path: Path) -> None:
    """Its metadata begins with a magic of its own."""
    make_checkpoint(tmp_path, {})
    assert format_of(open_storage(tmp_path), 0) == "dcp_tensorizer"


@pytest.mark.parametrize("name", [".metadata", "__3.metadata"])
def test_torchs_metadata_is_a_pickle(tmp_path: Path, name: str) -> None:
    """That of all ranks, or the asking rank's own."""
    (tmp_path / name).write_bytes(pickle.dumps({}))
    assert format_of(open_storage(tmp_path), 3) == "dcp"


def test_files_of_safetensors(tmp_path: Path) -> None:
    """Where there is no metadata, their names say it."""
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    assert format_of(open_storage(tmp_path), 0) == "safetensors"


def test_another_ranks_own_metadata_is_not_this_ranks(tmp_path: Path) -> None:
    """Where each rank saved for itself, each loads its own."""
    (tmp_path / "__3.metadata").write_bytes(pickle.dumps({}))
    assert format_of(open_storage(tmp_path), 0) is None


def test_anything_else_is_named(tmp_path: Path) -> None:
    """A few names at most, folders with a slash; an empty directory is called empty, a missing one missing."""
    storage = open_storage(tmp_path)
    assert (format_of(storage, 0), contents(storage)) == (None, "it is empty")
    for name in "abcdef":
        (tmp_path / f"{name}.bin").write_bytes(b"")
    (tmp_path / "aa").mkdir()
    assert contents(storage) == "it holds a.bin, aa/, b.bin, c.bin, d.bin and 2 more"
    with pytest.raises(NotCommitted):
        format_of(open_storage(tmp_path / "nowhere"), 0)
