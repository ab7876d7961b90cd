"""What stands for torch's own, and has to agree with it."""

from __future__ import annotations

import pytest
import torch

from dcp_tensorizer._runtime.torch_compat import is_plain, negated_view

COMPLEX = torch.arange(6).to(torch.complex64).view(2, 3)
REAL = torch.arange(6.0).view(2, 3)


@pytest.mark.parametrize(
    "tensor",
    [
        REAL,
        torch.nn.Parameter(REAL),
        REAL.T,
        REAL[:, 1:],
        REAL[1:],
        negated_view(REAL),
        COMPLEX,
        COMPLEX.conj(),
        COMPLEX.conj().imag,
        COMPLEX.real,
        torch.empty(0),
        torch.empty(2, 3, device="meta"),
    ],
)
def test_plain_is_what_torch_says_of_a_tensors_memory(tensor: torch.Tensor) -> None:
    """Its values in C order, neither conjugated nor negated when they are read."""
    assert is_plain(tensor) == (tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg())
