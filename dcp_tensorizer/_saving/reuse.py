"""Reuse of files of earlier saves, so that a save does not write the same contents again.

The bytes of a file follow from the names, dtypes, shapes, kinds and elements of its tensors. So two files with equal
`TensorContent` in the same order are equal, even if their tensors are different chunks, or from different ranks. A name
is the tensor's key, except where a tensorizer file cannot hold that key. Elements are compared by XXH3-128. A save
adopts a file of an earlier save: the storage links or copies it under a new name (`Storage.adopt`).

Only whole files can be adopted. So a save writes the tensors that have not changed in the last saves, according to
their digests, to files without other tensors. If a tensor that counts as unchanging changes, it must stay the same for
twice as many saves before it counts as unchanging again.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from .._runtime.forks import free_in_child
from .._storage.base import Storage
from .._tensor_file.names import INDEX_CAPACITY, StoredItem, data_file_name
from .._writer_process.jobs import FileJob
from .._writer_process.options import SaveOptions
from .._writer_process.protocol import EarlierFile, FileRequest, TensorSource, WriteDone, WriteRequest
from ..errors import WriteError
from .write_plan import Item, plan_files

logger = logging.getLogger("dcp_tensorizer")

# How many of a file's newest locations are remembered: after a save that was not committed, the newest is gone.
_LOCATIONS = 4
# A file or a history is retained for this many saves that do not use it: a job may save its model and its optimizer in
# turn, and other states between them.
_SAVES = 4
_MAX_NEEDED = 64
# If one tensor changes, its whole file must be written. The header is 0.03% of a file of 1 GiB.
_MAX_STEADY_BYTES = 1 << 30
_MIN_STEADY_BYTES = INDEX_CAPACITY  # the header of a smaller file takes more space than reuse saves


TensorContent = tuple[TensorSource, bytes]
"""A tensor's description in a file (`_described`), and the digest of its elements."""


@dataclass(frozen=True, slots=True)
class _History:
    digest: bytes  # of its elements, in its last save
    same: int = 0  # number of saves in a row, before the last one, that had the same digest
    needed: int = 1  # the value of ``same`` from which the tensor counts as unchanging
    seen: int = 0  # the number of the last save with the tensor

    @property
    def is_steady(self) -> bool:
        return self.same >= self.needed

    def after(self, digest: bytes, save: int) -> _History:
        if digest == self.digest:
            return _History(digest, self.same + 1, self.needed, save)
        needed = min(_MAX_NEEDED, 2 * self.needed) if self.is_steady else self.needed
        return _History(digest, 0, needed, save)


@dataclass(frozen=True, slots=True)
class _KnownFile:
    """A file that was written, and its names since then."""

    contents: tuple[TensorContent, ...]  # its tensors, in file order
    items: tuple[StoredItem, ...]  # their locations in it
    nbytes: int
    earlier: tuple[EarlierFile, ...]  # newest first
    sha256: bool
    uses: int = 0  # number of adoptions
    seen: int = 0  # the number of the last save that wrote or adopted the file


class KnownFiles:
    """The files of the last saves, and the histories of their tensors. Thread-safe."""

    def __init__(self) -> None:
        self._files: tuple[_KnownFile, ...] = ()
        self._histories: dict[TensorSource, _History] = {}
        self._saves = 0
        # reentrant, because a signal handler that saves may interrupt the lock's holder
        self._changing = free_in_child(threading.RLock())

    def begin(
        self, contents: Mapping[TensorSource, bytes]
    ) -> tuple[int, list[_KnownFile], dict[TensorSource, _History]]:
        """Returns the number of a new save, the files that it may adopt, and the histories of its tensors."""
        with self._changing:
            self._saves += 1
            number, files, before = self._saves, self._files, self._histories
        histories = {
            tensor: before[tensor].after(digest, number) if tensor in before else _History(digest, seen=number)
            for tensor, digest in contents.items()
        }
        found = [file for file in files if all(contents.get(tensor) == digest for tensor, digest in file.contents)]
        return number, found, histories

    def end(self, number: int, files: Sequence[_KnownFile], histories: Mapping[TensorSource, _History]) -> None:
        """Adds the files and histories of a save that has written its files. Drops those of no use for later saves."""
        with self._changing:
            known = {
                tensor: history for tensor, history in self._histories.items() if number - history.seen < _SAVES
            } | dict(histories)
            replaced = {(file.contents, file.sha256) for file in files}
            others = [
                file
                for file in self._files
                if (file.contents, file.sha256) not in replaced
                and number - file.seen < _SAVES
                and all(
                    (of := known.get(tensor)) is not None and of.digest == digest for tensor, digest in file.contents
                )
            ]
            self._files, self._histories = (*files, *others), known


_Digest = Callable[[Sequence[TensorSource]], Sequence[bytes]]
"""Computes the XXH3-128 of each tensor."""


class FilesOfSave:
    """The files of one rank in one save: the tensors of each, and the files that can be adopted.

    A second attempt uses other file names, because data that a dead process sent may still arrive.
    """

    def __init__(self, storage: Storage, rank: int, save_id: str, options: SaveOptions, known: KnownFiles) -> None:
        self.storage = storage
        self.rank = rank
        self.options = options
        self._save_id = save_id
        self._known = known if options.reuse_unchanged and storage.adopts else None
        self._requests: tuple[FileRequest, ...] = ()
        self._first = 0
        self._number = 0  # of the save, from `KnownFiles.begin`; 0 before the save begins
        self._contents: dict[TensorSource, bytes] = {}
        self._histories: dict[TensorSource, _History] = {}
        self._candidates: list[_KnownFile] = []
        self._adopted: dict[str, _KnownFile] = {}
        self._digest_seconds = 0.0

    def request(self, sources: Sequence[TensorSource], digest: _Digest) -> WriteRequest:
        """Distributes tensors over files. If files may be adopted, ``digest`` computes the XXH3-128 of each tensor."""
        self._first += len(self._requests)
        self._requests = ()
        if self._known is None:
            most = self.storage.max_file_bytes
            self._requests = plan_files(sources, self.rank, self._save_id, most, first=self._first)
        else:
            if not self._number:
                # The names of sources are unique.
                self._contents = dict(zip(map(_described, sources), self._timed(digest, sources), strict=True))
                self._number, found, self._histories = self._known.begin(self._contents)
                # Files with other kinds of hashes differ from what this save would write.
                most, sha256 = self.options.limits.max_reuses, self.options.sha256
                self._candidates = [file for file in found if file.uses < most and file.sha256 == sha256]
            self._requests = self._plan_reuse(sources)
        return WriteRequest(self.storage.location, self.options, self._requests)

    def job(self, items: Sequence[Item], contents: Callable[[TensorSource], memoryview], digest: _Digest) -> FileJob:
        """Returns a job that writes items in this process; ``contents`` returns the bytes of each item."""
        sources = [item.source() for item in items]
        return FileJob(self.storage, self.request(sources, digest).files, contents, self.options)

    def _plan_reuse(self, sources: Sequence[TensorSource]) -> tuple[FileRequest, ...]:
        """Distributes tensors over files: adopted files first, then files of unchanging tensors, then the rest."""
        left = {_described(source): source for source in sources}
        self._adopted = {}
        requests: list[FileRequest] = []
        for file in self._candidates:
            if file.nbytes <= self.storage.max_adopted_bytes and all(tensor in left for tensor, _ in file.contents):
                tensors = tuple(left.pop(tensor) for tensor, _ in file.contents)
                name = data_file_name(self.rank, self._first + len(requests), self._save_id)
                requests.append(FileRequest(name, tensors, file.earlier, file.nbytes))
                self._adopted[name] = file
        steady = [source for tensor, source in left.items() if self._histories[tensor].is_steady]
        if sum(source.nbytes for source in steady) < _MIN_STEADY_BYTES:
            steady = []
        apart = set(map(_described, steady))
        changing = [source for tensor, source in left.items() if tensor not in apart]
        most = self.storage.max_file_bytes
        for group, limit in ((steady, min(_MAX_STEADY_BYTES, most)), (changing, most)):
            requests += plan_files(group, self.rank, self._save_id, limit, first=self._first + len(requests))
        return tuple(requests)

    def finish(self, done: WriteDone, digest: _Digest) -> WriteDone:
        """Completes the result of a write with the locations of the tensors in adopted files.

        Adds the files to those that later saves may adopt.
        """
        if self._known is None:
            return done
        changed = self._changed(done, digest)
        results, known = [], []
        for request, result in zip(self._requests, done.files, strict=True):
            file = self._adopted.get(request.name)
            if not result.adopted:
                # In a job that saves to two storages in turn, an earlier file on the other storage cannot be adopted.
                # The file that is written instead inherits the number of adoptions, so that neither file is adopted
                # too often.
                uses = 0 if file is None else file.uses
                contents = tuple((tensor, self._contents[tensor]) for tensor in map(_described, request.tensors))
                file = _KnownFile(contents, result.tensors, result.nbytes, request.earlier, self.options.sha256, uses)
            assert file is not None
            items = tuple(item._replace(file=result.name) for item in file.items)
            results.append(replace(result, tensors=items))
            if result.identity is not None and (result.adopted or changed.isdisjoint(map(_described, request.tensors))):
                newest = EarlierFile(self.storage.location, result.name, result.identity)
                earlier = (newest, *itertools.islice(file.earlier, _LOCATIONS - 1))
                uses = file.uses + result.adopted
                known.append(replace(file, earlier=earlier, uses=uses, seen=self._number))
        self._known.end(self._number, known, self._histories)
        seconds = done.seconds + self._digest_seconds, done.hash_seconds + self._digest_seconds
        return replace(done, files=tuple(results), seconds=seconds[0], hash_seconds=seconds[1])

    def _changed(self, done: WriteDone, digest: _Digest) -> set[TensorSource]:
        """Returns the tensors that were written from the trainer's memory and no longer match their digests.

        Training must not change a tensor during its save. If it does, the checkpoint of that save is invalid, but later
        checkpoints must not become invalid.
        """
        written = {file.name for file in done.files if not file.adopted}
        tensors = [tensor for file in self._requests if file.name in written for tensor in file.tensors]
        live = [tensor for tensor in tensors if not isinstance(tensor.memory, int)]
        if not live:
            return set()
        digests: Sequence[bytes] = [b""] * len(live)
        with suppress(WriteError):  # without digests, all of these tensors count as changed
            digests = self._timed(digest, live)
        return {t for t, found in zip(map(_described, live), digests, strict=True) if self._contents[t] != found}

    def _timed(self, digest: _Digest, sources: Sequence[TensorSource]) -> Sequence[bytes]:
        started = time.perf_counter()
        digests = digest(sources)
        self._digest_seconds += time.perf_counter() - started
        return digests

    def remove(self) -> None:
        """Removes the files. Call it only when no process writes them."""
        for file in self._requests:
            try:
                self.storage.discard(file.name)
            except Exception as error:
                shown = self.storage.scrub(str(error))
                logger.warning("cannot remove %s/%s of a failed save: %s", self.storage.path, file.name, shown)


def _described(source: TensorSource) -> TensorSource:
    """Returns a source without its location in memory."""
    return TensorSource(*source[:5])
