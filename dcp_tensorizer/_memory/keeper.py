"""The keeper: a process beside each trainer, which outlives the trainer and holds its newest states in memory.

Of its trainer's states, the keeper holds the descriptors of the staging buffers, not copies. It neither reads nor
writes storage.

The keeper also holds the digests of the states, with which a successor verifies the loaded bytes. It receives the
digests that the writer process has computed for a save without encryption, and computes all others: those of states
that no save writes, of items that other ranks write, and of states that are not written yet when the keeper copies them
or the trainer dies.

While the trainer lives, no process waits for digests or copies. So the threads that make them have low priorities, and
so does the session of a keeper that copies: if training and the keeper need the same core, training gets ten times as
much of its time as the keeper. A successor does wait, so the session has the usual priority once the trainer is gone.
The keeper of a torchft transport always has the usual priority, because torchft's other replicas wait for its states.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from .._runtime.channel import Channel, Done, Failed, Ready
from .._runtime.child import at_end_of, begin
from .._runtime.forks import free_in_child
from .._storage.local_io import read_into
from .._tensor_file.digests import Digester
from .._tensor_file.names import block_size
from ..errors import WriteError, describe
from .protocol import (
    Answer,
    ClaimRequest,
    Copy,
    CopyStatus,
    Extent,
    Forget,
    Found,
    GetPart,
    OpenToPeers,
    Plain,
    Request,
    StateHead,
    StatePart,
    WrittenDigests,
)
from .replicas import (
    NICENESS_OF_COPIES,
    TAKEN_BACK,
    NotCopied,
    ReplicaServer,
    Throttle,
    copy_part,
    drop_copies,
    lower_priority,
)
from .runtime_directory import is_own_peer, listen, remove, touch
from .wire import Address

_NICENESS = 10  # of the thread for digests, and of a copying keeper's session: they yield to training and to saves
_SLICE = 1 << 20  # small enough to be hashed while it is in the processor's cache
_TOUCH_SECONDS = 6 * 3600.0  # systemd removes files from /tmp after 10 days; a connection does not update their times
_SESSION_SECONDS = 0.05  # between two attempts to set the session's priority
_NONE: Mapping[tuple[int, int], bytes] = MappingProxyType({})
_DIGEST_SECONDS = 600.0  # to compute a part's digests, even at low priority beside a job that needs all cores


class _HeldPart:
    """A rank's part of a state, with its buffer and its digests.

    To compute digests, the buffer is read as a file. If it were mapped, training would wait for the unmapping: 25 ms
    for each GiB.
    """

    def __init__(self, part: StatePart, fd: int, *, is_replica: bool = False) -> None:
        if os.fstat(fd).st_size < part.nbytes:
            raise ValueError(f"the buffer is smaller than the announced {part.nbytes:,} bytes")
        self.part = part
        self.fd = fd
        self.is_replica = is_replica
        self.is_forgotten = self.is_digested = False
        self.digests: Future[tuple[bytes, ...]] = Future()

    def take_digests(self, known: Mapping[tuple[int, int], bytes] = _NONE) -> None:
        """Computes the digests that are not ``known``. Stops if the part is forgotten."""
        read = memoryview(bytearray(_SLICE))
        try:
            digests = tuple(self._digests(extent, read, known) for extent in self.part.extents)
        except (OSError, EOFError, CancelledError):
            self.digests.cancel()
            return
        with suppress(InvalidStateError):  # the part has just been forgotten
            self.digests.set_result(digests)

    def _digests(self, extent: Extent, read: memoryview, known: Mapping[tuple[int, int], bytes]) -> bytes:
        if not extent.is_inline and (digests := known.get((extent.offset, extent.nbytes))):
            return digests
        digester = Digester(block_size(extent.nbytes))
        stop = extent.offset + extent.nbytes
        if extent.is_inline:
            digester.update(memoryview(self.part.inline)[extent.offset : stop])
            return digester.digests()
        for start in range(extent.offset, stop, _SLICE):
            if self.is_forgotten:
                raise CancelledError
            part = read[: min(_SLICE, stop - start)]
            read_into(self.fd, [part], start)
            digester.update(part)
        return digester.digests()


class Keeper:
    """Holder of states, which answers the trainer, its successors, and other hosts.

    Once the trainer is gone, the keeper waits ``seconds`` for a successor. ``set_priority`` sets the niceness of the
    keeper's session: to 10 when the keeper is opened to other hosts, unless ``seconds`` is 0, and to 0 when the trainer
    is gone.
    """

    def __init__(
        self, job: str, trainer: int, seconds: float, set_priority: Callable[[int], object] = lambda niceness: None
    ) -> None:
        self._job = job
        self._trainer = trainer
        self._seconds = seconds
        self._set_priority = set_priority
        self._held: dict[tuple[str, int], _HeldPart] = {}  # by id and rank: the trainer's own parts, and replicas
        self._claimed_by = ""  # the run that has claimed this keeper last
        self._server: ReplicaServer | None = None
        self._copy = CopyStatus()
        self._copying: _HeldPart | None = None  # the part of the current or last copy
        self._copied: tuple[Address, StateHead] | None = None  # the partner, and the state of the last copy
        self._claims: dict[object, str] = {}  # the runs that claim this keeper, by their connections
        self.is_orphaned = self._is_over = False
        self._deadline: float | None = None
        self._changed = free_in_child(threading.Condition())
        # A torchft transport passes 0 seconds: other hosts wait for the digests while the trainer lives.
        lower = functools.partial(lower_priority, _NICENESS) if seconds else None
        self._digesting = ThreadPoolExecutor(1, "digest", initializer=lower)

    def serve(self, channel: Channel, *, is_trainer: bool = False) -> None:
        try:
            with suppress(OSError):
                channel.serve(functools.partial(self._answer, channel=channel, is_trainer=is_trainer))
        finally:
            with self._changed:
                if self._claims.pop(channel, None) is not None:
                    self._restart_timeout()
            if is_trainer:
                self.orphan()
            channel.close()

    def orphan(self) -> None:
        """Records that the trainer is gone, or has closed its connection."""
        with self._changed:
            if not self.is_orphaned:
                self.is_orphaned = True
                self._set_priority(0)
                self._restart_timeout()
                for held in reversed(list(self._held.values())):  # the newest state first: a successor loads it
                    self._digest(held)

    def wait_for_end(self, path: Path) -> None:
        """Waits until a message ends the keeper, or no successor has come in time. Updates the socket's times."""
        with self._changed:
            while not self._is_over:
                left = _TOUCH_SECONDS if self._deadline is None else self._deadline - time.monotonic()
                if left <= 0:
                    return
                if not self._changed.wait(min(left, _TOUCH_SECONDS)):
                    touch(path)

    def _restart_timeout(self) -> None:
        """Restarts the timeout for successors.

        While the trainer lives, or a successor has claimed the keeper, there is no timeout.
        """
        if self.is_orphaned:
            self._deadline = None if self._claims else time.monotonic() + self._seconds
            self._changed.notify_all()

    def _answer(
        self, request: Request, fds: list[int], channel: Channel, *, is_trainer: bool
    ) -> tuple[Answer, list[int]]:
        match request:
            case StatePart():
                return self._hold(request, fds[0]), []
            case WrittenDigests(number, known):
                with self._changed:
                    if (held := self._own(number)) is not None:
                        self._digest(held, known)
                return Done(), []
            case Forget(ids, but_copied):
                return self._forget(ids, is_trainer=is_trainer, but_copied=but_copied), []
            case OpenToPeers():
                return self._open_to_peers(request), []
            case Copy():
                return self._begin_copy(request), []
            case Plain.COPY_STATUS:
                return self._copy, []
            case Plain.DROP_COPIES:
                return self._drop_copies(), []
            case Plain.LIST:
                with self._changed:
                    heads = tuple(held.part.head for held in self._held.values())
                    address = None if self._server is None else self._server.address
                    return Found(self._job, self._trainer, heads, address), []
            case ClaimRequest(job):
                return self._claim(job, channel), []
            case GetPart(state_id, rank):
                return self._give_part(state_id, rank)
            case Plain.END:
                with self._changed:
                    self._is_over = True
                    self._changed.notify_all()
                return Done(), []

    def _hold(self, part: StatePart, fd: int) -> Answer:
        try:
            held = _HeldPart(part, fd)
        except (OSError, ValueError) as error:
            os.close(fd)
            return Failed(f"the staging buffer cannot be read: {error}")
        with self._changed:
            self._held[part.head.id, part.head.rank] = held
            if self.is_orphaned or not part.digests_follow:
                self._digest(held)
        return Done()

    def _digest(self, held: _HeldPart, known: Mapping[tuple[int, int], bytes] = _NONE) -> None:
        if not held.is_digested:
            held.is_digested = True
            self._digesting.submit(held.take_digests, known)

    def _own(self, state_id: str) -> _HeldPart | None:
        """Returns the trainer's own part of a state, or None."""
        of_state = (held for (other, _), held in self._held.items() if other == state_id)
        return next((held for held in of_state if not held.is_replica), None)

    def _forget(self, ids: Sequence[str], *, is_trainer: bool, but_copied: bool) -> tuple[str, ...]:
        """Forgets states: for a trainer only its own parts, for a successor all parts. Returns the ids of these states.

        With ``but_copied``, the state whose copy is in progress, or was made last, stays: if another host is lost, this
        rank may need its own part of that state.
        """
        with self._changed:
            copied = "" if self._copy.problem else self._copy.id
            over = [state_id for state_id in ids if not (but_copied and state_id == copied)]
            if copied in over and not self._copy.is_running:
                self._copy = CopyStatus(copied, problem=TAKEN_BACK, is_given_up=True)
            keys = [key for key, held in self._held.items() if key[0] in over and not (is_trainer and held.is_replica)]
            forgotten = [self._held.pop(key) for key in keys]
        for held in forgotten:
            held.is_forgotten = True
            held.digests.cancel()
            self._digesting.submit(os.close, held.fd)  # once no thread reads it for its digests
        return tuple(over)

    def _claim(self, job: str, channel: Channel) -> Answer:
        with self._changed:
            if not self.is_orphaned or any(other != job for other in self._claims.values()):
                return Failed("its trainer lives, or another run has claimed it")
            self._claims[channel] = self._claimed_by = job
            self._restart_timeout()
            return Done()

    def _give_part(self, state_id: str, rank: int) -> tuple[Answer, list[int]]:
        try:
            part = self.digested_part(state_id, rank, _DIGEST_SECONDS)
        except TimeoutError:
            return Failed(f"its digests were not computed within {_DIGEST_SECONDS:g} s"), []
        with self._changed:
            held = self._held.get((state_id, rank))
            if part is None or held is None or held.is_forgotten:
                return Failed("it is no longer held"), []
            return part, [held.fd]

    # --- replicas ---------------------------------------------------------------------------------------------------

    def _open_to_peers(self, request: OpenToPeers) -> Answer:
        if request.anew and self._server is not None:
            self._server.close()
            self._server = None
        if self._seconds:  # 0 for a torchft transport: other hosts wait for the states while the trainer lives
            self._set_priority(_NICENESS)
        try:
            self._server = self._server or ReplicaServer(self, request.host, request.secret)
        except (OSError, WriteError) as error:
            return Failed(f"it cannot be opened to other hosts at {request.host}: {error}")
        return self._server.address

    def _begin_copy(self, request: Copy) -> Answer:
        with self._changed:
            held, before = self._own(request.id), self._copying
            if held is None or (self._copy.is_running and not (before is not None and before.is_forgotten)):
                return Failed("the state is not held" if held is None else "another state is being copied")
            self._digest(held)  # now, because the save that computes the digests may take a long time
            fd = os.dup(held.fd)
            self._copied = request.to, held.part.head
            self._copy, self._copying = CopyStatus(request.id, is_running=True), held
        threading.Thread(target=self._run_copy, args=(request, held, fd), name="copy", daemon=True).start()
        return Done()

    def _drop_copies(self) -> Answer:
        copied, self._copied = self._copied, None
        if copied is not None:
            try:
                drop_copies(*copied)
            except OSError as error:
                return Failed(f"the keeper at {copied[0]!r} has not removed the copies: {error}")
        return Done()

    def _run_copy(self, request: Copy, held: _HeldPart, fd: int) -> None:
        status = CopyStatus(request.id)
        lower_priority(NICENESS_OF_COPIES)
        try:
            digests = held.digests.result(_DIGEST_SECONDS)
            part, throttle = replace(held.part, digests=digests), Throttle(request.rate)
            copy_part(request.to, part, fd, request.confirmed, throttle, lambda: not held.is_forgotten)
        except NotCopied as error:
            status = CopyStatus(
                request.id,
                problem=str(error),
                is_claimed=error.is_claimed,
                is_full=error.is_full,
                is_given_up=held.is_forgotten,
            )
        except BaseException as error:
            problem = TAKEN_BACK if held.is_forgotten else describe(error)
            status = CopyStatus(request.id, problem=problem, is_given_up=held.is_forgotten)
        finally:
            os.close(fd)
            with self._changed:
                if self._copying is held:  # otherwise the next copy has replaced this one
                    self._copy = status

    def refusal(self) -> str:
        """Returns why this keeper accepts no more copies, or an empty string if it accepts them."""
        if not self._claimed_by:
            return ""
        return f"a later run of this job ({self._claimed_by}) has claimed the keeper on the partner host"

    def add_replica(self, part: StatePart, fd: int) -> None:
        held = _HeldPart(part, fd, is_replica=True)
        held.is_digested = True
        held.digests.set_result(part.digests)
        with self._changed:
            self._held[part.head.id, part.head.rank] = held
            self._restart_timeout()

    def drop_replicas(self, head: StateHead, confirmed: str) -> list[tuple[int, int]]:
        """Forgets the replicas of a rank's states of one run, except that of the ``confirmed`` state.

        Returns their buffers with their sizes. The caller closes the buffers.
        """
        with self._changed:
            keys = [
                (state_id, rank)
                for (state_id, rank), held in self._held.items()
                if held.is_replica and rank == head.rank and held.part.head.job == head.job and state_id != confirmed
            ]
            dropped = [self._held.pop(key) for key in keys]
        return [(held.fd, held.part.nbytes) for held in dropped]

    def digested_part(self, state_id: str, rank: int, seconds: float) -> StatePart | None:
        """Returns a part with its digests, or None if the keeper does not hold it.

        Raises `TimeoutError` if the digests are not computed within ``seconds``.
        """
        with self._changed:
            held = self._held.get((state_id, rank))
            if held is None:
                return None
            self._digest(held)
        try:
            return replace(held.part, digests=held.digests.result(seconds))
        except CancelledError:
            return None
        except FutureTimeout:
            raise TimeoutError from None

    def buffer(self, state_id: str, rank: int) -> int | None:
        """Returns a new descriptor of a part's buffer, which the caller closes, or None if the part is not held."""
        with self._changed:
            held = self._held.get((state_id, rank))
            return None if held is None or held.is_forgotten else os.dup(held.fd)


def _accept(listener: socket.socket, keeper: Keeper) -> None:
    while True:
        connection, _ = listener.accept()
        if is_own_peer(connection):
            threading.Thread(target=keeper.serve, args=(Channel(connection),), name="visitor").start()
        else:
            connection.close()


def _set_session_priority(niceness: int, is_wanted: Callable[[], bool]) -> None:
    """Sets the niceness of this process's session, 0 or more, in a background thread.

    This has an effect only if the kernel schedules by session (autogroup): then each session gets an equal share of the
    CPU, and the niceness of a process counts only within its session. The thread gives up once ``is_wanted`` returns
    False.
    """

    def work() -> None:
        with suppress(OSError):
            while is_wanted():
                try:
                    Path("/proc/self/autogroup").write_text(str(niceness))
                    return
                except BlockingIOError:  # the kernel allows ten writes a second, for all users together
                    time.sleep(_SESSION_SECONDS)

    threading.Thread(target=work, name="priority").start()


def main(arguments: Sequence[str]) -> None:
    """Runs a keeper.

    The arguments are those of `begin`, the trainer's process id, the run of its job, the seconds to wait for a
    successor, and the socket's path.
    """
    channel, pidfd, (trainer, run, seconds, path) = begin(arguments, 0)

    def set_priority(niceness: int) -> None:
        _set_session_priority(niceness, lambda: niceness == 0 or not keeper.is_orphaned)

    keeper, code = Keeper(run, int(trainer), float(seconds), set_priority), 1
    try:
        listener = listen(Path(path))
        channel.send(Ready())
        threading.Thread(target=keeper.serve, args=(channel,), kwargs={"is_trainer": True}).start()
        threading.Thread(target=_accept, args=(listener, keeper)).start()
        at_end_of(pidfd, keeper.orphan)
        keeper.wait_for_end(Path(path))
        code = 0
    except Exception as error:  # in one line, which the trainer logs
        sys.stderr.write(describe(error))
        sys.stderr.flush()
    finally:
        remove(Path(path))
        os._exit(code)  # threads may still run, but hold nothing except memory
