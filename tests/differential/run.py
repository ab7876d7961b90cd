"""Runs a case with one of the two storages, and says what came of it."""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from dcp_tensorizer import SaveLimits, TensorizerStorageReader, TensorizerStorageWriter

from ..lab.processes import quietly
from .describe import Failed, describe, describe_metadata
from .memory import KnownMemory
from .objects import Books
from .planners import forget_cached_plans, load_planner, save_planner
from .values import Box, Maker, Meshes, tensors_in
from .worlds import Run

__all__ = ["MEANWHILE", "Case", "Load", "Save", "Storages", "run_case", "run_in", "surroundings_kept"]


_HANG = 30.0


@dataclass(frozen=True)
class Save:
    """One save: of which state, with which planner, and whether the ranks save together."""

    state: Box
    planner: str = "none"
    together: bool = True


@dataclass(frozen=True)
class Load:
    """One load: from which of the paths, onto how many ranks (0: no process group), into what."""

    path: int
    ranks: int
    target: Box | tuple[str, ...] | None
    """The state to load into; or the keys for `_load_state_dict_from_keys`, None for all of them."""
    planner: str = "none"
    trusted: bool = True
    alone: bool = False
    """Each rank by itself: ``no_dist``."""


@dataclass(frozen=True)
class Case:
    """Saves, and the loads that follow."""

    ranks: int
    mode: str
    """``save``; ``async_save``, ``overlap`` (the same while staging goes on): one after the other; ``at once``: without
    waiting for the one before; ``threads``: each in a thread of its own."""
    one_path: bool
    saves: tuple[Save, ...]
    loads: tuple[Load, ...]
    meanwhile: str = "nothing"
    """What happens in the process while a save is in progress; see `_MEANWHILE`."""

    def path_of(self, save: int) -> int:
        return 0 if self.one_path and self.mode != "threads" else save


class Storages:
    """Makes readers and writers. Ours keeps its writers: they serve case after case."""

    def __init__(self) -> None:
        self._writers: dict[tuple[int, str], TensorizerStorageWriter] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def leave_in_child(self) -> None:
        """Forks a child that closes all writers, and waits for it."""
        child = os.fork()
        if child == 0:
            try:
                self.close()
            finally:
                os._exit(os.EX_OK)
        deadline = time.monotonic() + _HANG
        while not os.waitpid(child, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise TimeoutError("a forked child that closes the writers hangs")
            time.sleep(0.001)

    def writer(self, ours: bool, rank: int, mode: str, path: Path) -> Any:
        if not ours:
            return dcp.FileSystemWriter(path, sync_files=False)
        kind = "overlap" if mode == "overlap" and rank == 0 else "shared" if mode == "at once" and rank == 0 else ""
        with self._lock:
            if (rank, kind) not in self._writers:
                self._writers[rank, kind] = TensorizerStorageWriter(
                    thread_count=1,
                    sync_files=False,
                    overlap_staging=kind == "overlap",
                    staging="shared" if kind == "shared" else "buffer",
                    limits=SaveLimits(max_consecutive_failures=None),
                )
            return self._writers[rank, kind]

    def reader(self, ours: bool, path: Path, trusted: bool) -> Any:
        if not ours:
            return dcp.FileSystemReader(path)
        return TensorizerStorageReader(path, allow_pickle=trusted, thread_count=1)


def run_case(case: Case, ours: bool, storages: Storages, run: Run, folder: Path, mode: str | None = None) -> Any:
    """What came of a case: of each save, of each checkpoint's metadata, of each load, on each rank.

    Args:
        folder: Where it saves, below a folder of its own that is removed.
        mode: Another one than the case's.
    """
    with tempfile.TemporaryDirectory(dir=folder) as name:
        return run_in(Path(name), case, ours, storages, run, mode)


def run_in(folder: Path, case: Case, ours: bool, storages: Storages, run: Run, mode: str | None = None) -> Any:
    """The same in a folder that may be shared with other processes, which have the other ranks."""
    with quietly():
        forget_cached_plans()
        job = _Job(case, ours, storages, folder, mode or case.mode)
        saves = run(case.ranks, job.save_all)
        paths = sorted({case.path_of(number) for number in range(len(case.saves))})
        metadata = {path: run(case.ranks, functools.partial(job.metadata, path)) for path in paths}
        calls = [functools.partial(run, load.ranks, functools.partial(job.load, load)) for load in case.loads]
        loads = _in_threads(calls) if job.mode == "threads" else [call() for call in calls]
    return {
        "saves": dict(enumerate(saves)),
        "metadata": {path: dict(enumerate(found)) for path, found in metadata.items()},
        "loads": {number: dict(enumerate(results)) for number, results in enumerate(loads)},
    }


class _Job:
    """A case with one storage."""

    def __init__(self, case: Case, ours: bool, storages: Storages, folder: Path, mode: str) -> None:
        self.case = case
        self.mode = mode
        self._ours = ours
        self._storages = storages
        self._folder = folder

    def save_all(self, rank: int) -> Any:
        case = self.case
        meshes = Meshes(case.ranks) if case.ranks else None
        # Made before the first save begins: some are made by collectives, which no save's may meet in the same group.
        states = [Maker(rank, meshes).make(save.state) for save in case.saves]
        saves = [functools.partial(self._save, number, state, rank) for number, state in enumerate(states)]
        if self.mode == "threads":
            waits = _in_threads(saves)
        else:
            waits = []
            for save in saves:
                waits.append(save())
                if self.mode != "at once" or not self._ours:
                    _wait(waits[-1])
        for wait in waits:  # with cached plans all of them return one object: it is looked at when all are done
            _wait(wait)
        return {number: _outcome(wait) for number, wait in enumerate(waits)}

    def _save(self, number: int, state: Any, rank: int) -> Callable[[], Any]:
        """Begins a save; what it returns waits for it."""
        save, where = self.case.saves[number], self._folder / str(self.case.path_of(number))
        options: dict[str, Any] = {
            "checkpoint_id": where,
            "storage_writer": self._storages.writer(self._ours, rank, self.mode, where),
            "planner": save_planner(save.planner, rank, self._ours),
            "use_collectives": save.together,
        }
        try:
            if self.mode in ("save", "threads"):
                answer = dcp.save(state, **options)
                return lambda: answer
            answer = dcp.async_save(state, **options)
            if isinstance(answer, dcp.state_dict_saver.AsyncSaveResponse):
                answer.staging_completion.result()
                answer = answer.upload_completion
        except BaseException as error:
            failure = error
            return lambda: _raise(failure)
        scribble(state)
        if self._ours:
            _MEANWHILE[self.case.meanwhile](self, rank)
        return answer.result

    def _saved_together(self, path: int) -> bool:
        return all(save.together for number, save in enumerate(self.case.saves) if self.case.path_of(number) == path)

    def change_surroundings(self, rank: int) -> None:
        """Gives this process another umask, working directory and environment."""
        if rank == 0:  # all ranks are threads of one process
            os.umask(next(_UMASKS))
            os.chdir(next(_DIRECTORIES))
            os.environ["DCP_TENSORIZER_DIFFERENTIAL"] = self._folder.name

    def leave_in_child(self, rank: int) -> None:
        """Forks a child of a process that saves."""
        self._storages.leave_in_child()

    def metadata(self, path: int, rank: int) -> Any:
        """What the reader says of a checkpoint: of all ranks, and of this one by itself."""
        reader = self._storages.reader(self._ours, self._folder / str(path), True)
        found = {}
        for whose, which in (("all", {}), ("own", {"rank": rank})):
            if (self._folder / str(path) / f"{'__0' if which else ''}.metadata").exists():
                try:
                    read = reader.read_metadata(**which)
                    if self._ours:  # a load is shown whole tensors
                        stored = reader.stored_metadata(**which)
                        read = dataclasses.replace(read, state_dict_metadata=stored.state_dict_metadata)
                    found[whose] = describe_metadata(read)
                except Exception as error:
                    found[whose] = Failed(f"{type(error).__name__}: {error}")
        return found

    def load(self, load: Load, rank: int) -> Any:
        reader = self._storages.reader(self._ours, self._folder / str(load.path), load.trusted)
        try:
            if not isinstance(load.target, Box):
                keys = None if load.target is None else set(load.target)
                with KnownMemory():
                    return {"state": describe(_load_state_dict_from_keys(keys, storage_reader=reader))}
            target = Maker(rank, Meshes(load.ranks) if load.ranks else None).make(load.target)
            before = tensors_in(target)  # held until the end: the `id` of one that is gone could be another's
            planner = load_planner(load.planner, self._ours)
            with KnownMemory():
                dcp.load(target, storage_reader=reader, planner=planner, no_dist=load.alone)
        except (Exception, CheckpointException) as error:
            if load.ranks and not load.alone and not self._saved_together(load.path):
                dist.barrier()  # where the ranks that do not fail wait, which in processes would see this one end
            return Failed(f"{type(error).__name__}: {_causes(error)}")
        return {"state": describe(target, before), "events": getattr(planner, "events", None)}


_UMASKS = itertools.cycle([0o022, 0o077, 0o027])
_DIRECTORIES = itertools.cycle(["/", tempfile.gettempdir()])
_MEANWHILE: dict[str, Callable[[_Job, int], object]] = {
    "nothing": lambda job, rank: None,
    "a child is forked": _Job.leave_in_child,
    "surroundings change": _Job.change_surroundings,
}
MEANWHILE = tuple(_MEANWHILE)


@contextmanager
def surroundings_kept() -> Iterator[None]:
    """Gives this process back the umask and the working directory that it had."""
    umask, directory = os.umask(0o022), os.getcwd()
    os.umask(umask)
    try:
        yield
    finally:
        os.umask(umask)
        os.chdir(directory)
        os.environ.pop("DCP_TENSORIZER_DIFFERENTIAL", None)


def _wait(wait: Callable[[], Any]) -> None:
    with suppress(Exception, CheckpointException):
        wait()


def _raise(error: BaseException) -> None:
    raise error


def _outcome(wait: Callable[[], Any]) -> Any:
    try:
        return describe_metadata(wait())
    except (Exception, CheckpointException) as error:
        return Failed(f"{type(error).__name__}: {_causes(error)}")


def _causes(error: BaseException) -> str:
    failures = getattr(error, "failures", {})
    return "; ".join(f"{type(cause).__name__}: {cause}" for cause, _ in failures.values()) or str(error)


def _in_threads(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    results: list[Any] = [None] * len(functions)

    def call(number: int) -> None:
        results[number] = functions[number]()

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def scribble(value: Any) -> None:
    """Changes everything in a state that can be changed."""
    for tensor in tensors_in(value):
        with suppress(Exception):
            getattr(tensor, "_local_tensor", tensor).untyped_storage().fill_(0x5A)
    _empty(value, set())


def _empty(value: Any, seen: set[int]) -> None:
    value = value.state if isinstance(value, Books) else value
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping | list | tuple):
        for member in list(value.values() if isinstance(value, Mapping) else value):
            _empty(member, seen)
    if isinstance(value, dict | list):
        value.clear()
    elif isinstance(value, io.BytesIO):
        value.seek(0)
        value.write(b"changed")
