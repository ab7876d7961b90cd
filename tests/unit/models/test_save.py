"""Tests of the directory of a published model: it is cleaned up and released when publishing no longer needs it."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dcp_tensorizer._models.save import ModelSave
from dcp_tensorizer._storage.local import LocalStorage
from dcp_tensorizer.models import SafetensorsStorageWriter


class _Interrupted(deque[Callable[[], None]]):
    """A deque whose `append` is interrupted by a signal."""

    def append(self, operation: Callable[[], None]) -> None:
        super().append(operation)
        signal.raise_signal(signal.SIGUSR1)


def test_a_signal_may_release_a_directory_at_any_time(tmp_path: Path) -> None:
    """A signal handler that closes the writer just after the save has delayed its clean-up does not wait for a lock."""
    saver: Any = SafetensorsStorageWriter(tmp_path).saver
    save = ModelSave(saver, "a" * 32, tmp_path, None)
    save._lock = save.storage.lock_directory()
    release = save.hold()
    save._held = _Interrupted()
    before = signal.signal(signal.SIGUSR1, lambda *_: release())
    try:
        save.end()
    finally:
        signal.signal(signal.SIGUSR1, before)
    again = LocalStorage(tmp_path).lock_directory()
    assert again.is_exclusive
    again.release()
