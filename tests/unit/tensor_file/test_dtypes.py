"""Tests of the bytes of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dcp_tensorizer import StagingError
from dcp_tensorizer._tensor_file.dtypes import check_supported, host_bytes, memories_of, memory_of

from ...lab.states import ALL_DTYPES, dtype_name, filled, raw


class Opaque(torch.Tensor):
    """A tensor without its own elements, as `torch.Tensor._make_wrapper_subclass` makes it."""

    @staticmethod
    def __new__(cls) -> Opaque:
        return torch.Tensor._make_wrapper_subclass(cls, torch.Size([2]))  # type: ignore[attr-defined,no-any-return]

    @classmethod
    def __torch_dispatch__(cls, *args: Any) -> Any:
        raise NotImplementedError


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of quantised dtypes and nested tensors
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: torch.eye(2).to_sparse(),
            "of layout torch.sparse_coo, which cannot be saved. Save the result of its to_dense()",
        ),
        (
            lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
            "that is nested (layout torch.strided), which cannot be saved. Save the result of its unbind()",
        ),
        (
            lambda: torch.ones(2, device="meta"),
            "on the meta device, which has no data to save. Give its module memory (to_empty) and values",
        ),
        (
            lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
            "of the quantised dtype torch.qint8, which cannot be saved. Save its int_repr(), its scale and "
            "its zero point",
        ),
        (
            lambda: torch.ones(2, dtype=torch.uint8).view(torch.uint4),
            "of dtype torch.uint4, which DCP cannot plan. Save the result of its view(torch.uint8)",
        ),
        (
            Opaque,
            "of type Opaque, which cannot be saved: it has neither a storage nor __tensor_flatten__. Give its class "
            "__tensor_flatten__ and __tensor_unflatten__",
        ),
    ],
)
def test_a_tensor_that_cannot_be_saved_is_named_with_what_to_do(make: Callable[[], torch.Tensor], message: str) -> None:
    """The error names the key, the reason, and what to save instead."""
    with pytest.raises(StagingError) as caught:
        check_supported("a.b", make())
    assert str(caught.value) == f"'a.b' is a tensor {message}, or leave the tensor out of the state dict."


def test_host_bytes_of_a_contiguous_tensor_are_its_memory() -> None:
    """Writing to the bytes changes the tensor."""
    tensor = torch.zeros(2, 3, dtype=torch.int16)
    data = host_bytes(tensor)
    assert (data.nbytes, data.itemsize) == (12, 1)
    data[0] = 7
    assert tensor[0, 0] == 7


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
def test_the_memory_of_a_tensor(dtype: torch.dtype) -> None:
    """Writing to the memory changes the tensor; a tensor without elements has empty memory."""
    tensor, content = torch.zeros(3, 4, dtype=torch.uint8), bytes(range(12))
    memory_of(tensor)[:] = content
    assert raw(tensor) == content
    other = filled(dtype, (3, 4))
    assert bytes(memory_of(other)) == raw(other)
    assert bytes(memory_of(other[1:2])) == raw(other[1:2])
    assert bytes(memory_of(other[:0])) == b""


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
def test_host_bytes_are_in_c_order(dtype: torch.dtype) -> None:
    """Every dtype works, with 0-dim, transposed and empty tensors."""
    tensor = filled(dtype, (40, 24))
    assert bytes(host_bytes(tensor)) == raw(tensor)
    assert bytes(host_bytes(tensor[1, 2])) == raw(tensor[1, 2])
    assert bytes(host_bytes(tensor[:0])) == b""
    in_columns = torch.frombuffer(bytearray(raw(tensor)), dtype=torch.uint8).view(40, 24, -1).transpose(0, 1)
    assert bytes(host_bytes(tensor.t())) == in_columns.contiguous().numpy().tobytes()


@pytest.mark.parametrize(
    ("size", "stride"),
    [
        ((), ()),
        ((1,), (7,)),
        ((2, 1), (1, 2)),
        ((1, 3), (50, 1)),
        ((3, 1, 1), (1, 9, 4)),
        ((0, 4), (1, 2)),
        ((1, 0), (5, 3)),
    ],
)
def test_host_bytes_where_a_dimension_has_one_element(size: tuple[int, ...], stride: tuple[int, ...]) -> None:
    """The dimension may have any stride: the tensor is contiguous, and its bytes are its memory."""
    memory = torch.arange(10, dtype=torch.float32)
    tensor = memory.as_strided(size, stride, 4)
    assert tensor.is_contiguous()
    data = host_bytes(tensor)
    assert bytes(data) == memory[4 : 4 + tensor.numel()].numpy().tobytes()
    data[:] = bytes(len(data))
    assert not tensor.any()


def test_the_memory_of_several_tensors() -> None:
    """Each tensor has its part in order, also tied and empty tensors, and an empty list."""
    first, second = filled(torch.float32, (3,)), filled(torch.int64, (2, 5))
    for tensors in ([first, second], [second, first[1:], first], [first[:0], second], []):
        assert list(map(bytes, memories_of(tensors))) == list(map(raw, tensors))
    memories_of([second, first])[1][:4] = raw(torch.tensor(7.0))
    assert first[0] == 7.0
