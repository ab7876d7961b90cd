"""The manager against a model of it: saves, failures, leftovers of killed jobs, restarts, damage and retention.

The model knows each checkpoint's ancestors. So it knows which checkpoints belong to a job, without names of branches.
"""

from __future__ import annotations

import math
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dcp_tensorizer import CheckpointManager, ReadError, TensorizerStorageReader, WriteError
from dcp_tensorizer._index.container import committed
from dcp_tensorizer._storage.base import Storage
from dcp_tensorizer._storage.open import open_storage

from .processes import quietly

__all__ = ["ManagerModel"]

NUMBERS = 2048  # too large for the index to hold the tensor itself


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint.

    Attributes:
        value: Its content; no two checkpoints have the same value.
        ancestors: The values of the checkpoints that training went through before.
    """

    step: int
    value: int
    loss: float
    ancestors: frozenset[int]


class ManagerModel(RuleBasedStateMachine):
    """Drives a manager, and compares the folder with the model after each call."""

    url: str | None = None
    """Where to save, with ``{}`` for a name; None: a temporary directory."""
    storage_options: Mapping[str, Any] | None = None

    @initialize(
        latest=st.none() | st.integers(1, 3),
        every=st.none() | st.integers(2, 6),
        best=st.sampled_from([None, "loss", ("loss", "max")]),
    )
    def begin(self, latest: int | None, every: int | None, best: Any) -> None:
        """Chooses the rules of retention, and starts a job in an empty folder."""
        self.top = tempfile.mkdtemp()
        self.clock = pytest.MonkeyPatch()
        self.location = f"{self.top}/run" if self.url is None else self.url.format(Path(self.top).name)
        self.latest, self.every, self.best = latest, every, best
        self.disk: dict[int, Checkpoint] = {}
        self.values = 0
        self.last: Checkpoint | None = None
        self.start()
        self.resumed_from(None)

    def start(self) -> None:
        """A job begins."""
        self.manager = CheckpointManager(
            self.location,
            save_every=1,
            keep_latest=self.latest,
            keep_every=self.every,
            keep_best=self.best,
            stop_signals=(),
            storage_options=self.storage_options,
        )
        self.state = {"w": torch.zeros(NUMBERS), "value": 0}

    def resumed_from(self, checkpoint: Checkpoint | None) -> None:
        """The job stands at a checkpoint, or at the beginning."""
        self.step = 0 if checkpoint is None else checkpoint.step
        self.ancestors = frozenset() if checkpoint is None else checkpoint.ancestors | {checkpoint.value}

    @property
    def own(self) -> list[Checkpoint]:
        """The job's own checkpoints, lowest step first."""
        return sorted((c for c in self.disk.values() if c.value in self.ancestors), key=lambda c: c.step)

    @property
    def storage(self) -> Storage:
        return open_storage(self.location, self.storage_options)

    # --- what happens -----------------------------------------------------------------------------------------------

    @rule(stride=st.integers(1, 3), loss=st.sampled_from([0.5, 1.0, 2.0, math.nan]), waits=st.booleans())
    def save(self, stride: int, loss: float, waits: bool) -> None:
        """A step is saved, and the checkpoints that no rule retains are deleted."""
        self.step += stride
        self.values += 1
        self.state["w"].fill_(self.values)
        self.state["value"] = self.values
        with quietly():
            self.manager.save(self.step, self.state, metrics={"loss": loss, "value": self.values}, wait=waits)
        self.last = self.disk[self.step] = Checkpoint(self.step, self.values, loss, self.ancestors)
        self.ancestors |= {self.values}
        self._retain()

    @rule(stride=st.integers(1, 3))
    def save_fails(self, stride: int) -> None:
        """A save fails: the job gets the error, and nothing changes."""
        step = self.step + stride
        if self.url is not None or step in self.disk:
            return
        self.manager.wait()
        (obstacle := Path(self.location, f"step-{step}")).parent.mkdir(exist_ok=True)
        shutil.rmtree(obstacle, ignore_errors=True)
        obstacle.write_bytes(b"")
        with quietly():
            future = self.manager.save(step, self.state)
            assert isinstance(future.exception(), WriteError)
            with pytest.raises(WriteError, match=re.escape(str(obstacle))):
                self.manager.wait()
        obstacle.unlink()
        self._restart_if_failing()

    @rule(seconds=st.integers(-7200, 7200))
    def set_clock(self, seconds: int) -> None:
        """The clock of the host is set back, or ahead."""
        now = time.time_ns
        self.clock.setattr(time, "time_ns", lambda: now() + seconds * 10**9)

    @rule()
    def save_again(self) -> None:
        """A step that has a checkpoint is not saved again."""
        if self.disk.get(self.step) in self.own:
            with quietly():
                assert self.manager.save(self.step, {"w": torch.ones(NUMBERS), "value": -1}, force=True).result()

    @rule(stride=st.integers(1, 4))
    def leftovers(self, stride: int) -> None:
        """A job was killed during a save: there is a data file, but no metadata."""
        step = self.step + stride
        if step not in self.disk:
            self.manager.wait()
            storage = self.storage.child(f"step-{step}")
            storage.make_directory()
            storage.put(f"__0_0_{self.values:032x}.tensors", b"half of it", sync=False)

    @rule()
    def restart(self) -> None:
        """The job ends, and another resumes from the newest checkpoint."""
        self.manager.close()
        self.start()
        self._restore(None, self.last)

    @precondition(lambda self: self.disk)
    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        """The job goes back to a checkpoint of its choice, in the same process."""
        step = data.draw(st.sampled_from(sorted(self.disk)))
        self._restore(step, self.disk[step])

    @precondition(lambda self: self.last is not None and self.url is None)
    @rule()
    def damage(self) -> None:
        """The newest checkpoint loses a file: with fallback the job resumes from the one before."""
        self.manager.close()
        newest = self.last
        self._at(newest)
        before = [checkpoint for checkpoint in self.own if checkpoint is not newest]
        for file in Path(self.location, f"step-{newest.step}").glob("*.tensors"):
            file.unlink()
        self.start()
        with quietly():
            if not before:
                with pytest.raises(ReadError, match="is missing"):
                    self.manager.restore(self.state)
                self._forget(newest)
                return
            found = self.manager.restore(self.state, fallback=True)
        assert (found, self.state["value"]) == (before[-1].step, before[-1].value)
        self._forget(newest)

    # --- what must be so --------------------------------------------------------------------------------------------

    @invariant()
    def the_folder_is_as_it_should_be(self) -> None:
        """The checkpoints to retain exist and are whole, and all others are deleted."""
        if not hasattr(self, "manager"):
            return
        self.manager.wait()
        assert self.manager.steps() == [checkpoint.step for checkpoint in self.own]
        names = self.storage.listing()[1] if self.disk else []
        there = {n for n in names if self.storage.child(n).head(".metadata") is not None}
        assert there == {f"step-{step}" for step in self.disk}
        for step, checkpoint in self.disk.items():
            head = committed(self.storage.child(f"step-{step}")).head
            assert head.record is not None
            assert head.record.metrics.get("value") == checkpoint.value, step
        assert self.manager.latest() == (self.own[-1].step if self.own else None)

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            self.clock.undo()
            self.manager.close()
            for step, checkpoint in self.disk.items():
                reader = TensorizerStorageReader(self.manager.path(step), storage_options=self.storage_options)
                target = {"w": torch.zeros(NUMBERS), "value": 0}
                with quietly():
                    torch.distributed.checkpoint.load(target, storage_reader=reader)
                assert target["value"] == checkpoint.value
                assert torch.equal(target["w"], torch.full((NUMBERS,), float(checkpoint.value)))
            shutil.rmtree(self.top)

    # --- the model's own --------------------------------------------------------------------------------------------

    def _restore(self, step: int | None, expected: Checkpoint | None) -> None:
        with quietly():
            found = self.manager.restore(self.state, step)
        assert found == (None if expected is None else expected.step)
        if expected is not None:
            assert self.state["value"] == expected.value
        self.resumed_from(expected)

    def _restart_if_failing(self) -> None:
        """Restarts the job: a third failure in a row would end it."""
        with quietly():
            self.manager.close()
        self.start()
        self._restore(None, self.last)

    def _at(self, checkpoint: Checkpoint) -> None:
        self.ancestors = checkpoint.ancestors | {checkpoint.value}

    def _forget(self, checkpoint: Checkpoint) -> None:
        """Removes a damaged checkpoint, as its owner would. The job then restarts from the newest of the others."""
        self.manager.close()
        shutil.rmtree(Path(self.location, f"step-{checkpoint.step}"))
        del self.disk[checkpoint.step]
        self.last = max(self.disk.values(), key=lambda c: c.value, default=None)
        self.start()
        self._restore(None, self.last)

    def _retain(self) -> None:
        if self.latest is self.every is self.best is None:
            return
        own = self.own
        kept = {checkpoint.step for checkpoint in own[-(self.latest or 1) :]}
        if self.every is not None:
            kept |= {checkpoint.step for checkpoint in own if checkpoint.step % self.every == 0}
        sign = -1 if self.best == "loss" else 1
        known = [checkpoint for checkpoint in own if not math.isnan(checkpoint.loss)]
        if self.best is not None and not known:
            return
        if self.best is not None:
            kept.add(max(known, key=lambda c: (sign * c.loss, c.step)).step)
        for checkpoint in own:
            if checkpoint.step not in kept:
                del self.disk[checkpoint.step]
