"""Reads into targets of every kind are exact, and damage is found, named, and never silent."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_tensorizer import ChecksumMismatch, ReadError
from dcp_tensorizer._format import layout as layout_module
from dcp_tensorizer._format.chunks import Region
from dcp_tensorizer._format.encoder import encode
from dcp_tensorizer._format.layout import StoredItem
from dcp_tensorizer._format.tensorizer_file import lay_out
from dcp_tensorizer._loading import executor, read_planner
from dcp_tensorizer._loading.executor import ReadTarget, can_read_in_place, fetch
from dcp_tensorizer._loading.read_planner import ReadRequest
from dcp_tensorizer._memory.tensor_bytes import host_bytes
from dcp_tensorizer._storage.base import RangeReader, Storage
from dcp_tensorizer._storage.local import LocalStorage
from dcp_tensorizer._storage.local_read import LocalFile
from dcp_tensorizer._storage.open import open_storage

from ...simulated import SimulatedDevice
from ...support import ALL_DTYPES, cached, dtype_name, filled, forget, open_descriptors, same, sources

Tensors = dict[str, torch.Tensor]
Items = dict[str, StoredItem]


def write_file(storage: Storage, name: str, tensors: Tensors) -> Items:
    """Makes a data file and says where everything is in it."""
    layout = lay_out(sources(tensors.items()))
    sink = storage.create(name, layout.nbytes, sync=False)
    items = encode(layout, lambda source: host_bytes(tensors[source.name]), sink, threads=1, file=name)
    return {item.name: item for item in items}


def whole(tensor: torch.Tensor) -> Region:
    return Region((0,) * tensor.ndim, tuple(tensor.shape))


def wanted(
    key: str, item: StoredItem, stored: torch.Tensor, target: torch.Tensor, region: Region | None = None
) -> ReadTarget:
    request = ReadRequest(
        item, tuple(stored.shape), stored.itemsize, region or whole(stored), can_read_in_place(target, stored.dtype)
    )
    return ReadTarget(key, request, target)


def part(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    return tensor[tuple(slice(a, a + n) for a, n in zip(region.start, region.size, strict=True))]


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path)


@pytest.fixture(params=[True, False], ids=["verify", "trust"])
def verify(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


# --- targets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
def test_every_dtype_comes_back_in_whole_and_in_parts(storage: Storage, dtype: torch.dtype, verify: bool) -> None:
    """Bit-exact into contiguous memory, into strided memory, and as a region of it."""
    stored = filled(dtype, (9, 14))
    (item,) = write_file(storage, "f", {"t": stored}).values()
    region = Region((2, 3), (5, 8))
    contiguous = filled(dtype, (9, 14), seed=1)
    transposed = filled(dtype, (14, 9), seed=1).t()
    slice_ = filled(dtype, (5, 8), seed=1)
    columns = filled(dtype, (5, 16), seed=1)[:, 3:11]
    scalar = filled(dtype, (1, 1), seed=1)
    moved = fetch(
        storage,
        [
            wanted("contiguous", item, stored, contiguous),
            wanted("transposed", item, stored, transposed),
            wanted("slice", item, stored, slice_, region),
            wanted("columns", item, stored, columns, region),
            wanted("scalar", item, stored, scalar, Region((8, 13), (1, 1))),
        ],
        threads=2,
        verify=verify,
    )
    assert moved == stored.nbytes
    assert same(contiguous, stored)
    assert same(transposed.view(torch.uint8) if dtype.itemsize == 1 else transposed, as_plain(stored))
    assert same(slice_, part(stored, region))
    assert same(as_plain(columns), as_plain(part(stored, region)))
    assert same(scalar, stored[8:, 13:])


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes instead of one-byte elements, some of which cannot be copied from strided memory."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def test_zero_dimensional_tensors(storage: Storage, verify: bool) -> None:
    """A scalar goes into a scalar."""
    stored = torch.tensor(2.5)
    (item,) = write_file(storage, "f", {"t": stored}).values()
    target = torch.tensor(0.0)
    assert fetch(storage, [wanted("t", item, stored, target)], threads=1, verify=verify) == 4
    assert target.item() == 2.5


def test_other_dtypes_are_converted(storage: Storage, verify: bool) -> None:
    """As ``Tensor.copy_`` converts."""
    stored = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    (item,) = write_file(storage, "f", {"t": stored}).values()
    targets = [torch.empty(50, 3, dtype=dtype) for dtype in (torch.bfloat16, torch.float64, torch.complex64)]
    fetch(storage, [wanted("t", item, stored, target) for target in targets], threads=1, verify=verify)
    assert all(torch.equal(target, stored.to(target.dtype)) for target in targets)


def test_lazily_conjugated_and_negated_targets(storage: Storage, verify: bool) -> None:
    """What the target reads as afterwards is what was stored; its memory holds the conjugate."""
    stored = torch.randn(4, 5, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    items = write_file(storage, "f", {"z": stored, "imag": stored.imag.contiguous()})
    base, other = torch.zeros(4, 5, dtype=torch.complex64), torch.zeros(4, 5, dtype=torch.complex64)
    conjugated, negated = base.conj(), other.conj().imag
    assert not can_read_in_place(conjugated, torch.complex64)
    assert not can_read_in_place(torch._neg_view(torch.zeros(3)), torch.float32)
    fetch(
        storage,
        [wanted("z", items["z"], stored, conjugated), wanted("imag", items["imag"], stored.imag, negated)],
        threads=1,
        verify=verify,
    )
    assert torch.equal(conjugated, stored)
    assert torch.equal(base, stored.conj())
    assert torch.equal(other.imag, -stored.imag)


def test_only_plain_host_memory_is_read_into_directly() -> None:
    """Same dtype, C order, on the CPU; anything else goes through scratch memory."""
    assert can_read_in_place(torch.empty(3, 4), torch.float32)
    assert can_read_in_place(torch.empty(6, 4)[2:], torch.float32)
    assert not can_read_in_place(torch.empty(3, 4), torch.float64)
    assert not can_read_in_place(torch.empty(3, 4).t(), torch.float32)
    assert not can_read_in_place(torch.empty(1, 4).expand(3, 4), torch.float32)
    assert not can_read_in_place(torch.empty(3, device="meta"), torch.float32)


def test_memory_around_a_target_is_left_alone(storage: Storage, verify: bool) -> None:
    """A direct read of a row slice writes the slice and nothing beside it."""
    stored = filled(torch.uint8, (300, 1000))
    (item,) = write_file(storage, "f", {"t": stored}).values()
    base = torch.full((302, 1000), 7, dtype=torch.uint8)
    target = base[1:101]
    fetch(storage, [wanted("t", item, stored, target, Region((100, 0), (100, 1000)))], threads=3, verify=verify)
    assert torch.equal(target, stored[100:200])
    assert int((base[0] != 7).sum()) == int((base[101:] != 7).sum()) == 0


@st.composite
def loads(draw: st.DrawFn) -> list[tuple[int, Region, str]]:
    """Which regions of the tensors below to load, and into what."""
    chosen = []
    for _ in range(draw(st.integers(1, 5))):
        number = draw(st.integers(0, len(SHAPES) - 1))
        bounds = [sorted(draw(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)))) for n in SHAPES[number]]
        region = Region(tuple(a for a, _ in bounds), tuple(b - a + 1 for a, b in bounds))
        chosen.append((number, region, draw(st.sampled_from(["plain", "transposed", "wide", "converted"]))))
    return chosen


SHAPES = [(), (50,), (7, 11), (3, 5, 8), (2, 3, 2, 4)]
DTYPES = [torch.int64, torch.uint8, torch.float32, torch.bfloat16, torch.int16]


def target_for(region: Region, dtype: torch.dtype, kind: str) -> torch.Tensor:
    if kind == "transposed":
        return torch.zeros(region.size[::-1], dtype=dtype).permute(tuple(reversed(range(len(region.size)))))
    if kind == "wide":
        return torch.zeros((*region.size, 3), dtype=dtype)[..., 1]
    return torch.zeros(region.size, dtype=torch.float64 if kind == "converted" else dtype)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> tuple[Storage, Tensors, Items]:
    """Two files of tensors whose blocks are of 16 bytes."""
    storage = open_storage(tmp_path_factory.mktemp("several"))
    tensors = {str(n): torch.arange(math.prod(shape)).view(shape).to(DTYPES[n]) for n, shape in enumerate(SHAPES)}
    with small_limits():
        items = write_file(storage, "a", {k: t for k, t in tensors.items() if int(k) % 2})
        items |= write_file(storage, "b", {k: t for k, t in tensors.items() if not int(k) % 2})
    return storage, tensors, items


@contextmanager
def small_limits() -> Iterator[None]:
    """Blocks and operations of a few bytes, so that small tensors have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_module, "_MIN_BLOCK", 16)
        patch.setattr(read_planner, "_MAX_OPERATION", 64)
        patch.setattr(Storage, "max_gap_bytes", 8)
        patch.setattr(LocalStorage, "slice_bytes", 24)
        yield


@settings(max_examples=150)
@given(chosen=loads(), check=st.booleans())
def test_any_boxes_into_any_targets(
    several: tuple[Storage, Tensors, Items], chosen: list[tuple[int, Region, str]], check: bool
) -> None:
    """Many at once, of two files, overlapping, in operations of a few bytes: each target holds its region."""
    storage, tensors, items = several
    with small_limits():
        wants = []
        for number, region, kind in chosen:
            stored = tensors[str(number)]
            target = target_for(region, stored.dtype, kind)
            wants.append(wanted(str(number), items[str(number)], stored, target, region))
        fetch(storage, wants, threads=2, verify=check)
    for want, (number, region, _) in zip(wants, chosen, strict=True):
        assert torch.equal(want.target, part(tensors[str(number)], region).to(want.target.dtype))


# --- progress and limits ---------------------------------------------------------------------------------------------


def test_progress_counts_up_to_the_total(storage: Storage) -> None:
    """One call at a time, each with more bytes than the last, until all are done."""
    stored = torch.zeros(20 << 20, dtype=torch.uint8)
    (item,) = write_file(storage, "f", {"t": stored}).values()
    calls: list[tuple[int, int]] = []
    moved = fetch(
        storage,
        [wanted("t", item, stored, torch.empty_like(stored))],
        threads=4,
        verify=False,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert moved == 20 << 20
    assert calls == sorted(calls)
    assert calls[-1] == (20 << 20, 20 << 20)
    assert len(calls) == 3


def reads_of(storage: Storage, wants: list[ReadTarget], **options: Any) -> list[tuple[str, int, list[int]]]:
    """Fetches, and says of each read which thread made it, from where, and the sizes of its buffers."""
    reads: list[tuple[str, int, list[int]]] = []
    read_into = LocalFile.read_into

    def recorded(file: LocalFile, buffers: Sequence[memoryview], offset: int) -> None:
        reads.append((threading.current_thread().name, offset, [buffer.nbytes for buffer in buffers]))
        read_into(file, buffers, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalFile, "read_into", recorded)
        patch.setattr(LocalFile, "once", lambda file, offset, nbytes: file)  # as if the page cache held it all
        fetch(storage, wants, **options)
    return reads


def test_reads_are_cut_for_the_cache(storage: Storage, verify: bool) -> None:
    """Large tensors into slices, runs of small ones, gaps included, between them."""
    sizes = {"a": 300_000, "gap": 10_000, "b": 400_000, "c": 300_000, "large": (2 << 20) + 100}
    tensors = {key: filled(torch.uint8, (size,), seed=size) for key, size in sizes.items()}
    items = write_file(storage, "f", tensors)
    wants = [wanted(k, items[k], t, torch.empty_like(t)) for k, t in tensors.items() if k != "gap"]
    reads = reads_of(storage, wants, threads=1, verify=verify)
    gaps = [items[b].offset - items[a].offset - items[a].length for a, b in [("a", "b"), ("b", "c")]]
    assert [nbytes for _, _, nbytes in reads] == [
        [300_000, gaps[0], 400_000, *([gaps[1]] if gaps[1] else []), 300_000],
        [1 << 20],
        [1 << 20],
        [100],
    ]
    large = items["large"].offset
    assert [offset for _, offset, _ in reads] == [items["a"].offset, large, large + (1 << 20), large + (2 << 20)]
    for want in wants:
        assert torch.equal(want.target, tensors[want.key])


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
def test_what_other_ranks_read_too_comes_through_the_page_cache(
    storage: Storage, tmp_path: Path, verify: bool, shared: bool
) -> None:
    """And what nobody else does past it, into targets of any layout; both are what was saved, and damage shows."""
    tensors = {key: filled(torch.int32, (1000, 700), seed=n) for n, key in enumerate("abc")}
    items = write_file(storage, "f", tensors)
    targets = {key: torch.empty_like(tensor) for key, tensor in tensors.items()}
    targets |= {"b": torch.empty(700, 1000, dtype=torch.int32).t(), "c": torch.empty(1000, 700, dtype=torch.int64)}
    wants = [wanted(k, items[k], t, targets[k])._replace(shared=shared) for k, t in tensors.items()]
    forget(tmp_path / "f")
    fetch(storage, wants, threads=2, verify=verify)
    assert all(torch.equal(targets[key].int(), tensors[key]) for key in tensors)
    assert cached(tmp_path / "f", items["b"].offset + items["b"].length // 2) == shared
    flip(tmp_path / "f", items["c"].offset + 1_000_001)
    forget(tmp_path / "f")
    if verify:
        with pytest.raises(ChecksumMismatch, match="'c'"):
            fetch(storage, wants, threads=2, verify=True)


def test_a_load_begins_with_as_many_threads_as_suit_the_storage(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others join if those wait; the user's number is for both."""
    found = []
    monkeypatch.setattr(executor, "work_through", lambda operations, run, **threads: found.append(threads))
    storage.min_threads, storage.max_threads = 2, 6
    stored = filled(torch.uint8, (10_000,))
    (item,) = write_file(storage, "f", {"t": stored}).values()
    for threads in (None, 3):
        fetch(storage, [wanted("t", item, stored, torch.empty_like(stored))], threads=threads, verify=False)
    assert found == [{"first": 2, "most": 6}, {"first": 3, "most": 3}]


def test_nothing_wanted(storage: Storage) -> None:
    """No file is opened, no byte read."""
    assert fetch(storage, [], threads=1, verify=True) == 0


def test_scratch_memory_is_bounded(storage: Storage) -> None:
    """A strided load of 40 MiB by one thread never holds more than an operation of it besides the target."""
    stored = torch.zeros(40 << 10, 1 << 10, dtype=torch.uint8)
    (item,) = write_file(storage, "f", {"t": stored}).values()
    target = torch.ones(1 << 10, 40 << 10, dtype=torch.uint8).t()
    largest = 0
    make = torch.empty

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal largest
        tensor: torch.Tensor = make(*args, **kwargs)
        largest = max(largest, tensor.nbytes)
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", watched)
        fetch(storage, [wanted("t", item, stored, target)], threads=1, verify=True)
    assert int(target.sum()) == 0
    assert 0 < largest <= 8 << 20


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path: Path) -> Iterator[tuple[Storage, torch.Tensor, StoredItem, Path]]:
    """A tensor of three blocks in a file that a test may damage; no descriptor may be left open afterwards."""
    storage = open_storage(tmp_path)
    stored = filled(torch.uint8, (150_000,))
    (item,) = write_file(storage, "f", {"layer.weight": stored}).values()
    before = open_descriptors()
    yield storage, stored, item, tmp_path / "f"
    assert open_descriptors() == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dcp-read")]


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("position", [0, 65_535, 65_536, 149_999])
@pytest.mark.parametrize("kind", ["direct", "strided"])
def test_a_damaged_byte_is_found_and_named(
    damaged: tuple[Storage, torch.Tensor, StoredItem, Path], position: int, kind: str
) -> None:
    """The error has the key, the file and the place of the block; without verifying, the byte is read as it is."""
    storage, stored, item, path = damaged
    flip(path, item.offset + position)
    target = torch.empty_like(stored) if kind == "direct" else torch.empty(150_000, 2, dtype=torch.uint8)[:, 0]
    want = wanted("model.weight", item, stored, target)
    with pytest.raises(ChecksumMismatch) as caught:
        fetch(storage, [want], threads=2, verify=True)
    start = position // 65_536 * 65_536
    for word in ("'model.weight'", str(path), f"bytes {start:,} to {start + 65_536:,}", f"{item.offset:,}"):
        assert word in str(caught.value)
    fetch(storage, [want], threads=2, verify=False)
    assert (target != stored).nonzero().tolist() == [[position]]


def test_damage_outside_of_what_is_wanted_does_not_matter(
    damaged: tuple[Storage, torch.Tensor, StoredItem, Path],
) -> None:
    """Blocks that nobody asks for are not read, so not checked."""
    storage, stored, item, path = damaged
    flip(path, item.offset + 100_000)
    target = torch.empty(1000, dtype=torch.uint8)
    fetch(storage, [wanted("t", item, stored, target, Region((10,), (1000,)))], threads=1, verify=True)
    assert torch.equal(target, stored[10:1010])
    with pytest.raises(ChecksumMismatch):
        fetch(storage, [wanted("t", item, stored, target, Region((90_000,), (1000,)))], threads=1, verify=True)


def test_metadata_without_digests_verifies_nothing(damaged: tuple[Storage, torch.Tensor, StoredItem, Path]) -> None:
    """Missing digests are a mismatch, not a pass."""
    storage, stored, item, _ = damaged
    with pytest.raises(ChecksumMismatch):
        fetch(
            storage,
            [wanted("t", item._replace(digests=b""), stored, torch.empty_like(stored))],
            threads=1,
            verify=True,
        )


@pytest.mark.parametrize("first_row", [0, 5], ids=["whole", "part"])
def test_a_flip_in_any_slice_is_found(storage: Storage, tmp_path: Path, first_row: int) -> None:
    """Of a tensor that is read and hashed in several; the error names the damaged block and no other."""
    stored = filled(torch.uint8, (100, 35_000))
    (item,) = write_file(storage, "f", {"t": stored}).values()
    region = Region((first_row, 0), (100 - first_row, 35_000))
    wants = [wanted("t", item, stored, torch.zeros(region.size, dtype=torch.uint8), region)]
    fetch(storage, wants, verify=True)
    assert torch.equal(wants[0].target, stored[first_row:])
    for position in range(first_row * 35_000, item.length, 777_777):
        flip(tmp_path / "f", item.offset + position)
        start = position // item.block * item.block
        with pytest.raises(ChecksumMismatch, match=rf"'t'.*bytes {start:,} to {start + item.block:,} of"):
            fetch(storage, wants, verify=True)
        flip(tmp_path / "f", item.offset + position)


@pytest.mark.parametrize("verify_", [True, False])
def test_a_truncated_file_is_an_error_and_never_zeros(
    damaged: tuple[Storage, torch.Tensor, StoredItem, Path], verify_: bool
) -> None:
    """The error has the key, the file and the offset."""
    storage, stored, item, path = damaged
    os.truncate(path, item.offset + 100_000)
    with pytest.raises(ReadError) as caught:
        fetch(storage, [wanted("w", item, stored, torch.empty_like(stored))], threads=1, verify=verify_)
    assert not isinstance(caught.value, ChecksumMismatch)
    for word in ("'w'", str(path), f"{item.offset:,}", "too early"):
        assert word in str(caught.value)


def test_a_missing_file_is_an_error(damaged: tuple[Storage, torch.Tensor, StoredItem, Path]) -> None:
    """The error has the file; files that were opened before it are closed."""
    storage, stored, item, path = damaged
    target = torch.full_like(stored, 7)
    wants = [wanted("w", item._replace(file=name), stored, target) for name in ("f", "missing")]
    with pytest.raises(ReadError, match="missing"):
        fetch(storage, wants, threads=1, verify=True)
    path.unlink()


def test_one_damaged_tensor_among_many_is_the_error(storage: Storage, tmp_path: Path) -> None:
    """The first failure stops what has not begun, and is what is raised."""
    tensors = {f"layer.{n}": filled(torch.float32, (100_000,), seed=n) for n in range(30)}
    items = write_file(storage, "f", tensors)
    flip(tmp_path / "f", items["layer.17"].offset + 5)
    wants = [wanted(key, items[key], tensor, torch.empty_like(tensor)) for key, tensor in tensors.items()]
    with pytest.raises(ChecksumMismatch, match=r"'layer\.17'"):
        fetch(storage, wants, threads=3, verify=True)


def test_an_unknown_failure_of_the_storage_is_a_read_error(storage: Storage) -> None:
    """Whatever a backend raises is translated, with its text and without credentials."""
    stored = torch.zeros(10)
    (item,) = write_file(storage, "f", {"t": stored}).values()

    class Broken(RangeReader):
        def read_into(self, buffers: Any, offset: int) -> None:
            raise RuntimeError("token expired for https://user:hunter2@host/x")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "open", lambda name: Broken())
        with pytest.raises(ReadError, match=r"'t'.*RuntimeError: token expired") as caught:
            fetch(storage, [wanted("t", item, stored, torch.empty(10))], threads=1, verify=True)
    assert "hunter2" not in str(caught.value)


# --- targets on a (simulated) device ---------------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    device = SimulatedDevice()
    monkeypatch.setattr(executor, "CUDA", device)
    return device


def landing(
    key: str, item: StoredItem, stored: torch.Tensor, target: torch.Tensor, region: Region | None = None
) -> ReadTarget:
    """As for a target on a device: never read into directly."""
    request = ReadRequest(item, tuple(stored.shape), stored.itemsize, region or whole(stored), in_place=False)
    return ReadTarget(key, request, target)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
def test_targets_on_a_device_of_every_dtype_and_layout(
    storage: Storage, device: SimulatedDevice, dtype: torch.dtype
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
            wanted("on host", items["o"], other, on_host),
            wanted("the same on the host", items["t"], stored, both),
        ],
        threads=2,
        verify=True,
    )
    assert same(whole_target, stored)
    assert same(as_plain(columns), as_plain(part(stored, region)))
    assert same(on_host, other)
    assert same(both, stored)
    assert device.pinned == []


def test_elements_for_a_device_are_converted_there(storage: Storage, device: SimulatedDevice) -> None:
    """A target of another dtype gets the stored values."""
    stored = torch.arange(1000, dtype=torch.float32)
    (item,) = write_file(storage, "f", {"t": stored}).values()
    target = device.declare(torch.zeros(1000, dtype=torch.float64))
    fetch(storage, [landing("t", item, stored, target)], threads=2, verify=True)
    assert target.tolist() == stored.tolist()


def test_memory_for_loads_to_a_device_is_bounded(
    storage: Storage, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots go round: many operations, few slots, none read into before its copies are done."""
    monkeypatch.setattr(read_planner, "_MAX_OPERATION", 1 << 16)
    stored = {f"t{n}": filled(torch.int32, (300, 100), seed=n) for n in range(40)}
    items = write_file(storage, "f", stored)
    targets = {key: device.declare(torch.zeros_like(tensor)) for key, tensor in stored.items()}
    moved = fetch(
        storage,
        [landing(key, items[key], tensor, targets[key]) for key, tensor in stored.items()],
        threads=3,
        verify=True,
    )
    assert moved >= 40 * 120_000
    assert [key for key in stored if not same(stored[key], targets[key])] == []
    assert device.most_pinned <= 5 * (1 << 17)
    assert device.pinned == []


def test_loads_come_after_what_training_has_queued(storage: Storage, device: SimulatedDevice) -> None:
    """A kernel that fills the targets, queued before the load, does not overwrite what is loaded."""
    stored = torch.arange(1000)
    (item,) = write_file(storage, "f", {"t": stored}).values()
    target = device.declare(torch.zeros(1000, dtype=torch.int64))
    device.queue(lambda: target.fill_(-1))
    fetch(storage, [landing("t", item, stored, target)], threads=2, verify=True)
    device.run()
    assert target.tolist() == stored.tolist()


def test_a_load_to_a_device_that_fails_leaves_nothing_registered(
    storage: Storage, device: SimulatedDevice, tmp_path: Path
) -> None:
    """Damage is found before it goes to the device, and named."""
    stored = torch.arange(1000)
    (item,) = write_file(storage, "f", {"t": stored}).values()
    content = bytearray((tmp_path / "f").read_bytes())
    content[item.offset + 100] ^= 1
    (tmp_path / "f").write_bytes(content)
    target = device.declare(torch.zeros(1000, dtype=torch.int64))
    with pytest.raises(ChecksumMismatch, match="'t'"):
        fetch(storage, [landing("t", item, stored, target)], threads=2, verify=True)
    assert target.tolist() == [0] * 1000
    assert device.pinned == []


def test_a_shortage_of_memory_for_slots_is_a_read_error(
    storage: Storage, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what for, and how much."""
    stored = torch.arange(100_000)
    (item,) = write_file(storage, "f", {"t": stored}).values()
    target = device.declare(torch.zeros(100_000, dtype=torch.int64))
    monkeypatch.setattr("dcp_tensorizer._memory.memory_limit._available_memory", lambda: 1 << 16)
    with pytest.raises(ReadError, match=r"on their way to a GPU.*bytes of memory are available"):
        fetch(storage, [landing("t", item, stored, target)], threads=2, verify=True)


# --- targets that share memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5,), (700_000,)], ids=["small", "large"])
def test_tied_targets_of_tensors_that_differ(storage: Storage, verify: bool, shape: tuple[int, ...]) -> None:
    """Saved apart and loaded into one memory, a part of it or all: one of them is there, and nothing is damaged."""
    stored = {name: filled(torch.float32, shape, seed) for seed, name in enumerate("abc")}
    items = write_file(storage, "f", stored)
    memory = torch.zeros(2 * shape[0])
    targets = {"a": memory[: shape[0]], "b": memory[: shape[0]], "c": memory[shape[0] :]}
    for _ in range(5):
        memory.zero_()
        fetch(storage, [wanted(key, items[key], stored[key], t) for key, t in targets.items()], verify=verify)
        assert same(targets["a"], stored["a"]) or same(targets["a"], stored["b"])
        assert same(targets["c"], stored["c"])


def test_which_targets_share_memory(storage: Storage) -> None:
    """Those that overlap, contiguous or not; not those that lie side by side."""
    stored = filled(torch.float32, (4, 4))
    items = write_file(storage, "f", {"t": stored})
    memory = torch.zeros(100)
    targets = [
        memory[:16].view(4, 4),
        memory[16:32].view(4, 4),
        memory[31:47].view(4, 4),
        memory[60:].as_strided((4, 4), (8, 1)),
        memory[80:96].view(4, 4),
        torch.zeros(4, 4),
    ]
    found = executor._apart([wanted("t", items["t"], stored, target) for target in targets])
    assert [w.request.in_place for w in found] == [True, False, False, False, False, True]
    assert all(w.target is target for w, target in zip(found, targets, strict=True))
