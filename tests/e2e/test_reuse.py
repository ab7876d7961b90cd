"""Saves of several ranks that do not write again what has not changed."""

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter
from dcp_tensorizer.tools import verify

from ..lab.ranks import run_ranks

WORLD = 2
ROWS, COLUMNS = 512, 1024


def state_of(mesh, step):
    """A frozen base, a part of it sharded and the rest on both ranks, and an adapter that is trained."""
    generator = torch.Generator().manual_seed(0)
    base = [torch.rand(ROWS, COLUMNS, generator=generator) for _ in range(4)]
    return {
        "base": {
            "sharded": distribute_tensor(base[0], mesh, [Shard(0)]),
            **{f"on both ranks {n}": tensor for n, tensor in enumerate(base[1:])},
        },
        "adapter": distribute_tensor(torch.full((4, COLUMNS), float(step)), mesh, [Shard(0)]),
        "step": step,
    }


def loads(mesh, path, step):
    """Whether a checkpoint loads as it was saved."""
    expected, loaded = state_of(mesh, step), state_of(mesh, 0)
    for tensor in (*loaded["base"].values(), loaded["adapter"]):
        tensor.zero_()
    dcp.load(loaded, storage_reader=TensorizerStorageReader(path))
    pairs = [(loaded["base"][key], value) for key, value in expected["base"].items()]
    pairs.append((loaded["adapter"], expected["adapter"]))
    local = [[t.to_local() if isinstance(t, DTensor) else t for t in pair] for pair in pairs]
    return loaded["step"] == step and all(torch.equal(a, b) for a, b in local)


def lora(rank, folder):
    """Saves three times, loads, deletes the first two, and loads again."""
    mesh = init_device_mesh("cpu", (WORLD,))
    reused, found = [], []
    with TensorizerStorageWriter(reuse_unchanged=True) as writer:
        for step in range(1, 5):
            path = folder / f"step-{step}"
            state = state_of(mesh, step)
            dcp.async_save(state, storage_writer=writer, checkpoint_id=path, process_group=rank.saves).result()
            reused.append(writer.last_report.reused_nbytes)
    found += [loads(mesh, folder / f"step-{step}", step) for step in range(1, 5)]
    dist.barrier()
    if rank.index == 0:
        shutil.rmtree(folder / "step-1")
        shutil.rmtree(folder / "step-2")
    dist.barrier()
    found += [loads(mesh, folder / f"step-{step}", step) for step in (3, 4)]
    return reused, found


def test_two_ranks_save_an_adapter(tmp_path: Path) -> None:
    """Each rank reuses what it has written; checkpoints load, also when those that they share files with are gone."""
    results = run_ranks(WORLD, lora, tmp_path)
    assert [found for _, found in results] == [[True] * 6] * WORLD
    reused = [of for of, _ in results]
    assert [of[:2] for of in reused] == [[0, 0]] * WORLD
    assert all(of[2] == of[3] > ROWS * COLUMNS * 2 for of in reused)
    assert sum(of[3] for of in reused) == 4 * ROWS * COLUMNS * 4
    for step in (3, 4):
        assert not verify(tmp_path / f"step-{step}", full=True).damages
