"""Checks that tests leave nothing behind: processes, descriptors, shared memory, temporary files.

Several test processes may run at once on a machine, and each checks only its own resources.
"""

from __future__ import annotations

import gc
import multiprocessing.util
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec.asyn
import psutil
import pytest

from . import servers
from .processes import is_a_servant, memory_files, open_descriptors
from .ranks import eventually

_MARK = "DCP_TENSORIZER_TESTS"
_SHARED_MEMORY = Path("/dev/shm")
_SECONDS = 120.0


@pytest.fixture(scope="session", autouse=True)
def mark() -> Iterator[None]:
    """Marks all that descends from this process, orphans included: children inherit their parent's environment."""
    os.environ[_MARK] = uuid.uuid4().hex
    yield
    del os.environ[_MARK]


@pytest.fixture(scope="session", autouse=True)
def temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory for temporary files that no other program uses, so that one left over is ours."""
    multiprocessing.util.get_temp_dir()  # it exists until this process ends, so it must not be in this folder
    folder = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield folder


def _shown(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[:6])
    except psutil.Error:  # it has ended, and its parent has not waited for it
        return process.name()


def _present(temporary: Path) -> dict[str, set[str]]:
    process = psutil.Process()
    children = [
        child
        for child in process.children(recursive=True)
        if child.pid not in servers.pids() and not is_a_servant(child)
    ]
    return {
        "processes": {f"{child.pid} {_shown(child)}" for child in children},
        "sockets": {str(connection.fd) for connection in process.net_connections("unix")},
        "descriptors": {target for target in open_descriptors().values() if target.startswith(str(temporary))},
        "memory": {str(inode) for inode in memory_files()},
        "temporary files": {name for name in os.listdir(temporary) if not name.startswith("torchinductor_")},
        "shared memory": {name for name in _in_shared_memory() if name.startswith(f"torch_{os.getpid()}_")},
    }


@pytest.fixture(scope="module", autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest, temporary_directory: Path) -> Iterator[None]:
    """Fails a module whose tests leave processes, descriptors, shared memory or temporary files."""
    fsspec.asyn.get_loop()  # a thread with an event loop, which fsspec keeps for the life of a process
    before, failed = _present(temporary_directory), request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        return  # the tracebacks of failed tests hold references to the tests' objects
    left = _difference(before, _present(temporary_directory))
    if left:
        # Or it is only not collected yet. A collection goes through all of torch, so it does not run after each module.
        gc.collect()
        left = _difference(before, _present(temporary_directory))
    assert not left, f"the tests of this module left behind: {left}"


def _difference(before: dict[str, set[str]], after: dict[str, set[str]]) -> dict[str, list[str]]:
    return {kind: sorted(names - before[kind]) for kind, names in after.items() if names - before[kind]}


@pytest.fixture(autouse=True)
def nothing_left(temporary_directory: Path) -> Iterator[None]:
    """Fails a test that leaves a process, also an orphan, a file in /dev/shm or a temporary file of the package."""
    before = _files(temporary_directory)
    yield
    _, alive = psutil.wait_procs(_descendants(), timeout=_SECONDS)
    left = [f"{process.pid}: {' '.join(process.cmdline())}" for process in alive if process.is_running()]
    for process in alive:
        process.kill()
    assert not left, left
    eventually(lambda: _files(temporary_directory) <= before, _SECONDS)
    assert _files(temporary_directory) <= before


def _descendants() -> list[psutil.Process]:
    """Everything that descends from this process, also what has been orphaned since."""
    found = {process for process in psutil.process_iter() if process.pid != os.getpid() and _is_ours(process)}
    found.update(psutil.Process().children(recursive=True))
    return [process for process in found if process.pid not in servers.pids() and not is_a_servant(process)]


def _is_ours(process: psutil.Process) -> bool:
    try:
        return process.environ().get(_MARK) == os.environ[_MARK]
    except psutil.Error:
        return False


def _files(temporary: Path) -> set[str]:
    """Temporary files of the package, and all files in /dev/shm except those of other living processes."""
    spools = {str(path) for path in temporary.glob("dcp_tensorizer-*")}
    return spools | {name for name in _in_shared_memory() if not name.startswith("tmp") and not _is_anothers(name)}


def _in_shared_memory() -> list[str]:
    return os.listdir(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else []


def _is_anothers(name: str) -> bool:
    """Returns whether a file of torch belongs to a living process that does not descend from this one."""
    creator = name.split("_")[1] if name.startswith("torch_") else ""
    if not creator.isdecimal() or int(creator) == os.getpid():
        return False
    try:
        return not _is_ours(psutil.Process(int(creator)))
    except psutil.Error:
        return False
