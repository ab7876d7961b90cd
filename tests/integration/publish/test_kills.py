"""Tests of kills: a process killed while it saves, publishes or applies leaves the old or the new model."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dcp_tensorizer import WriteError, apply_delta, publish
from dcp_tensorizer.tools import list_versions, verify_versions

from ... import warm
from ...lab.models import loaded, next_state, not_of_versions, publish_versions, weights_of, write_model
from ...lab.processes import ROOT, file_size_limit


@pytest.mark.promise("two-publishers")
def test_publishers_that_overlap_leave_whole_versions(tmp_path: Path) -> None:
    """After two to four concurrent publishers, some killed, all versions are whole, and leftovers are removed."""
    command = [warm.python(), "-m", "tests.integration.publish.overlapping", "25", "1", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    counts = {what: int(number) for number, _, what in (line.partition(" ") for line in done.stdout.splitlines())}
    assert all(counts[f"publishers that were {outcome}"] >= 5 for outcome in ("published", "refused", "killed")), counts


@pytest.mark.promise("apply-killed")
@pytest.mark.promise("publisher-killed")
@pytest.mark.promise("model-save-fails")
@pytest.mark.parametrize("what", ["save", "publish", "apply"])
def test_a_kill_leaves_the_old_version_or_the_new_one(tmp_path: Path, what: str) -> None:
    """After a SIGKILL before each change to the disk, the next process finishes the work without leftovers."""
    command = [warm.python(), "-m", "tests.integration.publish.killed", what, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert all(int(kills) >= 20 for kills in done.stdout.split()), done.stdout


@pytest.mark.promise("publisher-killed", reason="a full disk")
def test_a_full_disk_leaves_the_earlier_versions(tmp_path: Path) -> None:
    """The error has the cause; the next publication has the same number, and leaves no rest."""
    published = publish_versions(tmp_path, 2)
    model = write_model(tmp_path / "next", next_state(loaded(tmp_path / "model-2"), 2))
    with file_size_limit(1000), pytest.raises(WriteError, match="File too large"):
        publish(model, published)
    assert [info.version for info in list_versions(published)] == [2, 1]
    assert verify_versions(published).damages == ()
    assert publish(model, published).version == 3
    assert not_of_versions(published) == []


@pytest.mark.promise("apply-killed", reason="a full disk")
def test_a_full_disk_leaves_a_copy_as_it_was(tmp_path: Path) -> None:
    """The error has the cause; the copy gets to the next version when there is room."""
    published, copy = publish_versions(tmp_path, 2), tmp_path / "copy"
    apply_delta(copy, published, version=1)
    before = {file.name: file.read_bytes() for file in copy.iterdir() if file.name != ".publish.lock"}
    with file_size_limit(1000), pytest.raises(WriteError, match="File too large"):
        apply_delta(copy, published)
    assert {file.name: file.read_bytes() for file in copy.iterdir() if file.name != ".publish.lock"} == before
    assert apply_delta(copy, published).version == 2
    assert weights_of(copy) == weights_of(tmp_path / "model-2")
    assert len(list(copy.iterdir())) == len(before) + 1
