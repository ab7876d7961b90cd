from __future__ import annotations

from pathlib import Path

import pytest

from dcp_tensorizer._tiers import queue


@pytest.fixture
def aside(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where queues write down what a disk refuses: not in /dev/shm, where those of other tests may do so."""
    folder = tmp_path_factory.mktemp("aside")
    monkeypatch.setattr(queue, "_MEMORY", (str(folder),))
    return folder
