"""A process of this package beside the trainer: starts and kills it, and reads its output."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from .._runtime import process_context
from .._runtime.forks import Descriptor, above_standard_streams, in_child

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
    """Keeps the process that was started from ending or stopping by signals to every process of the job."""
    for number in _OF_JOB:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_JOB)


def kill(popen: subprocess.Popen[bytes]) -> int | None:
    """Kills a process and returns its exit code; None if it hangs in the kernel, say for a network disk, and ends
    later.

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


# --- starting the interpreter, with the trainer's modules -------------------------------------------------------------
#
# It finds the modules that the trainer finds, because its messages are pickles, and a storage may need a plugin. But a
# ``queue.py`` among the trainer's scripts must not replace the standard library's. So nothing of the trainer's
# ``sys.path`` comes before the standard library, whatever is in PYTHONPATH or the working directory.

_PATH = "DCP_TENSORIZER_PATH"
_GPUS = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "")  # no context, no GPU memory
_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")

OWN_VARIABLES = frozenset({*_GPUS, *_THREADS, "PYTHONPATH"})
"""The environment variables that a process of this package does not take from its trainer."""

# With -S the path is the standard library alone, and with -c a first entry for the working directory, which is not
# there under PYTHONSAFEPATH and before Python 3.11 cannot be switched off. Only then come the installed packages (site)
# and what the trainer has. A zip file or an archive of an editable install is found as any other entry.
_START = f"""
import sys
sys.path[:] = library = [entry for entry in sys.path if entry]
import os, site
try:
    os.getcwd()
except OSError:
    os.chdir("/")
site.main()
given = os.environ.pop({_PATH!r}).split(os.pathsep)
sys.path[:] = library + [entry for entry in dict.fromkeys(given + sys.path) if entry and entry not in library]
from importlib import import_module
import_module(sys.argv[1]).main(sys.argv[2:])
"""

# What the writer process imports, apart from what a storage needs.
_NEEDED = (__name__.partition(".")[0], "fsspec", "isal", "numpy", "torch", "xxhash")


def interpreter() -> list[str]:
    """The beginning of a command. A module, whose ``main`` is called, and its arguments follow."""
    flags = {"-E": sys.flags.ignore_environment, "-s": sys.flags.no_user_site}
    as_here = [flag for flag, is_set in flags.items() if is_set]
    names_of_files = f"utf8={int(sys.flags.utf8_mode)}"
    return [sys.executable, *as_here, "-X", names_of_files, "-W", "ignore", "-S", "-c", _START]


def environment(devices: bool) -> dict[str, str]:
    """The trainer's environment, less its GPUs unless they are to be used, and the way to its modules."""
    given = {name: value for name, value in process_context.environment().items() if name != "PYTHONPATH"}
    return given | ({} if devices else _GPUS) | _THREADS | {_PATH: os.pathsep.join(_module_path())}


def _module_path() -> list[str]:
    """The trainer's ``sys.path``, in its order, but first of all where the modules that are needed were found.

    Otherwise an entry that the trainer has put in front since it imported them could replace them.
    """
    entries = [entry for entry in sys.path if isinstance(entry, str)]
    try:
        entries = [os.path.abspath(entry) for entry in entries]
    except FileNotFoundError:  # the working directory has been removed, and what is relative to it leads nowhere
        entries = [entry for entry in entries if os.path.isabs(entry)]
    homes = {_home(name) for name in _NEEDED if getattr(sys.modules.get(name), "__file__", None)}
    return sorted(dict.fromkeys([*entries, *sorted(homes)]), key=lambda entry: entry not in homes)


def _home(package: str) -> str:
    """The entry of ``sys.path`` that a package was found in."""
    return os.path.dirname(os.path.dirname(os.path.abspath(str(sys.modules[package].__file__))))
