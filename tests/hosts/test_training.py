"""A job trains with FSDP2 on several hosts, and something happens to one of them in a phase of a save.

``python -m tests.soak`` does the same at random, with more phases, faults, conditions and kinds of disks.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from ..lab.ranks import eventually
from .copied_job import copied_step, events
from .lab import DISK, SHARED, Host, Job, Lab
from .trained_job import go_on, start


def has_restored(lab: Lab, job: Job, ranks: int, least: int) -> int:
    """Waits until all ranks have restored one step, with the right values, which is not less than one."""
    job.until(lambda: len(events(lab, "restored")) == ranks)
    found = events(lab, "restored")
    assert [entry["right"] for entry in found] == [True] * ranks, job.account()
    (step,) = {entry["step"] for entry in found}
    assert step >= least, job.account()
    return int(step)


def stands(lab: Lab, job: Job, host: Host | None = None) -> None:
    """Waits until the job stands still, on a host if one is given."""
    names = (None,) if host is None else (None, host.name)
    job.until(lambda: any(host is None or entry["host"] in names for entry in events(lab, "at")))


def newest(lab: Lab, event: str) -> int:
    """The newest step of which the ranks have told something."""
    return max((entry["step"] for entry in events(lab, event)), default=0)


def test_a_host_is_lost_in_each_phase(lab: Lab) -> None:
    """It goes on each time: on a new host in its place, on swapped hosts, on more, and on fewer."""
    first, second = lab.hosts(2)
    ranks, least = [first, first, second, second], 0
    for phase in ("staging", "write", "commit", "after the commit"):
        job = start(lab, ranks, phase=phase, after=4)
        has_restored(lab, job, len(ranks), least)
        victim = ranks[0] if phase != "commit" else ranks[-1]
        stands(lab, job, None if "commit" in phase else victim)
        victim.die()
        go_on(lab)
        job.end()
        least = max(copied_step(lab, len(ranks)), newest(lab, "committed"))
        left = list(dict.fromkeys(host for host in ranks if host is not victim))
        ranks = {
            "staging": lambda: [lab.host(), *left],  # noqa: B023
            "write": lambda: [*left, lab.host()],  # noqa: B023
            "commit": lambda: [*left, *lab.hosts(2)],  # noqa: B023
            "after the commit": lambda: left,  # noqa: B023
        }[phase]()
        ranks = [host for host in ranks for _ in range(4 // len(ranks))]
    job = start(lab, ranks, more=9)
    has_restored(lab, job, len(ranks), least)
    assert job.wait() == [0] * len(ranks), job.account()
    assert eventually(lambda: not ranks[0].left_over()), ranks[0].left_over()


def test_a_host_is_lost_with_its_disk_in_a_flush(lab: Lab) -> None:
    """3 x 1 ranks before S3: a save that is on no storage any more does not keep the copies from being used."""
    hosts = lab.hosts(3)
    _, bucket, variables = lab.s3()
    options: dict[str, Any] = {"folder": f"{bucket}/run", "local": str(DISK / "local"), "environment": variables}
    job = start(lab, hosts, phase="flush", after=12, **options)
    has_restored(lab, job, 3, 0)
    stands(lab, job, hosts[0])
    saved = newest(lab, "committed")
    job.until(lambda: copied_step(lab, 3) > saved)
    hosts[0].die(with_disk=True)
    job.end()
    copied = copied_step(lab, 3)
    assert newest(lab, "remote") < saved
    ranks = [hosts[2], hosts[1], lab.host()]
    job = start(lab, ranks, more=20, **options)
    has_restored(lab, job, 3, copied)
    assert job.wait() == [0, 0, 0], job.account()
    assert "is restored from memory" in job.account()
    assert newest(lab, "remote") > copied


def _is_for_all_users() -> bool:
    """Returns whether users other than root can read this Python's library."""
    library = Path(os.__file__).resolve()
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in library.parents)


of_users = pytest.mark.skipif(not _is_for_all_users(), reason="only root can read the library of this Python")


@of_users
def test_users_umasks_and_clocks_that_differ(lab: Lab) -> None:
    """Hosts whose users share a group, two hours apart, save and restore together; and from each other's memory."""
    hosts = [lab.host(user=1001, umask=0o002, ahead=3600), lab.host(user=1002, umask=0o007, ahead=-3600)]
    told = [host.run(sys.executable, "-c", "import os, time; print(os.getuid(), time.time())") for host in hosts]
    (one, early), (two, late) = (words.split() for words in told)
    assert (one, two) == ("1001", "1002") and abs(float(early) - float(late) - 7200) < 60
    job = start(lab, hosts, how="ranks", save_every=40)  # a copy takes longer than four steps, and gives way to a save
    job.until(lambda: newest(lab, "committed") > 8 and copied_step(lab, 2) > 8)
    hosts[0].die()
    job.end()
    copied = max(copied_step(lab, 2), newest(lab, "committed"))
    new = lab.host(user=1003, umask=0o000, ahead=60)
    job = start(lab, [hosts[1], new], how="ranks", more=9)
    has_restored(lab, job, 2, copied)
    assert job.wait() == [0, 0], job.account()


@of_users
def test_a_user_who_may_not_write_there(lab: Lab) -> None:
    """The first host's umask lets no other user write: the save fails on all ranks, and the log names the folder."""
    hosts = [lab.host(user=1001, umask=0o022), lab.host(user=1002)]
    job = start(lab, hosts, save_every=4)
    job.until(lambda: events(lab, "failed"))
    assert f"{SHARED}/run/step-4" in events(lab, "failed")[0]["words"], job.account()
    assert "Permission denied" in events(lab, "failed")[0]["words"]
    job.until(lambda: newest(lab, "made") > 12)
    job.end()
