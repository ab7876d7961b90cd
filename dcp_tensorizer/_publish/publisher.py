"""Publishes a version of a model: the whole model, or its changes since the previous version."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import xxhash

from .._formats.safetensors_header import INDEX, MAX_HEADER
from .._formats.weight_files import StoredBytes, WeightFile, read_weight_file
from .._runtime.forks import free_in_child
from .._runtime.threads import Workers, cores
from .._runtime.validation import check_count, check_step, set_fields
from .._storage.base import Refused, Storage
from .._storage.lease import Lease, LeaseRecord
from .._storage.open import open_storage, path_to_write
from ..errors import (
    CheckpointError,
    ChecksumMismatch,
    MetadataError,
    ReadError,
    UnsupportedFormat,
    WriteError,
    listed,
)
from .chain import Chain, read_delta
from .delta import PIECE, DeltaEncoder, zstd
from .model import (
    READ_BYTES,
    Model,
    OtherFile,
    Read,
    header_of,
    other_files,
    read_blocks,
    read_model,
    reading_tensors,
    written_file,
)
from .versions import (
    LEASE,
    FileRecord,
    Manifest,
    Published,
    VersionInfo,
    decode_manifest,
    decode_notes,
    encode_manifest,
    now,
    other_file_name,
    versions_above,
)

logger = logging.getLogger("dcp_tensorizer")

MAX_DELTAS = 20
"""The default limit of deltas that follow a whole version."""

_FILE_BYTES = 256 << 20  # bytes of deltas that a thread collects in memory before it writes them to a file
_Progress = Callable[[int, int], object]


@dataclass(frozen=True, slots=True)
class PublishedVersion(VersionInfo):
    """A version that was published.

    Attributes:
        path, version, step, published, is_delta, base, nbytes, model_nbytes, tensors: As in `VersionInfo`.
        why_whole: The reason why the version is a whole model; empty for a delta.
        removed: The old versions that were removed, because of ``keep_latest``.
    """

    why_whole: str = ""
    removed: tuple[int, ...] = ()


def publish(
    directory: str | os.PathLike[str],
    published: str | os.PathLike[str],
    *,
    previous: str | os.PathLike[str] | None = None,
    step: int | None = None,
    max_deltas: int = MAX_DELTAS,
    keep_latest: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    on_progress: _Progress = lambda done, total: None,
) -> PublishedVersion:
    """Publishes a model as the next version of a directory: the whole model, or its changes since the previous version.

    A version is whole if it is the first one, or if ``max_deltas`` deltas follow the last whole one. It is also whole
    if the model differs from the last whole version in the header of a safetensors file, or in the files beside the
    weights. A header has the names, dtypes, shapes and offsets of the tensors, and ``__metadata__``. A version is also
    whole, and a warning names the damage, if the previous version cannot be rebuilt from the published files.

    A directory has one publisher at a time. A later publisher takes the lease of the directory, and the earlier one
    raises `Refused`. If the earlier one's manifest arrives first nevertheless, its version stays, and the later one
    raises `Refused`.

    Args:
        directory: The model, in Hugging Face's layout. It must not change during the call.
        published: The directory of versions. If it does not exist, it is created.
        previous: The model at the previous version. Its tensors are verified. By default, the previous version is
            rebuilt from the published files.
        step: The step of training, recorded in the version.
        max_deltas: The number of deltas that may follow a whole version. A new reader has to read all of them.
        keep_latest: The number of newest versions to retain, with all versions on which they build. The other
            versions are removed; if one cannot be removed, logs a warning. If None, all versions are retained.
        storage_options: Options of the storages of URLs, such as credentials.
        on_progress: Called with the number of bytes read, and the size of the model's safetensors files.

    Raises:
        TypeError, ValueError: ``step``, ``max_deltas`` or ``keep_latest`` is invalid.
        NotCommitted: there is no model in ``directory``.
        UnsupportedFormat: ``directory`` or ``previous`` is a delta; or another program or a newer release has
            published a version.
        MetadataError: the model has no tensors, or a manifest cannot describe it; or the model or a published manifest
            is damaged.
        ReadError: the model cannot be read, or a file beside its weights changed during the call.
        ChecksumMismatch: ``previous`` is not the previous version, or is damaged.
        Refused: another publisher has taken the lease, or has just published this version. It is a `WriteError`.
        WriteError: the version cannot be written, or ``published`` is ``directory`` itself or a published version.
        CheckpointError: zstd is not installed.
    """
    publication = Publication(
        os.fspath(directory),
        Publish(published, max_deltas, keep_latest),
        None if previous is None else os.fspath(previous),
        None if step is None else check_step(step),
        dict(storage_options or {}),
    )
    version, _, warnings = publication.publish(on_progress)
    for warning in warnings:
        logger.warning("%s", warning)
    return version


@dataclass(frozen=True, slots=True)
class Publish:
    """Options to publish the models that a `SafetensorsStorageWriter` saves, for inference servers; see `publish`.

    If several saved models wait to be published, only the newest is published.

    Attributes:
        path: The directory of versions, to which only this job publishes.
        max_deltas, keep_latest: As for `publish`.

    Raises:
        TypeError, ValueError: an option is invalid.
        WriteError: the path is relative, and there is no working directory; or its URL is read-only, has an unknown
            protocol, or needs a library that is missing.
    """

    path: str | os.PathLike[str]
    max_deltas: int = MAX_DELTAS
    keep_latest: int | None = None

    def __post_init__(self) -> None:
        set_fields(
            self,
            path=str(path_to_write(self.path)),
            max_deltas=check_count("max_deltas", self.max_deltas),
            keep_latest=check_count("keep_latest", self.keep_latest, optional=True),
        )


@dataclass(frozen=True, slots=True, repr=False)  # it holds secrets
class Publication:
    """A model to publish as the next version. Also serves as the request to a writer process that publishes it."""

    directory: str
    options: Publish
    previous: str | None = None
    step: int | None = None
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    index: bytes | None = None
    """The contents of the model's index, in case a later save replaces the file."""
    others: Mapping[str, OtherFile] | None = None
    """The files beside the model's weights, by name, for the same reason. If None, those on the storage."""
    previous_index: bytes | None = None
    """The contents of the index of ``previous``, for the same reason."""
    own: LeaseRecord | None = None
    """The lease from the publisher's previous version, if any."""

    def publish(
        self, on_progress: _Progress = lambda done, total: None
    ) -> tuple[PublishedVersion, LeaseRecord, tuple[str, ...]]:
        """Publishes the version.

        Also returns the lease of the directory, which is `own` for the next version, and warnings to log.
        """
        zstd()
        folder = Published(open_storage(self.options.path, self.storage_options))
        source = open_storage(self.directory, self.storage_options)
        above = versions_above(folder.storage.real_path, self.storage_options)
        if above is not None or folder.storage.real_path == source.real_path:
            what = "it is the directory of the model" if above is None else f"it is a version in {above.path}"
            raise WriteError(f"no versions can be published in {folder.path}: {what}. Pass another directory.")
        model = read_model(source, self.index, self.others)
        if not any(file.tensors for file in model.weights.values()):  # readers would refuse a copy's empty index
            raise MetadataError(f"{model.storage.path} is not published: the model has no tensors")
        previous = None
        if self.previous is not None:
            previous = read_model(open_storage(self.previous, self.storage_options), self.previous_index, {})
        publisher = _Publisher(folder, self.own, model, self.step, on_progress)
        with folder.storage.writing(f"publish in {folder.path}"):
            version = publisher.publish(previous, self.options)
        assert publisher.lease.own is not None
        return version, publisher.lease.own, tuple(publisher.warnings)


class _Publisher:
    def __init__(
        self,
        folder: Published,
        own: LeaseRecord | None,
        model: Model,
        step: int | None,
        on_progress: _Progress,
    ) -> None:
        self.lease = Lease(folder.storage, LEASE, own)
        self.lease.check()
        self._folder, self._source, self._model, self._step = folder, model.storage, model, step
        self._newest = folder.newest()
        self._version = 1 if self._newest is None else self._newest.version + 1
        self._target = folder.folder(self._version)
        self._on_progress, self._done = on_progress, 0
        self._total = sum(file.nbytes for file in model.weights.values())
        self._files = 0
        self._publication = uuid.uuid4().hex[:8]  # not the lease's id: a publisher may attempt a version several times
        self._written: list[str] = []
        self.warnings: list[str] = []
        self._lock = free_in_child(threading.Lock())

    def publish(self, previous: Model | None, options: Publish) -> PublishedVersion:
        """Writes the files of the version, then its manifest. Then, with ``keep_latest``, removes old versions."""
        notes = _notes_of(self._model)
        others = self._records_of_others()
        self._target.make_directory()
        try:
            manifest, why = self._write(others, previous, options.max_deltas)
            self._target.sync_directory()
            content = encode_manifest(manifest, {} if manifest.is_delta else notes)
            path = f"{self._target.path}/{INDEX}"
            if len(content) > MAX_HEADER or decode_manifest(content, path) != manifest:
                raise MetadataError(
                    f"{self._source.path} is not published: readers could not read its manifest of {len(content):,} "
                    f"bytes (the limit is {MAX_HEADER:,}). Shorten the names of its tensors and files, or the metadata "
                    f"of its index."
                )
            self.lease.check()
        except BaseException:
            self._drop()
            raise
        try:
            self._target.put(INDEX, content, sync=True, replace=False)
        except Refused:
            self._drop()
            raise  # after any other error the manifest may still appear, and needs its files
        with self._warning("leftovers may remain, and files beside the weights may lack their usual names"):
            self._folder.tidy(manifest, is_new=True)
            if self._newest is not None:
                self._folder.tidy(self._newest)
        removed: list[int] = []
        if options.keep_latest is not None:
            with self._warning("old versions may remain"):
                for version in self._folder.remove_old(options.keep_latest):
                    removed.append(version)
        return PublishedVersion(**asdict(self._folder.info(manifest)), why_whole=why, removed=tuple(removed))

    @contextmanager
    def _warning(self, but: str) -> Iterator[None]:
        """Turns an error after the commit into a warning: the version is published."""
        try:
            yield
        except (CheckpointError, OSError) as error:
            self.warnings.append(
                self._target.scrub(f"{self._target.path} is published, but {but}, until the next publication: {error}")
            )

    def _write(self, others: dict[str, FileRecord], previous: Model | None, max_deltas: int) -> tuple[Manifest, str]:
        """Writes the files of the version. Returns its manifest, and the reason if it is whole."""
        try:
            base, why = self._base(others, max_deltas)
            if base is not None:
                return self._write_delta(base, previous), ""
        except _NotRebuilt as error:
            why = str(error)
            self.warnings.append(f"{self._target.path} is a whole version, because {why}")
            self._total += self._done  # the model is read again
        return self._write_whole(others), why

    @contextmanager
    def _rebuilding(self) -> Iterator[None]:
        """Raises `_NotRebuilt` if the previous version, or one on which it builds, is damaged or cannot be read."""
        try:
            yield
        except UnsupportedFormat:
            raise
        except (ReadError, MetadataError) as error:
            assert self._newest is not None
            what = f"version {self._newest.version} in {self._folder.path} cannot be rebuilt"
            raise _NotRebuilt(f"{what}: {error}") from error

    def _drop(self) -> None:
        """Removes the files of this publication, which can no longer be committed."""
        with suppress(Exception):
            self._target.discard(*self._written)
            self.lease.check()  # another publisher may need the directory
            self._target.remove_directory()

    @contextmanager
    def _file(self, name: str, nbytes: int) -> Iterator[Callable[[memoryview], None]]:
        self.lease.check()
        self._written.append(name)
        with written_file(self._target, name, nbytes) as write:
            yield write

    # --- the files beside the weights ---------------------------------------------------------------------------------

    def _records_of_others(self) -> dict[str, FileRecord]:
        """Hashes the files beside the weights. Raises `ReadError` if one has changed since the model was saved."""
        records = {}
        for name, file in self._model.others.items():
            if isinstance(file, bytes):
                records[name] = FileRecord(len(file), hashlib.sha256(file).hexdigest())
            else:
                records[name] = FileRecord.of(self._source, name)
        on_storage = {name: file for name, file in self._model.others.items() if not isinstance(file, bytes)}
        now_there = other_files(self._source) if on_storage else {}
        for name, file in on_storage.items():
            if now_there.get(name) != file:
                raise self._changed(name)
        return records

    def _write_other(self, name: str, record: FileRecord) -> None:
        """Copies a file beside the weights. Raises `ReadError` if it has changed since it was hashed."""
        file, hashed, left = self._model.others[name], hashlib.sha256(), record.nbytes
        with self._file(other_file_name(record, self._publication), record.nbytes) as write:
            for block in [file] if isinstance(file, bytes) else read_blocks(self._source, name):
                hashed.update(block)
                left -= len(block)
                if left < 0:
                    break
                write(memoryview(block))
            if left or hashed.hexdigest() != record.sha256:
                raise self._changed(name)

    def _changed(self, name: str) -> ReadError:
        return ReadError(
            f"{self._source.path}/{name} has changed since the model was saved, or while it was published, so the "
            f"version would mix two models. Publish the model again."
        )

    # --- a whole version, or a delta? -----------------------------------------------------------------------------

    def _base(self, others: Mapping[str, FileRecord], max_deltas: int) -> tuple[_Base | None, str]:
        """Returns the version on which a delta can build. If a whole version is needed, returns None and the reason."""
        newest = self._newest
        if newest is None:
            return None, "it is the first version"
        with self._rebuilding():
            chain = self._folder.chain(newest.version)
        first, deltas = chain[0], chain[1:]
        if len(deltas) >= max_deltas:
            return None, f"the limit of max_deltas={max_deltas} after version {first.version} is reached"
        if first.others != others:
            return None, f"files beside the weights differ from version {first.version}"
        storage = self._folder.folder(first.version)
        with self._rebuilding():
            headers = {file.header: file for file in (read_weight_file(storage, name) for name in sorted(first.files))}
        pairs = [(file, headers.pop(file.header, None)) for file in self._model.weights.values()]
        matched = [(new, old) for new, old in pairs if old is not None]
        if headers or len(matched) < len(pairs):
            what = "the header of a file (its tensors, their offsets, and __metadata__)"
            return None, f"{what} differs from version {first.version}"
        with self._rebuilding():
            built = Chain([read_delta(self._folder, manifest) for manifest in deltas], first.tensors)
        return _Base(storage, first, built, matched), ""

    # --- a whole version ----------------------------------------------------------------------------------------------

    def _write_whole(self, others: dict[str, FileRecord]) -> Manifest:
        by_stored_name = {other_file_name(record, self._publication): name for name, record in others.items()}
        for name in by_stored_name.values():  # files with the same contents are stored once
            self._write_other(name, others[name])
        weights = list(self._model.weights.values())
        names = {
            file.name: f"model-{number:05d}-of-{len(weights):05d}-{self._publication}.safetensors"
            for number, file in enumerate(weights, 1)
        }
        files: dict[str, FileRecord] = {}
        digests: dict[str, str] = {}

        def copy(file: WeightFile) -> None:
            record, of_tensors = self._copied(file, names[file.name])
            with self._lock:
                files[names[file.name]] = record
                digests.update(of_tensors)

        self._in_threads(copy, weights)
        weight_map = {tensor.key: names[file.name] for file in weights for tensor in file.tensors}
        nbytes = sum(record.nbytes for record in (*files.values(), *others.values()))
        return self._manifest(files, weight_map, digests, nbytes, chain=self._version, others=others)

    def _copied(self, file: WeightFile, name: str) -> tuple[FileRecord, dict[str, str]]:
        hashed, digests = hashlib.sha256(file.header), {}
        with (
            self._file(name, file.nbytes) as write,
            reading_tensors(self._source, file.name) as read,
        ):
            write(memoryview(file.header))
            for tensor in file.tensors:
                of_tensor = xxhash.xxh3_128()
                for block in self._blocks(read, tensor):
                    hashed.update(block.data)
                    of_tensor.update(block.data)
                    write(block.data)
                digests[tensor.key] = of_tensor.hexdigest()
        return FileRecord(file.nbytes, hashed.hexdigest()), digests

    def _blocks(self, read: Read, tensor: StoredBytes, nbytes: int = READ_BYTES) -> Iterator[np.ndarray]:
        for start in range(0, tensor.nbytes, nbytes):
            block = np.empty(min(nbytes, tensor.nbytes - start), dtype=np.uint8)
            read(tensor, start, block)
            self._progress(block.nbytes)
            yield block

    # --- a delta --------------------------------------------------------------------------------------------------

    def _write_delta(self, base: _Base, previous: Model | None) -> Manifest:
        before = None if previous is None else _matching(previous, base)
        records: dict[str, FileRecord] = {}
        weight_map: dict[str, str] = {}
        digests: dict[str, str] = {}
        nbytes = 0

        def encode(pair: tuple[WeightFile, WeightFile]) -> None:
            nonlocal nbytes
            new, old = pair
            where = (base.storage, old) if before is None else before[old.name]
            record, written = self._encoded(new, old, where, base, is_previous=before is not None)
            with self._lock:
                records[old.name] = record
                for name, (of_tensors, written_bytes) in written.items():
                    weight_map.update(dict.fromkeys(of_tensors, name))
                    digests.update(of_tensors)
                    nbytes += written_bytes

        self._in_threads(encode, base.pairs)
        assert self._newest is not None
        newest, first = self._newest.version, base.manifest.version
        return self._manifest(records, weight_map, digests, nbytes, base_version=newest, chain=first)

    def _encoded(
        self,
        new: WeightFile,
        old: WeightFile,
        where: tuple[Storage, WeightFile],
        base: _Base,
        *,
        is_previous: bool,
    ) -> tuple[FileRecord, dict[str, tuple[dict[str, str], int]]]:
        """Writes the deltas of a file's tensors, to files of about `_FILE_BYTES` bytes.

        Returns the record of the new file, and for each written file, by name, the digests of its tensors and its size.
        """
        storage, file = where
        from_published = nullcontext if is_previous else self._rebuilding
        changes = Chain([], base.chain.digests) if is_previous else base.chain
        hashed = hashlib.sha256(new.header)
        written: dict[str, tuple[dict[str, str], int]] = {}
        frames: dict[str, tuple[bytes, str]] = {}
        held = 0
        by_key = {tensor.key: tensor for tensor in file.tensors}

        def before(key: str) -> Iterator[np.ndarray]:
            """Yields the bytes of a tensor at the previous version, and then verifies them."""
            with from_published():
                if key not in base.chain.digests:
                    raise MetadataError(f"{base.storage.path}/{INDEX} has no digest of {key!r}")
                yield from changes.pieces(read_old, f"{storage.path}/{file.name}", by_key[key])

        with reading_tensors(self._source, new.name) as read, reading_tensors(storage, file.name) as read_old:
            for tensor in new.tensors:
                encoder = DeltaEncoder()
                old_pieces = before(tensor.key)
                for piece, old_piece in zip(self._blocks(read, tensor, PIECE), old_pieces, strict=True):
                    hashed.update(piece.data)
                    encoder.update(piece, old_piece)
                if (encoded := encoder.finish()) is not None:
                    frames[tensor.key] = encoded
                    held += len(encoded[0])
                if held >= _FILE_BYTES:
                    written |= self._write_frames(frames)
                    frames, held = {}, 0
        if frames:
            written |= self._write_frames(frames)
        return FileRecord(new.nbytes, hashed.hexdigest()), written

    def _write_frames(self, frames: Mapping[str, tuple[bytes, str]]) -> dict[str, tuple[dict[str, str], int]]:
        """Writes deltas to a file, as one-dimensional tensors of dtype U8, with the digests of the resulting tensors.

        Returns the digests and the file's size, by its name.
        """
        with self._lock:
            self._files += 1
            number = self._files
        name = f"delta-{number:05d}-{self._publication}.safetensors"
        digests = {key: digest for key, (_, digest) in frames.items()}
        header = header_of({key: len(frame) for key, (frame, _) in frames.items()}, digests)
        nbytes = len(header) + sum(len(frame) for frame, _ in frames.values())
        with self._file(name, nbytes) as write:
            write(memoryview(header))
            for frame, _ in frames.values():
                write(memoryview(frame))
        return {name: (digests, nbytes)}

    # --- common to both -----------------------------------------------------------------------------------------------

    def _manifest(
        self,
        files: dict[str, FileRecord],
        weight_map: dict[str, str],
        digests: dict[str, str],
        nbytes: int,
        **rest: Any,
    ) -> Manifest:
        return Manifest(
            version=self._version,
            files=dict(sorted(files.items())),
            tensors=digests,
            weight_map=dict(sorted(weight_map.items())),
            published_at=now(),
            nbytes=nbytes,
            step=self._step,
            publication=self._publication,
            **rest,
        )

    def _in_threads(self, work: Callable[[Any], None], subjects: Sequence[Any]) -> None:
        """Calls a function for each file, in threads: hashing and compression release the GIL."""
        with Workers(max(1, min(cores(), len(subjects))), thread_name_prefix="publish") as pool:
            list(pool.map(work, subjects))

    def _progress(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            self._on_progress(self._done, self._total)


class _NotRebuilt(Exception):
    """The previous version cannot be rebuilt from the published files, so the next one is whole."""


class _Base(NamedTuple):
    """The last whole version, on which a delta builds, and the deltas since."""

    storage: Storage
    manifest: Manifest
    chain: Chain
    pairs: list[tuple[WeightFile, WeightFile]]
    """The files of the model, with those of the whole version that have the same headers."""


def _matching(previous: Model, base: _Base) -> dict[str, tuple[Storage, WeightFile]]:
    """Returns the files of a copy of the previous version, by their names in the last whole version."""
    by_header = {file.header: file for file in previous.weights.values()}
    found = {}
    for _, old in base.pairs:
        if old.header not in by_header:
            raise ChecksumMismatch(
                f"{previous.storage.path} is not the previous version: it has no file with the tensors of {old.name}"
            )
        found[old.name] = previous.storage, by_header[old.header]
    return found


def _notes_of(model: Model) -> dict[str, Any]:
    """Returns the ``metadata`` of a model's own index, without the entries that a manifest adds.

    Raises `MetadataError` if a manifest cannot contain the ``metadata``, or the names of the model's files.
    """
    path = model.storage.path
    if odd := [name for name in model.others if name != name.encode("utf-8", "replace").decode()]:
        raise MetadataError(f"{path} has files whose names are not UTF-8: {listed(odd)}. Rename or remove them.")
    try:
        notes = {} if model.index is None else decode_notes(model.index)
    except ValueError as error:
        raise MetadataError(f"{path}/{INDEX} cannot be published: {error}") from None
    ours = {"dcp_tensorizer", "version", "base_version", "delta_encoding", "compression_format", "checksum_format"}
    return {key: value for key, value in notes.items() if key not in ours}
