"""The files of one rank in one save: which tensors go into which, and which need not be written again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from .._storage.base import Storage
from .._writer_process.messages import FileRequest, TensorSource, WriteDone
from ..errors import WriteError
from .file_planner import plan_files
from .reuse import ReusingSave

__all__ = ["FilesOfSave"]

logger = logging.getLogger("dcp_tensorizer")

_Digest = Callable[[Sequence[TensorSource]], Sequence[bytes]]
"""Takes the XXH3-128 of each tensor."""


class FilesOfSave:
    """The files of one save: another try has files of its own, for what a process that died has sent may arrive later.

    Args:
        storage: The checkpoint's directory.
        rank: Who writes.
        save_id: Of the save.
        reuse: Knows what need not be written again; None: everything is written.
    """

    def __init__(self, storage: Storage, rank: int, save_id: str, reuse: ReusingSave | None) -> None:
        self.storage = storage
        self.rank = rank
        self._save_id = save_id
        self._reuse = reuse
        self._requests: tuple[FileRequest, ...] = ()
        self._first = 0
        self._digest_seconds = 0.0

    def plan(self, sources: Sequence[TensorSource], digest: _Digest) -> tuple[FileRequest, ...]:
        """Distributes tensors over files; ``digest`` gives the XXH3-128 of each, if it is wanted."""
        self._first += len(self._requests)
        self._requests = ()
        names, limit = (self.rank, self._save_id), self.storage.max_file_bytes
        if self._reuse is None:
            self._requests = plan_files(sources, *names, limit, first=self._first)
        else:
            if not self._reuse.is_prepared:
                self._reuse.prepare(sources, self._timed(digest, sources))
            limits = limit, self.storage.max_adopted_bytes
            self._requests = self._reuse.plan(sources, *names, *limits, first=self._first)
        return self._requests

    def finish(self, done: WriteDone, digest: _Digest) -> WriteDone:
        """Takes what has become of them; returns it with where the tensors are in all files."""
        if self._reuse is None:
            return done
        self._check_unchanged(self._reuse, done, digest)
        seconds = done.seconds + self._digest_seconds, done.hash_seconds + self._digest_seconds
        done = replace(done, seconds=seconds[0], hash_seconds=seconds[1])
        return self._reuse.finish(self.storage.location, self._requests, done)

    def _check_unchanged(self, reuse: ReusingSave, done: WriteDone, digest: _Digest) -> None:
        """Sees whether what was written from the trainer's own memory is what its digests had been taken of.

        It must not change during a save. If it does, that checkpoint is the worse for it, but no later one may be.
        """
        written = {file.name for file in done.files if not file.adopted}
        tensors = [tensor for file in self._requests if file.name in written for tensor in file.tensors]
        if live := [tensor for tensor in tensors if not isinstance(tensor.memory, int)]:
            digests: Sequence[bytes] = [b""] * len(live)
            with suppress(WriteError):  # it is not known then, and all has been written
                digests = self._timed(digest, live)
            reuse.check(live, digests)

    def _timed(self, digest: _Digest, sources: Sequence[TensorSource]) -> Sequence[bytes]:
        started = time.perf_counter()
        digests = digest(sources)
        self._digest_seconds += time.perf_counter() - started
        return digests

    def remove(self) -> None:
        """Removes them, when nobody writes them any more."""
        for file in self._requests:
            try:
                self.storage.discard(file.name)
            except Exception as error:
                shown = self.storage.scrub(str(error))
                logger.warning("%s/%s is left over from a failed save: %s", self.storage.path, file.name, shown)
