"""A local disk before the remote, where one of them is full, or takes no more changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..support import run_python
from .disks import Disk

MEBI = 1 << 20

# Step 1 is on the remote, and step 2 finds no room there, while step 3 would.
_FULL_REMOTE = """
import os, sys, time
from pathlib import Path
import torch
from dcp_tensorizer import CheckpointManager, SaveLimits
from tests.e2e.ranks import eventually

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
    """Nothing is sent ahead: when there is room for the earlier one, both arrive, and the rules hold."""
    remote = small_disk(22 * MEBI)
    run_python(_FULL_REMOTE, remote.path, tmp_path / "nvme", timeout=150.0)
    assert [path.name for path in (remote.path / "run").iterdir()] == ["step-3"]
