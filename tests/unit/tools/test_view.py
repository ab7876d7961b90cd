"""Blocks of a tensor are runs of its elements in C order."""

from __future__ import annotations

import pytest
import torch

from dcp_tensorizer._tensor_file.regions import Region
from dcp_tensorizer.tools._view import StoredTensor, blocks_of

from ...lab.states import filled, same


@pytest.mark.parametrize("nbytes", [1, 14, 20, 40, 64, 1000])
def test_blocks_make_up_a_tensor(nbytes: int) -> None:
    """Blocks of any size make up the whole tensor."""
    tensor = filled(torch.int16, (3, 4, 5))

    def read(region: Region) -> torch.Tensor:
        return tensor[tuple(slice(a, a + n) for a, n in zip(region.start, region.size, strict=True))]

    stored = StoredTensor("x", ("x",), tensor.dtype, (3, 4, 5), read)
    blocks = [stored.read(region).reshape(-1) for region in blocks_of(stored, nbytes)]
    assert max(block.nbytes for block in blocks) <= max(nbytes, 2)
    assert same(torch.cat(blocks).view(3, 4, 5), tensor)
