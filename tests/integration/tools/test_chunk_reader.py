"""Regions of tensors whose elements are not stored in C order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dcp_tensorizer._storage.local import LocalStorage
from dcp_tensorizer._tools.chunk_reader import STRIDED
from dcp_tensorizer._tools.formats import safetensors
from dcp_tensorizer._tools.formats.registry import open_checkpoint
from dcp_tensorizer.convert import Options

from ...checkpoints import tensors_of
from ...support import filled, same


def test_views_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many blocks there are of a tensor whose elements are not stored in order; then it is dropped."""
    tensor = filled(torch.int32, (100, 100)).t()
    torch.save({"x": tensor, "y": torch.ones(2, 3).t()}, tmp_path / "a.pt")
    view = open_checkpoint(tmp_path / "a.pt", {})
    reads = []
    open_file = LocalStorage.open
    monkeypatch.setattr(LocalStorage, "open", lambda *file: [reads.append(1), open_file(*file)][1])
    safetensors.write(view, str(tmp_path / "b.safetensors"), {}, Options(), block_bytes=1000)
    assert len(reads) == 2
    assert STRIDED.is_empty
    assert same(tensors_of(tmp_path / "b.safetensors")["x"], tensor.contiguous())
