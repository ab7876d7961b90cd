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


# Children of a process whose writers have been dropped, as frameworks drop them, and children of such children.
GENERATIONS = """
import os, sys
import torch
import torch.distributed.checkpoint as dcp
from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter
from dcp_tensorizer._saving.engine import engine_of_process

folder = sys.argv[1]

def forked(child):
    pid = os.fork()
    if pid == 0:
        try:
            child()
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0

def save(writer, name):
    path = os.path.join(folder, name)
    dcp.async_save({"w": torch.arange(1000)}, storage_writer=writer, checkpoint_id=path).result()
    target = {"w": torch.zeros(1000, dtype=torch.int64)}
    dcp.load(target, storage_reader=TensorizerStorageReader(path))
    assert target["w"].equal(torch.arange(1000))

TensorizerStorageWriter().prewarm({"w": torch.arange(1000)})
engine = engine_of_process(devices=False)
engine.saves.wait_prewarmed()
process = engine.client._process
forked(lambda: None)
assert process.alive

writer = TensorizerStorageWriter()

def child():
    save(writer, "child")
    own = writer._saver.engine
    assert own is not engine

    def grandchild():
        assert writer._saver.engine is not own
        assert writer._saver.engine is engine_of_process(devices=False)
        save(writer, "grandchild")

    forked(grandchild)
    assert own.client._process.alive

forked(child)
save(writer, "parent")
assert engine.client._process is process
print("fine")
"""


def test_children_of_children_have_engines_of_their_own(tmp_path):
    """They neither end their parent's writer process nor use its buffers, also where nobody holds a writer."""
    assert run_python(GENERATIONS, tmp_path).stdout == "fine\n"
