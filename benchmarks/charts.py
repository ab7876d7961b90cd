"""Bars with their spreads. The colour of a peer's bar shows only what the run proves about it."""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from .harness import RESULTS, Spread, compare, stored

_DARK, _BAND, _BAND_TEXT = "#1a1a1a", "#cc79a7", "#9b3d70"
# Okabe and Ito's colours, which colour-blind readers can tell apart; overlap also has a pattern.
_STYLES: dict[str, dict[str, Any]] = {
    "ours": {"color": "#0072b2"},
    "ahead": {"color": "#e69f00"},
    "behind": {"color": "#9aa1a8"},
    "overlap": {"facecolor": "#eceef0", "edgecolor": "#9aa1a8", "hatch": "/////", "linewidth": 0},
    "alone": {"facecolor": "white", "edgecolor": "#9aa1a8", "hatch": "....", "linewidth": 0.8},
    "raw": {"facecolor": "white", "edgecolor": "#6b7280", "linewidth": 0.8},
}
_MEANINGS = {
    "ours": "dcp_tensorizer",
    "ahead": "a peer, clearly ahead",
    "behind": "a peer, clearly behind",
    "overlap": "a peer whose range overlaps: no difference shown",
    "alone": "a peer with nothing to compare it with: dcp_tensorizer failed, or was not measured",
    "raw": "a plain transfer of the same bytes, no checkpoint",
}
_IF_DRAWN = ("alone", "raw")  # in the legend only where a bar is of that kind
_WHISKERS = "from the lowest to the highest value; the bar is the median"
_READS = "raw reads of the same bytes: lowest, median, highest"
STYLE: dict[str, Any] = {
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": "#7a828c",
    "hatch.linewidth": 0.6,
}
_LINE = 0.165  # inches from one line of the notes to the next
_CHARACTERS = 17.4  # characters of the notes in an inch
_ROOM = 1.9  # the length of an axis, as a multiple of the longest whisker: the figures stand behind it
_LEAST = 0.006  # the minimum length of a bar, as a fraction of its axis, so that its colour shows
_ON = "\N{BLACK RIGHT-POINTING TRIANGLE}"


@dataclass(frozen=True)
class Bar:
    name: str
    spread: Spread | None
    kind: str = "peer"
    missing: str = "  not measured"


@dataclass(frozen=True)
class Panel:
    """Groups of bars, by title. In each group, peers are compared with the bar named ``reference``, if measured."""

    title: str
    groups: Mapping[str, Sequence[Bar]]
    reference: str
    form: Callable[[float], str]
    more_is_better: bool = True
    band: Spread | None = None
    cut: float | None = None

    def bars(self) -> Iterable[Bar]:
        return (bar for bars in self.groups.values() for bar in bars)

    def kinds(self) -> Iterable[str]:
        return (self.kind_of(bar, bars) for bars in self.groups.values() for bar in bars)

    def kind_of(self, bar: Bar, bars: Sequence[Bar]) -> str:
        """Returns the kind of a bar: for a measured peer, the result of its comparison with the reference."""
        if bar.kind != "peer" or bar.spread is None:
            return bar.kind
        reference = next((other.spread for other in bars if other.name == self.reference), None)
        return "alone" if reference is None else compare(reference, bar.spread, self.more_is_better)


def draw(name: str, title: str, notes: Sequence[str], panels: Sequence[Panel], columns: int, size: Any) -> None:
    """Stores a picture: rows of panels, each row with one set of names, and below them a legend and notes."""
    heights = [
        sum(len(bars) + bool(group) for group, bars in panel.groups.items()) + 2.5 for panel in panels[::columns]
    ]
    with mpl.rc_context(STYLE):
        figure, grid = plt.subplots(
            len(heights), columns, figsize=size, squeeze=False, layout="constrained", height_ratios=heights
        )
        for number, panel in enumerate(panels):
            _draw_panel(grid[number // columns][number % columns], panel, named=number % columns == 0)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11.5, fontweight="bold")
        _finish(figure, notes, panels)
        store(name, figure)
        plt.close(figure)


def store(name: str, figure: Figure) -> None:
    """The metadata of ``results/{name}.png`` has the commit and the digest of the results."""
    figure.savefig(RESULTS / f"{name}.png", dpi=160, metadata=source(name))


def source(name: str) -> dict[str, str]:
    digest = hashlib.sha256((RESULTS / f"{name}.json").read_bytes()).hexdigest()
    return {"Commit": str(stored(name)["machine"]["commit"]), "Results": f"SHA-256 {digest}"}


def _draw_panel(axes: Axes, panel: Panel, named: bool) -> None:
    lines: list[tuple[str, Bar | None]] = []
    highest = max((bar.spread["max"] for bar in panel.bars() if bar.spread is not None), default=1.0)
    end = panel.cut or highest * _ROOM
    for group, bars in panel.groups.items():
        if group:
            lines.append((group, None))
        for bar in bars:
            _draw_bar(axes, panel, bar, len(lines), panel.kind_of(bar, bars), end)
            lines.append((bar.name, bar))
    axes.set_xlim(0, end)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_title(panel.title)
    _draw_ticks(axes, panel, lines if named else [("", bar) for _, bar in lines], min(end, highest))
    if panel.band is not None:
        _draw_band(axes, panel.form, panel.band, end)


def _draw_band(axes: Axes, form: Callable[[float], str], band: Spread, end: float) -> None:
    if band["min"] > end:
        text = f"raw reads: {form(band['min'])}-{form(band['max'])}"
        axes.text(end, 0, text, color=_BAND_TEXT, rotation=270, ha="right", va="top", fontsize=7.5)
        return
    axes.axvspan(band["min"], band["max"], color=_BAND, alpha=0.25, linewidth=0, zorder=0)
    axes.axvline(band["median"], color=_BAND, linewidth=1, zorder=0.5)


def _draw_ticks(axes: Axes, panel: Panel, lines: Sequence[tuple[str, Bar | None]], highest: float) -> None:
    axes.set_yticks(range(len(lines)), [name for name, _ in lines])
    axes.tick_params(axis="y", length=0)
    for tick, (_, bar) in zip(axes.get_yticklabels(), lines, strict=True):
        tick.set_fontweight("bold" if bar is None else "normal")
    axes.locator_params(axis="x", nbins=8)
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= highest * 1.1])
    if panel.form(1).endswith("%"):
        axes.xaxis.set_major_formatter("{x:.0%}")


def _draw_bar(axes: Axes, panel: Panel, bar: Bar, y: int, kind: str, end: float) -> None:
    if bar.spread is None:
        axes.text(0, y, bar.missing, va="center", color="#6b7280", fontsize=7.5, style="italic")
        return
    low, median, high = (bar.spread[field] for field in ("min", "median", "max"))
    axes.barh(y, max(median, end * _LEAST), height=0.72, **_STYLES[kind])
    axes.plot([low, high], [y, y], color=_DARK, linewidth=1.2, marker="|", markersize=5, markeredgewidth=1.2)
    text = f"{panel.form(median)}  ({panel.form(low)}-{panel.form(high)})"
    style: dict[str, Any] = {"va": "center", "fontsize": 7.5, "fontweight": "bold" if kind == "ahead" else "normal"}
    if high > end:
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
        axes.text(end * 0.99, y, f"{text}  {_ON}", ha="right", bbox=box, **style)
    else:
        axes.text(max(high, median) + end * 0.02, y, text, **style)


def _finish(figure: Figure, notes: Sequence[str], panels: Sequence[Panel]) -> None:
    handles = _handles(panels)
    width, height = figure.get_size_inches()
    lines = [line for note in notes for line in textwrap.wrap(note, int(width * _CHARACTERS))]
    below = _LINE * (len(lines) + 0.6) / height
    legend = _LINE * 1.1 * ((len(handles) + 1) // 2) / height
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, below),
        ncols=2,
        frameon=False,
        fontsize=8,
        borderaxespad=0,
    )
    figure.text(0.012, 0.06 / height, "\n".join(lines), fontsize=7.5, va="bottom", color="#374151", linespacing=1.35)
    engine = figure.get_layout_engine()
    assert engine is not None
    bottom = below + legend + 0.2 / height
    engine.set(rect=(0, bottom, 1, 1 - bottom))


def _handles(panels: Sequence[Panel]) -> list[Any]:
    drawn = {kind for panel in panels for kind in panel.kinds()}
    shown = [kind for kind in _MEANINGS if kind in drawn or kind not in _IF_DRAWN]
    handles: list[Any] = [Patch(**_STYLES[kind], label=_MEANINGS[kind]) for kind in shown]
    handles.append(Line2D([], [], color=_DARK, marker="|", linewidth=1.2, label=_WHISKERS))
    if any(panel.band is not None for panel in panels):
        handles.append(Patch(color=_BAND, alpha=0.4, label=_READS))
    return handles
