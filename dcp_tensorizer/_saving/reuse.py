"""An engine's memory of the files that it has written, so that a save need not write the same contents again.

The bytes of a file follow from the names, dtypes, shapes, kinds and elements of its tensors. So two files with equal
`TensorContent` in the same order are equal, even if the tensors have other keys, chunks or ranks in each save. Elements
are compared by XXH3-128. Each save has its own file names, so an adopted file gets a new name.

Only whole files can be adopted. So tensors that have not changed lately are kept apart from those that do, by the
digests of earlier saves. When a tensor that was taken for unchanging changes, it must stay the same for twice as many
saves before it is taken for unchanging again.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from .._format.names import INDEX_CAPACITY, StoredItem, data_file_name
from .._runtime.forks import free_in_child
from .._storage.base import UNLIMITED, Storage
from .._writer_process.protocol import EarlierFile, FileRequest, FileResult, TensorSource, WriteDone
from ..errors import WriteError
from .write_plan import plan_files

_HOMES = 4  # in the last saves: the newest may be gone, if its save was not committed
_KEPT = 4  # saves: a job may save its model and its optimizer in turn, and other states between them
_MAX_PATIENCE = 64
# If one tensor changes, its whole file must be written. The head is 0.03% of a file of a GiB.
_MAX_STEADY_BYTES = 1 << 30
_MIN_STEADY_BYTES = INDEX_CAPACITY  # a smaller file would take more space than it saves


TensorContent = tuple[TensorSource, bytes]
"""A tensor as a file describes it, by `_described`, and the digest of its elements. They determine a file's bytes."""


@dataclass(frozen=True, slots=True)
class _History:
    """The history of a tensor."""

    digest: bytes  # of its elements, in its last save
    same: int = 0  # how many saves before that had the same digest
    patience: int = 1  # how many it takes until the tensor counts as unchanging
    seen: int = 0  # the number of its last save

    @property
    def is_steady(self) -> bool:
        return self.same >= self.patience

    def after(self, digest: bytes, save: int) -> _History:
        """The history after another save."""
        if digest == self.digest:
            return _History(digest, self.same + 1, self.patience, save)
        patience = min(_MAX_PATIENCE, 2 * self.patience) if self.is_steady else self.patience
        return _History(digest, 0, patience, save)


@dataclass(frozen=True, slots=True)
class _KnownFile:
    """A file that was written, and the names that it has had since."""

    contents: tuple[TensorContent, ...]  # its tensors, in file order
    items: tuple[StoredItem, ...]  # their places in it
    nbytes: int
    homes: tuple[EarlierFile, ...]  # newest first
    sha256: bool  # whether it has SHA-256 hashes
    uses: int = 0  # how often it was adopted
    seen: int = 0  # the number of the last save that wrote or adopted it


class KnownFiles:
    """The files of the last saves, and the histories of their tensors. Several threads may use it."""

    def __init__(self) -> None:
        self._files: tuple[_KnownFile, ...] = ()
        self._histories: dict[TensorSource, _History] = {}
        self._saves = 0
        # reentrant, because a signal handler that saves may interrupt its holder
        self._changing = free_in_child(threading.RLock())

    def begin(
        self, contents: Mapping[TensorSource, bytes]
    ) -> tuple[int, list[_KnownFile], dict[TensorSource, _History]]:
        """Begins a save of tensors with these digests; returns its number, the files that it may adopt, and the
        histories.
        """
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
        """Remembers the files and histories of a save that has written, and forgets those that no later save can
        use.
        """
        with self._changing:
            known = {
                tensor: history for tensor, history in self._histories.items() if number - history.seen < _KEPT
            } | dict(histories)
            replaced = {(file.contents, file.sha256) for file in files}
            others = [
                file
                for file in self._files
                if (file.contents, file.sha256) not in replaced
                and number - file.seen < _KEPT
                and all(
                    (of := known.get(tensor)) is not None and of.digest == digest for tensor, digest in file.contents
                )
            ]
            self._files, self._histories = (*files, *others), known


class ReusingSave:
    """One save of one rank that does not write again what is in files of earlier saves.

    A file is adopted at most ``max_reuses`` times before its tensors are written anew.
    """

    def __init__(self, known: KnownFiles, *, max_reuses: int, sha256: bool) -> None:
        self._known = known
        self._max_reuses = max_reuses
        self._sha256 = sha256
        self._number = 0
        self._contents: dict[TensorSource, bytes] = {}
        self._histories: dict[TensorSource, _History] = {}
        self._candidates: list[_KnownFile] = []
        self._adopted: dict[str, _KnownFile] = {}
        self._changed: set[TensorSource] = set()

    @property
    def is_prepared(self) -> bool:
        """Returns whether `prepare` has been called."""
        return self._number > 0

    def prepare(self, sources: Sequence[TensorSource], digests: Sequence[bytes]) -> None:
        """Compares the tensors of a save with known files. Each source has its own name; ``digests`` are their
        XXH3-128.
        """
        self._contents = dict(zip(map(_described, sources), digests, strict=True))
        self._number, found, self._histories = self._known.begin(self._contents)
        # Only files with the same kinds of hashes, because others differ from what would be written instead.
        self._candidates = [file for file in found if file.uses < self._max_reuses and file.sha256 == self._sha256]

    def plan(
        self,
        sources: Sequence[TensorSource],
        rank: int,
        save_id: str,
        max_file_bytes: int = UNLIMITED,
        max_adopted_bytes: int = UNLIMITED,
        first: int = 0,
    ) -> tuple[FileRequest, ...]:
        """Distributes tensors over files: first adopted ones, then those of unchanging tensors, then the rest.

        ``sources`` are those that were passed to `prepare`. Files of more than ``max_adopted_bytes`` are not adopted;
        ``first`` is the number of the first file, and ``max_file_bytes`` as in `plan_files`.
        """
        left = {_described(source): source for source in sources}
        self._adopted = {}
        requests: list[FileRequest] = []
        for file in self._candidates:
            if file.nbytes <= max_adopted_bytes and all(tensor in left for tensor, _ in file.contents):
                tensors = tuple(left.pop(tensor) for tensor, _ in file.contents)
                name = data_file_name(rank, first + len(requests), save_id)
                requests.append(FileRequest(name, tensors, file.homes, file.nbytes))
                self._adopted[name] = file
        steady = [source for tensor, source in left.items() if self._histories[tensor].is_steady]
        if sum(source.nbytes for source in steady) < _MIN_STEADY_BYTES:
            steady = []
        apart = set(map(_described, steady))
        changing = [source for tensor, source in left.items() if tensor not in apart]
        for group, most in ((steady, min(_MAX_STEADY_BYTES, max_file_bytes)), (changing, max_file_bytes)):
            requests += plan_files(group, rank, save_id, most, first=first + len(requests))
        return tuple(requests)

    def check(self, sources: Iterable[TensorSource], digests: Iterable[bytes]) -> None:
        """Compares tensors that were written from memory that others can change with what they were before.

        ``digests`` are taken again after the write.
        """
        tensors = map(_described, sources)
        self._changed |= {s for s, digest in zip(tensors, digests, strict=True) if self._contents[s] != digest}

    def finish(self, location: str, requests: Iterable[FileRequest], done: WriteDone) -> WriteDone:
        """Remembers the written files, and adds to the result the places of tensors in adopted files.

        ``location`` is the directory's, ``requests`` the result of `plan`, and ``done`` that of writing them.
        """
        results, known = [], []
        for request, result in zip(requests, done.files, strict=True):
            file = self._adopted[result.name] if result.adopted else self._written(request, result)
            items = tuple(item._replace(file=result.name) for item in file.items)
            results.append(replace(result, tensors=items))
            if result.identity is not None and (
                result.adopted or self._changed.isdisjoint(map(_described, request.tensors))
            ):
                home = EarlierFile(location, result.name, result.identity)
                homes = (home, *itertools.islice(file.homes, _HOMES - 1))
                uses = file.uses + result.adopted
                known.append(replace(file, homes=homes, uses=uses, seen=self._number))
        self._known.end(self._number, known, self._histories)
        return replace(done, files=tuple(results))

    def _written(self, request: FileRequest, result: FileResult) -> _KnownFile:
        """A file that was written. If known files elsewhere are equal, as in a job that saves to two storages in turn,
        it takes over their count of uses, so that they are not adopted too often.
        """
        contents = tuple((tensor, self._contents[tensor]) for tensor in map(_described, request.tensors))
        uses = self._adopted[request.name].uses if request.homes else 0
        return _KnownFile(contents, result.tensors, result.nbytes, request.homes, self._sha256, uses)


def _described(source: TensorSource) -> TensorSource:
    """A tensor without its place in memory."""
    return TensorSource(*source[:5])


# --- the files of one rank in one save: which tensors each holds, and which need not be written again -----------------

logger = logging.getLogger("dcp_tensorizer")

_Digest = Callable[[Sequence[TensorSource]], Sequence[bytes]]
"""Takes the XXH3-128 of each tensor."""


class FilesOfSave:
    """The files of one save. A second attempt has other file names, because data that a dead process sent may arrive
    later.

    ``reuse`` is None if everything is written.
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
        """Distributes tensors over files; ``digest`` takes the XXH3-128 of each, if they are needed."""
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
        """Takes the result of writing them; returns it with the places of tensors in all files."""
        if self._reuse is None:
            return done
        self._check_unchanged(self._reuse, done, digest)
        seconds = done.seconds + self._digest_seconds, done.hash_seconds + self._digest_seconds
        done = replace(done, seconds=seconds[0], hash_seconds=seconds[1])
        return self._reuse.finish(self.storage.location, self._requests, done)

    def _check_unchanged(self, reuse: ReusingSave, done: WriteDone, digest: _Digest) -> None:
        """Checks that tensors which were written from the trainer's own memory still match their digests.

        Training must not change them during a save. If it does, that checkpoint is bad, but later ones must not be.
        """
        written = {file.name for file in done.files if not file.adopted}
        tensors = [tensor for file in self._requests if file.name in written for tensor in file.tensors]
        if live := [tensor for tensor in tensors if not isinstance(tensor.memory, int)]:
            digests: Sequence[bytes] = [b""] * len(live)
            with suppress(WriteError):  # then it is unknown, and everything has been written
                digests = self._timed(digest, live)
            reuse.check(live, digests)

    def _timed(self, digest: _Digest, sources: Sequence[TensorSource]) -> Sequence[bytes]:
        started = time.perf_counter()
        digests = digest(sources)
        self._digest_seconds += time.perf_counter() - started
        return digests

    def remove(self) -> None:
        """Removes the files when nobody writes them any more."""
        for file in self._requests:
            try:
                self.storage.discard(file.name)
            except Exception as error:
                shown = self.storage.scrub(str(error))
                logger.warning("%s/%s is left over from a failed save: %s", self.storage.path, file.name, shown)
