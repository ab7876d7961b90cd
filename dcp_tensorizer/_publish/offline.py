"""Lists published versions, verifies them, and removes old ones."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from .._format.delta import zstd
from .._format.safetensors_header import INDEX
from .._runtime.validation import check_count
from .._storage.base import Storage
from .._storage.open import open_storage
from ..errors import CheckpointError, NotCommitted
from .chain import Chain, copied, read_delta
from .model import read_small, read_weight_file
from .publisher import remove_old
from .versions import FileRecord, Manifest, Published, decode_manifest

_Path = str | os.PathLike[str]
_Options = Mapping[str, Any] | None
_Progress = Callable[[int, int], object]


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """A published version.

    Attributes:
        path: Its directory, without credentials.
        version: Its number.
        step: The step of training, if the publisher has given it.
        published: When it was published, in UTC.
        is_delta: It has only the changes since the previous version.
        base: The whole version on which it builds; its own number if it is whole itself.
        nbytes: The size of its own files.
        model_nbytes: The size of the model's safetensors files.
        tensors: The number of its tensors; of a delta, those that have changed.
    """

    path: str
    version: int
    step: int | None
    published: datetime
    is_delta: bool
    base: int
    nbytes: int
    model_nbytes: int
    tensors: int


@dataclass(frozen=True, slots=True)
class VersionsVerified:
    """The result of `verify_versions`.

    Attributes:
        path: The directory, without credentials.
        versions: The versions that were put together and compared.
        files: How many files were compared.
        nbytes: Bytes of these files.
        damages: The differences from what was published; empty if there are none.
        seconds: How long it took.
    """

    path: str
    versions: tuple[int, ...]
    files: int
    nbytes: int
    damages: tuple[str, ...]
    seconds: float


def list_versions(path: _Path, *, storage_options: _Options = None) -> tuple[VersionInfo, ...]:
    """Lists the published versions in a directory, the newest first.

    Args:
        path: The directory of versions.
        storage_options: Passed to the fsspec filesystem of a URL.

    Raises:
        NotCommitted: nothing has been published there.
        MetadataError: a manifest is damaged.
        ReadError: it cannot be read.
    """
    published = Published(open_storage(path, storage_options))
    manifests = published.manifests()
    if not manifests:
        raise NotCommitted(f"nothing has been published in {published.path}")
    return tuple(_info(published, manifest) for manifest in reversed(manifests))


def verify_versions(
    path: _Path,
    *,
    version: int | None = None,
    storage_options: _Options = None,
    on_progress: _Progress = lambda done, total: None,
) -> VersionsVerified:
    """Puts versions together, and compares the SHA-256 of each file with what was published.

    Args:
        path: A directory of versions, or a directory to which deltas are applied.
        version: The version to verify. By default all: the last one of each whole version with its deltas, which needs
            all of these.
        storage_options: Passed to the fsspec filesystem of a URL.
        on_progress: Called with the bytes that are done and the bytes in all.

    Raises:
        NotCommitted: there is no such version, or nothing has been published there.
        MetadataError: a manifest is damaged.
    """
    started = time.monotonic()
    storage = open_storage(path, storage_options)
    if (content := read_small(storage, INDEX)) is not None:
        manifest = decode_manifest(content, f"{storage.path}/{INDEX}")
        work = _Verification(manifest.nbytes, on_progress)
        work.verify(f"version {manifest.version}", lambda: work.compare_files(storage, manifest.files))
        return work.result(storage.path, [manifest.version], started)
    zstd()
    published = Published(storage)
    manifests = published.manifests() if version is None else [published.manifest(version)]
    if not manifests:
        raise NotCommitted(f"nothing has been published in {published.path}")
    last = {manifest.chain: manifest for manifest in manifests}
    work = _Verification(sum(_size(manifest) for manifest in last.values()), on_progress)
    for manifest in last.values():
        work.verify(f"version {manifest.version}", lambda of=manifest: work.compare_version(published, of))  # type: ignore[misc]
    return work.result(published.path, [manifest.version for manifest in last.values()], started)


def collect_versions(
    path: _Path, *, keep_latest: int, dry_run: bool = False, storage_options: _Options = None
) -> tuple[VersionInfo, ...]:
    """Removes old versions, but never one that a newer one builds upon.

    Args:
        path: The directory of versions.
        keep_latest: How many of the newest versions to keep, with all versions on which they build.
        dry_run: Remove nothing.
        storage_options: Passed to the fsspec filesystem of a URL.

    Returns:
        The versions that were removed, or would be.

    Raises:
        NotCommitted: nothing has been published there.
        WriteError: a version cannot be removed.
    """
    check_count("keep_latest", keep_latest)
    published = Published(open_storage(path, storage_options))
    known = {info.version: info for info in list_versions(path, storage_options=storage_options)}
    with published.storage.writing(f"remove versions in {published.path}"):
        return tuple(known[version] for version in remove_old(published, keep_latest, dry_run=dry_run))


class _Verification:
    """Verifies versions; counts the files and notes the damages."""

    def __init__(self, total: int, on_progress: _Progress) -> None:
        self._total, self._on_progress = total, on_progress
        self._damages: list[str] = []
        self._files = self._done = 0

    def verify(self, what: str, compare: Callable[[], None]) -> None:
        try:
            compare()
        except (CheckpointError, OSError) as error:
            self._damages.append(f"{what}: {error}")

    def compare_version(self, published: Published, manifest: Manifest) -> None:
        """Verifies a version, which it puts together from the whole one and the deltas since."""
        base, *after = published.chain(manifest.version)
        storage = published.folder(base.version)
        chain = Chain([read_delta(published, delta) for delta in after])
        for name, record in manifest.files.items():
            copied(storage, read_weight_file(storage, name), chain, record, lambda piece: self._count(piece.nbytes))
            self._files += 1
        self.compare_files(storage, {base.stored(name): record for name, record in base.others.items()})
        for name, record in base.others.items() if base.publication else ():
            if storage.head(name) is not None:  # another name of the same file, or a copy of it
                _compare(storage, name, record, lambda nbytes: None)

    def compare_files(self, storage: Storage, files: Mapping[str, FileRecord]) -> None:
        """Verifies files of a directory as they are."""
        for name, record in files.items():
            _compare(storage, name, record, self._count)
            self._files += 1

    def _count(self, nbytes: int) -> None:
        self._done += nbytes
        self._on_progress(min(self._done, self._total), self._total)

    def result(self, path: str, versions: list[int], started: float) -> VersionsVerified:
        seconds = time.monotonic() - started
        return VersionsVerified(path, tuple(versions), self._files, self._done, tuple(self._damages), seconds)


def _compare(storage: Storage, name: str, record: FileRecord, on_read: Callable[[int], object]) -> None:
    if FileRecord.of(storage, name, on_read).sha256 != record.sha256:
        raise CheckpointError(f"{storage.path}/{name} is not what was published")


def _size(manifest: Manifest) -> int:
    return sum(record.nbytes for record in (*manifest.files.values(), *manifest.others.values()))


def _info(published: Published, manifest: Manifest) -> VersionInfo:
    return VersionInfo(
        published.folder(manifest.version).path,
        manifest.version,
        manifest.step,
        manifest.published_at,
        manifest.is_delta,
        manifest.chain,
        manifest.nbytes,
        sum(record.nbytes for record in manifest.files.values()),
        len(manifest.weight_map),
    )
