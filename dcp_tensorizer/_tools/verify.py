"""Whether a checkpoint's files hold what was saved, at the disk's speed and in little memory.

Threads read sections of files (see `file_sections`) past the page cache, and hash each piece while it is in the core's
own cache. This is not done by the executor of loads: that stops at the first damage, and verification names every
damaged block and every range that cannot be read; and what a file holds besides items (headers, its index, its end) is
nothing that a load can ask for.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch.distributed.checkpoint.metadata import Metadata

from .._direct_memory import direct_memory
from .._forks import free_in_child
from .._storage.base import RangeReader, Storage
from .._storage.remote import RemoteStorage
from .._threads import cores
from ..errors import CheckpointError, NotCommitted, ReadError
from .checkpoint_view import data_files, read_parts
from .file_sections import SECTION_BYTES, Section, block_sections, file_sections, items_by_file

__all__ = ["Damage", "Verified", "verify"]

_PIECE = 512 << 10  # see `_format.encoder`: hashing data that is in the core's own cache
_READ = 8 << 20
_MAX_READERS = 16  # each with a buffer of that size
_PAGE = 4096
_MAX_NAMED = 3  # keys that are lost with a file
_OF_THIS_PROCESS = {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM}


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that is not as it was saved.

    Attributes:
        file: The data file, below the checkpoint's directory.
        key: None if it is the file as a whole, or bytes that belong to no tensor.
        offset: The first damaged byte of the file, as far as that is known.
        what: In words.
    """

    file: str
    key: str | None
    offset: int
    what: str


@dataclass(frozen=True, slots=True)
class Verified:
    """What was looked at, and what is wrong.

    Attributes:
        files: Data files.
        items: Tensors' chunks, and objects.
        nbytes: Bytes read.
        seconds: How long it took.
        damages: In the order of files and offsets; empty if the checkpoint is whole.
    """

    files: int
    items: int
    nbytes: int
    seconds: float
    damages: tuple[Damage, ...]


def verify(
    storage: Storage,
    parts: Mapping[int | None, Metadata],
    *,
    full: bool = False,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Verified:
    """Compares a checkpoint's files with what its metadata says of them.

    Memory: a few MiB a thread, whatever the size of the tensors.

    Args:
        storage: The checkpoint's directory.
        parts: Its metadata, of all ranks or rank by rank.
        full: Check every byte of the files and tensorizer's own hashes, and not only the digests of the data.
        progress: Called with the bytes that are done and the bytes in all, by one thread at a time.

    Raises:
        ReadError: the checkpoint was replaced or removed meanwhile, or a server does not give it, or this process may
            not read it: whether it is damaged nobody knows then.
    """
    started = time.monotonic()
    files = {name: (nbytes, part) for part in parts.values() for name, nbytes in part.storage_data["files"].items()}
    items = items_by_file(parts)
    damages: list[Damage] = []
    cut: dict[str, int] = {}
    runs: list[_Run] = []
    for name, (nbytes, part) in sorted(files.items()):
        size = _size(storage, name)
        if isinstance(size, str):
            damages.append(Damage(name, None, 0, f"{size}, {_lost([keyed.key for keyed in items[name]])}"))
            continue
        if size != nbytes:
            damages.append(Damage(name, None, min(size, nbytes), f"has {size:,} bytes instead of {nbytes:,}"))
            cut[name] = size
        runs += _runs(name, size, file_sections(items[name], nbytes, part) if full else block_sections(items[name]))
    check = _Check(storage, progress, sum(run.stop - run.start for run in runs))
    # Twice as many threads as read at full speed, for each hashes what it has read; in full, hashing takes longer.
    threads = min(_MAX_READERS, 2 * storage.reads.max_threads) + (cores() if full else 0)
    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        try:
            damages += [damage for in_run in pool.map(check.run, runs) for damage in in_run]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if damages:
        _check_unreplaced(storage, parts)
        damages = _with_other_names(storage, _folded(damages, cut))
    damages.sort(key=lambda damage: (damage.file, damage.key is not None, damage.offset))
    return Verified(len(files), sum(map(len, items.values())), check.done, time.monotonic() - started, tuple(damages))


def _check_unreplaced(storage: Storage, parts: Mapping[int | None, Metadata]) -> None:
    """Fails if another save was committed there meanwhile, which removes the files of this one: that is no damage."""
    try:
        files = data_files(read_parts(storage))
    except NotCommitted:
        files = {}
    if files != data_files(parts):  # each save gives its files names of their own
        raise ReadError(f"{storage.path} was replaced or removed while it was verified: verify it again")


def _folded(damages: Sequence[Damage], cut: Mapping[str, int]) -> list[Damage]:
    """With one damage for all tensors beyond the end of a file, if they are many; ``cut``: where such files end."""
    lost: dict[str, dict[str, None]] = defaultdict(dict)
    for damage in damages:
        if damage.key is not None and damage.offset >= cut.get(damage.file, damage.offset + 1):
            lost[damage.file][damage.key] = None
    many = {file: list(keys) for file, keys in lost.items() if len(keys) > _MAX_NAMED}
    left = [d for d in damages if d.key is None or d.file not in many or d.offset < cut[d.file]]
    return [
        replace(d, what=f"{d.what}, {_lost(many[d.file])}")
        if d.key is None and d.file in many and d.offset == cut[d.file]
        else d
        for d in left
    ]


def _with_other_names(storage: Storage, damages: Sequence[Damage]) -> list[Damage]:
    """Says of each damaged file whether it has other names: then the checkpoints that these are in have its damage."""
    names: dict[str, int] = {}
    with suppress(CheckpointError):
        names = {file.name: file.shared.names for file in storage.listing()[0] if file.shared is not None}
    shown = "; the file has {} in other checkpoints, which are damaged too"
    return [
        replace(damage, what=damage.what + shown.format(_count(names[damage.file] - 1, "other name")))
        if damage.file in names
        else damage
        for damage in damages
    ]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _is_damage(storage: Storage, error: Exception) -> bool:
    """Whether what cannot be read is damaged. A server may be overloaded, or refuse; what a disk refuses is lost.

    Not so where this process may not read, or has no means to.
    """
    if isinstance(storage, RemoteStorage):
        return isinstance(error, EOFError | FileNotFoundError)
    cause = error.__cause__ if isinstance(error, CheckpointError) else error
    return not (isinstance(cause, OSError) and cause.errno in _OF_THIS_PROCESS)


def _size(storage: Storage, name: str) -> int | str:
    """The bytes in a file, or why it has none."""
    try:
        size = storage.head(name)
    except CheckpointError as error:
        if not _is_damage(storage, error):
            raise
        return str(error)
    return "is missing" if size is None else size


def _lost(keys: Sequence[str]) -> str:
    """What is gone with a file."""
    names = ", ".join(map(repr, keys[:_MAX_NAMED])) + (", ..." if len(keys) > _MAX_NAMED else "")
    return f"and with it {names} ({len(keys):,} in all)" if keys else "and held nothing"


class _Run(NamedTuple):
    """Sections of a file that one thread reads, with the gaps between them."""

    file: str
    file_nbytes: int
    sections: list[Section]

    @property
    def start(self) -> int:
        return self.sections[0].start

    @property
    def stop(self) -> int:
        return self.sections[-1].stop


def _runs(file: str, file_nbytes: int, sections: Iterable[Section]) -> Iterator[_Run]:
    run: list[Section] = []
    for section in sections:
        if run and section.stop - run[0].start > SECTION_BYTES:
            yield _Run(file, file_nbytes, run)
            run = []
        run.append(section)
    if run:
        yield _Run(file, file_nbytes, run)


class _Check:
    def __init__(self, storage: Storage, progress: Callable[[int, int], object], total: int) -> None:
        self.done = 0
        self._storage = storage
        self._progress = progress
        self._total = total
        self._counting = free_in_child(threading.Lock())
        self._buffers = threading.local()

    def run(self, run: _Run) -> list[Damage]:
        """Reads a run of sections; what cannot be read is damaged, like what is not as it should be."""
        try:
            reader = self._storage.open_uncached(run.file)
        except OSError as error:
            self._check_damage(run.file, error)
            return [Damage(run.file, None, 0, self._storage.scrub(f"cannot be opened: {error}"))]
        try:
            unreadable = list(self._read(reader, run))
        finally:
            reader.close()
        return unreadable + [Damage(run.file, *problem) for section in run.sections for problem in section.problems()]

    def _read(self, reader: RangeReader, run: _Run) -> Iterator[Damage]:
        """Reads a run for its sections; yields the ranges it could not read, of which these get zeros."""
        stop = min(run.stop, run.file_nbytes)
        for begin in range(run.start // _PAGE * _PAGE, stop, _READ):  # as reads past the page cache want it
            end = min(begin + _READ, stop)
            buffer = self._buffer()[: end - begin]
            try:
                reader.read_into([buffer], begin)
            except Exception as error:
                self._check_damage(run.file, error)
                what = f"{buffer.nbytes:,} bytes cannot be read: {type(error).__name__}: {error}"
                yield Damage(run.file, None, begin, self._storage.scrub(what))
                buffer[:] = bytes(buffer.nbytes)
            for section in run.sections:
                last = min(section.stop, end)
                for first in range(max(section.start, begin), last, _PIECE):
                    section.update(buffer[first - begin : min(first + _PIECE, last) - begin])
            self._count(end - max(begin, run.start))

    def _check_damage(self, file: str, error: Exception) -> None:
        """Raises `ReadError` if nobody knows whether the file is damaged."""
        if not _is_damage(self._storage, error):
            said = f"cannot read {self._storage.path}/{file}: {type(error).__name__}: {error}"
            raise ReadError(self._storage.scrub(said)) from self._storage.cause(error)

    def _count(self, nbytes: int) -> None:
        with self._counting:
            self.done += nbytes
            self._progress(self.done, self._total)

    def _buffer(self) -> memoryview:
        if not hasattr(self._buffers, "memory"):
            self._buffers.memory = direct_memory(_READ)
        return self._buffers.memory  # type: ignore[no-any-return]
