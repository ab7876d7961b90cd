"""Which checkpoints are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from .._arguments import check_choice, check_count

__all__ = ["Retention"]


class _Measured(Protocol):
    @property
    def number(self) -> int: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...


_Step = TypeVar("_Step", bound=_Measured)


@dataclass(frozen=True, slots=True)
class Retention:
    """The rules. A checkpoint is kept if any of them keeps it; without rules all are.

    Attributes:
        latest: Keep so many of the newest. The newest is kept in any case.
        every: Keep every multiple of it.
        metric: Keep the best by this metric.
        mode: Whether the least value is best, or the largest.
    """

    latest: int | None
    every: int | None
    metric: str | None
    mode: Literal["min", "max"]

    @classmethod
    def of(cls, keep_latest: int | None, keep_every: int | None, keep_best: str | tuple[str, str] | None) -> Retention:
        """From the arguments of the manager.

        Raises:
            TypeError: one is of a wrong type.
            ValueError: one has a value that is not allowed.
        """
        check_count("keep_latest", keep_latest, optional=True)
        check_count("keep_every", keep_every, optional=True)
        metric, mode = keep_best if isinstance(keep_best, tuple) and len(keep_best) == 2 else (keep_best, "min")
        if metric is not None and not isinstance(metric, str):
            raise TypeError(f"keep_best must be the name of a metric, or (name, 'min' or 'max'), and is {keep_best!r}")
        check_choice("the mode in keep_best", mode, ("min", "max"))
        return cls(keep_latest, keep_every, metric, mode)  # type: ignore[arg-type]

    @property
    def keeps_all(self) -> bool:
        """Whether there are no rules."""
        return self.latest is None and self.every is None and self.metric is None

    def best(self, steps: Sequence[_Step]) -> _Step | None:
        """The best by the metric, the newest of equal ones; None if none has a value."""
        if self.metric is None:
            return None
        name, sign = self.metric, -1 if self.mode == "min" else 1
        measured = [step for step in steps if not math.isnan(step.metrics.get(name, math.nan))]
        return max(measured, key=lambda step: (sign * step.metrics[name], step.number), default=None)

    def kept(self, steps: Sequence[_Step]) -> set[int]:
        """The numbers of those that are kept."""
        numbers = sorted((step.number for step in steps), reverse=True)
        if self.keeps_all:
            return set(numbers)
        kept = set(numbers[: self.latest or 1])
        if self.every is not None:
            kept |= {number for number in numbers if number % self.every == 0}
        best = self.best(steps)
        return kept if best is None else kept | {best.number}
