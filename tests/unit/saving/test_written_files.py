"""The removal of a rank's files after its save failed on another rank."""

from __future__ import annotations

import pickle
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from dcp_tensorizer import WriteError
from dcp_tensorizer._saving.commit import WrittenFiles, failed_before_commit, is_uncommitted
from dcp_tensorizer._storage.local import LocalStorage
from dcp_tensorizer._tensor_file.names import data_file_name


def test_a_mark_comes_to_the_other_ranks() -> None:
    """The mark proves that a rank's part failed. Without it, the save may be committed, with a lost response."""
    failed, unknown = WriteError("rank 1: full"), WriteError("no answer")
    failed_before_commit(failed)
    failed, unknown = pickle.loads(pickle.dumps((failed, unknown)))
    assert str(failed) == "rank 1: full"
    assert is_uncommitted(CheckpointException("write", {0: (unknown, None), 1: (failed, None)}))  # type: ignore[dict-item]
    assert not is_uncommitted(CheckpointException("write", {0: (unknown, None)}))  # type: ignore[dict-item]
    assert is_uncommitted(failed)
    assert not is_uncommitted(unknown)


def test_only_its_own_files_go(tmp_path: Path) -> None:
    """Files of other ranks in the same directory stay."""
    own, other = (data_file_name(rank, 0, "a" * 32) for rank in (0, 1))
    for name in (own, other):
        (tmp_path / name).write_bytes(b"x")
    files = WrittenFiles()
    files.remove()
    files.set(LocalStorage(tmp_path), [own])
    files.remove()
    files.remove()
    assert [path.name for path in tmp_path.iterdir()] == [other]
