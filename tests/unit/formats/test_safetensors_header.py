"""Headers of safetensors files, read without torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dcp_tensorizer._formats.safetensors_header import encode_header, read_header


def reads(content: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, nbytes: content[offset : offset + nbytes]


def test_a_file_of_the_library_is_read(tmp_path: Path) -> None:
    """Tensors in the order of their bytes, and the notes; the same header is made of them again."""
    tensors = {"b": torch.ones(3), "a": torch.ones(2, 2, dtype=torch.int64)}
    save_file(tensors, tmp_path / "file", metadata={"format": "pt"})
    content = (tmp_path / "file").read_bytes()
    header = read_header(reads(content), len(content))
    assert {key: (record.dtype, record.shape, record.data_offsets) for key, record in header.tensors.items()} == {
        "a": ("I64", (2, 2), (0, 32)),
        "b": ("F32", (3,), (32, 44)),
    }
    assert (list(header.tensors), header.notes) == (["a", "b"], {"format": "pt"})
    described = {
        key: {"dtype": record.dtype, "shape": record.shape, "data_offsets": record.data_offsets}
        for key, record in header.tensors.items()
    }
    assert encode_header({"__metadata__": header.notes, **described}) == header.content


@pytest.mark.parametrize(
    ("offsets", "nbytes", "message"),
    [
        ([0, 4], 5, "its tensors have 4 bytes, and 5 follow its header"),
        ([1, 5], 5, "'x' is at bytes 1 to 5, and the tensor before it ends at 0"),
        ([4, 0], 4, "'x' is at bytes 4 to 0"),
    ],
)
def test_tensors_that_do_not_fill_the_file_are_refused(offsets: list[int], nbytes: int, message: str) -> None:
    """Gaps, overlaps and bytes behind the last tensor."""
    content = encode_header({"x": {"dtype": "U8", "shape": [4], "data_offsets": offsets}}) + bytes(nbytes)
    with pytest.raises(ValueError, match=message):
        read_header(reads(content), len(content))


def test_a_header_that_is_longer_than_its_file_is_refused() -> None:
    """Before anything of that length is read."""
    content = encode_header({})
    with pytest.raises(ValueError, match="its header claims to have"):
        read_header(reads(content), len(content) - 1)
