"""A report of one or several checkpoints, from what they hold to the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..checkpoint_view import CheckpointView
from ..listing import step_of
from .measure import measure
from .page import checkpoint_row, render, tensor_row

__all__ = ["build", "in_order_of_steps"]


def in_order_of_steps(views: Sequence[CheckpointView]) -> list[CheckpointView]:
    """Checkpoints by their steps, where each has one of its own; else as they are."""
    steps = [step_of(_name(view)) for view in views]
    if None in steps or len(set(steps)) < len(steps):
        return list(views)
    return sorted(views, key=lambda view: step_of(_name(view)) or 0)


def build(
    views: Sequence[CheckpointView], on_progress: Callable[[int, int], object] = lambda done, total: None
) -> bytes:
    """The page about some checkpoints, of which each but the first is compared with the one before.

    Raises:
        ReadError: one of them is damaged, or cannot be read.
    """
    names = [_name(view) for view in views]
    if len(set(names)) < len(names):
        names = [view.path for view in views]
    checkpoints = [
        checkpoint_row(name, step_of(_name(view)), view.saved, view.format, view.nbytes, len(view.objects))
        for name, view in zip(names, views, strict=True)
    ]
    return render({"checkpoints": checkpoints, "tensors": [tensor_row(one) for one in measure(views, on_progress)]})


def _name(view: CheckpointView) -> str:
    return view.path.rstrip("/").rpartition("/")[2]
