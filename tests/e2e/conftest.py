"""After every test nothing may be left: no process, no shared memory, no temporary file."""

import os
import tempfile
import uuid
from pathlib import Path

import psutil
import pytest

from ..lab import servers
from ..lab.processes import is_a_servant
from ..lab.ranks import MARK, eventually

_SECONDS = 120.0


@pytest.fixture(scope="session", autouse=True)
def _mark():
    """Marks this process and, through the environment, all that descend from it. The soak's tests use the same mark."""
    os.environ.setdefault(MARK, uuid.uuid4().hex)
    yield
    os.environ.pop(MARK, None)


@pytest.fixture
def keepers(tmp_path, monkeypatch):
    """The directory that the sockets of keepers are in."""
    base = tmp_path / "runtime"
    base.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    yield base / "dcp_tensorizer"
    assert eventually(lambda: not (base / "dcp_tensorizer").exists()), list((base / "dcp_tensorizer").iterdir())


@pytest.fixture(scope="session")
def _leftovers_before(_mark):
    return _leftovers()


@pytest.fixture(autouse=True)
def _nothing_left(_leftovers_before):
    """Fails the test that leaves a process, a file in /dev/shm or a spool file behind."""
    yield
    _, alive = psutil.wait_procs(_processes(), timeout=_SECONDS)
    left = [f"{process.pid}: {' '.join(process.cmdline())}" for process in alive if process.is_running()]
    for process in alive:
        process.kill()
    assert not left, left
    eventually(lambda: _leftovers() <= _leftovers_before, _SECONDS)
    assert _leftovers() <= _leftovers_before


def _processes():
    """Everything that descends from this process, also what has been orphaned since."""
    found = {process for process in psutil.process_iter() if process.pid != os.getpid() and _is_ours(process)}
    found.update(psutil.Process().children(recursive=True))
    return [process for process in found if process.pid not in servers.pids() and not is_a_servant(process)]


def _is_ours(process):
    try:
        return process.environ().get(MARK) == os.environ[MARK]
    except psutil.Error:
        return False


def _leftovers():
    shared_memory = Path("/dev/shm")
    spools = set(Path(tempfile.gettempdir()).glob("dcp_tensorizer-*"))
    return spools | (set(shared_memory.iterdir()) if shared_memory.exists() else set())
