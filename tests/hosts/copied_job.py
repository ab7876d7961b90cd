"""A job whose states are copied between hosts: it tells which steps it makes, what is copied, and what it restores."""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_tensorizer import CheckpointManager, CopyOptions

from ..lab.seams import status_of_copy, wait_held
from .lab import SHARED, Host, Job, Lab

__all__ = ["copied_step", "damage", "events", "keepers", "start"]

_NUMBERS = 1_200_000
_EVENTS = "events"
_OPTIONS = {"save_every": 1000, "survive": 600, "survive_every": 1, "copies": 2}


def main(words: str) -> None:
    """One rank: resumes from what it finds, and makes steps, to the last one or until it is killed.

    ``words`` are options of the manager in JSON, and: ``last``, the last step; or ``more``, so many; ``waits``: a step
    ends when its state is copied; ``in_step``: no rank is a step ahead; ``timeout``: of the group, in seconds;
    ``name``: of the job's folder.
    """
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO, force=True)
    options = _OPTIONS | json.loads(words)
    options["copy_options"] = CopyOptions(**options.get("copy_options", {}))
    last, more, waits = options.pop("last", 0), options.pop("more", 0), options.pop("waits", True)
    in_step = options.pop("in_step", True)
    full, name = torch.arange(_NUMBERS, dtype=torch.float32), options.pop("name", "run")
    seconds = options.pop("timeout", 30.0)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds))
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    state: dict[str, Any] = {"w": distribute_tensor(full, mesh, [Shard(0)]), "step": 0}
    log = os.open(SHARED / f"{name}-{_EVENTS}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def tell(event: str, step: int, **more: object) -> None:
        entry = {"event": event, "step": step, "rank": rank, "host": os.environ["HOST"]} | more
        os.write(log, f"{json.dumps(entry)}\n".encode())

    with CheckpointManager(SHARED / name, **options) as manager:
        step = manager.restore(state) or 0
        local = distribute_tensor(full + step, mesh, [Shard(0)]).to_local()
        tell("restored", step, right=torch.equal(state["w"].to_local(), local) and state["step"] == step)
        last = last or (step + more if more else 0)
        copies = manager._survival.copies
        steps: dict[str, int] = {}  # by the ids of states
        while not last or step < last:
            step += 1
            state["w"] += 1
            state["step"] = step
            future = manager.save(step, state, force=step == 1, wait=step == 1)
            if future is not None and rank == 0:
                future.add_done_callback(lambda done, step=step: done.exception() or tell("committed", step))
            if copies.ordered:
                steps.setdefault(copies.ordered, step)
            if not waits and (found := steps.pop(copies.confirmed, 0)):
                tell("copied", found)
            while waits and copies.is_ready:
                wait_held(manager)
                if not (status := status_of_copy(manager)).is_running:
                    if not status.problem:
                        tell("copied", step)
                    break
                time.sleep(0.001)
            tell("made", step)
            if in_step:
                dist.barrier()  # as gradients are reduced
    os.close(log)
    dist.destroy_process_group()


def start(lab: Lab, hosts: list[Host], *, how: str = "forked", name: str = "run", **options: object) -> Job:
    """Starts the job, one rank on each host; what it tells begins anew.

    ``how``: ``forked`` from a process that has imported everything, ``ranks``, or ``torchrun``.
    """
    (lab.shared / f"{name}-{_EVENTS}").unlink(missing_ok=True)
    words = json.dumps(options | {"name": name})
    if how == "forked":
        return lab.forked(hosts, main, words)
    launch = lab.torchrun if how == "torchrun" else lab.ranks
    return launch(hosts, "-m", __name__, words)


def events(lab: Lab, event: str, name: str = "run") -> list[dict[str, Any]]:
    """What ranks have told, but for what one has not told to the end."""
    path = lab.shared / f"{name}-{_EVENTS}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [
        entry for entry in map(json.loads, filter(lambda line: line.endswith("}"), lines)) if entry["event"] == event
    ]


def copied_step(lab: Lab, ranks: int, name: str = "run") -> int:
    """The newest step that each rank has made, and seen whole on another host; 0 if there is none."""
    found = events(lab, "copied", name)
    return min(max((entry["step"] for entry in found if entry["rank"] == rank), default=0) for rank in range(ranks))


def damage(host: Host, name: str, offset: int = 1_000_000) -> int:
    """Flips a byte in all memory of a name that keepers of a host hold; returns in how many."""
    done = set[int]()  # several descriptors may lead to one
    for pid in keepers(host):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # it has just been closed
                if not os.readlink(link).startswith(f"/memfd:{name} ") or (inode := link.stat().st_ino) in done:
                    continue
                done.add(inode)
                with open(link, "r+b", buffering=0) as file:
                    file.seek(offset)
                    (byte,) = file.read(1)
                    file.seek(offset)
                    file.write(bytes([byte ^ 1]))
    return len(done)


def keepers(host: Host) -> list[int]:
    """The process ids of the keepers on a host."""
    every = psutil.process_iter(["pid", "cmdline"])
    found = [p.pid for p in every if any("_memory.keeper" in word for word in p.info["cmdline"] or [])]
    return [pid for pid in found if _namespace(pid) == _namespace(host.init)]


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:  # it has just ended
        return ""


if __name__ == "__main__":
    main(sys.argv[1])
