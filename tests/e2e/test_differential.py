"""A few cases with torch's own storage and with ours on real ranks: processes, and a gloo group for the saves."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..differential.explained import ALWAYS, judge
from ..differential.run import Case, Load, Save, Storages, run_in
from ..differential.values import Box, Object, Seq, Sharded, Tensor
from ..lab.ranks import run_ranks


def _state(seed, placements):
    tensors = [Sharded("bfloat16", (7, 5), p, seed + number) for number, p in enumerate(placements)]
    layers = Box("OrderedDict", tuple((f"w{number}", tensor) for number, tensor in enumerate(tensors)))
    plain = Seq(
        "list", (Tensor("float8_e5m2", (3, 2), "transposed", seed), Tensor("int64", (), seed=seed, by_rank=True))
    )
    return Box("dict", (("model", layers), ("optimizer", plain), ("step", Object("int" if seed < 90 else "none"))))


def _case(mode, planner, load_planner):
    loads = tuple(Load(0, 2, _state(90, placements), load_planner) for placements in (["1", "r", "0"], ["0", "1", "r"]))
    saves = (Save(_state(5, ["0", "1", "r"]), planner), Save(_state(7, ["r", "0", "1"]), planner))
    return Case(2, mode, True, saves, loads)


CASES = [
    _case("save", "none", "scratch"),
    _case("async_save", "to the lowest rank", "rows"),
    _case("overlap", "cached plans", "none"),
    _case("at once", "scratch", "recorded"),
]


def _outcomes(rank, folder):
    """Of each case, what this rank saw with torch's storage and with ours."""

    def here(size, function):
        assert size == rank.world_size
        return [function(rank.index)]

    storages = Storages()
    try:
        return [
            [run_in(folder / f"{number}-{ours}", case, ours, storages, here) for ours in (False, True)]
            for number, case in enumerate(CASES)
        ]
    finally:
        storages.close()


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.mode for case in CASES])
def test_real_ranks_find_no_difference(outcomes, number):
    """Every rank has the same saves, metadata and loads with both."""
    for rank, cases in enumerate(outcomes):
        theirs, ours = cases[number]
        verdict = judge(CASES[number], theirs, ours, lambda theirs=theirs: theirs)
        assert verdict.unexplained == [], f"rank {rank}"
        assert verdict.explained == set(ALWAYS)
        assert "state" in ours["loads"][0][0]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("differential")
    return run_ranks(2, _outcomes, folder)
