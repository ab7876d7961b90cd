"""Tests of `fetch`: reads are exact and bounded, and damage is found and named."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_tensorizer import ChecksumMismatch, ReadError
from dcp_tensorizer._loading import run
from dcp_tensorizer._loading.plan import ReadTarget, Segment
from dcp_tensorizer._loading.run import fetch, limits_of, with_gaps
from dcp_tensorizer._storage.base import RangeReader, Storage
from dcp_tensorizer._storage.local_io import LocalFile
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._tensor_file.names import StoredItem
from dcp_tensorizer._tensor_file.regions import Region

from ...lab.faults import flip
from ...lab.processes import forget, open_descriptors
from ...lab.seams import cached
from ...lab.states import filled, same
from .stored import target_for, write_file

# --- progress and limits ---------------------------------------------------------------------------------------------


def test_progress_counts_up_to_the_total(storage: Storage) -> None:
    """Progress is reported by one call at a time, each with more bytes than the one before, until all are read."""
    stored = torch.zeros(20 << 20, dtype=torch.uint8)
    (item,) = write_file(storage, "f", {"t": stored}).values()
    calls: list[tuple[int, int]] = []
    moved = fetch(
        storage,
        [target_for("t", item, stored, torch.empty_like(stored))],
        threads=4,
        verify=False,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert moved == 20 << 20
    assert calls == sorted(calls)
    assert calls[-1] == (20 << 20, 20 << 20)
    assert len(calls) == 3


def reads_of(storage: Storage, targets: list[ReadTarget], **options: Any) -> list[tuple[str, int, list[int]]]:
    """Fetches targets; returns the thread, the offset and the sizes of the buffers of each read."""
    reads: list[tuple[str, int, list[int]]] = []
    read_into = LocalFile.read_into

    def recorded(file: LocalFile, buffers: Sequence[memoryview], offset: int) -> None:
        reads.append((threading.current_thread().name, offset, [buffer.nbytes for buffer in buffers]))
        read_into(file, buffers, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalFile, "read_into", recorded)
        patch.setattr(LocalFile, "once", lambda file, offset, nbytes: file)  # as if the page cache held it all
        fetch(storage, targets, **options)
    return reads


def test_reads_are_cut_for_the_cache(storage: Storage, verify: bool) -> None:
    """Hashed data is read in slices of large tensors, and in runs of small ones with their gaps; other data at once."""
    sizes = {"a": 300_000, "gap": 10_000, "b": 400_000, "c": 300_000, "large": (2 << 20) + 100}
    tensors = {key: filled(torch.uint8, (size,), seed=size) for key, size in sizes.items()}
    items = write_file(storage, "f", tensors)
    targets = [target_for(k, items[k], t, torch.empty_like(t)) for k, t in tensors.items() if k != "gap"]
    reads = reads_of(storage, targets, threads=1, verify=verify)
    pairs = [("a", "b"), ("b", "c"), ("c", "large")]
    gaps = [[gap] if (gap := items[b].offset - items[a].offset - items[a].length) else [] for a, b in pairs]
    run, start, large = [300_000, *gaps[0], 400_000, *gaps[1], 300_000], items["a"].offset, items["large"].offset
    slices = [(start, run), (large, [1 << 20]), (large + (1 << 20), [1 << 20]), (large + (2 << 20), [100])]
    whole = [(start, [*run, *gaps[2], sizes["large"]])]
    assert [read[1:] for read in reads] == (slices if verify else whole)
    for target in targets:
        assert torch.equal(target.tensor, tensors[target.key])


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
def test_what_other_ranks_read_too_comes_through_the_page_cache(
    storage: Storage, tmp_path: Path, verify: bool, shared: bool
) -> None:
    """A load that bypasses the page cache still reads shared data through it; data is exact, and damage is found."""
    tensors = {key: filled(torch.int32, (1000, 700), seed=n) for n, key in enumerate("abc")}
    items = write_file(storage, "f", tensors)
    loaded = {key: torch.empty_like(tensor) for key, tensor in tensors.items()}
    loaded |= {"b": torch.empty(700, 1000, dtype=torch.int32).t(), "c": torch.empty(1000, 700, dtype=torch.int64)}
    targets = [replace(target_for(k, items[k], t, loaded[k]), shared=shared) for k, t in tensors.items()]
    forget(tmp_path / "f")
    fetch(storage, targets, threads=2, verify=verify, page_cache=False)
    assert all(torch.equal(loaded[key].int(), tensors[key]) for key in tensors)
    assert cached(tmp_path / "f", items["b"].offset + items["b"].length // 2) == shared
    flip(tmp_path / "f", items["c"].offset + 1_000_001)
    forget(tmp_path / "f")
    if verify:
        with pytest.raises(ChecksumMismatch, match="'c'"):
            fetch(storage, targets, threads=2, verify=True, page_cache=False)


@pytest.mark.parametrize(
    ("asked", "available", "ranks", "stays"),
    [
        (None, 6, 1, True),
        (None, 5, 1, False),
        (None, 6, 2, False),
        (None, 12, 2, True),
        (None, None, 1, True),
        (False, None, 1, False),
        (True, 0, 1, True),
    ],
)
def test_the_page_cache_keeps_what_there_is_room_for(
    storage: Storage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: bool | None,
    available: int | None,
    ranks: int,
    stays: bool,
) -> None:
    """Data stays in the page cache if that can hold twice what the machine's ranks read (3 MiB each), or as chosen."""
    tensor = filled(torch.uint8, (3 << 20,))
    (item,) = write_file(storage, "f", {"t": tensor}).values()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(run, "available_memory", lambda: None if available is None else available << 20)
    forget(tmp_path / "f")
    target = target_for("t", item, tensor, torch.empty_like(tensor))
    fetch(storage, [target], verify=True, page_cache=asked)
    assert torch.equal(target.tensor, tensor)
    assert cached(tmp_path / "f", item.offset + (1 << 20)) == stays


def test_a_small_read_has_no_other_costs(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single small read starts no thread, and does not measure the free memory."""

    def fail(*arguments: object) -> None:
        raise AssertionError("not for a small read")

    stored = filled(torch.uint8, (1000,))
    item = write_file(storage, "f", {"t": stored})["t"]
    target = target_for("t", item, stored, torch.empty_like(stored))
    monkeypatch.setattr(run, "available_memory", fail)
    monkeypatch.setattr(threading.Thread, "start", fail)
    assert fetch(storage, [target], verify=True) == 1000
    assert torch.equal(target.tensor, stored)


class Watched(RangeReader):
    """A reader that calls a function before each read."""

    def __init__(self, file: RangeReader, before: Callable[[], object]) -> None:
        self._file = file
        self._before = before

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        self._before()
        self._file.read_into(buffers, offset)

    def close(self) -> None:
        self._file.close()


@pytest.mark.parametrize(
    ("asked", "suits", "expected"), [(None, (2, 2), 2), (3, (1, 2), 3), (1, (4, 8), 1)], ids=["storage", "more", "less"]
)
def test_a_load_has_as_many_threads_as_suit_the_storage_or_as_the_user_says(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, asked: int | None, suits: tuple[int, int], expected: int
) -> None:
    """Exactly as many reads run at once as the storage's tuning, or the user, sets."""
    storage.reads = replace(storage.reads, min_threads=suits[0], max_threads=suits[1])
    stored = filled(torch.uint8, (1000,))
    items = [write_file(storage, name, {"t": stored})["t"] for name in "abcdef"]
    all_there, names = threading.Barrier(expected), set()

    def before() -> None:
        names.add(threading.current_thread().name)
        all_there.wait(30)  # breaks if there are not as many

    opened = storage.open
    monkeypatch.setattr(storage, "open", lambda name: Watched(opened(name), before))
    wanted = [target_for("t", item, stored, torch.empty_like(stored)) for item in items]
    fetch(storage, wanted, threads=asked, verify=True)
    assert len(names) == expected
    assert all(torch.equal(target.tensor, stored) for target in wanted)


def test_threads_join_a_load_that_waits_for_the_storage(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of threads grows from the storage's minimum to its maximum."""
    storage.reads = replace(storage.reads, min_threads=1, max_threads=3)
    stored = filled(torch.uint8, (1000,))
    items = [write_file(storage, name, {"t": stored})["t"] for name in "abcdef"]
    all_there, begun = threading.Barrier(3), itertools.count(1)

    def before() -> None:
        number = next(begun)
        if number <= 3:
            threading.Event().wait(0.02)  # the storage's latency
        else:
            all_there.wait(30)  # breaks if there are not three of them

    opened = storage.open
    monkeypatch.setattr(storage, "open", lambda name: Watched(opened(name), before))
    fetch(storage, [target_for("t", item, stored, torch.empty_like(stored)) for item in items], verify=False)
    assert next(begun) == 7


def test_a_file_is_open_from_its_first_read_to_its_last(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single thread has one file open at a time, from the file's first read to its last."""
    tensors = {str(n): filled(torch.uint8, (100_000,), seed=n) for n in range(3)}
    items = {name: write_file(storage, name, tensors) for name in "abc"}
    events: list[str] = []

    class Noted(Watched):
        def close(self) -> None:
            super().close()
            events.append("close")

    def open_noted(name: str) -> RangeReader:
        events.append(name)
        return Noted(opened(name), lambda: events.append("read"))

    opened = storage.open
    monkeypatch.setattr(storage, "open", open_noted)
    limits = limits_of(storage)._replace(max_segments=1)
    wanted = [target_for(k, items[f][k], t, torch.empty_like(t)) for f in "cab" for k, t in tensors.items()]
    fetch(storage, wanted, threads=1, verify=True, limits=limits)
    assert events == [event for name in "abc" for event in (name, "read", "read", "read", "close")]
    assert all(torch.equal(target.tensor, tensors[target.key]) for target in wanted)


def test_nothing_wanted(storage: Storage) -> None:
    """Without targets, no file is opened and no byte is read."""
    assert fetch(storage, [], threads=1, verify=True) == 0


def test_scratch_memory_is_bounded(storage: Storage) -> None:
    """A strided load of 40 MiB by one thread holds at most one operation of 8 MiB beside the target."""
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
        fetch(storage, [target_for("t", item, stored, target)], threads=1, verify=True)
    assert int(target.sum()) == 0
    assert 0 < largest <= 8 << 20


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), min_size=1, max_size=8), st.integers(0, 50))
def test_gaps_lie_between_the_places(runs: list[tuple[int, int]], begin: int) -> None:
    """The buffers of a read are the memories of its segments, with gaps between them, in order."""
    segments = []
    stop = begin
    for gap, nbytes in runs:
        start = stop + (gap if segments else 0)
        stop = start + nbytes
        segments.append(Segment(StoredItem("f", "t", start, nbytes, "uint8", "tensor", b""), 0, nbytes, (), 0))
    content = bytes(number % 251 for number in range(stop))
    places = [memoryview(bytearray(nbytes)) for _, nbytes in runs]
    position = begin
    for buffer in with_gaps(segments, places):
        buffer[:] = content[position : position + buffer.nbytes]
        position += buffer.nbytes
    assert position == stop
    for segment, place in zip(segments, places, strict=True):
        assert place == content[segment.offset : segment.offset + segment.nbytes]


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path: Path) -> Iterator[tuple[Storage, torch.Tensor, StoredItem, Path]]:
    """Yields a tensor of three blocks in a file that a test may damage; checks that no descriptor stays open."""
    storage = open_storage(tmp_path)
    stored = filled(torch.uint8, (150_000,))
    (item,) = write_file(storage, "f", {"layer.weight": stored}).values()
    before = open_descriptors()
    yield storage, stored, item, tmp_path / "f"
    assert open_descriptors() == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dcp-read")]


@pytest.mark.parametrize("position", [0, 65_535, 65_536, 149_999])
@pytest.mark.parametrize("kind", ["direct", "strided"])
def test_a_damaged_byte_is_found_and_named(
    damaged: tuple[Storage, torch.Tensor, StoredItem, Path], position: int, kind: str
) -> None:
    """The error names the key, the file and the damaged block; without verify, the byte is read as it is stored."""
    storage, stored, item, path = damaged
    flip(path, item.offset + position)
    target = torch.empty_like(stored) if kind == "direct" else torch.empty(150_000, 2, dtype=torch.uint8)[:, 0]
    wanted = target_for("model.weight", item, stored, target)
    with pytest.raises(ChecksumMismatch) as caught:
        fetch(storage, [wanted], threads=2, verify=True)
    start = position // 65_536 * 65_536
    for word in (
        "'model.weight'",
        str(path),
        f"bytes {start:,} to {min(start + 65_536, 150_000):,}",
        f"{item.offset:,}",
    ):
        assert word in str(caught.value)
    fetch(storage, [wanted], threads=2, verify=False)
    assert (target != stored).nonzero().tolist() == [[position]]


def test_damage_outside_of_what_is_wanted_does_not_matter(
    damaged: tuple[Storage, torch.Tensor, StoredItem, Path],
) -> None:
    """Damage in a block that no target needs is not found, because the block is not read."""
    storage, stored, item, path = damaged
    flip(path, item.offset + 100_000)
    target = torch.empty(1000, dtype=torch.uint8)
    fetch(storage, [target_for("t", item, stored, target, Region((10,), (1000,)))], threads=1, verify=True)
    assert torch.equal(target, stored[10:1010])
    with pytest.raises(ChecksumMismatch):
        fetch(storage, [target_for("t", item, stored, target, Region((90_000,), (1000,)))], threads=1, verify=True)


def test_metadata_without_digests_verifies_nothing(damaged: tuple[Storage, torch.Tensor, StoredItem, Path]) -> None:
    """Missing digests are a mismatch."""
    storage, stored, item, _ = damaged
    with pytest.raises(ChecksumMismatch):
        fetch(
            storage,
            [target_for("t", item._replace(digests=b""), stored, torch.empty_like(stored))],
            threads=1,
            verify=True,
        )


@pytest.mark.parametrize("first_row", [0, 5], ids=["whole", "part"])
def test_a_flip_in_any_slice_is_found(storage: Storage, tmp_path: Path, first_row: int) -> None:
    """The error names only the damaged block of a tensor that is read and hashed in several slices."""
    stored = filled(torch.uint8, (100, 35_000))
    (item,) = write_file(storage, "f", {"t": stored}).values()
    region = Region((first_row, 0), (100 - first_row, 35_000))
    targets = [target_for("t", item, stored, torch.zeros(region.size, dtype=torch.uint8), region)]
    fetch(storage, targets, verify=True)
    assert torch.equal(targets[0].tensor, stored[first_row:])
    for position in range(first_row * 35_000, item.length, 777_777):
        flip(tmp_path / "f", item.offset + position)
        start = position // item.block * item.block
        with pytest.raises(
            ChecksumMismatch, match=rf"'t'.*bytes {start:,} to {min(start + item.block, item.length):,} of"
        ):
            fetch(storage, targets, verify=True)
        flip(tmp_path / "f", item.offset + position)


@pytest.mark.parametrize("verify_", [True, False])
def test_a_truncated_file_is_an_error_and_never_zeros(
    damaged: tuple[Storage, torch.Tensor, StoredItem, Path], verify_: bool
) -> None:
    """The error names the key, the file and the offset."""
    storage, stored, item, path = damaged
    os.truncate(path, item.offset + 100_000)
    with pytest.raises(ReadError) as caught:
        fetch(storage, [target_for("w", item, stored, torch.empty_like(stored))], threads=1, verify=verify_)
    assert not isinstance(caught.value, ChecksumMismatch)
    for word in ("'w'", str(path), f"{item.offset:,}", "too early"):
        assert word in str(caught.value)


def test_a_missing_file_is_an_error(damaged: tuple[Storage, torch.Tensor, StoredItem, Path]) -> None:
    """The error names the file that was removed after the check of all files; the files opened before are closed."""
    storage, stored, item, path = damaged
    target = torch.full_like(stored, 7)
    targets = [target_for("w", item._replace(file=name), stored, target) for name in ("f", "missing")]
    with pytest.raises(ReadError, match=r"missing.* was overwritten or removed while it was read: load it again"):
        fetch(storage, targets, threads=1, verify=True)
    path.unlink()


@pytest.mark.parametrize(
    ("error", "is_gone"),
    [(FileNotFoundError(), True), (OSError(errno.ESTALE, "stale"), True), (OSError(5, "I/O"), False)],
)
def test_an_object_that_is_gone_is_an_error(storage: Storage, error: OSError, is_gone: bool) -> None:
    """If a storage opens files only when they are read, the error says that the checkpoint was overwritten."""
    stored = torch.zeros(10)
    (item,) = write_file(storage, "f", {"t": stored}).values()

    class Gone(RangeReader):
        def read_into(self, buffers: Any, offset: int) -> None:
            raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "open", lambda name: Gone())
        with pytest.raises(ReadError, match="'t'") as caught:
            fetch(storage, [target_for("t", item, stored, torch.empty(10))], threads=1, verify=True)
    assert ("overwritten or removed while it was read" in str(caught.value)) == is_gone


def test_one_damaged_tensor_among_many_is_the_error(storage: Storage, tmp_path: Path) -> None:
    """The first failure is raised, and no further operation starts."""
    tensors = {f"layer.{n}": filled(torch.float32, (100_000,), seed=n) for n in range(30)}
    items = write_file(storage, "f", tensors)
    flip(tmp_path / "f", items["layer.17"].offset + 5)
    targets = [target_for(key, items[key], tensor, torch.empty_like(tensor)) for key, tensor in tensors.items()]
    with pytest.raises(ChecksumMismatch, match=r"'layer\.17'"):
        fetch(storage, targets, threads=3, verify=True)


def test_an_unknown_failure_of_the_storage_is_a_read_error(storage: Storage) -> None:
    """An error of a backend becomes a ReadError with its text, without credentials."""
    stored = torch.zeros(10)
    (item,) = write_file(storage, "f", {"t": stored}).values()

    class Broken(RangeReader):
        def read_into(self, buffers: Any, offset: int) -> None:
            raise RuntimeError("token expired for https://user:hunter2@host/x")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "open", lambda name: Broken())
        with pytest.raises(ReadError, match=r"'t'.*RuntimeError: token expired") as caught:
            fetch(storage, [target_for("t", item, stored, torch.empty(10))], threads=1, verify=True)
    assert "hunter2" not in str(caught.value)


# --- targets that share memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5,), (5_000_000,)], ids=["small", "of many segments"])
def test_tied_targets_of_tensors_that_differ(storage: Storage, verify: bool, shape: tuple[int, ...]) -> None:
    """Tensors loaded into overlapping memory are read in order: the last one is whole, as with torch's reader."""
    stored = {name: filled(torch.float32, shape, seed) for seed, name in enumerate("abc")}
    items = write_file(storage, "f", stored)
    memory = torch.zeros(2 * shape[0])
    targets = {"a": memory[: shape[0]], "b": memory[: shape[0]], "c": memory[shape[0] :]}
    seen: list[tuple[int, int]] = []
    for order in ("abc", "bca"):
        memory.zero_()
        wanted = [target_for(key, items[key], stored[key], targets[key]) for key in order]
        nbytes = fetch(storage, wanted, verify=verify, progress=lambda *counts: seen.append(counts))
        assert same(targets["a"], stored["b" if order == "abc" else "a"])
        assert same(targets["c"], stored["c"])
        assert nbytes == sum(tensor.nbytes for tensor in stored.values())
        assert seen[-1] == (nbytes, nbytes)


# --- modes of the calling thread -------------------------------------------------------------------------------------


@pytest.mark.parametrize("made_in", [False, True])
@pytest.mark.parametrize("read_in", [False, True])
def test_tensors_are_written_inside_and_outside_of_inference_mode(
    storage: Storage, made_in: bool, read_in: bool
) -> None:
    """Tensors that were made in inference mode can be written only in that mode, which new threads do not inherit."""
    stored = torch.arange(2000.0).view(40, 50)
    (item,) = write_file(storage, "f", {"t": stored}).values()
    with torch.inference_mode(made_in):
        converted, strided = torch.zeros(40, 50, dtype=torch.float64), torch.zeros(50, 40).t()
    with torch.inference_mode(read_in):
        fetch(storage, [target_for("t", item, stored, tensor) for tensor in (converted, strided)], verify=True)
    assert [tensor.is_inference() for tensor in (converted, strided)] == [made_in] * 2
    assert torch.equal(converted, stored.double())
    assert torch.equal(strided, stored)
