"""Tests of targets on a simulated device: they are exact, and their reads use a few slots of pinned memory."""

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
from dcp_tensorizer._loading import gpu, run
from dcp_tensorizer._loading.gpu import PinnedPools
from dcp_tensorizer._loading.plan import ReadTarget
from dcp_tensorizer._loading.run import fetch, limits_of
from dcp_tensorizer._runtime.direct_memory import direct_memory
from dcp_tensorizer._storage.base import Storage
from dcp_tensorizer._tensor_file import digests
from dcp_tensorizer._tensor_file.digests import DigestCheck
from dcp_tensorizer._tensor_file.names import StoredItem
from dcp_tensorizer._tensor_file.regions import Region

from ...lab.processes import is_mapped, is_so_in_child
from ...lab.simulated import SimulatedDevice
from ...lab.states import ALL_DTYPES, dtype_name, filled, same
from .stored import as_plain, part, target_for, write_file


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice()


@pytest.fixture
def pools(device: SimulatedDevice) -> Iterator[PinnedPools]:
    """Yields the pools of a process, and checks that closing them frees all of their memory."""
    pools = PinnedPools(device)
    yield pools
    pools.close()
    assert device.pinned == []


def landing(
    key: str, item: StoredItem, stored: torch.Tensor, tensor: torch.Tensor, region: Region | None = None
) -> ReadTarget:
    """Returns a target that is never read in place, as on a device."""
    return replace(target_for(key, item, stored, tensor, region), in_place=False)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
def test_targets_on_a_device_of_every_dtype_and_layout(
    storage: Storage, device: SimulatedDevice, pools: PinnedPools, dtype: torch.dtype
) -> None:
    """Whole tensors and regions, contiguous and strided, are exact beside targets on the host in one operation."""
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
    """The bytes that enclose the columns cross the bus in one piece, from pinned memory to memory of the device."""
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
    """Many operations share a few slots, and no slot is read into before its copies are done."""
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
    """A kernel that was queued before the load and fills the targets does not overwrite the loaded values."""
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
    """Damage is found and named before the data is sent to the device."""
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
    """The error names the purpose of the memory, and its size."""
    stored = torch.arange(100_000)
    (item,) = write_file(storage, "f", {"t": stored}).values()
    target = device.declare(torch.zeros(100_000, dtype=torch.int64))
    monkeypatch.setattr("dcp_tensorizer._runtime.memory_limit.available_memory", lambda: 1 << 16)
    with pytest.raises(ReadError, match=r"pinned memory for reads to a GPU.*bytes of memory are available"):
        fetch(storage, [landing("t", item, stored, target)], threads=2, verify=True, pools=pools)


def test_reads_of_one_load_use_the_same_memory(storage: Storage, device: SimulatedDevice, pools: PinnedPools) -> None:
    """If a planner requests one tensor at a time, memory is registered again only for a larger tensor."""
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
    """After a few large slots and many small ones, the registered memory suffices for both."""
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
    """A forked child does not have the pages from which data is copied to the device."""
    stored = torch.arange(1000)
    (item,) = write_file(storage, "f", {"t": stored}).values()
    target = device.declare(torch.zeros_like(stored))
    fetch(storage, [landing("t", item, stored, target)], threads=1, verify=True, pools=pools)
    ((address, _),) = device.pinned
    assert is_mapped(address)
    assert is_so_in_child(lambda: not is_mapped(address))


def test_slots_stay_for_the_next_load_until_they_are_closed(
    storage: Storage, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two loads use the same slots; closing frees them, even if the pool is still referenced."""
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
    for _ in range(2):
        fetch(storage, [landing("t", item, stored, device.declare(torch.zeros_like(stored)))], verify=True, pools=pools)
    kept = pools._kept
    assert [memory() is not None for memory in made] == [True]
    assert is_so_in_child(lambda: pools._kept is None)
    pools.close()
    assert kept is not None
    assert [memory() for memory in made] == [None]
    assert device.pinned == []


def test_reads_for_a_device_are_larger_where_there_are_cores(
    storage: Storage, device: SimulatedDevice, pools: PinnedPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On many cores, items up to 32 MiB are read and hashed in one call; more threads have smaller reads."""
    hashed: list[int] = []
    digest = digests._digest

    def counted(data: memoryview) -> bytes:
        hashed.append(data.nbytes)
        return digest(data)

    monkeypatch.setattr(digests, "_digest", counted)
    stored = filled(torch.uint8, (gpu.DEVICE_BYTES,))
    item = write_file(storage, "f", {"t": stored})["t"]
    wanted = [landing("t", item, stored, device.declare(torch.zeros_like(stored)))]
    limits = limits_of(storage)
    monkeypatch.setattr(gpu, "cores", lambda: 4)
    assert pools.limits(wanted, limits, 8) == limits
    monkeypatch.setattr(gpu, "cores", lambda: 16)
    assert pools.limits(wanted, limits, 16).max_scratch_bytes == 16 << 20
    assert pools.limits([target_for("t", item, stored, torch.zeros_like(stored))], limits, 8) == limits
    checks: list[DigestCheck] = []

    def checked(item: StoredItem, start: int, nbytes: int) -> DigestCheck:
        checks.append(DigestCheck(item, start, nbytes))
        return checks[-1]

    monkeypatch.setattr(run, "DigestCheck", checked)
    fetch(storage, wanted, threads=8, verify=True, pools=pools)
    assert same(wanted[0].tensor, stored)
    assert len(checks) == 1 and checks[0]._whole is not None
    assert hashed == []  # no block was hashed by itself
    assert device.crossings == [1]
    assert device.most_pinned == 3 * gpu.DEVICE_BYTES  # one operation, and two slots whose copies are in progress


@pytest.mark.parametrize("is_full", [False, True], ids=["memory", "no memory"])
def test_small_tensors_cross_the_bus_together(
    storage: Storage, device: SimulatedDevice, pools: PinnedPools, is_full: bool
) -> None:
    """Adjacent small tensors of all dtypes cross the bus in one copy, or in one each if the device is full."""
    stored = {"large": filled(torch.int32, (300_000,))}  # comes first in the slot
    stored |= {f"{dtype_name(dtype)}{n}": filled(dtype, (50, 7), seed=n) for dtype in ALL_DTYPES for n in range(3)}
    items = write_file(storage, "f", stored)
    targets = {key: device.declare(torch.zeros_like(tensor)) for key, tensor in stored.items()}
    wanted = [landing(key, items[key], tensor, targets[key]) for key, tensor in stored.items()]
    piece = device.declare(torch.zeros(3, 7))
    wanted.append(landing("piece", items["float321"], stored["float321"], piece, Region((5, 0), (3, 7))))
    cast = device.declare(torch.zeros(50, 7, dtype=torch.float64))
    bent = device.declare(torch.zeros(7, 50)).t()
    if not is_full:
        wanted.append(landing("cast", items["float320"], stored["float320"], cast))
        wanted.append(landing("bent", items["float322"], stored["float322"], bent))
    device.memory = 0 if is_full else device.memory
    fetch(storage, wanted, threads=1, verify=True, pools=pools)
    assert [key for key in stored if not same(targets[key], stored[key])] == []
    assert same(piece, stored["float321"][5:8])
    if is_full:
        assert len(device.crossings) == len(wanted)
    else:
        assert torch.equal(cast.nan_to_num(), stored["float320"].double().nan_to_num())
        assert same(bent.contiguous(), stored["float322"])
        assert device.crossings == [1, 1]  # the large one, and all small ones
