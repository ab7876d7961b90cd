"""What a process has that a save needs, and that changes between saves: keys, umask, working directory.

A job sets them before each save, and again while that is in progress; but for the key of a server, whose proxy takes
the one of now alone.
"""

from __future__ import annotations

import contextlib
import os
import random
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_tensorizer import CheckpointError, SaveLimits, TensorizerStorageWriter, unwrap

from ..lab.faults import Fault, Request, S3Proxy, s3_proxy
from ..lab.processes import quietly
from ..lab.servers import KEY, OTHER_KEY, SECRET, S3Server, s3_server
from .checks import left_over, load, state
from .tally import HANG, Part, Tally

__all__ = ["PART", "run"]

_NUMBERS = 50_000  # 0.8 MB
_LIMITS = SaveLimits(max_consecutive_failures=None, timeout=HANG / 2)
_UMASKS = (0o022, 0o002, 0o077, 0o027)
_ROADS = ("disk", "disk", "local disk", "server", "server", "local disk before the server")
_LONGEST = 0.05  # seconds until all is changed again, while a save is in progress
_PLACES = 8  # that are saved to, one after the other, again and again


def run(rounds: int, seed: int, folder: Path) -> Tally:
    """Makes ``rounds`` saves, and changes all that a save might take from its process before and after each begins."""
    chance, tally = random.Random(seed), Tally()
    for name in ("server", "disk"):
        (folder / name).mkdir()
    with quietly(), s3_server(folder / "server") as server, s3_proxy(server.endpoint) as proxy, _as_before():
        job = _Job(folder, chance, tally, proxy, server)
        try:
            for number in range(rounds):
                job.round(number)
                tally.rounds += 1
                if not tally.is_good:
                    break
        finally:
            job.close()
    for name in left_over(folder / "disk"):
        tally.blame("left", name)
    return tally


@contextlib.contextmanager
def _as_before() -> Iterator[None]:
    """Gives this process back what it had."""
    umask, directory, variables = os.umask(0o022), os.getcwd(), dict(os.environ)
    try:
        yield
    finally:
        os.umask(umask)
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(variables)


class _Job:
    """The saves, and what they must have found."""

    def __init__(self, folder: Path, chance: random.Random, tally: Tally, proxy: S3Proxy, server: S3Server) -> None:
        self._folder, self._chance, self._tally, self._server = folder, chance, tally, server
        self._key = KEY
        self._writers: dict[str, TensorizerStorageWriter] = {}
        proxy.rule = self._rule
        os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
        os.environ["AWS_SECRET_ACCESS_KEY"] = SECRET
        self._umask = 0o022

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def round(self, number: int) -> None:
        """A save, with what the process has when it is asked for, and something else right after that."""
        road, step = self._chance.choice(_ROADS), number + 1
        place = f"{road.replace(' ', '-')}-{number % _PLACES}"
        self._rotate()
        self._change()
        umask, directory = self._umask, Path.cwd()
        writer = self._writer(road)
        where: Any = f"s3://{self._server.bucket}/{place}" if "server" in road else directory / place
        name = place if road == "disk" and self._chance.random() < 0.5 else where  # relative to the directory of now
        try:
            future = dcp.async_save(state(step, _NUMBERS), checkpoint_id=name, storage_writer=writer)
            time.sleep(self._chance.uniform(0, _LONGEST))
            if "server" not in road:
                self._rotate()
            self._change()
            future.result(2 * HANG)  # type: ignore[union-attr]
            if "local" in road and not writer.wait_remote(HANG):
                self._tally.blame("hung", f"round {number}: the flush ({road})")
            found = load(where, _NUMBERS, no_dist=True)
        except TimeoutError:
            self._tally.blame("hung", f"round {number}: the save ({road})")
            return
        except (CheckpointException, CheckpointError) as error:
            self._tally.blame("wrong", f"round {number} ({road}): {unwrap(error)}")
            return
        if found != step:
            self._tally.blame("lost", f"round {number}: {where} holds {found}, and not {step}")
        if road == "disk":
            self._look(f"round {number}", directory / place, umask)
        self._tally.count(f"saves to: {road}")

    def _look(self, where: str, folder: Path, umask: int) -> None:
        """Each file of a checkpoint has the rights of its save's beginning."""
        for path in folder.iterdir():
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode != 0o666 & ~umask:
                self._tally.blame("wrong", f"{where}: {path.name} has {mode:o}, with umask {umask:o}")
            self._tally.count("files whose rights were compared")

    def _writer(self, road: str) -> TensorizerStorageWriter:
        if road not in self._writers:
            url = f"s3://{self._server.bucket}"
            how: dict[str, Any] = {}
            if road == "local disk":
                how = {"path": self._folder / "disk", "local": self._folder / "local"}
            elif road == "local disk before the server":
                how = {"path": url, "local": self._folder / "local-of-server"}
            self._writers[road] = TensorizerStorageWriter(limits=_LIMITS, **how)
        return self._writers[road]

    def _rotate(self) -> None:
        """From now on the server takes another key, and no other one."""
        self._key = os.environ["AWS_ACCESS_KEY_ID"] = OTHER_KEY if self._key == KEY else KEY

    def _change(self) -> None:
        """Gives this process another umask and working directory."""
        self._umask = self._chance.choice(_UMASKS)
        os.umask(self._umask)
        directory = self._folder / "disk" / f"directory-{self._chance.randrange(3)}"
        directory.mkdir(parents=True, exist_ok=True)
        os.chdir(directory)

    def _rule(self, request: Request) -> Fault | None:
        return None if f"={self._key}/" in request.authorization else Fault(400, "ExpiredToken")


PART = Part(
    title="Surroundings that change",
    unit="saves",
    what="Before each save a job gets another key for its server, another umask and working directory. While "
    "the save is in progress umask, directory and unused keys change again. A proxy refuses all keys but the newest "
    "one. Each save must be committed, must be where its working directory was, and its files must have the rights of "
    "its beginning.",
    rounds=300,
    run=run,
)
