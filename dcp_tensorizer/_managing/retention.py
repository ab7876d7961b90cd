"""Which checkpoints are kept, and what may be deleted of the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from .._arguments import check_choice, check_count, check_timeout, check_type

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

    Where no checkpoint has the metric, it is not known which one is the best, and all are kept.

    Attributes:
        latest: Keep so many of the newest. The newest is kept in any case.
        every: Keep every multiple of it.
        metric: Keep the best by this metric.
        mode: Whether the least value is best, or the largest.
        delete_after: Seconds that a checkpoint has to be old before it is deleted, where others could not see a lock.
        delete_other_files: Delete one also if its directory holds what no save wrote, and that too.
    """

    latest: int | None
    every: int | None
    metric: str | None
    mode: Literal["min", "max"]
    delete_after: float = 0.0
    delete_other_files: bool = False

    @classmethod
    def of(
        cls,
        keep_latest: int | None,
        keep_every: int | None,
        keep_best: str | tuple[str, Literal["min", "max"]] | None,
        delete_after: float = 0.0,
        delete_other_files: bool = False,
    ) -> Retention:
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
        check_timeout(delete_after, least=0, name="delete_after")
        check_type("delete_other_files", delete_other_files, bool)
        return cls(keep_latest, keep_every, metric, mode, delete_after, delete_other_files)  # type: ignore[arg-type]

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
        if self.keeps_all or (self.metric is not None and not any(self.metric in step.metrics for step in steps)):
            return set(numbers)
        kept = set(numbers[: self.latest or 1])
        if self.every is not None:
            kept |= {number for number in numbers if number % self.every == 0}
        best = self.best(steps)
        return kept if best is None else kept | {best.number}
