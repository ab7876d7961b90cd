"""The bytes of tensors."""

from __future__ import annotations

import pytest
import torch

from dcp_tensorizer._memory.tensor_bytes import host_bytes

from ...support import ALL_DTYPES, dtype_name, filled, raw


def test_host_bytes_of_a_contiguous_tensor_are_its_memory() -> None:
    """No copy is made: what is written to the bytes shows in the tensor."""
    tensor = torch.zeros(2, 3, dtype=torch.int16)
    data = host_bytes(tensor)
    assert (data.nbytes, data.itemsize) == (12, 1)
    data[0] = 7
    assert tensor[0, 0] == 7


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
def test_host_bytes_are_in_c_order(dtype: torch.dtype) -> None:
    """For every dtype, of 0-dim, transposed and empty tensors."""
    tensor = filled(dtype, (3, 4))
    assert bytes(host_bytes(tensor)) == raw(tensor)
    assert bytes(host_bytes(tensor[1, 2])) == raw(tensor[1, 2])
    assert bytes(host_bytes(tensor[:0])) == b""
    if dtype.itemsize > 1 or dtype in (torch.uint8, torch.bool, torch.float8_e4m3fn):
        assert bytes(host_bytes(tensor.t())) == raw(tensor.t())


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
    """Its stride may be any, as after a transpose: the tensor is contiguous, and its bytes are its memory."""
    memory = torch.arange(10, dtype=torch.float32)
    tensor = memory.as_strided(size, stride, 4)
    assert tensor.is_contiguous()
    data = host_bytes(tensor)
    assert bytes(data) == memory[4 : 4 + tensor.numel()].numpy().tobytes()
    data[:] = bytes(len(data))
    assert not tensor.any()
