"""Clients of a keeper: its trainer uses `KeeperProcess`, and a successor of that trainer uses `KeeperConnection`."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from .._runtime.channel import Channel, Done, Failed
from .._runtime.child import END_SECONDS, ChildProcess
from .._runtime.forks import Descriptor
from .._runtime.threads import NEVER, Deadline, in_background
from ..errors import CheckpointError, ReadError, WriteError
from .protocol import (
    Answer,
    ClaimRequest,
    Forget,
    Found,
    GetPart,
    Plain,
    Request,
    StatePart,
    WrittenDigests,
)
from .runtime_directory import connect, remove, runtime_directory, socket_path, sockets_of

if TYPE_CHECKING:
    from .._staging.shared_memory import SharedBuffer

_T = TypeVar("_T")

_ANSWER_SECONDS = 60.0  # timeout of a request; a keeper answers in a millisecond if it gets a core
_DIGEST_SECONDS = 660.0  # slightly longer than the keeper itself waits for digests


class KeeperProcess(ChildProcess):
    """Keeper process, and the staging buffers of the states that it holds. The keeper outlives this process.

    A keeper that does not answer is killed, so that later saves can use its buffers: otherwise the keeper would offer
    the overwritten buffers to a successor.

    Args:
        job: The prefix of the names of the job's sockets (`job_name`).
        seconds: How long the keeper waits for a successor when this process is gone.
        timeout: Seconds after which an unresponsive keeper is killed, a minute at most.

    Attributes:
        held: The buffers of the states, by the states' ids, the oldest first. Each has ``is_kept`` set.
    """

    def __init__(self, job: str, run: str, seconds: float, timeout: float = _ANSWER_SECONDS) -> None:
        self.timeout = timeout
        self.held: dict[str, SharedBuffer] = {}
        self._written = WrittenDigests("", {})  # of the last state that a save has written
        try:
            self._path = socket_path(runtime_directory(), job)
            arguments = [str(os.getpid()), run, str(seconds), os.fspath(self._path)]
            # In a new session, because a launcher kills the trainer's process group.
            super().__init__("the keeper", f"{__package__}.keeper", arguments, own_session=True)
        except OSError as error:
            raise WriteError(f"states cannot be held in memory: {error.strerror or error}") from error

    def hold(self, part: StatePart, buffer: SharedBuffer) -> None:
        """Sends a state to the keeper. Saves do not reuse the buffer until the state is forgotten or lost.

        Raises `WriteError` if the keeper refuses this state, is busy with another request, does not answer, or has
        ended. In the last two cases all its states are lost.
        """
        state_id = part.head.id
        self.held[state_id], buffer.is_kept = buffer, True
        try:
            self.ask(part, Done, [buffer.fd])
        except BaseException as error:
            if not isinstance(error, WriteError):  # the keeper may have received the state
                self._lose()
            self._release([state_id])
            raise
        if (written := self._written).id == state_id:
            self.written(state_id, written.known)

    def written(self, state_id: str, known: Mapping[tuple[int, int], bytes]) -> None:
        """Sends the digests of a state that a save has written, or makes a later `hold` send them.

        Returns immediately, because a stopped keeper must not delay a commit. Raises no error: a keeper that does not
        receive the digests computes them.
        """
        self._written = written = WrittenDigests(state_id, known)
        if state_id in self.held:
            in_background(functools.partial(self.ask, written, Done), name="digests", daemon=True)

    def forget(self, ids: Collection[str], *, but_copied: bool = False) -> None:
        """Makes the keeper forget states, and frees their buffers.

        ``but_copied``: the state whose copy is in progress, or was made last, stays. On failure, kills the keeper,
        frees the buffers of all its states, and raises `WriteError`.
        """
        forgotten = [state_id for state_id in ids if state_id in self.held]
        if not forgotten:
            return
        try:
            over = self.ask(Forget(tuple(forgotten), but_copied), tuple)
        except BaseException:
            self._lose()
            raise
        self._release(over)

    def end(self, deadline: Deadline = NEVER) -> None:
        """Ends the keeper, and frees its memory. Kills the keeper if it does not end in time. Idempotent.

        Waits for the lock for 5 seconds at most, and not beyond the deadline: if this runs in a signal handler, the
        interrupted code may hold the lock.
        """
        if self._lock.acquire(timeout=deadline.within(END_SECONDS)):
            try:
                with suppress(EOFError, OSError):
                    self._channel.send(Plain.END, timeout=deadline.within(END_SECONDS))
                    self._popen.wait(deadline.within(END_SECONDS))
            except subprocess.TimeoutExpired:
                pass
            finally:
                self._lock.release()
        self._lose()

    def leave(self, deadline: Deadline = NEVER) -> None:
        """Leaves the keeper to a successor, as if this process had died. Idempotent.

        Do not write to its buffers afterwards.
        """
        self._disown()
        self.held = {}
        self._popen.returncode = 0  # so that `Popen` does not wait for the keeper, which outlives this process
        self._channel.hang_up(deadline.within(END_SECONDS))
        self._close_files()

    def _kill(self) -> int | None:
        if self.is_ours:
            remove(self._path)
        return super()._kill()

    def _lose(self) -> None:
        self._kill()
        self._close_files()
        self._release(list(self.held))

    def _release(self, ids: Sequence[str]) -> None:
        for state_id in ids:
            if (buffer := self.held.pop(state_id, None)) is not None:
                buffer.is_kept = False

    def ask(self, request: Request, kind: type[_T], fds: Sequence[int] = ()) -> _T:
        """Sends a request. Returns the answer, an instance of ``kind``.

        Raises `WriteError` if the keeper refuses the request, is busy with another one, does not answer, or has ended.
        """
        timeout = min(self.timeout, _ANSWER_SECONDS)
        if not self._lock.acquire(timeout=timeout):  # a signal handler may have interrupted the lock's holder
            raise WriteError(f"the keeper (pid {self.pid}) is busy")
        try:
            answer: Answer = self._exchange(request, fds, timeout)
        except BaseException as error:
            self._lose()
            if isinstance(error, EOFError | TimeoutError):
                raise WriteError(str(error)) from None
            raise
        finally:
            self._lock.release()
        if isinstance(answer, Failed):
            raise WriteError(f"the keeper (pid {self.pid}) reports an error: {answer.message}")
        assert isinstance(answer, kind)
        return answer


class KeeperConnection:
    """Connection to the keeper of another trainer. ``found`` has the states that the keeper listed last.

    Raises `EOFError` or `OSError` if the keeper has ended.
    """

    found: Found

    def __init__(self, connection: socket.socket) -> None:
        self._channel = Channel(connection)
        try:
            self._channel.send(Plain.LIST)  # does not block: the message fits into the socket's buffer
        except BaseException:
            self._channel.close()
            raise

    def wait_listed(self, timeout: float) -> None:
        """Waits for the keeper's first list of states. Raises `TimeoutError` on timeout.

        Any other exception means that the keeper has ended, or runs another version of this package.
        """
        self.found = _found(self._channel.answer(timeout)[0])

    def claim(self, run: str) -> bool:
        """Reserves the keeper for this run while this connection is open. Returns whether the keeper agrees."""
        is_claimed = isinstance(self._ask(ClaimRequest(run))[0], Done)
        if is_claimed:  # its trainer may have sent a last state since the first list
            self.found = _found(self._ask(Plain.LIST)[0])
        return is_claimed

    def forget_all_but(self, state_id: str) -> None:
        """Makes the keeper forget all other states. Does nothing if the keeper does not answer."""
        with suppress(CheckpointError):
            self._ask(Forget(tuple(head.id for head in self.found.heads if head.id != state_id)))

    def part(self, state_id: str, rank: int) -> tuple[StatePart, Descriptor]:
        """Returns a rank's part of a state, and its buffer. Raises `ReadError` if the keeper does not send it."""
        answer, fds = self._ask(GetPart(state_id, rank), _DIGEST_SECONDS)
        if not isinstance(answer, StatePart):
            why = answer.message if isinstance(answer, Failed) else "it sent an unexpected answer"
            raise ReadError(f"the keeper of process {self.found.trainer} did not send the state: {why}")
        return answer, Descriptor(fds[0])

    def end(self) -> None:
        with suppress(CheckpointError):
            self._ask(Plain.END)
        self.close()

    def close(self) -> None:
        """Closes the connection. The keeper continues."""
        self._channel.close()

    def _ask(self, request: Request, timeout: float = _ANSWER_SECONDS) -> tuple[Answer, list[int]]:
        try:
            return self._channel.ask(request, timeout=timeout)
        except (EOFError, OSError) as error:
            raise ReadError(f"the keeper of process {self.found.trainer} does not answer: {error}") from error


def connect_to_keepers(job: str, timeout: float) -> tuple[list[KeeperConnection], list[Path]]:
    """Connects to all keepers of a job on this machine, including those of this run.

    ``timeout`` is the number of seconds for the answers of all keepers together. Returns the connections, and the
    sockets of the keepers that do not answer.
    """
    asked, found, silent = dict[Path, KeeperConnection](), list[KeeperConnection](), list[Path]()
    paths = list[Path]()
    with suppress(OSError):  # without a directory for temporary files, there are no keepers
        paths = sockets_of(runtime_directory(), job)
    for path in paths:
        try:
            connection = connect(path)
            if connection is not None:
                asked[path] = KeeperConnection(connection)
        except TimeoutError:
            silent.append(path)
        except (EOFError, OSError):  # the keeper has just ended
            pass
    deadline = Deadline(timeout)
    for path, keeper in asked.items():
        try:
            keeper.wait_listed(deadline.within(timeout))
        except Exception as error:
            keeper.close()
            if isinstance(error, TimeoutError):
                silent.append(path)
        else:
            found.append(keeper)
    return found, silent


def _found(answer: Answer) -> Found:
    if not isinstance(answer, Found):
        raise ReadError("a keeper runs an incompatible version")
    return answer
