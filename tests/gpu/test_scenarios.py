"""Situations of a job on a GPU: its allocator's settings, CUDA graphs, a fault, forks, an exchange."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import torch

from dcp_tensorizer._staging.stager import Stager

from .support import GPU, WAIT


def run_script(script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in a process of its own, with ``folder`` as its argument."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT, env=os.environ | variables)


def test_saves_work_with_expandable_segments(tmp_path: Path) -> None:
    """With the buffer they do; handles to such memory are refused, and the variable is named."""
    script = """
        import sys, torch, torch.distributed.checkpoint as dcp
        from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter
        state = {f"t{n}": torch.rand(300_000 + n, device="cuda") for n in range(20)}
        with TensorizerStorageWriter(sys.argv[1], overlap_staging=True) as writer:
            response = dcp.async_save(state, storage_writer=writer)
            response.upload_completion.result(100)
        loaded = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
        dcp.load(loaded, storage_reader=TensorizerStorageReader(sys.argv[1]))
        print(all(torch.equal(loaded[key], state[key]) for key in state))
        try:
            TensorizerStorageWriter(sys.argv[1], staging="device")
        except ValueError as error:
            print("expandable_segments:True" in str(error))
    """
    done = run_script(script, tmp_path, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_a_graph_is_replayed_while_a_state_is_staged() -> None:
    """A captured step that changes the state waits for the copies when it is replayed behind `hold_training`."""
    weight, step = torch.zeros(4_000_000, device=GPU), torch.ones(4_000_000, device=GPU)
    side = torch.cuda.Stream(GPU)
    side.wait_stream(torch.cuda.current_stream(GPU))
    with torch.cuda.stream(side):
        weight.add_(step)
    torch.cuda.current_stream(GPU).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        weight.add_(step)
    weight.zero_()
    stager = Stager(overlap_staging=True)
    for number in range(5):
        result = stager.stage({"w": weight})
        stager.hold_training()
        graph.replay()
        result.staged_save.wait_copied()
        assert set(dict(result)["w"].unique().tolist()) == {float(number)}
        del result
    stager.saves.close()


def test_a_save_after_a_fault_on_the_gpu_fails_and_the_writer_closes(tmp_path: Path) -> None:
    """A device-side assert breaks the context: the save says so, nothing hangs, and the checkpoint before stays."""
    script = """
        import sys, torch, torch.distributed.checkpoint as dcp
        from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter, unwrap
        state = {"w": torch.ones(1_000_000, device="cuda")}
        writer = TensorizerStorageWriter(sys.argv[1])
        dcp.async_save(state, storage_writer=writer).result(100)
        index = torch.tensor([1_000_000_000], device="cuda")
        state["w"][index]
        try:
            dcp.async_save(state, storage_writer=writer).result(100)
        except BaseException as error:
            print(type(unwrap(error)).__name__)
        writer.close(30)
        print("closed")
        loaded = {"w": torch.zeros(1_000_000)}
        dcp.load(loaded, storage_reader=TensorizerStorageReader(sys.argv[1]))
        print(set(loaded["w"].tolist()) == {1.0})
    """
    done = run_script(script, tmp_path)
    assert done.stdout.split()[-2:] == ["closed", "True"], done.stderr
    assert done.stdout.split()[0].endswith("Error")


def test_workers_of_a_data_loader_fork_during_a_save(tmp_path: Path) -> None:
    """They have nothing of the pinned buffer, and end without a trace in it."""
    script = """
        import sys, torch, torch.distributed.checkpoint as dcp
        from torch.utils.data import DataLoader, TensorDataset
        from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter
        state = {f"t{n}": torch.rand(2_000_000, device="cuda") for n in range(20)}
        loader = DataLoader(TensorDataset(torch.arange(100.0)), batch_size=10, num_workers=2)
        with TensorizerStorageWriter(sys.argv[1], overlap_staging=True) as writer:
            for _ in range(3):
                response = dcp.async_save(state, storage_writer=writer)
                total = sum(float(batch.sum()) for (batch,) in loader)
                response.upload_completion.result(100)
        loaded = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
        dcp.load(loaded, storage_reader=TensorizerStorageReader(sys.argv[1]))
        print(total == 4950.0, all(torch.equal(loaded[key], state[key]) for key in state))
    """
    done = run_script(script, tmp_path)
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_what_an_exchange_has_brought_is_there_for_every_stream(tmp_path: Path) -> None:
    """Over NCCL the copies to the targets are queued on the caller's stream: a load returns when they are made."""
    script = """
        import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
        from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
        state = {f"t{n}": torch.rand(5_000_000, device="cuda") for n in range(10)}
        with TensorizerStorageWriter(sys.argv[1]) as writer:
            dcp.save(state, storage_writer=writer)
        loaded = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
        torch.cuda.synchronize()
        group = dist.new_group(backend="nccl")
        dcp.load(loaded, storage_reader=TensorizerStorageReader(sys.argv[1], exchange=group))
        with torch.cuda.stream(torch.cuda.Stream()):
            print(all(torch.equal(loaded[key], state[key]) for key in state))
        dist.destroy_process_group()
    """
    done = run_script(script, tmp_path)
    assert done.stdout.split()[-1] == "True", done.stderr
