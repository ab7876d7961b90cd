"""The cases of the GPU benchmark: staging, saves, training with saves, registration, overlap and loads."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from dcp_tensorizer import LoadPlanner, SavePlanner, TensorizerStorageReader, TensorizerStorageWriter
from dcp_tensorizer._loading import gpu as load_pools
from dcp_tensorizer._loading import run as load_run
from dcp_tensorizer._staging import device as device_module
from dcp_tensorizer._staging import shared_memory
from dcp_tensorizer._staging.shared_memory import SharedBuffer
from dcp_tensorizer._staging.stager import Stager
from dcp_tensorizer._staging.tensor_copy import DEFAULT_LIMITS

from ..case import Case
from ..savers import DcpSaver, Ours, State, TorchCheckpointing
from .device import GPU, REHEARSAL, pinned, synchronize, timed

Result = dict[str, list[float]]

_GIGA = 1_000_000_000
_NEVER = 1 << 62
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def large_state(nbytes: int, count: int = 300) -> State:
    return {f"t{n}": torch.rand(max(1, nbytes // 4 // count), device=GPU) for n in range(count)}


def small_state(count: int = 5000, kilobytes: int = 215) -> State:
    return {f"s{n}": torch.rand(kilobytes * 250, device=GPU) for n in range(count)}


def _state_of(size: str, scale: float) -> State:
    """Makes tensors on the GPU: 300 for a size such as ``4 GB``, and 5,000 small ones for any other word."""
    number, _, unit = size.partition(" ")
    if unit == "GB":
        return large_state(int(int(number) * _GIGA * scale))
    return small_state(int(5000 * min(1.0, scale * 4)))


# --- what a save costs ------------------------------------------------------------------------------------------------


class KeptStager(DefaultStager):
    """torch's stager, kept for all saves. In torch 2.11, each save closes the inner stager, and the next save fails."""

    def __init__(self, options: StagingOptions) -> None:
        super().__init__(options)
        self._end_inner = self._state_dict_stager.close
        self._state_dict_stager.close = lambda: None

    def close(self) -> None:
        """Does nothing: the next save uses the same memory."""

    def end(self) -> None:
        self._end_inner()
        super().close()


class TorchStager(DcpSaver):
    """torch's writer and stager, with pinned shared memory and copies that do not block."""

    def __init__(self, **options: Any) -> None:
        self._stager = KeptStager(StagingOptions(not REHEARSAL, True, True, not REHEARSAL))
        super().__init__(dist.group.WORLD, async_stager=self._stager, **options)

    def close(self) -> None:
        self._stager.end()


def saver_of(name: str, state: State) -> Any:
    if name.startswith("dcp_tensorizer"):
        planner = SavePlanner() if "SavePlanner" in name else None
        make = None if planner is None else lambda: planner  # one for all saves, as a job has it
        return Ours(dist.group.WORLD, state, prewarm=True, planner=make, overlap_staging="overlap" in name)
    if name.startswith("torch_checkpointing"):
        return TorchCheckpointing(background=name.endswith("background"), pinned=not REHEARSAL)
    return TorchStager()


def begin_group() -> None:
    """Makes a group of one process by a TCP store: torch's PROCESS mode reads the address from the environment."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1"}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    dist.init_process_group("gloo" if REHEARSAL else "cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)


def pinned_copy(scale: float, name: str, folder: Path) -> Result:
    """Measures copies between the GPU and pinned memory, which staging and loads cannot beat."""
    on_gpu = torch.ones(int(4 * _GIGA * scale), dtype=torch.uint8, device=GPU)
    on_host = pinned(on_gpu.numel())
    target, source = (on_host, on_gpu) if name == "device to host" else (on_gpu, on_host)
    seconds = [timed(lambda: target.copy_(source, non_blocking=True)) for _ in range(6)]
    return {"gb_per_s": [source.nbytes / _GIGA / value for value in seconds[1:]]}


def staging(scale: float, name: str, folder: Path) -> Result:
    """Measures `stage` into a warm buffer, and the time until its first copy to the host is queued."""
    kilobytes = re.findall(r"(\d+) kB", name)
    state = small_state(int(5000 * min(1.0, scale * 4)), int(kilobytes[0])) if kilobytes else _state_of("4 GB", scale)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    batch_bytes = _NEVER if "gathered" in name else 0 if kilobytes == ["2"] else DEFAULT_LIMITS.batch_bytes
    stager = Stager(limits=replace(DEFAULT_LIMITS, batch_bytes=batch_bytes))
    result: Result = {"gb_per_s": [], "first_copy_ms": []}
    with _first_copies() as queued:
        for number in range(6):
            queued.clear()
            started = time.perf_counter()
            seconds = timed(lambda: stager.stage(state))
            if number:  # the first makes the buffer
                result["gb_per_s"].append(nbytes / _GIGA / seconds)
                result["first_copy_ms"] += [(moment - started) * 1e3 for moment in queued[:1]]
    stager.saves.close()
    return result


@contextmanager
def _first_copies() -> Iterator[list[float]]:
    """Records the moments at which copies are queued on the GPU."""
    moments: list[float] = []
    kinds = ("copy_batch", "copy", "spread")
    before = {kind: getattr(device_module._CudaStream, kind) for kind in kinds}

    def noted(call: Callable[..., Any]) -> Callable[..., Any]:
        def queue(*arguments: Any) -> Any:
            moments.append(time.perf_counter())
            return call(*arguments)

        return queue

    for kind, call in before.items():
        setattr(device_module._CudaStream, kind, noted(call))
    try:
        yield moments
    finally:
        for kind, call in before.items():
            setattr(device_module._CudaStream, kind, call)


def saving(scale: float, name: str, folder: Path) -> Result:
    """Measures saves beside a loop of matrix products. The first save counts only for ``first_stall_s``."""
    contender, _, what = name.partition(" | ")
    state = _state_of(what, scale)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    begin_group()
    factor = torch.rand(2048 if not REHEARSAL else 256, 2048 if not REHEARSAL else 256, device=GPU)

    def products(until: Callable[[], bool]) -> float:
        done, started = 0, time.perf_counter()
        while True:
            for _ in range(10):
                factor @ factor
            synchronize()
            done += 10
            if until():
                return done / (time.perf_counter() - started)

    def after(seconds: float) -> Callable[[], bool]:
        ends = time.perf_counter() + seconds
        return lambda: time.perf_counter() > ends

    products(after(1.0))  # warms the clocks up
    alone = products(after(1.0))
    saver = saver_of(contender, state)
    fields = ("first_stall_s", "stall_s", "durable_s", "durable_gb_per_s", "loop_percent")
    result: Result = {key: [] for key in fields}
    phases = ("plan_seconds", "resolve_seconds", "hash_seconds", "write_seconds") if isinstance(saver, Ours) else ()
    result |= {key: [] for key in phases}
    for number in range(4):
        target = folder / uuid.uuid4().hex
        synchronize()
        started = time.perf_counter()
        future = saver.save(state, target)
        stall = time.perf_counter() - started
        beside = products(future.done)
        future.result()
        durable = time.perf_counter() - started
        if number == 0:
            result["first_stall_s"].append(stall)
        else:
            result["stall_s"].append(stall)
            result["durable_s"].append(durable)
            result["durable_gb_per_s"].append(nbytes / _GIGA / durable)
            result["loop_percent"].append(100 * beside / alone)
            for key in phases:
                result[key].append(getattr(saver._shared.last_report, key))
        shutil.rmtree(target, ignore_errors=True)
    saver.close()
    return result


class Model(torch.nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(32_000, width)
        block = torch.nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, "gelu", batch_first=True)
        self.blocks = torch.nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, 32_000, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)))  # type: ignore[no-any-return]


def training(scale: float, name: str, folder: Path) -> Result:
    """Measures what each save costs the ten steps after it."""
    begin_group()
    torch.manual_seed(0)
    width = 1024 if scale >= 0.5 else 64
    with GPU:
        model = Model(max(1, int(20 * scale)), width).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not REHEARSAL)
    tokens = torch.randint(0, 32_000, (8, 513) if scale >= 0.5 else (1, 17), device=GPU)

    waits: list[float] = []  # in guards, in ms

    def step(guard: Callable[[], AbstractContextManager[None]]) -> None:
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        asked = time.perf_counter()
        with guard():
            waits.append((time.perf_counter() - asked) * 1e3)
            optimizer.step()
        optimizer.zero_grad()

    def steps(count: int, guard: Callable[[], AbstractContextManager[None]] = nullcontext) -> float:
        started = time.perf_counter()
        for _ in range(count):
            step(guard)
        synchronize()
        return time.perf_counter() - started

    steps(15)  # warms the clocks up
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    alone = [steps(10) for _ in range(4)]
    result: Result = {"step_ms": [seconds * 100 for seconds in alone]}
    if name == "no saves":
        result["slowdown_percent"] = [100 * (steps(10) / statistics.median(alone) - 1) for _ in range(3)]
        return result
    saver = saver_of(name, state)
    result |= {"stall_ms": [], "lock_ms": [], "slowdown_percent": [], "durable_s": []}
    for number in range(3):
        target = folder / uuid.uuid4().hex
        synchronize()
        started = time.perf_counter()
        future = saver.save(state, target)
        stall = time.perf_counter() - started
        waits.clear()
        steps(10, saver.guard)
        seconds = time.perf_counter() - started
        future.result()
        durable = time.perf_counter() - started
        if number:  # the first save makes buffers and starts processes
            result["stall_ms"].append(stall * 1e3)
            result["lock_ms"].append(max(waits))
            result["slowdown_percent"].append(100 * (seconds / statistics.median(alone) - 1))
            result["durable_s"].append(durable)
        result["child_gpu_mib"] = _children_mib()
        shutil.rmtree(target, ignore_errors=True)
    saver.close()
    return result


def _children_mib() -> list[float]:
    """Returns the GPU memory of this process's children; nothing if the driver knows processes by other ids."""
    if REHEARSAL:
        return []
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    used = {int(found[0]): int(found[1]) for line in lines if len(found := re.findall(r"\d+", line)) == 2}
    if os.getpid() not in used:  # which has a context
        return []
    return [float(sum(used.get(child.pid, 0) for child in psutil.Process().children(recursive=True)))]


# --- registration -----------------------------------------------------------------------------------------------------


def registration(scale: float, name: str, folder: Path) -> Result:
    """Measures the registration of a staging buffer, and how long CUDA calls take meanwhile.

    The calls are made by another thread of this process, and by another process.
    """
    nbytes = int(16 * (1 << 30) * scale)
    buffer = SharedBuffer(nbytes)
    address = buffer.allocate(torch.uint8, (1,)).data_ptr()
    torch.ones(1, device=GPU)
    pin = (lambda: lambda: None) if REHEARSAL else (lambda: device_module.CUDA.pin(address, nbytes, 0))
    with _latencies_elsewhere(folder) as elsewhere:
        alone = _latencies(0.5)
        meanwhile: dict[str, float] = {}
        seconds = []
        for _ in range(3):
            undone: list[Callable[[], None]] = []
            started = time.perf_counter()
            registering = threading.Thread(target=lambda done: done.append(pin()), args=(undone,))
            registering.start()
            found = _latencies(while_alive=registering)
            registering.join()
            seconds.append(time.perf_counter() - started)
            meanwhile = {key: max(value, meanwhile.get(key, 0.0)) for key, value in found.items()}
            undone[0]()
    buffer.close()
    result = {"s_per_gb": [value / (nbytes / _GIGA) for value in seconds]}
    for key in ("launch_ms", "malloc_ms"):
        result[f"{key}_alone_max"] = [alone[key]]
        result[f"{key}_meanwhile_max"] = [meanwhile[key]]
        result[f"{key}_other_process_max"] = [elsewhere[key]]
    return result


def _latencies(seconds: float = 0.0, while_alive: threading.Thread | None = None) -> dict[str, float]:
    """Returns the longest launch of a kernel, including its result, and the longest `cudaMalloc`, in ms."""
    worst = {"launch_ms": 0.0, "malloc_ms": 0.0}
    one = torch.ones(1, device=GPU)
    ends = time.perf_counter() + seconds
    while True:
        started = time.perf_counter()
        one.add_(1).item()
        launched = time.perf_counter()
        if not REHEARSAL:
            torch.cuda.caching_allocator_delete(torch.cuda.caching_allocator_alloc(64 << 20))
            torch.cuda.empty_cache()
        ended = time.perf_counter()
        worst["launch_ms"] = max(worst["launch_ms"], (launched - started) * 1e3)
        worst["malloc_ms"] = max(worst["malloc_ms"], (ended - launched) * 1e3)
        if not (while_alive.is_alive() if while_alive is not None else ended < ends):
            return worst


@contextmanager
def _latencies_elsewhere(folder: Path) -> Iterator[dict[str, float]]:
    """Measures `_latencies` in another process until the block ends."""
    found: dict[str, float] = {}
    case = json.dumps({"what": "latencies", "name": "", "scale": 1.0, "folder": str(folder)})
    command = [sys.executable, "-m", "benchmarks.case", "benchmarks.gpu.cases:measure", case]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    try:
        yield found
    finally:
        process.stdin.close()
        found.update(json.loads(process.stdout.read()))
        process.wait()


def latencies(scale: float, name: str, folder: Path) -> Any:
    """Measures `_latencies` until standard input ends."""
    _latencies(0.2)
    print("ready", flush=True)
    waiting = threading.Thread(target=sys.stdin.read)
    waiting.start()
    return _latencies(while_alive=waiting)


# --- overlap ----------------------------------------------------------------------------------------------------------


def overlap(scale: float, name: str, folder: Path) -> Result:
    """Measures the phases of overlapping staging, and the latency of launches and of `.item()` until the copy ends."""
    state = large_state(int(4 * _GIGA * scale), int(name.split()[0]))
    one = torch.ones(1, device=GPU)
    fields = ("stage_ms", "async_save_ms", "first_copy_ms", "lock_ms", "launch_us_max", "item_ms_max", "copied_s")
    result: Result = {key: [] for key in fields}
    staged: list[float] = []

    class Writer(TensorizerStorageWriter):
        def stage(self, state_dict: Any) -> Any:
            began = time.perf_counter()
            try:
                return super().stage(state_dict)
            finally:
                staged.append((time.perf_counter() - began) * 1e3)

    with Writer(overlap_staging=True) as writer, _first_copies() as queued:
        writer.prewarm({"model": state})
        writer.saver.engine.saves.wait_prewarmed()
        for number in range(4):
            target = folder / uuid.uuid4().hex
            synchronize()
            queued.clear()
            started = time.perf_counter()
            response: Any = dcp.async_save({"model": state}, storage_writer=writer, checkpoint_id=str(target))
            returned = time.perf_counter()
            with writer.lock():
                entered = time.perf_counter()
            launches, items = [0.0], [0.0]
            while not response.staging_completion.done():
                began = time.perf_counter()
                one.add_(1)
                launched = time.perf_counter()
                one.item()
                items.append(time.perf_counter() - launched)
                launches.append(launched - began)
            copied = time.perf_counter()
            response.upload_completion.result()
            if number:
                result["stage_ms"].append(staged[-1])
                result["async_save_ms"].append((returned - started) * 1e3)
                result["first_copy_ms"] += [(moment - started) * 1e3 for moment in queued[:1]]
                result["lock_ms"].append((entered - returned) * 1e3)
                result["launch_us_max"].append(max(launches) * 1e6)
                result["item_ms_max"].append(max(items) * 1e3)
                result["copied_s"].append(copied - started)
            shutil.rmtree(target, ignore_errors=True)
    return result


# --- loads ------------------------------------------------------------------------------------------------------------


def load(scale: float, name: str, folder: Path) -> Result:
    loader, _, size = name.partition(" | ")
    state = _state_of(size, scale)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    read = _LOADERS[loader.split(",")[0]](state, folder, loader)
    seconds = [timed(read) for _ in range(3)]
    return {"gb_per_s": [nbytes / _GIGA / value for value in seconds[1:]]}


def buffer(scale: float, name: str, folder: Path) -> Result:
    """Measures how long it takes to make, register and free a staging buffer.

    Only the first round touches memory that the hypervisor has not given out before.
    """
    nbytes = int(4 * _GIGA * scale)
    shared_memory._MAX_THREADS = int(name.split()[0])
    if name.endswith("huge pages") and not REHEARSAL:
        _HUGE_PAGES.write_text("advise")  # as root, a setting of the kernel
    torch.ones(1, device=GPU)
    result: Result = {}
    for number in range(3):
        moments = [time.perf_counter()]
        made = SharedBuffer(nbytes)
        moments.append(time.perf_counter())
        if not REHEARSAL:
            made.pin(device_module.CUDA, 0)
        moments.append(time.perf_counter())
        made.close()
        moments.append(time.perf_counter())
        both = SharedBuffer(nbytes, None if REHEARSAL else (device_module.CUDA, 0))
        moments.append(time.perf_counter())
        both.close()
        for key, (began, ended) in zip(
            ("made", "registered", "freed", "made_and_registered"), itertools.pairwise(moments), strict=True
        ):
            result.setdefault(f"{key}_s_per_gb", []).append((ended - began) / (nbytes / _GIGA))
            if not number:
                result[f"{key}_first_s_per_gb"] = result[f"{key}_s_per_gb"][:]
    return result


def _ours(state: State, folder: Path, name: str) -> Callable[[], object]:
    with TensorizerStorageWriter(folder) as writer:
        dcp.save(state, storage_writer=writer, planner=SavePlanner())
    threads = next((int(found) for found in re.findall(r"(\d+) threads", name)), None)
    if mebibytes := re.findall(r"(\d+) MiB", name):
        load_pools.DEVICE_BYTES = int(mebibytes[0]) << 20
    if threads is not None:
        load_pools._POOL_BYTES = threads * load_pools.DEVICE_BYTES
    if "one by one" in name:
        load_run._SMALL_BYTES = 0
    verify = "not verified" not in name

    def read() -> None:
        reader = TensorizerStorageReader(folder, verify=verify, thread_count=threads)
        dcp.load(state, storage_reader=reader, planner=LoadPlanner())

    return read


def _bare(state: State, folder: Path, name: str) -> Callable[[], object]:
    """Reads blocks of 8 MiB, hashes each, and copies it to the GPU: the limit of a verified load."""
    path = folder / "bytes"
    step, threads = 8 << 20, int(re.findall(r"(\d+) threads", name)[0])
    count = max(1, sum(tensor.nbytes for tensor in state.values()) // step)
    with open(path, "wb") as file:
        for _ in range(count):
            file.write(os.urandom(1 << 20) * 8)
    own = threading.local()

    def one(start: int) -> None:
        if not hasattr(own, "host"):
            own.host, own.gpu = pinned(step), torch.empty(step, dtype=torch.uint8, device=GPU)
            own.stream = nullcontext() if REHEARSAL else torch.cuda.stream(torch.cuda.Stream())
        memory = memoryview(own.host.numpy())
        os.preadv(descriptor, [memory], start)
        xxhash.xxh3_64_digest(memory)
        with own.stream:
            own.gpu.copy_(own.host, non_blocking=True)
            if not REHEARSAL:
                torch.cuda.current_stream().synchronize()

    descriptor = os.open(path, os.O_RDONLY)
    pool = ThreadPoolExecutor(threads)
    return lambda: list(pool.map(one, range(0, count * step, step)))


def _torch(state: State, folder: Path, name: str) -> Callable[[], object]:
    dcp.save(state, storage_writer=FileSystemWriter(folder))
    return lambda: dcp.load(state, storage_reader=FileSystemReader(folder))


def _safetensors_file(state: State, folder: Path) -> str:
    from safetensors.torch import save_file

    save_file({key: tensor.cpu() for key, tensor in state.items()}, folder / "state.safetensors")
    return str(folder / "state.safetensors")


def _runai(state: State, folder: Path, name: str) -> Callable[[], object]:
    from runai_model_streamer import SafetensorsStreamer

    path = _safetensors_file(state, folder)

    def read() -> None:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(path)
            for _, tensor in streamer.get_tensors():
                tensor.to(GPU)

    return read


_LOADERS: dict[str, Callable[[State, Path, str], Callable[[], object]]] = {
    "dcp_tensorizer": _ours,
    "bare reads": _bare,
    "torch FileSystemReader": _torch,
    "Run:ai streamer": _runai,
}
_CASES: dict[str, Callable[[float, str, Path], Any]] = {
    "pinned copy": pinned_copy,
    "staging": staging,
    "saving": saving,
    "training": training,
    "registration": registration,
    "latencies": latencies,
    "overlap": overlap,
    "load": load,
    "buffer": buffer,
}


def measure(case: Case, folder: Path) -> Any:
    return _CASES[case["what"]](case["scale"], case["name"], folder)
