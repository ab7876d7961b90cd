"""Tests of the headers of safetensors files, which are read without torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dcp_tensorizer._formats.safetensors_header import encode_header
from dcp_tensorizer._formats.weight_files import StoredBytes, read_header


def reads(content: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, nbytes: content[offset : offset + nbytes]


def test_a_file_of_the_library_is_read(tmp_path: Path) -> None:
    """The tensors are in the order of their bytes, and encoding them again makes the same header."""
    tensors = {"b": torch.ones(3), "a": torch.ones(2, 2, dtype=torch.int64)}
    save_file(tensors, tmp_path / "file", metadata={"format": "pt"})
    content = (tmp_path / "file").read_bytes()
    header, read, notes = read_header(reads(content), len(content))
    base = len(header)
    assert header == content[:base]
    assert read == (StoredBytes("a", base, 32, "I64", (2, 2)), StoredBytes("b", base + 32, 12, "F32", (3,)))
    assert notes == {"format": "pt"}
    described = {
        t.key: {"dtype": t.dtype, "shape": t.shape, "data_offsets": (t.offset - base, t.offset + t.nbytes - base)}
        for t in read
    }
    assert encode_header({"__metadata__": notes, **described}) == header


@pytest.mark.parametrize(
    ("offsets", "nbytes", "message"),
    [
        ([0, 4], 5, "its tensors have 4 bytes, but 5 follow its header"),
        ([1, 5], 5, "'x' is at bytes 1 to 5, which is not a range that starts at 0"),
        ([4, 0], 4, "'x' is at bytes 4 to 0"),
    ],
)
def test_tensors_that_do_not_fill_the_file_are_refused(offsets: list[int], nbytes: int, message: str) -> None:
    """Gaps, overlaps and bytes behind the last tensor are errors."""
    content = encode_header({"x": {"dtype": "U8", "shape": [4], "data_offsets": offsets}}) + bytes(nbytes)
    with pytest.raises(ValueError, match=message):
        read_header(reads(content), len(content))


def test_a_header_that_is_longer_than_its_file_is_refused() -> None:
    """The length is checked before that many bytes are read."""
    content = encode_header({})
    with pytest.raises(ValueError, match="its header claims to have"):
        read_header(reads(content), len(content) - 1)
