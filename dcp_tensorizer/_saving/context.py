"""The state that the saves of one writer share, and that its sessions use."""

from __future__ import annotations

import functools
import uuid
from contextlib import suppress

from .._staging.stager import Stager
from .._storage.claim import Ownership
from .._tiers.queue import AliveMark
from ..errors import CheckpointError
from .engine import engine_of_process
from .options import SaveOptions
from .report import Freshness, Reports, SaveCallbacks


class SaveContext:
    """The part of a writer that a session needs: options, its place in the engine, and who gets its reports.

    Args:
        options: The writer's options.
        callbacks: Told of the writer's saves.
        closed: The writer has been closed, and stages nothing.

    Attributes:
        engine: The staging buffers and the writer process.
        stager: Copies state dicts to the buffers.
        flushing: The flush of the local folder, if there is one.
        reports: Passes the reports of saves to the user.
        freshness: Compares each save with the one before.
        id: The writer's id.
        owner: The run's claim to the folder of the saves; None if nobody claims it.
    """

    def __init__(self, options: SaveOptions, callbacks: SaveCallbacks, *, closed: bool = False) -> None:
        self.options = options
        self.callbacks = callbacks
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
        self.reports = Reports(callbacks.on_report)
        self.freshness = Freshness()
        self.closed = closed
        self.owner: Ownership | None = None
        self.id = uuid.uuid4().hex
        self._alive_mark: AliveMark | None = None

    def show_alive(self) -> None:
        """Marks the writer in the local folder as alive until it is closed: its saves are not those of a dead job."""
        if self.flushing is not None and self._alive_mark is None and not self.closed:
            with suppress(CheckpointError, OSError):
                self._alive_mark = AliveMark(self.flushing.queue, self.id)
