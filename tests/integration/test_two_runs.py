"""Two runs on one folder: the last run that took the lease owns it, and the other one gets an error."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_tensorizer import CheckpointManager, WriteError
from dcp_tensorizer._storage.lease import Lease
from dcp_tensorizer.tools import collect, list_checkpoints, verify

from ..lab.servers import S3Server
from ..lab.states import directories_in
from ..lab.waiting import WAIT


def state_of(value: int) -> dict[str, Any]:
    return {"w": torch.full((20_000,), float(value)), "step": value}


def manager_of(folder: str | Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(folder, stop_signals=(), **options)


@pytest.mark.promise("two-jobs", reason="with managers")
def test_the_older_run_is_told(tmp_path: Path) -> None:
    """The older run's save fails, it deletes no checkpoint, and its next call of `save` raises, due or not."""
    with manager_of(tmp_path, save_every=2, keep_latest=1) as old, manager_of(tmp_path) as new:
        old.save(2, state_of(2), wait=True)
        assert new.restore(state_of(0)) == 2
        new.save(3, state_of(3), wait=True)
        refused = old.save(4, state_of(40))
        assert refused is not None
        with pytest.raises(WriteError, match="now belongs to another run"):
            refused.result()
        with pytest.raises(WriteError, match="now belongs to another run"):
            old.wait()
        with pytest.raises(WriteError, match=f"process {os.getpid()} on host .* as run 2; this is run 1"):
            old.save(5, state_of(50))
        new.save(4, state_of(4), wait=True)
        assert (old.latest(), old.restore(state := state_of(0)), state["step"]) == (4, 4, 4)
    assert directories_in(tmp_path) == ["step-2", "step-3", "step-4"]
    assert (tmp_path / "latest").read_text() == "step-4\n"


def test_what_the_newer_run_commits_after_the_look_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the newer run commits the same step after the older run's last check, the newer checkpoint stays."""
    with manager_of(tmp_path) as old, manager_of(tmp_path) as new:
        for step in (1, 2):
            old.save(step, state_of(step), wait=True)
        look = Lease.check

        def look_and_wait(owner: Lease) -> None:
            look(owner)
            monkeypatch.setattr(Lease, "check", look)
            assert new.restore(state_of(0), 1) == 1
            new.save(2, state_of(20), wait=True)

        assert old.restore(state_of(0), 1) == 1
        monkeypatch.setattr(Lease, "check", look_and_wait)
        with pytest.raises(WriteError, match="step-2: another run has just saved there"):
            old.save(2, state_of(2), wait=True)
        assert (new.restore(state := state_of(0)), state["step"]) == (2, 20)


def test_who_only_reads_claims_nothing(tmp_path: Path) -> None:
    """Evaluators restore and list while a job saves, and change no file of the folder."""
    with manager_of(tmp_path) as trainer, manager_of(tmp_path, name="step-{:04}") as evaluator:
        assert (evaluator.restore(state_of(0)), evaluator.latest(), evaluator.steps()) == (None, None, [])
        assert os.listdir(tmp_path) == []
        for step in (1, 2):
            trainer.save(step, state_of(step), wait=True)
            assert (evaluator.restore(state_of(0)), evaluator.latest()) == (step, step)
    assert json.loads((tmp_path / ".step-N.claim").read_text())["epoch"] == 1


def test_one_run_after_the_other(tmp_path: Path) -> None:
    """Each run takes the lease at its first save without waiting, and tools leave the lease's file alone."""
    for epoch in (1, 2, 3):
        with manager_of(tmp_path, keep_latest=2, delete_other_files=True) as manager:
            start = manager.restore(state_of(0)) or 0
            assert start == epoch - 1
            manager.save(start + 1, state_of(start + 1))
        assert json.loads((tmp_path / ".step-N.claim").read_text())["epoch"] == epoch
        assert (tmp_path / "latest").read_text() == f"step-{epoch}\n"
    collect(tmp_path, keep_latest=1, older_than=0.0)
    assert sorted(os.listdir(tmp_path)) == [".step-N.claim", "latest", "step-3"]
    assert [found.state for found in list_checkpoints(tmp_path)] == ["committed"]


def test_going_back_moves_the_file(tmp_path: Path) -> None:
    """`latest` names the last save, on any branch."""
    with manager_of(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step), wait=True)
        manager.restore(state_of(0), 1)
        manager.save(2, state_of(20), wait=True)
    assert (tmp_path / "latest").read_text() == "step-2\n"
    with manager_of(tmp_path) as manager:
        assert (manager.restore(state := state_of(0)), state["step"]) == (2, 20)


def test_jobs_of_other_names_share_a_folder(tmp_path: Path) -> None:
    """Jobs with other names have leases of their own."""
    with manager_of(tmp_path) as raw, manager_of(tmp_path, name="ema-{}") as averaged:
        for step in (1, 2):
            raw.save(step, state_of(step), wait=True)
            averaged.save(step, state_of(step), wait=True)
        assert raw.steps() == averaged.steps() == [1, 2]


_OLD_RUN = """
import json, pickle, signal, sys, threading
from contextlib import suppress
from dcp_tensorizer import CheckpointManager, WriteError
from dcp_tensorizer._saving import commit
from tests.integration.test_two_runs import state_of

def stop(storage, files, check=commit.check_data):
    check(storage, files)
    if storage.path.endswith("step-2"):
        # All data is written, and nothing is committed. This thread itself takes the signal, and so stops at once.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

commit.check_data = stop
folder, options = pickle.loads(bytes.fromhex(sys.argv[1]))
told = []
manager = CheckpointManager(folder, keep_latest=1, storage_options=options)
manager.save(1, state_of(1), wait=True)
for step in (2, 3):
    try:
        manager.save(step, state_of(10 * step)).result()
    except WriteError as error:
        told.append(str(error))
with suppress(WriteError):  # of step 2: nobody has waited for that
    manager.close()
print(json.dumps(told))
"""


@contextmanager
def stopped_in_a_save(folder: str, options: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """Starts a run that has saved step 1, and stops just before the commit of step 2."""
    told = pickle.dumps((folder, options)).hex()
    with subprocess.Popen([sys.executable, "-c", _OLD_RUN, told], stdout=subprocess.PIPE, text=True) as process:
        try:
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("where", ["local", "s3"])
def test_a_run_that_comes_back(where: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A run that was stopped during a save, and then continued, does not change the steps of the run after it."""
    options: dict[str, Any] = {}
    folder = str(tmp_path / "run")
    if where == "s3":
        server: S3Server = request.getfixturevalue("s3")
        options, folder = server.options(), f"s3://{server.bucket}/{uuid.uuid4().hex}"
    with (
        stopped_in_a_save(folder, options) as old,
        manager_of(folder, storage_options=options) as new,
    ):
        assert new.restore(state_of(0)) == 1
        new.save(2, state_of(2), wait=True)
        old.send_signal(signal.SIGCONT)
        refused, raised = json.loads(old.communicate(timeout=WAIT)[0])
        new.save(3, state_of(3), wait=True)
        assert new.steps() == [1, 2, 3]
        for step in (1, 2, 3):
            state = state_of(0)
            assert new.restore(state, step) == step
            assert (state["step"], state["w"].unique().tolist()) == (step, [float(step)])
            assert not verify(new.path(step), storage_options=options).damages
    words = f"now belongs to another run: process {os.getpid()} on host "
    assert words in refused
    assert words in raised
