"""A host is lost with its memory: the job goes on from the copies that keepers of other hosts have."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psutil

from .lab import SHARED, Host, Job, Lab

JOB = f"""
import datetime, json, os, pathlib, sys, time
import logging
import torch, torch.distributed as dist
from dcp_tensorizer import CheckpointManager
logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
options = json.loads(os.environ["OPTIONS"])
last = options.pop("last", 0)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
rank, size = dist.get_rank(), dist.get_world_size()
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
mesh = init_device_mesh("cpu", (size,))
full = torch.arange(1_200_000.0)
state = {{"w": distribute_tensor(full, mesh, [Shard(0)]), "step": 0}}
def tell(**words):
    with open("{SHARED}/events", "a") as file:
        file.write(json.dumps(words | {{"rank": rank, "host": os.environ["HOST"]}}) + "\\n")
options = {{"save_every": 1000, "survive": 600, "survive_every": 1, "copies": 2}} | options
with CheckpointManager("{SHARED}/run", **options) as manager:
    step = manager.restore(state) or 0
    whole = state["w"].full_tensor()
    tell(event="restored", step=step, right=bool(torch.equal(whole, full + step)) and state["step"] == step)
    while not last or step < last:
        step += 1
        state["w"] += 1
        state["step"] = step
        manager.save(step, state, force=step == 1, wait=step == 1)
        survival = manager._job.survival
        survival.settle()
        while survival.copies.is_on and (status := survival._keeper.copy_status()).is_running:
            time.sleep(0.002)
        tell(event="made", step=step, copied=survival.copies.is_ready and not status.problem)
dist.destroy_process_group()
"""


def start(lab: Lab, hosts: list[Host], *, by_torchrun: bool = False, **options: object) -> Job:
    """Starts the job, one rank on each host; what it tells begins anew."""
    (lab.shared / "job.py").write_text(JOB)
    (lab.shared / "events").unlink(missing_ok=True)
    launch = lab.torchrun if by_torchrun else lab.ranks
    return launch(hosts, SHARED / "job.py", environment={"OPTIONS": json.dumps(options)})


def events(lab: Lab, event: str) -> list[dict[str, Any]]:
    """What ranks have told, but for what one has not told to the end."""
    path: Path = lab.shared / "events"
    lines = path.read_text().splitlines() if path.exists() else []
    return [
        entry for entry in map(json.loads, filter(lambda line: line.endswith("}"), lines)) if entry["event"] == event
    ]


def copied_step(lab: Lab, ranks: int) -> int:
    """The newest step that each rank has made, and seen whole on another host; 0 if there is none."""
    made = [entry for entry in events(lab, "made") if entry["copied"]]
    return min(max((entry["step"] for entry in made if entry["rank"] == rank), default=0) for rank in range(ranks))


def is_restored(lab: Lab, job: Job, least: int, ranks: int = 2) -> int:
    """Returns the step that all ranks have restored, with the right values, which is not less than one."""
    assert job.wait() == [0] * len(job.programs), job.account()
    restored = events(lab, "restored")
    assert [entry["right"] for entry in restored] == [True] * ranks, job.account()
    (step,) = {entry["step"] for entry in restored}
    assert step >= least, job.account()
    return int(step)


def damage(host: Host, name: str) -> int:
    """Flips a byte in the middle of all memory of a name that keepers of a host hold; returns in how many."""
    count = 0
    for process in psutil.process_iter(["pid", "cmdline"]):
        is_keeper = any("_restart.keeper" in word for word in process.info["cmdline"] or [])
        if not is_keeper or _namespace(process.pid) != _namespace(host.init):
            continue
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            if os.readlink(link).startswith(f"/memfd:{name} "):
                with open(link, "r+b", buffering=0) as file:
                    file.seek(1_000_000)
                    (byte,) = file.read(1)
                    file.seek(1_000_000)
                    file.write(bytes([byte ^ 1]))
                count += 1
    return count


def _namespace(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/pid")


def test_a_host_is_lost(lab: Lab) -> None:
    """Its rank goes on, on a host that holds nothing, from the last step that was copied: none is lost."""
    here, there = lab.hosts(2)
    job = start(lab, [here, there])
    job.until(lambda: copied_step(lab, 2) > 3)
    there.die()
    made = copied_step(lab, 2)
    job.end()
    job = start(lab, [here, lab.host()], last=made + 3)
    is_restored(lab, job, made)
    assert "is restored from memory" in job.account()


def test_a_job_goes_on_with_fewer_hosts(lab: Lab) -> None:
    """Under torchrun: one of three hosts is lost, and two ranks put together what three have kept."""
    hosts = lab.hosts(3)
    job = start(lab, hosts, by_torchrun=True)
    job.until(lambda: copied_step(lab, 3) > 3)
    hosts[1].die()
    made = copied_step(lab, 3)
    assert [program.wait() != 0 for program in job.programs] == [True] * 3
    job = start(lab, [hosts[2], hosts[0]], by_torchrun=True, last=made + 3)
    is_restored(lab, job, made)
    assert "is restored from memory" in job.account()


def test_what_is_damaged_is_not_used(lab: Lab) -> None:
    """The other copy is, as long as there is one; then what is on storage. The log says so."""
    here, there = lab.hosts(2)
    job = start(lab, [here, there])
    job.until(lambda: copied_step(lab, 2) > 3)
    made = copied_step(lab, 2)
    job.end()
    assert damage(here, "dcp_tensorizer") > 0
    job = start(lab, [here, there])
    job.until(lambda: len(events(lab, "restored")) == 2 and copied_step(lab, 2) > made + 3)
    assert {(entry["right"], entry["step"] >= made) for entry in events(lab, "restored")} == {(True, True)}
    assert "ERROR rank 0's part of step" in job.account()
    assert "are not what was saved" in job.account()
    there.die()
    job.end()
    assert damage(here, "dcp_tensorizer_replica") > 0
    job = start(lab, [here, lab.host()], last=5)
    assert is_restored(lab, job, 1) == 1
    assert "ERROR the state in memory, of step" in job.account()
