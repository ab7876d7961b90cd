"""`WriterProcess`: the trainer's side of its writer process: start, request, liveness, end."""

from __future__ import annotations

import dataclasses
import functools
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from typing import Protocol

from .._runtime.forks import Descriptor, Finalizer, anonymous_file, free_in_child, too_many
from .._runtime.threads import Deadline, Patience
from ..errors import WriteError, WriterProcessDied, describe
from .child import kill, said_by, socket_pair, start
from .protocol import (
    LOOK_SECONDS,
    Answer,
    BufferInfo,
    Channel,
    Detached,
    DetachRequest,
    DigestRequest,
    DigestResult,
    FlushBegun,
    FlushRequest,
    Ready,
    Request,
    SnapshotRequest,
    SnapshotTaken,
    WriteDone,
    WriteFailed,
    WriteProgress,
    WriteRequest,
    pickled,
)

END_SECONDS = 5.0
"""For a process that is in the middle of a write. An idle one ends in milliseconds."""

_DETACH_SECONDS = 5.0  # an idle process does it in a millisecond


class WriterProcessHung(WriterProcessDied):
    """The process made no progress for too long, and was killed. Where it wrote to may hang, for whoever asks it.

    Attributes:
        cleaning: Done when it has ended, which may be late, and what it had written is removed.
    """

    cleaning: Future[None] | None = None


class Unsendable(WriteError):
    """A request cannot be pickled. Nothing of it has been sent, and the writer process goes on."""


class NotStarted(WriterProcessDied):
    """The process cannot be started, for want of memory, processes or descriptors."""


class BufferHandle(Protocol):
    """The part of a shared buffer that crosses to the writer process."""

    @property
    def id(self) -> int: ...
    @property
    def fd(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def at_close(self, undo: Callable[[], None]) -> None: ...


class WriterProcess:
    """A process that writes files from shared memory, started at once and ended with `close`.

    Not `multiprocessing`: that imports the user's ``__main__`` again and is forbidden in daemonic processes.

    Args:
        devices: Let it see the trainer's GPUs, where it makes a context when it is first asked for a snapshot.

    Raises:
        NotStarted: there is no memory, process or descriptor left for it.
    """

    def __init__(self, *, devices: bool = False) -> None:
        try:
            with ExitStack() as undo:
                self._output = Descriptor(anonymous_file("output"))
                undo.callback(self._output.close)
                ours, theirs = socket_pair()
                undo.callback(ours.close)
                with theirs:
                    self._popen = start(
                        f"{__package__}.worker", theirs, self._output.number, [str(int(devices))], devices=devices
                    )
                undo.pop_all()
        except OSError as error:
            raise NotStarted(f"the writer process cannot be started: {too_many(error) or error}") from error
        self._channel = Channel(ours)
        self._attached: set[int] = set()
        self._sent: set[int] = set()  # buffers that it may have mapped, also by a request that failed
        self._lock = free_in_child(threading.Lock())
        self._was_killed = False
        self._end = Finalizer(self, _end, self._popen, self._channel)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """Returns whether a request can be sent. One that was killed, and hangs in the kernel, takes none."""
        return self._end.alive and not self._was_killed and self._channel.is_ours and self._popen.poll() is None

    def write(self, request: WriteRequest, buffers: Sequence[BufferHandle], timeout: float) -> WriteDone:
        """Lets the process write a request, and waits for it.

        Args:
            request: What to write; its ``buffers`` are filled in here.
            buffers: The shared memory that it refers to.
            timeout: Seconds without progress after which the process is killed.

        Raises:
            WriterProcessDied: it ended meanwhile, or was killed because it made no progress.
            WriteError: it could not fulfil the request.
        """
        answer = self._ask(request, buffers, timeout)
        assert isinstance(answer, WriteDone)
        return answer

    def digest(self, request: DigestRequest, buffers: Sequence[BufferHandle], timeout: float) -> tuple[bytes, ...]:
        """Lets the process take digests of tensors, and waits for them; raises as `write` does."""
        answer = self._ask(request, buffers, timeout)
        assert isinstance(answer, DigestResult)
        return answer.digests

    def snapshot(self, request: SnapshotRequest, buffers: Sequence[BufferHandle], timeout: float) -> None:
        """Lets the process copy GPU memory to one of the buffers, and waits for it; raises as `write` does."""
        self._ask(request, buffers, timeout)

    def _ask(
        self, request: WriteRequest | DigestRequest | SnapshotRequest, buffers: Sequence[BufferHandle], timeout: float
    ) -> WriteDone | DigestResult | SnapshotTaken:
        self._lock.acquire()
        with self._conversation():
            infos = tuple(BufferInfo(b.id, b.nbytes, b.id in self._attached) for b in buffers)
            new = [b for b in buffers if b.id not in self._attached]
            for buffer in new:
                buffer.at_close(functools.partial(self.detach, buffer.id))
            try:
                descriptors = [buffer.fd for buffer in new]
            except OSError as error:
                raise WriteError(f"the staging buffer cannot be sent to the writer process: {error}") from error
            answer = self._exchange(dataclasses.replace(request, buffers=infos), descriptors, timeout)
            if isinstance(answer, WriteFailed):
                self._attached = set()  # it may have failed before it attached them
        if isinstance(answer, WriteFailed):
            raise WriteError(answer.message) from _RemoteTraceback(answer.details)
        assert not isinstance(answer, Detached | FlushBegun)
        return answer

    def flush(self, request: FlushRequest, timeout: float) -> None:
        """Lets the process flush a local folder from now on; waits for the request under way.

        Raises:
            WriterProcessDied: it has ended.
            WriteError: it could not begin.
        """
        self._lock.acquire()
        with self._conversation():
            kept = tuple(BufferInfo(number, 0, attached=True) for number in self._attached)
            answer = self._exchange(dataclasses.replace(request, buffers=kept), [], timeout)
        if isinstance(answer, WriteFailed):
            raise WriteError(answer.message) from _RemoteTraceback(answer.details)

    def detach(self, number: int) -> None:
        """Lets the process drop a shared buffer, so that its memory is free when it is given back here.

        Not while a request is under way: the next one says so.
        """
        if self._lock.acquire(blocking=False):
            with suppress(WriterProcessDied), self._conversation():  # if it died, so has its mapping
                if self.alive and number in self._sent:
                    kept = tuple(BufferInfo(other, 0, attached=True) for other in self._attached - {number})
                    self._exchange(DetachRequest(kept), [], _DETACH_SECONDS)

    def close(self, timeout: float = END_SECONDS) -> None:
        """Ends the process: it finishes what it is doing, but is killed after ``timeout`` seconds. Idempotent.

        It waits for no lock for longer: what it interrupts, as a signal's handler, may hold it.
        """
        if self._end.detach():
            deadline = Deadline(timeout)
            idle = self._lock.acquire(blocking=False)  # then it has nothing to finish, and may still be importing
            _stop(self._popen, self._channel, 0.0 if idle else timeout)
            if idle or self._lock.acquire(timeout=deadline.within(timeout)):
                self._close_files()
                self._lock.release()

    @contextmanager
    def _conversation(self) -> Iterator[None]:
        """A request, by the holder of the lock. If `close` has not waited for it, what it needed is closed here."""
        try:
            yield
        finally:
            if not self._end.alive:
                self._close_files()
            self._lock.release()

    def _close_files(self) -> None:
        self._channel.close()
        self._output.close()

    def _exchange(self, request: Request, fds: Sequence[int], timeout: float) -> Answer:
        body = _pickled(request)
        try:
            self._sent |= {info.id for info in request.buffers}
            self._channel.send_pickled(body, fds, timeout)
            self._attached = {info.id for info in request.buffers}
            answer = self._wait(timeout)
        except TimeoutError:
            raise self._hung(timeout) from None
        except (EOFError, OSError):
            raise WriterProcessDied(self._cause_of_death()) from None
        except BaseException:  # a KeyboardInterrupt: the answer would be taken for that to the next request
            self._kill()
            raise
        if not isinstance(answer, WriteFailed):
            self._sent = set(self._attached)
        return answer

    def _wait(self, timeout: float) -> Answer:
        progress = -1
        patience = Patience(timeout, 2 * LOOK_SECONDS)
        while True:
            message, _ = self._channel.receive(lambda: self._channel.wait_readable(patience, self._check_alive))
            if isinstance(message, Answer):
                return message
            if isinstance(message, Ready) or (isinstance(message, WriteProgress) and message.nbytes != progress):
                progress = message.nbytes if isinstance(message, WriteProgress) else progress
                patience.renew()

    def _check_alive(self) -> None:
        """A process that dies closes its end, which wakes who waits, unless a child of its own holds it open."""
        if self._popen.poll() is not None:
            raise EOFError

    def _kill(self) -> int | None:
        """Kills the process and returns its exit code; None if it does not end yet."""
        self._was_killed = True
        return kill(self._popen)

    def _hung(self, timeout: float) -> WriterProcessHung:
        self._kill()
        return WriterProcessHung(
            f"the writer process (pid {self.pid}) made no progress for {timeout:g} s and was killed: the "
            f"destination hangs, or is slower than the writer's timeout allows"
        )

    def wait_dead(self) -> None:
        """Waits until a process that was killed has ended: one that hangs in the kernel may create a file before."""
        while self._popen.poll() is None:
            time.sleep(LOOK_SECONDS)

    def _cause_of_death(self) -> str:
        """Describes how it ended, with the end of its output."""
        process = f"the writer process (pid {self.pid})"
        if self._end.alive and not self._channel.is_ours:
            self._kill()
            return f"{process} was cut off: this process has closed the socket to it (os.closerange?)"
        try:
            code: int | None = self._popen.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            code = self._kill()
        if code is None:
            return f"{process} does not end, although it was killed: it hangs in the kernel"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{process} {how}{said_by(self._output)}"


class _RemoteTraceback(Exception):
    """Carries a traceback from the writer process as text, as the cause of an error here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _pickled(request: Request) -> bytes:
    """A request as it travels; raises `Unsendable`. Of what is in one, only the user's options may not pickle."""
    try:
        return pickled(request)
    except Exception as error:
        raise Unsendable(
            f"storage_options cannot be sent to the writer process, because they cannot be pickled: {describe(error)}"
        ) from error


def _end(popen: subprocess.Popen[bytes], channel: Channel) -> None:
    _stop(popen, channel, 0.0)
    channel.close()


def _stop(popen: subprocess.Popen[bytes], channel: Channel, timeout: float) -> None:
    channel.shut_down()
    try:
        popen.wait(timeout)
    except subprocess.TimeoutExpired:
        kill(popen)
