"""Directories of safetensors files, whose index says in which file each tensor is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dcp_tensorizer import ConversionError, ReadError
from dcp_tensorizer.convert import convert

from ....checkpoints import tensors_of

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
