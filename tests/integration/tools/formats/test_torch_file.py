"""``torch.save`` files: views, objects and archives, as torch reads and writes them."""

from __future__ import annotations

import dataclasses
import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils.serialization import config

from dcp_tensorizer import ConversionError, TensorizerStorageWriter, WriteError
from dcp_tensorizer.tools import ConvertOptions, convert
from dcp_tensorizer.tools._formats import torch_file
from dcp_tensorizer.tools._formats.registry import open_checkpoint
from dcp_tensorizer.tools._view import CheckpointView

from ....lab.checkpoints import make_checkpoint, tensors_of
from ....lab.states import ALL_DTYPES, filled, same


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(3.0).expand(4, 3),
        torch.arange(12.0).view(3, 4)[1:, 1::2],
        torch.arange(100.0)[7:9],
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        nn.Parameter(torch.ones(2, 3)),
        torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    ],
    ids=["transposed", "expanded", "strided", "part", "conjugated", "negated", "parameter", "channels last"],
)
def test_views_that_torch_saved(tmp_path: Path, tensor: torch.Tensor) -> None:
    """Views, whose strides and lazy bits torch.save stores, become contiguous tensors."""
    torch.save({"x": tensor}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b", "dcp_tensorizer")
    expected = tensor.detach().clone().resolve_conj().resolve_neg()
    found = tensors_of(tmp_path / "b")["x"]
    assert torch.equal(found, expected)
    assert found.is_contiguous()


def test_objects_that_hold_tensors_do_not_become_a_torch_file(tmp_path: Path) -> None:
    """An object with tensors in it is refused by key, because its elements would be lost."""
    pair = {"x": torch.ones(3), "pair": (1, [torch.ones(2)]), "plain": (1, 2)}
    with TensorizerStorageWriter(tmp_path / "a") as writer:
        dcp.save(pair, storage_writer=writer)
    with pytest.raises(ConversionError, match=r"'pair' .*is a tuple with tensors in it.*Leave it out"):
        convert(tmp_path / "a", tmp_path / "b", "torch")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    convert(tmp_path / "a", tmp_path / "b", "torch", options=ConvertOptions(include=("x", "plain")))
    assert torch.load(tmp_path / "b")["plain"] == (1, 2)


def test_a_torch_file_that_holds_no_state_dict(tmp_path: Path) -> None:
    """A file without a state dict is refused with the type that it holds."""
    stream = io.BytesIO()
    torch.save([1, 2], stream)
    (tmp_path / "a.pt").write_bytes(stream.getvalue())
    with pytest.raises(ConversionError, match="list"):
        convert(tmp_path / "a.pt", tmp_path / "b", "dcp_tensorizer")


def test_torch_files_have_right_checksums(tmp_path: Path) -> None:
    """A written archive has correct CRC-32s and no path, and is the same each time."""
    state = {"x": filled(torch.float32, (50, 30)), "y": filled(torch.int64, (7,)), "none": torch.empty(0)}
    make_checkpoint(tmp_path / "a", state, {"n": 5})
    for name in ("b.pt", "c.pt"):
        convert(tmp_path / "a", tmp_path / name, "torch")
    with zipfile.ZipFile(tmp_path / "b.pt") as archive:
        assert archive.testzip() is None
        assert {name.split("/")[0] for name in archive.namelist()} == {"archive"}
    assert (tmp_path / "b.pt").read_bytes() == (tmp_path / "c.pt").read_bytes()


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("calculated", [False, True], ids=["", "offsets calculated"])
def test_torch_loads_what_was_converted(tmp_path: Path, mmap: bool, calculated: bool) -> None:
    """torch loads a written file, also mapped, with each tensor at a multiple of 64 bytes."""
    state = {f"t{n}": filled(dtype, (n + 1, 7), n) for n, dtype in enumerate(ALL_DTYPES)}
    make_checkpoint(tmp_path / "a", state, {"n": {"m": [5]}})
    convert(tmp_path / "a", tmp_path / "b.pt", "torch")
    with config.patch("load.calculate_storage_offsets", calculated):
        loaded = torch.load(tmp_path / "b.pt", weights_only=True, mmap=mmap)
    assert loaded.pop("n") == {"m": [5]}
    assert all(same(loaded[key], tensor) for key, tensor in state.items())
    assert {tensor.data_ptr() % 64 for tensor in loaded.values()} == {0}


def test_an_interrupted_archive_is_not_written_on(tmp_path: Path) -> None:
    """If a write fails, whichever it is, its error is raised, and the archive is not written on."""
    make_checkpoint(tmp_path / "a", {"x": filled(torch.float32, (50,))}, {"n": 5})
    convert(tmp_path / "a", tmp_path / "b.pt", "torch")
    with zipfile.ZipFile(tmp_path / "b.pt") as archive:
        records: dict[str, Any] = {name: archive.read(name) for name in archive.namelist()}
    records |= {"archive/data/0": open_checkpoint(tmp_path / "a", {}).tensors["x"]}
    whole: list[int] = []
    torch_file._write_archive(records, torch_file._Output(lambda piece: whole.append(piece.nbytes)), 64)
    assert len(whole) > 20
    for number in range(len(whole)):
        written: list[int] = []

        def interrupted(piece: memoryview, number: int = number, written: list[int] = written) -> None:
            written.append(piece.nbytes)
            assert len(written) <= number + 1
            if len(written) > number:
                raise KeyboardInterrupt(f"write {number}")

        with pytest.raises(KeyboardInterrupt, match=f"^write {number}$"):
            torch_file._write_archive(records, torch_file._Output(interrupted), 64)
        assert written == whole[: number + 1]


def test_the_size_of_a_file_is_known_before_it_is_written(tmp_path: Path) -> None:
    """`archive_size` is exact below and beyond 4 GiB, and reads no tensor."""
    make_checkpoint(tmp_path / "a", {"x": filled(torch.uint8, (1000,))})
    convert(tmp_path / "a", tmp_path / "b.pt", "torch")
    small = open_checkpoint(tmp_path / "a", {}).tensors["x"]
    large = dataclasses.replace(small, shape=(5 << 30,))
    sizes = [torch_file.archive_size({"archive/data/0": tensor}) for tensor in (small, large)]
    in_directory = 4 + 2 * 8  # an extra field with both sizes
    assert sizes[1] - sizes[0] == (5 << 30) - 1000 + in_directory + 56 + 20  # and a directory's end of its own
    contents = CheckpointView("a", "dcp_tensorizer", {"x": small})
    torch_file.write(contents, str(tmp_path / "c.pt"), {}, ConvertOptions(), block_bytes=7)
    assert (tmp_path / "c.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()


def test_a_full_temporary_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the temporary directory is full, the error names it."""
    make_checkpoint(tmp_path / "a", {"w": torch.ones(2)})

    def full(*arguments: object) -> None:
        raise RuntimeError("[enforce fail] unexpected pos 64 vs 0")

    monkeypatch.setattr(torch_file.torch, "save", full)
    with pytest.raises(WriteError, match=r"cannot write the temporary archive, which .*\. Set TMPDIR"):
        convert(tmp_path / "a", tmp_path / "out", "torch")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
