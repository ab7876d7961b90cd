"""Summaries of the results: medians, exponents, and the figures with goals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..harness import Spread, figure, quotient, scaled, spread
from ..pages import Goal
from .model import Model, fitting, smaller

Summary = dict[str, dict[str, Any]]
OURS, PLANNED, TORCH = "dcp_tensorizer", "dcp_tensorizer, its planners", "torch"
EXCHANGED = "dcp_tensorizer, exchange"
_SCALED = ("seconds", "read", "memory", "coordinator", "rank", "sent", "broadcast")
LOAD, COORDINATOR, RANK = ("load", "seconds"), ("first", "coordinator"), ("first", "rank")


def summarise(results: Iterable[dict[str, Any]]) -> Summary:
    """Returns, by kind, contender and size, the spread of each figure, and why a case was ``stopped``."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        if "error" in result:
            continue
        case = result["case"]
        groups.setdefault(f"{case['kind']} | {case['contender']} | {case['size']}", []).append(result)
    return {name: _OF_KIND[name.split(" | ")[0]](runs) for name, runs in groups.items()}


def _items(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Leaves out the first save of each process, which counts only for ``first save``."""
    found = [rank for run in runs for rank in run["ranks"]]
    saves = [save for one in found for save in one["saves"][1:]]
    figures = ("stall", "durable", "gap", "collections")
    return {
        **{figure: spread(save[figure] for save in saves) for figure in figures},
        "first save": spread(one["saves"][0]["durable"] for one in found if one["saves"]),
        "load": spread(seconds for one in found for seconds in one["loads"]),
        "stopped": next((one["stopped"] for one in found if "stopped" in one), None),
    }


def _worlds(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the figures of a load, a first save and a repeated one, extrapolated to 80 layers."""
    model = fitting(runs[0]["case"]["size"])
    found: dict[str, Any] = {"stopped": {}}
    for step, parts in (("load", ("load",)), ("save", ("first", "repeat"))):
        measured = [run["ranks"][0] for run in runs if run["case"]["step"] == step and _is_of(run, model)]
        found["stopped"] |= {part: one["stopped"] for one in measured if "stopped" in one for part in parts}
        for part in parts:
            rows = _rows_of(runs, model, step, part)
            less = _rows_of(runs, smaller(model), step, part)
            if rows:
                found[part] = {name: spread(_extrapolated(rows, less, name, model)) for name in rows[0]}
    return found


def _is_of(run: dict[str, Any], model: Model | None) -> bool:
    return model is not None and run["case"]["layers"] == model.layers


def _rows_of(runs: list[dict[str, Any]], model: Model | None, step: str, part: str) -> list[dict[str, float]]:
    ranks = [run["ranks"][0] for run in runs if run["case"]["step"] == step and _is_of(run, model)]
    return [one if part == "load" else one[part] for one in ranks if "stopped" not in one]


def _extrapolated(rows: list[dict[str, float]], less: list[dict[str, float]], figure: str, model: Model) -> list[float]:
    """Extrapolates a figure to 80 layers, linearly from two models.

    With one model, the figure is taken to be proportional to the number of tensors.
    """
    values = [row[figure] for row in rows]
    tensors, all_tensors = len(model.tensors()), len(Model().tensors())
    if figure not in _SCALED or tensors == all_tensors:
        return values
    if not less:
        return [value * all_tensors / tensors for value in values]
    few = smaller(model)
    assert few is not None
    ahead = (all_tensors - tensors) / (tensors - len(few.tensors()))
    start = spread(row[figure] for row in less)["median"]
    return [value + ahead * max(0.0, value - start) for value in values]


def _ranks(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {step: spread(max(rank[step] for rank in run["ranks"]) for run in runs) for step in ("save", "load")}


def _replicas(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {figure: spread(max(rank[figure] for rank in run["ranks"]) for run in runs) for figure in ("load", "read")}


_OF_KIND: dict[str, Callable[[list[dict[str, Any]]], dict[str, Any]]] = {
    "items": _items,
    "worlds": _worlds,
    "ranks": _ranks,
    "replicas": _replicas,
}


def sizes(summary: Summary, kind: str) -> list[int]:
    return sorted({int(name.split(" | ")[2]) for name in summary if name.startswith(f"{kind} | ")})


def of(summary: Summary, kind: str, contender: str, size: int, *path: str) -> Spread | None:
    return figure(summary, f"{kind} | {contender} | {size}", *path)


def curve(summary: Summary, kind: str, contender: str, *path: str) -> dict[int, float]:
    found = {size: of(summary, kind, contender, size, *path) for size in sizes(summary, kind)}
    return {size: values["median"] for size, values in found.items() if values is not None}


def exponent(points: Mapping[int, float]) -> float:
    """Returns the slope of a curve on log axes, by least squares; NaN for fewer than two points, or if a value is 0."""
    if len(points) < 2 or min(points.values()) <= 0:
        return math.nan
    xs, ys = [math.log(x) for x in points], [math.log(y) for y in points.values()]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    across = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return across / sum((x - x_mean) ** 2 for x in xs)


def ratios(summary: Summary) -> list[Goal]:
    def over_torch(kind: str, size: int, *path: str) -> Spread | None:
        return quotient(of(summary, kind, OURS, size, *path), of(summary, kind, TORCH, size, *path))

    def slope(path: Sequence[str], contender: str = OURS) -> float | None:
        found = exponent(curve(summary, "worlds", contender, *path))
        return None if math.isnan(found) else found

    rows: list[Goal] = [
        ("exponent in ranks: planning a load, on one rank", "<= 0.2", slope(LOAD)),
        ("exponent in ranks: coordinating a save, on each rank", "<= 0.2", slope(RANK, PLANNED)),
        ("exponent in ranks: coordinating a save, on the coordinator", "<= 1.1", slope(COORDINATOR, PLANNED)),
    ]
    for step, wanted in (("first", "<= 10"), ("repeat", "<= 1")):
        name = f"70B on 512 ranks, coordinator, {step} save with `SavePlanner`, s"
        rows.append((name, wanted, of(summary, "worlds", PLANNED, 512, step, "coordinator")))
    for ranks in (512, 8192):
        where, megabyte = f"70B on {ranks:,} ranks, one rank's load", 1e-6
        load = {name: of(summary, "worlds", OURS, ranks, "load", name) for name in ("read", "seconds", "memory")}
        rows += [
            (f"{where}: metadata read, MB", "<= 5", scaled(load["read"], megabyte)),
            (f"{where}: from `read_metadata` to the first byte, s", "<= 2", load["seconds"]),
            (f"{where}: peak memory, MB", "<= 100", scaled(load["memory"], megabyte)),
        ]
    return [
        *rows,
        ("20,000 small tensors: save until durable, s", "<= 2", of(summary, "items", OURS, 20_000, "durable")),
        ("20,000 small tensors: stop / torch's", "<= 1.0", over_torch("items", 20_000, "stall")),
        ("100,000 small tensors: save until durable, s", "<= 10", of(summary, "items", OURS, 100_000, "durable")),
        ("100,000 small tensors: load, s", "<= 6", of(summary, "items", OURS, 100_000, "load")),
        ("the same with `LoadPlanner`", "<= 6", of(summary, "items", PLANNED, 100_000, "load")),
        ("32 real ranks: time of the first save / torch's", "<= 1.0", over_torch("ranks", 32, "save")),
        ("32 real ranks: time of the load / torch's", "<= 0.8", over_torch("ranks", 32, "load")),
        ("4 ranks that load the same: read / stored", "<= 1.1", of(summary, "replicas", EXCHANGED, 4, "read")),
    ]
