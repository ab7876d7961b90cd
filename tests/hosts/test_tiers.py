"""A local disk before the remote, where one of them is full, or takes no more changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..lab.processes import run_python
from ..lab.states import directories_in
from .disks import Disk

MEBI = 1 << 20

# Step 1 is on the remote, and step 2 finds no room there, while step 3 would.
_FULL_REMOTE = """
import os, sys, time
from pathlib import Path
import torch
from dcp_tensorizer import CheckpointManager, SaveLimits
from tests.lab.ranks import eventually

remote, local = map(Path, sys.argv[1:])

def state(step):
    return {name: torch.full((5 << 18,), float(step)) for name in ("base", "adapter")} | {"step": step}

with CheckpointManager(remote / "run", local=local, keep_latest=1, limits=SaveLimits(timeout=60.0)) as manager:
    manager.save(1, state(1), wait=True)
    assert manager.wait_remote(60)
    status = os.statvfs(remote)
    (remote / "filler").write_bytes(bytes(status.f_bavail * status.f_frsize - (6 << 20)))
    manager.save(2, state(2), wait=True)
    manager.save(3, state(3), exclude=["base"], wait=True)
    saved = time.time()
    (trouble,) = eventually(lambda: list((local / ".flush").glob("*.trouble")))
    assert eventually(lambda: trouble.read_text() and trouble.stat().st_mtime > saved)
    assert not (remote / "run" / "step-3").exists()
    (remote / "filler").unlink()
    assert manager.wait_remote(60)
"""


def test_a_smaller_save_does_not_take_the_room_of_an_earlier_one(
    tmp_path: Path, small_disk: Callable[..., Disk]
) -> None:
    """A later, smaller save is not sent before the earlier one. Both arrive when there is space, and the rules hold."""
    remote = small_disk(22 * MEBI)
    run_python(_FULL_REMOTE, remote.path, tmp_path / "nvme", timeout=150.0)
    assert directories_in(remote.path / "run") == ["step-3"]


# Step 1 is not on the remote when the local disk turns read-only. Two more are saved, and as many by the next job.
_READ_ONLY = """
import logging, subprocess, sys
from pathlib import Path
import torch
from dcp_tensorizer import CheckpointManager, SaveLimits
from tests.integration.tiers.support import Run, state_of
from tests.lab.ranks import eventually

disk, remote = map(Path, sys.argv[1:])

class Local(Run):
    local = disk / "run"

run = Local(remote)
if not run.local.exists():
    run.save_unflushed(1)
    subprocess.run(["mount", "-n", "-o", "remount,ro", str(disk)], check=True)
logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
state, limits = state_of(0), SaveLimits(timeout=60.0)
with CheckpointManager(run.remote, local=run.local, keep_latest=3, stop_signals=(), limits=limits) as manager:
    print("restored", start := manager.restore(state))
    for step in (start + 1, start + 2):
        manager.save(step, state_of(step), wait=True)
        print("there", sorted(path.parent.name for path in run.remote.rglob(".metadata"))[-2:])
    eventually(lambda: (run.remote / "step-1" / ".metadata").exists() or start > 1)
"""


def test_a_local_disk_that_turns_read_only(tmp_path: Path, small_disk: Callable[..., Disk]) -> None:
    """Its checkpoint arrives, saves go to the remote and do not wait for it, and the log has an error."""
    disk = small_disk(64 * MEBI)
    done = [run_python(_READ_ONLY, disk.path, tmp_path, timeout=150.0) for _ in range(2)]
    newest = [run.stdout.splitlines() for run in done]
    assert [lines[0] for lines in newest] == ["restored 1", "restored 3"]
    assert ["step-2" in newest[0][1], "step-3" in newest[0][2]] == [True, True]
    assert ["step-4" in newest[1][1], "step-5" in newest[1][2]] == [True, True]
    for run in done:
        errors = [line for line in run.stderr.splitlines() if line.startswith("ERROR")]
        assert run.stderr.count("saving to") == 2
        assert errors and all(
            "cannot be written to, so it is unknown which of its checkpoints" in line for line in errors
        )


# Step 1 is not on the remote when the local disk answers everything with an error. Two more are saved.
_BROKEN = """
import fcntl, logging, os, struct, sys
from pathlib import Path
from dcp_tensorizer import CheckpointManager, SaveLimits
from tests.integration.tiers.support import Run, state_of

disk, remote = map(Path, sys.argv[1:])

class Local(Run):
    local = disk / "run"

run = Local(remote)
run.save_unflushed(1)
directory = os.open(disk, os.O_RDONLY)
fcntl.ioctl(directory, 0x8004587D, struct.pack("I", 2))
os.close(directory)
logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
with CheckpointManager(run.remote, local=run.local, stop_signals=(), limits=SaveLimits(timeout=600.0)) as manager:
    print("restored", manager.restore(state_of(0)))
    for step in (2, 3):
        manager.save(step, state_of(step), wait=True)
print("there", sorted(path.parent.name for path in run.remote.rglob(".metadata")))
"""


def test_a_local_disk_that_breaks(tmp_path: Path, small_disk: Callable[..., Disk]) -> None:
    """The checkpoints of a broken disk are one error in the log, and saves do not wait for them."""
    disk = small_disk(64 * MEBI, "ext4")
    done = run_python(_BROKEN, disk.path, tmp_path, timeout=150.0)
    assert done.stdout.splitlines()[-1] == "there ['step-2', 'step-3']"
    assert done.stderr.count("saving to") == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    assert errors and all("cannot be written to, so it is unknown which of its checkpoints" in line for line in errors)
