"""These tests run in one process and leave nothing behind: each module is checked for that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dcp_tensorizer import TensorizerStorageWriter

from ..lab.leak_check import nothing_left_behind
from ..lab.processes import end_keepers

__all__ = ["nothing_left_behind", "sockets"]


@pytest.fixture
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of the keepers' sockets; nothing is left in it."""
    base = tmp_path / "runtime"
    base.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    yield base / "dcp_tensorizer"
    end_keepers(base / "dcp_tensorizer")


@pytest.fixture(scope="module")
def one_writer_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The saves of a module share a writer process, as those of a job do, instead of starting one each."""
    with TensorizerStorageWriter(tmp_path_factory.mktemp("open")) as writer:
        writer.prewarm({"x": torch.zeros(1000)})
        yield
