"""What a model as Hugging Face has it costs, beside a checkpoint of the same bytes, and torch's writer.

``python -m benchmarks.export``
"""

from __future__ import annotations

import argparse
import gc
import shutil
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_tensorizer import Publish, SafetensorsStorageWriter, TensorizerStorageWriter

from .case import Case, in_ranks
from .harness import Content, cell, quotient, run, run_cases, spread, table, whole
from .pages import Goal, goals, page
from .save_case import anonymous_bytes

if TYPE_CHECKING:
    from typing_extensions import Self

_WORLDS = (1, 2)
_TENSORS = 60
_COLUMNS = 1024
_FOLLOWERS = ("not published", "published", "not published, beside sha256sum")
_FIGURES = {"stall": "training waits", "durable": "until it is durable"}
_KINDS = ("a model, in place", "a checkpoint", "torch, with consolidation")


def measure(options: argparse.Namespace, folder: Path) -> Content:
    size = {"saves": options.saves, "megabytes": options.megabytes, "folder": str(folder)}
    cases = [{"ranks": world, **size} for world in _WORLDS]
    results = whole(run_cases(measure_case, cases, 1))
    return {
        "saves": options.saves,
        "megabytes": options.megabytes,
        "worlds": {str(r["case"]["ranks"]): r["ranks"][0] for r in results},
    }


def measure_case(case: Case, folder: Path) -> list[Any]:
    return in_ranks(_saves, case["ranks"], case, folder)


def _saves(case: Case, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Saves in each way in turn, and measures each save from the call until it is durable.

    ``seconds``: how long it takes; ``megabytes``: how much more memory of its own the trainer has at its peak.
    """
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = case["megabytes"] * 1_000_000 // (_TENSORS * _COLUMNS * 2)
    state = {
        f"layers.{n}.weight": distribute_tensor(torch.randn(rows, _COLUMNS).to(torch.bfloat16), mesh, [Shard(0)])
        for n in range(_TENSORS)
    }
    model, checkpoint = SafetensorsStorageWriter(overwrite=True), TensorizerStorageWriter()
    mapping = dict.fromkeys(state, 1)

    def torchs(path: str) -> object:
        return dcp.save(
            state,
            storage_writer=HuggingFaceStorageWriter(
                path, fqn_to_index_mapping=mapping, save_distributed=True, enable_consolidation=True
            ),
        )

    ways: dict[str, Callable[[str], object]] = {
        _KINDS[0]: lambda path: dcp.async_save(state, storage_writer=model, checkpoint_id=path).result(),
        _KINDS[1]: lambda path: dcp.async_save(state, storage_writer=checkpoint, checkpoint_id=path).result(),
        _KINDS[2]: torchs,
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    megabytes: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    for number in range(1 + case["saves"]):  # the first one does not count: it allocates the buffer
        for place, kind in enumerate((*_KINDS[number % 3 :], *_KINDS[: number % 3])):
            path = folder / f"{number}-{place}"
            dist.barrier()
            gc.collect()
            with _PeakMemory() as memory:
                started = time.perf_counter()
                ways[kind](str(path))
                dist.barrier()
                elapsed = time.perf_counter() - started
            if number:
                seconds[kind].append(elapsed)
                megabytes[kind].append(memory.nbytes / 1e6)
            if dist.get_rank() == 0:
                shutil.rmtree(path)
    model.close()
    checkpoint.close()
    return {"seconds": seconds, "megabytes": megabytes, **_following(state, case["saves"], folder)}


def _following(state: dict[str, Any], saves: int, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Saves a model again and again into one directory: with and without publishing each, and beside another process.

    That process has the publisher's priority, and reads and hashes files as it does, for ever.

    ``stall``: how long training waits; ``durable``: how long the save takes, which begins when the one before is over.
    """
    figures: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in _FOLLOWERS} for name in _FIGURES}
    for kind in _FOLLOWERS:
        publish = Publish(folder / "published") if kind == _FOLLOWERS[1] else None
        beside = _hashing(folder / _FOLLOWERS[0]) if kind == _FOLLOWERS[2] and dist.get_rank() == 0 else nullcontext()
        writing = SafetensorsStorageWriter(folder / kind, overwrite=True, max_shard_bytes=10**9, publish=publish)
        with beside, writing as writer:
            for number in range(1 + saves):
                dist.barrier()
                started = time.perf_counter()
                saved = dcp.async_save(state, storage_writer=writer)
                stalled = time.perf_counter()
                saved.result()
                if number:
                    figures["stall"][kind].append(stalled - started)
                    figures["durable"][kind].append(time.perf_counter() - started)
            writer.wait_published()
        dist.barrier()
    if dist.get_rank() == 0:
        for kind in _FOLLOWERS:
            shutil.rmtree(folder / kind)
    return figures


@contextmanager
def _hashing(folder: Path) -> Iterator[None]:
    """Hashes the files of a folder again and again while the block runs, with what the cores have to spare."""
    command = ["nice", "-n", "19", "sh", "-c", 'while :; do cat "$0"/*.safetensors | sha256sum; done', str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()  # the hash in progress is over within a second or two


class _PeakMemory:
    """The most memory of its own that this process has, beyond what it had before. The staging buffer is shared."""

    def __enter__(self) -> Self:
        self._process = psutil.Process()
        self._before = anonymous_bytes(self._process)
        self.nbytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(0.01):
            self.nbytes = max(self.nbytes, anonymous_bytes(self._process) - self._before)


def render(content: Content) -> str:
    """The page of results."""
    rows: list[list[str]] = []
    memory: list[list[str]] = []
    following: list[list[str]] = []
    wanted: list[Goal] = []
    for world, found in content["worlds"].items():
        seconds, megabytes = (
            {kind: spread(found[figure][kind]) for kind in _KINDS} for figure in ("seconds", "megabytes")
        )
        rows.append([world, *(cell(seconds[kind], lambda s: f"{s:.2f}") for kind in _KINDS)])
        memory.append([world, *(cell(megabytes[kind], lambda s: f"{s:.0f}") for kind in _KINDS)])
        ours, torchs = (quotient(seconds[a], seconds[b]) for a, b in ((_KINDS[0], _KINDS[1]), (_KINDS[2], _KINDS[0])))
        of_saves = {name: {kind: spread(found[name][kind]) for kind in _FOLLOWERS} for name in _FIGURES}
        cells = (cell(of_saves[name][kind], lambda s: f"{s:.3f}") for name in _FIGURES for kind in _FOLLOWERS)
        following.append([world, *cells])
        pairs = zip(*(found["megabytes"][kind] for kind in _KINDS[:2]), strict=True)
        more = spread(100 * (model - checkpoint) / (content["megabytes"] / int(world)) for model, checkpoint in pairs)
        wanted.append((f"time of a model / of a checkpoint, {world} rank(s)", "<= 1.15", ours))
        wanted.append((f"torch's time / that of a model, {world} rank(s)", ">= 3", torchs))
        wanted.append((f"% of a rank's bytes: trainer's memory beyond a checkpoint's, {world} rank(s)", "<= 1", more))
        for name, words in _FIGURES.items():
            alone, published, beside = (of_saves[name][kind] for kind in _FOLLOWERS)
            goal = "<= 1.1" if name == "stall" else ""  # the cores are shared, and so the save itself may take longer
            wanted.append((f"{words}: published / not, {world} rank(s)", goal, quotient(published, alone)))
            limit = f"{words}: published / beside sha256sum, {world} rank(s)"
            wanted.append((limit, goal, quotient(published, beside)))
    return page(
        content,
        "Models for inference",
        f"how long it takes until {content['megabytes']} MB of bfloat16, sharded over the ranks, are durable: as a "
        f"model of Hugging Face that all ranks write in place, as a checkpoint of this package, and by torch's "
        f"`HuggingFaceStorageWriter` with consolidation, whose files are not fsynced. And how much memory of its own "
        f"the first rank's trainer takes meanwhile, beyond the staging buffer.",
        f"{content['saves']} saves of each kind, in turns, after one that does not count.",
        "export",
        table(("ranks", *(f"{kind} (s)" for kind in _KINDS)), rows),
        table(("ranks", *(f"{kind} (MB)" for kind in _KINDS)), memory),
        "A model again and again in one directory, each save when the one before is over. A process publishes them "
        "meanwhile, as fast as it can, and nobody waits for it. For comparison, `sha256sum` reads and hashes such a "
        "model again and again, with the same priority: this is what any process beside training costs.",
        table(("ranks", *(f"{w}, {kind} (s)" for w in _FIGURES.values() for kind in _FOLLOWERS)), following),
        goals(wanted, form="{:.2f}".format),
    )


OPTIONS = {
    "saves": {"type": int, "default": 5, "help": "of each kind, that are measured"},
    "megabytes": {"type": int, "default": 2000, "help": "of the model"},
}

if __name__ == "__main__":
    run("export", measure, render, about=__doc__, options=OPTIONS)
