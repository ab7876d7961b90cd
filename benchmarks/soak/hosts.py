"""Losses of whole hosts at random moments: the job goes on from copies in other hosts' memory."""

from __future__ import annotations

import random
import time
from pathlib import Path

from tests.hosts.copied_job import copied_step, damage, events, keepers, start
from tests.hosts.lab import Job, Lab
from tests.hosts.requirements import missing

from .tally import Part, Tally, Unavailable

__all__ = ["PART", "run"]

_HOSTS = 3
_LONGEST = 2.0  # seconds until a host is lost, from when the run has copied its first state
_SECONDS = 180.0  # for a start of all ranks, on a busy machine
_SAVE_EVERY = 20
_DAMAGED = 5  # in each fifth round


def run(rounds: int, seed: int, folder: Path) -> Tally:
    """Loses a host, so many times, and starts the job again with one in its place; the last run goes to its end.

    Raises:
        Unavailable: this user cannot make hosts of namespaces.
    """
    if (reason := missing()) is not None:
        raise Unavailable(reason)
    chance, tally = random.Random(seed), Tally()
    with Lab(folder / "lab") as lab:
        hosts, least, is_damaged = lab.hosts(_HOSTS), 0, False
        for number in range(rounds + 1):
            is_last = number == rounds
            job = start(lab, hosts, save_every=_SAVE_EVERY, **({"last": 10**6} if not is_last else {"more": 3}))
            try:
                job.until(lambda: len(events(lab, "restored")) == _HOSTS, _SECONDS)
                _judge(tally, number, lab, job, least, is_damaged=is_damaged)
                if is_last:
                    codes = job.wait(_SECONDS)
                    if codes != [0] * _HOSTS:
                        tally.blame("wrong", f"the last run ended with {codes}")
                    break
                job.until(lambda: copied_step(lab, _HOSTS) > 0, _SECONDS)
            except AssertionError as error:
                tally.blame("hung", f"round {number}: {str(error)[:300]}")
                break
            time.sleep(chance.uniform(0.0, _LONGEST))
            victim = chance.randrange(_HOSTS)
            hosts[victim].die(with_disk=True)
            least = copied_step(lab, _HOSTS)
            job.end()
            is_damaged = number % _DAMAGED == _DAMAGED - 1
            if is_damaged and not damage(hosts[(victim + 1) % _HOSTS], "dcp_tensorizer_replica"):
                tally.blame("wrong", f"round {number}: the next host has no copy")
            hosts[victim] = lab.host()
            tally.rounds += 1
            tally.count(f"losses of host {victim + 1}")
            tally.count("copies damaged", is_damaged)
            if not tally.is_good:
                break
        deadline = time.monotonic() + _SECONDS
        while left := [pid for host in hosts for pid in keepers(host)]:
            if tally.found or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if left and tally.is_good:
            tally.blame("left", f"{len(left)} keepers")
    return tally


def _judge(tally: Tally, number: int, lab: Lab, job: Job, least: int, *, is_damaged: bool) -> None:
    """Compares what a run has restored with what was copied when a host was lost."""
    restored = events(lab, "restored")
    if not all(entry["right"] for entry in restored):
        tally.blame("wrong", f"round {number}: {restored}")
    steps = {entry["step"] for entry in restored}
    if len(steps) > 1:
        tally.blame("wrong", f"round {number}: the ranks restored steps {sorted(steps)}")
    words = job.account()
    if is_damaged:
        if "is not used: " not in words:
            tally.blame("wrong", f"round {number}: a damaged copy was not found")
    elif min(steps) < least:
        tally.blame("lost", f"round {number}: {min(steps)} was restored, and {least} was copied")
    tally.count("restored from memory", "is restored from memory" in words)
    tally.count("steps that all ranks had made and copied", least)


PART = Part(
    "Hosts",
    "losses of a host",
    f"A job runs on {_HOSTS} hosts, which are namespaces of this machine, each with its own network, processes, memory "
    f"and disk. Each step is copied between the hosts (`copies=2`), and each {_SAVE_EVERY}th is saved. One host is "
    "lost whole at a random moment, and the job is started again with an empty one in its place. It has to go on from "
    "the last step that all ranks had seen copied, with the same values. In each "
    f"{_DAMAGED}th round a byte of the only copy of the lost state is flipped, which has to be found.",
    100,
    run,
)
