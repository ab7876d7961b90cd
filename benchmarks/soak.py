"""Many saves with faults: `python -m benchmarks.soak` (`make soak`, about 6 minutes).

Jobs of four ranks overwrite one checkpoint again and again with a changing state, while writer processes, ranks or
whole jobs are killed at random moments and files are refused. After each save, and after each job that was killed, the
checkpoint is loaded and must be, whole and bit for bit, the newest save that was committed (or, where a job was
killed, the one it was in the middle of).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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

from .harness import machine, rewrite, store, stored
from .soak_report import FAILED, FATAL, HANG, SURVIVED, WORLD, render

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


@dataclass
class Tally:
    """What came of it."""

    saves: Counter[str] = field(default_factory=Counter)
    committed: Counter[str] = field(default_factory=Counter)
    longest: float = 0.0
    loads: int = 0
    wrong: int = 0
    lost: int = 0
    hangs: int = 0
    leaks: int = 0
    growth: dict[str, int] = field(default_factory=dict)


def soak(count: int, seed: int, folder: Path) -> Tally:
    """Makes ``count`` saves below a folder, and counts what went wrong."""
    chance = random.Random(seed)
    faults = (*SURVIVED, *FAILED, *FATAL)
    plan = [
        Save(step, *chance.choices(faults, _WEIGHTS), chance.randrange(WORLD), chance.uniform(0, _LONGEST_DELAY))
        for step in range(1, count + 1)
    ]
    plan.append(Save(count + 1, "none", 0, 0.0))  # so that the run ends with a whole checkpoint and nothing else
    tally = Tally()
    os.environ[_MARK] = uuid.uuid4().hex
    holds = {0}  # the steps that the checkpoint may hold; 0: there is none
    while plan:
        journal = folder / f"journal-{plan[0].step}"
        _run_job(plan, folder, journal, tally)
        entries = [json.loads(line) for line in journal.read_text().splitlines()]
        plan, holds = _account(plan, holds, entries, tally)
    tally.leaks += len(list((folder / "checkpoint").iterdir())) - WORLD - 1  # a file a rank, and .metadata
    return tally


def _run_job(plan: list[Save], folder: Path, journal: Path, tally: Tally) -> None:
    """One job, until it has done the plan or is killed."""
    journal.touch()
    store_file = folder / f"store-{plan[0].step}"
    job = mp.spawn(_rank, (plan, folder, store_file, journal), nprocs=WORLD, join=False)
    deadline = time.monotonic() + 60 + 5 * len(plan)
    for process in job.processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            tally.hangs += 1
            process.kill()
            process.join()
    _, left = psutil.wait_procs([p for p in psutil.process_iter() if _is_ours(p)], timeout=10)
    for process in left:
        tally.leaks += 1
        process.kill()


def _account(
    plan: list[Save], holds: set[int], entries: list[dict[str, Any]], tally: Tally
) -> tuple[list[Save], set[int]]:
    """Counts a job's entries; returns what is left of the plan, and which steps the checkpoint may hold."""
    done = 0
    for entry in entries:
        if "found" in entry:
            tally.loads += 1
            if entry["found"] not in holds:
                tally.lost += 1
            tally.wrong += entry["wrong"]
            holds = {entry["found"]}
        elif "growth" in entry:
            for name, value in entry["growth"].items():
                tally.growth[name] = max(tally.growth.get(name, 0), value)
        else:
            done += 1
            tally.saves[entry["fault"]] += 1
            tally.committed[entry["fault"]] += entry["committed"]
            tally.longest = max(tally.longest, entry["seconds"])
            tally.hangs += entry["seconds"] > HANG
            holds = {entry["step"]} if entry["committed"] else holds
    rest = plan[done:]
    if rest and rest[0].fault in FATAL:
        killed, rest = rest[0], rest[1:]
        tally.saves[killed.fault] += 1
        holds = holds | {killed.step}
    elif rest:
        raise RuntimeError(f"the job ended by itself in the middle of {rest[0]}")
    return rest, holds


def _is_ours(process: psutil.Process) -> bool:
    try:
        command = process.cmdline()
        return process.environ().get(_MARK) == os.environ[_MARK] and "dcp_tensorizer._writer_process.worker" in command
    except psutil.Error:
        return False


# --- in the ranks ----------------------------------------------------------------------------------------------------


def _rank(index: int, plan: list[Save], folder: Path, store_file: Path, journal: Path) -> None:
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
            note(step=save.step, fault=save.fault, committed=committed, seconds=seconds)
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
    """What befalls this rank while a save is under way."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--saves", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where to save; the temporary directory otherwise")
    parser.add_argument("--redraw", action="store_true", help="the page from the stored results, without a run")
    options = parser.parse_args()
    if options.redraw:
        rewrite("soak", render(stored("soak")))
        return
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        tally = soak(options.saves, options.seed, Path(folder))
    counted = {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(tally).items()}
    where = options.folder or tempfile.gettempdir()
    content = {"machine": machine(where), "saves": options.saves, "seed": options.seed, "tally": counted}
    content["seconds"] = time.monotonic() - started
    store("soak", content, render(content))
    if tally.wrong or tally.lost or tally.hangs or tally.leaks:
        raise SystemExit("something was lost, wrong or left over")


if __name__ == "__main__":
    main()
