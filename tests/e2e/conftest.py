"""After every test nothing may be left: no process, no shared memory, no temporary file."""

import pytest

from ..lab.leak_check import nothing_left
from ..lab.ranks import eventually

__all__ = ["keepers", "nothing_left"]


@pytest.fixture
def keepers(tmp_path, monkeypatch):
    """The directory that the sockets of keepers are in."""
    base = tmp_path / "runtime"
    base.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    yield base / "dcp_tensorizer"
    assert eventually(lambda: not (base / "dcp_tensorizer").exists()), list((base / "dcp_tensorizer").iterdir())
