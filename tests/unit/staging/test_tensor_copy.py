"""Copies from a simulated device: their contents, their order, and the number of calls."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from dcp_tensorizer._staging.device import SideStreams
from dcp_tensorizer._staging.shared_memory import SharedBuffer
from dcp_tensorizer._staging.tensor_copy import DEFAULT_LIMITS, Copies, GatherLimits, allocation_order

from ...lab.simulated import SimulatedDevice
from ...lab.states import ALL_DTYPES, dtype_name, filled, raw, same


def following(tensors: Sequence[torch.Tensor], device: SimulatedDevice) -> SideStreams:
    """Streams whose next work comes after what training has queued by now."""
    streams = SideStreams(device)
    streams.follow(tensors)
    return streams


def copied(
    sources: Sequence[torch.Tensor],
    device: SimulatedDevice,
    limits: GatherLimits = DEFAULT_LIMITS,
    dtypes: Sequence[torch.dtype] | None = None,
) -> tuple[list[torch.Tensor], SharedBuffer]:
    """Staged tensors in a shared buffer of their own, with everything copied to them."""
    copies = Copies(following(sources, device), sources, limits=limits)
    copies.dtypes = list(dtypes or copies.dtypes)
    buffer = SharedBuffer(copies.nbytes)
    staged = list(copies.begin(buffer))
    copies.start()
    copies.wait()
    return staged, buffer


@pytest.mark.parametrize("has_batches", [False, True], ids=["gathered", "batches"])
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
def test_every_dtype_and_layout_leaves_the_device_as_it_is(dtype: torch.dtype, has_batches: bool) -> None:
    """Small and large tensors, contiguous or not, are copied bit for bit, gathered, in batches and in pieces."""
    device = SimulatedDevice(has_batches=has_batches)
    base = device.declare(filled(dtype, (40, 24)))
    on_host = filled(dtype, (40, 24), seed=1).t()
    sources = [base, base.t(), base[::2, 1::3], base[0], base[:, 0], base[3, 4], base[:0], on_host, base[:1, :1]]
    sources += [base[n, :5] for n in range(20)]
    staged, buffer = copied(sources, device, GatherLimits(buffer_bytes=1024, small_bytes=200, batch_bytes=20))
    assert [n for n, (a, b) in enumerate(zip(staged, sources, strict=True)) if not same(a, b)] == []
    assert bool(device.batched) == has_batches
    del staged
    buffer.close()


@pytest.mark.parametrize("most", [0, 1, 1000], ids=["refused", "refused later", "taken"])
def test_batches_take_tensors_of_all_sizes_but_the_smallest(most: int) -> None:
    """Batches need no memory on the device. Without batches all tensors are copied as well."""
    device = SimulatedDevice(has_batches=True)
    device.most_batches = most
    base = device.declare(filled(torch.bfloat16, (20 << 20,)))
    sources = [base, base[: 1 << 19], *(base[n * 8192 : n * 8192 + 8192 - n % 2] for n in range(400))]
    staged, buffer = copied(sources, device)
    assert [n for n, (a, b) in enumerate(zip(staged, sources, strict=True)) if not same(a, b)] == []
    if most == 1000:
        small = [len([size for size in call if size == 16384]) for call in device.batched]
        assert sum(small) == 200  # the others are 2 bytes too small
        assert max(sum(call) for call in device.batched) <= 64 << 20
        assert max(device.batched[0]) == 32 << 20
        assert device.crossings == [1]
    else:
        assert len(device.batched) == most
        assert len(device.crossings) > 1
    del staged
    buffer.close()


def test_a_cast_is_made_on_the_device() -> None:
    """Small and large tensors, contiguous or not, are cast between others that are not."""
    device = SimulatedDevice()
    base = device.declare(torch.linspace(-3, 3, 960).view(40, 24))  # the bits of a NaN depend on the kernel
    whole = device.declare(torch.arange(40))
    sources = [base, whole[:3], base.t(), base[0], base[:, 0], base[3, 4], base[:0], *(base[n, :5] for n in range(20))]
    dtypes = [torch.bfloat16 if source.is_floating_point() else source.dtype for source in sources]
    staged, buffer = copied(sources, device, GatherLimits(buffer_bytes=1024, small_bytes=200), dtypes)
    assert [n for n, (a, b) in enumerate(zip(staged, sources, strict=True)) if not same(a, b.to(dtypes[n]))] == []
    del staged
    buffer.close()


def test_one_element_may_have_any_stride() -> None:
    """A tensor of one element is contiguous, but `view` as another dtype refuses its stride."""
    device = SimulatedDevice()
    base = device.declare(filled(torch.complex128, (4, 4)))
    sources = [base[0:1, 0], base.view(-1)[::5][:1]]
    staged, buffer = copied(sources, device)
    assert [raw(tensor) for tensor in staged] == [raw(tensor) for tensor in sources]
    del staged
    buffer.close()


def test_lazy_views_are_resolved_on_the_device() -> None:
    """Small and large views are copied as the values that they stand for."""
    device = SimulatedDevice()
    values = device.declare(torch.view_as_complex(torch.arange(400.0).view(200, 2)))
    for small in (1 << 20, 8):
        staged, buffer = copied([values.conj(), values.conj().imag], device, GatherLimits(small_bytes=small))
        assert raw(staged[0]) == raw(values.conj())
        assert raw(staged[1]) == raw(values.conj().imag)
        del staged
        buffer.close()


def test_thousands_of_small_tensors_cross_in_a_few_copies() -> None:
    """Small states of an optimizer, of several dtypes between large tensors, take about one copy for each kind."""
    device = SimulatedDevice()
    pool = device.declare(torch.arange(300_000, dtype=torch.float32))
    steps = device.declare(torch.arange(5000, dtype=torch.int64))
    sources: list[torch.Tensor] = []
    for number in range(2000):
        sources += [pool[number * 100 : number * 100 + 50 + number % 50], steps[number]]
    staged, buffer = copied(sources, device)
    assert all(torch.equal(a, b) for a, b in zip(staged, sources, strict=True))
    assert len(device.crossings) <= 6
    assert device.buffers == [DEFAULT_LIMITS.buffer_bytes]
    del staged
    buffer.close()


def test_memory_on_the_device_is_bounded() -> None:
    """One buffer of fixed size serves tensors of any size."""
    limits = GatherLimits(buffer_bytes=4096, small_bytes=512)
    device = SimulatedDevice()
    base = device.declare(torch.arange(64 * 64 * 16, dtype=torch.int32))
    strided = [base.view(64, 1024).t(), base.view(4, 16, 1024).permute(2, 0, 1), base.view(1, 2, 32768).transpose(1, 2)]
    small = [base[n * 128 : n * 128 + 100] for n in range(100)]
    staged, buffer = copied([*strided, *small], device, limits)
    assert all(torch.equal(a, b) for a, b in zip(staged, [*strided, *small], strict=True))
    assert device.buffers == [4096]
    del staged
    buffer.close()


def test_a_device_that_is_nearly_full_gets_a_smaller_buffer() -> None:
    """The buffer shrinks to the largest small tensor. If that fails, the device's own error is raised."""
    limits = GatherLimits(buffer_bytes=64 << 10, small_bytes=1024)
    device = SimulatedDevice()
    base = device.declare(torch.arange(100_000, dtype=torch.int32))
    sources = [base.view(500, 200).t(), *(base[n * 300 : n * 300 + 200] for n in range(100))]
    device.memory = 5000
    staged, buffer = copied(sources, device, limits)
    assert all(torch.equal(a, b) for a, b in zip(staged, sources, strict=True))
    assert device.buffers == [4096]
    device.memory = 1000
    with pytest.raises(torch.OutOfMemoryError):
        copied(sources, device, limits)
    del staged
    buffer.close()


def test_the_order_of_allocation() -> None:
    """Small tensors come first, by device and element size; the others follow in their order."""

    class Devices(SimulatedDevice):
        def index_of(self, tensor: torch.Tensor) -> int | None:
            return {5: 0, 6: 1}.get(len(tensor))

    on = {"host": 4, "first": 5, "second": 6}
    kinds = [("second", torch.int8), ("host", torch.int8), ("first", torch.int32), ("second", torch.int32)]
    kinds += [("first", torch.int8), ("host", torch.int32), ("second", torch.int8), ("first", torch.int32)]
    sources = [torch.zeros(on[where], dtype=dtype) for where, dtype in kinds]
    copies = Copies(SideStreams(Devices()), sources)
    assert allocation_order(sources, copies.dtypes, copies.indices) == [4, 2, 7, 0, 6, 3, 1, 5]


@pytest.mark.parametrize("training_first", [True, False])
def test_copies_have_what_was_queued_before_them_and_nothing_after(training_first: bool) -> None:
    """Copies include kernels queued before staging, and exclude those after `hold`, whichever stream runs first."""
    device = SimulatedDevice(free_running=False)
    weight, small = device.declare(torch.zeros(100_000)), device.declare(torch.zeros(3))
    strided = device.declare(torch.zeros(400, 400)).t()
    buffer = SharedBuffer(1 << 21)
    staged = [buffer.allocate(t.dtype, t.shape) for t in (small, weight, strided)]
    device.queue(lambda: [t.fill_(1.0) for t in (weight, small, strided)])  # the step before
    sources = (small, weight, strided)
    copies = Copies(following(sources, device), sources)
    copies.add(staged)
    copies.start()
    copies.hold()
    device.queue(lambda: [t.fill_(2.0) for t in (weight, small, strided)])  # the step after
    assert [t.sum().item() for t in (weight, small, strided)] == [0.0, 0.0, 0.0]
    device.run(training_first=training_first)
    copies.wait()
    assert [set(tensor.flatten().tolist()) for tensor in staged] == [{1.0}] * 3
    assert [set(t.flatten().tolist()) for t in (weight, small, strided)] == [{2.0}] * 3
    del staged, copies
    buffer.close()


def test_a_change_without_hold_is_in_the_copies() -> None:
    """Without `hold` the simulated device shows the change, so the other tests can fail."""
    device = SimulatedDevice(free_running=False)
    weight = device.declare(torch.zeros(100_000))
    tensor = torch.empty(100_000)
    copies = Copies(following([weight], device), [weight])
    copies.add([tensor])
    copies.start()
    device.queue(lambda: weight.fill_(2.0))
    device.run(training_first=True)
    copies.wait()
    assert set(tensor.tolist()) == {2.0}
