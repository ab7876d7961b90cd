"""Updates a copy of a model, in a directory or in memory, to a published version, and verifies versions."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from .._formats.safetensors_header import INDEX, SINGLE, decode_json
from .._formats.weight_files import StoredBytes, WeightFile, delta_alone, read_small, read_weight_file
from .._runtime.forks import free_in_child
from .._runtime.threads import Workers, cores
from .._storage.base import FileIdentity, Storage
from .._storage.local import LocalStorage
from .._storage.open import absolute_path, open_storage
from ..errors import (
    CheckpointError,
    ChecksumMismatch,
    MetadataError,
    NotCommitted,
    StateMismatch,
    UnsupportedFormat,
    WriteError,
    listed,
)
from .chain import Chain, Delta, copied, read_delta
from .delta import PIECE, DeltaDecoder, digest_of, zstd
from .model import read_blocks, read_model, written_file
from .versions import (
    FileRecord,
    Manifest,
    Published,
    check_version,
    decode_manifest,
    encode_manifest,
    now,
    published_at,
    versions_above,
)

_LOCK = ".publish.lock"
_SGLANG = ".weight_sync"
_LOCK_SECONDS = 600.0
_TEMPORARY = re.compile(
    rf"(.+\.[0-9a-f]{{32}}\.publish|(.+-v\d{{6,15}}\.safetensors|{re.escape(INDEX)})\.[0-9a-f]{{32}})\.tmp"
)
_decode_journal = msgspec.json.Decoder(dict[str, tuple[int, ...]]).decode
_Progress = Callable[[int, int], object]


@dataclass(frozen=True, slots=True)
class Applied:
    """The result of `apply_delta`.

    Attributes:
        version: The version that the copy has now.
        before: The version that the copy had. None if the directory had no model.
        deltas: The number of deltas that were applied.
        is_whole: A whole version was copied first.
        nbytes: The size of the safetensors files that were written, or of the tensors that were changed. If the copy
            already had the version, 0.
        seconds: The duration of the call.
    """

    version: int
    before: int | None
    deltas: int
    is_whole: bool
    nbytes: int
    seconds: float = 0.0


def apply_delta(
    target: str | os.PathLike[str] | MutableMapping[str, Any],
    delta: str | os.PathLike[str],
    *,
    version: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    on_progress: _Progress = lambda done, total: None,
) -> Applied:
    """Updates a copy of a model to a published version, atomically.

    In a directory, writes new files and verifies their SHA-256. Then replaces the index, which is the commit, and
    removes the old files. If the directory is empty, or no deltas lead from its version to the wanted one, copies a
    whole version first. In a mapping, verifies the result for each tensor that changes, and then changes these tensors
    in place. After an error, restores them.

    Args:
        target: A local directory, or a mapping from names to tensors or NumPy arrays, such as a state dict. Names that
            were not published are ignored.
        delta: The directory of versions, or the directory of one version.
        version: The wanted version. By default the newest, or the one that ``delta`` names.
        storage_options: Options of a URL's storage, such as credentials.
        on_progress: Called with the number of bytes done, and the total.

    Raises:
        TypeError, ValueError: ``version`` is not an int of at least 1.
        StateMismatch: the copy is not at a version that the deltas apply to, files beside the weights would have to
            change, or tensors are missing from the mapping or cannot be changed in place. Nothing has changed.
        ChecksumMismatch: the copy or the published version is damaged. Nothing has changed.
        NotCommitted: the version does not exist, or nothing has been published.
        MetadataError: the published version or the copy's index is damaged.
        UnsupportedFormat: another program, or a newer release, published the version.
        WriteError: the directory is not local, cannot be written to, stays locked by another process, holds files but
            no model, belongs to SGLang, is a published version, or contains the directory of versions or is inside it.
        CheckpointError: zstd is not installed.
    """
    started = time.monotonic()
    wanted = check_version(version)
    zstd()
    published, named = published_at(delta, storage_options)
    if wanted is None:
        wanted = named
    work: _Tensors | _Directory
    if isinstance(target, MutableMapping):
        work = _Tensors(target, published, wanted, on_progress)
    else:
        work = _Directory(target, published, wanted, on_progress)
    return replace(work.apply(), seconds=time.monotonic() - started)


# --- a directory ------------------------------------------------------------------------------------------------------


class _Directory:
    """An update of a directory: to the wanted version, or if that is None, to the newest.

    The directory goes back to a lower version only if the caller named that version.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        published: Published,
        wanted: int | None,
        on_progress: _Progress,
    ) -> None:
        path = absolute_path(target)
        if not isinstance(path, Path):
            raise WriteError(f"{path} is not a local directory. Apply deltas to a local one.")
        _check_apart(path, published)
        self._storage = LocalStorage(path)
        self._path = path
        self._published, self._wanted = published, wanted
        self._on_progress, self._done = on_progress, 0
        self._lock = free_in_child(threading.Lock())

    def apply(self) -> Applied:
        version = self._published.manifest(self._wanted).version
        if (self._path / _SGLANG).is_dir():
            raise WriteError(
                f"{self._path} belongs to SGLang's receiver, which records the model's version in {_SGLANG}. Pass "
                f"another directory, or update this one to version {version} with SGLang's /pull_weights."
            )
        self._storage.make_directory()
        with self._storage.writing(f"write {self._path}"), _locked(self._path / _LOCK) as self._journal:
            return self._apply(self._published.manifest(self._wanted))  # again: there may be a newer version now

    def _apply(self, target: Manifest) -> Applied:
        content = read_small(self._storage, INDEX)
        is_recorded = content is not None and b'"dcp_tensorizer"' in content
        current: Manifest | None = None
        if content is not None and is_recorded:
            current = decode_manifest(content, f"{self._path}/{INDEX}")
            if current.is_delta:
                raise StateMismatch(
                    f"{self._path} is a copy of the delta of version {current.version}, not of a model. Pass "
                    f"an empty directory."
                )
        elif content is not None or self._storage.head(SINGLE) is not None:
            current = self._recognised(target)
        before = None if current is None else current.version
        if current is not None and (published := self._published.find(current.version)) is not None:
            here = {record.origin or name: record.sha256 for name, record in current.files.items()}
            if here != {name: record.sha256 for name, record in published.files.items()}:
                raise StateMismatch(
                    f"version {before} in {self._path} differs from version {before} in {self._published.path}: the "
                    f"copy comes from another directory of versions. Apply deltas of that directory, or update an "
                    f"empty directory."
                )
        if before is not None and before > target.version and self._wanted is None:
            raise StateMismatch(
                f"{self._path} has version {before}, but the newest in {self._published.path} is {target.version}. "
                f"Check that this copy comes from there. To go back, pass the version."
            )
        self._clear(current)
        if before == target.version and is_recorded:
            return Applied(before, before, 0, False, 0)
        base = self._published.needed(target.chain, target)
        if current is None:
            self._check_empty()
        else:
            self._check_others(current, base, target)
        if current is not None and before == target.version:
            self._commit(current, base, [read_weight_file(self._storage, name) for name in current.files])
            return Applied(target.version, before, 0, False, 0)
        is_whole = (
            current is None
            or before is None
            or current.chain != target.chain
            or not target.chain <= before < target.version
        )
        after = self._published.chain(target.version, None if is_whole else before)
        deltas = [read_delta(self._published, manifest) for manifest in after if manifest.is_delta]
        sources = self._files(None if is_whole else current, base, target)
        _check_known(deltas, {tensor.key for file, _ in sources for tensor in file.tensors})
        storage = self._published.folder(base.version) if is_whole else self._storage
        chain = Chain(deltas, base.tensors if is_whole else {})
        manifest = self._write(storage, sources, chain, current, base, target)
        return Applied(target.version, before, len(deltas), is_whole, manifest.nbytes)

    # --- the version of the directory -----------------------------------------------------------------------------

    def _recognised(self, target: Manifest) -> Manifest:
        """Finds the version of a model by the SHA-256 of its weights. If no version has them, raises `StateMismatch`.

        The manifest has no files beside the weights, because those in the directory may be of other versions.
        """
        model = read_model(self._storage)
        by_digest = {FileRecord.of(self._storage, name).sha256: name for name in model.weights}
        for candidate in reversed(self._published.manifests()):
            if {record.sha256 for record in candidate.files.values()} == set(by_digest):
                files = {
                    by_digest[record.sha256]: FileRecord(record.nbytes, record.sha256, origin)
                    for origin, record in candidate.files.items()
                }
                weight_map = {tensor.key: file.name for file in model.weights.values() for tensor in file.tensors}
                return Manifest(
                    version=candidate.version,
                    chain=candidate.chain,
                    files=files,
                    weight_map=weight_map,
                    published_at=now(),
                    nbytes=sum(record.nbytes for record in files.values()),
                )
        raise StateMismatch(
            f"the model in {self._path} is not a version in {self._published.path}, so no delta fits it. "
            f"Pass an empty directory, to which all of version {target.version} is copied."
        )

    def _check_empty(self) -> None:
        """Raises `WriteError` if a directory without a model has visible files, which a whole version could replace."""
        files, folders = self._storage.listing()
        if names := sorted(name for name in [*folders, *(file.name for file in files)] if not name.startswith(".")):
            raise WriteError(
                f"{self._path} holds no model, but {listed(names)}. Pass an empty directory, or a copy of a version."
            )

    def _check_others(self, current: Manifest, base: Manifest, target: Manifest) -> None:
        """Checks that no files beside the weights change, because they cannot change atomically with the weights.

        Reads only the files that `current` records differently from `base`, or that only one of the two records.
        """
        names = {name for name in {*current.others, *base.others} if current.others.get(name) != base.others.get(name)}
        if wrong := sorted(name for name in names if self._record(name) != base.others.get(name)):
            raise StateMismatch(
                f"{self._path} has version {current.version}, and its files beside the weights differ from those of "
                f"version {target.version}: {listed(wrong)}. They cannot be replaced atomically with the weights. Pass "
                f"an empty directory, and switch the inference server to it."
            )

    def _record(self, name: str) -> FileRecord | None:
        return None if self._storage.head(name) is None else FileRecord.of(self._storage, name)

    def _files(self, current: Manifest | None, base: Manifest, target: Manifest) -> list[tuple[WeightFile, FileRecord]]:
        """Returns the source files of a version, with the records of the resulting files.

        The source files are those of the base, or with ``current`` those of this directory.
        """
        names = {record.origin or name: name for name, record in (current or base).files.items()}
        if set(names) != set(target.files):
            if current is None:
                path = self._published.folder(target.version).path
                raise MetadataError(f"{path}/{INDEX} does not list the files of version {base.version}")
            raise StateMismatch(
                f"the files of {self._path} are not those that version {target.version} builds on. Pass an empty "
                f"directory."
            )
        storage = self._published.folder(base.version) if current is None else self._storage
        return [
            (read_weight_file(storage, name), msgspec.structs.replace(target.files[origin], origin=origin))
            for origin, name in sorted(names.items())
        ]

    # --- the change ---------------------------------------------------------------------------------------------------

    def _write(
        self,
        storage: Storage,
        sources: Sequence[tuple[WeightFile, FileRecord]],
        chain: Chain,
        current: Manifest | None,
        base: Manifest,
        target: Manifest,
    ) -> Manifest:
        """Writes the files of a version under temporary names, renames them, and then writes the index."""
        save = uuid.uuid4().hex
        total = sum(file.nbytes for file, _ in sources)
        ending = f"-v{target.version:06d}.safetensors"
        names = {record.origin: record.origin.removesuffix(".safetensors") + ending for _, record in sources}

        def make(source: tuple[WeightFile, FileRecord]) -> None:
            file, record = source
            with written_file(self._storage, f"{names[record.origin]}.{save}.tmp", record.nbytes) as write:

                def take(piece: memoryview) -> None:
                    write(piece)
                    with self._lock:
                        self._done += piece.nbytes
                        self._on_progress(self._done, total)

                if file.nbytes != record.nbytes:
                    raise ChecksumMismatch(
                        f"{storage.path}/{file.name} has {file.nbytes:,} bytes, but version {target.version} of it has "
                        f"{record.nbytes:,}"
                    )
                copied(storage, file, chain, record, take)

        try:
            with Workers(max(1, min(cores(), len(sources))), thread_name_prefix="apply") as pool:
                list(pool.map(make, sources))
            others = self._write_others(base, save) if current is None else []
        except BaseException:
            self._storage.discard(*(file.name for file in self._storage.listing()[0] if save in file.name))
            raise
        renamed = {name: f"{name}.{save}.tmp" for name in names.values()}
        renamed |= {name: f"{name}.{save}.publish.tmp" for name in others}
        self._journal.write({name: self._storage.identity(temporary) or () for name, temporary in renamed.items()})
        for name, temporary in renamed.items():
            os.replace(self._path / temporary, self._path / name)
        self._storage.sync_directory()
        files = {names[record.origin]: record for _, record in sources}
        manifest = Manifest(
            version=target.version,
            chain=base.version,
            files=files,
            weight_map={tensor.key: names[record.origin] for file, record in sources for tensor in file.tensors},
            published_at=now(),
            nbytes=sum(record.nbytes for record in files.values()),
            replaced=tuple(sorted((set() if current is None else {*current.files, SINGLE}) - set(files))),
        )
        self._commit(manifest, base, [file for file, _ in sources])
        return manifest

    def _commit(self, manifest: Manifest, base: Manifest, files: Sequence[WeightFile]) -> None:
        manifest = msgspec.structs.replace(manifest, others=base.others)
        notes = {"total_size": sum(tensor.nbytes for file in files for tensor in file.tensors)}
        self._storage.put(INDEX, encode_manifest(manifest, notes), sync=True)
        self._clear(manifest)

    def _write_others(self, base: Manifest, save: str) -> list[str]:
        """Writes the files beside the weights under temporary names. Returns their final names."""
        storage = self._published.folder(base.version)
        for name, record in base.others.items():
            stored = base.stored(name)
            hashed, nbytes = hashlib.sha256(), storage.head(stored)
            if nbytes != record.nbytes:
                raise ChecksumMismatch(f"{storage.path}/{stored} ({name}) no longer has its {record.nbytes:,} bytes")
            with written_file(self._storage, f"{name}.{save}.publish.tmp", nbytes) as write:
                for block in read_blocks(storage, stored):
                    hashed.update(block)
                    write(memoryview(block))
                if hashed.hexdigest() != record.sha256:
                    raise ChecksumMismatch(f"{storage.path}/{stored} ({name}) is not what was published: it is damaged")
        return list(base.others)

    def _clear(self, manifest: Manifest | None) -> None:
        """Removes the files that the index no longer names, and the leftovers of killed attempts."""
        present = {file.name for file in self._storage.listing()[0]}
        leftovers = set(filter(_TEMPORARY.fullmatch, present))
        leftovers |= {
            name for name, identity in self._journal.read().items() if self._storage.identity(name) == identity
        }
        if manifest is not None:
            leftovers = (leftovers | set(manifest.replaced)) - {*manifest.files, *manifest.others}
        self._storage.remove(*sorted(leftovers & present))
        self._journal.write({})


def _check_known(deltas: Sequence[Delta], keys: Set[str]) -> None:
    if unknown := sorted(Chain(deltas).keys() - keys):
        raise MetadataError(
            f"{deltas[-1].storage.path}, or an earlier delta, changes tensors that the model does not have: "
            f"{listed(unknown)}"
        )


def _check_apart(target: Path, published: Published) -> None:
    """Raises `WriteError` if the target overlaps the directory of versions, or is a published version."""
    real, source = Path(os.path.realpath(target)), Path(published.storage.real_path)
    above = versions_above(real)
    if above is not None or real.is_relative_to(source) or source.is_relative_to(real):
        raise WriteError(
            f"{target} cannot be updated to a version in {published.path}: "
            + ("the two directories overlap" if above is None else f"it is a version in {above.path}")
            + ". Pass another directory."
        )


class _Journal:
    """The files that an attempt to update a directory has written there, recorded in the directory's lock file.

    The journal also records the identities of the files, which survive renaming. So if the attempt is killed, the next
    one removes these files, and no others of the same names.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self) -> dict[str, tuple[int, ...]]:
        content = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
        with suppress(ValueError):  # empty, or torn by a power cut
            return {name: identity for name, identity in decode_json(_decode_journal, content).items() if identity}
        return {}

    def write(self, files: Mapping[str, FileIdentity]) -> None:
        content = msgspec.json.encode(files) if files else b""
        if content or os.fstat(self._descriptor).st_size:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, content, 0)
            os.fsync(self._descriptor)


@contextmanager
def _locked(path: Path) -> Iterator[_Journal]:
    """Locks a directory against other processes, because all ranks of an inference server may update it."""
    deadline = time.monotonic() + _LOCK_SECONDS
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        while not _lock(descriptor):
            if time.monotonic() > deadline:
                raise WriteError(
                    f"{path.parent} has been locked for {_LOCK_SECONDS:g} s by other processes, which are updating it. "
                    f"Wait for them or end them, and retry."
                )
            time.sleep(0.05)
        yield _Journal(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Tries to lock; returns whether that succeeded. If the file system has no locks, returns True."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


# --- tensors in memory ------------------------------------------------------------------------------------------------


class _Tensors:
    def __init__(
        self, target: MutableMapping[str, Any], published: Published, wanted: int | None, on_progress: _Progress
    ) -> None:
        self._target, self._published = target, published
        self._version = published.manifest(wanted).version
        self._on_progress, self._done, self._total = on_progress, 0, 0

    def apply(self) -> Applied:
        chain = self._published.chain(self._version)
        base, deltas = chain[0], [read_delta(self._published, manifest) for manifest in chain[1:]]
        storage = self._published.folder(base.version)
        files = [read_weight_file(storage, name) for name in sorted(base.files)]
        tensors = {tensor.key: tensor for file in files for tensor in file.tensors}
        _check_known(deltas, tensors.keys())
        missing = sorted(set(tensors) - set(self._target))
        if missing:
            raise StateMismatch(f"tensors of version {self._version} are missing from the mapping: {listed(missing)}")
        for key, tensor in tensors.items():
            _check_target(key, self._target[key], tensor)
        digests = self._digests(tensors)
        start = self._start(base, deltas, digests)
        before = deltas[start - 1].manifest.version if start else base.version
        changes = Chain(deltas[start:], digests)
        keys = sorted(changes.keys())
        self._total = 2 * sum(tensors[key].nbytes for key in keys)
        frames = {key: self._verified(changes, tensors[key]) for key in keys}
        names = {_memory_of(self._target[key]): key for key in keys}  # tied tensors change once
        with ExitStack() as undoing:
            for key in keys:
                if names[_memory_of(self._target[key])] == key:
                    change = _TensorChange(self._target[key], frames[key])
                    undoing.callback(change.undo)
                    change.apply()
                self._progress(tensors[key].nbytes)
            self._check_result(base, deltas, tensors)
            undoing.pop_all()
        return Applied(self._version, before, len(deltas) - start, False, self._total // 2)

    def _digests(self, tensors: Mapping[str, StoredBytes]) -> dict[str, str]:
        return {key: digest_of(_view(self._target[key]).array.data) for key in tensors}

    def _progress(self, nbytes: int) -> None:
        self._done += nbytes
        self._on_progress(self._done, self._total)

    def _verified(self, changes: Chain, tensor: StoredBytes) -> list[list[memoryview]]:
        """Verifies the result for a tensor, and returns its deltas as they were read.

        Because the deltas are in memory, they can change the tensor, and restore it, even if the published files are
        removed in the meantime.
        """
        array = _view(self._target[tensor.key]).array

        def read(_: StoredBytes, start: int, block: np.ndarray) -> None:
            block[:] = array[start : start + block.size]

        frames: list[list[memoryview]] = []
        for _ in changes.pieces(read, "the mapping", tensor, frames):
            pass
        self._progress(tensor.nbytes)
        return frames

    def _check_result(self, base: Manifest, deltas: Sequence[Delta], tensors: Mapping[str, StoredBytes]) -> None:
        """Raises `StateMismatch` if tensors that share memory differ from the published ones after the change."""
        expected = dict(base.tensors)
        for delta in deltas:
            expected |= {key: change.digest for key, change in delta.changes.items()}
        digests = self._digests(tensors)
        if wrong := [key for key in expected if digests[key] != expected[key]]:
            raise StateMismatch(
                f"tensors that share memory differ in version {self._version}: {listed(wrong)}. Give each its own "
                f"memory. No tensor has changed."
            )

    def _start(self, base: Manifest, deltas: Sequence[Any], digests: Mapping[str, str]) -> int:
        """Finds by digests how many of the deltas the tensors already include.

        Raises `StateMismatch` if the tensors are not at a version of the chain.
        """
        expected = dict(base.tensors)
        start = 0 if expected == digests else None
        for number, delta in enumerate(deltas, 1):
            expected |= {key: change.digest for key, change in delta.changes.items()}
            start = number if expected == digests else start
        if start is None:
            other = [key for key in expected if expected[key] != digests.get(key)]
            raise StateMismatch(
                f"the tensors are at no version from {base.version} to {self._version} in {self._published.path}. "
                f"These differ from version {self._version}: {listed(other)}. Load the whole version {base.version} "
                f"first."
            )
        return start


class _TensorChange:
    """An in-place change of a tensor that can be undone after any interruption, by a second XOR."""

    def __init__(self, value: Any, frames: Sequence[Sequence[memoryview]]) -> None:
        self._value, self._frames = value, frames
        # The tensor is changed up to this offset. The bytes after it may be changed; the array has their old values.
        self._reached = 0, np.empty(0, np.uint8)

    def apply(self) -> None:
        view, decoders = self._opened()
        step = PIECE if view.give_back is None else view.array.size  # a copy is copied back once
        for start in range(0, view.array.size, step):
            piece = view.array[start : start + step]
            self._reached = start, piece.copy()
            for decoder in decoders:
                decoder.xor_into(piece)
            if view.give_back is not None:
                view.give_back()
        self._reached = view.array.size, np.empty(0, np.uint8)

    def undo(self) -> None:
        view, decoders = self._opened()
        stop, old = self._reached
        view.array[stop : stop + old.size] = old
        for start in range(0, stop, PIECE):
            for decoder in decoders:
                decoder.xor_into(view.array[start : min(start + PIECE, stop)])
        if view.give_back is not None:
            view.give_back()

    def _opened(self) -> tuple[_View, list[DeltaDecoder]]:
        view = _view(self._value)
        return view, [DeltaDecoder(frame, view.array.size) for frame in self._frames]


class _View(NamedTuple):
    """A tensor's bytes, as an array of ``uint8``: the tensor's own memory, or a copy."""

    array: np.ndarray
    give_back: Callable[[], object] | None  # after a change, copies a copy back to the tensor; None if there is no copy


def _check_target(key: str, value: Any, tensor: StoredBytes) -> None:
    """Raises `StateMismatch` unless a value is a tensor or an array of the right size, and can be changed in place."""
    torch = sys.modules.get("torch")  # without torch there are no tensors
    if torch is not None and isinstance(value, torch.Tensor):
        is_plain = not hasattr(value, "__tensor_flatten__")  # tensor subclasses such as DTensor have this method
        is_right = is_plain and value.layout == torch.strided and not value.is_meta and not _overlaps(value)
    else:
        is_plain = isinstance(value, np.ndarray) and not value.dtype.hasobject
        is_right = is_plain and value.flags.c_contiguous and value.flags.writeable
    if not is_right:
        raise StateMismatch(
            f"{key!r} must be a plain strided tensor in memory without overlapping elements, or a writable "
            f"C-contiguous NumPy array without objects, got an object of type {type(value).__name__}"
        )
    if value.nbytes != tensor.nbytes:
        raise StateMismatch(
            f"{key!r} has {value.nbytes:,} bytes, but was published with {tensor.nbytes:,}: {tensor.dtype} of "
            f"shape {tensor.shape}"
        )


def _overlaps(tensor: Any) -> bool:
    """Returns whether elements of a tensor may share memory, as in an expanded tensor."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _memory_of(value: Any) -> tuple[Any, ...]:
    if isinstance(value, np.ndarray):
        return "cpu", value.__array_interface__["data"][0], value.nbytes
    if value.is_contiguous():
        return str(value.device), value.data_ptr(), value.nbytes
    return str(value.device), value.data_ptr(), value.nbytes, value.shape, value.stride()


def _view(value: Any) -> _View:
    if isinstance(value, np.ndarray):
        return _View(value.reshape(-1).view(np.uint8), None)
    torch = sys.modules["torch"]
    tensor = value.detach()
    is_plain = tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    if is_plain:
        return _View(tensor.reshape(-1).view(torch.uint8).numpy(), None)
    copy = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    return _View(copy.reshape(-1).view(torch.uint8).numpy(), lambda: tensor.copy_(copy))


# --- verification -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VersionsVerified:
    """The result of `verify_versions`.

    Attributes:
        path: The directory, without credentials.
        versions: The versions that were checked, including damaged ones.
        files: The number of files that are undamaged.
        nbytes: The bytes that were checked, including those of damaged files.
        damages: One message for each version that differs from what was published, or cannot be read. The message
            names the damaged file.
        seconds: The duration of the call.
    """

    path: str
    versions: tuple[int, ...]
    files: int
    nbytes: int
    damages: tuple[str, ...]
    seconds: float


def verify_versions(
    path: str | os.PathLike[str],
    *,
    version: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    on_progress: _Progress = lambda done, total: None,
) -> VersionsVerified:
    """Rebuilds versions, and compares the SHA-256 of each file with the published one.

    Args:
        path: A directory of versions, the directory of one version, or a directory to which deltas are applied.
        version: The version to verify. By default, in a directory of versions: for each whole version, the last version
            that builds on it, or the whole version itself if none does. Rebuilding that last version reads all deltas
            that follow the whole one.
        storage_options: Options of a URL's storage, such as credentials.
        on_progress: Called with the number of bytes done, and the total.

    Raises:
        TypeError, ValueError: ``version`` is not an int of at least 1.
        NotCommitted: the version does not exist, or nothing has been published there.
        UnsupportedFormat: ``path`` is a delta without the versions on which it builds; or another program or a newer
            release published a version.
        MetadataError: a manifest is damaged.
        CheckpointError: zstd is not installed.
    """
    started = time.monotonic()
    number = check_version(version)
    published = Published(open_storage(path, storage_options))
    content = read_small(published.storage, INDEX)
    copy = None if content is None else decode_manifest(content, f"{published.path}/{INDEX}")
    if copy is not None and number not in (None, copy.version):
        raise NotCommitted(f"there is no version {number} in {published.path}: it has only version {copy.version}")
    if copy is not None and copy.is_delta:
        above, named = published_at(path, storage_options)
        if named != copy.version:
            raise UnsupportedFormat(delta_alone(published.path, str(copy.version)))
        published, number, copy = above, named, None
    if copy is not None:
        wanted = [copy]
    else:
        zstd()
        manifests = published.manifests() if number is None else [published.manifest(number)]
        if not manifests:
            raise NotCommitted(f"nothing has been published in {published.path}")
        wanted = list({manifest.chain: manifest for manifest in manifests}.values())
    total = sum(record.nbytes for one in wanted for record in (*one.files.values(), *one.others.values()))
    files = done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        on_progress(min(done, total), total)

    def verify(manifest: Manifest) -> None:
        nonlocal files
        base, *after = [manifest] if copy is not None else published.chain(manifest.version)
        folder = published.storage if copy is not None else published.folder(base.version)
        chain = Chain([read_delta(published, delta) for delta in after], base.tensors)
        for name, record in manifest.files.items():
            copied(folder, read_weight_file(folder, name), chain, record, lambda piece: count(piece.nbytes))
            files += 1
        for name, record in base.others.items():
            _compare(folder, base.stored(name), record, count)
            files += 1
            if base.publication and folder.head(name) is not None:  # another name of the same file, or a copy of it
                _compare(folder, name, record, lambda nbytes: None)

    damages = []
    for manifest in wanted:
        try:
            verify(manifest)
        except (CheckpointError, OSError) as error:
            damages.append(f"version {manifest.version}: {error}")
    numbers = tuple(manifest.version for manifest in wanted)
    return VersionsVerified(published.path, numbers, files, done, tuple(damages), time.monotonic() - started)


def _compare(folder: Storage, name: str, record: FileRecord, on_read: Callable[[int], object]) -> None:
    if FileRecord.of(folder, name, on_read).sha256 != record.sha256:
        raise CheckpointError(f"{folder.path}/{name} is not what was published")
