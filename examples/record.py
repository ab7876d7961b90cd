"""The events that a job reports while it runs, and the table that shows them."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

__all__ = ["Event", "Loaded", "Reporter", "Run", "Saved", "Saving", "Stepped", "Table", "largest_difference"]


@dataclass(frozen=True)
class Loaded:
    """A checkpoint has been loaded."""

    step: int
    seconds: float
    digest: str
    """SHA-256 of the whole state."""


@dataclass(frozen=True)
class Stepped:
    """A step of the training is done."""

    step: int
    loss: float


@dataclass(frozen=True)
class Saving:
    """``async_save`` has returned, and the save continues in the background."""

    step: int
    stall: float
    """Seconds that training waited for the copy."""
    digest: str
    """SHA-256 of the whole state."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint is whole and durable."""

    step: int
    seconds: float
    """Seconds since the call of ``async_save``."""
    nbytes: int
    """Bytes of all files of the checkpoint."""


Event = Loaded | Stepped | Saving | Saved


class Reporter:
    """Sends events from rank 0 to the process that started the ranks. On other ranks, the connection is None."""

    def __init__(self, connection: Connection | None) -> None:
        self._connection = connection
        self._lock = threading.Lock()  # the training thread and the saves' threads report

    def __call__(self, event: Event) -> None:
        if self._connection is not None:
            with self._lock:
                self._connection.send(event)


@dataclass
class Run:
    """One run of the job, as far as rank 0 has reported it."""

    name: str
    ranks: int
    losses: dict[int, float] = field(default_factory=dict)
    saving: dict[int, Saving] = field(default_factory=dict)
    saved: dict[int, Saved] = field(default_factory=dict)
    loaded: Loaded | None = None
    killed_in_save: int | None = None

    def add(self, event: Event) -> None:
        """Records an event of rank 0."""
        match event:
            case Loaded():
                self.loaded = event
            case Stepped(step, loss):
                self.losses[step] = loss
            case Saving(step):
                self.saving[step] = event
            case Saved(step):
                self.saved[step] = event


def largest_difference(run: Run, other: Run) -> float:
    """Returns the largest difference between the losses of two runs, over the steps that both have done."""
    return max(abs(run.losses[step] - other.losses[step]) for step in run.losses.keys() & other.losses.keys())


class Table:
    """Prints a line for each save, or for every ``every`` steps of a run that saves nothing.

    In a terminal, the last line shows the step that the run has reached.
    """

    def __init__(self, run: Run, *, saves: bool, every: int) -> None:
        print(f"\n{run.name}")
        self._run = run
        self._saves = saves
        self._every = every
        self._live = sys.stdout.isatty()
        self._has_header = False

    def show(self, event: Event) -> None:
        """Shows the event that the run has just recorded."""
        match event:
            case Loaded(step, seconds):
                self._print(f"   loaded the state of step {step} in {seconds:.2f} s")
            case Stepped(step) if not self._saves and step % self._every == 0:
                self._row(step, "")
            case Stepped(step, loss) if self._live:
                print(f"\r\033[K   {step:4}  {loss:7.4f}", end="", flush=True)
            case Saved(step, seconds, nbytes):
                self._row(step, f"{self._stall(step)}  {seconds:11.2f} s  {nbytes / 1e9 / seconds:5.2f} GB/s")

    def show_kill(self, step: int, what_is_left: str) -> None:
        """Shows that the run was killed in the save of a step."""
        self._row(step, f"{self._stall(step)}  SIGKILL to every rank, in mid-save")
        self._print(f"   remaining in {what_is_left}")

    def show_death(self, step: int) -> None:
        """Shows that the run was killed after a step, between two saves."""
        self._row(step, "  SIGKILL to every rank, between two saves")

    def show_loss(self, step: int, host: str) -> None:
        """Shows that a host was lost after a step."""
        self._row(step, f"  {host} is lost: its processes, its memory and its disk")

    def _stall(self, step: int) -> str:
        return f"  {self._run.saving[step].stall * 1e3:5.0f} ms"

    def _row(self, step: int, rest: str) -> None:
        if not self._has_header:
            self._print("   step     loss" + ("     stall  durable after       speed" if self._saves else ""))
            self._has_header = True
        self._print(f"   {step:4}  {self._run.losses[step]:7.4f}{rest}")

    def _print(self, line: str) -> None:
        print(f"\r\033[K{line}" if self._live else line, flush=True)
