"""A short run of each part of the soak."""

import os
import shutil
import subprocess

import pytest

from ..soak import (
    crashes,
    disks,
    exchanges,
    faults,
    forks,
    interleavings,
    managers,
    power_cuts,
    surroundings,
    tiers,
)


def blamed(tally):
    return (tally.lost, tally.wrong, tally.hung, tally.left, tally.found)


NOTHING = (0, 0, 0, 0, [])


def test_a_dozen_saves_with_faults(tmp_path):
    """Nothing is lost, wrong, hung or left over; what should fail fails, and everything else is committed."""
    tally = faults.run(13, 3, tmp_path)
    assert blamed(tally) == NOTHING
    assert tally.rounds == 13
    saves = {words: int(number) for words, number, *_ in tally.table[1:]}
    fatal = sum(saves[faults.FAULTS[fault]] for fault in faults.FATAL)
    assert tally.counts["loads"] >= 13 - fatal
    assert all(saves[faults.FAULTS[fault]] > 0 for fault in ("none", "writer killed once", "data refused"))
    assert fatal > 0


def test_interleavings(tmp_path):
    """In three rounds all actors have done something, and nothing is lost, wrong, hung or left over."""
    tally = interleavings.run(3, 1, tmp_path)
    assert blamed(tally) == NOTHING
    assert tally.rounds == 3
    assert tally.counts["saves: committed"] > 6
    assert tally.counts["loads: whole"] > 6
    assert tally.counts["checkpoints copied or moved in"] == 6
    assert tally.counts["checkpoints loaded between the rounds"] > 6


def test_exchanges(tmp_path):
    """In six loads something has been exchanged, and nothing is wrong or hung."""
    tally = exchanges.run(6, 1, tmp_path)
    assert blamed(tally) == NOTHING
    assert tally.rounds == 6
    assert tally.counts["bytes received"] > 0


def _can_mount():
    if os.geteuid() or shutil.which("mkfs.ext4") is None:
        return False
    look = 'losetup --find >/dev/null && test -w "$(losetup --find)" && unshare --mount true'
    return subprocess.run(["sh", "-c", look], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not _can_mount(), reason="this system lets nobody mount a file system from a file")
def test_power_cuts(tmp_path):
    """After each of three, what was reported as saved is there, and nothing is lost, wrong, hung or left over."""
    tally = power_cuts.run(3, 1, tmp_path)
    assert blamed(tally) == NOTHING
    assert tally.rounds == 3
    assert tally.counts["checkpoints loaded"] > 3


@pytest.mark.skipif(not _can_mount(), reason="this system lets nobody mount a file system from a file")
def test_full_and_read_only_disks(tmp_path):
    """After each of two each place holds what it may, and nothing is lost, wrong, hung or left over."""
    tally = disks.run(2, 1, tmp_path)
    assert blamed(tally) == NOTHING
    assert tally.rounds == 2
    assert tally.counts["saves committed"] > 2
    assert tally.counts["checkpoints loaded"] > 2


def test_surroundings_that_change(tmp_path):
    """Each of four saves has those of its beginning, and nothing is lost, wrong, hung or left over."""
    before = os.umask(0o022)
    try:
        tally = surroundings.run(4, 2, tmp_path)
        assert os.umask(before) == 0o022
    finally:
        os.umask(before)
    assert blamed(tally) == NOTHING
    assert sum(number for what, number in tally.counts.items() if what.startswith("saves to: ")) == tally.rounds == 4


def test_enumerated_crashes(tmp_path):
    """Of one scenario, with two tensors, each state is counted, and none is bad."""
    tally = crashes.run(1, 7, tmp_path)
    assert blamed(tally) == NOTHING
    ((_, states, _, bad),) = tally.table[1:]
    assert (int(states.replace(",", "")), bad) == (tally.rounds, "0")


def test_managers(tmp_path):
    """Three histories, and one on an object store, are what the model says, and each is counted."""
    tally = managers.run(3, 1, tmp_path)
    assert blamed(tally) == NOTHING
    assert tally.rounds == 3 + 1


def test_kills_in_a_flush(tmp_path):
    """After each of two the remote has all that was durable locally, and nothing is wrong, hung or left over."""
    tally = tiers.run(2, 1, tmp_path)
    assert blamed(tally) == NOTHING
    kills = [tally.counts.get(f"kills of the {what}", 0) for what in ("trainer", "writer process")]
    assert (tally.rounds, sum(kills)) == (2, 2)


def test_forked_children(tmp_path):
    """In two saves some have ended, and nothing is lost, wrong, hung or left over."""
    tally = forks.run(2, 1, tmp_path)
    assert blamed(tally) == NOTHING
    assert tally.rounds == 2
    assert sum(number for what, number in tally.counts.items() if what.startswith("children: ")) > 1
