"""Writes the checkpoints of the corpus by the release that runs: ``python -m tests.corpus.write tests/corpus/0.1``.

Each release whose files later ones must read has a folder that was written once, by that release, and never again.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tensorizer import DecryptionParams, EncryptionParams
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from dcp_tensorizer import (
    CheckpointManager,
    SafetensorsStorageWriter,
    SavePlanner,
    TensorizerStorageReader,
    TensorizerStorageWriter,
    open_reader,
    publish,
)

from ..lab.ranks import Rank, run_ranks
from .contents import CHECKPOINTS, KEY, MODELS, digest, digests_of, filled, plain_state


def write(folder: Path) -> None:
    """Writes one checkpoint of each kind, and ``digests.json``: what a load of each must give."""
    folder.mkdir(parents=True)
    _save(folder / "plain", plain_state())
    _save(folder / "sha256", {"w": filled("w", 33, 99), "step": 3}, sha256=True)
    _save(folder / "encrypted", {"w": filled("w", 33, 99), "step": 3}, encryption=EncryptionParams(key=KEY))
    for ranks in (2, 3, 4):
        run_ranks(ranks, _sharded, folder / f"sharded-{ranks}", False)
    run_ranks(2, _sharded, folder / "planned-2", True)
    run_ranks(2, _per_rank, folder / "per-rank")
    run_ranks(2, _model, folder / "model-sharded")
    _reused(folder / "reused")
    with (
        tempfile.TemporaryDirectory() as local,
        CheckpointManager(folder / "tiered", local=local, stop_signals=()) as manager,
    ):
        manager.save(1, {"w": filled("tiered", 30, 40)}, wait=True)
    _manager(folder / "manager")
    with SafetensorsStorageWriter(folder / "model", dtype=torch.bfloat16, rename={"model.*": "*"}) as writer:
        dcp.async_save(
            {"model.w": filled("finite", 40, 8).nan_to_num(0.0, 0.0, 0.0), "model.b": torch.arange(5.0)},
            storage_writer=writer,
            no_dist=True,
        ).result()
    _versions(folder / "versions")
    found: dict[str, Any] = {
        name: digests_of(TensorizerStorageReader(folder / name))
        for name in CHECKPOINTS
        if name not in ("encrypted", "per-rank")
    }
    key = DecryptionParams.from_key(KEY)
    found["encrypted"] = digests_of(TensorizerStorageReader(folder / "encrypted", encryption=key))
    found["per-rank"] = {str(rank): digest(filled(f"rank {rank}", 6)) for rank in range(2)}
    found |= {name: digests_of(open_reader(folder / name)) for name in MODELS}
    found["versions"] = {str(number): digest(_version(number)) for number in (1, 2, 3)}
    for ranks in (2, 3, 4):
        assert found[f"sharded-{ranks}"]["columns"] == digest(filled("columns", 5, 9))
    assert found["plain"]["large"] == digest(filled("large", 97, 41))
    (folder / "digests.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def _save(path: Path, state: dict[str, Any], **options: Any) -> None:
    with TensorizerStorageWriter(path, **options) as writer:
        dcp.async_save(state, storage_writer=writer, no_dist=True).result()


def _sharded(rank: Rank, path: Path, planned: bool) -> None:
    mesh = init_device_mesh("cpu", (rank.world_size,))

    def shard(name: str, placement: Shard | Replicate, *shape: int, dtype: torch.dtype = torch.float32) -> DTensor:
        return distribute_tensor(filled(name, *shape, dtype=dtype), mesh, [placement])

    state = {
        "rows": shard("rows", Shard(0), 10, 6),
        "columns": shard("columns", Shard(1), 5, 9),
        "few": shard("few", Shard(0), 1, 4, dtype=torch.bfloat16),
        "copied": shard("copied", Replicate(), 3, 3),
        "plain": filled("plain", 4),
        "step": 12,
    }
    with TensorizerStorageWriter(path) as writer:
        planner = SavePlanner() if planned else None
        dcp.async_save(state, storage_writer=writer, process_group=rank.saves, planner=planner).result()


def _per_rank(rank: Rank, path: Path) -> None:
    with TensorizerStorageWriter(path) as writer:
        dcp.save({"w": filled(f"rank {rank.index}", 6)}, storage_writer=writer, use_collectives=False)
    dist.barrier()


def _model(rank: Rank, path: Path) -> None:
    mesh = init_device_mesh("cpu", (rank.world_size,))
    state = {
        "w": distribute_tensor(filled("w", 60, 8), mesh, [Shard(0)]),
        "v": distribute_tensor(filled("v", 7, 30), mesh, [Shard(1)]),
        "b": filled("b", 50),
    }
    with SafetensorsStorageWriter(path, max_shard_bytes=2000) as writer:
        dcp.async_save(state, storage_writer=writer, process_group=rank.saves).result()


def _reused(folder: Path) -> None:
    with TensorizerStorageWriter(reuse_unchanged=True) as writer:
        for step in (1, 2):
            state = {"frozen": filled("frozen", 300, 8), "trained": filled(f"trained {step}", 20)}
            dcp.async_save(state, checkpoint_id=folder / f"step-{step}", storage_writer=writer, no_dist=True).result()


def _manager(folder: Path) -> None:
    """Steps 1 to 3, then a job that goes back to 2 and saves a 4 of its own: step 3 is of a branch that was left."""
    for steps in ((1, 2, 3), (4,)):
        with CheckpointManager(folder, keep_best="loss", keep_latest=10, stop_signals=()) as manager:
            state = {"w": filled("before", 40, 30), "step": 0}
            if steps == (4,):
                manager.restore(state, step=2)
            for step in steps:
                state |= {"w": filled(f"step {step}", 40, 30), "step": step}
                manager.save(step, state, metrics={"loss": 1.0 / step}, wait=True)


def _versions(folder: Path) -> None:
    for number in (1, 2, 3):
        with tempfile.TemporaryDirectory() as name:
            with SafetensorsStorageWriter(Path(name, "model")) as writer:
                dcp.save({"w": _version(number)}, storage_writer=writer, no_dist=True)
            publish(Path(name, "model"), folder, step=10 * number)


def _version(number: int) -> torch.Tensor:
    tensor = torch.arange(3000.0)
    tensor[:: 100 // number] += number
    return tensor


if __name__ == "__main__":
    target = Path(sys.argv[1])
    if target.exists():
        raise SystemExit(f"{target} exists: a release's files are written once")
    try:
        write(target)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
