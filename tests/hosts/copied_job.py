"""A job whose states are copied between hosts: it tells which steps it makes, what is copied, and what it restores."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psutil

from .lab import SHARED, Host, Job, Lab

__all__ = ["copied_step", "damage", "events", "keepers", "start"]

JOB = f"""
import datetime, json, os, pathlib, sys, time
import logging
import torch, torch.distributed as dist
from dcp_tensorizer import CheckpointManager
logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
options = json.loads(os.environ["OPTIONS"])
last, more = options.pop("last", 0), options.pop("more", 0)
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
    last = last or (step + more if more else 0)
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


def damage(host: Host, name: str) -> int:
    """Flips a byte in the middle of all memory of a name that keepers of a host hold; returns in how many."""
    count = 0
    for pid in keepers(host):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(link).startswith(f"/memfd:{name} "):
                with open(link, "r+b", buffering=0) as file:
                    file.seek(1_000_000)
                    (byte,) = file.read(1)
                    file.seek(1_000_000)
                    file.write(bytes([byte ^ 1]))
                count += 1
    return count


def keepers(host: Host) -> list[int]:
    """The process ids of the keepers on a host."""
    every = psutil.process_iter(["pid", "cmdline"])
    found = [p.pid for p in every if any("_restart.keeper" in word for word in p.info["cmdline"] or [])]
    return [pid for pid in found if _namespace(pid) == _namespace(host.init)]


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:  # it has just ended
        return ""
