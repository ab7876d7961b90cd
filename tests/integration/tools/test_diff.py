"""`diff` compares values in any chunks, and measures differences exactly at the limits of each dtype."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_tensorizer.tools._diff import Change, Difference, diff_views
from dcp_tensorizer.tools._formats.registry import open_checkpoint
from dcp_tensorizer.tools._view import CheckpointView

from ...lab.checkpoints import ODD, make_checkpoint, save_wrapper
from ...lab.states import ALL_DTYPES, filled


def compare(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], chunks: Any = None, **sizes: int
) -> Difference:
    for name, state in (("a", before), ("b", after)):
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        objects = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
        make_checkpoint(tmp_path / name, tensors, objects, chunks if name == "a" else None)
    return diff_views(open_checkpoint(tmp_path / "a", {}), open_checkpoint(tmp_path / "b", {}), **sizes)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_the_same_values_in_other_chunks(tmp_path: Path, dtype: torch.dtype) -> None:
    """Equal tensors of every dtype are equal in different chunks, NaNs included."""
    state = {"half": filled(dtype, (5, 4)), "columns": filled(dtype, (5, 4), 1), "none": torch.empty(0, dtype=dtype)}
    found = compare(tmp_path, state, state, ODD)
    assert (bool(found), found.same) == (False, 3)
    assert found.nbytes == 2 * 2 * 20 * dtype.itemsize


def test_the_same_digests_need_no_reading(tmp_path: Path) -> None:
    """Tensors in the same chunks with the same digests are not read."""
    found = compare(tmp_path, {"x": filled(torch.float32, (5, 4))}, {"x": filled(torch.float32, (5, 4))})
    assert (bool(found), found.same, found.nbytes) == (False, 1, 0)


def test_objects_with_the_same_digests_are_not_read(tmp_path: Path) -> None:
    """Objects with the same digests are not read; all others are."""
    make_checkpoint(tmp_path / "a", {}, {"same": [1], "other": [2]})
    make_checkpoint(tmp_path / "b", {}, {"same": [1], "other": [3]})
    read: list[str] = []

    def watched(name: str) -> CheckpointView:
        view = open_checkpoint(tmp_path / name, {})
        values = {
            key: replace(stored, read=lambda stored=stored: (read.append(f"{name}.{stored.key}"), stored.read())[1])
            for key, stored in view.objects.items()
        }
        return replace(view, values=values)

    assert diff_views(watched("a"), watched("b")).changed == (Change("other", "value", "[2]", "[3]"),)
    assert read == ["a.other", "b.other"]


def test_keys_shapes_dtypes_and_kinds(tmp_path: Path) -> None:
    """`diff` reports added and removed keys, and changes of shape, dtype and kind."""
    found = compare(
        tmp_path,
        {"gone": torch.ones(1), "shape": torch.ones(2, 3), "dtype": torch.ones(2), "kind": torch.ones(1), "o": [1]},
        {"new": 5, "shape": torch.ones(3, 2), "dtype": torch.ones(2).half(), "kind": 3, "o": [2]},
    )
    assert (found.added, found.removed, found.same) == (("new",), ("gone",), 0)
    assert set(found.changed) == {
        Change("shape", "shape", "2 x 3", "3 x 2"),
        Change("dtype", "dtype", "float32", "float16"),
        Change("kind", "kind", "tensor", "object"),
        Change("o", "value", "[1]", "[2]"),
    }


@pytest.mark.parametrize(
    ("a", "b", "differing", "largest", "relative"),
    [
        (torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 3.0, 8.0]), 2, 4.0, 0.5),
        (torch.tensor([0.0]), torch.tensor([-0.0]), 1, 0.0, 0.0),
        (torch.tensor([math.inf]), torch.tensor([1.0]), 1, math.inf, math.inf),
        (torch.tensor([math.nan, 1.0]), torch.tensor([1.0, 1.0]), 1, math.nan, math.nan),
        (torch.tensor([2**63 - 1]), torch.tensor([-(2**63)]), 1, 2.0**64 - 1, 2.0),
        (torch.tensor([2**60]), torch.tensor([2**60 + 1]), 1, 1.0, 2.0**-60),
        (torch.tensor([True, False]), torch.tensor([False, False]), 1, 1.0, 1.0),
        (torch.tensor([255], dtype=torch.uint8), torch.tensor([0], dtype=torch.uint8), 1, 255.0, 1.0),
        (torch.tensor([1.0]).bfloat16(), torch.tensor([1.5]).bfloat16(), 1, 0.5, 1 / 3),
        (torch.tensor([3 + 4j]), torch.tensor([0j]), 1, 5.0, 1.0),
        (torch.tensor(1.0).to(torch.float8_e4m3fn), torch.tensor(2.0).to(torch.float8_e4m3fn), 1, 1.0, 0.5),
    ],
)
def test_how_far_values_lie_apart(
    tmp_path: Path, a: torch.Tensor, b: torch.Tensor, differing: int, largest: float, relative: float
) -> None:
    """`diff` reports the largest absolute difference, and the largest one relative to the larger value."""
    (change,) = compare(tmp_path, {"x": a}, {"x": b}).changed
    assert (change.elements, change.differing) == (a.numel(), differing)
    assert change.largest == pytest.approx(largest, nan_ok=True)
    assert change.relative == pytest.approx(relative, nan_ok=True)


def test_dtypes_without_arithmetic_are_counted(tmp_path: Path) -> None:
    """For a dtype without arithmetic, `diff` counts differing elements, and reports no distance."""
    a = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    b = torch.tensor([0, 1, 0, 2], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    (change,) = compare(tmp_path, {"x": a}, {"x": b}).changed
    assert (change.differing, change.largest, change.relative) == (2, None, None)


def test_blocks_add_up(tmp_path: Path) -> None:
    """The result does not depend on the size of the blocks in which tensors are compared."""
    a = torch.arange(60.0).reshape(3, 4, 5)
    b = a.clone()
    b[2, 3, 4] += 7
    b[0, 1, 2] -= 1
    (change,) = compare(tmp_path, {"x": a}, {"x": b}, block_bytes=24, elements_at_once=3).changed
    assert (change.elements, change.differing, change.largest) == (60, 2, 7.0)


def test_tensors_of_subclasses_differ_in_any_chunk(tmp_path: Path) -> None:
    """`diff` compares all chunks of a tensor of a subclass, not only the first rank's."""
    save_wrapper(tmp_path / "a", [b"one", b"two"])
    save_wrapper(tmp_path / "b", [b"one", b"THREE"])
    a, b = (open_checkpoint(tmp_path / name, {}) for name in "ab")
    assert (b.objects["w"].read(), b.objects["w"].nbytes) == (b"oneTHREE", 8)
    assert [change.key for change in diff_views(a, b).changed] == ["w"]
    assert not diff_views(a, open_checkpoint(tmp_path / "a", {}))
    save_wrapper(tmp_path / "c", [b"one", b"TWO"])
    assert [change.key for change in diff_views(a, open_checkpoint(tmp_path / "c", {})).changed] == ["w"]


def test_objects_are_compared_by_value(tmp_path: Path) -> None:
    """`diff` compares objects by type and value, because pickles of equal values may differ."""
    one, two = "".join(["ab"] * 10), "".join(["ab"] * 10)
    same: dict[str, Any] = {"o": {"a": one, "b": one}, "n": 1, "nan": math.nan, "l": [torch.ones(2)]}
    other: dict[str, Any] = {"o": {"a": one, "b": two}, "n": 1.0, "nan": math.inf, "l": [torch.zeros(2)]}
    found = compare(tmp_path, same, other)
    assert {change.key for change in found.changed} == {"n", "nan", "l"}
