"""This process and others: running programs, writer processes, keepers, and their open files."""

from __future__ import annotations

import logging
import os
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from .. import warm

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "dcp_tensorizer"
WORKER = "dcp_tensorizer._writer_process.worker"
_MOUNT_NAMESPACE = ("unshare", "--map-root-user", "--mount", "sh", "-c")


def is_mapped(address: int) -> bool:
    """Returns whether this process has memory at an address."""
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in ranges)


def is_so_in_child(look: Callable[[], bool]) -> bool:
    """Returns whether a function returns True in a forked child."""
    child = os.fork()
    if child == 0:
        os._exit(0 if look() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def is_a_servant(process: psutil.Process) -> bool:
    """Returns whether a process is a fork server or a resource tracker, which live as long as this process."""
    if process.pid in warm.pids():
        return True
    try:
        arguments = " ".join(process.cmdline())
        return "multiprocessing.resource_tracker" in arguments or "from multiprocessing.forkserver" in arguments
    except psutil.Error:
        return True


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """Makes the operating system refuse files larger than this, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def run_python(
    script: str, *arguments: object, timeout: float = 600.0, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs a script in a separate interpreter. If the script fails, fails with its output.

    A ``fresh`` interpreter begins and ends as every interpreter does; others have already imported torch.
    """
    return _run([sys.executable if fresh else warm.python(), "-c", script, *map(str, arguments)], timeout)


def can_mount(mounts: str) -> bool:
    """Returns whether tests can mount something that no other process sees."""
    return subprocess.run([*_MOUNT_NAMESPACE, mounts], capture_output=True, check=False).returncode == 0


def run_python_with(mounts: str, script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a script after shell commands that mount something: ``$1`` in them is the script's first argument."""
    command = f'script="$1" && shift && {mounts} && exec "$0" -c "$script" "$@"'
    return _run([*_MOUNT_NAMESPACE, command, sys.executable, script, *map(str, arguments)], 600.0)


def _run(command: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        env=os.environ | {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@contextmanager
def quietly() -> Iterator[None]:
    """Silences warnings, and the logs of saves and loads that fail as a test expects."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def open_descriptors() -> dict[int, str]:
    """The descriptors of this process and what they refer to."""
    targets = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            targets[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the one that listed them
    return targets


def forget(path: Path) -> None:
    """Drops a file's pages from the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def writer_process() -> psutil.Process:
    """The writer process of this process; there must be just one."""
    (process,) = workers()
    return process


def workers() -> list[psutil.Process]:
    """The writer processes of this process that live."""
    children = psutil.Process().children()
    alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if WORKER in _command(child)]


def keepers_below(folder: Path) -> list[psutil.Process]:
    """The processes whose sockets are in a folder: other jobs on this machine may have keepers as well."""
    processes = psutil.process_iter(["cmdline"])
    return [p for p in processes if any(word.startswith(f"{folder}/") for word in p.info["cmdline"] or ())]


def end_keepers(folder: Path) -> None:
    """Kills the keepers of a folder, and reaps the children of this process that have ended, such as keepers."""
    for process in keepers_below(folder):
        process.kill()
        process.wait()
    for child in psutil.Process().children():
        if child.status() == psutil.STATUS_ZOMBIE:
            child.wait()


def _command(process: psutil.Process) -> list[str]:
    """A process' command line. A process that has just started has none for a moment, and a dead one has none."""
    deadline = time.monotonic() + 1.0
    with suppress(psutil.Error):
        while not (command := process.cmdline()) and time.monotonic() < deadline:
            time.sleep(0.001)
        return command
    return []


def kill(process: psutil.Process) -> None:
    """Kills a child, and returns when it is dead. Its parent can still read its exit status."""
    process.kill()
    with suppress(ChildProcessError):  # its parent has already read the exit status
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def memory_files() -> set[int]:
    """The inodes of the buffers' memory files that this process has open or mapped."""
    mark = "memfd:dcp_tensorizer"
    opened = {os.stat(f"/proc/self/fd/{fd}").st_ino for fd, target in open_descriptors().items() if mark in target}
    return opened | {int(line.split()[4]) for line in Path("/proc/self/maps").read_text().splitlines() if mark in line}
