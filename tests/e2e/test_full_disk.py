"""A disk that is full: a small file system of its own, mounted where nobody else sees it."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_tensorizer import TensorizerStorageReader

from ..lab.processes import can_mount, run_python_with

SMALL_DISK = 'mount -t tmpfs -o size=16m none "$1"'
PAGE = 4096

# Saves, fills the disk up to what the case leaves free, saves again, and tells what happened; copies what is left to
# where the test can see it; then makes room and saves once more.
JOB = """
import json, os, shutil, sys
import torch
import torch.distributed.checkpoint as dcp
from dcp_tensorizer import SaveLimits, TensorizerStorageWriter

disk, copy, case, page = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])

def state(step):
    return {"w": torch.full((500_000,), step), "step": step} | {f"scalar{n}": torch.tensor(step) for n in range(500)}

def saved(writer, step):
    try:
        dcp.async_save(state(step), storage_writer=writer).result()
    except BaseException as error:
        return [f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values()]

def sizes(path):
    return {name: os.stat(os.path.join(path, name)).st_size for name in os.listdir(path)}

path = os.path.join(disk, "checkpoint")
with TensorizerStorageWriter(path, limits=SaveLimits(max_consecutive_failures=None)) as writer:
    first = saved(writer, 1)
    before = sizes(path)
    (data,) = (size for name, size in before.items() if name.endswith(".tensors"))
    room = -(-data // page) + 1 if case == ".metadata" else 10
    with open(os.path.join(disk, "filler"), "wb") as filler:
        free = os.statvfs(disk).f_bavail
        filler.write(bytes((free - room) * page))
    second = saved(writer, 2)
    after = sizes(path)
    shutil.copytree(path, os.path.join(copy, "after"))
    os.unlink(os.path.join(disk, "filler"))
    third = saved(writer, 3)
    shutil.copytree(path, os.path.join(copy, "recovered"))
print(json.dumps([first, second, third, before, after]))
"""


@pytest.mark.promise("data-disk-full")
@pytest.mark.promise("metadata-disk-full")
@pytest.mark.skipif(not can_mount("mount -t tmpfs none /mnt"), reason="this system lets nobody mount a file system")
@pytest.mark.parametrize("case", ["data", ".metadata"])
def test_a_full_disk(tmp_path, case):
    """The error says so and where, the old checkpoint is as it was and alone, and with room the next save works."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = run_python_with(SMALL_DISK, JOB, disk, tmp_path, case, PAGE)
    first, second, third, before, after = json.loads(done.stdout)
    assert (first, third) == (None, None)
    (message,) = second
    rank = "" if case == ".metadata" else "rank 0: "
    assert message.startswith(f"WriteError: {rank}cannot write ")
    assert "No space left on device" in message
    assert f"{disk}/checkpoint/{'.metadata' if case == '.metadata' else '__0_0_'}" in message
    assert after == before
    for name, step in (("after", 1), ("recovered", 3)):
        loaded = {"w": torch.zeros(500_000, dtype=torch.int64), "step": 0}
        dcp.load(loaded, storage_reader=TensorizerStorageReader(tmp_path / name))
        assert (loaded["step"], loaded["w"].unique().tolist()) == (step, [step])
