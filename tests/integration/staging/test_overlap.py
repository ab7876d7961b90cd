"""What training may do during a save, with each way of staging: through DCP, in one process, to real files."""

import errno
import logging
import os
import threading
import types
from concurrent.futures import Future

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from dcp_tensorizer import StagingError, TensorizerStorageReader, TensorizerStorageWriter
from dcp_tensorizer._staging import stager as stager_module
from dcp_tensorizer._staging.staged_save import StagedSave
from dcp_tensorizer._staging.stager import Stager

from ...lab.waiting import WAIT, Gate, HeldTensor, hold_memory, in_thread, save_thread, wait_until_inside

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def loaded(path):
    state = {"w": torch.zeros(1000), "b": torch.zeros(10), "step": None}
    dcp.load(state, storage_reader=TensorizerStorageReader(path))
    return set(state["w"].tolist()), set(state["b"].tolist()), state["step"]


class HoldingPlanner(DefaultSavePlanner):
    """A planner that blocks the save when it resolves the first tensor."""

    def __init__(self):
        super().__init__()
        self.gate = Gate()

    def resolve_data(self, write_item):
        self.gate.pass_through()
        return super().resolve_data(write_item)


@pytest.fixture
def memory(monkeypatch):
    """Blocks the allocation of shared buffers."""
    gate = Gate()
    hold_memory(monkeypatch, gate.pass_through)
    return gate


def test_by_default_async_save_returns_when_everything_is_copied(tmp_path):
    """The result is a plain future. The state may change before the save has written anything."""
    state = {"w": torch.ones(1000), "b": torch.ones(10), "step": 1}
    planner = HoldingPlanner()
    with TensorizerStorageWriter(tmp_path) as writer:
        future = dcp.async_save(state, storage_writer=writer, planner=planner)
        assert isinstance(future, Future)
        with writer.lock():
            state["w"].zero_()
        writer.synchronize_staging()
        planner.gate.open()
        future.result(WAIT)
    assert loaded(tmp_path) == ({1.0}, {1.0}, 1)


@pytest.mark.promise("copied-when-returned", reason="with overlap_staging")
def test_overlapped_staging_shows_when_the_state_may_change(tmp_path):
    """`async_save` returns before the copies; `staging_completion` and `lock` wait for them."""
    copying = Gate()
    weight = HeldTensor(torch.ones(1000), copying.pass_through)
    state = {"w": weight, "b": torch.ones(10), "step": 1}
    with TensorizerStorageWriter(tmp_path, overlap_staging=True) as writer:
        response = dcp.async_save(state, storage_writer=writer)
        assert isinstance(response, AsyncSaveResponse)
        stepped = threading.Event()

        def step():
            with writer.lock():
                weight.zero_()
            stepped.set()

        training = in_thread(step)
        copying.wait_reached()
        wait_until_inside(training, step)
        assert not stepped.is_set()
        assert not response.staging_completion.done()
        copying.open()
        assert stepped.wait(WAIT)
        training.join(WAIT)
        response.staging_completion.result(WAIT)
        response.upload_completion.result(WAIT)
    assert loaded(tmp_path) == ({1.0}, {1.0}, 1)
    assert set(weight.plain.tolist()) == {0.0}


@pytest.mark.parametrize("wait", [StagedSave.wait_built, StagedSave.hold_training, StagedSave.wait_copied])
def test_copying_begins_when_a_thread_waits_for_it(wait, monkeypatch):
    """Before that, `async_save` has the interpreter for itself, and returns."""
    monkeypatch.setattr(stager_module, "_RETURN_SECONDS", WAIT)
    stager = Stager(overlap_staging=True)
    result = stager.stage({"w": torch.ones(1000)})
    staged_save = result.staged_save
    assert staged_save.stager.is_alive()
    assert staged_save.buffer is None
    wait(staged_save)
    staged_save.stager.join(WAIT)
    assert dict(result)["w"].tolist() == [1.0] * 1000
    del result
    stager.saves.close()


def test_a_held_optimizer_waits_before_its_step(tmp_path):
    """The loop needs no change. When the handle is removed, the step no longer waits."""
    copying = Gate()
    parameter = torch.nn.Parameter(torch.ones(1000))
    weight = HeldTensor(parameter.detach(), copying.pass_through)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.ones(1000)
    with TensorizerStorageWriter(tmp_path, overlap_staging=True) as writer:
        handle = writer.hold_optimizer(optimizer)
        response = dcp.async_save({"w": weight, "b": torch.ones(10), "step": 1}, storage_writer=writer)
        training = in_thread(optimizer.step)
        copying.wait_reached()
        wait_until_inside(training, Stager.hold_training)
        assert set(parameter.tolist()) == {1.0}
        copying.open()
        training.join(WAIT)
        response.upload_completion.result(WAIT)
        assert set(parameter.tolist()) == {0.0}
        handle.remove()
        assert not optimizer._optimizer_step_pre_hooks
    assert loaded(tmp_path) == ({1.0}, {1.0}, 1)


class Looking(DefaultSavePlanner):
    """A planner that reads a tensor when it plans."""

    def create_local_plan(self):
        self.seen = set(self.state_dict["w"].tolist())
        return super().create_local_plan()


def test_training_does_not_wait_for_memory(tmp_path, memory):
    """`async_save` returns before a buffer exists, and has copied containers and objects."""
    region = types.SimpleNamespace(lr=1)
    state = {"w": torch.ones(1000), "b": torch.ones(10), "step": 1, "nested": {"lrs": [1, 2], "region": region}}
    with TensorizerStorageWriter(tmp_path, overlap_staging=True) as writer:
        response = dcp.async_save(state, storage_writer=writer)
        memory.wait_reached()
        region.lr = 7
        state["nested"]["lrs"].append(3)
        del state["b"]
        memory.open()
        response.upload_completion.result(WAIT)
    assert loaded(tmp_path) == ({1.0}, {1.0}, 1)
    target = {"nested": {"lrs": [None, None], "region": None}}
    dcp.load(target, storage_reader=TensorizerStorageReader(tmp_path, allow_pickle=True))
    assert (target["nested"]["lrs"], target["nested"]["region"].lr) == ([1, 2], 1)


def test_closing_waits_for_a_save_that_has_no_memory_yet(tmp_path, memory):
    """The save begins, and is over when `close` returns."""
    state = {"w": torch.ones(1000), "b": torch.ones(10), "step": 1}
    writer = TensorizerStorageWriter(tmp_path, overlap_staging=True)
    response = dcp.async_save(state, storage_writer=writer)
    memory.wait_reached()
    closing = in_thread(writer.close)
    wait_until_inside(closing, TensorizerStorageWriter.close)
    memory.open()
    closing.join(WAIT)
    assert response.upload_completion.done()
    assert loaded(tmp_path) == ({1.0}, {1.0}, 1)


class Opening(logging.Handler):
    """A log handler that opens a gate when a save is abandoned."""

    def __init__(self, gate):
        super().__init__()
        self.gate = gate

    def emit(self, record):
        if "is abandoned" in record.getMessage():
            self.gate.open()


def test_closing_in_time_abandons_a_save_that_has_no_memory_yet(tmp_path, memory):
    """`close` returns at its timeout, and logs the abandoned save."""
    writer = TensorizerStorageWriter(tmp_path, overlap_staging=True)
    response = dcp.async_save({"w": torch.ones(1000)}, storage_writer=writer)
    handler = Opening(memory)
    logging.getLogger("dcp_tensorizer").addHandler(handler)
    try:
        writer.close(timeout=0.01)
    finally:
        logging.getLogger("dcp_tensorizer").removeHandler(handler)
    assert memory.opened.is_set()
    with pytest.raises(CheckpointException):
        response.upload_completion.result(WAIT)


def test_no_memory_for_an_overlapped_save_is_its_error(tmp_path, monkeypatch):
    """Training continues, the future has the cause, and the next save succeeds."""
    state = {"w": torch.ones(1000), "b": torch.ones(10), "step": 1}

    def refuse():
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with TensorizerStorageWriter(tmp_path, overlap_staging=True) as writer:
        with monkeypatch.context() as patch:
            hold_memory(patch, refuse)
            response = dcp.async_save(state, storage_writer=writer)
            with writer.lock():
                pass
            response.staging_completion.result(WAIT)
            with pytest.raises(CheckpointException, match=r"the staging buffer.*Cannot allocate memory"):
                response.upload_completion.result(WAIT)
        dcp.async_save(state, storage_writer=writer).upload_completion.result(WAIT)
    assert loaded(tmp_path) == ({1.0}, {1.0}, 1)


def test_a_planner_gets_complete_values(tmp_path):
    """A planner may read the values of tensors when it plans."""
    copying = Gate()
    state = {"w": HeldTensor(torch.ones(1000), copying.pass_through), "b": torch.ones(10), "step": 1}
    planner = Looking()
    with TensorizerStorageWriter(tmp_path, overlap_staging=True) as writer:
        before = set(threading.enumerate())
        response = dcp.async_save(state, storage_writer=writer, planner=planner)
        copying.wait_reached()
        wait_until_inside(save_thread(before), StagedSave.wait_copied)
        copying.open()
        response.upload_completion.result(WAIT)
    assert planner.seen == {1.0}
    assert loaded(tmp_path) == ({1.0}, {1.0}, 1)


def test_a_training_loop_with_lock_saves_every_step_as_it_was(tmp_path):
    """Eight saves, each overlapping with the next step, have the values of their own step."""
    state = {"w": torch.zeros(1000), "b": torch.zeros(10), "step": 0}
    with TensorizerStorageWriter(overlap_staging=True) as writer:
        for step in range(8):
            with writer.lock():
                state["w"].fill_(step)
                state["b"].fill_(step)
            state["step"] = step
            dcp.async_save(state, storage_writer=writer, checkpoint_id=tmp_path / str(step))
    saved = [loaded(tmp_path / str(step)) for step in range(8)]
    assert saved == [({float(step)}, {float(step)}, step) for step in range(8)]


def test_an_error_while_copying_fails_the_save_and_releases_training(tmp_path):
    """The step continues, the future has the cause, and the next save works."""
    state = {"w": torch.ones(1000), "b": torch.ones(10), "step": 1}

    def fail():
        raise RuntimeError("unspecified launch failure")

    with TensorizerStorageWriter(tmp_path, overlap_staging=True) as writer:
        response = dcp.async_save(state | {"w": HeldTensor(torch.ones(1000), fail)}, storage_writer=writer)
        response.staging_completion.result(WAIT)
        with pytest.raises(CheckpointException) as caught:
            response.upload_completion.result(WAIT)
        error = caught.value.failures[0][0]
        assert isinstance(error, StagingError)
        assert "unspecified launch failure" in str(error)
        dcp.async_save(state, storage_writer=writer).upload_completion.result(WAIT)
    assert loaded(tmp_path) == ({1.0}, {1.0}, 1)


def test_the_save_raises_an_error_of_staging(tmp_path):
    """The error is known at once, and DCP gives it to all ranks."""
    with TensorizerStorageWriter(tmp_path, overlap_staging=True) as writer:
        response = dcp.async_save({"lock": threading.Lock()}, storage_writer=writer)
        response.staging_completion.result(WAIT)
        with pytest.raises(CheckpointException) as caught:
            response.upload_completion.result(WAIT)
    assert "'lock'" in str(caught.value.failures[0][0])


def test_closing_waits_for_an_overlapped_save(tmp_path):
    """A save whose response is dropped is complete when the writer is closed."""
    state = {"w": torch.ones(1000), "b": torch.ones(10), "step": 1}
    with TensorizerStorageWriter(tmp_path, overlap_staging=True) as writer:
        dcp.async_save(state, storage_writer=writer)
    assert loaded(tmp_path) == ({1.0}, {1.0}, 1)


# --- shared memory, in place -----------------------------------------------------------------------------------------


def test_shared_tensors_are_written_in_place(tmp_path):
    """Only other tensors are copied. Shared tensors may change after they are written."""
    state = {"w": torch.ones(1000).share_memory_(), "b": torch.ones(10), "step": 1}
    with TensorizerStorageWriter(tmp_path, staging="shared") as writer:
        staged = writer.stage(state)
        copied = dict(staged)
        assert copied["w"].data_ptr() == state["w"].data_ptr()
        assert copied["b"].data_ptr() != state["b"].data_ptr()
        assert staged.staged_save.buffer.nbytes == 4096
        del staged, copied
        future = dcp.async_save(state, storage_writer=writer)
        with writer.lock():
            state["w"].zero_()
            state["b"].zero_()
        future.result(WAIT)
        assert writer.last_report.attempts == 1
    assert loaded(tmp_path) == ({1.0}, {1.0}, 1)


def test_shared_tensors_are_released_when_they_are_written(tmp_path):
    """With overlap, `staging_completion` is done then, not before."""
    state = {"w": torch.ones(1000).share_memory_(), "b": torch.ones(10), "step": 1}
    planner = HoldingPlanner()
    with TensorizerStorageWriter(tmp_path, staging="shared", overlap_staging=True) as writer:
        response = dcp.async_save(state, storage_writer=writer, planner=planner)
        planner.gate.wait_reached()
        assert not response.staging_completion.done()
        state["b"].zero_()  # which was copied
        planner.gate.open()
        response.staging_completion.result(WAIT)
        state["w"].zero_()
        response.upload_completion.result(WAIT)
    assert loaded(tmp_path) == ({1.0}, {1.0}, 1)


def test_without_overlap_async_save_returns_when_shared_tensors_are_written(tmp_path):
    """With each way of staging, the state may change after `async_save`."""
    state = {"w": torch.ones(1000).share_memory_(), "b": torch.ones(10), "step": 1}
    with TensorizerStorageWriter(staging="shared") as writer:
        for step in range(5):
            for tensor in (state["w"], state["b"]):
                tensor.fill_(step)
            dcp.async_save(state, storage_writer=writer, checkpoint_id=tmp_path / str(step))
    assert [loaded(tmp_path / str(s))[:2] for s in range(5)] == [({float(s)}, {float(s)}) for s in range(5)]


def test_a_save_that_fails_before_it_writes_releases_shared_tensors(tmp_path):
    """Training does not wait for a save that is over."""
    state = {"w": torch.ones(1000).share_memory_(), "b": torch.ones(10), "step": 1}
    (tmp_path / "file").write_text("not a directory")
    with TensorizerStorageWriter(tmp_path / "file" / "checkpoint", staging="shared", overlap_staging=True) as writer:
        response = dcp.async_save(state, storage_writer=writer)
        response.staging_completion.result(WAIT)
        with pytest.raises(CheckpointException):
            response.upload_completion.result(WAIT)


def test_many_shared_tensors_need_no_descriptors_of_their_own(tmp_path):
    """Two thousand shared tensors and views of one storage are saved."""
    flat = torch.arange(100_000, dtype=torch.float32).share_memory_()
    state = {f"v{n}": flat[n * 50 : n * 50 + 50] for n in range(2000)}
    state |= {f"s{n}": torch.full((3,), float(n)).share_memory_() for n in range(200)}
    with TensorizerStorageWriter(tmp_path, staging="shared") as writer:
        dcp.async_save(state, storage_writer=writer).result(WAIT)
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    dcp.load(target, storage_reader=TensorizerStorageReader(tmp_path))
    assert [key for key in state if not torch.equal(state[key], target[key])] == []


def test_unknown_ways_of_staging_are_refused(tmp_path):
    """Unknown ways, and options that cannot be combined, raise in the constructor."""
    with pytest.raises(ValueError, match="'buffer', 'device', 'shared'"):
        TensorizerStorageWriter(tmp_path, staging="fast")


def test_shared_memory_cannot_be_encrypted(tmp_path):
    """A tensor that changes between two readings would use one key stream twice."""
    from tensorizer import EncryptionParams

    with pytest.raises(ValueError, match="encryption"):
        TensorizerStorageWriter(tmp_path, staging="shared", encryption=EncryptionParams.random())


def test_device_staging_of_host_tensors(tmp_path):
    """Without tensors on a GPU, `staging='device'` copies as `'buffer'` does."""
    state = {"w": torch.ones(1000), "b": torch.ones(10), "step": 1}
    with TensorizerStorageWriter(tmp_path, staging="device", overlap_staging=True) as writer:
        response = dcp.async_save(state, storage_writer=writer)
        response.staging_completion.result(WAIT)
        state["w"].zero_()
        response.upload_completion.result(WAIT)
    assert loaded(tmp_path) == ({1.0}, {1.0}, 1)
