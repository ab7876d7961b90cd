"""Tests of scattering: data arrives in targets of every dtype and layout, and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_tensorizer._loading.plan import ReadLimits, Segment
from dcp_tensorizer._loading.run import copy_elements, fetch, scatter
from dcp_tensorizer._storage.base import Storage
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._tensor_file import names as layout_module
from dcp_tensorizer._tensor_file.regions import Region, part_of

from ...lab.states import ALL_DTYPES, dtype_name, filled, raw, same
from .stored import Items, Tensors, as_plain, part, target_for, write_file


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
def test_every_dtype_comes_back_in_whole_and_in_parts(storage: Storage, dtype: torch.dtype, verify: bool) -> None:
    """Every dtype is exact in contiguous and strided targets, whole and in part."""
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
            target_for("contiguous", item, stored, contiguous),
            target_for("transposed", item, stored, transposed),
            target_for("slice", item, stored, slice_, region),
            target_for("columns", item, stored, columns, region),
            target_for("scalar", item, stored, scalar, Region((8, 13), (1, 1))),
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


def test_zero_dimensional_tensors(storage: Storage, verify: bool) -> None:
    """A 0-dim tensor loads into a 0-dim tensor."""
    stored = torch.tensor(2.5)
    (item,) = write_file(storage, "f", {"t": stored}).values()
    target = torch.tensor(0.0)
    assert fetch(storage, [target_for("t", item, stored, target)], threads=1, verify=verify) == 4
    assert target.item() == 2.5


def test_other_dtypes_are_converted(storage: Storage, verify: bool) -> None:
    """Values are converted as by ``Tensor.copy_``."""
    stored = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    (item,) = write_file(storage, "f", {"t": stored}).values()
    targets = [torch.empty(50, 3, dtype=dtype) for dtype in (torch.bfloat16, torch.float64, torch.complex64)]
    fetch(storage, [target_for("t", item, stored, target) for target in targets], threads=1, verify=verify)
    assert all(torch.equal(target, stored.to(target.dtype)) for target in targets)


def test_lazily_conjugated_and_negated_targets(storage: Storage, verify: bool) -> None:
    """The target's values are the stored ones; its memory holds their conjugates or negatives."""
    stored = torch.randn(4, 5, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    items = write_file(storage, "f", {"z": stored, "imag": stored.imag.contiguous()})
    base, other = torch.zeros(4, 5, dtype=torch.complex64), torch.zeros(4, 5, dtype=torch.complex64)
    conjugated, negated = base.conj(), other.conj().imag
    fetch(
        storage,
        [target_for("z", items["z"], stored, conjugated), target_for("imag", items["imag"], stored.imag, negated)],
        threads=1,
        verify=verify,
    )
    assert torch.equal(conjugated, stored)
    assert torch.equal(base, stored.conj())
    assert torch.equal(other.imag, -stored.imag)


def test_memory_around_a_target_is_left_alone(storage: Storage, verify: bool) -> None:
    """A read into a row slice changes no memory outside the slice."""
    stored = filled(torch.uint8, (300, 1000))
    (item,) = write_file(storage, "f", {"t": stored}).values()
    base = torch.full((302, 1000), 7, dtype=torch.uint8)
    target = base[1:101]
    fetch(storage, [target_for("t", item, stored, target, Region((100, 0), (100, 1000)))], threads=3, verify=verify)
    assert torch.equal(target, stored[100:200])
    assert int((base[0] != 7).sum()) == int((base[101:] != 7).sum()) == 0


SHAPES = [(), (50,), (7, 11), (3, 5, 8), (2, 3, 2, 4)]
DTYPES = [torch.int64, torch.uint8, torch.float32, torch.bfloat16, torch.int16]


@st.composite
def loads(draw: st.DrawFn) -> list[tuple[int, Region, str]]:
    """Generates regions of the tensors below, and kinds of targets for them."""
    chosen = []
    for _ in range(draw(st.integers(1, 5))):
        number = draw(st.integers(0, len(SHAPES) - 1))
        bounds = [sorted(draw(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)))) for n in SHAPES[number]]
        region = Region(tuple(a for a, _ in bounds), tuple(b - a + 1 for a, b in bounds))
        chosen.append((number, region, draw(st.sampled_from(["plain", "transposed", "wide", "converted"]))))
    return chosen


def empty_target(region: Region, dtype: torch.dtype, kind: str) -> torch.Tensor:
    if kind == "transposed":
        return torch.zeros(region.size[::-1], dtype=dtype).permute(tuple(reversed(range(len(region.size)))))
    if kind == "wide":
        return torch.zeros((*region.size, 3), dtype=dtype)[..., 1]
    return torch.zeros(region.size, dtype=torch.float64 if kind == "converted" else dtype)


@contextmanager
def small_blocks() -> Iterator[None]:
    """Sets blocks of a few bytes, so that small tensors have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_module, "_MIN_BLOCK", 16)
        yield


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> tuple[Storage, Tensors, Items]:
    """Returns a storage that is read in small slices, and two files in it with blocks of 16 bytes."""
    storage = open_storage(tmp_path_factory.mktemp("several"))
    storage.reads = replace(storage.reads, slice_bytes=24)
    tensors = {str(n): torch.arange(math.prod(shape)).view(shape).to(DTYPES[n]) for n, shape in enumerate(SHAPES)}
    with small_blocks():
        items = write_file(storage, "a", {k: t for k, t in tensors.items() if int(k) % 2})
        items |= write_file(storage, "b", {k: t for k, t in tensors.items() if not int(k) % 2})
    return storage, tensors, items


@settings(max_examples=150)
@given(chosen=loads(), check=st.booleans())
def test_any_regions_into_any_targets(
    several: tuple[Storage, Tensors, Items], chosen: list[tuple[int, Region, str]], check: bool
) -> None:
    """Many overlapping regions of two files, read in operations of a few bytes, fill exactly their targets."""
    storage, tensors, items = several
    limits = ReadLimits(max_gap_bytes=8, max_coalesced_bytes=64, max_scratch_bytes=64)
    targets = []
    for number, region, kind in chosen:
        stored = tensors[str(number)]
        tensor = empty_target(region, stored.dtype, kind)
        targets.append(target_for(str(number), items[str(number)], stored, tensor, region))
    with small_blocks():
        fetch(storage, targets, threads=2, verify=check, limits=limits)
    for target, (number, region, _) in zip(targets, chosen, strict=True):
        assert torch.equal(target.tensor, part(tensors[str(number)], region).to(target.tensor.dtype))


@pytest.mark.parametrize("kind", ["as it is", "transposed"])
def test_a_segment_fills_its_part_of_each_target_and_no_other_target(storage: Storage, kind: str) -> None:
    """An exchange passes segments to all targets of a tensor, even to targets that need none of the segment's bytes."""
    stored = torch.arange(80, dtype=torch.int32).view(20, 4)
    item = write_file(storage, "f", {"t": stored})["t"]
    regions = [Region((0, 0), (5, 4)), Region((5, 0), (5, 4)), Region((12, 0), (8, 4))]
    targets = tuple(target_for("t", item, stored, empty_target(r, torch.int32, kind), r) for r in regions)
    segment = Segment(item, 3 * 16, 7 * 16, targets, None)  # rows 3 to 6
    scatter(segment, memoryview(bytearray(stored[3:7].numpy().tobytes())))
    assert targets[0].tensor[:3].count_nonzero() == 0
    assert torch.equal(targets[0].tensor[3:], stored[3:5])
    assert torch.equal(targets[1].tensor[:2], stored[5:7])
    assert [int(target.tensor.count_nonzero()) for target in targets] == [8, 8, 0]


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
def test_elements_of_every_dtype_are_copied_from_strided_memory(dtype: torch.dtype) -> None:
    """One-byte dtypes without a copy kernel in torch are copied, too."""
    source = filled(dtype, (7, 4)).t()
    target = filled(dtype, (4, 9), seed=1)[:, 2:9]
    before = raw(as_plain(filled(dtype, (4, 9), seed=1))[:, :2])
    copy_elements(target, source)
    assert raw(as_plain(target)) == raw(as_plain(source))
    assert raw(as_plain(target.as_strided((4, 2), (9, 1), 0))) == before


def test_a_part_is_a_view_of_the_region_in_a_tensor_that_holds_a_larger_one() -> None:
    """Both regions count from the start of the stored tensor."""
    tensor = torch.arange(12).view(3, 4)
    view = part_of(tensor, Region((11, 22), (2, 1)), Region((10, 20), (3, 4)))
    assert view.tolist() == [[6], [10]]
    view.zero_()
    assert tensor.flatten().tolist() == [0, 1, 2, 3, 4, 5, 0, 7, 8, 9, 0, 11]
