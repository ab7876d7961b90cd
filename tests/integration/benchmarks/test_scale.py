"""Simulated worlds: what they leave is what DCP would have made, and loads of it are measured up to the first byte."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader

from benchmarks.scale.model import Model
from benchmarks.scale.world import describe, targets
from dcp_tensorizer import TensorizerStorageReader

from ... import warm

ROOT = Path(__file__).resolve().parents[3]
RANKS = 3
READERS = {
    "dcp_tensorizer, its planners": TensorizerStorageReader,
    "torch": FileSystemReader,
}


@pytest.fixture(autouse=True)
def no_process_group() -> Iterator[None]:
    """Targets belong to one that only pretends; it goes with the test."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def _run(**case: Any) -> dict[str, Any]:
    command = [warm.python(), "-m", "benchmarks.case", "benchmarks.scale.world_case:measure", json.dumps(case)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (measured,) = json.loads(done.stdout)
    return measured


def test_the_metadata_is_what_dcps_planner_makes():
    """Keys, shapes, chunks in their order and paths, of the same tensors on as many ranks."""
    model = Model(1)
    plans = []
    for rank in range(RANKS):
        planner = DefaultSavePlanner()
        planner.set_up_planner(targets(rank, RANKS, model), is_coordinator=rank == 0)
        plans.append(planner.create_local_plan())
    _, planned = planner.create_global_plan(plans)
    described = describe(model, RANKS)
    for path in model.objects():
        del described.state_dict_metadata[".".join(path)]
        del described.planner_data[".".join(path)]
    assert described.state_dict_metadata == planned.state_dict_metadata
    assert described.planner_data == planned.planner_data


@pytest.mark.parametrize("contender", READERS)
def test_a_world_is_saved_and_loaded(contender, tmp_path):
    """A save twice, then a load that ends at the first data file, having read metadata alone."""
    case = {"contender": contender, "size": RANKS, "layers": 1, "place": str(tmp_path)}
    saved = _run(**case, step="save")
    assert saved.keys() == {"first", "repeat"}
    for figures in saved.values():
        assert figures.keys() == {"coordinator", "rank", "sent", "broadcast"}
        assert all(value > 0 for value in figures.values())
    metadata = READERS[contender](tmp_path / "whole").read_metadata()
    assert len(metadata.state_dict_metadata) == 3 * 12 + 12 + 11
    loaded = _run(**case, step="load")
    assert loaded.keys() == {"seconds", "read", "memory", "opened"}
    assert loaded["seconds"] > 0
    assert loaded["opened"] >= 1
    assert 0 < loaded["read"] < (tmp_path / "whole" / ".metadata").stat().st_size + 20_000
