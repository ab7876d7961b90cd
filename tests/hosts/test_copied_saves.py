"""A host is lost while a writer saves: the state that was being saved is in the memory of another one."""

from __future__ import annotations

import datetime
import json
import logging
import os
import signal
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_tensorizer
from dcp_tensorizer import TensorizerStorageWriter
from dcp_tensorizer._runtime.threads import Deadline
from dcp_tensorizer.tools import list_kept

from .copied_job import damage
from .lab import SHARED, Lab

OPTIONS = {"survive": 600, "copies": 2, "copy_rate": None}


def _begin() -> tuple[dist.ProcessGroup, dict[str, torch.Tensor]]:
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO, force=True)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return dist.new_group(backend="gloo"), {"w": distribute_tensor(torch.arange(600_000.0), mesh, [Shard(0)])}


def saving(installs: bool) -> None:
    """Saves twice; the second save has no writer process any more when the state is copied."""
    group, state = _begin()
    if installs:
        dcp_tensorizer.install(writer_options=OPTIONS)
    writer = None if installs else TensorizerStorageWriter(**OPTIONS)  # type: ignore[arg-type]
    for step in (1, 2):
        state["w"] += 1
        if step == 2:
            (process,) = [p for p in psutil.Process().children() if any("worker" in word for word in p.cmdline())]
            process.send_signal(signal.SIGSTOP)
        path = str(SHARED / f"run-{installs}/step-{step}")
        saved = dcp.async_save(state, checkpoint_id=path, storage_writer=writer, process_group=group)
        if step == 1:
            saved.result()
    from dcp_tensorizer._saving.engine import engine_of_process

    keeping = engine_of_process(devices=False).keeping
    end = Deadline(60.0)
    while (status := keeping.keeper(600, 60.0).copy_status()).is_running or status.id not in keeping.saves:
        assert end.left is None or end.left > 0
        time.sleep(0.01)
    (SHARED / f"copied-{dist.get_rank()}").write_text(json.dumps(status.problem))
    time.sleep(600)


def loading(installs: bool) -> None:
    """Loads the newest that is kept in the memory of all hosts."""
    group, state = _begin()
    expected = state["w"].full_tensor() + 2
    kept = list_kept(SHARED / f"run-{installs}", process_group=group)
    logging.info("kept %s", [(Path(found.path).name, found.ranks) for found in kept])
    if installs:
        dcp_tensorizer.install()
        dcp.load(state, checkpoint_id=kept[0].path, process_group=group)
    else:
        dcp.load(state, storage_reader=dcp_tensorizer.open_reader(kept[0].path), process_group=group)
    assert torch.equal(state["w"].full_tensor(), expected)
    dist.destroy_process_group()


def test_a_host_is_lost_while_a_writer_saves(lab: Lab) -> None:
    """Ranks find what all hosts have by a collective, and read from afar; also by torch's own calls, or as one rank.

    Before the host is lost, what is damaged there is read from the other one.
    """
    here, there = lab.hosts(2)
    for installs in (False, True):
        job = lab.forked([here, there], saving, installs)
        copied = [lab.shared / f"copied-{rank}" for rank in range(2)]
        job.until(lambda: all(path.exists() and path.read_text() for path in copied))  # noqa: B023
        assert [json.loads(path.read_text()) for path in copied] == ["", ""], job.account()
        job.end()
        assert damage(there, "dcp_tensorizer") > 0  # rank 1's own part, of which the other host has a copy
        job = lab.forked([here, there], loading, installs)
        assert job.wait() == [0, 0], job.account()
        assert job.account().count("ERROR rank 1's part of ") == 1, job.account()
        there.die()
        there = lab.host()
        for hosts in ([here, there], [there, here], [here]):
            job = lab.forked(hosts, loading, installs)
            assert job.wait() == [0] * len(hosts), job.account()
            assert job.account().count("INFO kept [('step-2', (0, 1))]\n") == len(hosts), job.account()
            assert job.account().count("step-2 is loaded from memory") == len(hosts), job.account()
        for path in copied:
            os.unlink(path)
