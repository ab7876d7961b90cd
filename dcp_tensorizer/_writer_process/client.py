"""`WriterProcess`: the trainer's side of its writer process: start, request, liveness, end."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Protocol

from .._runtime.channel import LOOK_SECONDS, Channel, Failed, pickled
from .._runtime.child import END_SECONDS, ChildProcess, kill
from .._runtime.forks import Finalizer
from .._runtime.threads import Deadline
from ..errors import WriteError, WriterProcessDied, describe
from .protocol import (
    Answer,
    BufferInfo,
    DetachRequest,
    DigestRequest,
    DigestResult,
    FlushRequest,
    Request,
    SharedWriteRequest,
    SnapshotRequest,
    WriteDone,
    WriteRequest,
)
from .shared_job import PartsWritten

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


class WriterProcess(ChildProcess):
    """A process that writes files from shared memory, started at once and ended with `close`, or with this object.

    Args:
        devices: Let it see the trainer's GPUs, where it makes a context when it is first asked for a snapshot.

    Raises:
        NotStarted: there is no memory, process or descriptor left for it.
    """

    def __init__(self, *, devices: bool = False) -> None:
        try:
            super().__init__("the writer process", f"{__package__}.worker", [str(int(devices))], devices=devices)
        except OSError as error:
            raise NotStarted(str(error.strerror)) from error
        self._attached: set[int] = set()
        self._sent: set[int] = set()  # buffers that it may have mapped, also by a request that failed
        self._end = Finalizer(self, _end, self._popen, self._channel)

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

    def write_shared(
        self, request: SharedWriteRequest, buffers: Sequence[BufferHandle], timeout: float
    ) -> PartsWritten:
        """Lets the process write its part of files that others write, too; raises as `write` does."""
        answer = self._ask(request, buffers, timeout)
        assert isinstance(answer, PartsWritten)
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
        self,
        request: WriteRequest | SharedWriteRequest | DigestRequest | SnapshotRequest,
        buffers: Sequence[BufferHandle],
        timeout: float,
    ) -> Answer:
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
            answer = self._send(dataclasses.replace(request, buffers=infos), descriptors, timeout)
            if isinstance(answer, Failed):
                self._attached = set()  # it may have failed before it attached them
        return _succeeded(answer)

    def flush(self, request: FlushRequest, timeout: float) -> None:
        """Lets the process flush a local folder from now on; waits for the request under way.

        Raises:
            WriterProcessDied: it has ended.
            WriteError: it could not begin.
        """
        self._lock.acquire()
        with self._conversation():
            kept = tuple(BufferInfo(number, 0, attached=True) for number in self._attached)
            answer = self._send(dataclasses.replace(request, buffers=kept), [], timeout)
        _succeeded(answer)

    def detach(self, number: int) -> None:
        """Lets the process drop a shared buffer, so that its memory is free when it is given back here.

        Not while a request is under way: the next one says so.
        """
        if self._lock.acquire(blocking=False):
            with suppress(WriterProcessDied), self._conversation():  # if it died, so has its mapping
                if self.alive and number in self._sent:
                    kept = tuple(BufferInfo(other, 0, attached=True) for other in self._attached - {number})
                    self._send(DetachRequest(kept), [], _DETACH_SECONDS)

    def close(self, timeout: float = END_SECONDS) -> None:
        """Ends the process: it finishes what it is doing, but is killed after ``timeout`` seconds. Idempotent.

        It waits for no lock for longer: what it interrupts, as a signal's handler, may hold it.
        """
        if self._end.detach():
            self._disown()
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
            if not self.is_ours:
                self._close_files()
            self._lock.release()

    def wait_dead(self) -> None:
        """Waits until a process that was killed has ended: one that hangs in the kernel may create a file before."""
        while self._popen.poll() is None:
            time.sleep(LOOK_SECONDS)

    def _send(self, request: Request, fds: Sequence[int], timeout: float) -> Answer:
        """Sends a request, and returns the answer; by the holder of the lock. Raises as `write` does."""
        body, buffers = _pickled(request), {info.id for info in request.buffers}
        self._sent |= buffers
        self._attached = buffers
        try:
            answer: Answer = self._exchange(body, fds, timeout)
        except TimeoutError as error:
            raise WriterProcessHung(
                f"{error}: the destination hangs, or is slower than the writer's timeout allows"
            ) from None
        except EOFError as error:
            raise WriterProcessDied(str(error)) from None
        if not isinstance(answer, Failed):
            self._sent = set(buffers)
        return answer


def _succeeded(answer: Answer) -> Answer:
    """The same answer; raises `WriteError` where the request has failed."""
    if isinstance(answer, Failed):
        raise WriteError(answer.message) from _RemoteTraceback(answer.details)
    return answer


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
