"""Memory of a GPU that no other process uses meanwhile: nearly full, and with a second context."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_tensorizer import TensorizerStorageWriter

from .support import GPU, WAIT, load_into, random_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_a_gpu_that_is_nearly_full_is_saved_and_saved_again(tmp_path: Path) -> None:
    """The first save takes its buffer; later ones find it, also when training has taken all the rest."""
    state = random_state(3, 1_000_000) | {f"s{n}": torch.rand(100, device=GPU) for n in range(1000)}
    state |= {"bent": torch.rand(2000, 1000, device=GPU).t()}
    with TensorizerStorageWriter() as writer:
        dcp.async_save(state, storage_writer=writer, checkpoint_id=tmp_path / "1").result(WAIT)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        rest = torch.empty(max(1, free - (8 << 20)), dtype=torch.uint8, device=GPU)
        dcp.async_save(state, storage_writer=writer, checkpoint_id=tmp_path / "2").result(WAIT)
        del rest
    found = load_into(tmp_path / "2", {key: torch.zeros_like(tensor) for key, tensor in state.items()})
    assert [key for key in state if not torch.equal(found[key], state[key])] == []


def test_the_context_of_device_staging_has_a_size(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """It is the one cost that staging='buffer' does not have: less than 2 GiB of the GPU."""
    state = random_state(3, 100_000)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # of the test before, which took everything
    before, _ = torch.cuda.mem_get_info()
    with TensorizerStorageWriter(tmp_path, staging="device") as writer:
        dcp.async_save(state, storage_writer=writer).result(WAIT)
        during, _ = torch.cuda.mem_get_info()
    record_property("device_staging_mib", (before - during) >> 20)
    assert 0 < before - during < 2 << 30
