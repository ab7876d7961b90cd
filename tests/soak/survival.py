"""Kills at random moments of jobs that keep their states in memory: what the next run loads is whole and new."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_tensorizer import CheckpointManager
from dcp_tensorizer._memory import keeper
from dcp_tensorizer._writer_process import worker

from .tally import HANG, Part, Tally

__all__ = ["PART", "run"]

_ROWS, _COLUMNS = 12, 50_000  # 2.4 MB, and whole rows for each of up to four ranks
_SURVIVE = 60.0
_LONGEST = 0.5  # seconds until a kill, from when a run has restored
_KINDS = ("all trainers", "one trainer, then the others", "writer processes, then trainers", "keepers", "everything")
_WORLDS = (2, 2, 2, 1, 3)
_PROCESSES = {"writer": worker.__name__, "keeper": keeper.__name__}


def _values(step: int) -> torch.Tensor:
    return torch.arange(_ROWS * _COLUMNS, dtype=torch.int32).view(_ROWS, _COLUMNS) + step


def job(rank: int, world: int, folder: str, store: str, last: int) -> None:
    """resumes from what it finds, saves each step, and says what it does; until it is killed, or the last step."""
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=HANG))
    mesh = init_device_mesh("cpu", (world,))
    log = os.open(f"{store}.{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def say(what: str, step: int) -> None:
        os.write(log, f"{what} {step}\n".encode())

    def state_of(step: int) -> dict[str, object]:
        return {"w": distribute_tensor(_values(step), mesh, [Shard(0)]), "step": step, "rank": torch.tensor([step])}

    with CheckpointManager(folder, save_every=1, keep_latest=2, survive=_SURVIVE) as manager:
        state = state_of(0)
        say("begin", 0)
        start = manager.restore(state) or 0
        same = torch.equal(state["w"].to_local(), state_of(start)["w"].to_local())  # type: ignore[attr-defined]
        same = same and state["step"] == start and state["rank"].tolist() == [start]  # type: ignore[attr-defined]
        say("restored" if same else "wrong", start)
        for step in range(start + 1, start + last + 1):
            future = manager.save(step, state_of(step))
            say("saved", step)
            if future is not None and rank == 0:
                future.add_done_callback(lambda done, step=step: done.exception() or say("committed", step))  # type: ignore[misc]
    say("end", 0)
    dist.barrier()
    dist.destroy_process_group()


def run(rounds: int, seed: int, folder: Path) -> Tally:
    """Starts a job and kills it, so many times; the last run goes to its end."""
    chance, tally = random.Random(seed), Tally()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dcp_tensorizer", __name__])
    runtime = folder / "runtime"
    runtime.mkdir(mode=0o700)
    os.environ["XDG_RUNTIME_DIR"] = str(runtime)
    newest = _Newest()
    for number in range(rounds + 1):
        world = chance.choice(_WORLDS)
        kind = chance.choice(_KINDS) if number < rounds else ""
        with tempfile.TemporaryDirectory() as place:
            store = Path(place, "store")
            ranks = [
                context.Process(target=job, args=(n, world, str(folder / "run"), str(store), 5 if not kind else 10**6))
                for n in range(world)
            ]
            for rank in ranks:
                rank.start()
            began = _wait_for(lambda: _says(store, world, "begin"), ranks)  # noqa: B023
            if kind and began:
                time.sleep(chance.uniform(0.0, _LONGEST))
                tally.count("keepers killed", _kill(kind, ranks, chance))
            if not _ended(ranks):
                tally.blame("hung", f"round {number} ({kind or 'the last run'}, {world} ranks)")
            _judge(tally, number, kind, _logs(store, world), newest)
        tally.rounds += bool(kind)
        tally.count(f"kills of {kind}" if kind else "runs to the end")
        if not tally.is_good:
            break
    left, keepers = [path.name for path in runtime.rglob("*")], _keepers(runtime)
    if left or keepers:
        tally.blame("left", f"{len(left)} sockets and directories, {len(keepers)} keepers")
    return tally


class _Newest:
    """What the next run has to find.

    Attributes:
        committed: The newest step that a save reported.
        kept: The newest step that all ranks kept; 0 if keepers have been killed since.
    """

    def __init__(self) -> None:
        self.committed = self.kept = 0


def _judge(tally: Tally, number: int, kind: str, logs: Sequence[list[tuple[str, int]]], newest: _Newest) -> None:
    """Compares what a run says with what it had to find, and learns what the next one has to."""
    said = [entry for log in logs for entry in log]
    starts = {step for what, step in said if what == "restored"}
    for step in [step for what, step in said if what == "wrong"]:
        tally.blame("wrong", f"round {number} ({kind}): step {step} was restored with other values")
    if len(starts) > 1:
        tally.blame("wrong", f"round {number} ({kind}): the ranks restored steps {sorted(starts)}")
    for start in starts:
        tally.count("restored from memory alone", start > newest.committed)
        if start < max(newest.committed, newest.kept):
            tally.blame(
                "lost", f"round {number}: {start} was restored; {newest.kept} was kept, {newest.committed} saved"
            )
    saved = max((step for what, step in said if what == "saved"), default=0)
    committed = max((step for what, step in said if what == "committed"), default=0)
    tally.count("steps saved", sum(what == "saved" for what, _ in logs[0]))
    newest.committed = max(newest.committed, committed)
    if kind in ("keepers", "everything"):
        newest.kept = 0  # some are gone
    elif saved:  # each rank was there when the save of this step began, and so had kept the one before
        newest.kept = saved - 1


def _kill(kind: str, ranks: Sequence[ForkServerProcess], chance: random.Random) -> int:
    """Kills what belongs to a kind of death; returns how many keepers were among it."""
    keepers = list[int]()
    pids = [rank.pid for rank in ranks if rank.pid is not None]
    if kind == "one trainer, then the others":
        first = chance.choice(pids)
        _signal([first])
        time.sleep(chance.uniform(0.0, 0.2))
    elif kind == "writer processes, then trainers":
        _signal(_others("writer", *pids))
        time.sleep(chance.uniform(0.0, 0.2))
    elif kind in ("keepers", "everything"):
        keepers = _others("keeper", *pids)
        _signal(keepers)
        if kind == "keepers":
            time.sleep(chance.uniform(0.0, 0.2))
    _signal(pids)
    return len(keepers)


def _others(kind: str, *parents: int) -> list[int]:
    """The writer processes or keepers of some trainers."""
    found = []
    for process in psutil.process_iter(["cmdline", "ppid"]):
        is_one = any(_PROCESSES[kind] in argument for argument in process.info["cmdline"] or ())
        if is_one and process.info["ppid"] in parents:
            found.append(process.pid)
    return found


def _keepers(runtime: Path) -> list[int]:
    """All keepers whose sockets are below a directory: other jobs on this machine may have some, too."""
    lines = ((process.pid, process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    return [pid for pid, line in lines if any(argument.startswith(str(runtime)) for argument in line)]


def _signal(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _wait_for(condition: object, ranks: Sequence[ForkServerProcess]) -> bool:
    deadline = time.monotonic() + HANG
    while time.monotonic() < deadline and any(rank.is_alive() for rank in ranks):
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.002)
    return False


def _ended(ranks: Sequence[ForkServerProcess]) -> bool:
    """Waits for all; kills what hangs. Whether none did."""
    deadline = time.monotonic() + HANG
    for rank in ranks:
        rank.join(max(0.0, deadline - time.monotonic()))
    hung = [rank for rank in ranks if rank.is_alive()]
    for rank in hung:
        rank.kill()
        rank.join()
    return not hung


def _logs(store: Path, world: int) -> list[list[tuple[str, int]]]:
    logs = []
    for rank in range(world):
        path = Path(f"{store}.{rank}")
        lines = path.read_text().splitlines() if path.exists() else []
        logs.append([(line.split()[0], int(line.split()[1])) for line in lines])
    return logs


def _says(store: Path, world: int, what: str) -> bool:
    return all(any(entry[0] == what for entry in log) for log in _logs(store, world))


PART = Part(
    title="Restarts from memory",
    unit="kills",
    what="A job of one to three ranks saves each step, and keeps its states in memory. At a random moment its trainers "
    "are killed, or its writer processes, its keepers, or all. The next run, on another number of ranks, must find on "
    "each rank the same step, with all of its values: none older than the newest that was committed, and than the last "
    "but one that was staged, unless keepers were killed. At the end no keeper and no socket may be left.",
    rounds=1000,
    run=run,
)
