"""Replicas of states in the memory of other hosts: how keepers copy, receive and serve them.

    source                                                  partner
    ReplicaOffer (state, size, which replica to retain) ──▶ checks free memory, and allocates the whole copy
                                                        ◀── Answer: the name of the copy, or why it is refused
    the offer again with that name, on further connections ▶
    Block, its bytes; on all connections ─────────────────▶ checks each block against its XXH3-128
                                                        ◀── Answer, on each connection after its last block
    Record, last; its bytes (the layout, the digests) ────▶ the replica is complete
                                                        ◀── Answer

After a restart, a rank reads the record of a part of a state from any keeper that holds the part, and then ranges of
the part's bytes (`Read`). Each `ReplicaAnswer` has the number of bytes that follow.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Annotated

import msgspec
import xxhash
from msgspec import Meta, Struct

from .._runtime.forks import Descriptor, anonymous_file, free_in_child
from .._runtime.memory_limit import available_memory
from .._runtime.threads import cores
from .._storage.base import RangeReader
from .._storage.local_io import read_into
from ..errors import ReadError, describe
from .protocol import StateHead, StatePart
from .wire import MAX_BYTES, Address, Wire, WireError, listen_on

if TYPE_CHECKING:
    from .keeper import Keeper

BLOCK = 1 << 20
"""Bytes of a block, the unit of copies and checks."""
RESERVE = 256 << 20
"""Bytes of memory that states in memory leave to other programs."""

NICENESS_OF_COPIES = 19
"""The niceness of threads that copy. Each of them gets 1.5% of a core that training also needs."""

TAKEN_BACK = "the trainer has taken back its staging buffer"
"""Why a copy of a state has ended early."""

_STREAMS = 4  # connections of a copy; each carries about 1 GB/s
_ALLOCATE = 256 << 20  # bytes at a time; free memory is checked again before each step
_MAX_RECORD = 1 << 30
_MAX_CONNECTIONS = 256
_WAIT_SECONDS = 20.0  # until an answer with `takes_longer`; the other end gives up after 60
# The timeout of a request to drop copies. With up to 20 s to connect (`wire`), it is less than the 60 s that a trainer
# waits for its keeper.
_DROP_SECONDS = 10.0
_ASK_SECONDS = 0.02  # the pause between two requests for a part that is not held yet

_Count = Annotated[int, Meta(ge=0, le=2**50)]
_Id = Annotated[str, Meta(max_length=64)]


def lower_priority(niceness: int) -> None:
    """Lowers the priority of the calling thread, and of the threads that it starts later."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


class ReplicaOffer(Struct, tag="offer", array_like=True):
    """Offer of a replica of a part of a state.

    On a new offer, the partner drops its replicas of the rank and run in ``head``, except that of the ``confirmed``
    state. If ``record_nbytes`` is 0, the partner only does that, and receives no replica.
    """

    head: StateHead
    nbytes: _Count = 0  # the size of the buffer
    record_nbytes: Annotated[int, Meta(ge=0, le=_MAX_RECORD)] = 0
    confirmed: _Id = ""  # the newest state that is copied from all ranks; empty without such a state
    copy: _Id = ""  # the accepted copy whose blocks this connection also carries; empty for a new offer


class Block(Struct, tag="block", array_like=True):
    """Announcement of the bytes of a block; ``digest`` is their XXH3-128."""

    number: _Count
    nbytes: Annotated[int, Meta(ge=1, le=BLOCK)]
    digest: Annotated[bytes, Meta(min_length=16, max_length=16)]
    is_last: bool  # of this connection


class Record(Struct, tag="record", array_like=True):
    """Announcement of the bytes of the record, after all blocks."""

    digest: Annotated[bytes, Meta(min_length=16, max_length=16)]


class Read(Struct, tag="read", array_like=True):
    """Request for bytes of a part from an offset on, or for the part's record."""

    id: _Id
    rank: _Count
    offset: _Count = 0
    nbytes: _Count | None = None  # None: the record


class ReplicaAnswer(Struct, tag="answer", array_like=True):
    """Answer to an offer, a connection's last block, a record or a `Read`. ``takes_longer``: another answer follows."""

    nbytes: _Count = 0  # the bytes that follow
    copy: _Id = ""  # the name of an accepted copy
    takes_longer: bool = False
    refusal: str = ""  # why the request is refused; empty otherwise
    is_claimed: bool = False  # a later run of the job has claimed this keeper
    is_full: bool = False  # this host has too little memory


class NotCopied(Exception):
    """Failure to copy a state. The attributes are those of `ReplicaAnswer`."""

    def __init__(self, why: str, *, is_claimed: bool = False, is_full: bool = False) -> None:
        super().__init__(why)
        self.is_claimed, self.is_full = is_claimed, is_full


def decoded(record: bytes | memoryview) -> StatePart:
    """Decodes the record of a part. Raises `WireError` if it is invalid."""
    try:
        part = msgspec.msgpack.decode(record, type=StatePart)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"the record cannot be decoded: {error}") from None
    ends = (len(part.inline) if extent.is_inline else part.nbytes for extent in part.extents)
    is_inside = all(
        extent.offset >= 0 and extent.nbytes >= 0 and extent.offset + extent.nbytes <= end
        for extent, end in zip(part.extents, ends, strict=True)
    )
    if not is_inside or len(part.digests) != len(part.extents) or part.nbytes < 0:
        raise WireError("the extents, digests and sizes in the record do not match")
    return part


# --- the side that holds replicas -------------------------------------------------------------------------------------


class _Incoming:
    """Copy in progress, on the receiving side."""

    def __init__(self, offer: ReplicaOffer, fd: int) -> None:
        self.offer = offer
        self.fd = fd
        self.name = secrets.token_hex(16)
        self.is_over = False
        self._missing = bytearray(b"\1") * -(-offer.nbytes // BLOCK)
        self._lock = free_in_child(threading.Lock())
        self._writers = 0

    def put(self, block: Block, data: memoryview) -> None:
        """Writes a block. Raises `WireError` if the block is damaged or was not offered, or the copy is over."""
        start = block.number * BLOCK
        if block.nbytes != min(BLOCK, self.offer.nbytes - start):
            raise WireError("the size of a block is not the offered one")
        if xxhash.xxh3_128_digest(data) != block.digest:
            raise WireError(f"block {block.number} was changed in transit")
        with self._lock:
            if self.is_over:
                raise WireError("the copy is over")
            self._writers += 1
        try:
            while data:
                count = os.pwrite(self.fd, data, start)
                data, start = data[count:], start + count
            self._missing[block.number] = 0
        finally:
            with self._lock:
                self._writers -= 1
                if self.is_over and not self._writers:
                    os.close(self.fd)

    def complete(self) -> int:
        """Ends the copy, and returns the buffer. Raises `WireError` if blocks are missing or the copy is over."""
        with self._lock:
            if self.is_over or self._writers or any(self._missing):
                raise WireError("blocks are missing, or the copy is over")
            self.is_over = True
            return self.fd

    def abandon(self) -> None:
        """Ends the copy, and frees its memory. Idempotent."""
        with self._lock:
            if not self.is_over:
                self.is_over = True
                if not self._writers:
                    os.close(self.fd)


class ReplicaServer:
    """Server that receives replicas from other hosts, and serves parts of states.

    ``host`` is the address of this host to listen on.
    """

    def __init__(self, keeper: Keeper, host: str, secret: bytes) -> None:
        self._keeper = keeper
        self._listener = listen_on(host)
        self.address = Address(host, self._listener.getsockname()[1], secret)
        self._copies: dict[str, _Incoming] = {}
        self._allocating = free_in_child(threading.Lock())  # one allocation at a time: each checks what the others left
        self._slots = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._connections: set[socket.socket] = set()
        threading.Thread(target=self._accept, name="peers", daemon=True).start()

    def close(self) -> None:
        for open_socket in (self._listener, *list(self._connections)):
            with suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)  # `close` alone does not wake a waiting thread
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.1)  # out of file descriptors
                continue
            if not self._slots.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        own: list[_Incoming] = []
        self._connections.add(connection)
        try:
            if self._listener.fileno() < 0:  # the server was closed after it accepted this connection
                return
            with closing(Wire(connection, self.address.secret, is_server=True)) as wire:
                reader = _PartReader(self._keeper)
                copy: _Incoming | None = None
                received = memoryview(b"")
                while True:
                    match wire.receive(ReplicaOffer | Block | Record | Read):
                        case ReplicaOffer() as offer:
                            lower_priority(NICENESS_OF_COPIES)  # no process waits for a copy
                            received = memoryview(bytearray(BLOCK))
                            copy, answer = self._offered(offer, own)
                            wire.send(answer)
                        case Block() as block if copy is not None:
                            data = received[: block.nbytes]
                            wire.receive_bytes(data)
                            copy.put(block, data)
                            if block.is_last:
                                wire.send(ReplicaAnswer())
                        case Record(digest):
                            wire.send(self._recorded(wire, own, digest))
                        case Read(nbytes=None) as wanted:
                            self._give_record(wire, wanted)
                        case Read() as wanted:
                            reader.give(wire, wanted)
                        case Block():
                            raise WireError("a block was sent without an offer")
        except (OSError, ValueError):
            pass  # the other end is gone, or has sent invalid data; it can connect again
        finally:
            for copy in own:
                self._copies.pop(copy.name, None)
                copy.abandon()
            self._connections.discard(connection)
            connection.close()
            self._slots.release()

    # --- receiving replicas -----------------------------------------------------------------------------------------

    def _offered(self, offer: ReplicaOffer, own: list[_Incoming]) -> tuple[_Incoming | None, ReplicaAnswer]:
        """Begins or joins a copy, or only forgets replicas. Returns the copy, if there is one, and the answer.

        ``own`` are the copies that this connection has begun.
        """
        if offer.copy:
            joined = self._copies.get(offer.copy)
            return joined, ReplicaAnswer(refusal="the partner ended the copy") if joined is None else ReplicaAnswer()
        if why := self._keeper.refusal():  # the later run may load the replicas of this keeper
            return None, ReplicaAnswer(refusal=why, is_claimed=True)
        if not offer.record_nbytes:
            for fd, _ in self._keeper.drop_replicas(offer.head, offer.confirmed):
                os.close(fd)
            return None, ReplicaAnswer()
        for other in list(self._copies.values()):
            if other.offer.head.rank == offer.head.rank:  # the source has restarted its copy
                other.abandon()
        with self._allocating:
            memory, why = self._allocated(offer)
        if memory is None:
            return None, ReplicaAnswer(refusal=why, is_full=True)
        copy = _Incoming(offer, memory)
        self._copies[copy.name] = copy
        own.append(copy)
        return copy, ReplicaAnswer(copy=copy.name)

    def _allocated(self, offer: ReplicaOffer) -> tuple[int | None, str]:
        """Returns memory for a replica, or None and the reason. Reuses the memory of an old replica of this size."""
        dropped = self._keeper.drop_replicas(offer.head, offer.confirmed)
        fitting = next((fd for fd, nbytes in dropped if nbytes == offer.nbytes), None)
        for fd, _ in dropped:
            if fd != fitting:
                os.close(fd)
        if fitting is not None:
            return fitting, ""
        try:
            return allocated(offer.nbytes, offer.record_nbytes), ""
        except (OSError, MemoryError) as error:
            return None, f"the partner host cannot allocate {offer.nbytes:,} bytes for a replica: {error}"

    def _recorded(self, wire: Wire, own: list[_Incoming], digest: bytes) -> ReplicaAnswer:
        if len(own) != 1:
            raise WireError("a record was sent without an offer, or after several offers")
        (copy,) = own
        record = memoryview(bytearray(copy.offer.record_nbytes))
        wire.receive_bytes(record)
        if xxhash.xxh3_128_digest(record) != digest:
            raise WireError("the record was changed in transit")
        part = decoded(record)
        if part.head != copy.offer.head or part.nbytes != copy.offer.nbytes:
            raise WireError("the record describes another state")
        if why := self._keeper.refusal():
            return ReplicaAnswer(refusal=why, is_claimed=True)
        fd = copy.complete()
        own.clear()
        self._copies.pop(copy.name, None)
        self._keeper.add_replica(part, fd)
        return ReplicaAnswer()

    # --- serving parts ----------------------------------------------------------------------------------------------

    def _give_record(self, wire: Wire, wanted: Read) -> None:
        while True:
            try:
                part = self._keeper.digested_part(wanted.id, wanted.rank, _WAIT_SECONDS)
            except (TimeoutError, FutureTimeout):
                wire.send(ReplicaAnswer(takes_longer=True))
                continue
            if part is None:
                wire.send(ReplicaAnswer(refusal="the keeper does not hold this part of the state"))
                return
            record = msgspec.msgpack.encode(part)
            wire.send(ReplicaAnswer(len(record)))
            wire.send_bytes(memoryview(record))
            return


class _PartReader:
    """Reader that serves ranges of parts to one connection. A part's buffer stays mapped from one range to the next.

    Bytes are encrypted directly from the mapping. For 0.5 GiB, reading the buffer as a file would take 0.1 s of CPU
    time; mapping and unmapping take half of that.
    """

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._open: tuple[str, int] | None = None
        self._memory: memoryview | None = None

    def give(self, wire: Wire, wanted: Read) -> None:
        if self._open != (wanted.id, wanted.rank):
            self._memory = None
            fd = self._keeper.buffer(wanted.id, wanted.rank)
            if fd is not None:
                with closing(Descriptor(fd)):
                    self._memory = memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
            self._open = wanted.id, wanted.rank
        if self._memory is None:
            wire.send(ReplicaAnswer(refusal="the keeper does not hold this part of the state"))
            return
        assert wanted.nbytes is not None, "a record is not in the buffer"
        stop = wanted.offset + wanted.nbytes
        if stop > self._memory.nbytes:
            wire.send(ReplicaAnswer(refusal="the range extends beyond the part"))
            return
        wire.send(ReplicaAnswer(wanted.nbytes))
        wire.send_bytes(self._memory[wanted.offset : stop])


def allocated(nbytes: int, beside: int = 0) -> int:
    """Makes a file in memory, and allocates all of it.

    Raises `OSError`, with the number of available bytes, unless `RESERVE` and ``beside`` bytes remain.
    """
    fd = anonymous_file("dcp_tensorizer_replica")
    try:
        os.ftruncate(fd, nbytes)
        for start in range(0, nbytes, _ALLOCATE):
            available = available_memory()
            if available is not None and available < nbytes - start + beside + RESERVE:
                raise OSError(f"{available:,} bytes are available, and {RESERVE:,} must remain")
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, start, min(_ALLOCATE, nbytes - start))
        if hasattr(fcntl, "F_ADD_SEALS"):
            with suppress(OSError):
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


# --- the side that copies ---------------------------------------------------------------------------------------------


class Throttle:
    """Limit of ``rate`` bytes a second for all threads together; 0: no limit."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._next = 0.0
        self._lock = free_in_child(threading.Lock())

    def wait(self, nbytes: int) -> None:
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._next)
            self._next = begin + nbytes / self._rate
        if begin > now:
            time.sleep(begin - now)


def copy_part(
    address: Address,
    part: StatePart,
    fd: int,
    confirmed: str,
    throttle: Throttle,
    is_wanted: Callable[[], bool],
    *,
    streams: int | None = None,
) -> None:
    """Copies a part of a state to a keeper on another host. Returns when that keeper has all of it.

    ``fd`` is the descriptor of the part's buffer. Once the trainer may overwrite this buffer, ``is_wanted``
    returns False. ``confirmed`` is as in a `ReplicaOffer`. ``streams`` is the number of connections; None: up to 4, one
    for each core.

    Raises `NotCopied` if the copy was refused, is no longer wanted, or has failed.
    """
    nbytes, record = part.nbytes, msgspec.msgpack.encode(part)
    count = max(1, min(streams or min(_STREAMS, cores()), -(-nbytes // BLOCK)))
    numbers = iter(range(-(-nbytes // BLOCK)))
    taking = free_in_child(threading.Lock())

    def next_block() -> int | None:
        with taking:
            return next(numbers, None)

    def send_blocks(wire: Wire) -> None:
        memory = memoryview(bytearray(BLOCK))
        number = next_block()
        if number is None:
            return
        while number is not None:
            data = memory[: min(BLOCK, nbytes - number * BLOCK)]
            throttle.wait(data.nbytes)
            read_into(fd, [data], number * BLOCK)
            if not is_wanted():
                raise NotCopied(TAKEN_BACK)
            current, number = number, next_block()
            wire.send(Block(current, data.nbytes, xxhash.xxh3_128_digest(data), is_last=number is None))
            wire.send_bytes(data)
        _answer(wire)

    def join(offer: ReplicaOffer) -> None:
        with closing(address.connect(lower_effort=True)) as wire:
            wire.send(offer)
            _answer(wire)
            send_blocks(wire)

    try:
        with closing(address.connect(lower_effort=True)) as wire, ThreadPoolExecutor(count) as pool:
            if not is_wanted():  # the offer would end the copy of a newer state
                raise NotCopied(TAKEN_BACK)
            offer = ReplicaOffer(part.head, nbytes, len(record), confirmed)
            wire.send(offer)
            joining = msgspec.structs.replace(offer, copy=_answer(wire).copy)
            others = [pool.submit(join, joining) for _ in range(count - 1)]
            try:
                send_blocks(wire)
            finally:
                errors = [error for other in others if (error := other.exception()) is not None]
            if errors:
                raise errors[0]
            if not is_wanted():  # the buffer may have been overwritten while it was read
                raise NotCopied(TAKEN_BACK)
            wire.send(Record(xxhash.xxh3_128_digest(record)))
            wire.send_bytes(memoryview(record))
            _answer(wire)
    except (OSError, EOFError) as error:
        raise NotCopied(f"the copy to the keeper at {address!r} has failed: {describe(error)}") from error


def _answer(wire: Wire) -> ReplicaAnswer:
    """Receives an answer. Raises `NotCopied` if the request is refused."""
    answer: ReplicaAnswer = wire.receive(ReplicaAnswer)
    if answer.refusal:
        raise NotCopied(answer.refusal, is_claimed=answer.is_claimed, is_full=answer.is_full)
    return answer


def drop_copies(address: Address, head: StateHead) -> None:
    """Makes a keeper on another host forget its replicas of a rank and run. Raises `OSError` on failure or refusal."""
    with closing(address.connect(seconds=_DROP_SECONDS)) as wire:
        answer: ReplicaAnswer = wire.ask(ReplicaOffer(head), ReplicaAnswer)
        if answer.refusal:
            raise OSError(answer.refusal)


# --- the side that restarts -------------------------------------------------------------------------------------------


class RemotePart(RangeReader):
    """Buffer of a part of a state, held by a keeper on another host. Several threads may read it concurrently."""

    def __init__(self, address: Address, state_id: str, rank: int) -> None:
        self._address, self._id, self._rank = address, state_id, rank
        self._idle: list[Wire] = []
        self._busy: set[Wire] = set()
        self._is_over = False
        self._lock = free_in_child(threading.Lock())
        self.nbytes = 0

    def record(self, seconds: float = 0.0) -> StatePart:
        """Reads the record of the part. If the keeper does not hold the part yet, waits for it up to ``seconds``.

        Raises `ReadError` if the record cannot be read, or describes another part.
        """
        deadline = time.monotonic() + seconds
        try:
            wire = self._idle_wire() or self._address.connect()
            try:
                wanted = Read(self._id, self._rank)
                answer: ReplicaAnswer = wire.ask(wanted, ReplicaAnswer)
                while answer.takes_longer or answer.refusal:
                    if answer.takes_longer:
                        answer = wire.receive(ReplicaAnswer)
                        continue
                    if time.monotonic() >= deadline:
                        raise OSError(
                            f"{answer.refusal} (timed out after {seconds:g} s)" if seconds else answer.refusal
                        )
                    time.sleep(_ASK_SECONDS)
                    answer = wire.ask(wanted, ReplicaAnswer)
                if answer.nbytes > _MAX_RECORD:
                    raise WireError(f"a record of {answer.nbytes:,} bytes is too large")
                content = memoryview(bytearray(answer.nbytes))
                wire.receive_bytes(content)
                part = decoded(content)
            except BaseException:
                wire.close()
                raise
        except OSError as error:
            raise ReadError(
                f"cannot read rank {self._rank}'s part of the state from the keeper at {self._address!r}: "
                f"{describe(error)}"
            ) from error
        self._return(wire)
        if (part.head.id, part.head.rank) != (self._id, self._rank):
            raise ReadError(f"the keeper at {self._address!r} sent a state that was not requested")
        self.nbytes = part.nbytes
        return part

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        self.once(offset, sum(buffer.nbytes for buffer in buffers)).read_into(buffers, offset)

    def once(self, offset: int, nbytes: int) -> RangeReader:
        """Requests a range. Its later bytes arrive while the caller uses the earlier ones."""
        wire = self._idle_wire()
        if wire is not None:  # the other end may have closed an idle connection
            with suppress(OSError):
                return self._asked(wire, offset, nbytes)
        return self._asked(self._address.connect(), offset, nbytes)

    def _asked(self, wire: Wire, offset: int, nbytes: int) -> RangeReader:
        try:
            answer: ReplicaAnswer = wire.ask(Read(self._id, self._rank, offset, nbytes), ReplicaAnswer)
            if answer.refusal:
                raise OSError(f"the keeper at {self._address!r} does not send the state: {answer.refusal}")
        except BaseException:
            wire.close()
            raise
        with self._lock:
            self._busy.add(wire)
        return _Arriving(wire, offset, nbytes, self._return)

    def _idle_wire(self) -> Wire | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _return(self, wire: Wire) -> None:
        with self._lock:
            self._busy.discard(wire)
            if not self._is_over:
                self._idle.append(wire)
                return
        wire.close()

    def release(self) -> None:
        """Closes all connections. No reads may follow."""
        with self._lock:
            self._is_over = True
            wires = [*self._idle, *self._busy]
            self._idle, self._busy = [], set()
        for wire in wires:
            wire.close()


class _Arriving(RangeReader):
    """Range of a part whose bytes are arriving. One thread reads it sequentially."""

    def __init__(self, wire: Wire, offset: int, nbytes: int, done: Callable[[Wire], None]) -> None:
        self._wire, self._offset, self._left, self._done = wire, offset, nbytes, done
        self._rest = memoryview(b"")  # the rest of the last frame, for the next buffer

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        gap = memoryview(bytearray(offset - self._offset))  # bytes that the caller skips
        try:
            for buffer in (gap, *buffers):
                self._fill(buffer.cast("B"))
                self._offset += buffer.nbytes
        except BaseException:
            self._wire.close()
            raise
        if not self._left and not self._rest:
            self._done(self._wire)

    def _fill(self, target: memoryview) -> None:
        while target:
            count = min(MAX_BYTES, self._left)
            if self._rest:
                count = min(self._rest.nbytes, target.nbytes)
                target[:count], self._rest = self._rest[:count], self._rest[count:]
            elif target.nbytes < count:
                self._rest = memoryview(bytearray(count))
                self._wire.receive_bytes(self._rest)
                self._left -= count
                continue
            else:
                self._wire.receive_bytes(target[:count])
                self._left -= count
            target = target[count:]
