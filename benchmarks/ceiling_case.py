"""One case of the ceiling benchmark: saves that are dropped, loads from memory, and the limits of both, in turns."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from isal.isal_zlib import crc32
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem

from dcp_tensorizer import LoadPlanner, SavePlanner, TensorizerStorageReader, TensorizerStorageWriter

from .case import Case
from .dropped import register
from .limits import Discard, cached_read_seconds, fill_cache
from .savers import State
from .workloads import CEILING, nbytes

_ENCODE = "benchmarks.dropped:encode"
_PIECE = 16 << 20  # bytes of a piece of a tensor: threads share the pieces of the state

Turn = Callable[[], dict[str, float]]
"""Runs once, and returns the figures."""


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Measures all contenders with one workload, on as many processors as the case has threads.

    The contenders take turns, and each round begins with another contender. The first round does not count: it warms
    the memory up.
    """
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: case["threads"]])
    torch.set_num_threads(1)
    state = CEILING[case["workload"]](case["scale"])
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    register(folder / "registered")
    with ExitStack() as stack:
        turns = _limits(state, target, case["threads"])
        turns |= _saves(state, folder, case["threads"], stack)
        for name, place in (("page cache", folder), ("tmpfs", _tmpfs(stack))):
            loads = _loads(state, target, place / "loads", case["threads"])
            turns |= {f"{of}, {name}": turn for of, turn in loads.items()}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in turns}
        names = list(turns)
        for number in range(case["rounds"] + 1):
            first = number * len(names) // (case["rounds"] + 1)
            for name in (*names[first:], *names[:first]):
                if name.startswith("load"):
                    next(iter(target.values())).zero_()
                measured = turns[name]()
                if name.startswith("load"):
                    assert all(torch.equal(target[k].view(torch.uint8), state[k].view(torch.uint8)) for k in state), (
                        name
                    )
                if number:
                    found[name].append(measured)
    return {"bytes": nbytes(state), "found": found}


def _tmpfs(stack: ExitStack) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))


def _timed(work: Callable[[], object]) -> dict[str, float]:
    before, started = _cpu(), time.perf_counter()
    work()
    return {"seconds": time.perf_counter() - started, "cpu": _cpu() - before}


def _cpu() -> float:
    """Returns the CPU seconds of this process and of its children so far."""
    this = psutil.Process()
    times = [this.cpu_times(), *(child.cpu_times() for child in this.children(recursive=True))]
    return sum(one.user + one.system for one in times)


# --- limits -----------------------------------------------------------------------------------------------------------


def _limits(state: State, target: State, threads: int) -> dict[str, Turn]:
    pieces, places = list(_pieces(state)), list(_pieces(target))
    return {
        "copy": lambda: _timed(lambda: _shared(_copy, list(zip(places, pieces, strict=True)), threads)),
        "crc32": lambda: _timed(lambda: _shared(crc32, pieces, threads)),
        "xxh3": lambda: _timed(lambda: _shared(_digest, pieces, threads)),
    }


def _pieces(state: State) -> Iterator[memoryview]:
    for tensor in state.values():
        memory = _memory(tensor)
        for start in range(0, memory.nbytes, _PIECE):
            yield memory[start : start + _PIECE]


def _memory(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).view(-1).numpy().data


def _shared(work: Callable[[Any], Any], items: Sequence[Any], threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        for share in [pool.submit(lambda n=n: [work(item) for item in items[n::threads]]) for n in range(threads)]:
            share.result()


def _copy(pair: tuple[memoryview, memoryview]) -> None:
    target, source = (np.frombuffer(memory, dtype=np.uint8) for memory in pair)
    np.copyto(target, source)


def _digest(data: memoryview) -> bytes:
    hashed = xxhash.xxh3_64()
    hashed.update(data)  # releases the GIL
    return hashed.digest()


# --- saves ------------------------------------------------------------------------------------------------------------


def _saves(state: State, folder: Path, threads: int, stack: ExitStack) -> dict[str, Turn]:
    writer = stack.enter_context(TensorizerStorageWriter(thread_count=threads))
    numbers = itertools.count()

    def ours(planner: Callable[[], SavePlanner | None]) -> dict[str, float]:
        path = f"drop://{folder}/{next(numbers)}"
        save = _save(state, storage_writer=writer, checkpoint_id=path, planner=planner())
        report = writer.last_report
        assert report is not None
        return {**save, "stage": report.stage_seconds, "files": report.hash_seconds}

    def torchs() -> dict[str, float]:
        theirs = FileSystemWriter(folder / str(next(numbers)), sync_files=False, thread_count=threads)
        theirs.fs = _Dropping()
        return _save(state, storage_writer=theirs)

    def safetensors() -> dict[str, float]:
        save = _timed(lambda: save_file(state, os.devnull))
        return {**save, "stage": save["seconds"]}

    return {
        "save: dcp_tensorizer": lambda: ours(lambda: None),
        "save: dcp_tensorizer, SavePlanner": lambda: ours(SavePlanner),
        "save: torch FileSystemWriter, THREAD": torchs,
        "save: safetensors": safetensors,
    }


def _save(state: State, **options: Any) -> dict[str, float]:
    before, started = _cpu(), time.perf_counter()
    future = dcp.async_save({"model": state}, no_dist=True, **options)
    stage = time.perf_counter() - started
    future.result()  # type: ignore[union-attr]
    return {"stage": stage, "seconds": time.perf_counter() - started, "cpu": _cpu() - before}


class _Dropping(FileSystem):
    """torch's file system, except that it drops data files."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if os.fspath(path).endswith(".distcp"):
            yield Discard()
        else:
            with super().create_stream(path, mode) as stream:
                yield stream


# --- loads ------------------------------------------------------------------------------------------------------------


def _loads(state: State, target: State, folder: Path, threads: int) -> dict[str, Turn]:
    ours, torchs, theirs = folder / "ours", folder / "torch", folder / "state.safetensors"
    with TensorizerStorageWriter(ours) as writer:
        dcp.save({"model": state}, storage_writer=writer, no_dist=True)
    dcp.save({"model": state}, storage_writer=FileSystemWriter(torchs), no_dist=True)
    save_file(state, theirs)
    fill_cache(folder)
    files = sorted(file for file in ours.iterdir() if not file.name.startswith("."))
    memory = [_memory(tensor) for tensor in target.values()]

    def load_ours() -> None:
        reader = TensorizerStorageReader(ours, thread_count=threads)
        dcp.load({"model": target}, storage_reader=reader, planner=LoadPlanner(), no_dist=True)

    def load_torchs() -> None:
        dcp.load({"model": target}, storage_reader=FileSystemReader(torchs), no_dist=True)

    def load_theirs() -> None:
        loaded = load_file(theirs)
        for key, tensor in target.items():
            tensor.copy_(loaded[key])

    return {
        "load: dcp_tensorizer": lambda: _timed(load_ours),
        "load: torch FileSystemReader": lambda: _timed(load_torchs),
        "load: safetensors": lambda: _timed(load_theirs),
        "preadv": lambda: _timed(lambda: cached_read_seconds(files, memory, threads)),
    }


# --- instructions -----------------------------------------------------------------------------------------------------


def instructions(case: Case, folder: Path) -> int | None:
    """Returns the writer process's instructions for a request, by callgrind, less those of an empty request.

    Their number depends neither on the disk, nor on other processes, nor on the speed of memory. Without valgrind,
    returns None.
    """
    try:
        empty, full = (_instructions({**case, "count": count}, folder) for count in (0, case["count"]))
    except FileNotFoundError:
        return None
    return full - empty


def _instructions(case: Case, folder: Path) -> int:
    counter = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/callgrind.out"]
    command = [*counter, sys.executable, "-m", "benchmarks.case", _ENCODE, json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"Collected : (\d+)", done.stderr)
    assert found is not None, done.stderr
    return int(found[1])
