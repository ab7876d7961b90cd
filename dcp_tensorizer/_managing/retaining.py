"""What comes after each commit, when the checkpoint is where it is to stay: `latest` names it, and old ones go."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for

from .._forks import free_in_child
from .._saving.flushing import Flushing
from .._storage.base import Storage
from .._storage.claim import Ownership
from .._threads import Deadline, in_background
from ..errors import CheckpointError, listed
from .catalogue import Step
from .deletion import retain
from .latest import Latest
from .names import StepNames
from .place import Place
from .retention import Retention

__all__ = ["Retaining"]

logger = logging.getLogger("dcp_tensorizer")


class Retaining:
    """Has `latest` name the newest checkpoint of a job, and deletes old ones, on the rank that does so.

    With a local folder, it is when the remote has the newest: what is not there yet counts for nothing.

    Args:
        folder: Of the checkpoints; with a local folder, the remote one.
        names: Of their directories.
        rules: What is kept; None on a rank that changes nothing.
        owner: Says whether the folder is still this job's.
        flushing: Of the local folder, if there is one.
        place: Where the job stands.
    """

    def __init__(
        self,
        folder: Storage,
        names: StepNames,
        rules: Retention | None,
        owner: Ownership,
        flushing: Flushing | None,
        place: Callable[[], Place | None],
    ) -> None:
        self._folder = folder
        self._names = names
        self._rules = rules
        self._owner = owner
        self._flushing = flushing
        self._place = place
        self._lock = free_in_child(threading.Lock())
        self._running: list[Future[None]] = []
        self._deleted: set[int] = set()
        self._has_warned = False
        self._latest = Latest(self._folder)

    def after(self, saved: Step) -> None:
        """A checkpoint is committed. Called on a thread of its own."""
        if self._rules is None:
            return
        self._look_for_metric(saved)
        self._deleted.discard(saved.number)
        arrival = None if self._flushing is None else self._flushing.future(saved.save_id)
        if arrival is None:
            self._settle(saved)
        else:
            retaining = weakref.ref(self)  # a future keeps its callbacks: with them the job would stay, and its memory

            def tell(done: Future[float]) -> None:
                if (alive := retaining()) is not None:
                    alive._after_arrival(done, saved)

            arrival.add_done_callback(tell)

    def wait(self, deadline: Deadline) -> None:
        """Waits until what was begun is done."""
        wait_for(self._running, deadline.left)

    def _look_for_metric(self, saved: Step) -> None:
        """Warns once of a checkpoint without the metric that the best is known by."""
        metric = None if self._rules is None else self._rules.metric
        if metric is None or metric in saved.metrics or self._has_warned:
            return
        self._has_warned = True
        given = f" (its metrics are {listed(sorted(saved.metrics))})" if saved.metrics else ""
        logger.warning(
            "%s: step %d was saved without the metric %r, which keep_best needs%s: pass metrics={%r: ...} to save. "
            "While no checkpoint has it, none is deleted",
            *(self._folder.path, saved.number, metric, given, metric),
        )

    def _after_arrival(self, done: Future[float], saved: Step) -> None:
        if done.exception() is None:
            self._begin(lambda: self._settle(saved))
        else:  # another run may have the folder now: the next save is to say so
            self._begin(self._owner.claim)

    def _begin(self, what: Callable[[], None]) -> None:
        running = [other for other in self._running if not other.done()]
        self._running = [*running, in_background(what, name="checkpoint-manager")]

    def _settle(self, saved: Step) -> None:
        assert self._rules is not None
        with self._lock:
            place = self._place()
            if saved.number in self._deleted:
                return  # a later step has arrived before it, and with that one it was deleted
            if place is not None and place.branch != saved.branch:
                return  # the job has left that branch since: what it went back to must stay
            try:
                self._owner.check()
            except CheckpointError as error:
                logger.warning("old checkpoints are not deleted: %s", str(error))
                return
            self._latest.move(saved)
            if self._rules.keeps_all:
                return
            for step in retain(self._folder, self._names, saved, self._rules, self._owner.check):
                self._deleted.add(step.number)
                if place is not None:
                    place.numbers.discard(step.number)
