"""Systems that lack what most have: /proc, a directory for temporary files, and descriptors that nobody else closes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .test_full_disk import MOUNT

ROOT = Path(__file__).parents[2]

JOB = """
import os, sys, tempfile
import torch
import torch.distributed.checkpoint as dcp
from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter

def state(step):
    return {"w": torch.full((100_000,), float(step)), "scalar": torch.tensor(float(step))}

def check(path, step):
    target = state(0)
    dcp.load(target, storage_reader=TensorizerStorageReader(path))
    assert [tensor.unique().tolist() for tensor in target.values()] == [[step], [step]]

path = sys.argv[1]
"""

NO_PROC = """
tempfile.tempdir = "/nowhere"
assert os.listdir("/proc") == []
for staging in ("buffer", "shared"):
    with TensorizerStorageWriter(path, staging=staging) as writer:
        for step in (1, 2):
            state_dict = {key: tensor.share_memory_() for key, tensor in state(step).items()}
            dcp.async_save(state_dict, storage_writer=writer).result()
            assert writer.last_report.attempts == 1
            check(path, step)
print("fine")
"""

# The files that are opened then have the numbers that the buffer, the socket and the process's output had.
CLOSERANGE = """
import signal
others = os.path.join(path, "others")
os.mkdir(others)

def close_all():
    os.closerange(3, 4096)
    files = [open(os.path.join(others, str(number)), "w+") for number in range(200)]
    for file in files:
        file.write("of somebody else")
        file.flush()
    return files

def intact(files):
    return all(os.pread(file.fileno(), 100, 0) == b"of somebody else" for file in files)

with TensorizerStorageWriter(os.path.join(path, "saved")) as writer:
    dcp.async_save(state(1), storage_writer=writer).result()
    files = close_all()  # between two saves
    dcp.async_save(state(2), storage_writer=writer).result()
    assert writer.last_report.attempts == 1
    check(os.path.join(path, "saved"), 2)
    os.kill(writer._saver.client._process.pid, signal.SIGSTOP)
    future = dcp.async_save(state(3), storage_writer=writer)
    while not writer._saver.client._process._lock.locked():
        pass
    files += close_all()  # in the middle of one, which has not been read yet
    process = writer._saver.client._process
    future.result()
    assert writer.last_report.attempts == 2
    assert writer._saver.client._process is process
    check(os.path.join(path, "saved"), 3)
    dcp.async_save(state(4), storage_writer=writer).result()
    check(os.path.join(path, "saved"), 4)
assert intact(files[200:])
print("fine")
"""


def run(command, tmp_path):
    done = subprocess.run(
        [*command, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=90,
        cwd=ROOT,
        env=os.environ | {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


def _can_hide_proc():
    return subprocess.run([*MOUNT, "mount -t tmpfs none /proc"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not _can_hide_proc(), reason="this system lets nobody mount a file system")
def test_neither_proc_nor_a_place_for_temporary_files(tmp_path):
    """Saves and loads work: they only know less of memory, cores and threads."""
    hidden = 'mount -t tmpfs none /proc && exec "$0" -c "$1" "$2"'
    run([*MOUNT, hidden, sys.executable, JOB + NO_PROC], tmp_path)


def test_a_trainer_that_closes_all_descriptors(tmp_path):
    """As a daemon does: saves go on, and nothing is sent, read or closed that has the numbers since."""
    run([sys.executable, "-c", JOB + CLOSERANGE], tmp_path)
