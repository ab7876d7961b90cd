"""The run that a folder belongs to: who claims it, and who is told."""

from __future__ import annotations

import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dcp_tensorizer._storage.base import Refused
from dcp_tensorizer._storage.lease import Lease, lease_file_name, read_lease
from dcp_tensorizer._storage.local import LocalStorage
from dcp_tensorizer.errors import ReadError

NAME = lease_file_name("step-N")


def run_of(folder: Path) -> Lease:
    """Returns the lease of a run that has taken it."""
    owner = Lease(LocalStorage(folder), NAME)
    owner.check()
    return owner


def epoch_in(folder: Path) -> int:
    claim = read_lease(LocalStorage(folder), NAME)
    assert claim is not None
    return claim.epoch


def test_each_run_counts_one_more(tmp_path: Path) -> None:
    """A run creates the folder, takes the lease once, and writes its id into the file."""
    first = run_of(tmp_path / "run")
    first.check()
    assert epoch_in(tmp_path / "run") == 1
    second = run_of(tmp_path / "run")
    claim = read_lease(LocalStorage(tmp_path / "run"), NAME)
    assert claim is not None
    assert (claim.epoch, claim.id, claim.host, claim.process) == (2, second.id, socket.gethostname(), os.getpid())
    assert os.listdir(tmp_path / "run") == [".step-N.claim"]


def test_the_older_run_is_told(tmp_path: Path) -> None:
    """Each later check refuses the older run, even if the lease file is removed, and accepts the newer run."""
    first, second = run_of(tmp_path), run_of(tmp_path)
    words = f"{tmp_path} now belongs to another run: process {os.getpid()} on host {socket.gethostname()} took "
    with pytest.raises(Refused, match=r"as run 2; this is run 1, which took it at .* Use one folder per job") as e:
        first.check()
    assert str(e.value).startswith(words)
    second.check()
    (tmp_path / NAME).unlink()
    with pytest.raises(Refused, match="belongs to another run"):
        first.check()
    second.check()
    assert (bool(first.lost), second.lost) == (True, "")


def test_runs_that_meet_have_different_epochs(tmp_path: Path) -> None:
    """The second of two runs sees the lease of the first, and takes the next epoch."""
    with ThreadPoolExecutor(4) as pool:
        owners = list(pool.map(lambda _: run_of(tmp_path), range(4)))
    assert epoch_in(tmp_path) == 4
    told = [owner for owner in owners if _is_told(owner)]
    assert len(told) == 3


def _is_told(owner: Lease) -> bool:
    try:
        owner.check()
    except Refused:
        return True
    return False


class LosesAnswers(LocalStorage):
    """The put succeeds or is refused because another run has put its lease first."""

    def put_if(self, name: str, expected: bytes | None, data: bytes, *, sync: bool = True, save_id: str = "") -> bool:
        super().put_if(name, expected, data, sync=sync, save_id=save_id)
        return False


def test_a_lost_answer(tmp_path: Path) -> None:
    """If the answer to a put is lost, the run finds its own lease and takes it once."""
    owner = Lease(LosesAnswers(tmp_path), NAME)
    owner.check()
    owner.check()
    assert epoch_in(tmp_path) == 1


def test_what_is_no_claim_is_replaced(tmp_path: Path) -> None:
    """Fields that a later release has added to a lease are ignored."""
    (tmp_path / NAME).write_bytes(b"\x00 damaged")
    first = run_of(tmp_path)
    assert epoch_in(tmp_path) == 1
    claim = json.loads((tmp_path / NAME).read_text())
    (tmp_path / NAME).write_text(json.dumps(claim | {"region": "here"}))
    first.check()
    run_of(tmp_path)
    assert epoch_in(tmp_path) == 2


def test_jobs_of_other_names_do_not_meet(tmp_path: Path) -> None:
    """Jobs with different step names share a folder, each with its own lease."""
    first = run_of(tmp_path)
    other = Lease(LocalStorage(tmp_path), lease_file_name("ema-N"))
    other.check()
    first.check()
    assert sorted(os.listdir(tmp_path)) == [".ema-N.claim", ".step-N.claim"]


class Unreadable(LocalStorage):
    """A storage that cannot be read for a while."""

    is_broken = True

    def read(self, name: str, most: int | None = None) -> bytes | None:
        if self.is_broken:
            raise ReadError("cannot read: the cable is out")
        return super().read(name, most)


def test_a_folder_that_cannot_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`take` logs a warning, each check raises, and a check takes the lease when the folder can be read again."""
    folder = Unreadable(tmp_path)
    owner = Lease(folder, NAME)
    owner.take()
    assert (
        f"the lease of {tmp_path} cannot be taken: cannot read: the cable is out; retrying before the first commit"
        in caplog.text
    )
    with pytest.raises(Refused, match="cannot be taken"):
        owner.check()
    folder.is_broken = False
    owner.check()
    folder.is_broken = True
    with pytest.raises(Refused, match="cannot be checked"):
        owner.check()
    assert (owner.lost, epoch_in(tmp_path)) == ("", 1)
