"""A forked child that has its parent's writer: to close it, or to save with it, is no business of the parent's."""

import pytest

from ..support import run_python

# The child is forked while a save waits for the writer process, with the locks that belong to that.
JOB = """
import gc, os, signal, sys
import torch
import torch.distributed.checkpoint as dcp
from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter
from dcp_tensorizer._memory.garbage import collector_paused

folder = sys.argv[1]

def state(value):
    return {"w": torch.full((1000,), float(value))}

def loaded(name):
    target = state(0)
    dcp.load(target, storage_reader=TensorizerStorageReader(os.path.join(folder, name)))
    return target["w"].unique().tolist()

def links():
    for name in os.listdir("/proc/self/fd"):
        if os.path.lexists(f"/proc/self/fd/{name}"):
            yield os.readlink(f"/proc/self/fd/{name}")

with TensorizerStorageWriter(os.path.join(folder, "parent")) as writer:
    dcp.async_save(state(1), storage_writer=writer).result()
    process = writer._saver.engine.client._process.pid
    os.kill(process, signal.SIGSTOP)
    future = dcp.async_save(state(2), storage_writer=writer)
    while not writer._saver.engine.client._process._lock.locked():
        pass
    with collector_paused():
        child = os.fork()
    if child == 0:
        assert gc.get_threshold()[0] != 0
        assert [link for link in links() if "socket" in link or "dcp_tensorizer" in link] == []
        if sys.argv[2] == "closes":
            writer.close()
            writer.close()
            os._exit(0)
        if sys.argv[2] == "saves":
            dcp.async_save(state(3), storage_writer=writer, checkpoint_id=os.path.join(folder, "child")).result()
            assert writer._saver.engine.client._process.pid != process
            assert loaded("child") == [3.0]
    else:
        assert os.waitpid(child, 0)[1] == 0
        os.kill(process, signal.SIGCONT)
        future.result()
        assert writer.last_report.attempts == 1
        assert writer._saver.engine.client._process.pid == process
if child != 0:
    assert loaded("parent") == [2.0]
    print("fine")
"""


@pytest.mark.parametrize("what", ["closes", "leaves the block", "saves"])
def test_a_child_leaves_its_parents_writer_alone(tmp_path, what):
    """It does not hang, and the parent's save goes on with the process that it was given to."""
    assert run_python(JOB, tmp_path, what).stdout == "fine\n"
