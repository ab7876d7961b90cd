"""Verifies that a checkpoint's files hold what was saved, at disk speed and in little memory.

Threads read sections of files (see `file_sections`), bypassing the page cache, and hash each piece while it is in the
core's own cache. Verification reports every damaged block and every unreadable range. It cannot use the code that
executes loads: that code stops at the first damage, and reads neither the headers nor the index nor the end of a file.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from .._runtime.direct_memory import direct_memory
from .._runtime.forks import free_in_child
from .._runtime.threads import cores
from .._storage.base import RangeReader, Storage
from .._storage.open import open_storage
from .._storage.remote import RemoteStorage
from .._tensor_file.digests import Digester, TensorHashes
from .._tensor_file.encryption import Cipher
from .._tensor_file.layout import END, Entry, FileLayout, lay_out
from .._tensor_file.names import StoredItem
from .._writer_process.protocol import TensorSource
from ..errors import CheckpointError, MetadataError, NotCommitted, ReadError, UnsupportedFormat, is_damage
from ._find import checkpoints_in, read_parts_at
from ._formats import tensorizer
from ._formats.registry import open_foreign
from ._view import CheckpointView, StoredTensor, blocks_of, data_files, read_parts

_PIECE = 512 << 10  # bytes to hash at once, which fit into the core's own cache (see `_tensor_file.encode`)
_READ = 8 << 20
_MAX_READERS = 16  # each with a buffer of _READ bytes
_PAGE = 4096
_MAX_NAMED = 3  # keys in the message about a lost file
_OF_THIS_PROCESS = {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM}


@dataclass(frozen=True, slots=True)
class Damage:
    """A difference between a file and what was saved.

    Attributes:
        file: The path of the file, relative to the checkpoint's directory or, if a folder of checkpoints was verified,
            to that folder. If only ``what`` names the file: the name of the checkpoint's directory in that folder
            or, without a folder, an empty string.
        key: The key of the damaged tensor or object; None for a whole file, for an unreadable range, or for bytes
            outside any tensor or object.
        offset: The offset in the file at which the damaged range begins; 0 if unknown.
        what: A description of the damage.
    """

    file: str
    key: str | None
    offset: int
    what: str


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of verifying a checkpoint.

    Attributes:
        files: Number of data files.
        items: Number of tensor chunks and objects.
        nbytes: Bytes read.
        seconds: The time taken.
        damages: All damage found, sorted by file and offset within each checkpoint.
        checkpoints: Number of verified checkpoints: 1, or for a folder, how many in it have undamaged metadata.
        digests: Whether the format, or in a folder each checkpoint's format, has digests.
    """

    files: int
    items: int
    nbytes: int
    seconds: float
    damages: tuple[Damage, ...]
    checkpoints: int = 1
    digests: bool = True


def verify(
    checkpoint: str | os.PathLike[str],
    *,
    full: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> Verified:
    """Compares a checkpoint's files with what was saved. An encrypted checkpoint needs no key.

    For a checkpoint of this package, each thread needs about 8 MiB of memory, whatever the size of the tensors. Of the
    other formats that `convert` reads, only tensorizer's has digests. For a checkpoint without digests, `verify`
    checks only the sizes, and that all values can be read.

    Args:
        checkpoint: The checkpoint, or a folder of checkpoints, such as a manager's. In a folder, all checkpoints are
            verified.
        full: Check every byte of the files, and tensorizer's own hashes, instead of only the digests of the data. Has
            no effect on checkpoints of other formats.
        storage_options: Options of a URL's storage, such as credentials.
        on_progress: Called with the bytes read so far and the total, which is an estimate for a folder. Several threads
            call it, one at a time.

    Raises:
        NotCommitted: there is no checkpoint.
        UnsupportedFormat: the checkpoint has a format or version that this release does not read.
        MetadataError: the metadata is damaged, so that there is nothing to compare with. For a checkpoint in a folder,
            this is one of the ``damages`` instead.
        ConversionError: a checkpoint of another format has values that cannot be read.
        ReadError: the checkpoint cannot be read, which does not prove damage, or it was replaced or removed during the
            verification.
    """
    storage = open_storage(checkpoint, storage_options)
    try:
        parts = read_parts_at(storage)
    except (NotCommitted, UnsupportedFormat):
        if (foreign := open_foreign(checkpoint, storage_options)) is not None:
            return _verify_foreign(*foreign, on_progress)
        if not (names := checkpoints_in(storage)):
            raise
        return _verify_each(storage, names, full, storage_options, on_progress)
    return verify_files(storage, parts, full=full, on_progress=on_progress)


def _verify_each(
    folder: Storage,
    names: Sequence[str],
    full: bool,
    storage_options: Mapping[str, Any] | None,
    on_progress: Callable[[int, int], object],
) -> Verified:
    """Skips a checkpoint that is deleted before its turn."""
    started = time.monotonic()
    results: list[Verified] = []
    damages: list[Damage] = []
    for number, name in enumerate(names):
        before = sum(result.nbytes for result in results)

        def show(done: int, total: int, before: int = before, left: int = len(names) - number) -> None:
            on_progress(before + done, before + total * left)  # assumes that the others have the size of this one

        location = folder.child(name).location
        try:
            results.append(verify(location, full=full, storage_options=storage_options, on_progress=show))
        except NotCommitted:
            continue
        except UnsupportedFormat:
            raise
        except MetadataError as error:
            damages.append(Damage(f"{name}/.metadata", None, 0, str(error)))
        else:
            damages += [replace(damage, file=f"{name}/{damage.file}".rstrip("/")) for damage in results[-1].damages]
    return Verified(
        sum(result.files for result in results),
        sum(result.items for result in results),
        sum(result.nbytes for result in results),
        time.monotonic() - started,
        tuple(damages),
        len(results),
        all(result.digests for result in results),
    )


def _verify_foreign(
    view: CheckpointView, files: Mapping[str, int], on_progress: Callable[[int, int], object]
) -> Verified:
    started, done = time.monotonic(), 0
    total = sum(value.nbytes for value in view.values.values())
    damages: list[Damage] = []
    on_progress(0, total)
    for key, value in view.values.items():
        try:
            if isinstance(value, StoredTensor):
                for region in blocks_of(value):
                    done += value.read(region).nbytes
                    on_progress(done, total)
            else:
                done += len(value.read())
                on_progress(done, total)
        except CheckpointError as error:
            if not is_damage(error):
                raise
            chunk = value.chunks[0].item if isinstance(value, StoredTensor) and value.chunks else None
            file, offset = ("", 0) if chunk is None else (chunk.file, chunk.offset)
            damages.append(Damage(file, key, offset, str(error)))
    items = sum(len(value.chunks) or 1 if isinstance(value, StoredTensor) else 1 for value in view.values.values())
    seconds = time.monotonic() - started
    return Verified(len(files), items, done, seconds, tuple(damages), digests=view.format == "tensorizer")


def verify_files(
    storage: Storage,
    parts: Mapping[int | None, Metadata],
    *,
    full: bool = False,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> Verified:
    started = time.monotonic()
    files = {name: (nbytes, part) for part in parts.values() for name, nbytes in part.storage_data["files"].items()}
    items = items_by_file(parts)
    damages: list[Damage] = []
    cut: dict[str, int] = {}
    runs: list[_ReadRun] = []
    for name, (nbytes, part) in sorted(files.items()):
        size = _size(storage, name)
        if isinstance(size, str):
            damages.append(Damage(name, None, 0, f"{size}; {_lost([keyed.key for keyed in items[name]])}"))
            continue
        if size != nbytes:
            damages.append(Damage(name, None, min(size, nbytes), f"has {size:,} bytes instead of {nbytes:,}"))
            cut[name] = size
        runs += _runs(
            name, size, file_sections(storage, name, items[name], nbytes, part) if full else block_sections(items[name])
        )
    check = _Check(storage, on_progress, sum(run.stop - run.start for run in runs))
    # Twice as many threads as reading needs, because each thread also hashes. With ``full``, hashing takes longer.
    threads = min(_MAX_READERS, 2 * storage.reads.max_threads) + (cores() if full else 0)
    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        try:
            damages += [damage for in_run in pool.map(check.run, runs) for damage in in_run]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if damages:
        try:
            now = data_files(read_parts(storage))
        except NotCommitted:
            now = {}
        if now != data_files(parts):  # each save has its own file names, and deletes the files that it replaces
            raise ReadError(f"{storage.path} was replaced or removed during the verification. Verify it again.")
        damages = _with_other_names(storage, _folded(damages, cut))
    damages.sort(key=lambda damage: (damage.file, damage.key is not None, damage.offset))
    return Verified(len(files), sum(map(len, items.values())), check.done, time.monotonic() - started, tuple(damages))


def _folded(damages: Sequence[Damage], cut: Mapping[str, int]) -> list[Damage]:
    """Merges the damage beyond the end of a truncated file into one `Damage` if many keys are affected.

    ``cut`` maps each file of a wrong size to its actual size.
    """
    lost: dict[str, dict[str, None]] = defaultdict(dict)
    for damage in damages:
        if damage.key is not None and damage.offset >= cut.get(damage.file, damage.offset + 1):
            lost[damage.file][damage.key] = None
    many = {file: list(keys) for file, keys in lost.items() if len(keys) > _MAX_NAMED}
    left = [d for d in damages if d.key is None or d.file not in many or d.offset < cut[d.file]]
    return [
        replace(d, what=f"{d.what}; {_lost(many[d.file])}")
        if d.key is None and d.file in many and d.offset == cut[d.file]
        else d
        for d in left
    ]


def _with_other_names(storage: Storage, damages: Sequence[Damage]) -> list[Damage]:
    """Adds to each damage how many other names (hard links) its file has: checkpoints that share it are damaged too."""
    names: dict[str, int] = {}
    with suppress(CheckpointError):
        names = {file.name: file.shared.names for file in storage.listing()[0] if file.shared is not None}
    named = []
    for damage in damages:
        if others := names.get(damage.file, 1) - 1:
            other_names = "1 other name (a hard link)" if others == 1 else f"{others} other names (hard links)"
            shared = f"the file has {other_names}: all checkpoints that share the file are damaged"
            damage = replace(damage, what=f"{damage.what}; {shared}")
        named.append(damage)
    return named


def _is_damage(storage: Storage, error: Exception) -> bool:
    """Returns whether a failed read proves damage.

    On a remote storage, only a missing or truncated file proves it. On any other, every error does, such as a disk
    error, except a lack of permissions, file descriptors or memory.
    """
    if isinstance(storage, RemoteStorage):
        return isinstance(error, EOFError | FileNotFoundError)
    cause = error.__cause__ if isinstance(error, CheckpointError) else error
    return not (isinstance(cause, OSError) and cause.errno in _OF_THIS_PROCESS)


def _size(storage: Storage, name: str) -> int | str:
    """Returns the size of a file or, if it is missing or cannot be read, a description of the damage."""
    try:
        size = storage.head(name)
    except CheckpointError as error:
        if not _is_damage(storage, error):
            raise
        return str(error)
    return "is missing" if size is None else size


def _lost(keys: Sequence[str]) -> str:
    names = ", ".join(map(repr, keys[:_MAX_NAMED])) + (", ..." if len(keys) > _MAX_NAMED else "")
    return f"lost: {names} ({len(keys):,} in all)" if keys else "it held no data"


class _ReadRun(NamedTuple):
    """Consecutive sections of a file that one thread reads, with the gaps between them."""

    file: str
    file_nbytes: int
    sections: list[CheckedRange]

    @property
    def start(self) -> int:
        return self.sections[0].start

    @property
    def stop(self) -> int:
        return self.sections[-1].stop


def _runs(file: str, file_nbytes: int, sections: Iterable[CheckedRange]) -> Iterator[_ReadRun]:
    run: list[CheckedRange] = []
    for section in sections:
        if run and section.stop - run[0].start > SECTION_BYTES:
            yield _ReadRun(file, file_nbytes, run)
            run = []
        run.append(section)
    if run:
        yield _ReadRun(file, file_nbytes, run)


class _Check:
    def __init__(self, storage: Storage, progress: Callable[[int, int], object], total: int) -> None:
        self.done = 0
        self._storage = storage
        self._progress = progress
        self._total = total
        self._counting = free_in_child(threading.Lock())
        self._buffers = threading.local()

    def run(self, run: _ReadRun) -> list[Damage]:
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

    def _read(self, reader: RangeReader, run: _ReadRun) -> Iterator[Damage]:
        """Reads a run, and updates its sections. Yields each unreadable range, which the sections get as zeros."""
        stop = min(run.stop, run.file_nbytes)
        for begin in range(run.start // _PAGE * _PAGE, stop, _READ):  # aligned for direct I/O
            end = min(begin + _READ, stop)
            if not hasattr(self._buffers, "memory"):
                self._buffers.memory = direct_memory(_READ)
            buffer: memoryview = self._buffers.memory[: end - begin]
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
            with self._counting:
                self.done += end - max(begin, run.start)
                self._progress(self.done, self._total)

    def _check_damage(self, file: str, error: Exception) -> None:
        if not _is_damage(self._storage, error):
            message = f"cannot read {self._storage.path}/{file}: {type(error).__name__}: {error}"
            raise ReadError(self._storage.scrub(message)) from self._storage.cause(error)


# --- sections of a data file, and their expected contents -------------------------------------------------------------
#
# Each block has a digest in the metadata. The other bytes of a file follow from the metadata and the data's hashes.

SECTION_BYTES = 64 << 20
"""Bytes that one thread checks at a time: enough for fast reads, few enough to spread a large tensor over threads.

A single section may be larger: `file_sections` does not divide tensors.
"""

Problem = tuple[str | None, int, str]
"""Key (None outside any tensor), offset in the file, and description."""


class KeyedItem(NamedTuple):
    key: str
    item: StoredItem
    shape: tuple[int, ...]


class CheckedRange(Protocol):
    """A range of a file that is checked as a unit."""

    start: int
    stop: int

    def update(self, piece: memoryview) -> None:
        """Takes the next bytes of the range."""

    def problems(self) -> Iterator[Problem]:
        """Yields the problems of the range, after the last `update`."""


def items_by_file(parts: Mapping[int | None, Metadata]) -> dict[str, list[KeyedItem]]:
    """Returns the non-empty items of each file, in the order of their offsets."""
    files: dict[str, list[KeyedItem]] = defaultdict(list)
    for part in parts.values():
        shapes = {
            (key, tuple(chunk.offsets)): tuple(chunk.sizes)
            for key, entry in part.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
            for chunk in entry.chunks
        }
        for (key, offset), item in part.storage_data["items"].items():
            if item.length:
                shape = shapes[key, offset] if item.kind == "tensor" else (item.length,)
                files[item.file].append(KeyedItem(str(key), item, shape))
    for items in files.values():
        items.sort(key=lambda keyed: keyed.item.offset)
    return files


def block_sections(items: Sequence[KeyedItem]) -> Iterator[CheckedRange]:
    """Yields the ranges of the items' data, without the bytes between them."""
    for key, item, _ in items:
        step = item.block * max(1, SECTION_BYTES // item.block)
        for start in range(0, item.length, step):
            yield _Blocks(key, item, start, min(start + step, item.length))


def file_sections(
    storage: Storage, name: str, items: Sequence[KeyedItem], nbytes: int, part: Metadata
) -> Iterator[CheckedRange]:
    """Yields ranges that cover a file of ``nbytes`` bytes; without the headers of tensors if its index is damaged.

    ``part`` is the metadata that names the file.
    """
    record = part.storage_data.get("encryption")
    # The layout does not depend on the key.
    layouts = _layouts(items, None if record is None else Cipher(b"", record["derivation"]))
    all_items, head = items, b""
    with suppress(CheckpointError, OSError):  # a damaged file
        with storage.reading(name) as reader:
            head = reader.read_range(0, len(layouts[0].head))
        if record is None and head not in [layout.head for layout in layouts]:
            # The file may also have tensors without elements. `.metadata` does not contain their locations.
            listed = tensorizer.read(storage, name).tensors.values()
            empty = [KeyedItem(t.key, t.chunks[0].item, t.shape) for t in listed if not t.nbytes]
            all_items = sorted([*items, *empty], key=lambda keyed: keyed.item.offset)
            layouts = _layouts(all_items, None)
    # The head shows which hashes the headers have, unless padding makes both layouts equal.
    fitting = [layout for layout in layouts if layout.head == head]
    if fitting:
        yield _Constant(0, head, "the index of its tensors")
        for (key, item, _), *entries in zip(all_items, *(layout.entries for layout in fitting), strict=True):
            yield _TensorWithHeader(key, item, entries)
    else:  # without the index, the locations of the headers are unknown
        yield _Constant(0, layouts[0].head, "the index of its tensors")
        yield from block_sections(items)
    yield _Constant(nbytes - len(END), END, "its end")


def _layouts(items: Sequence[KeyedItem], cipher: Cipher | None) -> list[FileLayout[TensorSource]]:
    """Returns the possible layouts of a file of items: without SHA-256 in the headers, and with it."""
    tensors = [TensorSource(i.name, i.dtype, shape, i.length, i.kind) for _, i, shape in items]
    return [lay_out(tensors, cipher, sha256=sha256) for sha256 in (False, True)]


class _Blocks:
    def __init__(self, key: str, item: StoredItem, start: int, stop: int) -> None:
        self.start, self.stop = item.offset + start, item.offset + stop
        self._key = key
        self._step = item.block
        first = start // self._step
        self._expected = item.digests[8 * first : 8 * -(-stop // self._step)]
        self.digester = Digester(self._step)
        self.update = self.digester.update

    def problems(self) -> Iterator[Problem]:
        actual = self.digester.digests()
        for number, start in enumerate(range(self.start, self.stop, self._step)):
            digest = slice(8 * number, 8 * number + 8)
            if actual[digest] != self._expected[digest]:
                stop = min(start + self._step, self.stop)
                yield self._key, start, f"bytes {start:,} to {stop:,} are not what was saved"


class _TensorWithHeader:
    """A tensor with its header, which holds tensorizer's hashes, or the nonce and MACs of an encrypted tensor.

    ``entries`` are the possible layouts, which differ in their hashes.
    """

    def __init__(self, key: str, item: StoredItem, entries: Sequence[Entry[TensorSource]]) -> None:
        self._entry, *self._others = entries
        self.start, self.stop = self._entry.header_offset, self._entry.offset + self._entry.length
        self._key = key
        self._nonce_and_macs = item.nonce_and_macs
        self._header = b""
        self._blocks = _Blocks(key, item, 0, self._entry.length)
        self._hashes: TensorHashes | None = None

    def update(self, piece: memoryview) -> None:
        missing = len(self._entry.header) - len(self._header)
        self._header += bytes(piece[:missing])
        if missing <= piece.nbytes and not self._nonce_and_macs:
            self._hashes = self._hashes or self._begin_hashes()
        (self._hashes or self._blocks).update(piece[missing:])

    def _begin_hashes(self) -> TensorHashes:
        """Begins the hashes that the header names. If it names those of no layout, uses those of the first layout."""
        for other in self._others:
            start, zero = other.hashes_offset, other.with_hashes(0, bytes(32))
            if self._header[start:][:4] == zero[start:][:4]:  # the number of hashes, and the kind of the first
                self._entry = other
        return TensorHashes(self._entry.header, self._blocks.digester, sha256=self._entry.has_sha256)

    def problems(self) -> Iterator[Problem]:
        damaged_blocks = list(self._blocks.problems())
        yield from damaged_blocks
        if damaged_blocks:
            return
        if self._nonce_and_macs:
            what, expected = "the nonce and the MACs", self._entry.with_macs(self._nonce_and_macs)
        else:
            what = "the CRC-32 and SHA-256" if self._entry.has_sha256 else "the CRC-32"
            hashes = self._hashes or self._begin_hashes()
            expected = self._entry.with_hashes(*hashes.values())
        if self._header != expected:
            yield self._key, self.start, f"its header, with {what} of the data, is damaged"


class _Constant:
    def __init__(self, start: int, expected: bytes, name: str) -> None:
        self.start, self.stop = start, start + len(expected)
        self._expected = expected
        self._name = name
        self._actual = b""

    def update(self, piece: memoryview) -> None:
        self._actual += bytes(piece)

    def problems(self) -> Iterator[Problem]:
        if self._actual != self._expected:
            yield None, self.start, f"{self._name} is damaged"
