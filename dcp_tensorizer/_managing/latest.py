"""The file ``latest``: the name of the directory that holds the newest checkpoint, as plain text.

People and scripts ask for it. And it is read directly, where the listing of a folder may come from a cache: so a
checkpoint that it names is found, whether or not a listing shows it yet.
"""

from __future__ import annotations

import logging

from .._storage.base import Storage
from ..errors import CheckpointError
from .catalogue import LATEST, Step

__all__ = ["Latest"]

logger = logging.getLogger("dcp_tensorizer")


class Latest:
    """Moves the file in a folder, on the rank that does so.

    Args:
        folder: Of the checkpoints.
    """

    def __init__(self, folder: Storage) -> None:
        self._folder = folder
        self._saved_at = 0
        self._has_failed = False

    def move(self, saved: Step) -> None:
        """Has it name a checkpoint, unless it names one that was saved later. What fails is said in the log, once."""
        if saved.saved_at <= self._saved_at:
            return  # a later one has arrived before it
        self._saved_at = saved.saved_at
        try:
            self._folder.put(LATEST, f"{saved.name}\n".encode(), sync=False)
        except CheckpointError as error:  # there may be a directory of that name, or a link to one
            if not self._has_failed:
                logger.warning("no file says which checkpoint is the newest: %s", str(error))
            self._has_failed = True
