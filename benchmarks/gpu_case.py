"""One case of the GPU benchmark, in a process of its own: staging, a training loop that saves, or loads."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter
from dcp_tensorizer._staging.stager import Stager

from .limits import direct_read_seconds, evict

GPU = torch.device("cuda", 0)
Result = dict[str, list[float]]
State = dict[str, Any]


# --- staging ---------------------------------------------------------------------------------------------------------


def staging(scale: float, name: str, folder: Path) -> Result:
    """GB/s of `stage` on a warm buffer, beside a copy of as many bytes to one pinned tensor."""
    large = {f"t{n}": torch.rand(int(3_600_000 * scale), device=GPU) for n in range(300)}
    many = large | {f"s{n}": torch.rand(500, device=GPU) for n in range(3000)}
    plain = _host_copies(sum(tensor.nbytes for tensor in large.values()))
    result: Result = {"plain pinned copy": plain}
    for label, state in (("staging, large tensors", large), ("staging, thousands of small ones too", many)):
        stager = Stager()
        nbytes = sum(tensor.nbytes for tensor in state.values())
        rates = []
        for _ in range(6):
            seconds = _timed(lambda stager=stager, state=state: stager.stage(state))
            rates.append(nbytes / 1e9 / seconds)
        result[label] = rates[1:]  # the first makes and registers the buffer
        stager.saves.close()
    result["ratio"] = [rate / statistics.median(plain) for rate in result["staging, large tensors"]]
    return result


def _host_copies(nbytes: int) -> list[float]:
    """GB/s of a plain copy to pinned memory."""
    source = torch.rand(nbytes // 4, device=GPU)
    target = torch.empty(source.shape, pin_memory=True)
    seconds = [_timed(lambda: target.copy_(source, non_blocking=True)) for _ in range(6)]
    return [source.nbytes / 1e9 / value for value in seconds[1:]]


def _timed(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    kept = work()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    del kept
    return seconds


# --- training --------------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """A decoder of a few hundred million parameters, in bfloat16."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(32_000, width)
        block = torch.nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, "gelu", batch_first=True)
        self.blocks = torch.nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, 32_000, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)))  # type: ignore[no-any-return]


class Saver:
    """How one contender saves: ``save`` returns what `wait` and `guard` take."""

    def __init__(self, name: str, state: State) -> None:
        self._options: dict[str, Any] = {}
        self._writer: TensorizerStorageWriter | None = None
        self._stager: DefaultStager | None = None
        self._manager: Any = None
        self._name = name
        self._staged: Any = None
        if name.startswith("dcp_tensorizer"):
            way = "device" if name.endswith("device") else "buffer"
            self._writer = TensorizerStorageWriter(staging=way, overlap_staging="," in name)
            self._writer.prewarm(state)
        elif name.startswith("torch DefaultStager"):
            self._stager = DefaultStager(StagingOptions(True, True, True, True))
            self._options = {"async_stager": self._stager}
            if name.endswith("PROCESS"):
                self._options["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
        elif name == "torch_checkpointing":
            self._manager = _manager()

    def save(self, state: State, folder: Path) -> Future[Any]:
        if self._manager is not None:
            future = self._manager.save(str(folder), {"state": state})
            assert future is not None
            return future  # type: ignore[no-any-return]
        writer: Any = self._writer or FileSystemWriter(folder)
        response = dcp.async_save(state, storage_writer=writer, checkpoint_id=str(folder), **self._options)
        if isinstance(response, Future):
            return response
        self._staged = response.staging_completion
        return response.upload_completion

    def guard(self) -> AbstractContextManager[None]:
        """Around the optimizer's step."""
        for part in (self._writer, self._manager):
            if part is not None:
                return part.lock()  # type: ignore[no-any-return]
        if self._staged is not None:
            self._staged.result()
        return nullcontext()

    def close(self) -> None:
        for part in (self._writer, self._stager, self._manager):
            if part is not None:
                part.close()


def _manager() -> Any:
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.config import AsyncCheckpointSaverConfig
    from torch_checkpointing.staging import CheckpointStagerConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    staging_config = CheckpointStagerConfig(
        use_pinned_memory=True, use_shared_memory=True, use_async_staging=True, use_non_blocking_copy=True
    )
    return CheckpointManager.Config(
        default=ItemSpec(requires_copy=True),
        save=AsyncCheckpointSaverConfig(staging_config=staging_config),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    ).build()


def training(scale: float, name: str, folder: Path) -> Result:
    """Steps, with saves among them."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=_store(), rank=0, world_size=1)
    torch.manual_seed(0)
    with GPU:
        model = Model(max(1, int(20 * scale)), 1024).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, 32_000, (8, 513), device=GPU)

    def step(guard: Callable[[], AbstractContextManager[None]]) -> None:
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        with guard():
            optimizer.step()
        optimizer.zero_grad()

    def steps(count: int, guard: Callable[[], AbstractContextManager[None]] = nullcontext) -> float:
        started = time.perf_counter()
        for _ in range(count):
            step(guard)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    steps(5)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    alone = [steps(10) for _ in range(4)]
    result: Result = {"step_ms": [seconds * 100 for seconds in alone]}
    if name == "no saves":
        result["slowdown_percent"] = [100 * (steps(10) / statistics.median(alone) - 1) for _ in range(3)]
        return result
    saver = Saver(name, state)
    result |= {"stall_ms": [], "slowdown_percent": [], "durable_s": []}
    for number in range(3):
        target = folder / uuid.uuid4().hex
        torch.cuda.synchronize()
        started = time.perf_counter()
        future = saver.save(state, target)
        stall = time.perf_counter() - started
        steps(10, saver.guard)
        seconds = time.perf_counter() - started
        future.result()
        durable = time.perf_counter() - started
        if number:  # the first save makes buffers and starts processes
            result["stall_ms"].append(stall * 1e3)
            result["slowdown_percent"].append(100 * (seconds / statistics.median(alone) - 1))
            result["durable_s"].append(durable)
        result["child_gpu_mib"] = _children_mib()
        shutil.rmtree(target, ignore_errors=True)
    saver.close()
    return result


def _store() -> dist.Store:
    """Of this process alone; a TCP store, whose address PROCESS mode looks for in the environment."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1"}
    return dist.TCPStore("127.0.0.1", 0, is_master=True)


def _children_mib() -> list[float]:
    """GPU memory of this process's children, from the driver; nothing where it knows processes by other numbers."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    used = {int(found[0]): int(found[1]) for line in lines if len(found := re.findall(r"\d+", line)) == 2}
    if os.getpid() not in used:  # which has a context
        return []
    return [float(sum(used.get(child.pid, 0) for child in psutil.Process().children(recursive=True)))]


# --- loads -----------------------------------------------------------------------------------------------------------


def load(scale: float, name: str, folder: Path) -> Result:
    """GB/s of loads of cold files onto the GPU; and the limits, measured beside them."""
    state = {f"t{n}": torch.rand(int(3_600_000 * scale), device=GPU) for n in range(150)}
    nbytes = sum(tensor.nbytes for tensor in state.values())
    target = folder / uuid.uuid4().hex
    read = _LOADS[name](state, target)
    rates = []
    for _ in range(4):
        evict(target)
        rates.append(nbytes / 1e9 / _timed(read))
    shutil.rmtree(target, ignore_errors=True)
    return {"gb_per_s": rates[1:]}


def limits(scale: float, name: str, folder: Path) -> Result:
    """What the disk and the bus give."""
    path = folder / uuid.uuid4().hex
    nbytes = int(1_000_000_000 * scale) // 4096 * 4096
    path.write_bytes(os.urandom(1 << 20) * (nbytes >> 20))
    nbytes = path.stat().st_size
    source, target = (
        torch.empty(nbytes, dtype=torch.uint8, pin_memory=True),
        torch.empty(nbytes, dtype=torch.uint8, device=GPU),
    )
    rates = []
    for _ in range(4):
        if name == "O_DIRECT read":
            evict(folder)
            rates.append(nbytes / 1e9 / direct_read_seconds(path, nbytes, 8))
        else:
            rates.append(nbytes / 1e9 / _timed(lambda: target.copy_(source, non_blocking=True)))
    path.unlink()
    return {"gb_per_s": rates[1:]}


def _ours(state: State, folder: Path) -> Callable[[], object]:
    with TensorizerStorageWriter(folder) as writer:
        dcp.save(state, storage_writer=writer)
    return lambda: dcp.load(state, storage_reader=TensorizerStorageReader(folder))


def _torch(state: State, folder: Path) -> Callable[[], object]:
    dcp.save(state, storage_writer=FileSystemWriter(folder))
    return lambda: dcp.load(state, storage_reader=FileSystemReader(folder))


def _tensorizer(state: State, folder: Path) -> Callable[[], object]:
    from tensorizer import TensorDeserializer, TensorSerializer

    folder.mkdir()
    serializer = TensorSerializer(str(folder / "state.tensors"))
    serializer.write_state_dict({key: tensor.cpu() for key, tensor in state.items()})
    serializer.close()

    def read() -> None:
        with TensorDeserializer(str(folder / "state.tensors"), device=GPU) as deserializer:
            for key, tensor in deserializer.items():
                state[key] = tensor

    return read


_LOADS = {
    "dcp_tensorizer": _ours,
    "torch FileSystemReader": _torch,
    "tensorizer TensorDeserializer": _tensorizer,
}
_WHAT = {"staging": staging, "training": training, "load": load, "limits": limits}


def main() -> None:
    case = json.loads(sys.argv[1])
    result = _WHAT[case["what"]](case["scale"], case["name"], Path(case["folder"]))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
