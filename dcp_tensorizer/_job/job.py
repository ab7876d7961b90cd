"""A job: what it saves at each step, and what it resumes from.

Job ── SavePolicy, decide       is a save due? what do all ranks do?               policy
    ── Place                    the job's place among the checkpoints              lineage
    ── Saves ── Exports         one save at a time; models of the saved state      saves, exports
    ── Retaining                after a commit: `latest`, deletions                retention
    ── Survival ── PeerCopies   states in memory, and their copies on other hosts  restart, copies
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from .._index.schema import SaveRecord
from .._runtime.threads import NEVER, Deadline
from .._storage.base import Storage
from .._storage.lease import Lease, lease_file_name
from .._tensor_file.names import metadata_file_name
from .._tiers.tiered_storage import NearestStorage
from ..errors import CheckpointError, ReadError, WriteError
from ..writer import TensorizerStorageWriter
from .exports import Exports
from .lineage import Place, RestoreChoice, begin, choose, newest_of, read_members
from .metrics import GoodputClock
from .options import JobOptions
from .policy import Action, Decision, SavePolicy, Vote, decide
from .ranks import Agreement, Heartbeats
from .restart import Problem, Survival
from .restore import Selection, StatePart, load_first
from .retention import Retaining
from .saves import NewStep, Saves
from .steps import Step, leave, read_steps
from .unflushed import finish_unflushed

logger = logging.getLogger("dcp_tensorizer")


class Job:
    """Saves and restores the steps of a job, as all ranks decide. Every rank makes the same calls.

    Args:
        folder: The folder of the checkpoints.
        writer: Writes them.
        agreement: Makes the decisions of all ranks.
        heartbeats: Tells slow ranks from dead ones in saves and loads.
        options: The options of the job.
        policy: Decides when a save is due.
        clock: Measures the times of saves.
        is_alone: This process only restores, as in a forked child.

    Attributes:
        place: The job's place among the checkpoints; None before its first save or restore.
        saves: Runs the saves.
        exports: Exports models; None if there are no exports.
        survival: Keeps states in memory.
        retaining: Moves `latest`, and deletes old checkpoints.
    """

    def __init__(
        self,
        folder: Storage,
        writer: TensorizerStorageWriter,
        agreement: Agreement,
        heartbeats: Heartbeats,
        options: JobOptions,
        policy: SavePolicy,
        clock: GoodputClock,
        *,
        is_alone: bool = False,
    ) -> None:
        remote = folder.remote if isinstance(folder, NearestStorage) else folder
        self.place: Place | None = None
        self._folder = folder
        self._names = options.names
        self._writer = writer
        self._agreement = agreement
        self._heartbeats = heartbeats
        self._options = options
        self._policy = policy
        self._clock = clock
        self._flushing = None if is_alone else writer.saver.flushing
        self._owner = Lease(remote, lease_file_name(options.names.shown))  # a restore claims nothing
        self._has_claimed = False
        self._serial = 0  # of the last save of this run
        if not is_alone:
            writer.saver.owner = self._owner
        self.survival = Survival(writer.saver, folder, agreement, options)
        rules = options.retention if agreement.is_first else None
        self.retaining = Retaining(remote, options.names, rules, self._owner, self._flushing, lambda: self.place)
        self.exports = None
        if options.export is not None:
            keeps_states = options.survive > 0
            self.exports = Exports(options.export, writer, heartbeats, self._owner, keeps_states=keeps_states)
        self.saves = Saves(
            writer, agreement, heartbeats, options, clock, after=self.retaining.after, exports=self.exports
        )

    def alone(self, folder: Storage) -> Job:
        """Makes the job of a forked child. It is at the same step, and only restores, by itself.

        ``folder`` is the same folder, with connections of the child's own.
        """
        options = dataclasses.replace(self._options, survive=0.0, export=None)
        job = Job(
            folder, self._writer, Agreement(None), Heartbeats(None), options, self._policy, self._clock, is_alone=True
        )
        job.place = self.place
        return job

    def step(
        self,
        step: int,
        state: Mapping[str, Any],
        part: StatePart,
        metrics: dict[str, float],
        *,
        stop: bool,
        force: bool,
        must_write: bool,
    ) -> tuple[Decision, Future[str] | None]:
        """Does what all ranks decide for a step. Returns the decision, and the result of `CheckpointManager.save`."""
        self.survival.begin()
        self.survival.start_keeper()
        self.survival.begin_copies()
        self._claim()
        if self.place is None:
            finish_unflushed(self._flushing, self._agreement)
            self.place = self._agreement.decided(lambda: begin(self._folder, self._names, step))
        decision = self._decide(step, stop=stop, force=force, must_write=must_write)
        if decision.vote.is_lost or decision.vote.memory.is_superseded:
            raise WriteError(self._agreement.decided(lambda: self._owner.lost or _superseded(self._folder.path)))
        if step < self.place.step:  # true on all ranks or none: they have just compared their steps
            self._go_back(step)
            decision = self._decide(step, stop=stop, force=force, must_write=must_write)
        self.place.step = step
        self.survival.advance(decision.vote.memory, is_busy=self.saves.is_busy)
        self.saves.check(decision.vote.failures)
        if decision.action in (Action.JOIN, Action.KEEP) and self._is_gone(step):
            decision = decision._replace(action=Action.SAVE)
        return decision, self._act(decision, step, state, part, metrics)

    def _claim(self) -> None:
        """Claims the folder at the first save of the job."""
        if self._has_claimed:
            return
        self._has_claimed = True
        if self._flushing is not None:  # before the claim: the flush of each node must know this claim as its own
            self._flushing.admit(self._owner.name, self._agreement.decided(lambda: self._owner.id))
            self._agreement.largest(0)
        if self._agreement.is_first:
            self._owner.take()

    def _is_gone(self, step: int) -> bool:
        """Returns whether a saved step was deleted. If so, the job goes on among the remaining steps.

        Every rank calls it. It costs a request, so it is called only if a step would not be saved because it exists.
        """
        place = self._agreement.decided(lambda: self._place_without(step))
        if place is None:
            return False
        logger.warning("%s: step %d was saved, but is gone: it is saved again", self._folder.path, step)
        self.saves.wait()
        self.saves.forget()
        self.place = place
        return True

    def _place_without(self, step: int) -> Place | None:
        """Finds the job's place without a step; None if the step exists, is being saved, or cannot be looked up."""
        assert self.place is not None
        if self.saves.is_last(step) and self.saves.is_busy:
            return None
        try:
            name = self.place.name_of(step, self._names)
            if self._folder.child(name).head(metadata_file_name()) is not None:
                return None
            steps = read_steps(self._folder, self._names)
        except CheckpointError as error:
            logger.warning("cannot check whether step %d still exists: %s", step, str(error))
            return None
        return Place.at(self.place.branch, newest_of(steps, self.place.branch), steps, self.place.step)

    def _decide(self, step: int, *, stop: bool, force: bool, must_write: bool) -> Decision:
        """Decides on all ranks what to do for a step, given the job's place."""
        assert self.place is not None
        memory = self.survival.vote()
        holds = self.survival.holds
        vote = Vote(
            step=step,
            stop=stop,
            force=force,
            is_due=self._policy.is_due(step),
            is_last=self.saves.is_last(step),
            is_there=step in self.place.numbers,
            failures=self.saves.failures.count,
            must_write=must_write,
            is_busy=holds and self.saves.is_busy,
            is_due_in_memory=holds and self._policy.is_due_in_memory(step),
            is_lost=bool(self._owner.lost),
            memory=memory,
        )
        return decide(self._agreement, vote)

    def restore(self, state: dict[str, Any], selection: Selection, step: int | None, *, fallback: bool) -> int | None:
        """Loads the newest state, or the checkpoint of ``step``. Returns its step, or None if there is nothing."""
        self.write_held()
        self.saves.wait()
        lost = finish_unflushed(self._flushing, self._agreement)
        self.survival.begin()
        self.survival.forget()
        found = self._agreement.decided(lambda: choose(self._folder, self._names, step, fallback=fallback))
        kept = None if step is not None else self.survival.restore(state, selection, found, lost)
        if isinstance(kept, SaveRecord):
            place: Place | None = _place_of(kept, found)
            record: SaveRecord | None = kept
        else:
            place = self._restore_from_storage(state, selection, found, kept)
            record = None if place is None or place.tip is None else place.tip.record
        self.survival.start_keeper()
        if place is None:
            return None
        self.place = place
        self._continue_from(place.step)
        self._clock.resume(record)
        return place.step

    def write_held(self) -> None:
        """Begins the save of the newest step if it is only in memory."""
        if self.place is not None and self.saves.held_step is not None:
            self._advance()
            self.saves.write_held()

    def wait(self, *, until_published: bool) -> None:
        """Waits for all work in progress. Raises the error of the last save if no call has raised it yet."""
        self.write_held()
        self.saves.wait()
        if until_published:
            self.saves.wait_published(NEVER)
        self.saves.raise_error()

    def export_last(self) -> None:
        """Exports the last save of the job, if the export asks for it. All ranks call it."""
        if self.exports is not None:
            self.saves.wait()
            self.saves.error = self.exports.run_last(self.saves.wait_committed()) or self.saves.error

    def close(self, deadline: Deadline, *, is_with_all: bool, is_stopping: bool) -> None:
        """Waits for all work in progress, up to the deadline, and ends everything. ``is_with_all``: all ranks call it.

        A job that ``is_stopping`` waits for a publication no longer than a save may wait for a storage.
        """
        if self.exports is not None:
            self.saves.wait(deadline)  # an export reads the buffers that the writer frees
        self._writer.close(deadline.left)
        self.saves.wait(deadline)
        timeout = self._writer.saver.options.limits.timeout
        try:
            until = Deadline(deadline.within(timeout)) if is_stopping else deadline
            self.saves.wait_published(until, on_all_ranks=is_with_all)
        finally:
            if self.exports is not None:
                self.exports.close()
            if self.saves.failures.count or self.saves.is_busy or self.saves.held_step is not None:
                self.survival.leave(deadline)  # the newest step exists only in memory
            self.survival.end(deadline, has_saved=self.saves.saved is not None)

    def destroy_groups(self) -> None:
        """Destroys the process groups of the job; an abandoned save keeps its own."""
        self._agreement.close()
        if self.saves.is_over:
            self._heartbeats.close()

    def members(self) -> list[Step]:
        """The checkpoints of the job's branch; raises what `read_members` raises."""
        return read_members(self._folder, self._names, self.place)

    @property
    def template(self) -> str:
        """The template of the directories' names."""
        return self._names.template

    def path(self, step: int) -> str:
        """The path of a step's checkpoint, which need not exist."""
        name = self._names.name_of(step) if self.place is None else self.place.name_of(step, self._names)
        return self._folder.child(name).location

    def _go_back(self, step: int) -> None:
        """Begins a branch, because the job has gone back to an earlier step without restoring it."""
        assert self.place is not None
        logger.warning(
            "%s: the job has gone back from step %d to step %d, and not by restore: from here on its saves are a "
            "branch of their own",
            self._folder.path,
            self.place.step,
            step,
        )
        self.write_held()
        self.saves.wait()
        self._advance()
        self.place.begin_anew(self._agreement.decided(lambda: leave(None)))
        self.survival.forget()
        self._continue_from(max(0, step - 1))

    def _advance(self) -> None:
        """Waits for the last save. If it is committed, the job resumes from it."""
        assert self.place is not None
        self.place.advance(self.saves.wait_committed())

    def _continue_from(self, step: int) -> None:
        """Notes that the job resumes from another step than that of its last save."""
        assert self.place is not None
        self.saves.forget()
        if self._agreement.is_first:
            self.place.warn_of_others(self._folder.path)
        self._policy.continue_from(step)
        if self.exports is not None:
            self.exports.continue_from(step)

    def _act(
        self, decision: Decision, step: int, state: Mapping[str, Any], part: StatePart, metrics: dict[str, float]
    ) -> Future[str] | None:
        assert self.place is not None
        action = decision.action
        if action is Action.NOTHING:
            self.saves.warm_up(state, part)
            return None
        if action is Action.JOIN:
            return self.saves.future
        if action is Action.KEEP:
            future: Future[str] = Future()
            future.set_result(self.path(step))
            return future
        if action is Action.SAVE or not self.saves.is_busy:
            self._advance()  # staging would wait for that save, too
        self._policy.begin(step, is_due=decision.is_due)
        name = self.place.name_of(step, self._names)
        self._serial = max(self._serial, self.place.serial) + 1
        rules = self._options.retention
        record = SaveRecord(
            step,
            parent=(self.place.tip.save_id or None) if self.place.tip else None,
            branch=self.place.branch,
            metrics=metrics,
            job=self.survival.run,
            lived=self._clock.lived,
            restarts=self._clock.restarts,
            is_end=decision.vote.stop,
            serial=self._serial,
            keep_latest=rules.latest,
            keep_every=rules.every,
            keep_best=None if rules.metric is None else (rules.metric, rules.mode),
        )
        keep = self.survival.next_state(record, self.place)
        new = NewStep(self._folder.child(name), name, record)
        if action is Action.SAVE:
            return self.saves.start(new, state, part, keep)
        if keep is not None:
            self.saves.hold(new, state, part, keep, is_due=decision.is_due)
        return None

    def _restore_from_storage(
        self, state: dict[str, Any], selection: Selection, found: RestoreChoice, problem: Problem | None
    ) -> Place | None:
        """Loads the first checkpoint that is not damaged; returns the job's new place, or None if there is none.

        ``problem`` says why a state in memory was not loaded, if there is one. States in memory may be all that is
        left of the job. So they are freed only once a checkpoint has been loaded, or if they are damaged.
        """
        steps = [step for step, _ in found.candidates]
        options = self._options.reader_options
        number = load_first(self._folder, steps, state, selection, self._heartbeats, options)
        if number is not None or (problem is not None and problem.is_damage):
            self.survival.discard()
        if problem is not None and (number is None or (problem.has_touched and selection.tolerates)):
            raise ReadError(
                f"{self._folder.path}: the state in memory could not be loaded, and storage does not have all of it. "
                f"What is in the state now may be of neither: make it anew, and restore again. {problem.error}"
            )
        if number is None:
            return None
        step = steps[number]
        if self._agreement.is_first and step.record is not None and step.record.step != step.number:
            logger.warning(
                "%s/%s says that it is of step %d: it was renamed, or is a copy. It is restored as step %d",
                self._folder.path,
                step.name,
                step.record.step,
                step.number,
            )
        return found.place(number)


def _superseded(path: str) -> str:
    return (
        f"{path}: a later run of this job has claimed the memory of another host, where this run's states are copied "
        f"to. This run saves no more: end it. If the other run is the wrong one, end that, and start this one again"
    )


def _place_of(record: SaveRecord, found: RestoreChoice) -> Place:
    """The place of a job that has loaded a state from memory."""
    return Place.at(record.branch, newest_of(found.steps, record.branch), found.steps, record.step)
