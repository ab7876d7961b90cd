"""A disk that does not answer, as a mount whose server is gone: whoever writes there hangs in the kernel."""

import json
import subprocess

import pytest

from .. import warm
from ..lab.processes import ROOT

TIMEOUT = 3.0

# Saves; saves again while the disk freezes in a step of the save; saves elsewhere; closes. When it is thawed, it waits
# for the threads that hung, and says what is there. It asks for the frost and the thaw by a line.
JOB = f"""
import json, os, sys, threading, time
from unittest import mock
import torch
import torch.distributed.checkpoint as dcp
from dcp_tensorizer import CheckpointManager, SaveLimits, TensorizerStorageReader, TensorizerStorageWriter
from dcp_tensorizer._saving.save import Save
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
    "prepare": (Save, "prepare"),
    "write": (WriterClient, "write"),
    "commit": (Save, "finish"),
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


def run_beside(disk, job, *arguments, seconds):
    """Runs a job on a disk that is frozen and thawed when the job asks for it; returns its output and its errors."""
    process = subprocess.Popen(
        [warm.python(), "-W", "ignore", "-c", job, str(disk.path), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        for word, act in (("freeze", disk.freeze), ("thaw", disk.thaw)):
            assert process.stdout.readline() == f"{word}\n"
            act()
            process.stdin.write("done\n")
            process.stdin.flush()
        return process.communicate(timeout=seconds)
    finally:
        disk.thaw()
        process.kill()
        process.communicate()


@pytest.mark.promise("disk-hangs")
@pytest.mark.parametrize("step", ["prepare", "write", "commit"])
def test_a_save_to_a_disk_that_hangs(small_disk, tmp_path, step):
    """It fails when its timeout is over, training goes on, and nothing of it is committed late or left over."""
    disk, elsewhere = small_disk(64 << 20, "ext4"), tmp_path / "elsewhere"
    output, _ = run_beside(disk, JOB, elsewhere, step, seconds=60)
    told = json.loads(output)
    waited = (
        "made no progress for 3 s" if step == "write" else "has not responded for 3 s: its disk or its server hangs"
    )
    assert waited in told["first"] and "has not responded for 3 s" in told["second"]
    assert "twice" not in told["first"]
    assert TIMEOUT <= told["seconds"] < 20 and TIMEOUT <= told["again"] < 20  # and not for ever, on a busy machine
    assert told["elsewhere"] is None and told["closing"] < 10
    assert told[str(disk.path / "checkpoint")] == [[1.0], 2] and told[str(elsewhere)] == [[4.0], 2]


# The same with the disk in front of a remote: it freezes before the record of the save, or while data is written.
LOCAL_JOB = f"""
import logging, os, sys, threading, time
from unittest import mock
import torch
import torch.distributed.checkpoint as dcp
from dcp_tensorizer import SaveLimits, TensorizerStorageReader, TensorizerStorageWriter
from dcp_tensorizer._saving.writer_client import WriterClient
from dcp_tensorizer._tiers.queue import Queue

disk, remote, step = sys.argv[1:]
logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
owner, name = {{"record": (Queue, "begin"), "write": (WriterClient, "write")}}[step]
function, is_frozen = getattr(owner, name), False

def ask(what):
    print(what, flush=True)
    assert sys.stdin.readline() == "done\\n"

def freezing(*arguments, **options):
    global is_frozen
    if not is_frozen:
        is_frozen = True
        ask("freeze")
    return function(*arguments, **options)

writer = TensorizerStorageWriter(remote, local=os.path.join(disk, "run"), limits=SaveLimits(timeout={TIMEOUT}))
begun = time.monotonic()
with mock.patch.object(owner, name, freezing):
    dcp.async_save({{"x": torch.ones(100_000)}}, storage_writer=writer).result()
assert time.monotonic() - begun < 30
state = {{"x": torch.zeros(100_000)}}
dcp.load(state, storage_reader=TensorizerStorageReader(remote))
assert state["x"].unique().tolist() == [1.0]
ask("thaw")
for thread in threading.enumerate():
    if thread.name in ("in-time", "clean-up"):
        thread.join()
dcp.async_save({{"x": 2 * torch.ones(100_000)}}, storage_writer=writer).result()
assert writer.wait_remote(30)
writer.close()
dcp.load(state, storage_reader=TensorizerStorageReader(remote))
print(state["x"].unique().tolist(), len(os.listdir(remote)), flush=True)
"""


@pytest.mark.parametrize("step", ["record", "write"])
def test_a_local_disk_that_hangs_is_passed_by(small_disk, tmp_path, step):
    """The save is on the remote after its timeout, and the next one goes by the disk again."""
    disk = small_disk(64 << 20, "ext4")
    output, errors = run_beside(disk, LOCAL_JOB, tmp_path / "remote", step, seconds=90)
    assert output == "[2.0] 2\n"
    assert errors.count("; saving to ") == 1
