"""Publishing of a writer's models as versions, in a separate process, while training and saves continue."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from .._formats.safetensors_header import SINGLE, files_named
from .._publish.model import OtherFile
from .._publish.publisher import Publication, Publish, PublishedVersion
from .._runtime.forks import free_in_child
from .._runtime.process_context import ProcessContext
from .._runtime.threads import Deadline, Hung, in_background, in_time
from .._saving.writer_client import WriterClient
from .._storage.base import Storage
from .._storage.lease import LeaseRecord
from .._writer_process.options import SaveOptions
from ..errors import WriteError, describe

logger = logging.getLogger("dcp_tensorizer")


class NotPublished(WriteError):
    """The error of a model that is saved, but could not be published. The save of a later model may raise it."""


@dataclass(slots=True, eq=False)
class SavedModel:
    """A committed model.

    ``before`` is the model that this one has replaced, while publishing may still need the files of that model.
    ``release`` removes the files of the replaced model, if any, and releases the directory.
    """

    storage: Storage
    index: bytes | None  # None if the model is one file
    others: Mapping[str, OtherFile]  # the files beside the weights, which later saves replace
    context: ProcessContext | None
    release: Callable[[], None]
    step: int | None = None  # of training, if a manager has saved the model
    before: SavedModel | None = None

    @property
    def files(self) -> set[str]:
        return {SINGLE} if self.index is None else files_named(self.index)


class VersionsOfWriter:
    """A publisher of one writer's models, which publishes them one after the other.

    Of several waiting models, only the newest is published. A model is compared with the last published model if the
    files of the published model still exist. The files of a replaced model stay until publishing no longer needs them.

    Attributes:
        is_busy: A model is being published, or waits to be.
    """

    def __init__(self, options: Publish, write: SaveOptions) -> None:
        self._options, self._write = options, write
        self._client = WriterClient()
        self._own: LeaseRecord | None = None
        self._changed = free_in_child(threading.Condition())
        self._newest: dict[str, SavedModel] = {}  # by directory: its last model, while publishing needs it
        self._unreleased: list[SavedModel] = []
        self._waiting: SavedModel | None = None
        self._running: SavedModel | None = None
        self._published: SavedModel | None = None
        self.is_busy = self._is_closed = False
        self._version: PublishedVersion | None = None
        self._error: NotPublished | None = None

    def add(self, model: SavedModel) -> None:
        """Publishes a model in the background. Raises `WriteError` if an earlier model could not be published."""
        with self._changed:
            error, self._error = self._error, None
            location = model.storage.location
            model.before = self._newest.get(location)
            self._newest[location] = model
            self._unreleased.append(model)
            if self._waiting is not None:
                logger.info("%s: not published, because a newer model was saved", self._waiting.storage.path)
            self._waiting = model
            starts, self.is_busy = not self.is_busy, True
        if starts:
            in_background(self._work, name="publish")
        self._release()
        if error is not None:
            raise error

    def files_needed(self, location: str) -> set[str]:
        """Returns the names of a directory's files that publishing still needs, including those of replaced models."""
        with self._changed:
            return {name for model in self._needed() if model.storage.location == location for name in model.files}

    def wait(self, deadline: Deadline) -> PublishedVersion | None:
        """Waits until all models are published; returns the last version, or None if no model was published.

        At the deadline, returns None. Raises `WriteError` if a model could not be published, and no call has raised
        that error yet.
        """
        with self._changed:
            is_over = self._changed.wait_for(lambda: not self.is_busy, deadline.left)
            error, self._error = self._error, None
        if error is not None:
            raise error
        return self._version if is_over else None

    def end(self, deadline: Deadline) -> None:
        """Waits for publishing, and ends the process that publishes. At the deadline, kills that process."""
        with suppress(WriteError):  # the error has been logged
            self.wait(deadline)
        with self._changed:
            if (left := self._waiting) is not None:
                logger.error("%s: not published, because the writer was closed", left.storage.path)
            self._waiting, self._published, self._is_closed = None, None, True
        self._client.end_process(deadline)
        with suppress(WriteError):
            self.wait(Deadline(_END_SECONDS))
        self._client.end_process(Deadline(0))  # the thread may have started another process in the meantime
        self._release()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._running, self._waiting = self._waiting, None
                model, previous = self._running, self._published
                if model is None:
                    self.is_busy = False
                    self._changed.notify_all()
                    return
            error, version = None, self._version
            try:
                version = self._publish(model, previous)
            except Exception as failure:
                error = NotPublished(
                    f"the model is saved to {model.storage.path}, but cannot be published: {describe(failure)}"
                )
                error.__cause__ = failure
                logger.error("%s", error)
            with self._changed:
                self._running = None
                self._published = model if error is None and not self._is_closed else None
                self._version, self._error = version, error or self._error
            self._release()

    def _publish(self, model: SavedModel, previous: SavedModel | None) -> PublishedVersion:
        timeout = self._write.limits.timeout
        if previous is not None:
            storage, names = previous.storage, sorted(previous.files)
            try:
                if not in_time(lambda: any(storage.head(name) is not None for name in names[:1]), timeout):
                    previous = None
            except Hung:
                raise WriteError(
                    f"{storage.path} has not responded for {timeout:g} s: its disk or its server hangs. Check the "
                    f"storage."
                ) from None
        request = Publication(
            model.storage.location,
            self._options,
            None if previous is None else previous.storage.location,
            model.step,
            self._write.storage_options,
            model.index,
            model.others,
            None if previous is None else previous.index,
            self._own,
        )
        version, self._own, warnings = self._client.publish(request, timeout, model.context, lambda: self._is_closed)
        for warning in warnings:
            logger.warning("%s", warning)
        logger.info("%s: published as version %d, in %s", model.storage.path, version.version, version.path)
        return version

    def _needed(self) -> list[SavedModel]:
        return [model for model in (self._waiting, self._running, self._published) if model is not None]

    def _release(self) -> None:
        with self._changed:
            needed = set(map(id, self._needed()))
            released = [model for model in self._unreleased if model.before is None or id(model.before) not in needed]
            self._unreleased = [model for model in self._unreleased if model not in released]
            self._newest = {location: model for location, model in self._newest.items() if id(model) in needed}
        for model in released:
            model.before = None  # otherwise each model would keep all earlier ones alive
            try:
                model.release()
            except Exception as error:
                path = model.storage.path
                logger.warning("%s: files of the replaced model may be left over: %s", path, describe(error))


_END_SECONDS = 5.0  # timeout for the publishing thread to detect that its process has ended
