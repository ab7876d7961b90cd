"""What a directory holds, by its names and first bytes."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from dcp_tensorizer import NotCommitted
from dcp_tensorizer._formats.recognise import contents, format_of, nothing_committed
from dcp_tensorizer._storage.open import open_storage

from ...lab.checkpoints import make_checkpoint


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


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_model_needs_no_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Servers of files may have none: the names of Hugging Face are asked for first."""
    (tmp_path / name).touch()
    storage = open_storage(tmp_path)
    monkeypatch.setattr(storage, "listing", None)
    assert format_of(storage, 0) == "safetensors"


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


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    """The error says what it is by its first bytes, and what to do with it."""
    path = tmp_path / "file"
    torch.save({"w": torch.ones(2)}, path)
    by_torch = path.read_bytes()
    make_checkpoint(tmp_path / "step-1", {"w": torch.ones(5000)})
    (data,) = (tmp_path / "step-1").glob("*.tensors")
    for content, words in (
        (by_torch, "of torch.save: load it by torch.load, or make a checkpoint of it by `dcp-tensorizer convert`."),
        (pickle.dumps({}), "of torch.save: load it"),
        (data.read_bytes(), "of a checkpoint: give the directory that it is in."),
        ((tmp_path / "step-1" / ".metadata").read_bytes(), "of a checkpoint: give the directory that it is in."),
        (b'\x10\0\0\0\0\0\0\0{"w": {}}', "of safetensors: make a checkpoint"),
        (b"", "of another kind, and checkpoints are directories."),
    ):
        path.write_bytes(content)
        assert f"{path} holds no committed checkpoint: it is a file {words}" in str(
            nothing_committed(open_storage(path))
        )


def test_what_a_directory_without_metadata_holds(tmp_path: Path) -> None:
    """Data without metadata may be a copy that has left out hidden files."""

    def reason(name: str) -> str:
        return str(nothing_committed(open_storage(tmp_path / name))).partition(" holds no committed checkpoint: ")[2]

    make_checkpoint(tmp_path / "step-1", {"w": torch.ones(5000)})
    (tmp_path / "step-1" / ".metadata").unlink()
    assert reason("step-1").startswith(
        "data lies there without .metadata. The save that wrote it never finished, or is "
    )
    assert reason("step-1").endswith("as `cp step/* ...` does: copy the directory itself, by `cp -r`.")
    assert reason("") == (
        "there is no .metadata, and it holds step-1/. The path is wrong, or a save there never finished."
    )
    assert reason("nowhere") == "there is no such directory."
