"""Losses of whole hosts at random moments: the job resumes from copies in other hosts' memory."""

from __future__ import annotations

import random
import time
from pathlib import Path

from ..hosts.copied_job import copied_step, damage, events, start
from ..hosts.lab import Host, Job, Lab
from ..hosts.requirements import missing
from .tally import Part, Tally, Unavailable

__all__ = ["PART", "run"]

_HOSTS = 3
_SECONDS = 180.0  # for a start of all ranks, on a busy machine
_SAVE_EVERY = 20
_DAMAGED = 5  # in each fifth round
_EARLIEST, _MOST = -1_000_000, 1_000_000
_OFFSETS = (10_000, 1_500_000)  # of the bytes that may be flipped: in the middle of a part
_MOMENTS = {  # what has come about, and the seconds until a host is lost; how often
    "while the ranks start": ("start", 1.0, 1),
    "before a state was copied": ("restored", 0.1, 1),
    "between the steps": ("copied", 1.0, 6),
}


def run(rounds: int, seed: int, folder: Path) -> Tally:
    """Loses a host, so many times, and starts the job again with one in its place; the last run goes to its end.

    Raises:
        Unavailable: this user cannot make hosts of namespaces.
    """
    if (reason := missing()) is not None:
        raise Unavailable(reason)
    chance, tally, known = random.Random(seed), Tally(), _Known()
    with Lab(folder / "lab") as lab:
        hosts = lab.hosts(_HOSTS)
        while tally.rounds < rounds and tally.is_good:
            waits = chance.random() < 0.5
            options = {"save_every": _SAVE_EVERY, "keep_latest": 2, "waits": waits}
            job = start(lab, hosts, last=_MOST, **options)
            what, seconds = _moment(tally, chance, always_copies=known.is_damaged)
            try:
                if what != "start":
                    job.until(lambda: len(events(lab, "restored")) == _HOSTS, _SECONDS)
                if what == "copied":
                    job.until(lambda: copied_step(lab, _HOSTS) > 0, _SECONDS)
            except AssertionError as error:
                tally.blame("hung", f"round {tally.rounds}: {error}")
                break
            time.sleep(seconds)
            victim = chance.randrange(_HOSTS)
            hosts[victim].die(with_disk=True)
            job.end()
            known.judge(tally, lab, job)
            known.learn(lab, victim, waits=waits)
            known.is_damaged = (
                known.is_in_memory and tally.counts.get("copies damaged", 0) < (tally.rounds + 1) // _DAMAGED
            )
            if known.is_damaged:
                tally.count("copies damaged")
                if not damage(hosts[(victim + 1) % _HOSTS], "dcp_tensorizer_replica", chance.randrange(*_OFFSETS)):
                    tally.blame("wrong", f"round {tally.rounds}: the next host has no copy")
            hosts[victim] = lab.host()
            tally.rounds += 1
            tally.count(f"losses of host {victim + 1}")
            tally.count("the job waited for each copy" if waits else "the job did not wait for copies")
        if tally.is_good:
            _end(tally, known, lab, hosts)
    return tally


def _moment(tally: Tally, chance: random.Random, *, always_copies: bool) -> tuple[str, float]:
    """When a host is lost: what must have come about, and how long after that."""
    name = chance.choices(list(_MOMENTS), [often for _, _, often in _MOMENTS.values()])[0]
    if always_copies:
        name = "between the steps"
    tally.count(f"losses {name}")
    what, longest, _ = _MOMENTS[name]
    return what, chance.uniform(0.0, longest)


class _Known:
    """What the next run has to find.

    Attributes:
        is_in_memory: The newest state is only there.
        is_damaged: The only copy of the lost host's part of it is damaged.
    """

    def __init__(self) -> None:
        self.is_in_memory = self.is_damaged = False
        self._saved = 0  # the newest step on storage
        self._least = 0  # the next run restores this step or a newer one
        self._newest = _EARLIEST  # the newest step that a rank has ended, if at most one may be lost; else far less
        self._empty = -1  # the host that was empty when the run began

    def learn(self, lab: Lab, victim: int, *, waits: bool) -> None:
        """Learns from what the ranks of a run told until a host was lost."""
        self._saved = max([self._saved, *(entry["step"] for entry in events(lab, "committed"))])
        copied = copied_step(lab, _HOSTS)
        if copied:
            self._least = copied
        elif victim != self._empty:  # what it had, another host had before
            self._least = 0
        self.is_in_memory = copied > self._saved
        self._least = max(self._least, self._saved)
        self._newest = max((e["step"] for e in events(lab, "made")), default=0) if copied and waits else _EARLIEST
        self._empty = victim

    def judge(self, tally: Tally, lab: Lab, job: Job) -> None:
        """Compares what a run has restored with what it had to find."""
        restored, where = events(lab, "restored"), f"round {tally.rounds}"
        if not all(entry["right"] for entry in restored):
            tally.blame("wrong", f"{where}: {restored}")
        steps = {entry["step"] for entry in restored}
        if len(steps) > 1:
            tally.blame("wrong", f"{where}: the ranks restored steps {sorted(steps)}")
        least = self._saved if self.is_damaged else max(self._least, self._newest - 1)
        if steps and min(steps) < least:
            words = " | ".join(line for line in job.account().splitlines() if line[:4] in ("INFO", "WARN", "ERRO"))
            tally.blame("lost", f"{where}: {min(steps)} was restored, and {least} was there: {words}")
        if len(restored) < _HOSTS:
            tally.count("lost before all ranks had restored")
            return
        words = job.account()
        is_found = self.is_damaged and "are not what was saved" in words
        if self.is_damaged and not is_found and min(steps) < self._least:
            tally.blame("wrong", f"{where}: a damaged copy was not found: {words}")
        tally.count("damaged copies found", is_found)
        tally.count("damaged copies that were not needed: storage was newer", self.is_damaged and not is_found)
        tally.count("restored from memory", "is restored from memory" in words)
        tally.count("restored from storage", min(steps) > 0 and "is restored from memory" not in words)


def _end(tally: Tally, known: _Known, lab: Lab, hosts: list[Host]) -> None:
    """The last run goes to its end, and nothing is left on any host."""
    job = start(lab, hosts, more=3)
    try:
        if (codes := job.wait(_SECONDS)) != [0] * _HOSTS:
            tally.blame("wrong", f"the last run ended with {codes}: {job.account()}")
    except AssertionError as error:
        tally.blame("hung", f"the last run: {error}")
    known.judge(tally, lab, job)
    deadline = time.monotonic() + _SECONDS
    while (left := [words for host in hosts for words in host.left_over()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left and tally.is_good:
        tally.blame("left", f"{left}")


PART = Part(
    "Hosts",
    "losses of a host",
    f"A job runs on {_HOSTS} hosts, which are namespaces of this machine, each with its own network, processes, memory "
    f"and disk. Each step is kept in memory and copied between the hosts (`copies=2`), and each {_SAVE_EVERY}th is "
    "saved. One host is lost whole at a random moment, and the job is started again with an empty one in its place. It "
    "has to resume from the last step that all ranks had copied, with the same values: where it waits for each copy, "
    "at most one step is lost. Where a host is lost before the first copy of a run, an older step may be all there is. "
    f"In each {_DAMAGED}th round a byte of the only copy of the lost state is flipped, which has to be found.",
    500,
    run,
)
