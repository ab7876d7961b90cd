"""The effects of saves on the trainer's garbage collector."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from dcp_tensorizer import SavePlanner, TensorizerStorageWriter

# Under torch 2.11 the stock planner makes so many objects that it brings one by itself.
PLANNERS = [SavePlanner] if torch.__version__.startswith("2.11.") else [SavePlanner, DefaultSavePlanner]


@pytest.mark.parametrize("planner", PLANNERS)
def test_saves_bring_no_full_collection(planner: type[DefaultSavePlanner], tmp_path: Path) -> None:
    """Saves of 5,000 tensors cause no full collection, which would visit all of torch's objects."""
    state = {f"layers.{number}.weight": torch.ones(2) for number in range(5000)}
    full = []

    def note(phase: str, info: dict[str, int]) -> None:
        full.extend([info] if phase == "start" and info["generation"] == 2 else [])

    options = {"planner": planner(), "no_dist": True}
    with TensorizerStorageWriter(tmp_path) as writer:
        dcp.async_save(state, storage_writer=writer, **options).result()
        gc.collect()
        gc.callbacks.append(note)
        try:
            for _ in range(3):
                dcp.async_save(state, storage_writer=writer, **options).result()
        finally:
            gc.callbacks.remove(note)
    assert full == []


def test_saves_leave_the_collector_as_it_was(tmp_path: Path) -> None:
    """After saves, the collector is enabled or disabled as before, with the trainer's thresholds."""
    before = gc.get_threshold()
    gc.set_threshold(900, 11, 12)
    gc.disable()
    try:
        with TensorizerStorageWriter(tmp_path) as writer:
            dcp.async_save({"a": torch.ones(2)}, storage_writer=writer, no_dist=True).result()
            assert (gc.isenabled(), gc.get_threshold()) == (False, (900, 11, 12))
            gc.enable()
            dcp.async_save({"a": torch.ones(2)}, storage_writer=writer, no_dist=True).result()
        assert (gc.isenabled(), gc.get_threshold()) == (True, (900, 11, 12))
    finally:
        gc.enable()
        gc.set_threshold(*before)
