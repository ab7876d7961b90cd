"""Simulated handles to GPU memory: their contents, their lifetime, and the copies in the buffer.

Torch's own two functions, which need a GPU, are replaced: a handle is the alias itself. tests/gpu has the real ones.
"""

from __future__ import annotations

import dataclasses
import gc
import mmap
from typing import Any

import pytest
import torch

from dcp_tensorizer import WriteError
from dcp_tensorizer._staging.shared_memory import SharedBuffer, aligned
from dcp_tensorizer._writer_process import gpu_ipc
from dcp_tensorizer._writer_process.gpu_ipc import Snapshots, export

from ...lab.simulated import SimulatedDevice, SimulatedStream
from ...lab.states import ALL_DTYPES, filled, same


@pytest.fixture(autouse=True)
def handles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_ipc, "reduce_tensor", lambda alias: (None, (alias, True)))
    monkeypatch.setattr(gpu_ipc, "rebuild_cuda_tensor", opened)


def opened(alias: torch.Tensor, has_to_wait: bool) -> torch.Tensor:
    assert not has_to_wait  # the other side has waited, for all of them at once
    return alias


def streams() -> dict[Any, SimulatedStream]:
    return {None: SimulatedDevice().new_stream(0)}  # the index of the host's "device"


def test_tensors_arrive_as_they_are() -> None:
    """Tensors of all dtypes, strides and lazy views are copied to their offsets in a buffer that is registered once."""
    sources = [filled(dtype, (9, 14), seed=n) for n, dtype in enumerate(ALL_DTYPES)]
    base = torch.arange(400.0)
    values = torch.view_as_complex(base.view(200, 2))
    sources += [base[3:50], base.view(20, 20).t(), base[7], values.conj(), values.conj().imag]
    buffer = SharedBuffer(sum(aligned(source.nbytes) for source in sources))
    copies = [buffer.allocate(source.dtype, source.shape) for source in sources]
    offsets = [buffer.locate(copy) or 0 for copy in copies]
    request, kept = export(list(zip(copies, sources, strict=True)), offsets, buffer.id, streams())
    assert len(request.storages) == len(kept) == len(ALL_DTYPES) + 1
    with mmap.mmap(buffer.fd, buffer.nbytes) as memory:
        device = SimulatedDevice()
        snapshots = Snapshots(device)
        for _ in range(2):
            snapshots.take(dataclasses.replace(request, device=0), memory)
        gc.collect()
        assert [nbytes for _, nbytes in device.pinned] == [buffer.nbytes]
        snapshots.retain({buffer.id})
        assert len(device.pinned) == 1
        snapshots.retain(set())
        assert device.pinned == []
    assert [n for n, (a, b) in enumerate(zip(copies, sources, strict=True)) if not same(a, b)] == []
    del copies
    buffer.close()


def test_what_is_sent_is_not_what_training_has() -> None:
    """torch changes the storage that it exports, so an alias is exported, which holds the memory while it lives."""
    source = torch.arange(1000)
    copy = torch.empty_like(source)
    _, (alias,) = export([(copy, source)], [0], 1, streams())
    assert alias.untyped_storage()._cdata != source.untyped_storage()._cdata
    assert alias.data_ptr() == source.data_ptr()
    del source
    gc.collect()
    assert alias.view(torch.int64).tolist() == list(range(1000))


def test_storages_that_begin_together_are_two(handles: None) -> None:
    """Two storages at one address, of different sizes, are exported separately."""
    whole = torch.arange(100.0)
    short = torch.empty(0).set_(torch.frombuffer(memoryview(whole.numpy())[:10], dtype=torch.float32).untyped_storage())
    assert short.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    sources = [short, whole]
    request, _kept = export([(s.clone(), s) for s in sources], [0, 1024], 0, streams())
    assert [tensor.storage for tensor in request.tensors] == [0, 1]


def test_memory_that_cannot_be_handed_over_is_an_error_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error contains torch's message and the alternative."""

    def refuse(alias: torch.Tensor) -> Any:
        raise RuntimeError("invalid device pointer")

    monkeypatch.setattr(gpu_ipc, "reduce_tensor", refuse)
    with pytest.raises(WriteError, match=r"invalid device pointer.*staging='buffer'"):
        export([(torch.empty(3), torch.ones(3))], [0], 1, streams())


def test_handles_made_before_one_that_is_refused_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a handle is refused, earlier handles are released, because torch would never free their memory."""
    given_back = []

    class Storage:
        @classmethod
        def _release_ipc_counter(cls, counter: bytes, offset: int, device: int) -> None:
            given_back.append((counter, offset, device))

    def reduce(alias: torch.Tensor) -> Any:
        number = int(alias[0])
        if number == 3:
            raise RuntimeError("invalid argument")
        return None, (torch.Tensor, (), (), 0, Storage, None, 7, b"handle", 1, 0, False, b"counter", number, b"", True)

    monkeypatch.setattr(gpu_ipc, "reduce_tensor", reduce)
    sources = [torch.tensor([number], dtype=torch.uint8) for number in range(5)]
    with pytest.raises(WriteError, match="invalid argument"):
        export([(torch.empty_like(s), s) for s in sources], [0] * 5, 1, streams())
    assert given_back == [(b"counter", number, 7) for number in range(3)]
