"""The messages between a trainer and its writer process.

Only offsets into shared memory cross, never tensors: a request stays small, and one descriptor serves any number
of tensors. Records that exist once for each tensor are tuples. They pickle in a tenth of the time of a dataclass, and
the trainer's interpreter lock is held meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from .._format.layout import StoredItem
from .._memory.shared_mappings import SharedFile
from .._process_context import ProcessContext
from .._storage.base import FileIdentity

if TYPE_CHECKING:
    from .._format.encryption import Cipher
    from .._tiers.target import Target

__all__ = [
    "Answer",
    "BufferInfo",
    "DetachRequest",
    "Detached",
    "DeviceTensor",
    "DigestRequest",
    "Digests",
    "FileRequest",
    "FileResult",
    "FlushBegun",
    "FlushRequest",
    "Home",
    "Progress",
    "Ready",
    "Request",
    "SnapshotRequest",
    "SnapshotTaken",
    "TensorSource",
    "WriteDone",
    "WriteFailed",
    "WriteOptions",
    "WriteRequest",
]


class TensorSource(NamedTuple):
    """A tensor to be written, and where its bytes are, in C order."""

    name: str
    """Its name in the file."""
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    kind: str = "tensor"
    """See `StoredItem.kind`."""
    memory: int | SharedFile | None = None
    """The number of a shared buffer, or a file that the trainer maps; None where nothing crosses to a process."""
    offset: int = 0
    """First byte in that memory."""


class Home(NamedTuple):
    """Where a file of the same bytes is, of an earlier save."""

    location: str
    """The directory, as `open_storage` takes it."""
    name: str
    identity: FileIdentity


@dataclass(frozen=True, slots=True)
class FileRequest:
    """One tensorizer file, its tensors in file order.

    Attributes:
        homes: Where the same bytes are already. It is written only if it can be adopted from none of them.
        nbytes: Of the file; only known if there are homes.
    """

    name: str
    tensors: tuple[TensorSource, ...]
    homes: tuple[Home, ...] = ()
    nbytes: int = 0


@dataclass(frozen=True, slots=True, repr=False)  # it holds secrets
class WriteOptions:
    """How files are written.

    Attributes:
        storage_options: Passed to the fsspec filesystem.
        sync: Make files and directory durable.
        threads: Hashing threads.
        buffer_bytes: Memory for the parts of a file that are being made.
        timeout: Seconds after which a wait for the storage is given up.
        cipher: Encrypts everything.
        sha256: Put a SHA-256 of each tensor into the files, beside the CRC-32.
        reuse: Do not write again what an earlier save has written.
    """

    storage_options: Mapping[str, Any]
    sync: bool
    threads: int
    buffer_bytes: int
    timeout: float
    cipher: Cipher | None = None
    sha256: bool = False
    reuse: bool = False


@dataclass(frozen=True, slots=True)
class BufferInfo:
    """A shared buffer; its descriptor travels with the message when the writer process has not seen it yet."""

    id: int
    nbytes: int
    attached: bool


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
    """Copy GPU memory of the trainer to a shared buffer.

    Attributes:
        buffer: Number of the buffer.
        device: A GPU that something is on.
        storages: What torch needs to open each; it can be opened once.
        tensors: What is in them.
        buffers: As in a `WriteRequest`.
    """

    buffer: int
    device: int
    storages: tuple[tuple[Any, ...], ...]
    tensors: tuple[DeviceTensor, ...]
    buffers: tuple[BufferInfo, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)  # it holds secrets
class WriteRequest:
    """Write ``files`` below ``path`` and make them durable. Buffers not in ``buffers`` are let go.

    Attributes:
        context: What the process had that asked for the save, at that moment; None for what it has now.
    """

    path: str
    options: WriteOptions
    files: tuple[FileRequest, ...]
    context: ProcessContext | None = None
    buffers: tuple[BufferInfo, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)  # it holds secrets
class FlushRequest:
    """Flush a local folder to a remote one, from now on, while nothing else is asked for.

    Attributes:
        context: As in a `WriteRequest`.
    """

    target: Target
    context: ProcessContext | None = None
    buffers: tuple[BufferInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class DigestRequest:
    """Say what is in these tensors. Buffers not in ``buffers`` are let go."""

    tensors: tuple[TensorSource, ...]
    threads: int
    buffers: tuple[BufferInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class FlushBegun:
    """What comes of it is to be seen in the folder's records."""


@dataclass(frozen=True, slots=True)
class Digests:
    """The XXH3-128 of each tensor that was asked for, in that order."""

    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class FileResult:
    """A file that is complete, and durable where that was asked for, and where its tensors are in it.

    Attributes:
        tensors: Empty, if it was adopted.
        identity: What it will be known again by; None where files are not adopted.
        adopted: It was not written: the same bytes were there.
    """

    name: str
    nbytes: int
    tensors: tuple[StoredItem, ...]
    identity: FileIdentity | None = None
    adopted: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    """The writer process has imported what it needs."""


@dataclass(frozen=True, slots=True)
class DetachRequest:
    """Let go of all buffers but these."""

    buffers: tuple[BufferInfo, ...]


@dataclass(frozen=True, slots=True)
class Detached:
    """Their memory is free, as far as this process had to do with it."""


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """The trainer may change what it asked a snapshot of."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Bytes written so far in the running request; sent about once a second."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class WriteDone:
    """The request is fulfilled."""

    files: tuple[FileResult, ...]
    seconds: float
    """Wall-clock time for all of it."""
    hash_seconds: float
    """Until all hashes were known; it writes meanwhile."""
    write_seconds: float
    """In write calls and fsync."""

    def places(self) -> dict[str, tuple[StoredItem, int]]:
        """Where each tensor is, by its name, and the size of its file."""
        return {item.name: (item, file.nbytes) for file in self.files for item in file.tensors}


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """The request failed and left no file behind; the original traceback travels as text."""

    message: str
    details: str


Request = WriteRequest | DigestRequest | SnapshotRequest | DetachRequest | FlushRequest
Answer = WriteDone | Digests | SnapshotTaken | Detached | FlushBegun | WriteFailed
