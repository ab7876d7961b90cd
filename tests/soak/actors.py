"""Who is at work in a directory of checkpoints: savers, a loader on two ranks, a collector, a copier.

Each is a process, which does as much as a round asks for and tells what it does as it does it. A moment is
`time.monotonic`, which is one clock for all processes. Every call to storage waits for a random time now and then, so
that orders come about that are rare in the field.
"""

from __future__ import annotations

import faulthandler
import filecmp
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_tensorizer import SaveLimits, TensorizerStorageWriter
from dcp_tensorizer._storage.local import LocalStorage
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._tensor_file.names import is_record_file_name
from dcp_tensorizer.tools._gc import Removal, plan_collection, remove

from ..lab.processes import quietly
from .checks import cause_of, load, state
from .tally import HANG

__all__ = ["COMPOSITE", "IMPORT_STEP", "KEEP", "LOADER_RANKS", "NUMBERS", "ROLES", "Event", "Places", "act"]

NUMBERS = 40_000
KEEP = 3
LOADER_RANKS = 2
IMPORT_STEP = 10**9  # and more: the steps of what is copied in
COMPOSITE = {"model_0": "model", "optimizer_0": "optimizer"}  # the parts of one, and what their keys begin with
_ATTEMPTS = 40
_STOPS = 4
_EDGE = (
    *("listing", "make_directory", "create", "sync_directory", "put", "read", "head", "open", "put_record"),
    *("is_record", "links", "lock_directory", "remove", "remove_directory"),
)


class Places(NamedTuple):
    """Directories: of the checkpoints; of the copier, on another file system; and what the copier copies."""

    run: Path
    elsewhere: Path
    master: Path


@dataclass(frozen=True)
class Event:
    """Something that an actor has begun or ended.

    Attributes:
        kind: ``save``, ``load``, ``look`` (which checkpoints can go), ``remove`` or ``copy``.
        path: Of the checkpoint, below the directory.
        step: That is saved, or was found; None if none was.
        began, ended: Moments; ``ended`` is None while it lasts.
        outcome: Empty while it lasts; ``done``, or what went wrong: see each actor.
        words: What an error said.
    """

    kind: str
    path: str
    step: int | None
    began: float
    ended: float | None = None
    outcome: str = ""
    words: str = ""


class Actor:
    """One of them."""

    def __init__(self, index: int, places: Places, chance: random.Random, tell: Callable[[Event], None]) -> None:
        self.index, self.places, self.chance, self._tell = index, places, chance, tell

    def act(self, round_number: int) -> None:
        """Does what a round asks for."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends."""

    def pause(self, longest: float = 0.03) -> None:
        time.sleep(self.chance.uniform(0, longest))

    def told(self, kind: str, path: str, step: int | None, work: Callable[[], tuple[str, int | None]]) -> Event:
        """Does something and tells when it begins, when it has ended, and how, which ``work`` returns."""
        began = time.monotonic()
        self._tell(Event(kind, path, step, began))
        words = ""
        try:
            outcome, step = work()
        except (CheckpointException, Exception) as error:
            cause = cause_of(error)
            outcome, words = type(cause).__name__, str(cause)
        event = Event(kind, path, step, began, time.monotonic(), outcome, words)
        self._tell(event)
        return event


class Saver(Actor):
    """Overwrites what the other saver overwrites too, and saves steps, composites, and once what must be saved once."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        limits = SaveLimits(max_consecutive_failures=None, max_reuses=5)
        self._writer = TensorizerStorageWriter(limits=limits, reuse_unchanged=self.index == 0)
        self._first = TensorizerStorageWriter(overwrite=False)

    def act(self, round_number: int) -> None:
        for number in range(4):
            self.pause()
            step = round_number * 100 + self.index * 10 + number
            what = self.chance.choices(("latest", "step", "composite", "part", "once"), (8, 4, 2, 1, 1))[0]
            if what == "latest":
                self._save("latest", step)
            elif what == "step":
                self._save(f"step-{step}", step)
            elif what == "once":
                self._save(f"once/{'abcdefghij'[round_number % 10]}", step, writer=self._first)
            elif what == "composite":
                for part in COMPOSITE:
                    self._save(f"checkpoint-{step}/{part}", step)
            else:
                self._save("checkpoint-1/optimizer_0", step)

    def close(self) -> None:
        self._writer.close()
        self._first.close()

    def _save(self, path: str, step: int, writer: TensorizerStorageWriter | None = None) -> None:
        how: dict[str, Any] = {"checkpoint_id": self.places.run / path, "storage_writer": writer or self._writer}
        content = state(step, NUMBERS, COMPOSITE.get(os.path.basename(path), "weight"))

        def save() -> tuple[str, int]:
            if writer is None and self.chance.random() < 0.5:
                dcp.async_save(content, **how).result()
            else:
                dcp.save(content, no_dist=True, **how)
            return "done", step

        self.told("save", path, step, save)


class Loader(Actor):
    """Loads on several ranks, whatever is there. A load that meets a change is tried again until it succeeds.

    Its ranks draw the same numbers, but for pauses.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        store, rank, world = f"file://{self.places.elsewhere}/loader", self.index, LOADER_RANKS
        dist.init_process_group("gloo", store, rank=rank, world_size=world, timeout=timedelta(seconds=HANG))

    def act(self, round_number: int) -> None:
        for _ in range(8):
            self.pause()
            there = [self._choose()]
            dist.broadcast_object_list(there)
            path: str = there[0]
            for _attempt in range(_ATTEMPTS):
                event = self.told("load", path, None, lambda path=path: self._load(path))
                if event.outcome in ("done", "Wrong") or path.startswith(("step-", "checkpoint-")):
                    break

    def close(self) -> None:
        dist.destroy_process_group()

    def _choose(self) -> str:
        """One of the paths that always hold a checkpoint, or a step that may go at any moment."""
        steps = sorted(path.name for path in self.places.run.glob("step-*") if path.name < f"step-{IMPORT_STEP}")
        fixed = [*["latest"] * 5, "best", *(f"best-parts/{part}" for part in COMPOSITE)]
        return self.chance.choice([*fixed, *steps[-2:]])

    def _load(self, path: str) -> tuple[str, int | None]:
        found = load(self.places.run / path, NUMBERS, COMPOSITE.get(os.path.basename(path), "weight"))
        return "nothing" if found is None else "done", found


class Collector(Actor):
    """``gc --keep``, and ``gc`` alone."""

    def act(self, round_number: int) -> None:
        for _ in range(4):
            self.pause(0.1)
            keep = self.chance.choice((KEEP, KEEP, None))
            removals: list[Removal] = []

            def look(keep: int | None = keep, removals: list[Removal] = removals) -> tuple[str, None]:
                removals += plan_collection(open_storage(self.places.run), keep, None)
                return "done", None

            self.told("look", "", None, look)
            for removal in removals:
                self.pause(0.01)
                path = os.path.relpath(removal[1].path, self.places.run)
                if removal[1].kept or not removal[1].whole:
                    remove(removal)
                    continue
                self.told("remove", path, None, lambda removal=removal: (remove(removal).kept or "done", None))


class Copier(Actor):
    """Brings whole checkpoints from another file system, stops in the midst of it, and looks whether all is there."""

    def act(self, round_number: int) -> None:
        for number, command in enumerate(self.chance.sample((["cp", "-a"], ["mv"]), 2)):
            self.pause()
            is_step = self.chance.random() < 0.5
            step = IMPORT_STEP + 10 * round_number + number
            name = f"step-{step}" if is_step else f"import-{'abcd'[round_number % 4]}-{'xy'[number]}"
            if not is_step:
                shutil.rmtree(self.places.run / name, ignore_errors=True)
            self.told("copy", name, 0, lambda name=name, command=command: self._copy(command, name))

    def _copy(self, command: list[str], name: str) -> tuple[str, int | None]:
        source, target = self.places.elsewhere / name, self.places.run / name
        subprocess.run(["cp", "-a", str(self.places.master), str(source)], check=True)
        if name.startswith("step-"):  # without its record, so that it is collected one day
            for record in filter(is_record_file_name, os.listdir(source)):
                (source / record).unlink()
        expected = sorted(os.listdir(source))
        with subprocess.Popen([*command, str(source), str(target)], stderr=subprocess.PIPE, text=True) as process:
            for _ in range(_STOPS):
                self._stop(process)
            assert process.stderr is not None
            said = process.stderr.read()
        shutil.rmtree(source, ignore_errors=True)
        if process.returncode:
            return f"{command[0]}: exit {process.returncode}: {said[:200]}", None
        equal, *_ = filecmp.cmpfiles(self.places.master, target, expected, shallow=False)
        if sorted(equal) != expected:
            return f"{command[0]}: lacks {sorted(set(expected) - set(equal))[:3]}", None
        return "done", load(target, NUMBERS, no_dist=True)

    def _stop(self, process: subprocess.Popen[str]) -> None:
        """Stops the program for as long as a collector takes, somewhere in the midst of its work."""
        time.sleep(self.chance.uniform(0, 0.002))
        if process.poll() is None:
            process.send_signal(signal.SIGSTOP)
            self.pause(0.4)
            process.send_signal(signal.SIGCONT)


ROLES: dict[str, type[Actor]] = {"saver": Saver, "loader": Loader, "collector": Collector, "copier": Copier}


def act(role: str, index: int, places: Places, seed: str, connection: Connection) -> None:
    """A process of an actor: does a round for each number that it is sent, up to None.

    It sends an `Event` for all that begins and all that ends, None at the end of a round, and text if it breaks down.
    """
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    _delay_calls(random.Random(f"{seed} calls {index}"))
    with quietly():
        try:
            actor = ROLES[role](index, places, random.Random(seed), connection.send)
            while (number := connection.recv()) is not None:
                actor.act(number)
                connection.send(None)
            actor.close()
        except EOFError:  # whoever asks for rounds is gone
            return
        except Exception as error:
            connection.send(f"{role} {index}: {error!r}")


def _delay_calls(chance: random.Random) -> None:
    """Lets one in eight calls to storage wait for up to 20 ms, in this process."""

    def delayed(call: Callable[..., Any]) -> Callable[..., Any]:
        def wait_and_call(*arguments: Any, **options: Any) -> Any:
            if chance.random() < 0.125:
                time.sleep(chance.uniform(0, 0.02))
            return call(*arguments, **options)

        return wait_and_call

    for name in _EDGE:
        setattr(LocalStorage, name, delayed(getattr(LocalStorage, name)))
