"""The state that the saves of one writer share, and that each of its sessions works with."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable
from contextlib import suppress

from .._staging.stager import Stager
from .._storage.claim import Ownership
from .._tiers.queue import Life
from ..errors import CheckpointError
from .engine import engine_of_process
from .options import SaveOptions
from .report import Freshness, Reports, SaveReport
from .reuse import ReusingSave


class SaveContext:
    """The part of a writer that a session needs: options, its place in the engine, and who gets its reports.

    Args:
        options: Of the writer.
        on_report: Called with the report of each save.
        closed: The writer has been closed, and stages nothing.

    Attributes:
        options: Of the writer.
        engine: Has the buffers that saves are written from, and the process that writes them.
        stager: Copies state dicts there.
        flushing: Of the local folder, if there is one.
        reports: Takes what saves cost to the user.
        freshness: Knows whether a save differs from the one before.
        id: Of the writer.
        owner: Says whether the folder of the saves is still this run's; None where nobody claims it.
        closed: The writer has been closed.
    """

    def __init__(
        self, options: SaveOptions, on_report: Callable[[SaveReport], object] | None, *, closed: bool = False
    ) -> None:
        self.options = options
        devices = options.staging == "device"
        self.engine = engine_of_process(devices=devices)
        self.stager = Stager(
            self.engine.saves,
            cache_staged_state_dict=options.cache_staged_state_dict,
            thread_count=options.write.thread_count,
            in_place=options.staging == "shared",
            copy_from_devices=functools.partial(self.engine.client.snapshot, options.limits.timeout)
            if devices
            else None,
            overlap_staging=options.overlap_staging,
        )
        self.flushing = None if options.target is None else self.engine.flushing(options.target)
        self.reports = Reports(on_report)
        self.freshness = Freshness()
        self.closed = closed
        self.owner: Ownership | None = None
        self.id = uuid.uuid4().hex
        self._life: Life | None = None

    def show_life(self) -> None:
        """Says in the local folder that what this writer saves there is of no dead job, until it is closed."""
        if self.flushing is not None and self._life is None and not self.closed:
            with suppress(CheckpointError, OSError):
                self._life = Life(self.flushing.queue, self.id)

    def reusing_save(self) -> ReusingSave | None:
        """Returns what knows which parts of a save need not be written again; None if everything is to be written."""
        options = self.options
        if not options.write.reuse_unchanged:
            return None
        return ReusingSave(self.engine.files, max_reuses=options.limits.max_reuses, sha256=options.write.sha256)
