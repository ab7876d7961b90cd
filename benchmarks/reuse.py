"""What a save costs that does not write again what has not changed: frozen weights, and an adapter that is trained.

``python -m benchmarks.reuse``, with ``--folder`` on the file system to be measured. ``--base`` and ``--adapter`` give
other sizes, and ``--redraw`` makes the page again from the stored results, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import xxhash

from dcp_tensorizer import SaveLimits, TensorizerStorageWriter

from .harness import cell, machine, rewrite, spread, store, stored, table
from .pages import goals, opening

_MIB = 1 << 20
_WORLDS = (1, 2)
_BASE_TENSORS, _ADAPTER_TENSORS = 64, 32
_WARM_UP = 3  # the first that reuses is the third
_NEVER = 1_000_000
_THREADS = 2
_KINDS = ("reuse_unchanged", "everything is written")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--saves", type=int, default=10, help="of each kind, that are measured")
    parser.add_argument("--base", type=int, default=1024, help="MiB of all ranks that do not change")
    parser.add_argument("--adapter", type=int, default=16, help="MiB of all ranks that change")
    parser.add_argument("--folder", default=None, help="where to put the checkpoints")
    parser.add_argument("--redraw", action="store_true", help="from the stored results, without measuring")
    options = parser.parse_args()
    if options.redraw:
        rewrite("reuse", render(stored("reuse")))
        return
    case = {"saves": options.saves, "base": options.base, "adapter": options.adapter}
    with tempfile.TemporaryDirectory(dir=options.folder or Path.cwd()) as folder:
        worlds = {str(world): _measure(Path(folder), world, case) for world in _WORLDS}
        content = {"machine": machine(folder), **case, "worlds": worlds}
    store("reuse", content, render(content))


def _measure(folder: Path, world: int, case: dict[str, int]) -> dict[str, Any]:
    place = folder / str(world)
    place.mkdir()
    mp.spawn(_rank, (world, str(place), case), nprocs=world)
    result: dict[str, Any] = json.loads((place / "result.json").read_text())
    return result


def _rank(rank: int, world: int, folder: str, case: dict[str, int]) -> None:
    """Saves in both ways in turn, each to directories of its own, of which the last one stays."""
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    torch.set_num_threads(1)
    frozen = _tensors(f"rank{rank}.base", _BASE_TENSORS, case["base"] * _MIB // world)
    trained = _tensors(f"rank{rank}.adapter", _ADAPTER_TENSORS, case["adapter"] * _MIB // world)
    limits = SaveLimits(max_reuses=_NEVER)
    writers = {kind: TensorizerStorageWriter(reuse_unchanged=kind == _KINDS[0], limits=limits) for kind in _KINDS}
    found: dict[str, Any] = {kind: {"seconds": [], "bytes": [], "staging": []} for kind in _KINDS}
    for number in range(_WARM_UP + case["saves"]):
        for tensor in trained.values():
            tensor.add_(1)
        for kind in _KINDS if number % 2 else _KINDS[::-1]:
            path = Path(folder, f"{_KINDS.index(kind)}-{number}")
            dist.barrier()
            started = time.perf_counter()
            writer = writers[kind]
            dcp.async_save(frozen | trained, storage_writer=writer, checkpoint_id=path).result()
            seconds = time.perf_counter() - started
            dist.barrier()
            if rank == 0:
                shutil.rmtree(Path(folder, f"{_KINDS.index(kind)}-{number - 1}"), ignore_errors=True)
            if rank == 0 and number >= _WARM_UP:
                assert writer.last_report is not None
                found[kind]["seconds"].append(seconds)
                found[kind]["staging"].append(writer.last_report.stage_seconds)
                found[kind]["bytes"].append(sum(_new_bytes(file) for file in path.iterdir()))
            dist.barrier()
    found["digests"] = [_digest_seconds(frozen | trained) for _ in range(5)]
    for writer in writers.values():
        writer.close()
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _tensors(name: str, count: int, nbytes: int) -> dict[str, torch.Tensor]:
    return {f"{name}.{n}": torch.rand(nbytes // count // 4) for n in range(count)}


def _new_bytes(file: Path) -> int:
    """The bytes of a file that this save has written: those of a linked one are older than their name."""
    state = file.stat()
    return 0 if not state.st_mode & 0o200 else state.st_size


def _digest_seconds(state: dict[str, torch.Tensor]) -> float:
    """What XXH3-128 of all tensors takes, with as many threads as a save has."""

    def digest(tensor: torch.Tensor) -> None:
        xxhash.xxh3_128(tensor.numpy()).digest()

    started = time.perf_counter()
    with ThreadPoolExecutor(max(1, _THREADS // int(os.environ["LOCAL_WORLD_SIZE"]))) as pool:
        list(pool.map(digest, state.values()))
    return time.perf_counter() - started


def _what(content: dict[str, Any]) -> str:
    return (
        f"asynchronous saves of {content['base']} MiB that stay as they are and {content['adapter']} MiB that change "
        f"before each save, of all ranks together, from the call to the commit. Each goes to a new directory, and the "
        f"one before is deleted. Files are reused without a limit."
    )


def render(content: dict[str, Any]) -> str:
    """The page of results."""
    rows, wanted = [], []
    for world, found in content["worlds"].items():
        ranks = f"{world} rank(s)"
        seconds = {kind: spread(found[kind]["seconds"]) for kind in _KINDS}
        written = {kind: spread(found[kind]["bytes"]) for kind in _KINDS}
        staging, digests = spread(found[_KINDS[0]]["staging"]), spread(found["digests"])
        for kind in _KINDS:
            cells = (cell(seconds[kind], "{:.3f}".format), cell(written[kind], lambda n: f"{n / _MIB:.1f}"))
            rows.append([world, kind, *cells, cell(spread(found[kind]["staging"]), "{:.3f}".format)])
        ours, whole, least = seconds[_KINDS[0]], seconds[_KINDS[1]], written[_KINDS[0]]
        assert ours and whole and least and staging and digests
        more = (least["median"] / _MIB - content["adapter"]) / int(world)
        limit = staging["median"] + digests["median"] + 0.1
        wanted.append((f"time / time of a save that writes everything, {ranks}", "<= 0.15", _ratio(ours, whole)))
        wanted.append((f"or: seconds, {ranks}", f"<= {limit:.3f}", f"{ours['median']:.3f}"))
        wanted.append((f"MiB a rank written beyond what has changed, {ranks}", "<= 0.5", f"{more:.3f}"))
        wanted.append((f"seconds of XXH3-128 of everything, {ranks}", "-", f"{digests['median']:.3f}"))
    note = (
        "The second goal is the sum of the staging copy, of XXH3-128 of everything, and of 0.1 s: a save has to copy "
        "and to look at what it does not write. With the default `SaveLimits(max_reuses=10)` every eleventh save "
        "writes everything."
    )
    how_often = f"{content['saves']} saves of each kind, in turns, after {_WARM_UP} that do not count."
    return "\n\n".join(
        [
            opening("Only what has changed", content["machine"], _what(content), how_often, "reuse"),
            table(("ranks", "saves", "durable after (s)", "MiB written", "of that staging (s)"), rows),
            goals(wanted, note),
        ]
    )


def _ratio(ours: dict[str, float], whole: dict[str, float]) -> str:
    return f"{ours['median'] / whole['median']:.3f}"


if __name__ == "__main__":
    main()
