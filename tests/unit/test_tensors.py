"""The bytes of tensors, and what it takes to load objects."""

from __future__ import annotations

import io
import re

import pytest
import torch

from dcp_tensorizer._format.objects import unsafe_globals
from dcp_tensorizer._memory.tensor_bytes import host_bytes

from .support import ALL_DTYPES, dtype_name, filled, raw


class Foreign:
    pass


def saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@pytest.mark.parametrize("value", [{"a": [1, 2.5, None, "x"]}, torch.ones(3), (True, b"b"), 3 + 4j], ids=repr)
def test_plain_objects_need_nothing(value: object) -> None:
    """What the weights-only loader takes has no unsafe globals."""
    assert unsafe_globals(saved(value)) == ()


def test_what_an_object_needs_is_named() -> None:
    """Each global once, with its module."""
    content = saved([Foreign(), Foreign(), re.compile("x")])
    assert unsafe_globals(content) == ("re._compile", f"{__name__}.Foreign")


@pytest.mark.parametrize("content", [b"", b"garbage", saved([1])[:-30]], ids=["empty", "garbage", "truncated"])
def test_an_object_that_cannot_be_parsed_is_not_trusted(content: bytes) -> None:
    """Not being able to tell is no permission."""
    assert unsafe_globals(content) == ("an object that the weights-only loader cannot parse",)


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
