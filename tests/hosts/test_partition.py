"""A host that is cut off from the others while a job saves: all ranks give up within the job's timeout, and say why."""

import json
import time

from .lab import SHARED

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
        assert "s, the timeout of the job's process group, for the others" in words, words
        assert ended - cut < 3 * TIMEOUT + 15 and closing < 2 * TIMEOUT
    assert len(lines) == 2
    assert "Rank 1 has not " in lines[0] and "The job's store does not answer" in lines[1]
