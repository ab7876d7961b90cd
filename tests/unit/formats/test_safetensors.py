"""Tests of the layout of safetensors files against the library's own."""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save

from dcp_tensorizer._formats.safetensors import NAMES, PAIRS, fault_of, file_names, in_torch, index_of, lay_out, shards

from ...lab.states import dtype_name, filled, raw


class Tensor(NamedTuple):
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def described(tensors: dict[str, torch.Tensor]) -> list[Tensor]:
    return [Tensor(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()]


def test_a_file_is_what_the_library_makes_of_the_tensors() -> None:
    """Files are equal byte for byte, for all dtypes, pairs, empty tensors and odd names."""
    tensors = {f"{dtype_name(dtype)}.{n}": filled(dtype, (3 - n, 2)) for dtype in NAMES for n in (0, 1)}
    tensors |= {
        key: torch.ones(n) for n, key in enumerate(['a"b\\c', "e/\N{SNOWMAN}\n\x01\x7f", "", "\U0001f600", "~"])
    }
    tensors |= {"scalar": torch.tensor(3), "none": torch.empty(0, 4)}
    layout = lay_out(described(tensors))
    content = layout.header + b"".join(raw(tensors[tensor.key]) for tensor in layout.tensors)
    assert content == save(tensors, metadata={"format": "pt"})
    assert layout.nbytes == len(content)
    assert [start - len(layout.header) for start in layout.starts][:2] == [0, 48]
    assert all(start % tensor.dtype.itemsize == 0 for start, tensor in zip(layout.starts, layout.tensors, strict=True))


def test_files_are_filled_in_order() -> None:
    """A tensor that is larger than a file gets its own file."""
    sizes = {"a": 10, "b": 30, "c": 10, "d": 10, "e": 10}
    tensors = described({key: torch.empty(n, dtype=torch.uint8) for key, n in sizes.items()})
    found = [[tensor.key for tensor in file] for file in shards(tensors, 20)]
    assert found == [["a"], ["b"], ["c", "d"], ["e"]]
    assert file_names(2) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert file_names(1, "f" * 32) == [f"model-{'f' * 32}-00001-of-00001.safetensors"]


def test_the_index_names_the_file_of_each_tensor() -> None:
    """The index also has the total numbers of parameters and bytes."""
    tensors = described({"a": torch.empty(3), "b": torch.empty(2, 2, dtype=torch.bfloat16)})
    assert json.loads(index_of({"one": tensors[:1], "two": tensors[1:]})) == {
        "metadata": {"total_parameters": 7, "total_size": 20},
        "weight_map": {"a": "one", "b": "two"},
    }


@pytest.mark.parametrize(
    ("key", "dtype", "shape", "fault"),
    [
        ("a", torch.complex128, (1,), "is of torch.complex128, which safetensors does not have"),
        ("a", PAIRS, (), "is a 0-dimensional tensor of torch.float4_e2m1fn_x2"),
        ("__metadata__", torch.float32, (), "cannot be a key in safetensors"),
        ("\ud800", torch.float32, (), "it is not valid Unicode"),
        (7, torch.float32, (), "is a key of type int"),
        ("a", torch.float32, (0,), None),
    ],
)
def test_what_the_format_cannot_hold(
    key: object, dtype: torch.dtype, shape: tuple[int, ...], fault: str | None
) -> None:
    """The fault names the reason, and what to do."""
    found = fault_of(key, dtype, shape)
    assert found == fault if fault is None else fault in str(found)


def test_a_described_tensor_has_its_dtype_and_shape_in_torch() -> None:
    """Two elements of four bits count as one in torch's shapes; dtypes and shapes that torch lacks are errors."""
    assert in_torch("BF16", (2, 3)) == (torch.bfloat16, (2, 3))
    assert in_torch("F4", (2, 6)) == (torch.float4_e2m1fn_x2, (2, 3))
    with pytest.raises(ValueError, match="is of dtype F6, which torch does not have"):
        in_torch("F6", (2,))
    for shape in ((), (3,)):
        with pytest.raises(ValueError, match="and dtype F4 must have an even last dimension"):
            in_torch("F4", shape)
