"""The trainer's side of its writer process, `WriterProcess`: start, requests, liveness, end."""

from __future__ import annotations

import functools
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from .._runtime.channel import CHECK_SECONDS, Channel, Failed, pickled
from .._runtime.child import END_SECONDS, ChildProcess, kill
from .._runtime.forks import Finalizer
from .._runtime.process_context import ProcessContext
from .._runtime.threads import Deadline
from ..errors import WriteError, WriterProcessDied, describe
from .protocol import Call, Request

if TYPE_CHECKING:
    from .._staging.shared_memory import SharedBuffer

_DETACH_SECONDS = 5.0  # for the process to unmap a buffer; an idle process takes 1 ms


class WriterProcessHung(WriterProcessDied):
    """The process made no progress for too long, and was killed. The storage may also hang for other processes."""

    cleaning: Future[None] | None = None
    """A future that is done once the process has ended and the save's files are removed, which may take a long time."""


class Unsendable(WriteError):
    """A request cannot be pickled. Nothing was sent, and the writer process can take other requests."""


class NotStarted(WriterProcessDied):
    """The process cannot be started, for example because memory, processes or descriptors are exhausted.

    Or it ended by itself before it was ready, for example because it could start no thread, or because
    ``sys.executable`` is not a Python interpreter.
    """


class WriterProcess(ChildProcess):
    """A process that writes files from shared memory. It ends with `close`, or when this object is freed.

    With ``devices`` the process sees the trainer's GPUs, and makes a CUDA context for its first copy from a GPU.

    Raises:
        NotStarted: the process cannot be started.
    """

    def __init__(self, *, devices: bool = False) -> None:
        try:
            super().__init__("the writer process", f"{__package__}.worker", [str(int(devices))], devices=devices)
        except OSError as error:
            raise NotStarted(str(error.strerror)) from error
        self._attached: set[int] = set()
        self._sent: set[int] = set()  # buffers that the process may have mapped, including those of failed requests
        self._end = Finalizer(self, _end, self._popen, self._channel)

    def ask(
        self,
        request: Request,
        buffers: Sequence[SharedBuffer] | None,
        timeout: float,
        context: ProcessContext | None = None,
        progress: Callable[[int], object] = lambda nbytes: None,
    ) -> Any:
        """Sends a request, waits for the response, and returns what `protocol` describes for the request.

        Args:
            request: The request.
            buffers: The shared memory that the request refers to; the process releases all other buffers. If None, the
                process retains all of its buffers.
            timeout: Seconds without progress after which the process is killed.
            context: The process context that the process applies.
            progress: Called about once a second with the number of bytes done.

        Raises:
            WriterProcessDied: the process ended, or was killed because it made no progress.
            WriteError: the request failed, or could not be sent.
        """
        self._lock.acquire()
        with self._conversation():
            new = [buffer for buffer in buffers or () if buffer.id not in self._attached]
            for buffer in new:
                buffer.at_close(functools.partial(self.detach, buffer.id))
            try:
                descriptors = [buffer.fd for buffer in new]
            except OSError as error:
                raise WriteError(f"the staging buffer cannot be sent to the writer process: {error}") from error
            retained = self._attached if buffers is None else self._attached & {buffer.id for buffer in buffers}
            call = Call(request, tuple(retained), tuple((buffer.id, buffer.nbytes) for buffer in new), context)
            try:
                body = pickled(call)
            except Exception as error:  # only the user's options can fail to pickle
                raise Unsendable(
                    f"storage_options cannot be sent to the writer process, because they cannot be pickled: "
                    f"{describe(error)}"
                ) from error
            self._attached = {*retained, *(buffer.id for buffer in new)}
            self._sent |= self._attached
            answer = self._exchange(body, descriptors, timeout, progress)
            if not isinstance(answer, Failed):
                self._sent = set(self._attached)
            elif buffers is not None:
                self._attached = set()  # the request may have failed before the buffers were attached
        if isinstance(answer, Failed):
            raise WriteError(answer.message) from _RemoteTraceback(answer.details)
        return answer

    def detach(self, number: int) -> None:
        """Unmaps a shared buffer in the process, so that closing the buffer in the trainer frees its memory.

        While a request is in progress, does nothing: the next request names the buffers that stay.
        """
        if self._lock.acquire(blocking=False):
            with suppress(WriterProcessDied), self._conversation():  # a dead process has no mappings
                if self.alive and number in self._sent:
                    self._attached -= {number}
                    answer = self._exchange(pickled(Call(None, tuple(self._attached))), [], _DETACH_SECONDS)
                    if not isinstance(answer, Failed):
                        self._sent = set(self._attached)

    def close(self, timeout: float = END_SECONDS) -> None:
        """Ends the process: at once if it is idle, otherwise after its current request, or after ``timeout`` seconds.

        Idempotent. The timeout includes the wait for the lock, because a signal handler may have interrupted the lock's
        holder.
        """
        if self._end.detach():
            self._disown()
            deadline = Deadline(timeout)
            idle = self._lock.acquire(blocking=False)  # no request to finish; perhaps still importing modules
            _stop(self._popen, self._channel, 0.0 if idle else timeout)
            if idle or self._lock.acquire(timeout=deadline.within(timeout)):
                self._close_files()
                self._lock.release()

    @contextmanager
    def _conversation(self) -> Iterator[None]:
        """Translates the errors of a request, and releases the lock after the request.

        If `close` was called during the request and did not wait, closes the files.
        """
        try:
            yield
        except TimeoutError as error:
            raise WriterProcessHung(
                f"{error}: the storage (or, with staging='device', a GPU) hangs, or is slower than the timeout allows. "
                f"Check it, or pass a longer timeout: SaveLimits(timeout=...)."
            ) from None
        except EOFError as error:
            # A negative code: the process was killed, perhaps before its `Ready` was read.
            never_ran = not self._channel.is_ready and (self._popen.returncode or 0) >= 0
            raise (NotStarted if never_ran else WriterProcessDied)(str(error)) from None
        finally:
            if not self.is_ours:
                self._close_files()
            self._lock.release()

    def wait_dead(self) -> None:
        """Waits until a killed process has ended: a process that hangs in the kernel may still create a file."""
        while self._popen.poll() is None:
            time.sleep(CHECK_SECONDS)


class _RemoteTraceback(Exception):
    """A traceback of the writer process as text, as the cause of an error in the trainer."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _end(popen: subprocess.Popen[bytes], channel: Channel) -> None:
    _stop(popen, channel, 0.0)
    channel.close()


def _stop(popen: subprocess.Popen[bytes], channel: Channel, timeout: float) -> None:
    channel.shut_down()
    try:
        popen.wait(timeout)
    except subprocess.TimeoutExpired:
        kill(popen)
