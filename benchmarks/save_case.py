"""The cases of the save benchmark: one contender on one workload."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from .case import Case, in_ranks
from .limits import cipher_seconds, copy_seconds, direct_write_seconds, hash_seconds
from .savers import SAVERS, State, discard
from .workloads import SETTINGS, nbytes, sharded

_IDLE_SECONDS = 1.0
_BESIDE_SECONDS = 0.5
_MATRIX = 192
BESIDE = "loop beside a busy core"


class TrainingLoop:
    """Small matrix products on one thread: a stand-in for training that shows every wait for the GIL."""

    def __init__(self) -> None:
        self._a = torch.randn(_MATRIX, _MATRIX)
        self._b = torch.randn(_MATRIX, _MATRIX)

    def step(self) -> None:
        """Computes one product, which releases the GIL."""
        torch.mm(self._a, self._b)

    def run(self, stop: Any) -> dict[str, float]:
        """Runs until ``stop()``; returns the iterations per second, and the longest time between two."""
        count, longest = 0, 0.0
        started = last = time.perf_counter()
        while not stop():
            self.step()
            now = time.perf_counter()
            longest = max(longest, now - last)
            last = now
            count += 1
        return {"rate": count / max(last - started, 1e-9), "gap": longest}


class PythonLoop(TrainingLoop):
    """A loop that never releases the GIL by itself: other threads get it after the switch interval."""

    def step(self) -> None:
        for _ in range(2_000):
            pass


LOOPS = {"products": TrainingLoop, "python": PythonLoop}


def _saves(case: Case, group: dist.ProcessGroup | None, state: State, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    loop = LOOPS[SETTINGS[case["workload"]].loop]()
    loop.run(_after(0.3))
    idle = loop.run(_after(_IDLE_SECONDS))
    base = psutil.Process().memory_info().rss
    saver = SAVERS[case["saver"]](group, state)
    loop.run(_after(_IDLE_SECONDS))  # training before the first save
    result: dict[str, Any] = {"idle": idle, "saves": [], "quiet": []}
    # The machine's speed changes within seconds, so the loop's own speed is measured before and after each save. Work
    # that a saver does after a save can only slow the loop down: the higher speed counts.
    before = _rate(loop, group)
    for number in range(case["saves"]):
        save = _save(saver, state, folder / f"loop{number}", group, loop)
        after = _rate(loop, group)
        result["saves"].append({**save, "alone": max(before, after)})
        before = after
        if case.get("yardsticks") and number:
            result.setdefault("yardsticks", []).append(yardsticks(state, folder))
    for number in range(case["quiet"]):
        result["quiet"].append(_save(saver, state, folder / f"quiet{number}", group, None))
    result["trainer_bytes"] = psutil.Process().memory_info().rss - base
    saver.close()
    return result


def _save(saver: Any, state: State, folder: Path, group: Any, loop: TrainingLoop | None) -> dict[str, float]:
    _meet(group)
    cpu = _cpu_seconds()
    started = time.perf_counter()
    future = saver.save(state, folder)
    stall = time.perf_counter() - started
    durable: list[float] = []
    future.add_done_callback(lambda _: durable.append(time.perf_counter()))
    measured = loop.run(lambda: bool(durable)) if loop is not None and not durable else {}
    future.result()
    result = {"stall": stall, "durable": durable[0] - started, **measured}
    result["cpu"] = _cpu_seconds() - cpu - (durable[0] - started - stall if loop is not None else 0.0)
    result["child_bytes"] = max((c.memory_full_info().uss for c in psutil.Process().children()), default=0)
    if group is None or dist.get_rank() == 0:
        discard(folder)
    return result


def _rate(loop: TrainingLoop, group: Any) -> float:
    """Returns the loop's speed without a save, on all ranks at the same time."""
    _meet(group)
    return loop.run(_after(_BESIDE_SECONDS))["rate"]


def _meet(group: Any) -> None:
    if group is not None:
        dist.barrier(group)


def _cpu_seconds() -> float:
    times = os.times()
    children = sum(sum(c.cpu_times()[:2]) for c in psutil.Process().children(recursive=True))
    return times.user + times.system + times.children_user + times.children_system + children


def _after(seconds: float) -> Any:
    deadline = time.perf_counter() + seconds
    return lambda: time.perf_counter() > deadline


def _memory(case: Case, state: State, folder: Path) -> dict[str, list[int]]:
    """Returns the peak memory of trainer and child in each save, in bytes beyond that before the first save.

    The staging buffer is shared by both, and not counted.
    """
    trainer = psutil.Process()
    base = {"trainer": anonymous_bytes(trainer)}
    saver = SAVERS[case["saver"]](None, state)
    (child,) = trainer.children()
    _wait_idle(child)  # it has done its imports then
    base["child"] = child.memory_full_info().uss
    peaks: dict[str, list[int]] = {name: [] for name in base}
    for number in range(case["quiet"]):
        future = saver.save(state, folder / f"save{number}")
        peak = dict(base)
        while not future.done():
            peak["trainer"] = max(peak["trainer"], anonymous_bytes(trainer))
            peak["child"] = max(peak["child"], child.memory_full_info().uss)
            time.sleep(0.02)
        future.result()
        discard(folder / f"save{number}")
        for name in peaks:
            peaks[name].append(peak[name] - base[name])
    saver.close()
    return peaks


def _wait_idle(process: psutil.Process) -> None:
    before = -1.0
    while (now := sum(process.cpu_times()[:2])) > before:
        before = now
        time.sleep(0.5)


def anonymous_bytes(process: psutil.Process) -> int:
    """Returns the anonymous memory of a process: the memory that is neither shared nor backed by files."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise KeyError("RssAnon")


def yardsticks(state: State, folder: Path) -> dict[str, float]:
    """Returns the limits of a save, measured after each, because disk and memory change their speed within a run."""
    return {"copy": copy_seconds(state), "O_DIRECT write": direct_write_seconds(folder, nbytes(state))}


def _limits(state: State, folder: Path) -> dict[str, float]:
    torch.set_num_threads(1)
    return {
        **yardsticks(state, folder),
        "hashes, 1 core": hash_seconds(state, 1),
        "hashes, 2 cores": hash_seconds(state, 2),
        "cipher": cipher_seconds(state),
        BESIDE: _beside_a_busy_core(),
    }


def _beside_a_busy_core() -> float:
    """Returns the loop's relative speed while another process of the lowest priority hashes what is in its cache."""
    loop = TrainingLoop()
    loop.run(_after(0.3))
    idle = loop.run(_after(_IDLE_SECONDS))["rate"]
    script = "import hashlib, os; os.nice(19); data = bytes(1 << 20)\nwhile True: hashlib.sha256(data)"
    other = subprocess.Popen([sys.executable, "-c", script])
    try:
        loop.run(_after(0.5))
        return loop.run(_after(_IDLE_SECONDS))["rate"] / idle
    finally:
        other.kill()
        other.wait()


def _sharded(case: Case, folder: Path) -> dict[str, Any]:
    group = dist.new_group(backend="gloo")
    state = sharded(SETTINGS[case["workload"]].make(case["scale"]))
    return _saves(case, group, state, folder)


def measure(case: Case, folder: Path) -> list[Any]:
    if case["ranks"] > 1:
        return in_ranks(_sharded, case["ranks"], case, folder)
    state = SETTINGS[case["workload"]].make(case["scale"])
    if case["saver"] == "limits":
        return [_limits(state, folder)]
    if case.get("memory"):
        return [_memory(case, state, folder)]
    group = None
    if "PROCESS" in case["saver"] or "torch_checkpointing" in case["saver"]:
        # Those two need a process group even for one rank.
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        group = dist.group.WORLD
    found = _saves(case, group, state, folder)
    if group is not None:
        dist.destroy_process_group()
    return [found]
