"""Faults: jobs of four ranks overwrite one checkpoint again and again, and things are killed and refused.

Writer processes, ranks or whole jobs are killed at random moments. After each save, and after each job that was killed,
the checkpoint is loaded and must be, whole and bit for bit, the newest save that was committed (or, where a job was
killed, the one it was in the middle of).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dcp_tensorizer import SaveLimits, TensorizerStorageReader, TensorizerStorageWriter

from .tally import HANG, Part, Tally

__all__ = ["FAULTS", "PART"]

WORLD = 4
FAULTS = {
    "none": "nothing",
    "writer killed once": "a writer process is killed once",
    "writer killed again and again": "a writer process is killed again and again",
    "data refused": "a data file is refused",
    ".metadata refused": "the `.metadata` file is refused",
    "one rank killed": "one rank is killed",
    "all ranks killed": "all ranks are killed",
    "all ranks and writers killed": "all ranks and writer processes are killed",
}
SURVIVED = ("none", "writer killed once")
FATAL = ("one rank killed", "all ranks killed", "all ranks and writers killed")
_WEIGHTS = (6, 4, 2, 2, 2, 1, 1, 1)
_LONGEST_DELAY = 0.3  # seconds from the save's beginning to the fault: about as long as a save takes
_MARK = "DCP_TENSORIZER_SOAK"
_ROWS, _COLUMNS = 1 << 16, 64


@dataclass(frozen=True)
class Save:
    """One save of the plan: its step, and what happens to it."""

    step: int
    fault: str
    victim: int
    delay: float


def run(count: int, seed: int, folder: Path) -> Tally:
    """Makes ``count`` saves below a folder, and one more, so that the run ends with a whole checkpoint alone."""
    chance = random.Random(seed)
    plan = [
        Save(step, *chance.choices([*FAULTS], _WEIGHTS), chance.randrange(WORLD), chance.uniform(0, _LONGEST_DELAY))
        for step in range(1, count)
    ]
    plan.append(Save(count, "none", 0, 0.0))
    os.environ[_MARK] = uuid.uuid4().hex
    multiprocessing.set_forkserver_preload([__name__])
    run = _Run()
    while plan:
        journal = folder / f"journal-{plan[0].step}"
        run.job(plan, folder, journal)
        plan = run.account(plan, [json.loads(line) for line in journal.read_text().splitlines()])
    for file in sorted(path.name for path in (folder / "checkpoint").iterdir())[WORLD + 1 :]:
        run.tally.blame("left", file)  # there should be a file a rank, and .metadata
    return run.result()


class _Run:
    """What has come of the saves so far."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.saves: Counter[str] = Counter()
        self.committed: Counter[str] = Counter()
        self._growth: dict[str, int] = {}
        self._holds = {0}  # the steps that the checkpoint may hold; 0: there is none

    def job(self, plan: list[Save], folder: Path, journal: Path) -> None:
        """One job, until it has done the plan or is killed."""
        journal.touch()
        store_file = folder / f"store-{plan[0].step}"
        arguments = (os.environ[_MARK], plan, folder, store_file, journal)
        job = mp.start_processes(_rank, arguments, nprocs=WORLD, join=False, start_method="forkserver")
        deadline = time.monotonic() + 60 + 5 * len(plan)
        for process in job.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                self.tally.blame("hung", f"a rank of the job that began with {plan[0]}")
                process.kill()
                process.join()
        _, left = psutil.wait_procs([p for p in psutil.process_iter() if _is_ours(p)], timeout=HANG)
        for process in left:
            self.tally.blame("left", f"a writer process of the job that began with {plan[0]}")
            process.kill()

    def account(self, plan: list[Save], entries: list[dict[str, Any]]) -> list[Save]:
        """Counts a job's entries; returns what is left of the plan."""
        done = 0
        for entry in entries:
            if "found" in entry:
                self._account_load(entry)
            elif "growth" in entry:
                for name, value in entry["growth"].items():
                    self._growth[name] = max(self._growth.get(name, 0), value)
            else:
                self._account_save(plan[done], entry)
                done += 1
        rest = plan[done:]
        if rest and rest[0].fault in FATAL:
            killed, rest = rest[0], rest[1:]
            self.saves[killed.fault] += 1
            self._holds = self._holds | {killed.step}
        elif rest:
            raise RuntimeError(f"the job ended by itself in the middle of {rest[0]}")
        return rest

    def _account_load(self, entry: dict[str, Any]) -> None:
        self.tally.count("loads")
        if entry["found"] not in self._holds:
            self.tally.blame("lost", f"found {entry['found']}, not one of {self._holds}")
        if entry["wrong"]:
            self.tally.blame("wrong", f"{entry['found']} is not what was saved, on {entry['wrong']} ranks")
        self._holds = {entry["found"]}

    def _account_save(self, save: Save, entry: dict[str, Any]) -> None:
        self.saves[save.fault] += 1
        self.committed[save.fault] += entry["committed"]
        expected = {True} if save.fault in SURVIVED else {False} if "refused" in save.fault else {True, False}
        if entry["committed"] not in expected:
            self.tally.blame("wrong", f"{save} was {'' if entry['committed'] else 'not '}committed")
        if entry["seconds"] > HANG:
            self.tally.blame("hung", f"{save} took {entry['seconds']:.1f} s")
        if entry["committed"]:
            self._holds = {save.step}

    def result(self) -> Tally:
        tally = self.tally
        tally.rounds = sum(self.saves.values())
        tally.table = [["what happened during the save", "saves", "committed", "what must hold"]]
        tally.table += [
            [words, str(self.saves[fault]), str(self.committed[fault]), _expected(fault)]
            for fault, words in FAULTS.items()
        ]
        for name, value in sorted(self._growth.items()):
            tally.count(f"growth within a job, from its 5th save on: {name}", value)
        return tally


def _expected(fault: str) -> str:
    if fault in SURVIVED:
        return "the save is committed"
    if fault in FATAL:
        return "a new job loads the checkpoint before it, or the new one"
    return "the save fails on every rank; the checkpoint before it still loads"


def _is_ours(process: psutil.Process) -> bool:
    try:
        command = process.cmdline()
        return process.environ().get(_MARK) == os.environ[_MARK] and "dcp_tensorizer._writer_process.worker" in command
    except psutil.Error:
        return False


# --- in the ranks ----------------------------------------------------------------------------------------------------


def _rank(index: int, mark: str, plan: list[Save], folder: Path, store_file: Path, journal: Path) -> None:
    os.environ[_MARK] = mark  # the server that ranks are forked off may be older than this run
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{store_file}", rank=index, world_size=WORLD, timeout=timedelta(seconds=HANG)
    )
    group = dist.new_group(backend="gloo")
    mesh = init_device_mesh("cpu", (WORLD,))
    path = folder / "checkpoint"

    def note(**entry: Any) -> None:
        if index == 0:
            with open(journal, "a") as lines:
                lines.write(json.dumps(entry) + "\n")

    note(**_load(path, mesh))
    sizes: list[dict[str, int]] = []
    with TensorizerStorageWriter(path, thread_count=1, limits=SaveLimits(max_consecutive_failures=None)) as writer:
        for save in plan:
            state = _state(save.step, mesh)
            dist.barrier()
            started = time.monotonic()
            future = dcp.async_save(state, storage_writer=writer, process_group=group)
            with _fault(save, index, future.done):
                committed = _succeeded(future)
            if save.fault in FATAL:
                os._exit(1)  # a rank that lives on: the job is over
            seconds = time.monotonic() - started
            note(committed=committed, seconds=seconds)
            note(**_load(path, mesh))
            sizes.append(_sizes(writer))
        if len(sizes) > 8:
            note(growth={name: sizes[-1][name] - sizes[4][name] for name in sizes[-1]})
    dist.destroy_process_group()


def _state(step: int, mesh: Any, blank: bool = False) -> dict[str, Any]:
    """A state whose every element tells its step; its size changes from step to step."""
    rows = _ROWS + step % 7 * 1000
    full = torch.arange(rows * _COLUMNS, dtype=torch.int32).view(rows, _COLUMNS) + step
    if blank:
        full.zero_()
    weight = distribute_tensor(full, mesh, [Shard(0)])
    return {"model": {"weight": weight, "scale": torch.tensor(0 if blank else step)}, "step": 0 if blank else step}


def _load(path: Path, mesh: Any) -> dict[str, Any]:
    """Loads the checkpoint on all ranks: which step it holds, and on how many of them something is wrong."""
    if not (path / ".metadata").exists():
        return {"found": 0, "wrong": 0}
    outline = {"step": 0}
    dcp.load(outline, storage_reader=TensorizerStorageReader(path))
    step = outline["step"]
    loaded, expected = _state(step, mesh, blank=True), _state(step, mesh)
    dcp.load(loaded, storage_reader=TensorizerStorageReader(path))
    same = (
        torch.equal(_local(loaded["model"]["weight"]), _local(expected["model"]["weight"]))
        and int(loaded["model"]["scale"]) == step == loaded["step"]
    )
    wrong = torch.tensor(not same, dtype=torch.int64)
    dist.all_reduce(wrong)
    return {"found": step, "wrong": int(wrong)}


def _local(tensor: DTensor) -> torch.Tensor:
    return tensor.to_local()


def _succeeded(future: Any) -> bool:
    try:
        future.result()
    except CheckpointException:
        return False
    except Exception:  # another rank is gone, and the group with it
        return False
    return True


@contextmanager
def _fault(save: Save, index: int, done: Callable[[], bool]) -> Iterator[None]:
    """What befalls this rank while a save is in progress."""
    if save.fault == ".metadata refused" and index == 0:
        with _file_size_limit(os.getpid()):
            yield
        return
    if save.fault == "data refused" and index == save.victim:
        with _file_size_limit(_writer_pid()):
            yield
        return
    thread = threading.Thread(target=_strike, args=(save, index, done), daemon=True)
    thread.start()
    yield
    thread.join()


def _strike(save: Save, index: int, done: Callable[[], bool]) -> None:
    time.sleep(save.delay)
    struck = index == save.victim or save.fault.startswith("all ranks")
    if not struck or save.fault == "none":
        return
    if save.fault == "writer killed once":
        _kill(_writer_pid())
    elif save.fault == "writer killed again and again":
        while not done():
            _kill(_writer_pid())
            time.sleep(0.005)
    elif save.fault in FATAL:
        if "writers" in save.fault:
            _kill(_writer_pid())
        os.kill(os.getpid(), signal.SIGKILL)


def _writer_pid() -> int:
    """This rank's writer process, 0 if there is none."""
    return next((child.pid for child in psutil.Process().children() if _is_ours(child)), 0)


def _kill(pid: int) -> None:
    if pid and psutil.pid_exists(pid):
        os.kill(pid, signal.SIGKILL)


@contextmanager
def _file_size_limit(pid: int) -> Iterator[None]:
    """The operating system refuses a process's files past a few bytes, as a full disk would."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (16, hard))
    try:
        yield
    finally:
        if psutil.pid_exists(pid):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


def _sizes(writer: TensorizerStorageWriter) -> dict[str, int]:
    trainer = psutil.Process()
    sizes = {"trainer, MB": trainer.memory_info().rss >> 20, "trainer, descriptors": trainer.num_fds()}
    return sizes | {"trainer, threads": trainer.num_threads()}


PART = Part(
    title="Faults",
    unit="saves",
    what=f"Jobs of {WORLD} ranks save over one path again and again. Meanwhile processes are killed and files are "
    "refused, at random moments. After each save, and after each job that was killed, the checkpoint is loaded and "
    "compared bit for bit. A writer process that is killed again and again can be done with its save before. Then the "
    "save is committed on every rank.",
    rounds=250,
    run=run,
)
