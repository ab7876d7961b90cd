"""The picture of the demo: the events, the losses, and the differences of losses between runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

if TYPE_CHECKING:
    from .demo import Runs
    from .record import Run

__all__ = ["draw"]

_GREY, _BLUE, _ORANGE, _RED = "#c3c9d0", "#0072b2", "#e07b00", "#c1121f"
_WIDE, _MEDIUM, _THIN = 9, 4.5, 1.8  # so that curves that coincide are all visible
_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#7a828c",
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlepad": 10,
    "figure.constrained_layout.hspace": 0.06,
    "legend.edgecolor": "none",
    "legend.framealpha": 1,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    "xtick.color": "#4a5058",
    "ytick.color": "#4a5058",
}


def draw(runs: Runs, path: Path) -> None:
    """Writes the picture as a PNG."""
    with mpl.rc_context(_STYLE):
        figure, (lanes, losses, differences) = plt.subplots(
            3, 1, figsize=(9, 8.4), height_ratios=(1.3, 3, 1.5), sharex=True, layout="constrained"
        )
        _draw_lanes(lanes, runs.killed, runs.resumed_on_fewer)
        _draw_memory(lanes, runs.killed_between_saves, runs.resumed_from_memory)
        _draw_losses(losses, runs)
        _draw_differences(differences, runs)
        for axes in (lanes, losses):
            axes.axvline(_kill(runs.killed), color=_RED, linewidth=1, linestyle=(0, (3, 3)), zorder=0)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _kill(killed: Run) -> float:
    """Returns the position of the kill on the axis: in the step after the last completed one."""
    return max(killed.losses) + 0.5


def _draw_lanes(axes: Axes, killed: Run, resumed: Run) -> None:
    assert killed.killed_in_save is not None and resumed.loaded is not None
    start, end = resumed.loaded.step, _kill(killed)
    axes.hlines(1, 0, end, color=_BLUE, linewidth=3)
    axes.hlines(0, start, max(resumed.losses), color=_ORANGE, linewidth=3)
    for run, lane, color in ((killed, 1, _BLUE), (resumed, 0, _ORANGE)):
        axes.plot(list(run.saved), [lane] * len(run.saved), **_circle(color), linestyle="none")
    axes.plot([end], [1], "X", color=_RED, markersize=12, markeredgecolor="white", zorder=5)
    what = f"SIGKILL to every rank\nduring the save of step {killed.killed_in_save}"
    axes.text(end + 0.6, 1, what, color=_RED, va="center")
    arrow = {"arrowstyle": "-|>", "color": _ORANGE, "linewidth": 2, "shrinkA": 7, "shrinkB": 0, "mutation_scale": 14}
    axes.annotate("", (start, -0.04), (start, 1), arrowprops=arrow)
    axes.text(start - 0.4, 0, f"resumed from step {start}", color=_ORANGE, ha="right", va="center")
    axes.set_yticks([1, 0, -1], [f"{killed.ranks} ranks", f"{resumed.ranks} ranks", "in memory"])
    axes.set_ylim(-1.6, 1.6)
    axes.tick_params(length=0, labelbottom=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_title("Killed during a save, then resumed from the newest complete checkpoint")


def _draw_memory(axes: Axes, killed: Run, resumed: Run) -> None:
    """Draws the run that holds each step in memory, and the run that resumes from memory."""
    assert resumed.loaded is not None
    start, end, saved = resumed.loaded.step, _kill(killed), max(killed.saved, default=0)
    axes.hlines(-1, 0, end, color=_BLUE, linewidth=3)
    axes.hlines(-1.35, start, max(resumed.losses), color=_ORANGE, linewidth=3)
    axes.plot(list(killed.saved), [-1] * len(killed.saved), **_circle(_BLUE), linestyle="none")
    axes.plot([end], [-1], "X", color=_RED, markersize=12, markeredgecolor="white", zorder=5)
    what = f"resumed from step {start}, in memory\n(on storage: step {saved})"
    axes.text(end + 0.6, -0.8, what, color=_ORANGE, va="center")


def _draw_losses(axes: Axes, runs: Runs) -> None:
    killed, resumed = runs.killed, runs.resumed_on_fewer
    _curve(axes, runs.undisturbed.losses, _GREY, _WIDE, f"undisturbed, {runs.undisturbed.ranks} ranks")
    _curve(axes, killed.losses, _BLUE, _MEDIUM, f"until the kill, {killed.ranks} ranks")
    _curve(axes, resumed.losses, _ORANGE, _THIN, f"resumed, {resumed.ranks} ranks")
    for run, color in ((killed, _BLUE), (resumed, _ORANGE)):
        axes.plot(list(run.saved), [run.losses[step] for step in run.saved], **_circle(color), linestyle="none")
    axes.plot([], [], **_circle("black"), linestyle="none", label="a complete, durable checkpoint")
    axes.set_title("Training loss: killed and resumed, beside a run that was not disturbed")
    axes.set_ylabel("loss (nats per byte)")
    axes.legend(loc="upper right", bbox_to_anchor=(1, 0.98))


def _draw_differences(axes: Axes, runs: Runs) -> None:
    fewer, resumed, on_fewer = runs.undisturbed_on_fewer, runs.resumed, runs.resumed_on_fewer
    for run, color, width, label in (
        (fewer, _GREY, _WIDE, f"undisturbed, {fewer.ranks} ranks"),
        (resumed, _BLUE, _MEDIUM, f"resumed, {resumed.ranks} ranks"),
        (on_fewer, _ORANGE, _THIN, f"resumed, {on_fewer.ranks} ranks"),
    ):
        reference = runs.undisturbed.losses
        _curve(axes, {step: abs(loss - reference[step]) for step, loss in run.losses.items()}, color, width, label)
    ranks = runs.undisturbed.ranks
    axes.set_title(f"Difference in loss: {fewer.ranks} ranks and {ranks} ranks add up gradients in different orders")
    axes.set_ylabel(f"difference from the\nundisturbed {ranks} ranks")
    axes.set_xlabel("step")
    axes.set_xlim(0, max(fewer.losses) + 0.5)
    axes.set_ylim(top=axes.get_ylim()[1] * 1.35)
    axes.legend(loc="upper right", ncols=3, columnspacing=1.5)


def _curve(axes: Axes, values: dict[int, float], color: str, width: float, label: str) -> None:
    axes.plot(list(values), list(values.values()), color=color, linewidth=width, label=label)


def _circle(color: str) -> dict[str, Any]:
    return {
        "marker": "o",
        "color": "white",
        "markeredgecolor": color,
        "markeredgewidth": 2,
        "markersize": 9,
        "zorder": 4,
    }
