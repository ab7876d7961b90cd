"""Loads whose ranks read for each other: random states, targets, sizes of pieces and faults, on 2 to 4 ranks."""

from __future__ import annotations

import functools
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, zeros

from dcp_tensorizer import ReadError, TensorizerStorageReader, TensorizerStorageWriter
from dcp_tensorizer._loading import deliver
from dcp_tensorizer._loading.exchange import Exchange

from ..lab.processes import quietly
from ..lab.ranks import Rank, attempt, run_ranks
from .tally import HANG, Part, Tally

__all__ = ["PART", "run"]

_RANKS = (2, 3, 4)
_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int16, torch.complex64)
_FAULTS = ("none", "none", "none", "damaged file", "unfit target", "planner fails", "planner of one by one")
State = dict[str, Any]


class _OneByOne(DefaultLoadPlanner):
    """Gets one tensor after the other."""

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        super().commit_tensor(read_item, tensor)


class _Fails(DefaultLoadPlanner):
    """Fails when it gets the object."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise KeyError("planned to fail")


def run(rounds: int, seed: int, folder: Path) -> Tally:
    """Shares the rounds among jobs of several numbers of ranks."""
    tally = Tally()
    for number, ranks in enumerate(_RANKS):
        share = rounds // len(_RANKS) + (number < rounds % len(_RANKS))
        place = folder / f"of-{ranks}"
        try:
            found = run_ranks(ranks, _rounds, share, seed + number, place, timeout=60.0 + 10.0 * share)
        except AssertionError as error:
            tally.blame("hung" if "Timeout" in str(error) else "wrong", f"{ranks} ranks: {str(error)[-400:]}")
            continue
        tally.rounds += share
        for rank, (counts, wrong, hung) in enumerate(found):
            for words in wrong:
                tally.blame("wrong", f"rank {rank} of {ranks}: {words}")
            for words in hung:
                tally.blame("hung", f"rank {rank} of {ranks}: {words}")
            for what, count in counts.items():
                tally.count(what, count)
    return tally


def _rounds(rank: Rank, rounds: int, seed: int, folder: Path) -> tuple[dict[str, int], list[str], list[str]]:
    """All ranks draw the same numbers, but for those of `own`."""
    chance, own = random.Random(seed), random.Random(f"{seed} {rank.index}")
    mesh = init_device_mesh("cpu", (rank.world_size,))
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    hung: list[str] = []
    with quietly():
        for number in range(rounds):
            path = folder / str(number)
            said, seconds = _round(rank, path, mesh, chance, own, counts)
            wrong += [f"round {number}: {words}" for words in said]
            hung += [f"round {number}: {seconds:.0f} s"] if seconds > HANG else []
            dist.barrier()
            if rank.index == 0:
                shutil.rmtree(path)
    return dict(counts), wrong, hung


def _round(
    rank: Rank, path: Path, mesh: DeviceMesh, chance: random.Random, own: random.Random, counts: Counter[str]
) -> tuple[list[str], float]:
    """One save and one load; returns what was wrong, and how long the load took."""
    state = _state(chance, mesh)
    with TensorizerStorageWriter(path) as writer:
        dcp.save(state, storage_writer=writer, process_group=rank.saves)
    fault, victim = chance.choice(_FAULTS), chance.randrange(rank.world_size)
    is_victim = victim == rank.index
    if fault == "damaged file" and rank.index == 0:
        _damage(path, chance.randrange(1 << 30))
    else:
        chance.randrange(1 << 30)
    dist.barrier()
    deliver.Exchange = functools.partial(  # type: ignore[misc,attr-defined]
        Exchange,
        window_bytes=chance.choice((1 << 16, 1 << 20, 64 << 20)),
        round_bytes=chance.choice((20_000, 200_000, 64 << 20)),
    )
    targets = _targets(state, own)
    if fault == "unfit target" and is_victim:
        targets["plain"] = torch.zeros(1, 3).expand(1000, 3)
    planner = {"planner fails": _Fails, "planner of one by one": _OneByOne}.get(fault) if is_victim else None
    reader = TensorizerStorageReader(path, exchange=rank.saves, verify=fault == "damaged file" or chance.random() < 0.7)
    failure = attempt(
        lambda: dcp.load(
            targets, storage_reader=reader, process_group=rank.saves, planner=None if planner is None else planner()
        )
    )
    counts[f"loads: {fault}"] += 1
    if failure.causes:
        counts["loads that failed"] += 1
        return _judge_failure(fault, victim, failure.causes), failure.seconds
    assert reader.last_report is not None
    counts["bytes read"] += reader.last_report.nbytes
    counts["bytes received"] += reader.last_report.received_bytes
    said = [f"{key} is not what was saved ({fault})" for key, value in targets.items() if not _is(state[key], value)]
    if fault in ("unfit target", "planner fails"):
        said.append(f"it succeeded in spite of: {fault}")
    return said, failure.seconds


def _judge_failure(fault: str, victim: int, causes: dict[int, BaseException]) -> list[str]:
    texts = {rank: f"{type(error).__name__}: {error}" for rank, error in causes.items()}
    if fault == "planner fails" and set(causes) == {victim} and "planned to fail" in texts[victim]:
        return []
    if fault in ("damaged file", "unfit target") and all(isinstance(error, ReadError) for error in causes.values()):
        return []
    return [f"with {fault!r} at rank {victim}: {texts}"]


def _state(chance: random.Random, mesh: DeviceMesh) -> State:
    """The same on all ranks."""
    torch.manual_seed(chance.randrange(1 << 30))
    state: State = {
        "object": [chance.random() for _ in range(chance.choice((1, 10_000)))],
        "plain": torch.rand(1000, 3),
    }
    for number in range(chance.randint(1, 12)):
        shape = (chance.choice((0, 1, 7, 1000)), chance.choice((1, 33, 250)))
        full = torch.randint(0, 100, shape).to(chance.choice(_DTYPES))
        cut = chance.choice((None, None, Shard(0), Shard(1)))
        state[f"t{number}"] = full if cut is None else distribute_tensor(full, mesh, [cut], src_data_rank=None)
    return state


def _targets(state: State, own: random.Random) -> State:
    """What one rank wants, and what memory it goes to."""
    targets: State = {"object": None}
    for key, value in state.items():
        if key == "object" or own.random() < 0.15:
            continue
        if isinstance(value, DTensor):
            targets[key] = zeros(
                *value.shape, dtype=value.dtype, device_mesh=value.device_mesh, placements=value.placements
            )
            continue
        wider = {torch.float32: torch.float64, torch.bfloat16: torch.float32}
        dtype = wider.get(value.dtype, value.dtype) if own.random() < 0.2 else value.dtype
        targets[key] = torch.zeros(value.shape, dtype=dtype)
        if own.random() < 0.3:
            targets[key] = torch.zeros(value.shape[::-1], dtype=dtype).T
    return targets


def _is(saved: Any, loaded: Any) -> bool:
    if isinstance(saved, DTensor):
        saved, loaded = saved.to_local(), loaded.to_local()
    return torch.equal(saved.to(loaded.dtype), loaded) if isinstance(saved, torch.Tensor) else bool(saved == loaded)


def _damage(path: Path, number: int) -> None:
    """Flips a bit of one of the data files."""
    files = sorted(file for file in path.iterdir() if file.suffix == ".tensors")
    if files:
        file = files[number % len(files)]
        content = bytearray(file.read_bytes())
        content[number % len(content)] ^= 1
        file.write_bytes(content)


PART = Part(
    title="Ranks that read for each other",
    unit="loads",
    what="2 to 4 ranks save a random state and load it with `exchange=`. Each wants a random part of it, in memory of "
    "its own kind, and they exchange pieces of random sizes. In some loads a file is damaged, a target on one rank "
    "does not fit, or one rank has a planner that fails or that gets one tensor after the other. What is loaded must "
    "be what was saved. What fails must fail on every rank that waits, for that reason, and soon.",
    rounds=300,
    run=run,
)
