"""A disk that does not answer, as a mount whose server is gone: whoever writes there hangs in the kernel."""

import json
import subprocess
import sys

import pytest

from ..support import ROOT

TIMEOUT = 3.0

# Saves; saves again while the disk freezes in a step of the save; saves elsewhere; closes. When it is thawed, it waits
# for the threads that hung, and says what is there. It asks for the frost and the thaw by a line.
JOB = f"""
import json, os, sys, threading, time
from unittest import mock
import torch
import torch.distributed.checkpoint as dcp
from dcp_tensorizer import CheckpointManager, SaveLimits, TensorizerStorageReader, TensorizerStorageWriter
from dcp_tensorizer._saving.session import SaveSession
from dcp_tensorizer._saving.writer_client import WriterClient

disk, elsewhere, step = sys.argv[1:]
told, is_frozen = {{}}, False

def ask(what):
    print(what, flush=True)
    assert sys.stdin.readline() == "done\\n"

def freeze_first(function):
    def freezing(*arguments, **options):
        global is_frozen, begun
        if not is_frozen:
            is_frozen = True
            ask("freeze")
            begun = time.monotonic()
        return function(*arguments, **options)
    return freezing

def save(value, path):
    state = {{"x": torch.full((100_000,), value)}}
    try:
        dcp.async_save(state, storage_writer=writer, checkpoint_id=path).result()
    except BaseException as error:
        return str(next(iter(error.failures.values()))[0])

owner, name = {{
    "prepare": (SaveSession, "prepare"),
    "write": (WriterClient, "write"),
    "commit": (SaveSession, "finish"),
}}[step]
limits = SaveLimits(timeout={TIMEOUT}, max_consecutive_failures=None)
writer = TensorizerStorageWriter(limits=limits)
path = os.path.join(disk, "checkpoint")
assert save(1.0, path) is None
with mock.patch.object(owner, name, freeze_first(getattr(owner, name))):
    told["first"] = save(2.0, path)
    told["seconds"] = time.monotonic() - begun
begun = time.monotonic()
told["second"] = save(3.0, path)
told["again"] = time.monotonic() - begun
told["elsewhere"] = save(4.0, elsewhere)
begun = time.monotonic()
writer.close(2.0)
told["closing"] = time.monotonic() - begun
ask("thaw")
for thread in threading.enumerate():
    if thread.name in ("in-time", "clean-up"):
        thread.join()
for target in (path, elsewhere):
    state = {{"x": torch.zeros(100_000)}}
    dcp.load(state, storage_reader=TensorizerStorageReader(target))
    told[target] = [state["x"].unique().tolist(), len(os.listdir(target))]
print(json.dumps(told), flush=True)
"""


@pytest.mark.parametrize("step", ["prepare", "write", "commit"])
def test_a_save_to_a_disk_that_hangs(small_disk, tmp_path, step):
    """It fails when its timeout is over, training goes on, and nothing of it is committed late or left over."""
    disk, elsewhere = small_disk(64 << 20, "ext4"), tmp_path / "elsewhere"
    job = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", JOB, str(disk.path), str(elsewhere), step],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert job.stdin is not None and job.stdout is not None
    try:
        for word, act in (("freeze", disk.freeze), ("thaw", disk.thaw)):
            assert job.stdout.readline() == f"{word}\n"
            act()
            job.stdin.write("done\n")
            job.stdin.flush()
        output, _ = job.communicate(timeout=60)
    finally:
        disk.thaw()
        job.kill()
        job.communicate()
    told = json.loads(output)
    waited = "made no progress for 3 s" if step == "write" else "has not answered for 3 s: its disk or its server hangs"
    assert waited in told["first"] and "has not answered for 3 s" in told["second"]
    assert "twice" not in told["first"]
    assert TIMEOUT <= told["seconds"] < 20 and TIMEOUT <= told["again"] < 20  # and not for ever, on a busy machine
    assert told["elsewhere"] is None and told["closing"] < 10
    assert told[str(disk.path / "checkpoint")] == [[1.0], 2] and told[str(elsewhere)] == [[4.0], 2]
