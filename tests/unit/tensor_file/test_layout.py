"""Tests of layouts against stock tensorizer's; `test_encode` compares whole files."""

from __future__ import annotations

import io
import struct

import pytest
import torch
from tensorizer import TensorSerializer

from dcp_tensorizer._tensor_file.layout import lay_out
from dcp_tensorizer._writer_process.protocol import TensorSource


def test_dimensions_of_over_32_bits_are_laid_out_as_tensorizer_does() -> None:
    """The index is versioned, for an expanded tensor of 4 GiB that takes no memory."""
    huge = torch.zeros(1, dtype=torch.uint8).expand(1 << 32)
    tensors = {"before": torch.zeros(2, 3), "bfloat": torch.zeros(3, dtype=torch.bfloat16)}
    serializer = TensorSerializer(io.BytesIO())
    serializer.write_state_dict(tensors)
    header = serializer._file_header
    described = [
        TensorSource("before", "float32", (2, 3), 24),
        TensorSource("huge", "uint8", tuple(huge.shape), huge.numel()),
    ]
    layout = lay_out(described)
    assert [entry.tensor for entry in layout.entries] == described
    assert header.version_number == 2
    serializer.close()
    index = layout.head[5 + struct.calcsize("<I32sQ8xQQ") :]
    assert struct.unpack_from("<I32s", layout.head, 5) == (5, b"\2".ljust(32, b"\0"))
    assert struct.unpack_from("<IH", index) == (1, 6)
    second = 4 + 2 + 6 + 1 + 1 + 3 + 1 + 8 + 24
    assert struct.unpack_from("<IH4s", index, second) == (5, 4, b"huge")
    assert struct.unpack_from("<BQ", index, second + 4 + 2 + 4 + 1 + 1 + 3) == (1, 1 << 32)
    assert layout.nbytes == layout.entries[1].offset + (1 << 32) + 8


def test_too_many_names_are_refused() -> None:
    """An index that exceeds its capacity is an error, not a damaged file."""
    with pytest.raises(ValueError, match="3,000 tensors"):
        lay_out([TensorSource(f"{'x' * 80}{number}", "uint8", (1,), 1) for number in range(3000)])
