"""Directories of safetensors files with an index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from dcp_tensorizer import ConversionError, MetadataError, ReadError
from dcp_tensorizer.tools import convert

from ....lab.checkpoints import make_checkpoint, tensors_of
from ....lab.seams import limit_safetensors_headers
from ....lab.states import filled, same

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def make_directory(path: Path, files: Mapping[str, Mapping[str, float]], index: Mapping[str, str]) -> Path:
    """Writes tensors of one value each, by file and key."""
    path.mkdir()
    for name, values in files.items():
        save_file({key: torch.full((2,), value) for key, value in values.items()}, path / name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return path


def test_a_tensor_that_the_index_names_is_missed(tmp_path: Path) -> None:
    """A file that lacks a tensor of the index is an error that names both."""
    index = {"a": FIRST, "b": SECOND, "lost": SECOND}
    directory = make_directory(tmp_path / "hf", {FIRST: {"a": 1.0}, SECOND: {"b": 2.0}}, index)
    with pytest.raises(MetadataError, match=f"{SECOND} lacks 'lost', which the index locates there"):
        convert(directory, tmp_path / "out", "torch")
    assert not (tmp_path / "out").exists()


def test_a_file_that_the_index_names_is_missed(tmp_path: Path) -> None:
    """A missing file of the index is an error that names it."""
    directory = make_directory(tmp_path / "hf", {FIRST: {"a": 1.0}}, {"a": FIRST, "b": SECOND})
    with pytest.raises(ReadError, match=SECOND):
        convert(directory, tmp_path / "out", "torch")


@pytest.mark.parametrize("right", [FIRST, SECOND])
def test_a_tensor_in_two_files_is_that_of_the_index(tmp_path: Path, right: str) -> None:
    """Of a tensor in two files, that of the index is read; tensors that the index lacks are read, too."""
    files = {FIRST: {"a": 1.0, "b": 1.0}, SECOND: {"b": 2.0, "c": 3.0, "more": 4.0}}
    directory = make_directory(tmp_path / "hf", files, {"a": FIRST, "b": right, "c": SECOND})
    found = {key: tensor.tolist() for key, tensor in tensors_of(directory).items()}
    b = files[right]["b"]
    assert found == {"a": [1.0, 1.0], "b": [b, b], "c": [3.0, 3.0], "more": [4.0, 4.0]}


def save_parts(folder: Path, parts: Mapping[str, tuple[torch.Tensor, list[int]]]) -> None:
    """Writes parts of one tensor by file name, as torch saves those of several ranks."""
    folder.mkdir()
    for name, (part, offsets) in parts.items():
        saved = json.dumps({"w": {"saved_offsets": offsets}})
        save_file({"w": part.contiguous()}, folder / name, {"DCP_SHARDING_INFO": saved, "DCP_VERSION": "1.0"})


def test_parts_of_several_ranks_are_put_together(tmp_path: Path) -> None:
    """Parts of a tensor in one directory are joined; one file alone, or a missing part, is an error."""
    whole = torch.arange(24.0).view(6, 4)
    names = [f"shard-{rank:05}-model-00001-of-00001.safetensors" for rank in (1, 2)]
    save_parts(tmp_path / "hf", {names[0]: (whole[:2], [0, 0]), names[1]: (whole[2:], [2, 0])})
    assert torch.equal(tensors_of(tmp_path / "hf")["w"], whole)
    for name in names:
        with pytest.raises(ConversionError, match=f"{name} has only one rank.s parts .* Name the directory"):
            convert(tmp_path / "hf" / name, tmp_path / "out", "torch")
    (tmp_path / "hf" / names[0]).unlink()
    with pytest.raises(MetadataError, match="chunks of 'w' do not make up its 24 elements"):
        convert(tmp_path / "hf", tmp_path / "out", "torch")
    assert not (tmp_path / "out").exists()


def test_parts_of_what_torch_itself_saves(tmp_path: Path) -> None:
    """Files of torch's HuggingFaceStorageWriter are read, as parts and as a whole model."""
    state = {"w": torch.arange(6.0), "n": torch.tensor(3)}
    for name, is_distributed in (("whole", False), ("parts", True)):
        writer = HuggingFaceStorageWriter(str(tmp_path / name), save_distributed=is_distributed)
        dcp.save(dict(state), storage_writer=writer, no_dist=True)
        found = tensors_of(next((tmp_path / name).glob("model-*")) if name == "whole" else tmp_path / name)
        assert {key: tensor.tolist() for key, tensor in found.items()} == {"w": state["w"].tolist(), "n": 3}


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float4_e2m1fn_x2], ids=str)
def test_dtypes_of_less_than_a_byte_and_of_scales(tmp_path: Path, dtype: torch.dtype) -> None:
    """The safetensors library and this package read each other's files of small dtypes."""
    weight = filled(dtype, (3, 6))
    save_file({"weight": weight}, tmp_path / "theirs.safetensors")
    assert same(tensors_of(tmp_path / "theirs.safetensors")["weight"], weight)
    make_checkpoint(tmp_path / "a", {"weight": weight})
    convert(tmp_path / "a", tmp_path / "ours.safetensors", "safetensors")
    with safe_open(tmp_path / "ours.safetensors", "pt") as stock:
        assert same(stock.get_tensor("weight"), weight)


def test_pairs_of_elements_need_a_dimension_to_be_counted_in(tmp_path: Path) -> None:
    """A scalar of packed pairs, and an odd number of packed elements, are refused by key."""
    make_checkpoint(tmp_path / "a", {"pair": filled(torch.float4_e2m1fn_x2, ())})
    with pytest.raises(ConversionError, match=r"'pair' is a 0-dimensional tensor of torch\.float4_e2m1fn_x2"):
        convert(tmp_path / "a", tmp_path / "b.safetensors", "safetensors")
    header = json.dumps({"odd": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "odd.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    with pytest.raises(MetadataError, match="'odd' of shape"):
        convert(tmp_path / "odd.safetensors", tmp_path / "b", "torch")
    assert not (tmp_path / "b").exists() and not (tmp_path / "b.safetensors").exists()


@pytest.mark.parametrize("name", ["out", "out.safetensors"])
def test_a_header_that_safetensors_would_refuse(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose header exceeds the limit of safetensors is refused before anything is written."""
    torch.save({"k" * 1000: torch.zeros(1)}, tmp_path / "in.pt")
    limit_safetensors_headers(monkeypatch, 1000)
    with pytest.raises(ConversionError, match=f"{name}: the header of a safetensors file with 1 tensors would have"):
        convert(tmp_path / "in.pt", tmp_path / name, "safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]
