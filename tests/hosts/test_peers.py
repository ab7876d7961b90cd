"""A host is lost with its memory: the job resumes from the copies that keepers of other hosts have."""

from __future__ import annotations

import pytest

from .copied_job import copied_step, damage, events, start
from .lab import Job, Lab


def is_restored(lab: Lab, job: Job, least: int, ranks: int = 2) -> int:
    """Returns the step that all ranks have restored, with the right values, which is not less than one."""
    assert job.wait() == [0] * len(job.programs), job.account()
    restored = events(lab, "restored")
    assert [entry["right"] for entry in restored] == [True] * ranks, job.account()
    (step,) = {entry["step"] for entry in restored}
    assert step >= least, job.account()
    return int(step)


@pytest.mark.promise("host-lost")
@pytest.mark.promise("trainer-dies", reason="with copies=2")
def test_a_host_is_lost(lab: Lab) -> None:
    """The other rank ends; theirs go on, also on a host that holds nothing, from the last step that was copied."""
    here, there = lab.hosts(2)
    job = start(lab, [here, there])
    job.until(lambda: copied_step(lab, 2) > 3)
    there.die()
    assert job.programs[0].wait(60.0) != 0  # within the timeout of its group
    made = copied_step(lab, 2)
    job = start(lab, [here, lab.host()], last=made + 3)
    is_restored(lab, job, made)
    assert "is restored from memory" in job.account()


def test_a_job_goes_on_with_fewer_hosts(lab: Lab) -> None:
    """Under torchrun: one of three hosts is lost, and two ranks put together what three have kept."""
    hosts = lab.hosts(3)
    job = start(lab, hosts, how="torchrun")
    job.until(lambda: copied_step(lab, 3) > 3)
    hosts[1].die()
    made = copied_step(lab, 3)
    assert [program.wait() != 0 for program in job.programs] == [True] * 3
    job = start(lab, [hosts[2], hosts[0]], how="torchrun", last=made + 3)
    is_restored(lab, job, made)
    assert "is restored from memory" in job.account()


def test_what_is_damaged_is_not_used(lab: Lab) -> None:
    """The other copy is, as long as there is one; then what is on storage. The log says so."""
    here, there = lab.hosts(2)
    job = start(lab, [here, there])
    job.until(lambda: copied_step(lab, 2) > 3)
    made = copied_step(lab, 2)
    job.end()
    assert damage(here, "dcp_tensorizer") > 0
    job = start(lab, [here, there])
    job.until(lambda: len(events(lab, "restored")) == 2 and copied_step(lab, 2) > made + 3)
    assert {(entry["right"], entry["step"] >= made) for entry in events(lab, "restored")} == {(True, True)}
    assert "ERROR rank 0's part of step" in job.account()
    assert "are not what was saved" in job.account()
    there.die()
    job.end()
    assert damage(here, "dcp_tensorizer_replica") > 0
    job = start(lab, [here, lab.host()], last=5)
    assert is_restored(lab, job, 1) == 1
    assert "ERROR the state of step" in job.account()
