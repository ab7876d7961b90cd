"""Training with FSDP2 on several hosts, to which something happens in each phase of a save, on many kinds of storage.

A campaign is a job on one storage, under one condition. In each of its rounds the job is started, resumes from what it
finds, stands still in a phase, and something happens to a host. The last run of a campaign goes to its end.
"""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..hosts.copied_job import copied_step, events
from ..hosts.disks import Disk, command
from ..hosts.lab import DISK, SHARED, Host, Job, Lab
from ..hosts.requirements import missing
from ..hosts.trained_job import PHASES, go_on, start
from .checks import collect_all, left_over
from .tally import Part, Tally, Unavailable

__all__ = ["CONDITIONS", "FILE_SYSTEMS", "PARTS"]

_SECONDS = 240.0  # for a start of all ranks, on a busy machine
_ROUNDS = 6  # of a campaign
_ROUNDS_OF_CONDITION = 2  # of one that is slow
_PARTITION = 15.0
_PATIENCE = 20.0  # of a save
_TIMEOUT = 20.0  # of the group, where a host is lost for good
_LONG = 240.0  # of the group, where it is not
_STEPS = 20  # of the last run
_DISK_BYTES = {"tmpfs": 96 << 20, "ext4": 96 << 20, "xfs": 400 << 20, "btrfs": 256 << 20, "overlay": 96 << 20}

_LAYOUTS = {"2 hosts x 2 ranks": (0, 0, 1, 1), "3 hosts x 1 rank": (0, 1, 2)}  # the host of each rank
_FAULTS = (
    *("a host is lost", "a host is lost", "a host and its disk are lost", "two hosts are lost, one after the other"),
    *("a partition of 15 s", "a partition for good"),
)
_RESTARTS = ("on a new host in its place", "on swapped hosts", "on fewer hosts", "on more hosts")
_ROADS = ("a shared disk", "a disk of each host first", "S3", "a disk of each host before S3")
CONDITIONS = (
    *("5% of a core for one host", "clocks an hour apart", "a user and a umask for each host", "5% of packets lost"),
)
_SLOW = ("5% of a core for one host", "5% of packets lost")
FILE_SYSTEMS = ("tmpfs", "ext4", "xfs", "btrfs", "overlay", "sshfs")
_SFTP_SERVER = "/usr/lib/openssh/sftp-server"
_SFTP = f"""
import socket, subprocess
server = socket.create_server(("", 5001))
while True:
    connection, _ = server.accept()
    subprocess.Popen(["{_SFTP_SERVER}"], stdin=connection, stdout=connection)
    connection.close()
"""
_DISK_FAULTS = ("the shared disk is full for a while", "the shared disk is read-only for a while")


@dataclass(frozen=True)
class _Plan:
    """What a campaign is: see the names above."""

    layout: str
    road: str
    condition: str = ""
    file_system: str = ""
    faults: Sequence[str] = _FAULTS


def _campaigns(
    plans: Callable[[random.Random], Sequence[_Plan]],
    rounds: int,
    seed: int,
    folder: Path,
    *,
    each: int = _ROUNDS,
    needs: str = "",
) -> Tally:
    """Runs campaigns until there have been so many rounds, `each` of a number of them. Raises `Unavailable`."""
    if reason := missing() or needs:
        raise Unavailable(reason)
    chance, tally = random.Random(seed), Tally()
    deck: list[_Plan] = []
    while tally.rounds < rounds and tally.is_good:
        deck = deck or chance.sample(found := plans(chance), len(found))
        plan, number = deck.pop(), tally.counts.get("jobs", 0)
        tally.count("jobs")
        place = folder / f"job-{number}"
        with Lab(place) as lab, ExitStack() as stack:
            print(f"job {number}: {plan}", file=sys.stderr, flush=True)
            _Campaign(plan, lab, stack, tally, chance).run(min(each, rounds - tally.rounds))
        if tally.is_good:
            shutil.rmtree(place)
    return tally


def _deck(chance: random.Random, *choices: Sequence[str]) -> list[tuple[str, ...]]:
    """Tuples with one of each choice, such that each is there as often as the others of its kind."""
    count = max(map(len, choices))
    columns = [[*choice] * (-(-count // len(choice))) for choice in choices]
    for column in columns:
        chance.shuffle(column)
    return list(zip(*columns, strict=False))


@dataclass
class _Campaign:
    """A job on hosts, round after round.

    Attributes:
        least: The next run restores this step or a newer one.
        saved: The newest step that is on the storage that all hosts see.
    """

    plan: _Plan
    lab: Lab
    stack: ExitStack
    tally: Tally
    chance: random.Random
    least: int = 0
    saved: int = 0
    made: int = 0
    disk: Disk | None = None
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    store: Host | None = None
    folder: Path | None = None  # where the checkpoints are, if this machine sees it
    _made_hosts: int = 0

    def run(self, rounds: int) -> None:
        self._set_up()
        ranks = self._placed()
        ways = _deck(self.chance, self._phases(), self.plan.faults, _RESTARTS)
        for number in range(rounds):
            phase, fault, restart = ways[number % len(ways)]
            where = f"round {self.tally.rounds}, {self.plan.layout}, {phase}: {fault}, then {restart}"
            print(f"  {where}", file=sys.stderr, flush=True)
            try:
                ranks = self._round(where, ranks, phase, fault, restart)
            except AssertionError as error:
                self.tally.blame("hung", f"{where} ({self.plan}): {error}")
            self.tally.rounds += 1
            for what in (f"phase: {phase}", f"fault: {fault}", f"restart: {restart}"):
                self.tally.count(what)
            if not self.tally.is_good:
                return
        self._end(ranks)

    # --- what there is ----------------------------------------------------------------------------------------------

    def _set_up(self) -> None:
        plan, lab = self.plan, self.lab
        self.options = {"folder": str(SHARED / "run"), "patience": _PATIENCE}
        self.folder = lab.shared / "run"
        if plan.file_system == "sshfs":
            self.store = lab.host()
            self.store.start(sys.executable, "-c", _SFTP)
            self.options["folder"] = "/mnt/sshfs/run"
            self.folder = self.store.disk / "run"
        elif plan.file_system:
            self.disk = _disk(lab.shared / "disk", plan.file_system)
            self.stack.callback(self.disk.unmount)
            self.options["folder"] = str(SHARED / "disk" / "run")
            self.folder = self.disk.path / "run"
        elif "S3" in plan.road:
            self.store, url, self.environment = lab.s3()
            self.options["folder"], self.folder = f"{url}/run", None
        if "a disk of each host" in plan.road:
            self.options |= {"local": str(DISK / "local"), "max_unflushed": 20}
        for what in (plan.layout, plan.road if not plan.file_system else plan.file_system, plan.condition):
            if what:
                self.tally.count(f"jobs: {what}")

    def _phases(self) -> list[str]:
        return [phase for phase in PHASES if phase != "flush" or "local" in self.options]

    def _host(self) -> Host:
        """A new host, as the condition wants it."""
        number, condition = self._made_hosts, self.plan.condition
        self._made_hosts += 1
        if condition == "clocks an hour apart":
            ahead = (600, -300, 60) if "S3" in self.plan.road else (3600, -3600, 60)  # S3 takes 15 minutes at most
            host = self.lab.host(ahead=ahead[number % 3])
        elif condition == "a user and a umask for each host":
            host = self.lab.host(user=1001 + number, umask=(0o002, 0o007, 0o000)[number % 3])
        else:
            host = self.lab.host()
        if condition == "5% of packets lost":
            host.lose(5)
        if condition == "5% of a core for one host" and number % 3 == 0:
            host.slow(0.05)
        if self.plan.file_system == "sshfs":
            assert self.store is not None
            host.run("mkdir", "/mnt/sshfs")
            what = f"{self.store.address}:{DISK}"
            host.start("sshfs", "-f", "-o", "directport=5001,dir_cache=no", what, "/mnt/sshfs")
            host.run("sh", "-c", "until mountpoint -q /mnt/sshfs; do sleep 0.05; done")
        return host

    def _placed(self) -> list[Host]:
        pattern = _LAYOUTS[self.plan.layout]
        hosts = [self._host() for _ in range(max(pattern) + 1)]
        return [hosts[number] for number in pattern]

    def _start(self, ranks: list[Host], **options: Any) -> Job:
        how = "ranks" if any(host.ahead for host in ranks) else "forked"
        return start(self.lab, ranks, how=how, environment=self.environment, **self.options | options)

    # --- a round ----------------------------------------------------------------------------------------------------

    def _round(self, where: str, ranks: list[Host], phase: str, fault: str, restart: str) -> list[Host]:
        """Starts the job, lets something happen, ends it; returns the hosts of the next start."""
        chance, lab = self.chance, self.lab
        hosts = list(dict.fromkeys(ranks))
        victim = chance.choice(hosts)
        if len(hosts) == 1:  # it copies to nobody, and is cut off from nobody
            phase = "training" if phase == "copy" else phase
            fault = "a host is lost" if "partition" in fault or "two" in fault else fault
        lasts = fault in ("a partition of 15 s", *_DISK_FAULTS) or self.plan.condition == CONDITIONS[0]
        job = self._start(ranks, phase=phase, after=chance.randint(0, 12), timeout=_LONG if lasts else _TIMEOUT)
        self._restored(where, job, len(ranks))
        name = "" if phase in ("commit", "after the commit") else victim.name
        job.until(lambda: any(name in ("", entry["host"]) for entry in events(lab, "at")), _SECONDS)
        time.sleep(chance.uniform(0, 0.05))
        lost: list[Host] = []
        if fault == "a partition of 15 s":
            self._pass(job, victim)
        elif fault in _DISK_FAULTS:
            self._refuse(job, fault)
        elif fault == "a partition for good":
            ranks = self._leave(where, job, ranks, victim)
        else:
            lost = self._lose(where, job, hosts, victim, fault)
        job.end()
        if restart == "on fewer hosts" and not lost and len(hosts) > 1:
            lost = [ranks[-1]]  # it is not in the next run
        self._learn(ranks, lost)
        return self._places(ranks, lost, restart)

    def _restored(self, where: str, job: Job, ranks: int) -> None:
        """Waits until all ranks have restored, and compares with what they had to find."""
        job.until(lambda: len(events(self.lab, "restored")) == ranks, _SECONDS)
        found = events(self.lab, "restored")
        steps = {entry["step"] for entry in found}
        words = " | ".join(line for line in job.account().splitlines() if line[:4] in ("WARN", "ERRO"))
        if len(steps) > 1 or not all(entry["right"] for entry in found):
            self.tally.blame("wrong", f"{where} ({self.plan}): {found}: {words}")
        if min(steps) < self.least:
            self.tally.blame("lost", f"{where} ({self.plan}): {steps}, and {self.least} was there: {words}")
        if self.made and max(steps) > self.made:
            self.tally.blame("wrong", f"{where} ({self.plan}): {steps}, and {self.made} was the last: {words}")
        if min(steps) > 0:
            self.tally.count(f"restored from {'memory' if 'is restored from memory' in job.account() else 'storage'}")

    def _lose(self, where: str, job: Job, hosts: list[Host], victim: Host, fault: str) -> list[Host]:
        """A host is lost, or one after the other; now and then those that are left have to end by themselves."""
        victim.die(with_disk="disk" in fault)
        lost = [victim]
        if "two" in fault:
            time.sleep(self.chance.uniform(0.2, 2.0))
            lost.append(self.chance.choice([host for host in hosts if host is not victim]))
            lost[1].die()
        go_on(self.lab)
        if self.chance.random() < 0.3 and self.plan.condition not in _SLOW:
            self.tally.count("those that were left ended by themselves")
            codes = job.wait(_SECONDS)
            if 0 in codes:
                self.tally.blame("wrong", f"{where}: a rank ended well: {job.account()}")
        return lost

    def _pass(self, job: Job, victim: Host) -> None:
        """A host is cut off for a while; then the job goes on, and saves."""
        victim.cut()
        go_on(self.lab)
        time.sleep(_PARTITION)
        victim.heal()
        self._goes_on(job)

    def _goes_on(self, job: Job) -> None:
        """Waits until the job has made more steps, and saved, and copied."""
        before = {kind: max((e["step"] for e in events(self.lab, kind)), default=0) for kind in ("committed", "copied")}
        newest = max((e["step"] for e in events(self.lab, "made")), default=0)
        for kind in ["committed", *(["copied"] if before["copied"] else [])]:
            least = max(newest, before[kind])
            job.until(lambda: any(e["step"] > least for e in events(self.lab, kind)), _SECONDS)  # noqa: B023

    def _refuse(self, job: Job, fault: str) -> None:
        """The shared disk takes nothing for a while; then the job saves again."""
        assert self.disk is not None
        if "full" in fault:
            filler = self.disk.fill()
            go_on(self.lab)
            job.until(lambda: events(self.lab, "failed"), _SECONDS)
            filler.unlink()
        else:
            try:
                self.disk.read_only()
            except OSError:  # a file is open there
                self.tally.count("disks that were in use, and so could not be made read-only")
            go_on(self.lab)
            time.sleep(self.chance.uniform(0.1, 2.0))
            self.disk.read_only(False)
        self._goes_on(job)

    def _leave(self, where: str, job: Job, ranks: list[Host], victim: Host) -> list[Host]:
        """A host is cut off, the job goes on elsewhere, and the host comes back; returns the hosts of the job then."""
        victim.cut()
        go_on(self.lab)
        old = [p for p, host in zip(job.programs, ranks, strict=True) if host is victim]
        for program, host in zip(job.programs, ranks, strict=True):
            if host is not victim:
                program.end()
        self._learn(ranks, [victim])
        new_host = self._host()
        ranks = [new_host if host is victim else host for host in ranks]
        job = self._start(ranks, timeout=_LONG)
        self._restored(where, job, len(ranks))
        self._goes_on(job)
        victim.heal()
        for program in old:
            if program.wait(_LONG + _SECONDS) == 0:
                self.tally.blame("wrong", f"{where}: the older run ended well: {program.account()}")
        self._goes_on(job)
        job.end()
        victim.die()
        return ranks

    def _learn(self, ranks: list[Host], lost: list[Host]) -> None:
        """Learns from what the ranks have told what the next run has to find."""
        kind = "remote" if "local" in self.options else "committed"
        self.saved = max([self.saved, *(entry["step"] for entry in events(self.lab, kind))])
        copied = copied_step(self.lab, len(ranks)) if len(lost) < 2 else 0
        self.least = max(self.saved, copied)
        self.made = max((e["step"] for e in [*events(self.lab, "made"), *events(self.lab, "at")]), default=0)
        self.made = max(self.made, self.least) + 1  # it may have been on its way

    def _places(self, ranks: list[Host], lost: list[Host], restart: str) -> list[Host]:
        """The hosts of the ranks of the next start."""
        pattern = list(dict.fromkeys(ranks))
        left = [host for host in pattern if host not in lost]
        if restart == "on fewer hosts" and left:
            hosts = left
        else:
            hosts = [self._host() if host in lost else host for host in pattern]
        if restart == "on swapped hosts":
            hosts.reverse()
        if (restart == "on more hosts" and len(hosts) < 4) or (restart != "on fewer hosts" and len(hosts) == 1):
            hosts.append(self._host())
        each = 2 if "2 ranks" in self.plan.layout and len(hosts) < 3 else 1
        return [host for host in hosts for _ in range(each)]

    # --- the end ----------------------------------------------------------------------------------------------------

    def _end(self, ranks: list[Host]) -> None:
        """The last run goes to its end, and nothing is left on any host, nor where the checkpoints are."""
        where = f"the last run of {self.plan}"
        job = self._start(ranks, more=_STEPS, timeout=_LONG)
        try:
            self._restored(where, job, len(ranks))
            if (codes := job.wait(_SECONDS)) != [0] * len(ranks):
                self.tally.blame("wrong", f"{where} ended with {codes}: {job.account()}")
                return
        except AssertionError as error:
            self.tally.blame("hung", f"{where}: {error}")
            return
        deadline = time.monotonic() + _SECONDS
        hosts = list(dict.fromkeys(ranks))
        while (left := [words for host in hosts for words in self._left(host)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        if left:
            self.tally.blame("left", f"{where}: {left}")
        if self.plan.condition == "5% of packets lost":
            self.tally.count("packets lost in the last runs", sum(host.lost() for host in hosts))
        if self.folder is not None:
            collect_all(self.folder)
            for name in left_over(self.folder):
                self.tally.blame("left", f"{where}: {name}")

    def _left(self, host: Host) -> list[str]:
        """What is left over on a host, but for its copies of checkpoints, and what mounts its disks."""
        return [words for words in host.left_over() if f"{DISK}/local/" not in words and not words.startswith("sshfs ")]


def _disk(path: Path, kind: str) -> Disk:
    """A disk that all hosts see; an overlay is one over a directory."""
    if kind != "overlay":
        disk = Disk(path, _DISK_BYTES[kind], kind)
    else:
        disk = Disk(path, _DISK_BYTES[kind], "ext4")
        for name in ("lower", "upper", "work"):
            (path / name).mkdir()
        options = ",".join(f"{n}dir={path / n}" for n in ("lower", "upper", "work"))
        command("mount", "-n", "-t", "overlay", "-o", options, "overlay", path)
    return disk


def _needs(*programs: str) -> str:
    absent = [name for name in programs if shutil.which(name) is None]
    return f"these programs are not here: {', '.join(absent)}" if absent else ""


def _run_phases(rounds: int, seed: int, folder: Path) -> Tally:
    def plans(chance: random.Random) -> list[_Plan]:
        return [_Plan(layout, road) for layout, road in _deck(chance, tuple(_LAYOUTS), _ROADS)]

    return _campaigns(plans, rounds, seed, folder)


def _run_conditions(rounds: int, seed: int, folder: Path) -> Tally:
    def plans(chance: random.Random) -> list[_Plan]:
        return [_Plan(*choices) for choices in _deck(chance, tuple(_LAYOUTS), _ROADS, CONDITIONS)]

    return _campaigns(plans, rounds, seed, folder, each=_ROUNDS_OF_CONDITION, needs=_needs("cc", "nft"))


def _run_disks(rounds: int, seed: int, folder: Path) -> Tally:
    faults = (*_FAULTS[2:], *_DISK_FAULTS)
    left_out = {kind: reason for kind in FILE_SYSTEMS if (reason := _lacks(kind))}
    for kind, reason in left_out.items():
        print(f"LEFT OUT: {kind}: {reason}", file=sys.stderr, flush=True)
    kinds = [kind for kind in FILE_SYSTEMS if kind not in left_out]

    def plans(chance: random.Random) -> list[_Plan]:
        return [
            _Plan(layout, "", "", kind, tuple(f for f in faults if kind != "sshfs" or f not in _DISK_FAULTS))
            for layout, kind in _deck(chance, tuple(_LAYOUTS), kinds)
        ]

    tally = _campaigns(plans, rounds, seed, folder)
    for kind, reason in left_out.items():
        tally.count(f"left out: {kind}: {reason}")
    return tally


def _lacks(kind: str) -> str:
    """Why there is no such file system here; empty if there is one."""
    own = "fuse" if kind == "sshfs" else kind
    if own not in Path("/proc/filesystems").read_text().split():
        return f"the kernel has no {own}"
    programs = {"sshfs": ["sshfs"], "overlay": ["mkfs.ext4"], "tmpfs": []}.get(kind, [f"mkfs.{kind}"])
    if kind == "sshfs" and not Path(_SFTP_SERVER).exists():
        return f"there is no {_SFTP_SERVER}"
    return _needs(*programs)


_JOB = (
    "Jobs train a model with FSDP2 on hosts that are namespaces of this machine. In each round a job resumes from "
    "what it finds, stands still in a phase of a save, and something happens to a host there. It has to resume from "
    "the newest step that all ranks had copied to other hosts, or from the newest checkpoint that all hosts see, "
    "whichever is newer, with the same values on all ranks. The last run of each job goes to its end, and nothing may "
    "be left over on any host. "
)

PARTS = {
    "hosts-phases": Part(
        "Hosts: each phase of a save",
        "things that happen to a host",
        f"{_JOB}Checkpoints go to a disk that all hosts share, to a disk of each host first, or to SeaweedFS on a "
        "separate host.",
        100,
        _run_phases,
    ),
    "hosts-conditions": Part(
        "Hosts: bad conditions",
        "things that happen to a host",
        f"{_JOB}Besides, in each job one host has little of a core (a control group), clocks differ (a library that is "
        "loaded before the C library), users and umasks differ, or packets are lost (`nft`; this kernel has no netem).",
        24,
        _run_conditions,
    ),
    "hosts-disks": Part(
        "Hosts: kinds of shared disks",
        "things that happen to a host or its disk",
        f"{_JOB}The shared disk is of another kind in each job, and may be full or read-only for a while.",
        36,
        _run_disks,
    ),
}
