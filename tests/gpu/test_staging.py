"""Staging from a GPU: exact, never torn, pinned, within its bound of device memory, and without a context elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

from dcp_tensorizer import StagingError
from dcp_tensorizer._staging import device as device_module
from dcp_tensorizer._staging.device import CUDA, LANES
from dcp_tensorizer._staging.driver import copier
from dcp_tensorizer._staging.shared_memory import SharedBuffer
from dcp_tensorizer._staging.stager import Stager
from dcp_tensorizer._staging.tensor_copy import DEFAULT_LIMITS, GatherLimits

from ..lab.processes import run_python
from ..lab.states import ALL_DTYPES, dtype_name, filled, raw, same
from .support import GPU, delay, random_state


@pytest.fixture(params=[False, True], ids=["blocking", "overlapping"])
def stager(request: pytest.FixtureRequest) -> Iterator[Stager]:
    stager = Stager(overlap_staging=request.param)
    yield stager
    stager.saves.close()


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
@pytest.mark.parametrize(
    ("small", "batch"), [(1 << 19, 1 << 40), (64, 1 << 40), (64, 1)], ids=["gathered", "by themselves", "batches"]
)
@pytest.mark.parametrize("overlap", [False, True], ids=["blocking", "overlapping"])
def test_every_dtype_and_layout_is_staged_bit_for_bit(
    dtype: torch.dtype, small: int, batch: int, overlap: bool
) -> None:
    """Contiguous and not, whole and in parts, in pieces of the gathering buffer, in batches; twice, by plan."""
    limits = GatherLimits(buffer_bytes=1 << 20, small_bytes=small, batch_bytes=batch)
    stager = Stager(overlap_staging=overlap, limits=limits)
    on_host = filled(dtype, (600, 700))  # up to 6.7 MB; its rows and columns are small ones
    base = on_host.view(torch.uint8).to(GPU).view(dtype)
    state, expected = (
        {"whole": t, "rows": t[3:50], "scalar": t[0, 0], "empty": t[:0], "row": t[7]} for t in (base, on_host)
    )
    if "float4" not in str(dtype):  # two elements a byte: views of it are not copied on any device
        state |= {"transposed": base.t(), "strided": base[::2, 1::3], "column": base[:, 5]}
        expected |= {"transposed": on_host.t(), "strided": on_host[::2, 1::3], "column": on_host[:, 5]}
    for _ in range(2):
        result = stager.stage(state)
        result.staged_save.wait_copied()
        copied = dict(result)
        assert [key for key in state if not same(copied[key], expected[key])] == []
        del result, copied
    stager.saves.close()


def test_batches_are_there(record_property: Callable[[str, object], None]) -> None:
    """From CUDA 12.8's driver on; what there is stands in the results."""
    record_property("has_batches", CUDA.side_streams[0].has_batches)
    assert CUDA.side_streams[0].has_batches == (copier() is not None)
    assert len({lane.cuda_stream for lane in CUDA.side_streams[0]._lanes}) == (1 if copier() else LANES)
    pool = {torch.cuda.Stream(GPU).cuda_stream for _ in range(64)}
    assert pool.isdisjoint(lane.cuda_stream for lane in CUDA.side_streams[0]._lanes)


def test_a_lock_inside_a_capture_is_refused() -> None:
    """And outside of it, around the replay, it is not."""
    stager, weight = Stager(overlap_staging=True), torch.zeros(100, device=GPU)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        with pytest.raises(StagingError, match="CUDA graph"):
            stager.hold_training()
        weight.add_(1)
    stager.hold_training()
    graph.replay()
    assert weight.sum().item() == 100


def test_lazy_views_are_carried_out(stager: Stager) -> None:
    """Conjugation and negation, small and large."""
    for count in (10, 1_000_000):
        values = torch.randn(count, dtype=torch.complex64, device=GPU)
        result = stager.stage({"conj": values.conj(), "neg": values.conj().imag})
        result.staged_save.wait_copied()
        assert raw(dict(result)["conj"]) == raw(values.conj().resolve_conj().cpu())
        assert raw(dict(result)["neg"]) == raw(values.conj().imag.resolve_neg().cpu())
        del result


@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "own stream"])
def test_no_snapshot_is_torn_in_a_hundred(stager: Stager, own_stream: bool) -> None:
    """A long kernel changes everything right before and right after; the staged copy has the values in between."""
    training = torch.cuda.Stream(GPU) if own_stream else torch.cuda.current_stream(GPU)
    state = {f"large{n}": torch.zeros(2_000_000, device=GPU) for n in range(4)}
    state |= {f"small{n}": torch.zeros(100, device=GPU) for n in range(500)}
    state |= {"strided": torch.zeros(1000, 1100, device=GPU).t()}
    torch.cuda.synchronize()
    tensors = list(state.values())
    with torch.cuda.stream(training):
        for number in range(1, 101):
            torch.cuda._sleep(20_000_000)
            torch._foreach_zero_(tensors)
            torch._foreach_add_(tensors, 2.0 * number)
            result = stager.stage(state)
            stager.hold_training()
            torch._foreach_zero_(tensors)
            torch._foreach_add_(tensors, 2.0 * number + 1)
            result.staged_save.wait_copied()
            wrong = [key for key, copied in dict(result).items() if not bool((copied == 2.0 * number).all())]
            assert wrong == [], f"run {number}"
            del result


def test_overlapped_staging_returns_while_the_gpu_is_busy() -> None:
    """Neither `stage` nor holding training waits for what is queued."""
    stager = Stager(overlap_staging=True)
    state = random_state(10, 1_000_000)
    stager.prewarm(state)
    stager.saves.wait_prewarmed()
    torch.cuda.synchronize()
    for _ in range(20):
        delay()  # a second in all
    queued = torch.cuda.Event()
    queued.record()
    result = stager.stage(state)
    stager.hold_training()
    assert not queued.query()
    result.staged_save.wait_copied()
    assert queued.query()
    assert all(torch.equal(dict(result)[key], tensor.cpu()) for key, tensor in state.items())
    del result
    stager.saves.close()


def test_staged_memory_is_pinned_until_it_is_given_back(stager: Stager) -> None:
    """torch sees the staged tensors as pinned, so that copies to and from them are asynchronous."""
    result = stager.stage(random_state(3, 1000))
    result.staged_save.wait_copied()
    tensor = dict(result)["t0"]
    assert tensor.is_pinned()
    del result
    stager.saves.close()
    assert not tensor.is_pinned()


def test_memory_that_cannot_be_registered_is_a_warning_and_nothing_else() -> None:
    """It is registered already, which CUDA refuses; the next kernel is not blamed for it."""
    torch.zeros(1, device=GPU)
    buffer = SharedBuffer(1 << 20)
    undo = CUDA.pin(buffer.allocate(torch.uint8, (1,)).data_ptr(), 1 << 20, 0)
    with pytest.warns(RuntimeWarning, match="cudaHostRegister returned"):
        buffer.pin(CUDA, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.ones(10, device=GPU).sum().item() == 10
        buffer.pin(CUDA, 0)
    undo()
    buffer.close()


def test_device_memory_stays_within_its_bound(stager: Stager) -> None:
    """One buffer, for thousands of small tensors and for a large one that is not contiguous, and for all saves."""
    state = random_state(3000, 200) | {"strided": torch.rand(8000, 8000, device=GPU).t()}
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(40):  # more than torch has streams
        result = stager.stage(state)
        result.staged_save.wait_copied()
        assert torch.cuda.memory_reserved() - before <= DEFAULT_LIMITS.buffer_bytes + (2 << 20)
        last = dict(result)["strided"]
        del result
    assert torch.equal(last.clone().to(GPU), state["strided"])  # once, and there: on the host it takes seconds


@pytest.mark.parametrize("piece", [1 << 20, 3 << 20], ids=["1 MiB", "3 MiB"])
def test_copies_are_cut_at_the_borders_of_registrations(
    stager: Stager, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each MiB of the buffer is registered by itself, and no copy reaches over two; all arrives bit for bit."""
    monkeypatch.setattr(device_module, "PIN_BYTES", 1 << 20)
    monkeypatch.setattr(device_module, "PIECE_BYTES", piece)
    state = random_state(20, 700_001) | {f"s{n}": torch.rand(1000 + n, device=GPU) for n in range(3000)}
    state |= {"strided": torch.rand(1500, 900, device=GPU).t()}
    result = stager.stage(state)
    result.staged_save.wait_copied()
    assert len(CUDA._borders) > 60
    copied = {key: tensor.clone().to(GPU) for key, tensor in dict(result).items()}  # torch does not cut its copies
    assert [key for key, tensor in state.items() if not torch.equal(copied[key], tensor)] == []
    del result


def test_thousands_of_large_copies_are_queued_without_a_wait(stager: Stager) -> None:
    """More than one stream takes before it holds up whoever queues: they are spread over several."""
    state = random_state(3000, 100_000)
    stager.prewarm(state)
    stager.saves.wait_prewarmed()
    for _ in range(20):
        delay()  # a second in all
    queued = torch.cuda.Event()
    queued.record()
    result = stager.stage(state)
    if stager._overlap_staging:
        stager.hold_training()
        assert not queued.query()
    result.staged_save.wait_copied()
    assert all(torch.equal(dict(result)[f"t{n}"], state[f"t{n}"].cpu()) for n in range(0, 3000, 100))
    del result


def test_other_gpus_get_no_context() -> None:
    """A rank on the last GPU makes none on those before it (with one GPU: exactly that one has a context)."""
    script = """
import torch
from dcp_tensorizer._staging.stager import Stager
count = torch.cuda.device_count()
torch.cuda.set_device(count - 1)
stager = Stager(overlap_staging=True)
state = {"a": torch.rand(1000, 1000, device="cuda"), "small": torch.rand(3, device="cuda")}
result = stager.stage(state)
result.staged_save.wait_copied()
assert torch.equal(dict(result)["a"], state["a"].cpu())
del result
stager.saves.close()
print([index for index in range(count) if torch._C._cuda_hasPrimaryContext(index)] == [count - 1])
"""
    assert run_python(script, fresh=True).stdout.split()[-1] == "True"
