"""The manager against its model: many random histories of jobs, of which each checkpoint is known."""

from __future__ import annotations

import traceback
from pathlib import Path

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.manager_model import ManagerModel
from tests.support import quietly

from .tally import Part, Tally

__all__ = ["PART", "run"]

_STEPS = 20


def run(rounds: int, seed_number: int, folder: Path) -> Tally:
    """Runs so many histories."""
    tally = Tally()

    class Counted(ManagerModel):
        def teardown(self) -> None:
            super().teardown()
            tally.rounds += 1
            tally.count("checkpoints loaded at the ends", len(getattr(self, "disk", ())))
            tally.count("checkpoints saved", getattr(self, "values", 0))

    chosen = settings(
        max_examples=rounds,
        stateful_step_count=_STEPS,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    Counted.TestCase.settings = chosen
    try:
        with quietly():
            run_state_machine_as_test(seed(seed_number)(Counted), settings=chosen)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        notes = "; ".join(getattr(error, "__notes__", ()))
        tally.blame("wrong", f"{error!r} at {where.filename}:{where.lineno}, {where.line}: {notes}")
    return tally


PART = Part(
    title="The manager and its model",
    unit="histories",
    what=f"A history is up to {_STEPS} random events of a job: saves, saves that fail, leftovers of killed saves, "
    "restarts, damaged files and steps back to earlier checkpoints, under random rules of what to keep. After each "
    "event the folder must hold exactly the checkpoints that a model of the manager expects. At the end each of them "
    "is loaded and compared.",
    rounds=1000,
    run=run,
)
