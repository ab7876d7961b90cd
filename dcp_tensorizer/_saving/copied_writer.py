"""A writer that is copied to another process, or to a forked child."""

from __future__ import annotations

import threading
from typing import Any

from .._forks import in_child
from .._process_context import ProcessContext
from .._staging.staged_save import StagedSave
from ..errors import StagingError
from .options import SaveOptions
from .saver import Saver

__all__ = ["CopiedWriter"]

_NOT_COPIED = {"_saver", "_local"}  # tied to this process, or to one of its threads
_OF_GROUP = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE")
"""DCP has set these in its own process, for the process group there."""


class CopiedWriter:
    """What of `TensorizerStorageWriter` is tied to a process. In PROCESS mode DCP sends a copy with every save."""

    _options: SaveOptions
    _saver: Saver

    def _begin(self, saver: Saver) -> None:
        """In the process that the writer was made in."""
        self._error_of_trainer: StagingError | None = None
        self._context_of_trainer: ProcessContext | None = None
        self._saver = saver
        self._here()

    def __getstate__(self) -> dict[str, Any]:
        """What a copy in another process needs."""
        staged_save = self._saver.stager.begin_save()
        state = {name: value for name, value in self.__dict__.items() if name not in _NOT_COPIED}
        state["_closed"] = self._saver.closed
        if staged_save is not None:
            state |= {"_error_of_trainer": staged_save.error, "_context_of_trainer": staged_save.context}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy writes in its own process, unless it comes to stage something: then it is a trainer's writer."""
        closed = state.pop("_closed")
        self.__dict__.update(state)
        self._saver = Saver(self._options, None, closed=closed)
        self._here()

    def _context(self, staged_save: StagedSave | None) -> ProcessContext | None:
        """What the process had that asked for a save, taken on where that was another one; None if it is just asked."""
        if staged_save is not None:
            return staged_save.context
        if self._context_of_trainer is not None:
            self._context_of_trainer.take_on(_OF_GROUP)
        return self._context_of_trainer

    def _renew(self) -> None:
        """In a forked child: the writer process, the buffers and the saves are its parent's."""
        self._saver = self._saver.renewed()
        self._local = threading.local()

    def _here(self) -> None:
        self._local = threading.local()  # each save's path and session: saves that nobody staged may run at once
        in_child(self, CopiedWriter._renew)
