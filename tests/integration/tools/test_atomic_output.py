"""Conversions write a whole result or nothing, and leave files of other programs alone."""

from __future__ import annotations

import stat
from pathlib import Path

import fsspec
import pytest
import torch

from dcp_tensorizer import CheckpointError, ConversionError, ReadError
from dcp_tensorizer._storage.fsspec import StreamStorage
from dcp_tensorizer.tools import convert
from dcp_tensorizer.tools._formats.registry import FORMATS

from ...lab.checkpoints import make_checkpoint, tensors_of
from ...lab.states import filled, same


@pytest.mark.parametrize("to", FORMATS)
def test_what_is_there_stays(tmp_path: Path, to: str) -> None:
    """A conversion refuses a destination that is a directory with files in it, and leaves these files."""
    make_checkpoint(tmp_path / "a", {"x": torch.ones(3)})
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").write_text("mine")
    with pytest.raises(ConversionError, match="exists"):
        convert(tmp_path / "a", tmp_path / "b", to)
    assert (tmp_path / "b" / "mine").read_text() == "mine"


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("name", ["file/below", "nul\0", "\ud800", "x" * 300])
def test_where_nothing_can_be_written(tmp_path: Path, to: str, name: str) -> None:
    """A destination below a file, or with an invalid or too long name, is a CheckpointError, and nothing is left."""
    make_checkpoint(tmp_path / "a", {"x": torch.ones(3)})
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"File exists|is not a valid path|File name too long"):
        convert(tmp_path / "a", f"{tmp_path}/{name}", to)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "file"]


@pytest.mark.parametrize("to", FORMATS)
def test_a_file_that_is_there_stays(tmp_path: Path, to: str) -> None:
    """A conversion refuses a destination that is a file, whether it would write a file or a directory."""
    make_checkpoint(tmp_path / "a", {"x": torch.ones(3)})
    (tmp_path / "b").write_text("mine")
    with pytest.raises(ConversionError, match="exists"):
        convert(tmp_path / "a", tmp_path / "b", to)
    assert (tmp_path / "b").read_text() == "mine"


@pytest.mark.parametrize("to", FORMATS)
def test_a_source_that_breaks_off_leaves_nothing(tmp_path: Path, to: str) -> None:
    """If the source is damaged near its end, the error names the damaged file, and no part of the result is left."""
    make_checkpoint(tmp_path / "a", {"first": torch.ones(100), "last": filled(torch.uint8, (300_000,))})
    (path,) = (tmp_path / "a").glob("*.tensors")
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size - 1000)
        file.write(b"damaged")
    with pytest.raises(ReadError, match=path.name):
        convert(tmp_path / "a", tmp_path / "b", to)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("to", FORMATS)
def test_a_failure_leaves_no_new_directories(tmp_path: Path, to: str) -> None:
    """A failed conversion removes the parent directories that it made, except those that hold other files by then."""
    make_checkpoint(tmp_path / "a", {"x": torch.ones(3)})
    (tmp_path / "mine").mkdir()

    def fail(done: int, total: int) -> None:
        raise ReadError("no more")

    def fail_late(done: int, total: int) -> None:
        (tmp_path / "mine" / "new" / "notes.txt").write_text("mine")
        raise ReadError("no more")

    for on_progress, left in ((fail, []), (fail_late, ["new", "notes.txt"])):
        with pytest.raises(ReadError, match="no more"):
            convert(tmp_path / "a", tmp_path / "mine" / "new" / "newer" / "b", to, on_progress=on_progress)
        assert sorted(path.name for path in (tmp_path / "mine").rglob("*")) == left


def test_a_destination_that_is_a_link(tmp_path: Path) -> None:
    """If the destination is a link, the conversion writes its target, and the link stays."""
    make_checkpoint(tmp_path / "a", {"x": torch.ones(3)})
    (tmp_path / "disk").mkdir()
    (tmp_path / "b").symlink_to("disk")
    (tmp_path / "c").symlink_to("disk/new")
    for name in "bc":
        if name == "c":
            (tmp_path / "disk" / "model.safetensors").unlink()
        convert(tmp_path / "a", tmp_path / name, "safetensors")
        assert (tmp_path / name).is_symlink()
        assert same(tensors_of(tmp_path / name)["x"], torch.ones(3))
    assert (tmp_path / "disk" / "new" / "model.safetensors").exists()


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("leads_to", ["disk/new", "disk/made/new"])
def test_a_destination_that_is_a_link_to_nothing(tmp_path: Path, to: str, leads_to: str) -> None:
    """If the destination is a link to a missing path, the conversion makes that path, and the link stays."""
    make_checkpoint(tmp_path / "a", {"x": torch.arange(3.0)})
    (tmp_path / "disk").mkdir()
    (tmp_path / "b").symlink_to(leads_to)
    convert(tmp_path / "a", tmp_path / "b", to)
    assert (tmp_path / "b").readlink() == Path(leads_to)
    assert same(tensors_of(tmp_path / leads_to)["x"], torch.arange(3.0))
    with pytest.raises(ConversionError, match="b exists"):
        convert(tmp_path / "a", tmp_path / "b", to)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("name", ["x" * 255, "€" * 85, "😀" * 63], ids=["1", "3", "4"])
def test_the_longest_names(tmp_path: Path, to: str, name: str) -> None:
    """A result may have a name of 255 bytes, whatever the size of its characters: the temporary name also fits."""
    make_checkpoint(tmp_path / "a", {"x": torch.arange(3.0)})
    convert(tmp_path / "a", tmp_path / name, to)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", name]
    assert same(tensors_of(tmp_path / name)["x"], torch.arange(3.0))


def test_a_destination_that_is_a_mount_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount point, which cannot be replaced, is refused before anything is written."""
    make_checkpoint(tmp_path / "a", {"x": torch.ones(3)})
    (tmp_path / "b").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "b")
    with pytest.raises(ConversionError, match="is a mount point"):
        convert(tmp_path / "a", tmp_path / "b", "safetensors")
    assert list((tmp_path / "b").iterdir()) == []


@pytest.mark.parametrize("to", ["dcp_tensorizer", "safetensors", "dcp"])
def test_a_failure_leaves_what_others_put_there(tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a storage without renaming, a failed conversion removes its own files, and leaves those of other jobs."""
    make_checkpoint(tmp_path / "a", {"x": torch.ones(300), "y": filled(torch.float32, (300,))})
    (path,) = (tmp_path / "a").glob("*.tensors")
    path.write_bytes(path.read_bytes()[:-200])
    memory = fsspec.filesystem("memory")
    entered = StreamStorage.make_directory

    def in_background(storage: StreamStorage) -> None:
        entered(storage)
        memory.pipe_file("/converted/b/.metadata", b"of another job")
        memory.pipe_file("/converted/b/notes.txt", b"mine")

    monkeypatch.setattr(StreamStorage, "make_directory", in_background)
    try:
        with pytest.raises(ReadError):
            convert(tmp_path / "a", "memory://converted/b", to)
        assert sorted(memory.find("/converted")) == ["/converted/b/.metadata", "/converted/b/notes.txt"]
    finally:
        memory.rm("/converted", recursive=True)


def test_an_empty_directory_keeps_its_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion into an empty directory preserves its mode, and refuses to replace the working directory."""
    make_checkpoint(tmp_path / "a", {"w": torch.ones(3)})
    (tmp_path / "private").mkdir(mode=0o700)
    convert(tmp_path / "a", tmp_path / "private", "dcp")
    assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == 0o700
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ConversionError, match="here is the working directory and would be replaced"):
        convert(tmp_path / "a", ".", "dcp")
    assert list((tmp_path / "here").iterdir()) == []
