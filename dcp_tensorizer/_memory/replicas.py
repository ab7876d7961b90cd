"""Replicas of states in the memory of other hosts: how keepers copy, receive and serve them.

    source                                                  partner
    ReplicaOffer (which state, how large, what to keep) ──▶ looks for memory, and allocates all of it
                                                        ◀── Accepted, or ReplicaRefused
    Join, on further connections ─────────────────────────▶
    Block, its bytes; on all connections, then Sent ──────▶ compares each block with its XXH3-128
    Record, last; its bytes (the layout, the digests) ────▶ now the replica is complete
                                                        ◀── Ok

After a restart, a rank takes the record of a part of a state from any keeper that holds the part (`TakeRecord`), and
reads ranges of its bytes (`ReadRange`).
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
from typing import Annotated, Protocol

import msgspec
import xxhash
from msgspec import Meta, Struct

from .._runtime.child import lower_priority
from .._runtime.forks import Descriptor, anonymous_file, free_in_child
from .._runtime.memory_limit import available_memory
from .._runtime.threads import cores
from .._storage.base import RangeReader
from .._storage.local_io import read_into
from ..errors import ReadError, describe
from .protocol import StateContent, StateHead
from .wire import MAX_BYTES, Address, Wire, WireError, listen_on

BLOCK = 1 << 20
"""Bytes that are copied, and checked, at once."""
RESERVE = 256 << 20
"""Bytes of memory that are left to other programs beside a replica."""

NICENESS_OF_COPIES = 19
"""The niceness of threads that copy. Each of them gets 1.5% of a core that training needs, too."""

_STREAMS = 4  # connections of a copy; each carries some 1 GB/s
_ALLOCATE = 256 << 20  # bytes at a time: between two times, look at what other programs have allocated
_MAX_RECORD = 1 << 30
_MAX_CONNECTIONS = 256
_WAIT_SECONDS = 20.0  # until a `Wait` is sent; the other end gives up after 60
_DROP_SECONDS = 10.0  # to drop copies. With the 20 s to connect, it is less than the trainer waits for its keeper
_ASK_SECONDS = 0.02  # the pause between two requests for a part that is not there yet

_Count = Annotated[int, Meta(ge=0, le=2**50)]
_Id = Annotated[str, Meta(max_length=64)]


class ReplicaOffer(Struct, tag="offer", array_like=True):
    """Take a replica of this part of a state. Forget the other replicas of that rank and run, except ``keep``."""

    head: StateHead
    nbytes: _Count  # the size of the buffer
    record_nbytes: Annotated[int, Meta(ge=0, le=_MAX_RECORD)]
    keep: _Id  # the id of the newest state that all hosts have confirmed; empty if there is none


class Join(Struct, tag="join", array_like=True):
    """This connection brings blocks of an offer."""

    copy: _Id


class Drop(Struct, tag="drop", array_like=True):
    """Forget all replicas of the rank and run of this part."""

    head: StateHead


class Block(Struct, tag="block", array_like=True):
    """The bytes of a block follow; ``digest`` is their XXH3-128."""

    number: _Count
    nbytes: Annotated[int, Meta(ge=1, le=BLOCK)]
    digest: Annotated[bytes, Meta(min_length=16, max_length=16)]


class Sent(Struct, tag="sent", array_like=True):
    """This connection brings no more blocks."""


class Record(Struct, tag="record", array_like=True):
    """The bytes of the record follow; all blocks have been sent."""

    digest: Annotated[bytes, Meta(min_length=16, max_length=16)]


class TakeRecord(Struct, tag="take", array_like=True):
    """Give me the record of a part of a state."""

    id: _Id
    rank: _Count


class ReadRange(Struct, tag="read", array_like=True):
    """Give me bytes of a part, from an offset on."""

    id: _Id
    rank: _Count
    offset: _Count
    nbytes: _Count


class Accepted(Struct, tag="accepted", array_like=True):
    """The offer is accepted; further connections join the copy by its name."""

    copy: _Id


class Following(Struct, tag="following", array_like=True):
    """So many bytes follow."""

    nbytes: _Count


class Wait(Struct, tag="wait", array_like=True):
    """The answer takes longer."""


class Ok(Struct, tag="ok", array_like=True):
    """Done."""


class ReplicaRefused(Struct, tag="refused", array_like=True):
    """The request is refused, and ``why``."""

    why: str
    is_claimed: bool = False  # a later run of the job has claimed this keeper
    is_full: bool = False  # this host has too little memory


class NotCopied(Exception):
    """A state was not copied; `ReplicaRefused` has the same attributes."""

    def __init__(self, why: str, *, is_claimed: bool = False, is_full: bool = False) -> None:
        super().__init__(why)
        self.is_claimed, self.is_full = is_claimed, is_full


def encoded(content: StateContent) -> bytes:
    """The record of a part: everything except its buffer."""
    return msgspec.msgpack.encode(content)


def decoded(record: bytes | memoryview) -> StateContent:
    """The part that a record describes; raises `WireError` if it is invalid."""
    try:
        content = msgspec.msgpack.decode(record, type=StateContent)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"the record cannot be decoded: {error}") from None
    state = content.state
    ends = (len(state.inline) if extent.is_inline else state.nbytes for extent in state.extents)
    is_inside = all(
        extent.offset >= 0 and extent.nbytes >= 0 and extent.offset + extent.nbytes <= end
        for extent, end in zip(state.extents, ends, strict=True)
    )
    if not is_inside or len(content.digests) != len(state.extents) or state.nbytes < 0:
        raise WireError("the record describes more bytes than there are")
    return content


# --- the side that has replicas ---------------------------------------------------------------------------------------


class HeldParts(Protocol):
    """The parts of states that a `Keeper` holds: its trainer's own, and replicas."""

    def refusal(self) -> str:
        """Returns why this keeper takes no more copies; empty if it does."""

    def add_replica(self, content: StateContent, fd: int) -> None:
        """Adds a complete replica with its buffer."""

    def drop_replicas(self, head: StateHead, keep: str) -> list[tuple[int, int]]:
        """Forgets the replicas of a rank and run, except ``keep``. The caller owns the returned buffers, with sizes."""

    def content(self, state_id: str, rank: int, seconds: float) -> StateContent | None:
        """A part; None if it is not held. Raises `TimeoutError` if there are no digests in time."""

    def buffer(self, state_id: str, rank: int) -> int | None:
        """A descriptor of a part's buffer, which the caller closes; None if the part is not held."""


class _Incoming:
    """A copy that is being received."""

    def __init__(self, offer: ReplicaOffer, fd: int) -> None:
        self.offer = offer
        self.fd = fd
        self.name = secrets.token_hex(16)
        self.is_over = False
        self._missing = bytearray(b"\1") * -(-offer.nbytes // BLOCK)
        self._lock = free_in_child(threading.Lock())
        self._writers = 0

    def put(self, block: Block, data: memoryview) -> None:
        """Writes a block; raises `WireError` if it is damaged, or was not offered."""
        start = block.number * BLOCK
        if block.nbytes != min(BLOCK, self.offer.nbytes - start):
            raise WireError("a block of another size than was offered")
        if xxhash.xxh3_128_digest(data) != block.digest:
            raise WireError(f"block {block.number} is not what was sent")
        with self._lock:
            if self.is_over:
                raise WireError("the copy is over")
            self._writers += 1
        try:
            _write(self.fd, data, start)
            self._missing[block.number] = 0
        finally:
            with self._lock:
                self._writers -= 1
                if self.is_over and not self._writers:
                    os.close(self.fd)

    def complete(self) -> int:
        """Ends the copy, and returns the buffer; raises `WireError` if a block is missing."""
        with self._lock:
            if self.is_over or self._writers or any(self._missing):
                raise WireError("blocks are missing")
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
    """Receives replicas of states of other hosts, and serves parts of states. Clients must know the run's secret.

    ``host`` is the address of this host to listen on. ``address`` is that of the server.
    """

    def __init__(self, parts: HeldParts, host: str, secret: bytes) -> None:
        self._parts = parts
        self._listener = listen_on(host)
        self.address = Address(host, self._listener.getsockname()[1], secret)
        self._copies: dict[str, _Incoming] = {}
        self._allocating = free_in_child(threading.Lock())  # one by one, so that each sees what the others have taken
        self._room = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._connections: set[socket.socket] = set()
        threading.Thread(target=self._accept, name="peers", daemon=True).start()

    def close(self) -> None:
        """Accepts no more connections, and ends those that there are."""
        for open_socket in (self._listener, *list(self._connections)):
            with suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)  # closing alone would not wake the thread that waits for it
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.1)  # there are no descriptors left
                continue
            if not self._room.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        own: list[_Incoming] = []
        self._connections.add(connection)
        try:
            if self._listener.fileno() < 0:  # closed since it was accepted
                return
            with closing(Wire(connection, self.address.secret, is_server=True)) as wire:
                reader = _PartReader(self._parts)
                while True:
                    match wire.receive(ReplicaOffer | Join | Record | Drop | TakeRecord | ReadRange):
                        case ReplicaOffer() as offer:
                            self._offered(wire, offer, own)
                        case Join(name):
                            copy = self._copies.get(name)
                            wire.send(ReplicaRefused("no such copy") if copy is None else Ok())
                            if copy is not None:
                                _receive_blocks(wire, copy)
                                wire.send(Ok())
                        case Record(digest):
                            wire.send(self._recorded(wire, own, digest))
                        case Drop(head):
                            wire.send(self._dropped(head))
                        case TakeRecord(state_id, rank):
                            self._give_record(wire, state_id, rank)
                        case ReadRange() as wanted:
                            reader.give(wire, wanted)
        except (OSError, ValueError):
            pass  # the other end is gone, or has sent something invalid; it can connect again
        finally:
            for copy in own:
                self._copies.pop(copy.name, None)
                copy.abandon()
            self._connections.discard(connection)
            connection.close()
            self._room.release()

    # --- taking replicas --------------------------------------------------------------------------------------------

    def _offered(self, wire: Wire, offer: ReplicaOffer, own: list[_Incoming]) -> None:
        if why := self._parts.refusal():
            wire.send(ReplicaRefused(why, is_claimed=True))
            return
        for other in list(self._copies.values()):
            if other.offer.head.rank == offer.head.rank:  # the source begins again
                other.abandon()
        with self._allocating:
            fd, why = self._allocated(offer)
        if fd is None:
            wire.send(ReplicaRefused(why, is_full=True))
            return
        copy = _Incoming(offer, fd)
        self._copies[copy.name] = copy
        own.append(copy)
        wire.send(Accepted(copy.name))
        _receive_blocks(wire, copy)

    def _allocated(self, offer: ReplicaOffer) -> tuple[int | None, str]:
        """Returns memory for a replica, or None and why there is none. Memory of an old replica is used again."""
        dropped = self._parts.drop_replicas(offer.head, offer.keep)
        fitting = next((fd for fd, nbytes in dropped if nbytes == offer.nbytes), None)
        for fd, _ in dropped:
            if fd != fitting:
                os.close(fd)
        if fitting is not None:
            return fitting, ""
        try:
            return allocated(offer.nbytes, offer.record_nbytes), ""
        except (OSError, MemoryError) as error:
            return None, f"there is no memory for a replica of {offer.nbytes:,} bytes: {error}"

    def _recorded(self, wire: Wire, own: list[_Incoming], digest: bytes) -> Struct:
        if len(own) != 1:
            raise WireError("a record without an offer")
        (copy,) = own
        record = memoryview(bytearray(copy.offer.record_nbytes))
        wire.receive_bytes(record)
        if xxhash.xxh3_128_digest(record) != digest:
            raise WireError("the record is not what was sent")
        content = decoded(record)
        if content.state.head != copy.offer.head or content.state.nbytes != copy.offer.nbytes:
            raise WireError("the record of another state")
        if why := self._parts.refusal():
            return ReplicaRefused(why, is_claimed=True)
        fd = copy.complete()
        own.clear()
        self._copies.pop(copy.name, None)
        self._parts.add_replica(content, fd)
        return Ok()

    def _dropped(self, head: StateHead) -> Struct:
        if why := self._parts.refusal():  # the later run may load them
            return ReplicaRefused(why, is_claimed=True)
        for fd, _ in self._parts.drop_replicas(head, keep=""):
            os.close(fd)
        return Ok()

    # --- giving parts -----------------------------------------------------------------------------------------------

    def _give_record(self, wire: Wire, state_id: str, rank: int) -> None:
        while True:
            try:
                content = self._parts.content(state_id, rank, _WAIT_SECONDS)
            except (TimeoutError, FutureTimeout):
                wire.send(Wait())
                continue
            if content is None:
                wire.send(ReplicaRefused("it is not held"))
                return
            record = encoded(content)
            wire.send(Following(len(record)))
            wire.send_bytes(memoryview(record))
            return


def _receive_blocks(wire: Wire, copy: _Incoming) -> None:
    lower_priority(NICENESS_OF_COPIES)  # nothing waits for a copy, and its connections carry nothing else
    room = memoryview(bytearray(BLOCK))
    while not isinstance(block := wire.receive(Block | Sent), Sent):
        data = room[: block.nbytes]
        wire.receive_bytes(data)
        copy.put(block, data)


class _PartReader:
    """Serves ranges of parts to one connection. The buffer of a part stays mapped from one range to the next.

    Bytes are encrypted straight from the mapping. For 0.5 GiB, reading the buffer as a file would take 0.1 s of CPU
    time; to map and unmap it takes half of that.
    """

    def __init__(self, parts: HeldParts) -> None:
        self._parts = parts
        self._open: tuple[str, int] | None = None
        self._memory: memoryview | None = None

    def give(self, wire: Wire, wanted: ReadRange) -> None:
        if self._open != (wanted.id, wanted.rank):
            self._memory = None
            fd = self._parts.buffer(wanted.id, wanted.rank)
            if fd is not None:
                with closing(Descriptor(fd)):
                    self._memory = memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
            self._open = wanted.id, wanted.rank
        if self._memory is None:
            wire.send(ReplicaRefused("it is not held"))
            return
        stop = wanted.offset + wanted.nbytes
        if stop > self._memory.nbytes:
            wire.send(ReplicaRefused("it has fewer bytes"))
            return
        wire.send(Following(wanted.nbytes))
        wire.send_bytes(self._memory[wanted.offset : stop])


def allocated(nbytes: int, beside: int = 0) -> int:
    """Makes a file in memory, and allocates all of it.

    Raises `OSError`, which says how much is available, unless `RESERVE` and ``beside`` bytes are left.
    """
    fd = anonymous_file("dcp_tensorizer_replica")
    try:
        os.ftruncate(fd, nbytes)
        for start in range(0, nbytes, _ALLOCATE):
            available = available_memory()
            if available is not None and available < nbytes - start + beside + RESERVE:
                raise OSError(f"{available:,} bytes are available, and {RESERVE:,} have to be left")
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, start, min(_ALLOCATE, nbytes - start))
        if hasattr(fcntl, "F_ADD_SEALS"):
            with suppress(OSError):
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _write(fd: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


# --- the side that copies ---------------------------------------------------------------------------------------------


class Throttle:
    """Limits all threads together to ``rate`` bytes a second; 0: no limit."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._next = 0.0
        self._lock = free_in_child(threading.Lock())

    def wait(self, nbytes: int) -> None:
        """Waits until these bytes may go."""
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
    content: StateContent,
    fd: int,
    keep: str,
    throttle: Throttle,
    is_wanted: Callable[[], bool],
    *,
    streams: int | None = None,
) -> None:
    """Copies a part of a state to a keeper on another host, and returns when that keeper has all of it.

    ``fd`` is the descriptor of the part's buffer. Once ``is_wanted`` returns False, the buffer may be overwritten.
    ``keep`` is as in a `ReplicaOffer`. ``streams`` is the number of connections; None: as many as suit this machine.
    Raises `NotCopied` if the copy was refused or is no longer wanted, or the other end is gone.
    """
    nbytes, record = content.state.nbytes, encoded(content)
    count = max(1, min(streams or min(_STREAMS, cores()), -(-nbytes // BLOCK)))
    numbers = iter(range(-(-nbytes // BLOCK)))
    taking = free_in_child(threading.Lock())

    def send_blocks(wire: Wire) -> None:
        room = memoryview(bytearray(BLOCK))
        while True:
            with taking:
                number = next(numbers, None)
            if number is None:
                wire.send(Sent())
                return
            data = room[: min(BLOCK, nbytes - number * BLOCK)]
            throttle.wait(data.nbytes)
            read_into(fd, [data], number * BLOCK)
            if not is_wanted():
                raise NotCopied("its memory was needed")
            wire.send(Block(number, data.nbytes, xxhash.xxh3_128_digest(data)))
            wire.send_bytes(data)

    def join(name: str) -> None:
        with closing(address.connect(lower_effort=True)) as wire:
            _checked(wire.ask(Join(name), Ok | ReplicaRefused))
            send_blocks(wire)
            wire.receive(Ok)

    try:
        with closing(address.connect(lower_effort=True)) as wire, ThreadPoolExecutor(count) as pool:
            if not is_wanted():  # the offer would end the copy of a newer state
                raise NotCopied("its memory was needed")
            offer = ReplicaOffer(content.state.head, nbytes, len(record), keep)
            accepted = _checked(wire.ask(offer, Accepted | ReplicaRefused))
            assert isinstance(accepted, Accepted)
            others = [pool.submit(join, accepted.copy) for _ in range(count - 1)]
            try:
                send_blocks(wire)
            finally:
                errors = [error for other in others if (error := other.exception()) is not None]
            if errors:
                raise errors[0]
            if not is_wanted():  # the buffer may have been overwritten while it was read
                raise NotCopied("its memory was needed")
            wire.send(Record(xxhash.xxh3_128_digest(record)))
            wire.send_bytes(memoryview(record))
            _checked(wire.receive(Ok | ReplicaRefused))
    except (OSError, EOFError) as error:
        raise NotCopied(f"the keeper at {address!r} cannot be reached, or has ended: {describe(error)}") from error


def drop_copies(address: Address, head: StateHead) -> None:
    """Makes a keeper on another host forget its replicas of a rank and run. Raises `OSError`, also if it refuses."""
    with closing(address.connect(seconds=_DROP_SECONDS)) as wire:
        if isinstance(answer := wire.ask(Drop(head), Ok | ReplicaRefused), ReplicaRefused):
            raise OSError(answer.why)


def _checked(answer: Struct) -> Struct:
    if isinstance(answer, ReplicaRefused):
        raise NotCopied(answer.why, is_claimed=answer.is_claimed, is_full=answer.is_full)
    return answer


# --- the side that restarts -------------------------------------------------------------------------------------------


class RemotePart(RangeReader):
    """The buffer of a part of a state, held by a keeper on another host. Several threads may read it at once."""

    def __init__(self, address: Address, state_id: str, rank: int) -> None:
        self._address, self._id, self._rank = address, state_id, rank
        self._idle: list[Wire] = []
        self._bringing: set[Wire] = set()
        self._is_over = False
        self._lock = free_in_child(threading.Lock())
        self.nbytes = 0

    def record(self, seconds: float = 0.0) -> StateContent:
        """Reads the record of the part; raises `ReadError` if the part is not there within some seconds."""
        deadline = time.monotonic() + seconds
        try:
            wire = self._taken() or self._address.connect()
            try:
                while isinstance(answer := self._record_by(wire), ReplicaRefused):
                    if time.monotonic() >= deadline:
                        raise OSError(f"{answer.why} (timed out after {seconds:g} s)" if seconds else answer.why)
                    time.sleep(_ASK_SECONDS)
                if answer.nbytes > _MAX_RECORD:
                    raise WireError("a record that is too large")
                content = memoryview(bytearray(answer.nbytes))
                wire.receive_bytes(content)
                part = decoded(content)
            except BaseException:
                wire.close()
                raise
        except OSError as error:
            raise ReadError(f"the keeper at {self._address!r} does not give the state: {describe(error)}") from error
        self._give_back(wire)
        if (part.state.head.id, part.state.head.rank) != (self._id, self._rank):
            raise ReadError(f"the keeper at {self._address!r} sent a different state than requested")
        self.nbytes = part.state.nbytes
        return part

    def _record_by(self, wire: Wire) -> Following | ReplicaRefused:
        """Asks for the record, and waits for the answer."""
        wire.send(TakeRecord(self._id, self._rank))
        while isinstance(answer := wire.receive(Following | ReplicaRefused | Wait), Wait):
            pass
        assert isinstance(answer, Following | ReplicaRefused)
        return answer

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        self.once(offset, sum(buffer.nbytes for buffer in buffers)).read_into(buffers, offset)

    def once(self, offset: int, nbytes: int) -> RangeReader:
        """Asks for a range. Its bytes arrive while the caller uses those before them."""
        wire = self._taken()
        if wire is not None:  # the other end may have closed an idle connection
            with suppress(OSError):
                return self._asked(wire, offset, nbytes)
        return self._asked(self._address.connect(), offset, nbytes)

    def _asked(self, wire: Wire, offset: int, nbytes: int) -> RangeReader:
        try:
            answer = wire.ask(ReadRange(self._id, self._rank, offset, nbytes), Following | ReplicaRefused)
            if isinstance(answer, ReplicaRefused):
                raise OSError(f"the keeper at {self._address!r}: {answer.why}")
        except BaseException:
            wire.close()
            raise
        with self._lock:
            self._bringing.add(wire)
        return _Arriving(wire, offset, nbytes, self._give_back)

    def _taken(self) -> Wire | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _give_back(self, wire: Wire) -> None:
        with self._lock:
            self._bringing.discard(wire)
            if not self._is_over:
                self._idle.append(wire)
                return
        wire.close()

    def release(self) -> None:
        """Closes its connections for good."""
        with self._lock:
            self._is_over = True
            wires = [*self._idle, *self._bringing]
            self._idle, self._bringing = [], set()
        for wire in wires:
            wire.close()


class _Arriving(RangeReader):
    """A range of a part whose bytes are arriving. One thread reads it from front to back."""

    def __init__(self, wire: Wire, offset: int, nbytes: int, give_back: Callable[[Wire], None]) -> None:
        self._wire, self._offset, self._left, self._give_back = wire, offset, nbytes, give_back
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
            self._give_back(self._wire)

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
