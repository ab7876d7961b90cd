"""Tests of the elements of tensors under other names: in parts, and joined."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dcp_tensorizer._formats.rename import Parts, Renaming, place, wrong_way_back
from dcp_tensorizer._tensor_file.regions import Region

RULES: dict[Any, Any] = {
    "*.experts.w2": Parts("*.mlp.{}.down"),
    "*.experts.w13": Parts("*.mlp.{}.gate", "*.mlp.{}.up", dim=1),
    "*.qkv": Parts("*.q", "*.k", "*.v", sizes=(4, 1, 1)),
    "*.fused": Parts("*.queries", "*.key", "*.value", sizes=(2, 1, 1), groups=3),
    Parts("*.in.{}.w"): "*.stacked",
    Parts("*.c", "*.d", dim=1, groups=2): "*.cd",
    Parts("*.a", "*.b"): "*.ab",
    "embed": "tokens",
}
SHAPES = {
    "0.experts.w2": (3, 4, 5),
    "0.experts.w13": (3, 4, 6),
    "0.qkv": (12, 7),
    "0.fused": (24, 5),
    "0.c": (3, 4),
    "0.d": (3, 4),
    "0.in.0.w": (2, 3),
    "0.in.1.w": (2, 3),
    "0.b": (2, 2),
    "0.a": (2, 2),
    "embed": (9, 2),
    "scalar": (),
    "none": (0, 4),
}


def filled(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    sizes = np.cumsum([0, *(int(np.prod(shape)) for shape in shapes.values())])
    return {
        key: first + np.arange(np.prod(shape)).reshape(shape)
        for (key, shape), first in zip(shapes.items(), sizes, strict=False)
    }


def cut(array: np.ndarray, region: Region) -> np.ndarray:
    return array[(..., *(slice(start, start + size) for start, size in zip(*region, strict=True)))]


def moved(rules: Renaming, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays on the other side of a renaming."""
    result = {}
    for name, placed in place(rules, {key: array.shape for key, array in arrays.items()}).items():
        result[name] = np.full(placed.shape, -1)
        for box in placed.boxes:
            cut(result[name], box.here)[...] = cut(arrays[box.source], box.there).reshape(box.here.size)
    return result


def test_tensors_are_cut_and_put_together_and_come_back() -> None:
    """Experts, several parts of each, and fused projections map to the other side and back."""
    arrays = filled(SHAPES)
    there = moved(Renaming(RULES), arrays)
    w2, w13, qkv = arrays["0.experts.w2"], arrays["0.experts.w13"], arrays["0.qkv"]
    wanted = {f"0.mlp.{n}.down": w2[n] for n in range(3)}
    for n in range(3):
        wanted |= {f"0.mlp.{n}.gate": w13[n, :, :3], f"0.mlp.{n}.up": w13[n, :, 3:]}
    wanted |= {
        "0.q": qkv[:8],
        "0.k": qkv[8:10],
        "0.v": qkv[10:],
        "0.ab": np.concatenate([arrays["0.a"], arrays["0.b"]]),
    }
    # As Megatron has it: each group has its two heads of queries, its key and its value; a head has two rows.
    of_groups = arrays["0.fused"].reshape(3, 8, 5)
    wanted |= {
        "0.queries": of_groups[:, :4].reshape(12, 5),
        "0.key": of_groups[:, 4:6].reshape(6, 5),
        "0.value": of_groups[:, 6:].reshape(6, 5),
        "0.cd": np.stack([arrays["0.c"].reshape(3, 2, 2), arrays["0.d"].reshape(3, 2, 2)], axis=2).reshape(3, 8),
    }
    wanted |= {"0.stacked": np.stack([arrays["0.in.0.w"], arrays["0.in.1.w"]]), "tokens": arrays["embed"]}
    wanted |= {key: arrays[key] for key in ("scalar", "none")}
    assert set(there) == set(wanted)
    assert [key for key, array in wanted.items() if not np.array_equal(array, there[key])] == []
    back = moved(Renaming(RULES).inverse(), there)
    assert set(back) == set(arrays)
    assert [key for key, array in arrays.items() if not np.array_equal(array, back[key])] == []
    assert wrong_way_back(Renaming(RULES), place(Renaming(RULES), SHAPES)) is None


@pytest.mark.parametrize("side", [Renaming(RULES), Renaming(RULES).inverse()], ids=["there", "back"])
def test_a_region_is_carried_element_by_element(side: Renaming) -> None:
    """Each chunk of a source maps to the region of its elements, and back."""
    arrays = filled(SHAPES)
    if side.find("0.q") is not None:
        arrays = moved(Renaming(RULES), arrays)
    there = moved(side, arrays)
    found = 0
    for name, placed in place(side, {key: array.shape for key, array in arrays.items()}).items():
        for box in placed.boxes:
            shape = arrays[box.source].shape
            for start in np.ndindex(shape):
                region = Region(tuple(start), tuple(min(2, n - a) for a, n in zip(start, shape, strict=True)))
                if (here := box.carry(region)) is not None:
                    found += 1
                    common = region.intersect(box.there)
                    assert common is not None
                    assert box.fetch(here) == common
                    assert np.array_equal(cut(there[name], here).ravel(), cut(arrays[box.source], common).ravel())
    assert found > 100


@pytest.mark.parametrize(
    ("rules", "shapes", "message"),
    [
        ({"m.*": "*"}, {"m.a": (1,), "a": (1,)}, "'m.a' and 'a' would both be 'a'"),
        ({"x": Parts("e.{}")}, {"x": (2, 3), "e.1": (3,)}, "'x' and 'e.1' would both be 'e.1'"),
        ({Parts("a", "b"): "c"}, {"a": (1,), "b": (1,), "c": (2,)}, "'a' and 'c' would both be 'c'"),
        ({Parts("a", "b"): "c"}, {"a": (1,), "b": ()}, r"'b' has the shape \(\), and cannot be joined along dim=0"),
        (
            {Parts("a", "b", dim=1): "c"},
            {"a": (1, 1), "b": (2,)},
            r"'b' has the shape \(2,\), and cannot be joined along dim=1",
        ),
        ({Parts("a", "b"): "c"}, {"c": (2,), "a": (1,), "b": (1,)}, "'c' and 'a' would both be 'c'"),
        ({"x": Parts("e.{}")}, {"x": ()}, r"'x' of shape \(\) cannot be cut"),
        ({"x": Parts("a", "b")}, {"x": (3,)}, r"'x' of shape \(3,\) cannot be cut"),
        ({"x": Parts("a", "b", groups=3)}, {"x": (4,)}, r"'x' of shape \(4,\) cannot be cut"),
        ({Parts("a", "b", groups=2): "x"}, {"a": (3,), "b": (3,)}, r"'x' of shape \(6,\) cannot be cut"),
        ({"x": Parts("a", "b", dim=1)}, {"x": (4,)}, r"'x' of shape \(4,\) cannot be cut"),
        ({Parts("e.{}"): "x"}, {"e.0": (1,), "e.2": (1,)}, "no key for 'e.1'"),
        ({Parts("a", "b"): "x"}, {"a": (1,)}, "no key for 'b'"),
        ({Parts("a", "b", dim=1): "x"}, {"a": (1,), "b": (1,)}, "and cannot be joined along dim=1"),
        ({Parts("e.{}"): "x"}, {"e.0": (1,), "e.1": (2,)}, r"'e.1' has the shape \(2,\)"),
        ({Parts("a", "b"): "x"}, {"a": (3,), "b": (1,)}, r"'a' has the shape \(3,\), but as a part of 'x'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rules_that_do_not_fit_are_refused(rules: dict[Any, Any], shapes: dict[str, Any], message: str) -> None:
    """The error names the tensors."""
    with pytest.raises(ValueError, match=message):
        place(Renaming(rules), shapes)


def test_a_name_that_leads_back_to_another_is_found() -> None:
    """A load with the same rules would look for a tensor that was not saved."""
    rules, shapes = Renaming({"m.*": "*"}), {"m.a": (1,), "b": (1,)}
    assert wrong_way_back(rules, place(rules, shapes)) == ("b", "b", "m.b")
