"""A forked child that has its parent's writer, or manager: what it does with them is no business of the parent's."""

import os

import pytest
import torch

from dcp_tensorizer import CheckpointManager

from ..lab.processes import run_python
from ..lab.ranks import run_ranks
from .kept_state import sharded_state, values_at, values_of

# The child is forked while a save waits for the writer process, with the locks that belong to that.
JOB = """
import gc, os, signal, sys
import torch
import torch.distributed.checkpoint as dcp
from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter
from dcp_tensorizer._runtime.interpreter import collector_paused

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
    process = writer.saver.engine.client._process.pid
    os.kill(process, signal.SIGSTOP)
    future = dcp.async_save(state(2), storage_writer=writer)
    while not writer.saver.engine.client._process._lock.locked():
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
            assert writer.saver.engine.client._process.pid != process
            assert loaded("child") == [3.0]
    else:
        assert os.waitpid(child, 0)[1] == 0
        os.kill(process, signal.SIGCONT)
        future.result()
        assert writer.last_report.attempts == 1
        assert writer.saver.engine.client._process.pid == process
if child != 0:
    assert loaded("parent") == [2.0]
    print("fine")
"""


@pytest.mark.promise("child-saves-by-writer")
@pytest.mark.promise("child-closes-writer")
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
    own = writer.saver.engine
    assert own is not engine

    def grandchild():
        assert writer.saver.engine is not own
        assert writer.saver.engine is engine_of_process(devices=False)
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


# The parent's save waits for a writer process that is stopped, and a keeper has a newer state than storage.
JOB_OF_MANAGER = """
import atexit, multiprocessing, os, signal, subprocess, sys
import torch
from torch.utils.data import DataLoader
from dcp_tensorizer import CheckpointManager, WriteError
from tests.e2e.forked import left_of_parent

folder = sys.argv[1]

def state(value):
    return {"w": torch.full((1000,), float(value))}

def restores():
    target = state(0)
    assert manager.restore(target) == 2
    assert target["w"].unique().tolist() == [2.0]
    assert (manager.steps(), manager.latest(), manager.best()) == ([2], 2, 2)
    assert manager.path(2).endswith("step-2")
    restores_in_child_of_child = os.fork()
    if restores_in_child_of_child == 0:
        assert manager.restore(state(0), 2) == 2
        os._exit(0)
    assert os.waitpid(restores_in_child_of_child, 0)[1] == 0

def is_refused():
    for call in (lambda: manager.save(6, state(6)), tiered.wait_remote):
        try:
            call()
        except WriteError as error:
            assert "forked child" in str(error) and folder in str(error)
        else:
            raise AssertionError

def closes():
    manager.wait()
    manager.close()
    manager.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    tiered.close()

def has_released():
    left, seen = left_of_parent()
    assert left == [], left
    assert min(seen.values()) >= 2, seen

def leaves():
    sys.exit(0)

def leaves_at_exit():
    atexit.register(manager.close)
    raise SystemExit

def fails():
    raise KeyError

def is_told_to_end():
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()

def saves_by_itself():
    with CheckpointManager(os.path.join(folder, "own")) as own:
        own.save(1, state(1), wait=True)
        assert own.restore(state(0)) == 1

CHILDREN = {
    restores: 0, is_refused: 0, closes: 0, has_released: 0, leaves: 0, leaves_at_exit: 0, fails: 1, saves_by_itself: 0,
    is_told_to_end: -signal.SIGTERM,
}

tiered = CheckpointManager(os.path.join(folder, "remote"), local=os.path.join(folder, "local"))
tiered.save(1, state(1), wait=True)
options = {"save_every": 2, "keep_best": "loss", "survive": 60, "survive_every": 1}
with CheckpointManager(os.path.join(folder, "kept"), **options) as manager:
    manager.save(2, state(2), metrics={"loss": 1.0}, wait=True)
    process = manager._writer.saver.engine.client._process
    os.kill(process.pid, signal.SIGSTOP)
    future = manager.save(4, state(4), metrics={"loss": 2.0})
    while not process._lock.locked():
        pass
    sockets = os.listdir(sys.argv[2])
    for act, expected in CHILDREN.items():
        child = os.fork()
        if child == 0:
            act()
            os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if ended != expected:
            os.kill(process.pid, signal.SIGCONT)  # or leaving the block would wait for it
            raise AssertionError(f"a child that {act.__name__}: {ended}")
    assert [int(item) for item in DataLoader([1, 2], num_workers=1, multiprocessing_context="fork")] == [1, 2]
    worker = multiprocessing.get_context("fork").Process(target=closes)
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    subprocess.run(["true"], preexec_fn=closes, check=True)
    assert os.listdir(sys.argv[2]) == sockets and not future.done()
    os.kill(process.pid, signal.SIGCONT)
    future.result()
    tiered.close()
    manager.wait()
    assert manager.steps() == [2, 4]
    manager.save(5, state(5))
    manager._survival.wait_held()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.promise("child-sigterm")
@pytest.mark.promise("child-saves-by-manager")
@pytest.mark.promise("child-closes-manager")
def test_a_child_leaves_its_parents_manager_alone(tmp_path, keepers):
    """However it ends, whatever it asks: the save goes on, and so does what is kept in memory, for the next run."""
    with pytest.raises(AssertionError, match="exit code -9"):
        run_python(JOB_OF_MANAGER, tmp_path, keepers)
    target = {"w": torch.zeros(1000)}
    with CheckpointManager(tmp_path / "kept", survive=60) as manager:
        assert manager.restore(target) == 5
        assert target["w"].unique().tolist() == [5.0]
        manager.save(6, target, wait=True)


def _restores_in_child(rank, folder):
    with CheckpointManager(folder) as manager:
        manager.save(1, sharded_state(rank, 1), wait=True)
        if rank == 0:
            child = os.fork()
            if child == 0:
                state = sharded_state(rank, 0)
                assert manager.restore(state) == 1
                assert values_of(state) == values_at(1)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        manager.save(2, sharded_state(rank, 2), wait=True)
        return manager.steps()


@pytest.mark.promise("child-restores")
def test_the_child_of_a_rank_restores_without_the_other_ranks(tmp_path):
    """Their connections are the parent's, and no rank waits for the child."""
    assert run_ranks(2, _restores_in_child, tmp_path) == [[1, 2], [1, 2]]
