"""The manager against its model: many random histories of jobs, of which each checkpoint is known."""

from __future__ import annotations

import traceback
from pathlib import Path

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from ..lab.manager_model import ManagerModel
from ..lab.processes import quietly
from ..lab.servers import s3_server
from .tally import Part, Tally

__all__ = ["PART", "run"]

_STEPS = 20


def run(rounds: int, seed_number: int, folder: Path) -> Tally:
    """Runs so many histories on a local disk, and a tenth as many on a server of object storage."""
    tally = Tally()
    _run(ManagerModel, rounds, seed_number, tally)
    place = folder / "server"
    place.mkdir()
    with s3_server(place) as server:

        class OnS3(ManagerModel):
            url = f"s3://{server.bucket}/managers-{{}}"
            storage_options = server.options()

        before = tally.rounds
        _run(OnS3, max(1, rounds // 10), seed_number, tally)
        tally.count("histories on SeaweedFS", tally.rounds - before)
    return tally


def _run(model: type[ManagerModel], rounds: int, seed_number: int, tally: Tally) -> None:
    class Counted(model):  # type: ignore[misc,valid-type]
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


PART = Part(
    title="The manager and its model",
    unit="histories",
    what=f"A history is up to {_STEPS} random events of a job: saves, saves that fail, leftovers of killed saves, "
    "restarts, damaged files and steps back to earlier checkpoints, under random rules of what to keep. After each "
    "event the folder must hold exactly the checkpoints that a model of the manager expects. At the end each of them "
    "is loaded and compared. A tenth as many as on a local disk are on SeaweedFS, a server of object storage.",
    rounds=1000,
    run=run,
)
