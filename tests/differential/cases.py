"""Cases that hypothesis makes: states of every kind, who saves them and how, and into what they are loaded."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from ..lab.states import ALL_DTYPES, dtype_name
from .objects import NEED_TRUST, PLAIN, UNSAVABLE
from .planners import EACH_ITS_OWN, LOAD_PLANNERS, SAVE_PLANNERS
from .run import MEANWHILE, Case, Load, Save
from .values import HOW_DESCRIBED, ODD_TENSORS, Box, Described, Object, Odd, Seq, Sharded, Slice, Spec, Tensor

__all__ = ["cases"]

_DTYPES = ["float32", "bfloat16", "int64", "float32", *map(dtype_name, ALL_DTYPES)]
_SHARDED_DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "int64", "float16", "complex64", "bool"]
_VIEWS = ["transposed", "stepped", "inner", "conj", "neg", "shared", "odd strides", "expanded"]
_KINDS = ["tensor", "tensor", "tensor", "parameter", "requires grad", "computed"]
_BOXES = ["dict", "dict", "OrderedDict", "defaultdict", "UserDict", "tagged", "proxy", "nested stateful"]
_SEQS = ["list", "list", "tuple", "namedtuple", "tagged"]
_ODD_KEYS = [
    "",
    ".",
    "a.b",
    "a",
    "b",
    "0",
    "a/b",
    "../x",
    "nul\0",
    "\N{GRINNING FACE}",
    "é",
    "e\u0301",
    "\ud800",
    "n" * 300,
]
_LONG_KEYS = [letter * 60_000 for letter in "abcde"] + ["f" * 70_000]  # a file's index holds four of them
_OTHER_KEYS = [0, 1, -1, (1, 2), ("a",), None, True, 1.5, b"k"]
_PLACEMENTS = ["0", "1", "r", "0r", "r0", "00", "01", "rr", "rows", "ss"]
_MODES = ["save", "save", "async_save", "async_save", "overlap", "at once"]
_OBJECTS = [*PLAIN, *PLAIN, *NEED_TRUST]
_ODD_OBJECTS = [*_OBJECTS, *UNSAVABLE]
_BAD_SAVERS = ("failing", "dropping late")

_SIZES = [3, 2, 1, 0, 3, 5, 8]


_up_to = functools.cache(functools.partial(st.integers, 0))  # to make a strategy takes longer than to draw from it


def _weighted(draw: Any, chance: int) -> bool:
    """True once in ``chance`` draws; shrinks to False."""
    return bool(draw(_up_to(chance - 1)) == chance - 1)


def _one_of(draw: Any, options: Sequence[Any]) -> Any:
    """One of some values; shrinks to the first."""
    return options[draw(_up_to(len(options) - 1))]


def _shape(draw: Any, least: int = 0) -> tuple[int, ...]:
    return tuple(_one_of(draw, _SIZES) for _ in range(least + draw(_up_to(3 - least))))


# --- what is saved ---------------------------------------------------------------------------------------------------


def _tensor(draw: Any) -> Tensor:
    view = _one_of(draw, _VIEWS) if _weighted(draw, 2) else "whole"
    kind = _one_of(draw, _KINDS)
    return Tensor(
        _one_of(draw, _DTYPES), _shape(draw), view, draw(_up_to(99)), kind, _weighted(draw, 8), _weighted(draw, 40)
    )


def _slice(draw: Any) -> Slice:
    return Slice(draw(st.integers(0, 1)), _one_of(draw, [0, 0, 8, 12]), _one_of(draw, [8, 8, 16]))


def _sharded(draw: Any) -> Sharded:
    placements = _one_of(draw, _PLACEMENTS)
    shape = _shape(draw, 2 if "1" in placements else 1)
    if placements == "rr" and _weighted(draw, 2):
        shape = ()
    if _weighted(draw, 24):
        shape = (1500, 32)  # of several blocks
    if placements == "rows":
        shape = tuple(max(1, size) for size in shape)
    return Sharded(_one_of(draw, _SHARDED_DTYPES), shape, placements, draw(_up_to(99)))


def _described(draw: Any) -> Described:
    shape = (_one_of(draw, [4, 8, 6, 5, 3]), *_shape(draw)[:2])
    how = _one_of(draw, sorted(HOW_DESCRIBED))
    return Described(_one_of(draw, _SHARDED_DTYPES), shape, how, 1 + draw(_up_to(2)), draw(_up_to(3)), draw(_up_to(99)))


def _object(draw: Any, odd: bool) -> Object:
    return Object(_one_of(draw, _ODD_OBJECTS if odd else _OBJECTS))


def _leaf(draw: Any, odd: bool) -> Spec:
    kind = _one_of(
        draw, ["tensor", "tensor", "tensor", "sharded", "sharded", "object", "object", "slice", "described", "odd"]
    )
    if kind == "odd":
        return Odd(_one_of(draw, sorted(ODD_TENSORS))) if odd else _tensor(draw)
    if kind == "object":
        return _object(draw, odd)
    makers: dict[str, Callable[[Any], Spec]] = {
        "tensor": _tensor,
        "sharded": _sharded,
        "slice": _slice,
        "described": _described,
    }
    return makers[kind](draw)


def _key(draw: Any, odd: bool) -> Any:
    if odd and _weighted(draw, 60):
        return _one_of(draw, _LONG_KEYS)
    if odd and _weighted(draw, 4):
        return _one_of(draw, [*_ODD_KEYS, *_OTHER_KEYS])
    return _one_of(draw, ["w", "x", "y", "z", "step", "layer1", "layer2"])


def _box(draw: Any, odd: bool, depth: int, kind: str = "dict", least: int = 0) -> Box:
    items: dict[Any, Spec] = {}
    for _ in range(least + draw(_up_to(4 - depth - least))):
        items.setdefault(_key(draw, odd), _value(draw, odd, depth))
    return Box(kind, tuple(items.items()))


def _value(draw: Any, odd: bool, depth: int) -> Spec:
    if depth < 3 and _weighted(draw, 3):
        if _weighted(draw, 2):
            members = tuple(_value(draw, odd, depth + 1) for _ in range(draw(_up_to(3))))
            return Seq(_one_of(draw, _SEQS), members)
        return _box(draw, odd, depth + 1, _one_of(draw, _BOXES))
    return _leaf(draw, odd)


def _state(draw: Any) -> Box:
    odd = _weighted(draw, 3)
    state = _box(draw, odd, 0, least=0 if odd else 1)
    if _weighted(draw, 4):
        state = Box("dict", tuple((k, _as_stateful(draw, value)) for k, value in state.items))
    return state


def _as_stateful(draw: Any, value: Spec) -> Spec:
    return Box("stateful", value.items) if isinstance(value, Box) and _weighted(draw, 2) else value


# --- what it is loaded into ------------------------------------------------------------------------------------------


def _blank(draw: Any, spec: Spec, trouble: bool) -> Spec:
    """A target for what was saved: as it should be, or, if there is to be trouble, not quite."""
    if isinstance(spec, Tensor):
        return _blank_tensor(draw, spec, trouble)
    if isinstance(spec, Sharded):
        if trouble and _weighted(draw, 8):
            return dataclasses.replace(spec, seed=555, dtype=_one_of(draw, _SHARDED_DTYPES))
        if _weighted(draw, 4):
            return Tensor(spec.dtype, spec.shape, "whole", 555)
        fit = [
            p
            for p in _PLACEMENTS
            if p != "rows" and ("1" not in p or len(spec.shape) > 1) and (spec.shape or "0" not in p)
        ]
        return dataclasses.replace(spec, seed=555, placements=_one_of(draw, [*fit, spec.placements]))
    if isinstance(spec, Described):
        if _weighted(draw, 2):
            return Tensor(spec.dtype, spec.shape, "whole", 555)
        if _weighted(draw, 3):
            return Sharded(spec.dtype, spec.shape, _one_of(draw, ["0", "r", "0r", "ss"]), 555)
        return dataclasses.replace(_described(draw), dtype=spec.dtype, shape=spec.shape, seed=555)
    if isinstance(spec, Slice):
        return spec if _weighted(draw, 2) else Tensor("float32", (spec.length,), "whole", 555)
    if isinstance(spec, Object):
        if trouble and _weighted(draw, 8):
            return Tensor("float32", (2,), "whole", 555)
        return Object(_one_of(draw, ["none", "int", "empty list", spec.name]))
    if isinstance(spec, Box):
        items = [
            (key, _blank(draw, value, trouble)) for key, value in spec.items if not (trouble and _weighted(draw, 10))
        ]
        if trouble and _weighted(draw, 10):
            items.append(("extra", _leaf(draw, False)))
        kind = _one_of(draw, [*_BOXES[:3], spec.kind]) if spec.kind != "stateful" and trouble else spec.kind
        return Box(kind, tuple(items))
    if isinstance(spec, Seq):
        members = [_blank(draw, member, trouble) for member in spec.members]
        return Seq(spec.kind, tuple(members[:-1] if trouble and _weighted(draw, 8) else members))
    return Tensor("float32", (3, 3), "whole", 555) if _weighted(draw, 3) else spec


def _blank_tensor(draw: Any, spec: Tensor, trouble: bool) -> Spec:
    dtype, shape, view = spec.dtype, spec.shape, "whole"
    if _weighted(draw, 3):
        view = _one_of(draw, ["transposed", "stepped", "inner", "shared", "conj", "neg", "odd strides"])
    kind = _one_of(draw, _KINDS)
    if trouble:
        what = _one_of(draw, ["", "", "", "dtype", "shape", "view", "object", "sharded"])
        if what == "dtype":
            dtype = _one_of(draw, _DTYPES)
        elif what == "shape":
            shape = _shape(draw)
        elif what == "view":
            view = _one_of(draw, ["meta", "expanded"])
        elif what == "object":
            return _object(draw, False)
        elif what == "sharded" and shape:
            return Sharded(dtype, shape, "0", 555)
    return Tensor(dtype, shape, view, 555, kind)


def _load(draw: Any, saves: tuple[Save, ...], paths: dict[int, int], ranks: int) -> Load:
    path = _one_of(draw, sorted(paths))
    save = saves[paths[path]]
    trusted = not _weighted(draw, 8)
    size = ranks if not save.together else _one_of(draw, [0, 1, 2, 3]) if _weighted(draw, 2) else ranks
    if _weighted(draw, 8):
        keys = (
            None
            if _weighted(draw, 2)
            else tuple(_one_of(draw, [str(k) for k, _ in save.state.items] or [""]) for _ in "ab")
        )
        return Load(path, min(size, 1), keys, trusted=trusted)
    planner = _one_of(draw, sorted(LOAD_PLANNERS.keys() - {EACH_ITS_OWN})) if _weighted(draw, 2) else "none"
    if _weighted(draw, 3) and not _has_other_keys(save.state):  # ours takes those as they are, torch's as text
        planner = EACH_ITS_OWN
    if save.planner == "nested" and not _weighted(draw, 4):
        planner = "nested"
    target = _blank(draw, save.state, trouble=_weighted(draw, 3))
    assert isinstance(target, Box)
    if save.planner == "renaming":
        target = Box("dict", tuple((f"renamed {key}", value) for key, value in target.items))
    return Load(path, size, target, planner, trusted, _weighted(draw, 6))


def _has_other_keys(spec: Spec) -> bool:
    """Whether there is a key that is not a string."""
    if isinstance(spec, Seq):
        return any(map(_has_other_keys, spec.members))
    return isinstance(spec, Box) and any(type(key) is not str or _has_other_keys(value) for key, value in spec.items)


# --- all of it -------------------------------------------------------------------------------------------------------


def _save(draw: Any) -> Save:
    planner = "none"
    if _weighted(draw, 3):
        planner = EACH_ITS_OWN
    elif _weighted(draw, 2):
        planner = _one_of(draw, [name for name in sorted(SAVE_PLANNERS) if name not in _BAD_SAVERS])
    elif _weighted(draw, 12):
        planner = _one_of(draw, _BAD_SAVERS)
    state = _state(draw)
    if planner == EACH_ITS_OWN and "'bits" in repr(state):
        planner = "none"  # torch's planner fails on them, where several ranks have them
    if planner == "nested" and _weighted(draw, 2):
        keys = _one_of(draw, [range(9), [(n, "a") for n in range(9)], [b"%d" % n for n in range(9)]])
        state = Box("dict", tuple(zip(keys, (value for _, value in state.items), strict=False)))
    return Save(state, planner)


@st.composite
def cases(draw: Any) -> Case:
    """A case with one to three saves, and one to three loads."""
    ranks = _one_of(draw, [0, 0, 0, 0, 0, 1, 2, 2, 3, 4])
    mode = _one_of(draw, _MODES)
    count = _one_of(draw, [1, 1, 1, 2, 3])
    if ranks == 0 and _weighted(draw, 8):
        mode, count = "threads", max(2, count)
    saves = tuple(_save(draw) for _ in range(count))
    if count > 1 and mode != "threads" and _weighted(draw, 3):
        saves = tuple(dataclasses.replace(saves[0], planner="cached plans") for _ in saves)  # the plans stay the same
    if mode == "threads":
        saves = tuple(
            dataclasses.replace(s, planner="none" if s.planner == "cached plans" else s.planner) for s in saves
        )
    if _weighted(draw, 12):
        saves = tuple(dataclasses.replace(save, together=False) for save in saves)
    case = Case(ranks, mode, not _weighted(draw, 3), saves, ())
    paths = {case.path_of(number): number for number in range(count)}
    loads = tuple(_load(draw, saves, paths, ranks) for _ in range(_one_of(draw, [1, 1, 2, 3])))
    if mode == "threads":
        loads = tuple(dataclasses.replace(load, ranks=0) for load in loads)
    meanwhile = _one_of(draw, MEANWHILE) if _weighted(draw, 6) else "nothing"
    return dataclasses.replace(case, loads=loads, meanwhile=meanwhile)
