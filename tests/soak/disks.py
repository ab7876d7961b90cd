"""Disks that are full or read-only for a while, in the midst of saves: the only one, a local one, or the one behind it.

All rounds run in one process, with the same writers: what a disk has refused must not be felt when it is well again.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_tensorizer import CheckpointError, SaveLimits, TensorizerStorageWriter, unwrap
from dcp_tensorizer._tiers.queue import OPEN, Queue

from ..hosts.disks import Disk
from .checks import collect_all, left_over, load, state
from .mounts import apart
from .tally import HANG, Part, Tally

__all__ = ["PART", "run"]

_NUMBERS = 100_000  # 1.6 MB
_DISK_BYTES = 24 << 20
_SAVES = 4  # of a round, while a disk is well, and is not, and is again
_LONGEST = 0.4  # seconds until a disk is refused, and until it is not any more
_LEAVE = 200_000  # bytes that are free on a full disk: for small files, and for no state
_LIMITS = SaveLimits(max_consecutive_failures=None, timeout=HANG / 2)
_PLACES = ("latest", "latest", "a", "b")
_DISKS = ("the only disk", "the local disk", "the disk behind the local one")
_FAULTS = ("read-only", "full")


def run(rounds: int, seed: int, folder: Path) -> Tally:
    """Makes disks refuse what they are asked for, ``rounds`` times.

    Raises:
        Unavailable: this user cannot mount a file system from a file.
    """
    return apart(_rounds, rounds, seed, folder)


@dataclass(frozen=True)
class _Road:
    """A way to save.

    Attributes:
        disk: That is refused.
        remote: Where the checkpoints are in the end.
        local: The folder that they come to before; None if there is none.
        must_save: A save succeeds, whatever becomes of the disk.
    """

    disk: Disk
    remote: Path
    local: Path | None
    must_save: bool


def _rounds(rounds: int, seed: int, folder: Path, tally: Tally) -> None:
    chance = random.Random(seed)
    disks = {
        name: Disk(folder / f"disk-{number}", _DISK_BYTES, chance.choice(("tmpfs", "ext4")))
        for number, name in enumerate(_DISKS)
    }
    only, near, far = disks.values()
    roads = {
        "the only disk": _Road(only, only.path / "run", None, False),
        "the local disk": _Road(near, folder / "run", near.path / "local", True),
        "the disk behind the local one": _Road(far, far.path / "run", folder / "local", True),
    }
    try:
        jobs = {name: _Job(road, tally) for name, road in roads.items()}
        for number in range(rounds):
            name, fault = chance.choice(_DISKS), chance.choice(_FAULTS)
            jobs[name].round(f"round {number}: {name} {fault}", fault, chance)
            tally.count(f"{name}: {fault}")
            tally.rounds += 1
            if not tally.is_good:
                break
        for job in jobs.values():
            job.close()
    finally:
        for disk in disks.values():
            disk.unmount()


class _Job:
    """Saves on one road, round after round."""

    def __init__(self, road: _Road, tally: Tally) -> None:
        self._road, self._tally = road, tally
        self._writer = TensorizerStorageWriter(
            road.remote, local=road.local, limits=_LIMITS, max_unflushed=2 * _SAVES if road.local else 3
        )
        self._step = 0
        self._may_hold: dict[str, set[int | None]] = {}

    def close(self) -> None:
        self._writer.close()

    def round(self, where: str, fault: str, chance: random.Random) -> None:
        """Saves while the disk becomes what it must not be, and is well again; looks what has come of it."""
        with _while_refused(
            self._road.disk, fault, chance.uniform(0, _LONGEST), chance.uniform(0, _LONGEST)
        ) as refusal:
            for _ in range(_SAVES):
                time.sleep(chance.uniform(0, _LONGEST / 2))
                self._save(where, chance.choice(_PLACES), refusal.began)
        if not refusal.has_been:
            self._tally.count("disks that were in use, and so could not be made read-only")
        self._save(where, "latest", lambda: False)
        if self._road.local is not None and not self._writer.wait_remote(HANG):
            self._tally.blame("hung", f"{where}: what lies in the local folder is not on the remote")
        self._look(where)

    def _save(self, where: str, place: str, may_fail: Callable[[], bool]) -> None:
        self._step += 1
        before = self._may_hold.get(place, {None})
        path = self._road.remote / place
        try:
            future = dcp.async_save(state(self._step, _NUMBERS), checkpoint_id=path, storage_writer=self._writer)
            future.result(2 * HANG)  # type: ignore[union-attr]
        except (CheckpointException, CheckpointError) as error:
            self._may_hold[place] = before | {self._step}
            if self._road.must_save or not may_fail():
                self._tally.blame("wrong", f"{where}: the save of step {self._step} to {place}: {unwrap(error)}")
            self._tally.count("saves that failed")
        except TimeoutError:
            self._may_hold[place] = before | {self._step}
            self._tally.blame("hung", f"{where}: the save of step {self._step} to {place}")
        else:
            self._may_hold[place] = {self._step}
            self._tally.count("saves committed")

    def _look(self, where: str) -> None:
        """Nothing is in progress any more: each place holds what it may, and nothing is left over."""
        for place, steps in self._may_hold.items():
            try:
                found = load(self._road.remote / place, _NUMBERS, no_dist=True)
            except Exception as error:
                self._tally.blame("wrong", f"{where}: {place}: {error!r}")
                continue
            self._tally.count("checkpoints loaded")
            if found not in steps:
                self._tally.blame("lost", f"{where}: {place} holds {found}, not one of {steps}")
            self._may_hold[place] = {found}
        collect_all(self._road.remote)
        for name in left_over(self._road.remote):
            self._tally.blame("left", f"{where}: {name}")
        if self._road.local is not None:
            for entry in Queue(self._road.local).entries():
                if entry.state in OPEN:
                    self._tally.blame("left", f"{where}: {entry.name} in the local folder")


class _Refusal:
    """A time in which a disk takes nothing; from when that was first tried on, a save may fail."""

    def __init__(self) -> None:
        self.is_tried = self.has_been = False

    def began(self) -> bool:
        return self.is_tried


@contextmanager
def _while_refused(disk: Disk, fault: str, after: float, lasts: float) -> Iterator[_Refusal]:
    """A disk is full or read-only for a while, within the block."""
    refusal = _Refusal()

    def refuse() -> None:
        time.sleep(after)
        if fault == "full":
            refusal.is_tried = refusal.has_been = True
            filler = disk.fill(_LEAVE)
            time.sleep(lasts)
            filler.unlink()
            return
        deadline = time.monotonic() + 5 * _LONGEST
        while not refusal.has_been and time.monotonic() < deadline:
            refusal.is_tried = True
            with suppress(OSError):  # a file is open for writing there
                disk.read_only()
                refusal.has_been = True
        if refusal.has_been:
            time.sleep(lasts)
            disk.read_only(False)

    refusing = threading.Thread(target=refuse)
    refusing.start()
    try:
        yield refusal
    finally:
        refusing.join()


PART = Part(
    title="Full and read-only disks",
    unit="disks that fail for a while",
    what="A disk becomes full, or read-only, at a random moment of a few saves, and is well again after up to "
    f"{_LONGEST:g} s. It is the only one, or the local one before the remote one, or the remote one behind that. A "
    "save to the only disk may fail, and then the checkpoint before it must load. With a local disk each save must be "
    "committed, and be on the remote in the end. Then nothing may be left over.",
    rounds=200,
    run=run,
)
