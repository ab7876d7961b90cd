"""Orderly ends: however a job ends while a save is in progress, the save is finished, and nothing is left running."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter

from ..lab.ranks import eventually

SIZE = 8 << 20
ROOT = Path(__file__).parents[2]

JOB = """
import signal, sys, time
import torch
import torch.distributed.checkpoint as dcp
from dcp_tensorizer import TensorizerStorageWriter

# As a terminal starts it: what a shell starts in the background ignores Ctrl-C, and so does all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
path, end, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
overlap = end == "no end at all, and staging overlaps"
torch.set_num_threads(1 if overlap else torch.get_num_threads())  # as torchrun sets it: then we copy with several
writer = TensorizerStorageWriter(path, overlap_staging=overlap, thread_count=2)

def save(step):
    saved = dcp.async_save({"w": torch.full((size,), step), "step": step}, storage_writer=writer)
    return saved.upload_completion if overlap else saved

def stop(number, frame):
    writer.close(timeout=60)
    sys.exit(0)

save(1).result()
if end == "a handler for SIGTERM":
    signal.signal(signal.SIGTERM, stop)
if end == "sys.exit in a handler":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
with writer if end in ("Ctrl-C", "sys.exit in a handler", "an exception") else open("/dev/null"):
    save(2)
    print("saving", flush=True)
    if end == "an exception":
        raise RuntimeError("training diverged")
    while end in ("Ctrl-C", "a handler for SIGTERM", "sys.exit in a handler", "SIGTERM"):
        time.sleep(0.01)
"""

ENDS = {
    "Ctrl-C": (signal.SIGINT, -signal.SIGINT, "KeyboardInterrupt"),
    "a handler for SIGTERM": (signal.SIGTERM, 0, ""),
    "sys.exit in a handler": (signal.SIGTERM, 3, ""),
    "an exception": (None, 1, "RuntimeError: training diverged"),
    "no end at all": (None, 0, ""),
    "no end at all, and staging overlaps": (None, 0, ""),
}


def _run(path, end, number):
    """Runs the job, and sends it a signal when it saves, as a terminal does to all of its processes."""
    with subprocess.Popen(
        [sys.executable, "-c", JOB, str(path), end, str(SIZE)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,
        env=os.environ | {"PYTHONWARNINGS": "ignore", "PYTHONFAULTHANDLER": "1"},
    ) as job:
        assert job.stdout.readline() == b"saving\n"
        if number is not None:
            os.killpg(job.pid, number)
        try:
            _, errors = job.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGABRT)  # whatever is left of it shows its stacks, and ends
            _, errors = job.communicate()
    return job.returncode, errors


@pytest.mark.promise("not-closed")
@pytest.mark.promise("ctrl-c")
@pytest.mark.parametrize("end", ENDS)
def test_the_save_in_progress_is_finished(tmp_path, end):
    """The signal goes to the whole process group, as a terminal sends it; the newest state is committed, whole."""
    number, code, words = ENDS[end]
    returncode, errors = _run(tmp_path, end, number)
    assert (returncode, words in errors.decode()) == (code, True), errors.decode()
    loaded = {"w": torch.zeros(SIZE, dtype=torch.int64), "step": 0}
    dcp.load(loaded, storage_reader=TensorizerStorageReader(tmp_path))
    assert loaded["step"] == 2
    assert loaded["w"].unique().tolist() == [2]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.promise("sigterm")
def test_sigterm_without_a_handler(tmp_path):
    """It ends the trainer at once: one whole checkpoint is there, and the next job removes what else there is."""
    assert _run(tmp_path, "SIGTERM", signal.SIGTERM)[0] == -signal.SIGTERM
    loaded = {"w": torch.zeros(SIZE, dtype=torch.int64), "step": 0}
    dcp.load(loaded, storage_reader=TensorizerStorageReader(tmp_path))
    assert loaded["step"] in (1, 2)
    assert loaded["w"].unique().tolist() == [loaded["step"]]
    with TensorizerStorageWriter(tmp_path) as writer:
        dcp.save({"step": 3}, storage_writer=writer)
    assert eventually(lambda: len(list(tmp_path.iterdir())) == 2)  # its writer process may just end
