"""Published versions of a model: their manifests, their directories, and which of them are still needed.

``docs/guides/publish.md`` has the layout of the files. In this module, a base is a whole version.

Two publications may write the same version at the same time. Their files have different names. Local disks, and object
stores with conditional puts, accept only one of their manifests. From then on the other publication cannot commit, and
its files are leftovers. Programs expect the files beside the weights under fixed names. `Published.tidy` adds these
names after the commit, and the manifest does not refer to them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from .._formats.safetensors_header import INDEX, decode_json
from .._formats.weight_files import check_plain_name, check_weight_name, read_small
from .._runtime.validation import check_count
from .._storage.base import Storage
from .._storage.open import absolute_path, open_storage
from ..errors import CheckpointError, MetadataError, NotCommitted, UnsupportedFormat
from .model import read_blocks, written_file

FORMAT = 1
_DIRECTORY = re.compile(r"weight_v(\d{6,15})")
_OF_A_PUBLICATION = re.compile(
    r"(delta-\d+|model-\d+-of-\d+|\.other-[0-9a-f]{64})-[0-9a-f]{8}(\.safetensors)?"
    rf"|{re.escape(INDEX)}\.[0-9a-f]{{32}}\.tmp"
)
LEASE = ".publish.claim"
_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Number = Annotated[str, Meta(pattern=r"^\d{6,15}$")]
_Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
_Digest = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
_Publication = Annotated[str, Meta(pattern=r"^([0-9a-f]{8})?\Z")]


class FileRecord(Struct, frozen=True, omit_defaults=True):
    """A file of a model at a version. ``sha256`` is in hexadecimal digits."""

    nbytes: _Count
    sha256: _Sha256
    origin: str = ""  # the name of the same file in the base, if it differs

    @classmethod
    def of(cls, storage: Storage, name: str, on_read: Callable[[int], object] = lambda nbytes: None) -> FileRecord:
        """Hashes a file. Calls ``on_read`` with the size of each block."""
        hashed, nbytes = hashlib.sha256(), 0
        for block in read_blocks(storage, name):
            hashed.update(block)
            nbytes += len(block)
            on_read(len(block))
        return cls(nbytes, hashed.hexdigest())


class Manifest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The manifest of a version, or of a copy to which deltas are applied. Times are in UTC."""

    version: int
    base_version: int | None = None  # of a delta, the version that it changes
    chain: int  # the base that a delta builds on, directly or through other deltas; of a base, its own number
    files: dict[str, FileRecord]  # the model's safetensors files at this version, by their names in the base or copy
    others: dict[str, FileRecord] = {}  # of a base or a copy: the other files, which do not change within a chain
    tensors: dict[str, _Digest] = {}  # the digests of a base's tensors; of a delta, those of the changed tensors
    weight_map: dict[str, str]  # the file of each tensor; of a delta, of each changed tensor
    published_at: datetime
    nbytes: _Count  # the size of the version's own files, without this manifest
    step: int | None = None  # the step of training, if the publisher passed it
    replaced: tuple[str, ...] = ()  # in a directory to which deltas are applied, the files that this version replaced
    # Part of the names of the version's own files. Empty in copies, and in versions that are older than this field.
    publication: _Publication = ""

    @property
    def is_delta(self) -> bool:
        return self.base_version is not None

    def stored(self, name: str) -> str:
        """Returns the name under which one of `others` is stored."""
        return other_file_name(self.others[name], self.publication) if self.publication else name


def other_file_name(record: FileRecord, publication: str) -> str:
    return f".other-{record.sha256}-{publication}"


# --- as JSON: an index, with SGLang's fields in ``metadata``, and this package's in ``metadata.dcp_tensorizer`` -------

_OF_DELTAS = {"delta_encoding": "xor", "compression_format": "zstd"}
_CHECKSUMS = "xxh3-128"


class _VersionIndex(Struct):
    weight_map: dict[str, str]
    metadata: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_VersionIndex).decode


def encode_manifest(manifest: Manifest, model_notes: Mapping[str, Any]) -> bytes:
    """Encodes a manifest as an index, with the ``metadata`` of the model's own index."""
    ours = {"format": FORMAT} | msgspec.to_builtins(manifest) | {"chain": _digits(manifest.chain)}
    notes = {**model_notes, "version": _digits(ours.pop("version")), "checksum_format": _CHECKSUMS}
    if manifest.is_delta:
        notes |= {"base_version": _digits(ours.pop("base_version"))} | _OF_DELTAS
    weight_map = ours.pop("weight_map")
    return (
        json.dumps({"metadata": notes | {"dcp_tensorizer": ours}, "weight_map": weight_map}, indent=1).encode() + b"\n"
    )


def decode_notes(content: bytes) -> dict[str, Any]:
    """Decodes the ``metadata`` of any index; raises `ValueError` if it is damaged."""
    return decode_json(_decode, content).metadata or {}


def decode_manifest(content: bytes, path: str) -> Manifest:
    try:
        index = decode_json(_decode, content)
        notes = index.metadata or {}
        if "dcp_tensorizer" not in notes:
            raise UnsupportedFormat(
                f"{path} is the index of a model, not a manifest of dcp_tensorizer: it has no SHA-256 with which to "
                f"verify the files"
            )
        ours = msgspec.convert(notes["dcp_tensorizer"], dict[str, Any])
        if (number := ours.get("format", FORMAT)) != FORMAT:
            raise UnsupportedFormat(
                f"{path} has format {number}, but this release reads format {FORMAT}. Update dcp_tensorizer."
            )
        base = notes.get("base_version")
        encodings = {name: notes.get(name) for name in _OF_DELTAS}
        if encodings != (expected := dict.fromkeys(_OF_DELTAS) if base is None else _OF_DELTAS):
            raise ValueError(f"its encoding must be {expected}, got {encodings}")
        if notes.get("checksum_format", _CHECKSUMS) != _CHECKSUMS:
            raise ValueError(f"its checksum_format must be {_CHECKSUMS!r}, got {notes['checksum_format']!r}")
        numbers = {"version": notes.get("version"), "base_version": base, "chain": ours.get("chain")}
        read = {name: int(msgspec.convert(text, _Number)) for name, text in numbers.items() if text is not None}
        manifest = msgspec.convert({**ours, "base_version": None, **read, "weight_map": index.weight_map}, Manifest)
    except (ValueError, msgspec.ValidationError) as error:
        raise MetadataError(f"{path} is not a manifest of a version, or is damaged: {error}") from None
    origins = {record.origin for record in manifest.files.values() if record.origin}
    for name in {*manifest.files, *manifest.weight_map.values(), *origins, *manifest.replaced}:
        check_weight_name(name, path)
    for name in manifest.others:
        check_plain_name(name, path)
    before = manifest.base_version
    if manifest.chain > manifest.version or not (before is None or manifest.chain <= before < manifest.version):
        raise MetadataError(f"{path} is inconsistent: it is neither a whole version nor a delta of an earlier one")
    if before is not None and manifest.publication and manifest.tensors.keys() != manifest.weight_map.keys():
        raise MetadataError(f"{path} is inconsistent: its digests are not those of the tensors that it changes")
    return manifest


def _digits(version: int) -> str:
    return f"{version:06d}"


def now() -> datetime:
    """Returns the current time, in whole seconds as in manifests."""
    return datetime.now(timezone.utc).replace(microsecond=0)


# --- the directory of versions ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """A published version.

    Attributes:
        path: Its directory, without credentials.
        version: Its number.
        step: The step of training, if the publisher passed it.
        published: The time of the publication, in UTC.
        is_delta: It has only the changes since the previous version.
        base: The whole version that it builds on; of a whole version, its own number.
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


class Published:
    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.path = storage.path
        self._manifests: dict[int, Manifest] = {}

    def numbers(self) -> list[int]:
        """Returns the numbers of versions that have a directory, the lowest first. The versions may be incomplete."""
        try:
            folders = self.storage.listing()[1]
        except NotCommitted:
            return []
        matches = (_DIRECTORY.fullmatch(name) for name in folders)
        return sorted(int(match[1]) for match in matches if match and match[0] == name_of(int(match[1])))

    def folder(self, version: int) -> Storage:
        return self.storage.child(name_of(version))

    def find(self, version: int) -> Manifest | None:
        if version not in self._manifests:
            folder = self.folder(version)
            content = read_small(folder, INDEX)
            if content is None:
                return None
            path = f"{folder.path}/{INDEX}"
            manifest = decode_manifest(content, path)
            if manifest.version != version:
                raise MetadataError(f"{path} is the manifest of version {manifest.version}")
            self._manifests[version] = manifest
        return self._manifests[version]

    def manifest(self, version: int | None) -> Manifest:
        """Returns the manifest of a version, or with None the newest one."""
        manifest = self.newest() if version is None else self.find(version)
        if manifest is None:
            if version is None or not self.manifests():
                raise NotCommitted(f"nothing has been published in {self.path}")
            raise NotCommitted(
                f"there is no version {version} in {self.path}: it has {self._existing()}. Pass one that exists."
            )
        return manifest

    def needed(self, version: int, by: Manifest) -> Manifest:
        """Returns the manifest of a version that another one builds on."""
        manifest = self.find(version)
        if manifest is None:
            raise NotCommitted(
                f"version {by.version} builds on version {version}, which is missing in {self.path}: it has "
                f"{self._existing()}. Restore {name_of(version)}, pass a version that does not build on it, or publish "
                f"to a new directory."
            )
        return manifest

    def _existing(self) -> str:
        """Returns the numbers of all versions, in words. Three or more in a row are a range."""
        numbers = [manifest.version for manifest in self.manifests()]
        words: list[str] = []
        for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
            row = [number for _, number in group]
            words += map(str, row) if len(row) < 3 else [f"{row[0]} to {row[-1]}"]
        listing = " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
        return f"only version {listing}" if len(numbers) == 1 else f"versions {listing}"

    def manifests(self) -> list[Manifest]:
        """Returns the manifests of all versions, the lowest first."""
        found = (self.find(number) for number in self.numbers())
        return [manifest for manifest in found if manifest is not None]

    def info(self, manifest: Manifest) -> VersionInfo:
        return VersionInfo(
            path=self.folder(manifest.version).path,
            version=manifest.version,
            step=manifest.step,
            published=manifest.published_at,
            is_delta=manifest.is_delta,
            base=manifest.chain,
            nbytes=manifest.nbytes,
            model_nbytes=sum(record.nbytes for record in manifest.files.values()),
            tensors=len(manifest.weight_map),
        )

    def newest(self) -> Manifest | None:
        found = (self.find(number) for number in reversed(self.numbers()))
        return next((manifest for manifest in found if manifest is not None), None)

    def chain(self, version: int, after: int | None = None) -> list[Manifest]:
        """Returns the manifests of a version and of the versions that it builds on, the lowest first.

        Starts with the base, or with the delta that follows ``after``.
        """
        manifest = self.manifest(version)
        chain, first = [manifest], manifest.chain
        while (before := chain[-1].base_version) is not None and before != after:
            manifest = self.needed(before, chain[-1])
            if manifest.chain != first:
                raise MetadataError(
                    f"version {before} in {self.path} does not build on version {first}, unlike version {version}"
                )
            chain.append(manifest)
        return chain[::-1]

    # --- for publishers -----------------------------------------------------------------------------------------------

    def remove_old(self, keep_latest: int, *, dry_run: bool = False) -> Iterator[int]:
        """Removes versions, except the ``keep_latest`` newest and those on which they build; yields the removed ones.

        Removes the highest versions first, so that no delta is ever without its base. Does not need the lease: a
        version that a publisher adds at the same time is whole, or builds on the newest one, which stays. Also removes
        the leftovers of killed publishers and removals. With ``dry_run``, removes nothing.
        """
        versions = [manifest.version for manifest in self.manifests()]
        needed: set[int] = set()
        for version in reversed(versions[-keep_latest:]):
            if version not in needed:
                needed |= {manifest.version for manifest in self.chain(version)}
        if dry_run:
            yield from (version for version in reversed(versions) if version not in needed)
            return
        for number in reversed(self.numbers()):
            if number < min(needed, default=0):
                self.remove(number)
                if number in versions:
                    yield number
        for version in needed:
            self.tidy(self.manifest(version))

    def remove(self, version: int) -> None:
        """Removes a version, its manifest first, so that no incomplete version is visible. Raises `OSError`."""
        folder = self.folder(version)
        self._manifests.pop(version, None)
        for _ in range(2):  # a delayed publication may write its manifest between two of these steps
            with suppress(FileNotFoundError):  # another process has removed the directory
                folder.remove(INDEX)
                folder.sync_directory()
                folder.discard(*_files_in(folder))
            if folder.remove_directory():
                break

    def tidy(self, manifest: Manifest, *, is_new: bool = False) -> None:
        """Removes the leftovers of other publications of a version, and gives the files beside its weights the names
        that programs expect.

        Call it only if the version has its manifest: until then, any of its publications may commit. In a new version,
        all files that the manifest does not refer to are leftovers. Raises `OSError` and `CheckpointError`, unless
        another process has removed the version meanwhile.
        """
        folder = self.folder(manifest.version)
        try:
            self._tidy(folder, manifest, is_new=is_new)
        except (CheckpointError, OSError):
            if folder.head(INDEX) is not None:
                raise

    def _tidy(self, folder: Storage, manifest: Manifest, *, is_new: bool) -> None:
        found = _files_in(folder)
        stored = {name: manifest.stored(name) for name in manifest.others}
        weights = manifest.weight_map.values() if manifest.is_delta else manifest.files
        own = {INDEX, *weights, *stored.values()}
        if is_new:
            folder.discard(*sorted(found.keys() - own))
            found = {name: found[name] for name in found.keys() & own}
        else:
            folder.discard(*sorted(filter(_OF_A_PUBLICATION.fullmatch, found.keys() - own)))
        for name, record in manifest.others.items():
            if found.get(name) != record.nbytes and stored[name] in found.keys() - {name}:
                identity = folder.identity(stored[name])
                folder.discard(name)
                if identity is None or folder.adopt(folder, stored[name], identity, name, sync=True) is None:
                    with written_file(folder, name, record.nbytes) as write:
                        for block in read_blocks(folder, stored[name]):
                            write(memoryview(block))
        folder.sync_directory()


def _files_in(folder: Storage) -> dict[str, int]:
    """Returns the sizes of the files in a directory, including incomplete uploads."""
    with suppress(NotCommitted):
        return {file.name: file.nbytes for file in (*folder.uploads(), *folder.listing()[0])}
    return {}


def name_of(version: int) -> str:
    return f"weight_v{_digits(version)}"


def check_version(version: object) -> int | None:
    return check_count("version", version, optional=True)


def version_of(name: str) -> int | None:
    match = _DIRECTORY.fullmatch(name)
    return int(match[1]) if match else None


def published_at(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None
) -> tuple[Published, int | None]:
    """Splits a path into a directory of versions, and the version that the path names, if any."""
    path = absolute_path(path)
    name = path.name if isinstance(path, Path) else path.rstrip("/").rpartition("/")[2]
    number = version_of(name)
    if number is None:
        return Published(open_storage(path, storage_options)), None
    above = path.parent if isinstance(path, Path) else path.rstrip("/").rpartition("/")[0]
    return Published(open_storage(above, storage_options)), number


# --- for users --------------------------------------------------------------------------------------------------------


def versions_above(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Published | None:
    """Returns the directory of versions in which ``path`` is a version; None if it is no version."""
    above, number = published_at(path, storage_options)
    return above if number is not None and above.storage.head(LEASE) is not None else None


def list_versions(
    path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> tuple[VersionInfo, ...]:
    """Lists the published versions in a directory, the newest first.

    Args:
        path: The directory of versions.
        storage_options: Options of a URL's storage, such as credentials.

    Raises:
        NotCommitted: nothing has been published there.
        MetadataError: a manifest is damaged.
        UnsupportedFormat: another program, or a newer release, published a version.
        ReadError: the directory cannot be read.
    """
    published = Published(open_storage(path, storage_options))
    manifests = published.manifests()
    if not manifests:
        raise NotCommitted(f"nothing has been published in {published.path}")
    return tuple(map(published.info, reversed(manifests)))


def collect_versions(
    path: str | os.PathLike[str],
    *,
    keep_latest: int,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> tuple[VersionInfo, ...]:
    """Removes old versions, except those that a retained version builds on.

    Args:
        path: The directory of versions.
        keep_latest: The number of newest versions to retain, with all versions on which they build.
        dry_run: Remove nothing.
        storage_options: Options of a URL's storage, such as credentials.

    Returns:
        The versions that were removed; with ``dry_run``, those that would be removed.

    Raises:
        TypeError, ValueError: ``keep_latest`` is not an int of at least 1.
        NotCommitted: nothing has been published there.
        MetadataError: a manifest is damaged.
        UnsupportedFormat: another program, or a newer release, published a version.
        ReadError: the directory cannot be read.
        WriteError: a version cannot be removed.
    """
    keep_latest = check_count("keep_latest", keep_latest)
    published = Published(open_storage(path, storage_options))
    known = {info.version: info for info in list_versions(path, storage_options=storage_options)}
    with published.storage.writing(f"remove versions in {published.path}"):
        return tuple(known[version] for version in published.remove_old(keep_latest, dry_run=dry_run))
