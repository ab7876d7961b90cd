"""Starts the child processes of this package. `ChildProcess` runs in the trainer, `begin` in the child.

`multiprocessing` is no alternative: it imports the user's ``__main__`` again, and is forbidden in daemonic processes.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from . import process_context
from .channel import Channel
from .forks import Descriptor, above_standard_streams, anonymous_file, free_in_child, in_child, limit_advice

END_SECONDS = 5.0
"""Timeout for the end of a process with a request in progress. An idle process ends in milliseconds."""

_KILL_SECONDS = 0.5  # a killed process ends in milliseconds, unless it hangs in the kernel
_OUTPUT_TAIL = 4000  # the last bytes of a dead process's output, which its error shows
_OF_JOB = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGTSTP", "SIGXCPU")
)
"""Signals that terminals and schedulers send to every process of a job. Child processes ignore them."""
_unended: list[subprocess.Popen[bytes]] = []
"""Processes that were killed and have not ended yet. Later calls to `kill` reap them, so that none stays a zombie."""


class ChildProcess:
    """A child process that answers one request at a time. The constructor starts it.

    Args:
        name: The name of the process in messages, such as "the writer process".
        module: The module whose ``main`` runs in the process and passes its arguments to `begin`.
        arguments: The arguments of ``main`` after those for `begin`.
        devices: Whether the process sees the trainer's GPUs.
        own_session: Whether the process runs in a session of its own, so that signals to the trainer's Unix process
            group do not reach it.

    Attributes:
        is_ours: Whether this process may send requests. False after the child was ended, killed or handed over, and in
            forked children of the trainer.

    Raises:
        OSError: the process cannot be started, for example because memory, processes or descriptors are exhausted.
        RuntimeError: this process was itself started as a child process, but runs the program instead.
    """

    def __init__(
        self, name: str, module: str, arguments: Sequence[str], *, devices: bool = False, own_session: bool = False
    ) -> None:
        self._name = name
        if _PATH in os.environ:
            raise RuntimeError(
                f"this process was started to be a child process of the program, but runs the program again, because "
                f"sys.executable is not a Python interpreter. In this process it is {sys.executable!r}. In the "
                f"program, set it to the path of a Python interpreter, or to None"
            )
        try:
            with ExitStack() as undo:
                self._output = Descriptor(anonymous_file("output"))
                undo.callback(self._output.close)
                ours, theirs = (
                    socket.socket(fileno=above_standard_streams(end.detach())) for end in socket.socketpair()
                )
                undo.callback(ours.close)
                with theirs:
                    self._popen = _start(
                        module, theirs, self._output.number, arguments, devices=devices, own_session=own_session
                    )
                undo.pop_all()
        except OSError as error:
            raise OSError(error.errno, f"{name} cannot be started: {error}{limit_advice(error)}") from error
        self._channel = Channel(ours)
        self._lock = free_in_child(threading.Lock())  # held for a request and its answer
        self.is_ours = True
        in_child(self, ChildProcess._disown)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """Returns whether a request can be sent. False for a process that was killed and hangs in the kernel."""
        return self.is_ours and self._popen.poll() is None

    def _disown(self) -> None:
        self.is_ours = False

    def _exchange(
        self,
        request: object,
        fds: Sequence[int],
        timeout: float,
        progress: Callable[[int], object] = lambda nbytes: None,
    ) -> Any:
        """Sends a request, and returns its answer. The caller holds the lock.

        A timeout, or an exception that interrupts the wait, kills the process: otherwise the next request would get
        the answer to this one.

        Raises:
            TimeoutError: the process made no progress for ``timeout`` seconds.
            EOFError: the process ended; the message has its exit code or signal and its last output.
        """

        def check_alive() -> None:  # EOF is not enough: children of the process may hold the socket open
            if self._popen.poll() is not None:
                raise EOFError

        try:
            answer, _ = self._channel.ask(request, fds, timeout=timeout, check=check_alive, progress=progress)
        except TimeoutError:
            self._kill()
            raise TimeoutError(
                f"{self._name} (pid {self.pid}) made no progress for {timeout:g} s and was killed"
            ) from None
        except (EOFError, OSError):
            raise EOFError(self._cause_of_death()) from None
        except BaseException:  # a KeyboardInterrupt
            self._kill()
            raise
        return answer

    def _kill(self) -> int | None:
        """Kills the process. Returns its exit code, 0 in a forked child, or None if it has not ended yet."""
        self._disown()
        return kill(self._popen)

    def _close_files(self) -> None:
        self._channel.close()
        self._output.close()

    def _cause_of_death(self) -> str:
        """Describes how the process ended, with the end of its output. Kills the process if it has not ended."""
        try:
            code: int | None = self._popen.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            code = self._kill()
        if code is None:
            how = "hangs in the kernel"
        elif code >= 0:
            how = f"ended with exit code {code}"
        else:  # most real-time signals have no name
            names = {number.value: number.name for number in signal.Signals}
            how = f"was killed by {names.get(-code, f'signal {-code}')}"
        content = b""
        with suppress(OSError):
            nbytes = os.fstat(self._output.number).st_size
            content = os.pread(self._output.number, _OUTPUT_TAIL, max(0, nbytes - _OUTPUT_TAIL))
        output = content.decode(errors="replace").strip()
        gap = "\n" if "\n" in output else " "
        when = "" if self._channel.is_ready else " before it was ready"
        return f"{self._name} (pid {self.pid}) {how}{when}" + (
            f"; the end of its output:{gap}{output}" if output else ""
        )


def begin(arguments: Sequence[str], niceness: int) -> tuple[Channel, int, list[str]]:
    """Sets up signals, priority and channel in a process that `ChildProcess` started.

    Returns the channel to the trainer, a pidfd of the trainer for `at_end_of`, and the remaining arguments.
    """
    for number in _OF_JOB:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_JOB)  # the trainer blocks them while it starts this process
    with suppress(OSError):
        os.nice(niceness)
    return Channel(socket.socket(fileno=int(arguments[0]))), int(arguments[1]), list(arguments[2:])


def at_end_of(trainer: int, do: Callable[[], object]) -> None:
    """Calls a function in a new thread as soon as the trainer has ended.

    ``trainer`` is a pidfd that the thread watches, or -1 on systems without pidfds: then no thread starts. EOF on the
    socket is not enough: a forked DataLoader worker can hold the socket open after the trainer's death. Nor is
    PR_SET_PDEATHSIG, which reports the end of the thread that started the process.
    """

    def watch() -> None:
        poll = select.poll()
        poll.register(trainer, select.POLLIN)
        poll.poll()
        do()

    if trainer >= 0:
        threading.Thread(target=watch, name="trainer", daemon=True).start()


def _start(
    module: str, theirs: socket.socket, output: int, arguments: Sequence[str], *, devices: bool, own_session: bool
) -> subprocess.Popen[bytes]:
    trainer = -1
    with suppress(AttributeError, OSError):  # old kernel or sandbox: only the socket's EOF reports the trainer's end
        trainer = above_standard_streams(os.pidfd_open(os.getpid()))
    try:
        # The process inherits the mask, and unblocks these signals after it has set them to be ignored.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_JOB)
        try:
            popen = subprocess.Popen(
                [*interpreter(), module, str(theirs.fileno()), str(trainer), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[fd for fd in (theirs.fileno(), trainer) if fd >= 0],
                env=environment(devices),
                start_new_session=own_session,
            )
            # A forked child can neither wait for the process nor kill it.
            in_child(popen, lambda popen: setattr(popen, "returncode", 0))
            return popen
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    finally:
        if trainer >= 0:
            os.close(trainer)


def kill(popen: subprocess.Popen[bytes]) -> int | None:
    """Kills a process. Returns its exit code, or None if the process hangs in the kernel and ends later.

    The wait has a timeout, because `wait` without one takes a lock, and a signal handler may have interrupted the
    holder of that lock.
    """
    with suppress(PermissionError):  # the trainer has changed its user id; the process ends at the socket's EOF
        popen.kill()
    with suppress(subprocess.TimeoutExpired):
        popen.wait(_KILL_SECONDS)
    _unended.append(popen)
    for killed in list(_unended):
        if killed.poll() is not None:
            with suppress(ValueError):  # another thread has removed it
                _unended.remove(killed)
    return popen.returncode


# --- starting the interpreter, with the trainer's modules -------------------------------------------------------------
#
# The process must find the modules that the trainer finds, because its messages are pickles, and a storage may need a
# plugin. PYTHONPATH and the working directory are ignored.

_PATH = "DCP_TENSORIZER_PATH"
_GPUS = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "")  # no context, no GPU memory
_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")

OWN_VARIABLES = frozenset({*_GPUS, *_THREADS, "PYTHONPATH"})
"""The environment variables of a child process that the context of a save does not change."""

# -S limits the path to the standard library. -c adds a first entry for the working directory, except under
# PYTHONSAFEPATH. Before Python 3.11 this entry cannot be switched off, so it is removed here. Then the installed
# packages (site) and the trainer's entries are appended, among them zip files and the archives of editable installs.
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

# The modules that a child process imports, apart from those of a storage.
_NEEDED = (__name__.partition(".")[0], "fsspec", "isal", "numpy", "torch", "xxhash")


def interpreter() -> list[str]:
    """Returns the start of a command line. Append a module, whose ``main`` is called, and its arguments.

    Raises `OSError` if the path of the interpreter is unknown, or is that of an application.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        raise OSError(f"sys.executable is {sys.executable!r}, which is not a Python interpreter")
    flags = {"-E": sys.flags.ignore_environment, "-s": sys.flags.no_user_site}
    as_here = [flag for flag, is_set in flags.items() if is_set]
    names_of_files = f"utf8={int(sys.flags.utf8_mode)}"
    return [sys.executable, *as_here, "-X", names_of_files, "-W", "ignore", "-S", "-c", _START]


def environment(devices: bool) -> dict[str, str]:
    """Returns the trainer's environment, with its module path, and one thread for OpenMP and MKL.

    Unless ``devices``, hides the GPUs.
    """
    given = {name: value for name, value in process_context.environment().items() if name != "PYTHONPATH"}
    # The entries in which the needed modules were found come first: an entry that the trainer has prepended since could
    # shadow these modules.
    entries = [entry for entry in sys.path if isinstance(entry, str)]
    try:
        entries = [os.path.abspath(entry) for entry in entries]
    except FileNotFoundError:  # the working directory was removed: relative entries cannot be resolved
        entries = [entry for entry in entries if os.path.isabs(entry)]
    files = [file for name in _NEEDED if (file := getattr(sys.modules.get(name), "__file__", None))]
    homes = {os.path.dirname(os.path.dirname(os.path.abspath(str(file)))) for file in files}
    path = sorted(dict.fromkeys([*entries, *sorted(homes)]), key=lambda entry: entry not in homes)
    return given | ({} if devices else _GPUS) | _THREADS | {_PATH: os.pathsep.join(path)}
