"""Tests of the recognition of formats by file names and first bytes."""

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
    """A checkpoint of this package is recognised by the magic of its metadata."""
    make_checkpoint(tmp_path, {})
    assert format_of(open_storage(tmp_path), 0) == "dcp_tensorizer"


@pytest.mark.parametrize("name", [".metadata", "__3.metadata"])
def test_torchs_metadata_is_a_pickle(tmp_path: Path, name: str) -> None:
    """A pickle is torch's metadata, whether of all ranks or of the rank that loads."""
    (tmp_path / name).write_bytes(pickle.dumps({}))
    assert format_of(open_storage(tmp_path), 3) == "dcp"


def test_files_of_safetensors(tmp_path: Path) -> None:
    """Without metadata, the names of files tell their format."""
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    assert format_of(open_storage(tmp_path), 0) == "safetensors"


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_model_needs_no_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Hugging Face's file names are looked up before any listing, because some file servers cannot list."""
    (tmp_path / name).touch()
    storage = open_storage(tmp_path)
    monkeypatch.setattr(storage, "listing", None)
    assert format_of(storage, 0) == "safetensors"


def test_another_ranks_own_metadata_is_not_this_ranks(tmp_path: Path) -> None:
    """If each rank saved by itself, another rank's metadata does not count."""
    (tmp_path / "__3.metadata").write_bytes(pickle.dumps({}))
    assert format_of(open_storage(tmp_path), 0) is None


def test_anything_else_is_named(tmp_path: Path) -> None:
    """The text names a few entries, directories with a slash; an empty directory is called empty."""
    storage = open_storage(tmp_path)
    assert (format_of(storage, 0), contents(storage)) == (None, "it is empty")
    for name in "abcdef":
        (tmp_path / f"{name}.bin").write_bytes(b"")
    (tmp_path / "aa").mkdir()
    assert contents(storage) == "it holds a.bin, aa/, b.bin, c.bin, d.bin and 2 more"
    with pytest.raises(NotCommitted):
        format_of(open_storage(tmp_path / "nowhere"), 0)


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    """The error tells the kind of the file by its first bytes, and what to do with it."""
    path = tmp_path / "file"
    torch.save({"w": torch.ones(2)}, path)
    by_torch = path.read_bytes()
    make_checkpoint(tmp_path / "step-1", {"w": torch.ones(5000)})
    (data,) = (tmp_path / "step-1").glob("*.tensors")
    for content, words in (
        (
            by_torch,
            "like those that torch.save writes: load it with torch.load, or convert it to a checkpoint with "
            "`dcp-tensorizer convert`.",
        ),
        (pickle.dumps({}), "in the pickle format, which torch.save wrote before torch 1.6: load it with torch.load, "),
        (data.read_bytes(), "like those of a checkpoint: pass the directory of the checkpoint."),
        ((tmp_path / "step-1" / ".metadata").read_bytes(), "like those of a checkpoint: pass the directory of the"),
        (b'\x10\0\0\0\0\0\0\0{"w": {}}', "in the safetensors format: convert it"),
        (b"", "in no format that this package recognises, and a checkpoint is a directory."),
    ):
        path.write_bytes(content)
        assert f"{path} holds no committed checkpoint: it is a file {words}" in str(
            nothing_committed(open_storage(path))
        )


def test_what_a_directory_without_metadata_holds(tmp_path: Path) -> None:
    """The error explains that data without metadata may be a copy without hidden files."""

    def reason(name: str) -> str:
        return str(nothing_committed(open_storage(tmp_path / name))).partition(" holds no committed checkpoint: ")[2]

    make_checkpoint(tmp_path / "step-1", {"w": torch.ones(5000)})
    (tmp_path / "step-1" / ".metadata").unlink()
    assert reason("step-1").startswith(
        "it holds data without .metadata. There are three possible causes. The save that wrote the data never "
        "finished, or is not finished yet. The directory is a local copy (local=) of a checkpoint that is, or will be, "
        "on the remote storage: read the checkpoint there. A copy left out hidden files, "
    )
    assert reason("step-1").endswith("as `cp step/* ...` does: copy the directory itself, with `cp -r`.")
    assert reason("") == (
        "there is no .metadata, and it holds step-1/. The path is wrong, or a save there never finished."
    )
    assert reason("nowhere") == "there is no such directory."
