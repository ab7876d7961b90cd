"""The messages between a trainer and its writer process.

Only offsets into shared memory cross, never tensors: a request stays small, and one descriptor serves any number
of tensors. Records that exist once for each tensor are tuples. They pickle in a tenth of the time of a dataclass, and
the trainer's interpreter lock is held meanwhile.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from .._format.names import StoredItem
from .._runtime.forks import identity, in_child
from .._runtime.process_context import ProcessContext
from .._runtime.threads import Patience
from .._staging.shared_mappings import SharedFile
from .._storage.base import FileIdentity
from .write_options import WriteOptions

if TYPE_CHECKING:
    from .._tiers.target import FlushTarget


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


class EarlierFile(NamedTuple):
    """The location of a file of the same bytes, of an earlier save."""

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
    homes: tuple[EarlierFile, ...] = ()
    nbytes: int = 0


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
    """Flush a local folder to a remote one, from now on, while nothing else is asked for."""

    target: FlushTarget
    context: ProcessContext | None = None
    buffers: tuple[BufferInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class DigestRequest:
    """Say what is in these tensors. Buffers not in ``buffers`` are let go."""

    tensors: tuple[TensorSource, ...]
    thread_count: int
    buffers: tuple[BufferInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class FlushBegun:
    """The flush has begun; its results are to be seen in the folder's records."""


@dataclass(frozen=True, slots=True)
class DigestResult:
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
class WriteProgress:
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
        """The location of each tensor by its name, and the size of its file."""
        return {item.name: (item, file.nbytes) for file in self.files for item in file.tensors}


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """The request failed and left no file behind; the original traceback travels as text."""

    message: str
    details: str


Request = WriteRequest | DigestRequest | SnapshotRequest | DetachRequest | FlushRequest
Answer = WriteDone | DigestResult | SnapshotTaken | Detached | FlushBegun | WriteFailed


# --- the channel: messages and descriptors over a socket --------------------------------------------------------------
#
# Both ends are the same installation on the same machine, so messages travel as plain pickles.

LOOK_SECONDS = 1.0
"""Between two looks at whether the other end is still there."""

_HEADER = struct.Struct("<QI")  # length of the pickle, number of descriptors


class Channel:
    """Whole messages, with descriptors, over a connected Unix stream socket.

    A forked child has no part in the conversation: its copy is closed.

    Raises:
        EOFError: the other end is gone, or this one has been closed.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._file = identity(sock.fileno())
        in_child(self, Channel._close_here)

    @property
    def is_ours(self) -> bool:
        """Returns whether this end is open, and the number still stands for the socket: see `Descriptor`."""
        if self._sock.fileno() >= 0 and identity(self._sock.fileno()) != self._file:
            self._sock.detach()  # otherwise it would close a foreign file in the end
        return self._sock.fileno() >= 0

    def fileno(self) -> int:
        """The descriptor to wait for; raises `EOFError`."""
        if not self.is_ours:
            raise EOFError("this end of the channel is closed")
        return self._sock.fileno()

    def send(self, message: object, fds: Sequence[int] = (), timeout: float | None = None) -> None:
        """Sends a message; raises `TimeoutError` if the other end does not take it in time."""
        self.send_pickled(pickled(message), fds, timeout)

    def send_pickled(self, body: bytes, fds: Sequence[int] = (), timeout: float | None = None) -> None:
        """Sends what `pickled` has made of a message."""
        header = _HEADER.pack(len(body), len(fds))
        self.fileno()
        self._sock.settimeout(timeout)
        try:
            # Descriptors ride on the first byte of the header: SCM_RIGHTS needs at least one byte of data.
            if fds:
                socket.send_fds(self._sock, [header[:1]], list(fds))
                self._sock.sendall(header[1:])
            else:
                self._sock.sendall(header)
            self._sock.sendall(body)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EOFError("the other end of the channel is gone") from error
        finally:
            self._sock.settimeout(None)

    def wait_readable(self, patience: Patience, check: Callable[[], object] = lambda: None) -> None:
        """Waits until there is something to receive.

        Args:
            patience: For how long.
            check: Called now and then. What it raises ends the wait.

        Raises:
            TimeoutError: there is nothing for too long.
        """
        while True:
            poll = select.poll()
            poll.register(self.fileno(), select.POLLIN)
            if poll.poll(patience.within(LOOK_SECONDS) * 1000):
                return
            check()
            if patience.is_over():
                raise TimeoutError

    def receive(self, wait: Callable[[], object] = lambda: None) -> tuple[Any, list[int]]:
        """Receives a message.

        Args:
            wait: Called before each read from the socket: the other end may stop in the middle of a message.
        """
        self.fileno()
        try:
            wait()
            first, fds, _flags, _address = socket.recv_fds(self._sock, 1, 16)
            if not first:
                raise EOFError("the other end of the channel is gone")
            with ExitStack() as undo:
                for fd in fds:
                    undo.callback(os.close, fd)
                length, count = _HEADER.unpack(first + self._read(_HEADER.size - 1, wait))
                body = self._read(length, wait)
                if count != len(fds):
                    raise OSError(
                        f"{count} descriptors were sent and {len(fds)} arrived: the descriptor limit is reached"
                    )
                message = pickle.loads(body)  # which fails if it has what only the sender knows
                undo.pop_all()
            return message, list(fds)
        except ConnectionResetError as error:
            raise EOFError("the other end of the channel is gone") from error

    def _read(self, count: int, wait: Callable[[], object]) -> bytearray:
        buffer = bytearray(count)
        view = memoryview(buffer)
        while view:
            wait()
            received = self._sock.recv_into(view)
            if not received:
                raise EOFError("the other end of the channel closed in the middle of a message")
            view = view[received:]
        return buffer

    def shut_down(self) -> None:
        """Shuts the socket down for both ends, and for a thread that waits in `receive`."""
        if self.is_ours:
            with suppress(OSError):
                # Closing alone would not tell the other end, while a forked child holds a copy of the descriptor.
                self._sock.shutdown(socket.SHUT_RDWR)

    def hang_up(self, timeout: float) -> None:
        """Sends no more, and waits until the other end has read all and closed, or the time is over."""
        if self.is_ours:
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)
                poll = select.poll()
                poll.register(self._sock, 0)  # for POLLHUP, which comes unasked: an answer may be there to read
                poll.poll(timeout * 1000)

    def close(self) -> None:
        self.shut_down()
        self._close_here()

    def _close_here(self) -> None:
        """Closes this copy of the socket; other copies stay open."""
        if self.is_ours:
            self._sock.close()


def pickled(message: object) -> bytes:
    """A message as it travels. Raises whatever its objects raise."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
