"""Loads to a GPU: exact, ready when `dcp.load` returns, in order with training, without a copy of all on the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_tensorizer import TensorizerStorageWriter
from dcp_tensorizer._loading.gpu import POOLS

from ..lab.states import ALL_DTYPES, filled, same
from .support import GPU, delay, load_into, random_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A gigabyte in tensors of several sizes."""
    state = random_state(200, 1_300_000) | {f"small.{n}": torch.rand(50, device=GPU) for n in range(2000)}
    with TensorizerStorageWriter(tmp_path) as writer:
        dcp.save(state, storage_writer=writer)
    return tmp_path, state


def test_values_are_there_when_load_returns(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """On the default stream and on another, right after the load, without a synchronisation by the caller."""
    path, state = saved
    found = load_into(path, {key: torch.empty_like(tensor) for key, tensor in state.items()})
    with torch.cuda.stream(torch.cuda.Stream(GPU)):
        assert [key for key in state if not torch.equal(found[key], state[key])] == []


def test_a_load_comes_after_kernels_that_were_queued_before(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """A long kernel, and then one that overwrites the targets, are queued when the load begins."""
    path, state = saved
    targets = {key: torch.empty_like(tensor) for key, tensor in state.items()}
    delay()
    torch._foreach_zero_(list(targets.values()))
    found = load_into(path, targets)
    torch.cuda.synchronize()
    assert [key for key in state if not torch.equal(found[key], state[key])] == []


def test_every_dtype_and_layout_is_loaded(tmp_path: Path) -> None:
    """Contiguous targets, strided ones, and ones of another dtype."""
    state = {str(dtype): filled(dtype, (300, 70), seed=n) for n, dtype in enumerate(ALL_DTYPES)}
    with TensorizerStorageWriter(tmp_path) as writer:
        dcp.save(state, storage_writer=writer)
    targets = {k: torch.empty(t.shape, dtype=t.dtype, device=GPU) for k, t in state.items()}
    load_into(tmp_path, targets)
    assert [key for key in state if not same(targets[key].cpu(), state[key])] == []
    bent = torch.empty(70, 300, dtype=torch.float64, device=GPU).t()
    load_into(tmp_path, {"torch.float32": bent})
    torch.testing.assert_close(bent.cpu(), state["torch.float32"].double(), rtol=0, atol=0, equal_nan=True)


def test_host_memory_of_a_load_is_bounded(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """The process grows by the ring's slots and little else, not by the checkpoint's size."""
    path, state = saved
    targets = {key: torch.empty_like(tensor) for key, tensor in state.items()}
    load_into(path, targets)  # whatever torch and CUDA allocate once
    POOLS.close()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _resident("VmRSS")
    load_into(path, targets)
    assert _resident("VmHWM") - before < 400 << 20
    assert sum(tensor.nbytes for tensor in state.values()) > 10**9


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
