"""Directories of safetensors files, whose index says in which file each tensor is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dcp_tensorizer import ConversionError, ReadError
from dcp_tensorizer.convert import convert

from ....checkpoints import make_checkpoint, tensors_of
from ....support import filled, same

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def make_directory(path: Path, files: Mapping[str, Mapping[str, float]], index: Mapping[str, str]) -> Path:
    """Tensors of one value each, by file and key."""
    path.mkdir()
    for name, values in files.items():
        save_file({key: torch.full((2,), value) for key, value in values.items()}, path / name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return path


def test_a_tensor_that_the_index_names_is_missed(tmp_path: Path) -> None:
    """Its file is there, and holds others: the error names both, and nothing is written."""
    index = {"a": FIRST, "b": SECOND, "lost": SECOND}
    directory = make_directory(tmp_path / "hf", {FIRST: {"a": 1.0}, SECOND: {"b": 2.0}}, index)
    with pytest.raises(ConversionError, match=f"{SECOND} lacks 'lost', which model.safetensors.index.json says"):
        convert(directory, tmp_path / "out", "torch")
    assert not (tmp_path / "out").exists()


def test_a_file_that_the_index_names_is_missed(tmp_path: Path) -> None:
    """The error names it."""
    directory = make_directory(tmp_path / "hf", {FIRST: {"a": 1.0}}, {"a": FIRST, "b": SECOND})
    with pytest.raises(ReadError, match=SECOND):
        convert(directory, tmp_path / "out", "torch")


@pytest.mark.parametrize("right", [FIRST, SECOND])
def test_a_tensor_in_two_files_is_that_of_the_index(tmp_path: Path, right: str) -> None:
    """Whatever the order of the files; a tensor that the index does not name is taken as well."""
    files = {FIRST: {"a": 1.0, "b": 1.0}, SECOND: {"b": 2.0, "c": 3.0, "more": 4.0}}
    directory = make_directory(tmp_path / "hf", files, {"a": FIRST, "b": right, "c": SECOND})
    found = {key: tensor.tolist() for key, tensor in tensors_of(directory).items()}
    b = files[right]["b"]
    assert found == {"a": [1.0, 1.0], "b": [b, b], "c": [3.0, 3.0], "more": [4.0, 4.0]}


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float4_e2m1fn_x2], ids=str)
def test_dtypes_of_less_than_a_byte_and_of_scales(tmp_path: Path, dtype: torch.dtype) -> None:
    """The library reads what is written here, and what it writes is read: shape and bytes."""
    weight = filled(dtype, (3, 6))
    save_file({"weight": weight}, tmp_path / "theirs.safetensors")
    assert same(tensors_of(tmp_path / "theirs.safetensors")["weight"], weight)
    make_checkpoint(tmp_path / "a", {"weight": weight})
    convert(tmp_path / "a", tmp_path / "ours.safetensors", "safetensors")
    with safe_open(tmp_path / "ours.safetensors", "pt") as stock:
        assert same(stock.get_tensor("weight"), weight)


def test_pairs_of_elements_need_a_dimension_to_be_counted_in(tmp_path: Path) -> None:
    """A scalar pair is not written, and an odd number of elements is not read: the error names the key."""
    make_checkpoint(tmp_path / "a", {"pair": filled(torch.float4_e2m1fn_x2, ())})
    with pytest.raises(ConversionError, match="'pair' is a pair of elements without a dimension"):
        convert(tmp_path / "a", tmp_path / "b.safetensors", "safetensors")
    header = json.dumps({"odd": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "odd.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    with pytest.raises(ConversionError, match="'odd' of shape"):
        convert(tmp_path / "odd.safetensors", tmp_path / "b", "torch")
    assert not (tmp_path / "b").exists() and not (tmp_path / "b.safetensors").exists()
