"""Interleavings: savers, a loader, a collector and a copier at work on one directory, each in its own process."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import random
import signal
import tempfile
import time
from collections.abc import Container, Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp

from dcp_tensorizer import TensorizerStorageWriter
from dcp_tensorizer._saving.commit import put_records
from dcp_tensorizer._storage.local import LocalStorage
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._tensor_file.names import is_data_file_name, save_id_in

from ..lab.processes import quietly
from .actors import COMPOSITE, KEEP, LOADER_RANKS, NUMBERS, Event, Places, act
from .checks import collect_all, left_over, load, state
from .history import History
from .tally import HANG, Part, Tally, Unavailable

__all__ = ["PART", "run"]

_KILLED = 0.15  # of rounds: a saver is killed
_MANY = 60
_LONGEST_LIFE = 0.5  # seconds from a round's beginning to that
_SAVERS = (("saver", 0), ("saver", 1))
_TEAM = (*_SAVERS, *(("loader", rank) for rank in range(LOADER_RANKS)), ("collector", 0), ("copier", 0))
_DEAD = object()

_Name = tuple[str, int]


class _BrokenDown(Exception):
    """An actor does not go on."""


class _Member(NamedTuple):
    process: multiprocessing.process.BaseProcess
    connection: Connection


def run(rounds: int, seed: int, folder: Path) -> Tally:
    """Lets all actors work at once, ``rounds`` times; at the end collects what is left, and looks what is there."""
    chance, tally = random.Random(seed), Tally()
    multiprocessing.set_forkserver_preload([act.__module__])
    with _places(folder) as places, quietly():
        history = History(tally)
        _prepare(places, history)
        team = _Team(places, seed, tally)
        try:
            with closing(team):
                for number in range(1, rounds + 1):
                    tally.rounds += 1
                    killed = chance.choice(_SAVERS) if chance.random() < _KILLED else None
                    for actor, event in team.round(number, killed, chance.uniform(0, _LONGEST_LIFE)):
                        history.note(actor, event)
                    history.judge(f"round {number}")
                    if number % 10 == 0:
                        _look(places, history, tally, f"after round {number}")
        except _BrokenDown:  # what it was about to do is not known, and so not what may be there
            return tally
        _end(places, history, tally)
    return tally


def _end(places: Places, history: History, tally: Tally) -> None:
    began = time.monotonic()
    for removal in collect_all(places.run, keep=1):
        if removal.whole and not removal.kept:
            path = os.path.relpath(removal.path, places.run)
            history.finally_removed(Event("remove", path, None, began, time.monotonic(), "done"))
    for path in left_over(places.run):
        tally.blame("left", path)
    _look(places, history, tally, "at the end")


@contextmanager
def _places(folder: Path) -> Iterator[Places]:
    run = folder / "run"
    run.mkdir()
    others = [path for path in ("/dev/shm", tempfile.gettempdir(), os.getcwd()) if os.path.isdir(path)]
    elsewhere = next((path for path in others if os.stat(path).st_dev != os.stat(run).st_dev), None)
    if elsewhere is None:
        raise Unavailable(f"all of {', '.join(others)} are on the file system of {folder}")
    with tempfile.TemporaryDirectory(dir=elsewhere, prefix="soak-") as name:
        yield Places(run, Path(name), Path(name) / "master")


def _prepare(places: Places, history: History) -> None:
    """What links lead to, what is overwritten, and a checkpoint of many files to be copied, with what is beside it."""
    for path in ("step-0", "latest", *(f"checkpoint-1/{part}" for part in COMPOSITE)):
        name = COMPOSITE.get(os.path.basename(path), "weight")
        history.note("", Event("save", path, 0, time.monotonic()))
        dcp.save(state(0, NUMBERS, name), storage_writer=TensorizerStorageWriter(places.run / path), no_dist=True)
        history.note("", Event("save", path, 0, time.monotonic(), time.monotonic(), "done"))
    (places.run / "best").symlink_to("step-0")
    (places.run / "best-parts").symlink_to("checkpoint-1")
    many = state(0, NUMBERS) | {f"layer.{number}": torch.zeros(1000) for number in range(_MANY)}
    with mock.patch.object(LocalStorage, "max_file_bytes", 1):  # a file for each tensor
        dcp.save(many, storage_writer=TensorizerStorageWriter(places.master), no_dist=True)
    # A record of the save, as if the source were the directory of a save in progress: its copy proves nothing.
    names = [path.name for path in places.master.iterdir() if is_data_file_name(path.name)]
    put_records(open_storage(places.master), map(save_id_in, names))
    (places.master / "config.json").write_text("{}")


class _Team:
    """The processes of the actors."""

    def __init__(self, places: Places, seed: int, tally: Tally) -> None:
        self._places, self._seed, self._tally = places, seed, tally
        self._context = multiprocessing.get_context("forkserver")
        self._starts = 0
        self._members = {name: self._start(*name) for name in _TEAM}

    def _start(self, role: str, index: int) -> _Member:
        self._starts += 1
        ours, theirs = self._context.Pipe()
        seed = f"{self._seed} {role} {0 if role == 'loader' else self._starts}"
        process = self._context.Process(target=act, args=(role, index, self._places, seed, theirs), daemon=True)
        process.start()
        theirs.close()
        return _Member(process, ours)

    def round(self, number: int, killed: _Name | None, life: float) -> Iterator[tuple[str, Event]]:
        """Lets all do a round, and one be killed in it; yields what they tell. Raises `_BrokenDown`."""
        busy = {member.connection: name for name, member in self._members.items()}
        for connection in busy:
            connection.send(number)
        death = time.monotonic() + life
        heard = dict.fromkeys(busy, time.monotonic())
        while busy:
            if killed is not None and time.monotonic() >= death:
                self._kill(killed, busy)
                killed = None
            for ready in multiprocessing.connection.wait(list(busy), 0.02):
                role, index = name = busy[ready]
                message = self._hear(ready)
                heard[ready] = time.monotonic()
                if isinstance(message, Event):
                    yield f"{role} {index}", message
                else:
                    del busy[ready]
                if message is _DEAD:
                    yield f"{role} {index}", Event("death", "", None, 0.0, time.monotonic())
                    self._replace(name)
                elif isinstance(message, str):
                    self._tally.blame("wrong", f"round {number}: {message}")
                    raise _BrokenDown
            hung = [busy[connection] for connection in busy if time.monotonic() - heard[connection] > HANG]
            if hung:
                self._tally.blame("hung", f"round {number}: {hung}")
                for name in hung:
                    os.kill(self._members[name].process.pid or 0, signal.SIGUSR1)  # tells where
                raise _BrokenDown

    def _hear(self, connection: Connection) -> Any:
        try:
            return connection.recv()
        except (EOFError, ConnectionError):
            return _DEAD

    def _kill(self, name: _Name, busy: Container[Connection]) -> None:
        self._tally.count("savers killed")
        self._members[name].process.kill()
        if self._members[name].connection not in busy:  # it was done with its round
            self._replace(name)

    def _replace(self, name: _Name) -> None:
        """Starts another one in place of one that was killed."""
        self._members[name].process.join()
        self._members[name].connection.close()
        self._members[name] = self._start(*name)

    def close(self) -> None:
        for member in self._members.values():
            with suppress(OSError):
                member.connection.send(None)
        for (role, index), member in self._members.items():
            member.process.join(HANG)
            if member.process.is_alive():
                self._tally.blame("hung", f"{role} {index}, at its end")
                member.process.kill()
                member.process.join()
            member.connection.close()


def _look(places: Places, history: History, tally: Tally, where: str) -> None:
    """Loads every checkpoint that there has ever been, while nothing is in progress."""
    for path in history.paths():
        now = time.monotonic()
        expected = history.expected(path, now, now)
        try:
            name = COMPOSITE.get(os.path.basename(path), "weight")
            found = None
            if (places.run / path).exists():
                tally.count("checkpoints loaded between the rounds")
                found = load(places.run / path, NUMBERS, name, no_dist=True)
        except Exception as error:
            tally.blame("wrong", f"{where}: {path}: {error!r}")
            continue
        if found not in expected:
            tally.blame("lost", f"{where}: {path} holds {found}, not one of {expected}")


PART = Part(
    title="Interleavings",
    unit="rounds of interleaved work",
    what="Five actors work in one directory at once, in processes of their own, and each call to storage waits for a "
    "random time now and then. Two savers overwrite one checkpoint, and save others; now and then one of them is "
    f"killed. A loader on {LOADER_RANKS} ranks loads whatever is there. A collector runs `gc` and `gc --keep {KEEP}`. "
    "A copier brings whole checkpoints from another file system with `cp -a` and `mv`, is stopped in the midst of it, "
    "and compares what has arrived. In the directory lie checkpoints of several parts, and links to what must stay. At "
    "the end one `gc --older-than 0` runs.",
    rounds=150,
    run=run,
)
