"""Targets on a (simulated) device: they are exact, and their reads keep to a few slots of pinned memory."""

from __future__ import annotations

import functools
import mmap
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dcp_tensorizer import ChecksumMismatch, ReadError
from dcp_tensorizer._index.layouts import Region
from dcp_tensorizer._loading import gpu
from dcp_tensorizer._loading.gpu import PinnedPools
from dcp_tensorizer._loading.run import fetch, limits_of
from dcp_tensorizer._loading.targets import ReadTarget
from dcp_tensorizer._runtime.direct_memory import direct_memory
from dcp_tensorizer._storage.base import Storage
from dcp_tensorizer._tensor_file.names import StoredItem

from ...lab.processes import is_mapped, is_so_in_child
from ...lab.simulated import SimulatedDevice
from ...lab.states import ALL_DTYPES, dtype_name, filled, same
from .stored import as_plain, part, target_for, write_file


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice()


@pytest.fixture
def pools(device: SimulatedDevice) -> Iterator[PinnedPools]:
    """Of one load, which gives back all of its memory."""
    with PinnedPools(device) as pools:
        yield pools
    assert device.pinned == []


def landing(
    key: str, item: StoredItem, stored: torch.Tensor, tensor: torch.Tensor, region: Region | None = None
) -> ReadTarget:
    """As for a target on a device: never read in place."""
    return replace(target_for(key, item, stored, tensor, region), in_place=False)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
def test_targets_on_a_device_of_every_dtype_and_layout(
    storage: Storage, device: SimulatedDevice, pools: PinnedPools, dtype: torch.dtype
) -> None:
    """Whole tensors and regions, contiguous and not, beside targets on the host, in one read operation."""
    stored, other = filled(dtype, (9, 14)), filled(dtype, (100,), seed=2)
    items = write_file(storage, "f", {"t": stored, "o": other})
    region = Region((2, 3), (5, 8))
    whole_target = device.declare(filled(dtype, (9, 14), seed=1))
    columns = device.declare(filled(dtype, (5, 16), seed=1))[:, 3:11]
    on_host, both = filled(dtype, (100,), seed=1), filled(dtype, (9, 14), seed=1)
    fetch(
        storage,
        [
            landing("whole", items["t"], stored, whole_target),
            landing("columns", items["t"], stored, columns, region),
            target_for("on host", items["o"], other, on_host),
            target_for("the same on the host", items["t"], stored, both),
        ],
        threads=2,
        verify=True,
        pools=pools,
    )
    assert same(whole_target, stored)
    assert same(as_plain(columns), as_plain(part(stored, region)))
    assert same(on_host, other)
    assert same(both, stored)


def test_columns_for_a_device_are_taken_apart_there(
    storage: Storage, device: SimulatedDevice, pools: PinnedPools
) -> None:
    """The bytes that enclose them cross the bus in one piece, from pinned memory, into memory of the device."""
    stored = filled(torch.float32, (64, 100))
    item = write_file(storage, "f", {"t": stored})["t"]
    region = Region((0, 10), (64, 5))
    target = device.declare(torch.zeros(64, 5))
    fetch(storage, [landing("columns", item, stored, target, region)], threads=1, verify=True, pools=pools)
    assert same(target, stored[:, 10:15].contiguous())
    assert len(device.buffers) == 1 and device.buffers[0] <= stored.nbytes
    assert device.crossings == [1]


def test_elements_for_a_device_are_converted_there(
    storage: Storage, device: SimulatedDevice, pools: PinnedPools
) -> None:
    """A target of another dtype gets the stored values."""
    stored = torch.arange(1000, dtype=torch.float32)
    (item,) = write_file(storage, "f", {"t": stored}).values()
    target = device.declare(torch.zeros(1000, dtype=torch.float64))
    fetch(storage, [landing("t", item, stored, target)], threads=2, verify=True, pools=pools)
    assert target.tolist() == stored.tolist()


def test_memory_for_loads_to_a_device_is_bounded(storage: Storage, device: SimulatedDevice, pools: PinnedPools) -> None:
    """Slots go round: many operations, few slots, none read into before its copies are done."""
    limits = limits_of(storage)._replace(max_scratch_bytes=1 << 16)
    stored = {f"t{n}": filled(torch.int32, (300, 100), seed=n) for n in range(40)}
    items = write_file(storage, "f", stored)
    targets = {key: device.declare(torch.zeros_like(tensor)) for key, tensor in stored.items()}
    moved = fetch(
        storage,
        [landing(key, items[key], tensor, targets[key]) for key, tensor in stored.items()],
        threads=3,
        verify=True,
        pools=pools,
        limits=limits,
    )
    assert moved >= 40 * 120_000
    assert [key for key in stored if not same(stored[key], targets[key])] == []
    assert device.most_pinned <= 5 * (1 << 17)


def test_loads_come_after_what_training_has_queued(
    storage: Storage, device: SimulatedDevice, pools: PinnedPools
) -> None:
    """A kernel that fills the targets, queued before the load, does not overwrite what is loaded."""
    stored = torch.arange(1000)
    (item,) = write_file(storage, "f", {"t": stored}).values()
    target = device.declare(torch.zeros(1000, dtype=torch.int64))
    device.queue(lambda: target.fill_(-1))
    fetch(storage, [landing("t", item, stored, target)], threads=2, verify=True, pools=pools)
    device.run()
    assert target.tolist() == stored.tolist()


def test_a_load_to_a_device_that_fails_leaves_nothing_registered(
    storage: Storage, device: SimulatedDevice, pools: PinnedPools, tmp_path: Path
) -> None:
    """Damage is found before it goes to the device, and named."""
    stored = torch.arange(1000)
    (item,) = write_file(storage, "f", {"t": stored}).values()
    content = bytearray((tmp_path / "f").read_bytes())
    content[item.offset + 100] ^= 1
    (tmp_path / "f").write_bytes(content)
    target = device.declare(torch.zeros(1000, dtype=torch.int64))
    with pytest.raises(ChecksumMismatch, match="'t'"):
        fetch(storage, [landing("t", item, stored, target)], threads=2, verify=True, pools=pools)
    assert target.tolist() == [0] * 1000
    assert device.pinned == []


def test_a_shortage_of_memory_for_slots_is_a_read_error(
    storage: Storage, device: SimulatedDevice, pools: PinnedPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what for, and how much."""
    stored = torch.arange(100_000)
    (item,) = write_file(storage, "f", {"t": stored}).values()
    target = device.declare(torch.zeros(100_000, dtype=torch.int64))
    monkeypatch.setattr("dcp_tensorizer._runtime.memory_limit.available_memory", lambda: 1 << 16)
    with pytest.raises(ReadError, match=r"on their way to a GPU.*bytes of memory are available"):
        fetch(storage, [landing("t", item, stored, target)], threads=2, verify=True, pools=pools)


def test_reads_of_one_load_use_the_same_memory(storage: Storage, device: SimulatedDevice, pools: PinnedPools) -> None:
    """A planner may want one tensor after the other: memory is registered anew only for a larger one."""
    stored = {
        name: filled(torch.int32, (count,), seed=count) for name, count in (("a", 5000), ("b", 3000), ("c", 9000))
    }
    items = write_file(storage, "f", stored)
    registered = []
    for name in "abbcab":
        target = device.declare(torch.zeros_like(stored[name]))
        device.queue(functools.partial(target.fill_, -1))
        fetch(storage, [landing(name, items[name], stored[name], target)], threads=1, verify=True, pools=pools)
        assert same(target, stored[name])
        registered.append(*device.pinned)
    assert registered[:3] == registered[:1] * 3
    assert registered[3:] == registered[3:4] * 3
    assert registered[3][1] > registered[0][1]


def test_a_large_read_between_many_small_ones(storage: Storage, device: SimulatedDevice, pools: PinnedPools) -> None:
    """Few large slots, then many small ones, then large ones again: the memory that is there by then is enough."""
    large, small = filled(torch.int32, (9000,)), {f"s{n}": filled(torch.int32, (500,), seed=n) for n in range(8)}
    items = write_file(storage, "f", {"large": large} | small)
    limits = limits_of(storage)._replace(max_scratch_bytes=1 << 16, max_segments=1)
    registered = []
    for stored in ({"large": large}, small, {"large": large}, small):
        targets = {key: device.declare(torch.zeros_like(tensor)) for key, tensor in stored.items()}
        wanted = [landing(key, items[key], tensor, targets[key]) for key, tensor in stored.items()]
        fetch(storage, wanted, threads=4, verify=True, limits=limits, pools=pools)
        assert [key for key in stored if not same(stored[key], targets[key])] == []
        registered.append(*device.pinned)
    assert registered[0] != registered[1]
    assert registered[1:] == registered[1:2] * 3


def test_forked_children_have_nothing_of_the_slots(
    storage: Storage, device: SimulatedDevice, pools: PinnedPools
) -> None:
    """A child that is forked during a load would otherwise share pages that the device writes from."""
    stored = torch.arange(1000)
    (item,) = write_file(storage, "f", {"t": stored}).values()
    target = device.declare(torch.zeros_like(stored))
    fetch(storage, [landing("t", item, stored, target)], threads=1, verify=True, pools=pools)
    ((address, _),) = device.pinned
    assert is_mapped(address)
    assert is_so_in_child(lambda: not is_mapped(address))


def test_slots_are_freed_when_the_load_ends(
    storage: Storage, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever still refers to the pools: a traceback does after an error."""
    made: list[weakref.ref[mmap.mmap]] = []

    def noted(nbytes: int) -> memoryview:
        memory = direct_memory(nbytes)
        assert isinstance(memory.obj, mmap.mmap)
        made.append(weakref.ref(memory.obj))
        return memory

    monkeypatch.setattr(gpu, "direct_memory", noted)
    stored = torch.arange(1000)
    (item,) = write_file(storage, "f", {"t": stored}).values()
    pools = PinnedPools(device)
    with pools:
        fetch(storage, [landing("t", item, stored, device.declare(torch.zeros_like(stored)))], verify=True, pools=pools)
        kept = pools._kept
        assert [memory() is not None for memory in made] == [True]
    assert kept is not None
    assert [memory() for memory in made] == [None]
    assert device.pinned == []
