"""A short run of each part of the soak, and what the soak would blame."""

import os
import shutil
import subprocess

import pytest

from .. import warm
from . import (
    crashes,
    disks,
    exchanges,
    faults,
    forks,
    interleavings,
    managers,
    power_cuts,
    preemption,
    surroundings,
    tiers,
)
from .actors import Event
from .history import History
from .tally import Tally


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


def test_a_preempted_job_is_judged(tmp_path):
    """A step that was done twice, one that was left out and another loss than that of an undisturbed run are found."""
    job = preemption.Preempted(tmp_path, 4, warm.python())
    (_, first), (_, second), (_, third), _ = preemption.losses(4)
    (tmp_path / "log").write_text(f"1 {first}\n2 {second}\n2 {second}\n3 {second}\n")
    assert third != second
    tally = Tally()
    preemption.judge(job, 4, tally)
    assert (tally.lost, tally.wrong, tally.counts["steps done twice"]) == (2, 1, 1)


def _history(*events):
    """Of events that one actor told: each a kind, a path, a step, and when it began and ended."""
    tally = Tally()
    history = History(tally)
    for kind, path, step, began, ended in events:
        history.note("actor", Event(kind, path, step, began))
        history.note("actor", Event(kind, path, step, began, ended, "done"))
    history.judge("here")
    return tally, history


def test_what_a_load_may_find():
    """A save in progress or done, but none that another one has replaced; nothing, only before the first."""
    saves = [("save", "a", 1, 1.0, 2.0), ("save", "a", 2, 3.0, 5.0)]
    _, history = _history(*saves)
    moments = {0.5: {None}, 1.5: {None, 1}, 2.5: {1}, 4.0: {1, 2}, 6.0: {2}}
    assert {moment: history.expected("a", moment, moment) for moment in moments} == moments
    assert history.expected("a", 2.5, 4.0) == {1, 2}
    for step, lost in ((1, 1), (2, 0), (None, 1)):
        tally, _ = _history(*saves, ("load", "a", step, 6.0, 7.0))
        assert tally.lost == lost


def test_what_a_collection_may_remove():
    """What enough others are higher and newer than; never what a link leads to, or what is no step."""
    saves = [("save", f"step-{n}", n, float(n), n + 0.5) for n in (0, 1, 2, 3, 4)] + [("save", "latest", 0, 0.0, 0.5)]
    for path, lost in (("step-1", 0), ("step-2", 1), ("step-0", 1), ("latest", 1)):
        tally, history = _history(*saves, ("remove", path, None, 6.0, 7.0))
        assert (path, tally.lost) == (path, lost)
        assert history.expected(path, 8.0, 8.0) == {None}
