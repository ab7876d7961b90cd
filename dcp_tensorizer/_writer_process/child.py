"""A process of this package's own beside the trainer: how it is started and killed, and what it has said."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from .._descriptor import Descriptor, above_standard_streams
from .._forks import in_child
from .interpreter import environment, interpreter

__all__ = ["ignore_job_signals", "kill", "said_by", "socket_pair", "start"]

_KILL_SECONDS = 0.5  # a process that is killed ends in milliseconds, but for one that hangs in the kernel
_OUTPUT_TAIL = 4000  # bytes
_OF_JOB = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGTSTP", "SIGXCPU")
)
"""What terminals and schedulers send to every process of a job. The trainer decides what becomes of it."""
_unended: list[subprocess.Popen[bytes]] = []
"""Killed, and not waited for to the end: that is done later, or else they would stay zombies."""


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two sockets that are connected, above the standard streams (see `above_standard_streams`); raises `OSError`."""
    ours, theirs = socket.socketpair()
    return _above(ours), _above(theirs)


def _above(end: socket.socket) -> socket.socket:
    return socket.socket(fileno=above_standard_streams(end.detach()))


def start(
    module: str,
    theirs: socket.socket,
    output: int,
    arguments: Sequence[str],
    *,
    devices: bool = False,
    own_session: bool = False,
) -> subprocess.Popen[bytes]:
    """Starts a process at the other end of a socket; raises `OSError`.

    Args:
        module: Whose ``main`` is called, with the descriptor of the socket, that of a pidfd of this process or -1 where
            there are none, and the arguments.
        theirs: Its end of the socket.
        output: The descriptor that its output goes to.
        arguments: More of them.
        devices: It sees the trainer's GPUs.
        own_session: What is sent to the trainer's process group does not reach it.
    """
    trainer = -1
    with suppress(AttributeError, OSError):  # an older kernel, or a sandbox; then the socket alone tells of our end
        trainer = above_standard_streams(os.pidfd_open(os.getpid()))
    try:
        with _job_signals_blocked():
            popen = subprocess.Popen(
                [*interpreter(), module, str(theirs.fileno()), str(trainer), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[fd for fd in (theirs.fileno(), trainer) if fd >= 0],
                env=environment(devices),
                start_new_session=own_session,
            )
            in_child(popen, _leave_to_parent)
            return popen
    finally:
        if trainer >= 0:
            os.close(trainer)


def _leave_to_parent(popen: subprocess.Popen[bytes]) -> None:
    popen.returncode = 0  # it can be neither waited for nor killed here


@contextmanager
def _job_signals_blocked() -> Iterator[None]:
    """A process that is started in it has them blocked, until it says that it ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_JOB)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_job_signals() -> None:
    """For the process that was started: what is sent to every process of the job does not end or stop it."""
    for number in _OF_JOB:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_JOB)


def kill(popen: subprocess.Popen[bytes]) -> int | None:
    """Its exit code; None if it hangs in the kernel, say for a network disk, and ends when that is over.

    Without a timeout, `wait` would also wait for a lock, which the thread that a signal interrupts may hold.
    """
    with suppress(PermissionError):  # the trainer is another user since; the process ends with its socket
        popen.kill()
    with suppress(subprocess.TimeoutExpired):
        popen.wait(_KILL_SECONDS)
    _unended.append(popen)
    for killed in list(_unended):
        if killed.poll() is not None:
            with suppress(ValueError):  # another thread has just removed it
                _unended.remove(killed)
    return popen.returncode


def said_by(output: Descriptor) -> str:
    """The end of a process's output, as the end of a message; empty if it has said nothing."""
    content = b""
    with suppress(OSError):
        nbytes = os.fstat(output.number).st_size
        content = os.pread(output.number, _OUTPUT_TAIL, max(0, nbytes - _OUTPUT_TAIL))
    said = content.decode(errors="replace").strip()
    return f"; the end of its output:\n{said}" if said else ""
