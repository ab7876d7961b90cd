"""The messages between a trainer and its writer process.

Only offsets into shared memory cross, never tensors: a request stays small, and one descriptor serves any number of
tensors. Records that exist once for each tensor are tuples. They pickle in a tenth of the time of a dataclass, and the
trainer's interpreter lock is held meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from .._runtime.process_context import ProcessContext
from .._runtime.spans import Span
from .._staging.shared_mappings import MappedFile
from .._storage.base import FileIdentity
from .._tensor_file.names import StoredItem
from .._tiers.target import FlushTarget
from .options import SaveOptions

if TYPE_CHECKING:
    from .._publish.publisher import Publication
    from .._storage.lease import LeaseRecord
    from .shared_job import Pieces, SharedFilePart


class TensorSource(NamedTuple):
    """A tensor to be written, and where its bytes are, in C order."""

    name: str
    """Its name in the file."""
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    kind: str = "tensor"
    """See `StoredItem.kind`."""
    memory: int | MappedFile | None = None
    """The number of a shared buffer, or a file that the trainer maps; None where nothing crosses to a process."""
    offset: int = 0
    """First byte in that memory."""


class EarlierFile(NamedTuple):
    """The location of a file of the same bytes, of an earlier save."""

    location: str
    """The directory, as `open_storage` takes it."""
    name: str
    identity: FileIdentity


@dataclass(frozen=True, slots=True)
class FileRequest:
    """One tensorizer file, its tensors in file order."""

    name: str
    tensors: tuple[TensorSource, ...]
    earlier: tuple[EarlierFile, ...] = ()  # of the same bytes: it is written only if none of them can be adopted
    nbytes: int = 0  # of the file; only known if there are earlier files

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the tensors as columns, in a fifth of the time."""
        return _of_columns, (self.name, tuple(zip(*self.tensors, strict=True)), self.earlier, self.nbytes)


def _of_columns(
    name: str, columns: tuple[tuple[Any, ...], ...], earlier: tuple[EarlierFile, ...], nbytes: int
) -> FileRequest:
    return FileRequest(name, tuple(map(TensorSource._make, zip(*columns, strict=True))), earlier, nbytes)


class DeviceTensor(NamedTuple):
    """A tensor on a GPU, and the offset in a shared buffer where its elements go in C order."""

    storage: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    is_conj: bool
    is_neg: bool
    offset: int


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """Copy GPU memory of the trainer to a shared buffer."""

    buffer: int  # its number
    device: int  # a GPU that one of the tensors is on
    storages: tuple[tuple[Any, ...], ...]  # what torch needs to open each storage, which can be opened once
    tensors: tuple[DeviceTensor, ...]


@dataclass(frozen=True, slots=True, repr=False)  # it holds secrets
class WriteRequest:
    """Write ``files`` below ``path`` and make them durable. The answer is a `WriteDone`."""

    path: str
    options: SaveOptions
    files: tuple[FileRequest, ...]


@dataclass(frozen=True, slots=True, repr=False)  # it holds secrets
class SharedWriteRequest:
    """Write pieces of tensors into files below ``path`` that other processes write, too, and make them durable.

    The answer is a `WriteDone` with parts.
    """

    path: str
    options: SaveOptions
    files: tuple[SharedFilePart, ...]
    pieces: Pieces  # which tensor, by its number in ``tensors``, goes where
    tensors: tuple[TensorSource, ...]
    dtypes: tuple[str, ...]  # the dtype that each tensor is written as


@dataclass(frozen=True, slots=True)
class PublishRequest:
    """Publish a model that has been written, as the next version of a directory.

    The answer is the version, and the claim with which the next one is to be published.
    """

    publication: Publication
    own: LeaseRecord | None  # the lease of that directory; None before the first version


@dataclass(frozen=True, slots=True)
class DigestRequest:
    """Take the XXH3-128 of each of these tensors. The answer has them in the same order."""

    tensors: tuple[TensorSource, ...]
    thread_count: int


Request = WriteRequest | SharedWriteRequest | DigestRequest | SnapshotRequest | PublishRequest | FlushTarget
"""A `FlushTarget` is to be flushed from now on, between requests."""


@dataclass(frozen=True, slots=True, repr=False)  # it holds secrets
class Call:
    """A request, and what it needs. The descriptors of new buffers travel with the message."""

    request: Request | None  # None: only release buffers
    kept: tuple[int, ...]  # the numbers of shared buffers that the process has; it releases all others
    new: tuple[tuple[int, int], ...] = ()  # the number and size of each buffer that it gets
    context: ProcessContext | None = None  # when and where the save was asked for; None for the present one


@dataclass(frozen=True, slots=True)
class FileResult:
    """A finished file (fsynced if requested), and the locations of its tensors."""

    name: str
    nbytes: int
    tensors: tuple[StoredItem, ...]  # empty if it was adopted
    identity: FileIdentity | None = None  # what it will be recognised by; None where files are not adopted
    adopted: bool = False  # it was not written, because the same bytes were there


@dataclass(frozen=True, slots=True)
class WriteDone:
    """The request is fulfilled."""

    files: tuple[FileResult, ...]
    seconds: float
    """Wall-clock time for all of it."""
    hash_seconds: float
    """Until all hashes were known, or everything was copied; it writes meanwhile."""
    write_seconds: float
    """In write calls and fsync."""
    spans: tuple[Span, ...] = ()
    """Of all of it, and of its files."""
    attempts: int = 1
    """2 if the writer process died, and a fresh one wrote everything again."""
    nbytes: int = 0
    """Of shared files: the bytes written here."""
    parts: Mapping[int, Mapping[int, Mapping[str, str]]] = field(default_factory=dict)
    """Of shared files: by the number of the file, its `Sink.parts`."""

    def __add__(self, other: WriteDone) -> WriteDone:
        """The result of two requests for the same files."""
        return WriteDone(
            tuple(dict.fromkeys((*self.files, *other.files))),
            self.seconds + other.seconds,
            self.hash_seconds + other.hash_seconds,
            self.write_seconds + other.write_seconds,
            (*self.spans, *other.spans),
            max(self.attempts, other.attempts),
            self.nbytes + other.nbytes,
            {
                number: {**self.parts.get(number, {}), **other.parts.get(number, {})}
                for number in (*self.parts, *other.parts)
            },
        )

    def places(self) -> dict[str, tuple[StoredItem, int]]:
        """Returns the location of each tensor by its name, and the size of its file."""
        return {item.name: (item, file.nbytes) for file in self.files for item in file.tensors}
