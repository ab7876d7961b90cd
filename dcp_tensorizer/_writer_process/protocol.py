"""The messages between a trainer and its writer process.

Records that exist once for each tensor are tuples: they pickle in a tenth of the time of a dataclass, and pickling
holds the trainer's GIL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from .._runtime.process_context import ProcessContext
from .._runtime.spans import Span
from .._staging.shared_mappings import MappedFile
from .._storage.base import FileIdentity
from .._tensor_file.names import StoredItem
from .._tiers.target import FlushTarget
from .options import SaveOptions

if TYPE_CHECKING:
    from .._publish.publisher import Publication
    from .shared_job import Pieces, SharedFilePart


class TensorSource(NamedTuple):
    """A tensor to write, and the location of its bytes, in C order."""

    name: str
    """The tensor's name in the file."""
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    kind: str = "tensor"
    """See `StoredItem.kind`."""
    memory: int | MappedFile | None = None
    """The number of a shared buffer, or a file that the trainer maps; None if the trainer itself writes the tensor."""
    offset: int = 0
    """The offset of the first byte in ``memory``."""


class EarlierFile(NamedTuple):
    """The location of an earlier save's file, which has the same bytes as a file to write."""

    location: str
    """The directory, as `open_storage` takes it."""
    name: str
    identity: FileIdentity


@dataclass(frozen=True, slots=True)
class FileRequest:
    """A request for one tensorizer file, with its tensors in file order."""

    name: str
    tensors: tuple[TensorSource, ...]
    earlier: tuple[EarlierFile, ...] = ()  # files with the same bytes: if one can be adopted, this file is not written
    nbytes: int = 0  # of the file; 0 without earlier files

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the tensors as columns, which takes a fifth of the time."""
        return _of_columns, (self.name, tuple(zip(*self.tensors, strict=True)), self.earlier, self.nbytes)


def _of_columns(
    name: str, columns: tuple[tuple[Any, ...], ...], earlier: tuple[EarlierFile, ...], nbytes: int
) -> FileRequest:
    return FileRequest(name, tuple(map(TensorSource._make, zip(*columns, strict=True))), earlier, nbytes)


class DeviceTensor(NamedTuple):
    """A tensor on a GPU, and the offset in a shared buffer to copy its elements to, in C order."""

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
    """A request to copy GPU memory of the trainer to a shared buffer."""

    buffer: int  # the buffer's number
    device: int  # the GPU of one of the tensors
    storages: tuple[tuple[Any, ...], ...]  # torch's arguments to open each storage, which can be opened only once
    tensors: tuple[DeviceTensor, ...]


@dataclass(frozen=True, slots=True, repr=False)  # it holds secrets
class WriteRequest:
    """A request to write ``files`` below ``path`` and make them durable. The response is a `WriteDone`."""

    path: str
    options: SaveOptions
    files: tuple[FileRequest, ...]


@dataclass(frozen=True, slots=True, repr=False)  # it holds secrets
class SharedWriteRequest:
    """A request to write pieces of tensors into files below ``path`` that several processes write.

    The writer process makes the pieces durable. The response is a `WriteDone` with parts.
    """

    path: str
    options: SaveOptions
    files: tuple[SharedFilePart, ...]
    pieces: Pieces  # ``source`` is an index into ``tensors``
    tensors: tuple[TensorSource, ...]
    dtypes: tuple[str, ...]  # the dtype in which each tensor is written


@dataclass(frozen=True, slots=True)
class DigestRequest:
    """A request for the XXH3-128 of each tensor. The response has the digests in the same order."""

    tensors: tuple[TensorSource, ...]
    thread_count: int


Request: TypeAlias = "WriteRequest | SharedWriteRequest | DigestRequest | SnapshotRequest | Publication | FlushTarget"
"""A `FlushTarget` is a request to flush its local folder from now on, between other requests. The response to a
`Publication` is the version, the lease for publishing the next version, and warnings to log."""


@dataclass(frozen=True, slots=True, repr=False)  # it holds secrets
class Call:
    """A request with its buffers and context. The descriptors of new buffers are sent with the message."""

    request: Request | None  # None: only release buffers
    retained: tuple[int, ...]  # the numbers of shared buffers that the process retains; it releases all others
    new: tuple[tuple[int, int], ...] = ()  # the number and size of each new buffer
    context: ProcessContext | None = None  # the process context to apply; if None, the current one stays


@dataclass(frozen=True, slots=True)
class FileResult:
    """A file of a request that has succeeded, and the locations of its tensors. The file is fsynced if requested."""

    name: str
    nbytes: int
    tensors: tuple[StoredItem, ...]  # empty if the file was adopted, or is shared
    identity: FileIdentity | None = None  # for later adoptions; None if files are not adopted
    adopted: bool = False  # the file was not written, because a file with the same bytes existed


@dataclass(frozen=True, slots=True)
class WriteDone:
    """The response to a write request that has succeeded."""

    files: tuple[FileResult, ...]
    seconds: float
    """Wall-clock time of the request."""
    hash_seconds: float
    """Time until all hashes were known; for shared files, until all pieces were written. Writes overlap it."""
    write_seconds: float
    """Time in write calls and fsync."""
    spans: tuple[Span, ...] = ()
    """The spans of the request and of its files."""
    attempts: int = 1
    """2 if the writer process died, and everything was written again; otherwise 1."""
    nbytes: int = 0
    """For shared files: the bytes that this rank has written."""
    parts: Mapping[int, Mapping[int, Mapping[str, str]]] = field(default_factory=dict)
    """For shared files: the `Sink.parts` of each file, by the file's number."""

    def __add__(self, other: WriteDone) -> WriteDone:
        """Returns the result of two requests for the same files."""
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

    def items(self) -> dict[str, StoredItem]:
        return {item.name: item for file in self.files for item in file.tensors}
