"""The scale benchmark: its state, its exponents, its page; no measurements."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.pages import medians
from benchmarks.scale.model import Model, fitting, pieces, rows_of, smaller
from benchmarks.scale.report import render
from benchmarks.scale.summary import exponent, ratios, summarise
from benchmarks.scale.watch import Stopped, limits

MACHINE = {
    "date": "2026-01-01",
    "commit": "abc",
    "cores": 2,
    "memory_gib": 8.0,
    "file_system": "ext4",
    "kernel": "6.1.0",
    "python": "3.11.0",
    "packages": {"torch": "2.13.0"},
}
LOAD = {"seconds": 0.5, "read": 1_000_000, "memory": 2_000_000, "opened": 1}
SAVE = {"coordinator": 1.0, "rank": 0.01, "sent": 1000.0, "broadcast": 5000.0}


def _case(kind, contender, size, measured, **more):
    return {"case": {"kind": kind, "contender": contender, "size": size, **more}, "round": 0, "ranks": measured}


def _world(contender, ranks, load, save=SAVE, layers=None):
    layers = layers or fitting(ranks).layers
    return [
        _case("worlds", contender, ranks, [{"first": save, "repeat": save}], step="save", layers=layers),
        _case("worlds", contender, ranks, [load], step="load", layers=layers),
    ]


def test_the_model_is_a_70b_one():
    """70.6 billion parameters in 723 tensors; with two averages each they are 2,169. And 723 scalars, 11 objects."""
    model = Model()
    counts = tuple(map(len, (model.parameters(), model.tensors(), model.scalars(), model.objects())))
    assert counts == (723, 2169, 723, 11)
    assert sum(map(math.prod, model.parameters().values())) == 70_553_706_496


def test_more_ranks_have_a_smaller_model():
    """So that the chunks of all ranks fit; and beside it a still smaller one, where there is one."""
    models = [fitting(ranks) for ranks in (8, 512, 2048, 8192, 10**7)]
    assert [model.layers for model in models] == [80, 80, 21, 5, 1]
    assert [few and few.layers for few in map(smaller, models)] == [None, None, 5, 1, None]


@pytest.mark.parametrize(("rows", "ranks"), [(10, 4), (8, 4), (3, 5), (1, 1)])
def test_rows_are_sharded_as_torch_does(rows, ranks):
    """As `torch.chunk` cuts them; ranks that get none stand at the end."""
    sizes = [len(chunk) for chunk in torch.arange(rows).chunk(ranks)]
    sizes += [0] * (ranks - len(sizes))
    firsts = [min(sum(sizes[:rank]), rows) for rank in range(ranks)]
    assert [rows_of(rows, rank, ranks) for rank in range(ranks)] == list(zip(firsts, sizes, strict=True))


@pytest.mark.parametrize("ranks", [1, 3, 1500])
def test_the_pieces_of_all_ranks_are_the_state(ranks):
    """Every element, scalar and object is written once; no two pieces have the same place."""
    model = Model(1)
    found = [piece for rank in range(ranks) for piece in pieces(model, rank, ranks)]
    assert len({(piece.path, piece.offsets) for piece in found}) == len(found)
    for path, shape in (model.tensors() | dict.fromkeys(model.scalars(), ())).items():
        assert sum(math.prod(piece.shape) for piece in found if piece.path == path) == math.prod(shape)
    assert sorted(piece.path for piece in found if piece.kind == "object") == sorted(model.objects())
    empty = [piece.path for piece in found if not math.prod(piece.shape)]
    assert len(empty) == (36 if ranks == 1500 else 0)  # of each tensor one: 1,500 divides no number of rows


def test_exponents_are_slopes_on_log_axes():
    """Of a constant 0, of a square 2; of one point, or of nothing, none."""
    assert exponent({8: 3.0, 64: 3.0, 512: 3.0}) == 0
    assert exponent({x: 0.1 * x**2 for x in (8, 64, 512)}) == pytest.approx(2)
    assert math.isnan(exponent({8: 1.0}))
    assert math.isnan(exponent({8: 1.0, 64: 0.0}))


def test_figures_of_a_small_model_are_in_proportion():
    """If there is no other to tell what grows: times and bytes are multiplied, the number of files is not."""
    entry = summarise(_world("dcp_tensorizer", 8192, LOAD))["worlds | dcp_tensorizer | 8192"]
    factor = 2169 / 144
    assert entry["load"]["seconds"]["median"] == 0.5 * factor
    assert entry["load"]["opened"]["median"] == 1
    assert entry["first"]["coordinator"]["median"] == factor


def test_figures_of_two_models_are_extrapolated():
    """Along the line through them; what does not grow stays, and so does what noise has made smaller."""
    less = {**LOAD, "read": 700_000, "memory": 3_000_000}
    results = [*_world("dcp_tensorizer", 8192, LOAD), *_world("dcp_tensorizer", 8192, less, layers=1)]
    load = summarise(results)["worlds | dcp_tensorizer | 8192"]["load"]
    assert load["read"]["median"] == 1_000_000 + 300_000 * (2169 - 144) / (144 - 36)
    assert (load["seconds"]["median"], load["memory"]["median"]) == (0.5, 2_000_000)


def test_the_first_save_is_no_later_one():
    """A page gives the first save of each process by itself."""
    saves = [{"stall": s, "durable": 10 * s, "gap": 0.1, "collections": 0} for s in (5.0, 1.0, 2.0)]
    results = [_case("items", "torch", 1000, [{"saves": saves, "loads": [1.0, 3.0]}])]
    entry = summarise(results)["items | torch | 1000"]
    assert entry["stall"] == {"median": 1.5, "min": 1.0, "max": 2.0}
    assert entry["first save"]["median"] == 50.0
    assert entry["load"]["median"] == 2.0
    assert entry["stopped"] is None


def test_what_was_not_measured_is_no_goal_reached():
    """A goal without a figure is not a number."""
    measured = {name: value for name, _, value in medians(ratios(summarise(_world("dcp_tensorizer", 512, LOAD))))}
    assert measured["70B on 512 ranks, one rank's load: metadata read, MB"] == "1.000"
    assert measured["70B on 8,192 ranks, one rank's load: metadata read, MB"] == "nan"
    assert measured["32 real ranks: time of the load / torch's"] == "nan"


def test_the_page_says_what_was_stopped_and_what_failed():
    """A step that took too long stands in its table, and a case that failed in one of its own."""
    results = [
        *_world("dcp_tensorizer", 512, LOAD),
        *_world("torch", 512, {"stopped": "more than 120 s"}),
        {"case": {"kind": "ranks", "contender": "torch", "size": 32}, "round": 0, "error": "out of luck"},
    ]
    page = render(
        {
            "machine": MACHINE,
            "summary": summarise(results),
            "results": results,
            "plotted": False,
            "measured": {"items": "2026-11-22, commit abc"},
        }
    )
    assert "| 512 | dcp_tensorizer | 0.50 (0.50-0.50) | 1.00 (1.00-1.00) | 2.00 (2.00-2.00) | 1 (1-1) |" in page
    assert "| 512 | torch | stopped: more than 120 s |" in page
    assert "| ranks | torch | 32 | out of luck |" in page


def test_a_step_is_ended_in_time():
    """By its time limit, also where it catches every `Exception`."""

    def endless():
        while True:
            try:
                sum(range(1000))
            except Exception:
                continue

    with pytest.raises(Stopped, match=r"more than 0\.05 s"), limits(seconds=0.05):
        endless()


def test_a_step_is_ended_when_it_takes_too_much_memory():
    """By its limit, which counts from what there was before."""
    with pytest.raises(Stopped, match=r"more than 0\.05 GB of memory"), limits(nbytes=50_000_000):
        bytearray(200_000_000)
    assert len(bytearray(200_000_000)) == 200_000_000  # the limit is gone
