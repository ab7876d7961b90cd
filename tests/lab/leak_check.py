"""Looks for what a test module leaves behind: processes, descriptors, shared memory, temporary files."""

from __future__ import annotations

import gc
import multiprocessing.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import fsspec.asyn
import psutil
import pytest
from hypothesis import HealthCheck, settings

from . import servers
from .processes import is_a_servant, memory_files, open_descriptors

# Two busy cores make single examples slow now and then; the number of examples bounds the time.
settings.register_profile(
    "unit", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("unit")


@pytest.fixture(scope="session", autouse=True)
def temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory for temporary files that no other program uses, so that one left over is ours."""
    multiprocessing.util.get_temp_dir()  # it is removed when this process ends, and so has to be elsewhere
    folder = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield folder


def _shown(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[:6])
    except psutil.Error:  # it has ended, and nobody has waited for it
        return process.name()


def _present(temporary: Path) -> dict[str, set[str]]:
    process = psutil.Process()
    children = [
        child
        for child in process.children(recursive=True)
        if child.pid not in servers.pids() and not is_a_servant(child)
    ]
    shared = os.listdir("/dev/shm") if Path("/dev/shm").is_dir() else []
    return {
        "processes": {f"{child.pid} {_shown(child)}" for child in children},
        "sockets": {str(connection.fd) for connection in process.net_connections("unix")},
        "descriptors": {target for target in open_descriptors().values() if target.startswith(str(temporary))},
        "memory": {str(inode) for inode in memory_files()},
        "temporary files": {name for name in os.listdir(temporary) if not name.startswith("torchinductor_")},
        "shared memory": {name for name in shared if name.startswith(f"torch_{os.getpid()}_")},
    }


@pytest.fixture(scope="module", autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest, temporary_directory: Path) -> Iterator[None]:
    """Fails a module whose tests leave processes, descriptors, shared memory or temporary files."""
    fsspec.asyn.get_loop()  # a thread with an event loop, which fsspec keeps for the life of a process
    before, failed = _present(temporary_directory), request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        return  # the tracebacks of failed tests keep what those tests had
    left = _difference(before, _present(temporary_directory))
    if left:  # or only not collected yet: a collection goes through all of torch, so not after each module
        gc.collect()
        left = _difference(before, _present(temporary_directory))
    assert not left, f"the tests of this module left behind: {left}"


def _difference(before: dict[str, set[str]], after: dict[str, set[str]]) -> dict[str, list[str]]:
    return {kind: sorted(names - before[kind]) for kind, names in after.items() if names - before[kind]}
