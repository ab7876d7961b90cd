"""The models that a writer saves are published as versions, by its writer process."""

from __future__ import annotations

import logging
import os

from .._format.safetensors_header import INDEX, SINGLE
from .._publish.publisher import Publication, Publish
from .._runtime.process_context import ProcessContext
from .._storage.base import Storage
from .._storage.claim import Claim
from .._storage.open import open_storage
from .._writer_process.protocol import PublishRequest
from .._writer_process.write_options import WriteOptions
from .writer_client import WriterClient

logger = logging.getLogger("dcp_tensorizer")


class VersionsOfWriter:
    """Publishes the models of one writer, one after the other.

    The new model is compared with the one before as long as that is there: in its own directory, or in that of the new
    one, whose save has replaced its index but not yet removed its files.
    """

    def __init__(self, options: Publish, write: WriteOptions) -> None:
        self._options, self._write = options, write
        self._own: Claim | None = None
        self._last: str | None = None

    def publish(
        self,
        model: Storage,
        replaced_index: bytes | None,
        client: WriterClient | None,
        context: ProcessContext | None,
    ) -> None:
        """Publishes a model that has just been saved, in this process if there is no ``client``.

        ``replaced_index`` is the index that was in its directory before. Raises `CheckpointError` if it cannot be
        published.
        """
        index = replaced_index if self._last == model.location else None
        publication = Publication(
            model.location,
            os.fspath(self._options.path),
            self._last if self._is_there(model, index) else None,
            None,
            self._options.max_deltas,
            self._options.keep_latest,
            self._write.storage_options,
            index,
        )
        self._last = None
        if client is None:
            version, self._own = publication.publish(self._own)
        else:
            request = PublishRequest(publication, self._own)
            version, self._own = client.publish(request, self._write.limits.timeout, context)
        self._last = model.location
        logger.info("%s: published as version %d of %s", model.path, version.version, version.path)

    def _is_there(self, model: Storage, index: bytes | None) -> bool:
        """Returns whether the files of the last model can be read."""
        if self._last is None:
            return False
        if self._last == model.location:
            return index is not None
        before = open_storage(self._last, self._write.storage_options, self._write.limits.timeout)
        return any(before.head(name) is not None for name in (INDEX, SINGLE))
