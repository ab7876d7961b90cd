"""The directory of a model that is published is cleaned up and released when it is no longer needed."""

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
    """A list that a signal interrupts as soon as something is in it."""

    def append(self, operation: Callable[[], None]) -> None:
        super().append(operation)
        signal.raise_signal(signal.SIGUSR1)


def test_a_signal_may_release_a_directory_at_any_time(tmp_path: Path) -> None:
    """As one that closes the writer, just when the save has put off its clean-up: no lock keeps it waiting."""
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
