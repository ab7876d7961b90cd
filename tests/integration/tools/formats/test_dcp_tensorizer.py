"""Conversions to this package's own format."""

from __future__ import annotations

from pathlib import Path

import torch

from dcp_tensorizer.tools import collect, convert, list_checkpoints

from ....lab.checkpoints import make_checkpoint, tensors_of
from ....lab.states import same


def test_a_conversion_in_progress_is_not_collected(tmp_path: Path) -> None:
    """`collect` removes nothing of a conversion in progress, whose directory is locked."""
    make_checkpoint(tmp_path / "a", {"x": torch.ones(3), "y": torch.ones(3)})
    kept = []

    def collect_all(done: int, total: int) -> None:
        if done == total:  # the file was created before it: so there is something to collect
            kept.extend(removed.kept for removed in collect(tmp_path))

    convert(tmp_path / "a", tmp_path / "b", "dcp_tensorizer", on_progress=collect_all)
    assert kept == ["the directory is in use, for example by a save in progress"]
    assert same(tensors_of(tmp_path / "b")["x"], torch.ones(3))
    assert list_checkpoints(tmp_path / "b")[0].state == "committed"
