"""A directory on the remote, of which this node has a copy: what is listed, locked and written."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_tensorizer._storage.local import LocalStorage
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._tiers.queue import FlushRecord
from dcp_tensorizer._tiers.tiered_storage import NearestStorage, nearest

from ...lab.waiting import WAIT
from .support import ID, Run

FILE = f"__0_0_{ID}.tensors"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Returns a run whose local folder has the data of a checkpoint that is not on the remote yet."""
    run = Run(tmp_path)
    (run.local / "step-1").mkdir(parents=True)
    (run.local / "step-1" / FILE).write_bytes(b"data")
    run.queue.begin(FlushRecord(run.target.name, "step-1", 0, ID)).written({FILE: 4}, sync=False)
    return run


def test_the_copy_is_locked_while_it_is_read(run: Run) -> None:
    """A restore locks the local copy, which the flush then does not remove. Without a copy there is nothing to lock."""
    remote = open_storage("memory://bucket/locked")
    copied, missing = (NearestStorage(run.target, remote, subpath) for subpath in ("step-1", "step-2"))
    assert (copied.locks_are_visible, missing.locks_are_visible) == (True, False)
    with copied.lock_directory() as lock:
        lock.share(WAIT)
        with LocalStorage(run.local / "step-1").lock_directory() as other:
            assert not other.is_exclusive


def test_a_folder_that_the_remote_does_not_have_yet(run: Run) -> None:
    """Before the first checkpoint of a job arrives on the remote, it is listed in the local folder."""
    folder = nearest(run.remote, None, WAIT, run.local)(run.remote)
    assert (folder.listing(), folder.linked_directories()) == (([], ["step-1"]), [])
    assert not run.remote.exists()


def test_what_is_written_goes_to_the_remote(run: Run) -> None:
    """A write replaces a file on the remote, and leaves the local copy alone."""
    remote = open_storage("memory://bucket/written")
    storage = NearestStorage(run.target, remote, "step-1")
    for content in (b"first", b"second"):
        storage.put("latest", content, sync=False)
        assert (storage.read("latest"), remote.read("latest")) == (content, content)
    storage.remove("latest")
    assert remote.head("latest") is None
    assert [path.name for path in (run.local / "step-1").iterdir()] == [FILE]
