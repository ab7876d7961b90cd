"""The picture of the scale benchmark: curves on log axes, with their fitted exponents."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .. import charts
from .summary import OURS, TORCH, Summary, curve, exponent, sizes

_COLOURS = {OURS: "#0072b2", TORCH: "#e69f00"}
_CHARACTERS = 170


@dataclass(frozen=True)
class Curves:
    """One figure by size, for both contenders."""

    title: str
    kind: str
    path: tuple[str, ...]
    unit: float = 1.0


PANELS = (
    Curves("Planning a load, one rank (s)", "worlds", ("load", "seconds")),
    Curves("Metadata read by one rank (MB)", "worlds", ("load", "read"), 1e6),
    Curves("Peak memory of that (MB)", "worlds", ("load", "memory"), 1e6),
    Curves("Coordinating a save, coordinator (s)", "worlds", ("first", "coordinator")),
    Curves("Small tensors: save until durable (s)", "items", ("durable",)),
    Curves("Small tensors: load (s)", "items", ("load",)),
)
_SIZES = {"worlds": "ranks", "items": "tensors"}


def plot(summary: Summary, notes: Sequence[str]) -> None:
    plt = charts.plt
    figure, grid = plt.subplots(2, 3, figsize=(11, 7), layout="constrained")
    for axes, panel in zip(grid.flat, PANELS, strict=True):
        for contender, colour in _COLOURS.items():
            points = {x: y / panel.unit for x, y in curve(summary, panel.kind, contender, *panel.path).items()}
            axes.plot(list(points), list(points.values()), "o-", color=colour, label=label(contender, points))
        axes.set_xscale("log")
        shown = sizes(summary, panel.kind)
        axes.set_xticks(shown, [f"{size:,}" for size in shown])
        axes.set_xticks([], minor=True)
        axes.set_yscale("log")
        axes.set_title(panel.title, fontsize=9.5, fontweight="bold", loc="left")
        axes.set_xlabel(_SIZES[panel.kind], fontsize=8)
        axes.legend(fontsize=8, frameon=False)
    lines = [line for note in notes for line in textwrap.wrap(note, _CHARACTERS)]
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=7.5)
    charts.store("scale", figure)
    plt.close(figure)


def label(contender: str, points: Mapping[int, float]) -> str:
    slope = exponent(points)
    return contender if math.isnan(slope) else f"{contender}: exponent {slope:.2f}"
