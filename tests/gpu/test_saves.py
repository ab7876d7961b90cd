"""Saves of GPU state through DCP, by each way of staging, and what they cost the GPU."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter
from dcp_tensorizer._writer_process.client import WriterProcess
from dcp_tensorizer._writer_process.protocol import SnapshotRequest

from ..lab.processes import writer_process
from .support import GPU, WAIT, delay, gpu_devices_open, load_into, random_state

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    # torch says this once in a process, if cuBLAS is what a thread uses the GPU for first, as autograd's does.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]


@pytest.mark.parametrize("staging", ["buffer", "shared", "device"])
def test_overlapped_saves_hold_the_step_they_were_asked_for(tmp_path: Path, staging: str) -> None:
    """Ten saves, each followed at once by a step under `lock` behind a long kernel."""
    state = {"w": torch.zeros(1_000_000, device=GPU), "small": torch.zeros(3, device=GPU), "host": torch.zeros(5)}
    with TensorizerStorageWriter(staging=staging, overlap_staging=True) as writer:
        for step in range(10):
            with writer.lock():
                delay()
                for tensor in state.values():
                    tensor.fill_(float(step))
            dcp.async_save(state, storage_writer=writer, checkpoint_id=tmp_path / str(step))
    for step in range(10):
        found = load_into(tmp_path / str(step), {key: torch.zeros_like(tensor) for key, tensor in state.items()})
        assert {key: set(tensor.tolist()) for key, tensor in found.items()} == {key: {float(step)} for key in state}


def test_a_save_without_staging_has_what_the_callers_stream_holds(tmp_path: Path) -> None:
    """`dcp.save` reads the tensors by threads of its own, whose streams wait for nothing."""
    weights = torch.zeros(1_000_000, device=GPU)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream(GPU)), TensorizerStorageWriter(tmp_path) as writer:
        delay()
        weights.fill_(1.0)
        dcp.save({"w": weights}, storage_writer=writer)
    assert set(load_into(tmp_path, {"w": torch.zeros(1_000_000)})["w"].tolist()) == {1.0}


@pytest.mark.parametrize("staging", ["buffer", "device"])
def test_staging_completion_says_when_gpu_tensors_may_change(tmp_path: Path, staging: str) -> None:
    """They are changed right after it, by the host's word alone."""
    state = random_state(20, 500_000)
    expected = {key: tensor.cpu() for key, tensor in state.items()}
    with TensorizerStorageWriter(tmp_path, staging=staging, overlap_staging=True) as writer:
        response = dcp.async_save(state, storage_writer=writer)
        response.staging_completion.result(WAIT)
        torch._foreach_zero_(list(state.values()))
        response.upload_completion.result(WAIT)
    found = load_into(tmp_path, {key: torch.zeros_like(tensor) for key, tensor in expected.items()})
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


def test_the_writer_process_has_no_context(tmp_path: Path) -> None:
    """It holds no GPU memory: it has not even opened a GPU."""
    with TensorizerStorageWriter(tmp_path) as writer:
        dcp.async_save(random_state(3, 1000), storage_writer=writer).result(WAIT)
        assert gpu_devices_open(writer_process().pid) == []


def test_device_staging_makes_a_context_in_the_writer_process_and_no_copy_here(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The process copies by handles: without a warning that the trainer had to; the buffer is not pinned here."""
    state = random_state(3, 100_000)
    with TensorizerStorageWriter(tmp_path, staging="device") as writer:
        staged = writer.stage(state)
        staged.staged_save.wait_copied()
        assert torch.equal(dict(staged)["t1"], state["t1"].cpu())
        assert not dict(staged)["t1"].is_pinned()
        assert gpu_devices_open(writer_process().pid) != []
        del staged
    assert "could not copy from the GPU" not in caplog.text


def test_handles_are_given_back(tmp_path: Path) -> None:
    """Saves of tensors that are freed after each leave no GPU memory behind, and those of lasting ones no more each."""
    lasting = random_state(5, 1_000_000)
    views = torch.rand(1000, 1000, device=GPU)
    with TensorizerStorageWriter(tmp_path, staging="device") as writer:
        used = []
        for number in range(6):
            state = lasting | {f"fresh{n}": torch.rand(1_000_000, device=GPU) for n in range(5)}
            state |= {"row": views[7], "bent": views.t(), "same": views}
            dcp.async_save(state, storage_writer=writer).result(WAIT)
            found = load_into(tmp_path, {key: torch.zeros_like(tensor) for key, tensor in state.items()})
            assert [key for key in state if not torch.equal(found[key], state[key])] == [], number
            del state, found
            gc.collect()
            torch.cuda.ipc_collect()
            used.append(torch.cuda.memory_allocated())
    assert used[1:] == [used[1]] * 5


def test_a_writer_process_that_dies_in_a_snapshot_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The trainer copies by itself, the save succeeds, the next one goes by handles again, and no memory is lost."""
    lasting = random_state(3, 100_000)
    ask = WriterProcess.ask

    def dying(process: WriterProcess, request: Any, *arguments: Any) -> Any:
        if not isinstance(request, SnapshotRequest):
            return ask(process, request, *arguments)
        process._popen.send_signal(signal.SIGSTOP)  # so that it is still there when the request is sent
        threading.Timer(1.0, process._popen.kill).start()
        return ask(process, request, *arguments)

    with TensorizerStorageWriter(tmp_path, staging="device") as writer:
        used = []
        for number in range(4):
            state = lasting | {"fresh": torch.rand(10_000_000, device=GPU)}
            with monkeypatch.context() as patch:
                if number == 1:
                    patch.setattr(WriterProcess, "ask", dying)
                dcp.async_save(state, storage_writer=writer).result(WAIT)
            found = load_into(tmp_path, {key: torch.zeros_like(tensor) for key, tensor in state.items()})
            assert all(torch.equal(found[key], state[key]) for key in state)
            del state, found
            gc.collect()
            torch.cuda.ipc_collect()
            used.append(torch.cuda.memory_allocated())
    assert caplog.text.count("could not copy from the GPU") == 1
    assert used == [used[0]] * 4


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.new_group(backend="gloo")
    dist.destroy_process_group()


@pytest.mark.parametrize("staging", ["buffer", "device"])
def test_a_sharded_model_and_its_optimizer_come_back(tmp_path: Path, group: dist.ProcessGroup, staging: str) -> None:
    """FSDP2 on a GPU with AdamW, saved while the next step runs, loaded onto the GPU."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)).to(GPU)
    fully_shard(model, mesh=init_device_mesh("cuda", (1,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with TensorizerStorageWriter(tmp_path, staging=staging, overlap_staging=True) as writer:
        model(torch.rand(8, 512, device=GPU)).sum().backward()
        optimizer.step()
        weights, states = get_state_dict(model, optimizer)
        expected = {key: tensor.full_tensor().cpu() for key, tensor in weights.items()}
        response = dcp.async_save({"m": weights, "o": states}, storage_writer=writer, process_group=group)
        model(torch.rand(8, 512, device=GPU)).sum().backward()
        with writer.lock():
            optimizer.step()
        response.upload_completion.result(WAIT)
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"m": weights, "o": states}, storage_reader=TensorizerStorageReader(tmp_path), process_group=group)
    found = {key: tensor.full_tensor().cpu() for key, tensor in weights.items()}
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
