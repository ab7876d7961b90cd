"""`WriterProcess`: the trainer's side of its writer process: start, request, liveness, end."""

from __future__ import annotations

import dataclasses
import functools
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import IO, Protocol

from ..errors import WriteError, WriterProcessDied
from .channel import Channel
from .interpreter import environment, interpreter
from .messages import (
    Answer,
    BufferInfo,
    Detached,
    DetachRequest,
    Progress,
    Ready,
    Request,
    SnapshotRequest,
    SnapshotTaken,
    WriteDone,
    WriteFailed,
    WriteRequest,
)

__all__ = ["WriterProcess"]

_END_SECONDS = 5.0  # an idle process ends in milliseconds; this is for one that is in the middle of a write
_DETACH_SECONDS = 5.0  # an idle process does it in a millisecond
_OUTPUT_TAIL = 4000  # bytes


class SharedBuffer(Protocol):
    """What of a shared buffer crosses to the writer process."""

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
        WriterProcessDied: it cannot be started, for want of memory, processes or descriptors.
    """

    def __init__(self, *, devices: bool = False) -> None:
        try:
            with ExitStack() as undo:
                ours, theirs = socket.socketpair()
                undo.callback(ours.close)
                self._stderr: IO[bytes] = undo.enter_context(tempfile.TemporaryFile())
                with theirs:
                    self._popen = _start(theirs, self._stderr, devices)
                undo.pop_all()
        except OSError as error:
            raise WriterProcessDied(f"the writer process cannot be started: {error}") from error
        self._channel = Channel(ours)
        self._attached: set[int] = set()
        self._sent: set[int] = set()  # buffers that it may have mapped, also by a request that failed
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, _end, self._popen, self._channel, self._stderr, os.getpid())

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """Whether a request can be sent."""
        return self._end.alive and self._popen.poll() is None

    def write(self, request: WriteRequest, buffers: Sequence[SharedBuffer], timeout: float) -> WriteDone:
        """Has a request written, and waits for it.

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

    def snapshot(self, request: SnapshotRequest, buffers: Sequence[SharedBuffer], timeout: float) -> None:
        """Has GPU memory copied to one of the buffers, and waits for it; raises as `write` does."""
        self._ask(request, buffers, timeout)

    def _ask(
        self, request: WriteRequest | SnapshotRequest, buffers: Sequence[SharedBuffer], timeout: float
    ) -> WriteDone | SnapshotTaken:
        with self._lock:
            infos = tuple(BufferInfo(b.id, b.nbytes, b.id in self._attached) for b in buffers)
            new = [b for b in buffers if b.id not in self._attached]
            for buffer in new:
                buffer.at_close(functools.partial(self.detach, buffer.id))
            answer = self._exchange(dataclasses.replace(request, buffers=infos), [b.fd for b in new], timeout)
            if isinstance(answer, WriteFailed):
                self._attached = set()  # it may have failed before it attached them
        if isinstance(answer, WriteFailed):
            raise WriteError(answer.message) from _RemoteTraceback(answer.details)
        assert not isinstance(answer, Detached)
        return answer

    def detach(self, number: int) -> None:
        """Has the process let go of a shared buffer, so that its memory is free when it is given back here.

        Not while a request is under way: the next one says so.
        """
        if self._lock.acquire(blocking=False):
            try:
                if self.alive and number in self._sent:
                    kept = tuple(BufferInfo(other, 0, attached=True) for other in self._attached - {number})
                    self._exchange(DetachRequest(kept), [], _DETACH_SECONDS)
            except WriterProcessDied:
                pass  # and so has its mapping
            finally:
                self._lock.release()

    def close(self, timeout: float = _END_SECONDS) -> None:
        """Ends the process: it finishes what it is doing, but is killed after ``timeout`` seconds. Idempotent."""
        if self._end.detach():
            idle = self._lock.acquire(blocking=False)  # then it has nothing to finish, and may still be importing
            _stop(self._popen, self._channel, 0.0 if idle else timeout)
            if not idle:
                self._lock.acquire()  # whoever waited for it has read its output
            self._channel.close()
            self._stderr.close()
            self._lock.release()

    def _exchange(self, request: Request, fds: Sequence[int], timeout: float) -> Answer:
        try:
            self._sent |= {info.id for info in request.buffers}
            self._channel.send(request, fds, timeout)
            self._attached = {info.id for info in request.buffers}
            answer = self._wait(timeout)
        except TimeoutError:
            raise self._hung(timeout) from None
        except (EOFError, OSError):
            raise WriterProcessDied(self._cause_of_death()) from None
        except BaseException:  # a KeyboardInterrupt: the answer would be taken for that to the next request
            self._popen.kill()
            self._popen.wait()
            raise
        if not isinstance(answer, WriteFailed):
            self._sent = set(self._attached)
        return answer

    def _wait(self, timeout: float) -> Answer:
        progress = -1
        deadline = time.monotonic() + timeout
        while True:
            if not self._readable(deadline - time.monotonic()):
                raise self._hung(timeout)
            message, _ = self._channel.receive()
            if isinstance(message, Answer):
                return message
            if isinstance(message, Ready) or (isinstance(message, Progress) and message.nbytes != progress):
                progress = message.nbytes if isinstance(message, Progress) else progress
                deadline = time.monotonic() + timeout

    def _hung(self, timeout: float) -> WriterProcessDied:
        self._popen.kill()
        self._popen.wait()
        return WriterProcessDied(
            f"the writer process (pid {self.pid}) made no progress for {timeout:g} s and was killed: the "
            f"destination hangs, or is slower than the writer's timeout allows"
        )

    def _readable(self, timeout: float) -> bool:
        """Waits for a message or the end of the process, whichever is first."""
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            # A process that dies closes its end, which wakes the poll, unless a child of its own holds it open.
            if poll.poll(min(left, 1.0) * 1000):
                return True
            if self._popen.poll() is not None:
                raise EOFError
        return False

    def _cause_of_death(self) -> str:
        """How it ended, and the end of its output."""
        try:
            code = self._popen.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            code = self._popen.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - _OUTPUT_TAIL))
        output = self._stderr.read().decode(errors="replace").strip()
        return f"the writer process (pid {self.pid}) {how}" + (f"; the end of its output:\n{output}" if output else "")


def _start(theirs: socket.socket, output: IO[bytes], devices: bool) -> subprocess.Popen[bytes]:
    """Starts the process at the other end of a socket; raises `OSError`."""
    trainer = -1
    with suppress(AttributeError, OSError):  # an older kernel, or a sandbox; then the socket alone tells of our end
        trainer = os.pidfd_open(os.getpid())
    try:
        return subprocess.Popen(
            [*interpreter(), f"{__package__}.worker", str(theirs.fileno()), str(trainer), str(int(devices))],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[fd for fd in (theirs.fileno(), trainer) if fd >= 0],
            env=environment(devices),
        )
    finally:
        if trainer >= 0:
            os.close(trainer)


class _RemoteTraceback(Exception):
    """Carries a traceback from the writer process as text, as the cause of an error here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _end(popen: subprocess.Popen[bytes], channel: Channel, stderr: IO[bytes], pid: int) -> None:
    if os.getpid() != pid:  # a forked child must not end its parent's writer
        return
    _stop(popen, channel, 0.0)
    channel.close()
    stderr.close()


def _stop(popen: subprocess.Popen[bytes], channel: Channel, timeout: float) -> None:
    channel.shut_down()
    try:
        popen.wait(timeout)
    except subprocess.TimeoutExpired:
        popen.kill()
        popen.wait()
