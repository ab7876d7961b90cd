"""The keeper: a process of its own beside each trainer, which outlives it and holds its newest states in memory.

It has the descriptors of the trainer's staging buffers, and no copies. It has their digests, so that a successor sees
whether what it copies is what was kept. They are those that the writer process has taken. The keeper itself digests
what no save is to write, and what no save had written when the trainer was gone. Then it waits for a successor, and
ends after some seconds. It neither reads nor writes storage.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from .._format.checksums import Digester
from .._format.names import block_size
from .._runtime.channel import Channel, Done, Failed, Ready
from .._runtime.child import at_end_of, begin
from .._runtime.forks import free_in_child
from .._storage.local_io import read_into
from .protocol import (
    Answer,
    Claimed,
    ClaimRequest,
    End,
    Extent,
    Forget,
    Found,
    Keep,
    KeptContent,
    Look,
    Request,
    Take,
    WrittenDigests,
)
from .runtime_directory import is_own_peer, listen, remove, touch

_NICENESS = 10  # below the writer process: its digests are not waited for
_SLICE = 1 << 20  # what is read is hashed while it is in the processor's cache
_TOUCH_SECONDS = 6 * 3600.0  # systemd removes from /tmp what is 10 days old; a connection changes no times
_NONE: Mapping[tuple[int, int], bytes] = MappingProxyType({})
_DIGEST_SECONDS = 600.0  # at the lowest priority, beside a job that needs all cores


class _KeptState:
    """A state that is kept.

    The buffer is read as a file. To map it takes as long, and to unmap it takes 25 ms for each GiB of the time in which
    training waits.
    """

    def __init__(self, state: Keep, fd: int) -> None:
        if os.fstat(fd).st_size < state.nbytes:
            raise ValueError(f"it has not the {state.nbytes:,} bytes that it should have")
        self.state = state
        self.fd = fd
        self.is_forgotten = self.is_digested = False
        self.digests: Future[tuple[bytes, ...]] = Future()

    def take_digests(self, known: Mapping[tuple[int, int], bytes] = _NONE) -> None:
        """Takes the digests of all that is in it, but for those that are known, unless it is forgotten meanwhile."""
        read = memoryview(bytearray(_SLICE))
        try:
            digests = tuple(self._digests(extent, read, known) for extent in self.state.extents)
        except (OSError, EOFError, CancelledError):
            self.digests.cancel()
            return
        with suppress(InvalidStateError):  # it has just been forgotten
            self.digests.set_result(digests)

    def _digests(self, extent: Extent, read: memoryview, known: Mapping[tuple[int, int], bytes]) -> bytes:
        if not extent.is_inline and (digests := known.get((extent.offset, extent.nbytes))):
            return digests
        digester = Digester(block_size(extent.nbytes))
        stop = extent.offset + extent.nbytes
        if extent.is_inline:
            digester.update(memoryview(self.state.inline)[extent.offset : stop])
            return digester.digests()
        for start in range(extent.offset, stop, _SLICE):
            if self.is_forgotten:
                raise CancelledError
            part = read[: min(_SLICE, stop - start)]
            read_into(self.fd, [part], start)
            digester.update(part)
        return digester.digests()

    def forget(self) -> None:
        """Refuses the state to everyone from now on, and takes no more digests."""
        self.is_forgotten = True
        self.digests.cancel()

    def close(self) -> None:
        """Gives the memory back; not while digests are taken."""
        os.close(self.fd)


class Keeper:
    """Holds the states that are kept, and knows for whom.

    Args:
        job: The run of the job.
        trainer: The process id of the trainer.
        seconds: How long it waits for a successor, as long as it has no state; else as long as those say.
    """

    def __init__(self, job: str, trainer: int, seconds: float) -> None:
        self._job = job
        self._trainer = trainer
        self._seconds = seconds
        self._kept: dict[str, _KeptState] = {}
        self._claims: dict[object, str] = {}  # by connection: the run of a job that waits, or has taken
        self._is_orphaned = self._is_over = False
        self._deadline: float | None = None
        self._changed = free_in_child(threading.Condition())
        self._digesting = ThreadPoolExecutor(1, thread_name_prefix="digest")

    def serve(self, channel: Channel, *, is_trainer: bool = False) -> None:
        """Answers the requests of one connection until its other end is gone."""
        try:
            with suppress(OSError):
                channel.serve(lambda request, fds: self._answer(request, fds, channel))
        finally:
            with self._changed:
                if self._claims.pop(channel, None) is not None:
                    self._wait_anew()
            if is_trainer:
                self.orphan()
            channel.close()

    def orphan(self) -> None:
        """The trainer is gone, or wants no more."""
        with self._changed:
            if not self._is_orphaned:
                self._is_orphaned = True
                self._wait_anew()
                for kept in reversed(list(self._kept.values())):  # the newest one is wanted first
                    self._digest(kept)

    def wait_for_end(self, path: Path) -> None:
        """Returns when a message ends it, or no restart has come in time; keeps its socket in use meanwhile."""
        with self._changed:
            while not self._is_over:
                left = _TOUCH_SECONDS if self._deadline is None else self._deadline - time.monotonic()
                if left <= 0:
                    return
                if not self._changed.wait(min(left, _TOUCH_SECONDS)):
                    touch(path)

    def _wait_anew(self) -> None:
        """The time for a successor begins, unless one is there."""
        if self._is_orphaned:
            seconds = max((kept.state.seconds for kept in self._kept.values()), default=self._seconds)
            self._deadline = None if self._claims else time.monotonic() + seconds
            self._changed.notify_all()

    def _answer(self, request: Request, fds: list[int], channel: Channel) -> tuple[Answer, list[int]]:
        match request:
            case Keep():
                return self._keep(request, fds[0]), []
            case WrittenDigests(number, known):
                with self._changed:
                    if number in self._kept:
                        self._digest(self._kept[number], known)
                return Done(), []
            case Forget(ids):
                self._forget(ids)
                return Done(), []
            case Look():
                with self._changed:
                    heads = tuple(kept.state.head for kept in self._kept.values())
                    return Found(self._job, self._trainer, self._is_orphaned, heads), []
            case ClaimRequest(job):
                return Claimed(self._claim(job, channel)), []
            case Take(number):
                return self._take(number)
            case End():
                with self._changed:
                    self._is_over = True
                    self._changed.notify_all()
                return Done(), []

    def _keep(self, state: Keep, fd: int) -> Answer:
        try:
            kept = _KeptState(state, fd)
        except (OSError, ValueError) as error:
            os.close(fd)
            return Failed(f"the staging buffer cannot be read: {error}")
        with self._changed:
            self._kept[state.head.id] = kept
            self._wait_anew()
            if self._is_orphaned or not state.digests_follow:
                self._digest(kept)
        return Done()

    def _digest(self, kept: _KeptState, known: Mapping[tuple[int, int], bytes] = _NONE) -> None:
        """Takes the digests, once."""
        if not kept.is_digested:
            kept.is_digested = True
            self._digesting.submit(kept.take_digests, known)

    def _forget(self, numbers: Sequence[str]) -> None:
        with self._changed:
            forgotten = [self._kept.pop(number) for number in numbers if number in self._kept]
            self._wait_anew()
        for kept in forgotten:
            kept.forget()
            self._digesting.submit(kept.close)

    def _claim(self, job: str, channel: Channel) -> bool:
        with self._changed:
            if not self._is_orphaned or any(other != job for other in self._claims.values()):
                return False
            self._claims[channel] = job
            self._wait_anew()
            return True

    def _take(self, number: str) -> tuple[Answer, list[int]]:
        with self._changed:
            kept = self._kept.get(number)
            if kept is not None:
                self._digest(kept)
        if kept is None:
            return Failed("it is not kept any more"), []
        try:
            digests = kept.digests.result(_DIGEST_SECONDS)
        except (CancelledError, TimeoutError) as error:
            return Failed(f"it has no digests: {type(error).__name__}"), []
        with self._changed:
            if kept.is_forgotten:
                return Failed("it is not kept any more"), []
            return KeptContent(kept.state, digests), [kept.fd]


def _accept(listener: socket.socket, keeper: Keeper) -> None:
    while True:
        connection, _ = listener.accept()
        if is_own_peer(connection):
            threading.Thread(target=keeper.serve, args=(Channel(connection),), name="visitor", daemon=True).start()
        else:
            connection.close()


def main(arguments: Sequence[str]) -> None:
    """Arguments: those of `begin`, the trainer's process id, the run of its job, the seconds, and the path of the
    socket.
    """
    channel, pidfd, (trainer, run, seconds, path) = begin(arguments, _NICENESS)
    keeper = Keeper(run, int(trainer), float(seconds))
    listener = listen(Path(path))
    try:
        channel.send(Ready())
        threading.Thread(target=keeper.serve, args=(channel,), kwargs={"is_trainer": True}, daemon=True).start()
        threading.Thread(target=_accept, args=(listener, keeper), daemon=True).start()
        at_end_of(pidfd, keeper.orphan)
        keeper.wait_for_end(Path(path))
    finally:
        remove(Path(path))
        os._exit(0)  # whatever a thread is doing: all that it has is memory
