"""Computes the bytes of a model at one version from those of an earlier version and the deltas since.

Yields pieces, file by file and tensor by tensor, so that many deltas take no more memory than one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import xxhash

from .._formats.weight_files import StoredBytes, WeightFile, read_weight_file
from .._storage.base import Storage
from ..errors import ChecksumMismatch, MetadataError
from .delta import PIECE, DeltaDecoder, largest_delta, pieces_of
from .model import READ_BYTES, Read, reading_tensors
from .versions import FileRecord, Manifest, Published

_DIGITS = frozenset("0123456789abcdef")
_DIGEST_DIGITS = 32


class _Change(NamedTuple):
    """The delta of a tensor: its location, and the digest of the resulting bytes."""

    file: str
    stored: StoredBytes
    digest: str


@dataclass(frozen=True)
class Delta:
    manifest: Manifest
    storage: Storage
    changes: Mapping[str, _Change]

    def path(self, key: str) -> str:
        """Returns the path of the file that holds the delta of a tensor."""
        return f"{self.storage.path}/{self.changes[key].file}"


def read_delta(published: Published, manifest: Manifest) -> Delta:
    """Reads the headers of a delta's files, and compares them with the manifest."""
    storage = published.folder(manifest.version)
    names: dict[str, set[str]] = {}
    for key, name in manifest.weight_map.items():
        names.setdefault(name, set()).add(key)
    changes: dict[str, _Change] = {}
    for name, keys in sorted(names.items()):
        file = read_weight_file(storage, name)
        if {tensor.key for tensor in file.tensors} != keys:
            raise MetadataError(f"{storage.path}/{name} does not hold the tensors that the manifest lists")
        for tensor in file.tensors:
            digest = file.notes.get(tensor.key)
            if not isinstance(digest, str) or len(digest) != _DIGEST_DIGITS or not _DIGITS.issuperset(digest):
                raise MetadataError(f"{storage.path}/{name} has no valid digest of {tensor.key!r}")
            if manifest.publication and manifest.tensors[tensor.key] != digest:
                raise MetadataError(
                    f"{storage.path}/{name} does not belong to version {manifest.version}: its digest of "
                    f"{tensor.key!r} differs from the manifest"
                )
            if tensor.dtype != "U8" or tensor.shape != (tensor.nbytes,):
                raise MetadataError(
                    f"{storage.path}/{name} must hold {tensor.key!r} as a one-dimensional tensor of dtype U8, got "
                    f"{tensor.dtype} of shape {tensor.shape}"
                )
            changes[tensor.key] = _Change(name, tensor, digest)
    return Delta(manifest, storage, changes)


class Chain:
    """Deltas that follow one another, the lowest version first.

    ``before`` has the digests of the earlier version's tensors, as far as they are known; `digests` has those of the
    tensors after all deltas.
    """

    def __init__(self, deltas: Sequence[Delta], before: Mapping[str, str] = MappingProxyType({})) -> None:
        self._deltas, self._before = deltas, before
        self.version = deltas[-1].manifest.version if deltas else None
        self.digests = dict(before)
        for delta in deltas:
            self.digests |= {key: change.digest for key, change in delta.changes.items()}

    def keys(self) -> set[str]:
        return {key for delta in self._deltas for key in delta.changes}

    def pieces(
        self, read: Read, path: str, tensor: StoredBytes, frames: list[list[memoryview]] | None = None
    ) -> Iterator[np.ndarray]:
        """Reads a tensor of the earlier version, and yields all of its bytes with the deltas applied.

        Appends the deltas to ``frames``, if given, in the order of the versions. A tensor without a digest is not
        verified. Otherwise raises `ChecksumMismatch` if the result differs from the published tensor. The error names
        the damaged file: ``path``, which holds the tensor, or that of a delta.
        """
        key, changing = tensor.key, [delta for delta in self._deltas if tensor.key in delta.changes]
        hashed = xxhash.xxh3_128()
        with ExitStack() as files:
            decoders = []
            for delta in changing:
                change = delta.changes[key]
                frame = _frame(files.enter_context(reading_tensors(delta.storage, change.file)), change.stored, tensor)
                if frames is not None:
                    frames.append([])
                    frame = _recorded(frame, frames[-1])
                decoders.append((delta, DeltaDecoder(frame, tensor.nbytes)))
            for start in range(0, tensor.nbytes, READ_BYTES):
                block = np.empty(min(READ_BYTES, tensor.nbytes - start), dtype=np.uint8)
                read(tensor, start, block)
                for piece in pieces_of(block.data):
                    for delta, decoder in decoders:
                        try:
                            decoder.xor_into(piece)
                        except ValueError as error:
                            raise ChecksumMismatch(f"{delta.path(key)} does not fit {key!r}: {error}") from None
                    if key in self.digests:
                        hashed.update(piece.data)
                    yield piece
        if changing and not tensor.nbytes:
            raise ChecksumMismatch(f"{changing[0].path(key)} does not fit {key!r}: the tensor is empty")
        if key not in self.digests or hashed.hexdigest() == self.digests[key]:
            return
        if not changing:
            raise ChecksumMismatch(
                f"{key!r} in {path} is not the published tensor: the file is damaged, or of another version or model"
            )
        for _ in Chain(changing[:-1], self._before).pieces(read, path, tensor):
            pass  # raises the error of the first damaged file
        if len(changing) == 1 and key not in self._before:
            raise ChecksumMismatch(
                f"{key!r} in {path}, or its delta in {changing[0].path(key)}, is damaged, or of another version or "
                f"model"
            )
        last = changing[-1]
        raise ChecksumMismatch(
            f"{last.path(key)} is damaged: {key!r} with this delta differs from version {last.manifest.version}"
        )


def _frame(read: Read, stored: StoredBytes, tensor: StoredBytes) -> Iterator[memoryview]:
    """Reads the delta of a tensor in pieces. Raises `ValueError` if the delta is too large for the tensor."""
    if stored.nbytes > largest_delta(tensor.nbytes):
        raise ValueError(f"its delta has {stored.nbytes:,} bytes, too many for a tensor of {tensor.nbytes:,} bytes")
    for start in range(0, stored.nbytes, PIECE):
        piece = np.empty(min(PIECE, stored.nbytes - start), dtype=np.uint8)
        read(stored, start, piece)
        yield piece.data


def _recorded(pieces: Iterator[memoryview], record: list[memoryview]) -> Iterator[memoryview]:
    for piece in pieces:
        record.append(piece)
        yield piece


def copied(
    storage: Storage, file: WeightFile, chain: Chain, record: FileRecord, write: Callable[[memoryview], object]
) -> None:
    """Copies a safetensors file in pieces, and applies deltas.

    Raises `ChecksumMismatch` if the result differs from the record.
    """
    hashed = hashlib.sha256()

    def take(piece: memoryview) -> None:
        hashed.update(piece)
        write(piece)

    take(memoryview(file.header))
    with reading_tensors(storage, file.name) as read:
        for tensor in file.tensors:
            for piece in chain.pieces(read, f"{storage.path}/{file.name}", tensor):
                take(piece.data)
    if (file.nbytes, hashed.hexdigest()) != (record.nbytes, record.sha256):
        at = "" if chain.version is None else f" at version {chain.version}"
        raise ChecksumMismatch(
            f"{storage.path}/{file.name} differs from the published file{at}: it is damaged, or of another version "
            f"or model"
        )
