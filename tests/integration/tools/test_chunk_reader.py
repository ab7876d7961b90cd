"""Tensors whose elements are not stored in C order."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dcp_tensorizer._storage.local import LocalStorage
from dcp_tensorizer.tools import ConvertOptions, _view
from dcp_tensorizer.tools._formats import safetensors, torch_file
from dcp_tensorizer.tools._formats.registry import open_checkpoint

from ...lab.checkpoints import tensors_of
from ...lab.states import filled, same


def test_views_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that is not stored in C order is read once for all of its blocks, and then freed."""
    tensor = filled(torch.int32, (100, 100)).t()
    torch.save({"x": tensor, "y": torch.ones(2, 3).t()}, tmp_path / "a.pt")
    view = open_checkpoint(tmp_path / "a.pt", {})
    reads = []
    open_file = LocalStorage.open
    monkeypatch.setattr(LocalStorage, "open", lambda *file: [reads.append(1), open_file(*file)][1])
    safetensors.write(view, str(tmp_path / "b.safetensors"), {}, ConvertOptions(), block_bytes=1000)
    assert len(reads) == 2
    assert torch_file.LAST_STRIDED == []
    assert same(tensors_of(tmp_path / "b.safetensors")["x"], tensor.contiguous())


@pytest.mark.parametrize(
    "view",
    [
        lambda base: base[:, :3],
        lambda base: base[::50, ::7],
        lambda base: base[3:, 5:9].t(),
        lambda base: base.view(100, 10, 10).permute(2, 0, 1)[1:3, :, ::4],
        lambda base: base[::33, :1].expand(-1, 4),
        lambda base: base[:, 0],
    ],
    ids=["columns", "steps", "transposed", "permuted", "expanded", "one column"],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_what_lies_between_elements_does_not_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, view: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    """A view of a matrix takes its own memory and that of one read, and is equal in every bit."""
    monkeypatch.setattr(torch_file, "_RUN", 1000)
    tensor = view(filled(dtype, (100, 100)))
    torch.save({"x": tensor}, tmp_path / "a.pt")
    asked: list[int] = []
    empty = _view.empty

    def counted(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        asked.append(math.prod(size) * dtype.itemsize)
        return empty(size, dtype)

    for module in (_view, torch_file):
        monkeypatch.setattr(module, "empty", counted)
    assert same(tensors_of(tmp_path / "a.pt")["x"], tensor.contiguous())
    assert max(asked) <= max(1000, tensor.nbytes)
