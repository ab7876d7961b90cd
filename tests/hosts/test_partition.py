"""A host that is cut off from the others while a job saves: all ranks give up within the job's timeout, and say why."""

import json
import time

import pytest

from .copied_job import copied_step, events, start
from .lab import DISK, SHARED

TIMEOUT = 4.0

JOB = f"""
import datetime, json, os, pathlib, time
import torch, torch.distributed as dist
from dcp_tensorizer import CheckpointManager, SaveLimits
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds={TIMEOUT}))
rank = dist.get_rank()
step = 0
manager = CheckpointManager("{SHARED}/checkpoints", limits=SaveLimits(timeout=600.0))
try:
    while True:
        step += 1
        manager.save(step, {{"x": torch.full((1000,), float(rank))}}, wait=True)
        pathlib.Path(f"{SHARED}/saved-{{rank}}").write_text(str(step))
except Exception as error:
    told = str(error)
begun = time.monotonic()
try:
    manager.close()
except Exception as error:
    told += " THEN " + str(error)
print(json.dumps(["told", time.time(), told, time.monotonic() - begun]), flush=True)
os._exit(0)
"""


def test_a_partition_for_good(lab):
    """A save of minutes is allowed, but none waits that long for a host that is out of reach, nor does close."""
    (lab.shared / "job.py").write_text(JOB)
    here, there = lab.hosts(2)
    job = lab.ranks([here, there], SHARED / "job.py")
    saved = [lab.shared / f"saved-{rank}" for rank in range(2)]
    job.until(lambda: all(path.exists() and int(path.read_text() or 0) > 3 for path in saved))
    there.cut()
    cut = time.time()
    assert job.wait() == [0, 0], job.account()
    lines = [line for program in job.programs for line in program.words().splitlines() if line.startswith('["told"')]
    for _, ended, words, closing in map(json.loads, lines):
        assert "s, the timeout of its process group, for the others" in words, words
        assert ended - cut < 3 * TIMEOUT + 15 and closing < 2 * TIMEOUT
    assert len(lines) == 2
    assert "Rank 1 has not arrived" in lines[0] or "Rank 1 has arrived, but not responded since" in lines[0]
    assert "The job's store does not respond" in lines[1]


@pytest.mark.promise("copies-cut-off")
def test_a_partition_of_15_s(lab):
    """In a copy, a save, a flush, and between: jobs go on when it is over, and their states are copied again."""
    saves = {"save_every": 1, "keep_latest": 2}
    jobs = {
        "copy": {"copy_options": {"rate": 1e6}},
        "save": saves,
        "flush": saves | {"local": f"{DISK}/local"},
        "steps": {"waits": False},
    }
    hosts = {name: lab.hosts(2) for name in jobs}
    running = {name: start(lab, hosts[name], name=name, timeout=120.0, **options) for name, options in jobs.items()}
    for name, job in running.items():
        job.until(lambda: copied_step(lab, 2, name) > 3)  # noqa: B023
    for _, there in hosts.values():
        there.cut()
    time.sleep(15)  # this is what is tested
    cut = {name: max(entry["step"] for entry in events(lab, "made", name)) for name in jobs}
    for _, there in hosts.values():
        there.heal()
    for name, job in running.items():
        job.until(lambda: copied_step(lab, 2, name) > cut[name] + 3)  # noqa: B023
        assert "ERROR" not in job.account() and "as with copies=1" not in job.account(), job.account()
        job.end()


def test_a_partition_for_good_with_copies(lab):
    """The job goes on elsewhere from the last copy; the older run that comes back changes nothing, and ends."""
    here, there = lab.hosts(2)
    old = start(lab, [here, there], save_every=20, in_step=False)  # else it would end in a step, by gloo's error
    old.until(lambda: copied_step(lab, 2) > 3)
    there.cut()
    made = copied_step(lab, 2)
    old.programs[0].end()
    new = start(lab, [here, lab.host()], more=25, save_every=20)
    assert new.wait() == [0, 0], new.account()
    restored = events(lab, "restored")
    assert [(entry["right"], entry["step"] >= made) for entry in restored] == [(True, True)] * 2, new.account()
    latest = (lab.shared / "run" / "latest").read_text()
    there.heal()
    assert old.programs[1].wait(60.0) != 0
    words = old.programs[1].words()
    assert "another rank has ended" in words or "The job's store does not respond" in words, words
    assert (lab.shared / "run" / "latest").read_text() == latest
