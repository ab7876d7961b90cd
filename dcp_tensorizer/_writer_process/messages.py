"""The messages between a trainer and its writer process, and the socket that carries them.

Only offsets into shared memory cross, never tensors: a request stays small, and one descriptor serves any number
of tensors. Both ends are the same installation on the same machine, so frames are plain pickles. What there is one of
for each tensor is a tuple, which pickles in a tenth of the time of a dataclass: the trainer's lock is held meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .._format.encryption import Cipher
from .._memory.shared_mappings import SharedFile

__all__ = [
    "Answer",
    "BufferInfo",
    "DetachRequest",
    "Detached",
    "DeviceTensor",
    "FileRequest",
    "FileResult",
    "Progress",
    "Ready",
    "Request",
    "SnapshotRequest",
    "SnapshotTaken",
    "TensorResult",
    "TensorSource",
    "WriteDone",
    "WriteFailed",
    "WriteRequest",
]


class TensorSource(NamedTuple):
    """A tensor to be written: C-contiguous bytes at an offset of a shared buffer, or of a shared file.

    ``buffer`` is the number of the buffer; of the request's shared files, the first is -1, the second -2.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    buffer: int
    offset: int
    nbytes: int
    kind: str = "tensor"


@dataclass(frozen=True, slots=True)
class FileRequest:
    """One tensorizer file, its tensors in file order."""

    name: str
    tensors: tuple[TensorSource, ...]


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


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """Write ``files`` below ``path`` and make them durable. Buffers not in ``buffers`` are let go."""

    path: str
    storage_options: Mapping[str, Any]
    files: tuple[FileRequest, ...]
    buffers: tuple[BufferInfo, ...]
    sync: bool
    threads: int
    buffer_bytes: int
    timeout: float
    cipher: Cipher | None = None
    shared: tuple[SharedFile, ...] = ()


class TensorResult(NamedTuple):
    """Where a tensor's bytes are in its file, their digests, and the nonce and MACs if they are encrypted."""

    offset: int
    length: int
    digests: bytes
    nonce_and_macs: bytes = b""


@dataclass(frozen=True, slots=True)
class FileResult:
    """A file that is complete, and durable where that was asked for; results in the request's order."""

    name: str
    nbytes: int
    tensors: tuple[TensorResult, ...]


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


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """The request failed and left no file behind; the original traceback travels as text."""

    message: str
    details: str


Request = WriteRequest | SnapshotRequest | DetachRequest
Answer = WriteDone | SnapshotTaken | Detached | WriteFailed
