"""Tests of kills: a process killed while it saves, publishes or applies leaves the old or the new model."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ... import warm
from ...lab.processes import ROOT


@pytest.mark.promise("two-publishers")
def test_publishers_that_overlap_leave_whole_versions(tmp_path: Path) -> None:
    """After two to four concurrent publishers, some killed, all versions are whole, and leftovers are removed."""
    command = [warm.python(), "-m", "tests.integration.publish.overlapping", "25", "1", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    counts = {what: int(number) for number, _, what in (line.partition(" ") for line in done.stdout.splitlines())}
    assert all(counts[f"publishers that were {outcome}"] >= 5 for outcome in ("published", "refused", "killed")), counts


@pytest.mark.parametrize("what", ["save", "publish", "apply"])
def test_a_kill_leaves_the_old_version_or_the_new_one(tmp_path: Path, what: str) -> None:
    """After a SIGKILL before each change to the disk, the next process finishes the work without leftovers."""
    command = [warm.python(), "-m", "tests.integration.publish.killed", what, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert all(int(kills) >= 20 for kills in done.stdout.split()), done.stdout
