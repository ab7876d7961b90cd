"""Restarts from memory: their duration, their cost while nothing fails, and the steps that a crash loses.

``python -m benchmarks.restarts`` (about 6 minutes). Beside each figure are those of its peers in the same run: a plain
copy of the same bytes, verified loads from the disk and from the page cache, and the same job without ``survive``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import torch
import xxhash

from dcp_tensorizer import CheckpointManager
from dcp_tensorizer._staging.shared_memory import SharedBuffer, aligned
from dcp_tensorizer._storage.local_io import read_into
from tests.lab.servers import s3_server

from .case import Case, leave
from .harness import Content, Spread, cell, quotient, run, run_cases, spread, table, whole
from .limits import direct_read_seconds, evict, fill_cache
from .options import SlowProxy
from .pages import Goal, goals, page

_TENSORS = 300
_SURVIVE = 120.0
_BOUND = "raw reads of such memory, and a digest"
_LOADS = ("from memory", _BOUND, "plain copy", "from the page cache", "from the disk", "raw O_DIRECT reads")
_COSTS = ("survive=0", "survive=120")
_LOSSES = ("storage alone", "2 buffers", "3 buffers")
_LAUNCHES = ("torchrun, survive=0", "torchrun, survive=120")
_PARTS = (
    ("torchrun", "killed", "started"),
    ("imports", "started", "imported"),
    ("process group", "imported", "connected"),
    ("restored", "made", "restored"),
)
"""The parts of a restart under torchrun: a name, and the moments at which the part begins and ends."""
_READERS = 4
_SLICE = 1 << 20  # as loads from memory have it
_STEP_SECONDS = 0.25
_REMOTE = 0.1e9  # bytes a second
_WHAT = (
    "how long a crashed job takes to load its state, what it costs to hold that state in memory while nothing fails, "
    "and how many steps a kill loses where the storage is slow."
)


def measure(options: argparse.Namespace, folder: Path) -> Content:
    with tempfile.TemporaryDirectory() as runtime:  # sockets are in it, whose paths must be short
        os.environ["XDG_RUNTIME_DIR"] = runtime
        base, rounds = {"gib": options.gib, "folder": str(folder), "place": f"{folder}/run"}, options.rounds
        whole(run_cases(crash, [{"what": "crash", **base}], 1))
        results = run_cases(load, [{"what": kind, **base} for kind in _LOADS], rounds)
        with CheckpointManager(base["place"], survive=_SURVIVE) as manager:  # frees the states in memory
            manager.restore({"t0": _state(options.gib, 0.0)["t0"]}, step=2)
        half = {"gib": options.gib / 2, "folder": str(folder)}
        results += run_cases(cost, [{"what": kind, **half} for kind in _COSTS], rounds)
        results += run_cases(launch, [{"what": kind, **half} for kind in _LAUNCHES], rounds)
        (folder / "remote").mkdir()
        with s3_server(folder / "remote") as server, closing(SlowProxy(server.endpoint, _REMOTE)) as proxy:
            reached = {"bucket": server.bucket, "options": server.options(f"http://127.0.0.1:{proxy.port}")}
            results += run_cases(
                loss, [{"what": kind, **half, "gib": 0.1, "server": reached} for kind in _LOSSES], rounds
            )
    return {"gib": options.gib, "rounds": rounds, "results": results}


def _state(gib: float, value: float) -> dict[str, torch.Tensor]:
    elements = int(gib * 2**30 / 4 / _TENSORS)
    return {f"t{n}": torch.full((elements,), value) for n in range(_TENSORS)}


def crash(case: Case, folder: Path) -> None:
    manager = CheckpointManager(case["place"], survive=_SURVIVE)
    for step in (1, 2):
        manager.save(step, _state(case["gib"], float(step)), wait=True)
    manager._survival.wait_held()
    leave(None)


def load(case: Case, folder: Path) -> dict[str, Any]:
    """Returns the seconds of a load into memory that has been used before."""
    kind, state = case["what"], _state(case["gib"], 0.0)
    if kind == "plain copy":
        source = _state(case["gib"], 2.0)
        pairs = [(state[key], source[key]) for key in state]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            started = time.perf_counter()
            list(pool.map(lambda pair: pair[0].copy_(pair[1]), pairs))
            return {"seconds": time.perf_counter() - started}
    if kind == _BOUND:
        return {"seconds": _memory_read_seconds(state)}
    step = Path(case["place"], "step-2")
    if kind == "raw O_DIRECT reads":
        evict(step)
        (data,) = (path for path in step.glob("*.tensors"))
        return {"seconds": direct_read_seconds(data, sum(tensor.nbytes for tensor in state.values()), _READERS)}
    survive = _SURVIVE if kind == "from memory" else 0.0
    if kind != "from memory":
        (evict if kind == "from the disk" else fill_cache)(step)
    manager = CheckpointManager(case["place"], survive=survive)
    started = time.perf_counter()
    assert manager.restore(state) == 2
    seconds = time.perf_counter() - started
    assert all(float(tensor[-1]) == 2.0 for tensor in state.values())
    if kind == "from memory":
        leave({"seconds": seconds})  # the next round finds the same state in memory
    manager.close()
    return {"seconds": seconds}


def _memory_read_seconds(state: Mapping[str, torch.Tensor]) -> float:
    """Returns the seconds to read and digest tensors of a staging buffer as a file: the machine's limit."""
    source = SharedBuffer(sum(aligned(tensor.nbytes) for tensor in state.values()))
    parts = [(tensor.numpy().data.cast("B"), source.allocate(tensor.dtype, tensor.shape)) for tensor in state.values()]

    def read(part: tuple[memoryview, torch.Tensor]) -> None:
        target, stored = part
        offset, digest = source.locate(stored), xxhash.xxh3_64()
        assert offset is not None
        for start in range(0, target.nbytes, _SLICE):
            piece = target[start : start + _SLICE]
            read_into(source.fd, [piece], offset + start)
            digest.update(piece)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        started = time.perf_counter()
        list(pool.map(read, parts))
        return time.perf_counter() - started


def cost(case: Case, folder: Path) -> dict[str, Any]:
    """Returns the stall, the seconds until durable, and the CPU time of all processes, for undisturbed saves."""
    state = _state(case["gib"], 0.0)
    stalls, durable = [], []
    with CheckpointManager(folder, survive=float(case["what"].partition("=")[2])) as manager:
        for step in range(8):
            for tensor in state.values():
                tensor += 1
            began = _cpu()
            started = time.perf_counter()
            future = manager.save(step, state, force=True)
            stalls.append(time.perf_counter() - started)
            assert future is not None
            future.result()
            durable.append(time.perf_counter() - started)
            time.sleep(0.5)  # the keeper computes its digests
            cpu = _cpu() - began
    return {"stalls": stalls[3:], "durable": durable[3:], "cpu": cpu}


def _cpu() -> float:
    """Returns the CPU seconds of this process and its children."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def launch(case: Case, folder: Path) -> dict[str, Any]:
    """Returns the seconds of each part of a restart under torchrun, by the last rank, and the restored step."""
    survive = float(case["what"].partition("=")[2])
    job = {"folder": f"{folder}/run", "survive": survive, "gib": case["gib"], "log": str(folder)}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = ["--max-restarts=1", "-m", "benchmarks.restarts_job", json.dumps(job)]
    # Otherwise the restarted ranks of gloo find the addresses of the ranks before them in the shared store.
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    subprocess.run([*launcher, *script], check=True, capture_output=True, timeout=300, env=environment)
    killed = float((folder / "killed").read_text())
    ranks = [{"killed": killed, **json.loads((folder / f"{rank}.json").read_text())} for rank in (0, 1)]
    last = max(ranks, key=lambda moments: moments["restored"])
    return {name: last[end] - last[begin] for name, begin, end in _PARTS} | {"step": last["step"]}


def loss(case: Case, folder: Path) -> dict[str, Any]:
    """Returns the steps that a kill at a random moment loses, and the longest stall before it."""
    path = f"s3://{case['server']['bucket']}/{uuid.uuid4().hex}"
    job = {"path": path, "kind": case["what"], "folder": str(folder), **{k: case[k] for k in ("server", "gib")}}
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.case", f"{__name__}:trainer", json.dumps(job)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    done, stalls, until = 0, [0.0], 0.0
    for line in process.stdout:
        said = json.loads(line)
        done = said["done"]
        if said["stall"] is not None:
            stalls.append(said["stall"])
        until = until or time.monotonic() + 6.0 + 3.0 * (uuid.uuid4().int % 1000) / 1000
        if time.monotonic() > until:
            break
    process.kill()
    process.wait()
    done = max([done, *(json.loads(line)["done"] for line in process.stdout if line.endswith("\n"))])
    with CheckpointManager(path, **_options(job)) as manager:
        state = _state(case["gib"], 0.0)
        found = manager.restore(state) or 0
        assert all(float(tensor[0]) == found for tensor in state.values())
    return {"lost": done - found, "stall": max(stalls), "done": done}


def _options(job: dict[str, Any]) -> dict[str, Any]:
    buffers = {"storage alone": 0, "2 buffers": 2, "3 buffers": 3}[job["kind"]]
    survive = {"survive": _SURVIVE, "buffers": buffers} if buffers else {}
    return {"storage_options": job["server"]["options"], **survive}


def trainer(job: Case, folder: Path) -> None:
    """Trains, saves each step, and prints the completed steps.

    Without states in memory, skips the saves of steps that are due while the previous save still runs.
    """
    state = _state(job["gib"], 0.0)
    manager = CheckpointManager(job["path"], **_options(job))
    future = None
    for step in range(1, 10_000):
        time.sleep(_STEP_SECONDS)
        for tensor in state.values():
            tensor += 1
        print(json.dumps({"done": step, "stall": None}), flush=True)
        if job["kind"] == "storage alone" and future is not None and not future.done():
            continue  # as a job does that cannot wait
        started = time.perf_counter()
        future = manager.save(step, state)
        print(json.dumps({"done": step, "stall": time.perf_counter() - started}), flush=True)


def render(content: Content) -> str:
    found: dict[str, list[dict[str, Any]]] = {}
    for result in content["results"]:
        if "ranks" in result:
            found.setdefault(result["case"]["what"], []).append(result["ranks"])

    def of(kind: str, name: str) -> Spread | None:
        values = (one[name] for one in found.get(kind, []))
        return spread(x for value in values for x in (value if isinstance(value, list) else [value]))

    def rows(kinds: Sequence[str], forms: Mapping[str, str]) -> list[list[str]]:
        return [[kind, *(cell(of(kind, name), form.format) for name, form in forms.items())] for kind in kinds]

    memory, forms = of("from memory", "seconds"), {name: "{:.2f}" for name, _, _ in _PARTS}
    wanted: list[Goal] = [
        ("memory / plain copy, time", "<= 1.6", quotient(memory, of("plain copy", "seconds"))),
        ("memory, times as fast as from the disk", "", quotient(of("from the disk", "seconds"), memory)),
        (
            "memory / raw reads of such memory with a digest, speed",
            ">= 0.9",
            quotient(of(_BOUND, "seconds"), memory),
        ),
        (
            "memory, times as fast as from the page cache",
            ">= 1.1",
            quotient(of("from the page cache", "seconds"), memory),
        ),
        (
            "from the disk / raw O_DIRECT reads, speed",
            ">= 0.9",
            quotient(of("raw O_DIRECT reads", "seconds"), of("from the disk", "seconds")),
        ),
        (
            "under torchrun: seconds beyond torchrun, imports and the group",
            "<= 0.3",
            of(_LAUNCHES[1], "restored"),
        ),
        *(
            (f"{words}, with survive / without", "", quotient(of(_COSTS[1], name), of(_COSTS[0], name)))
            for name, words in _PRICES.items()
        ),
    ]
    half = f"{content['gib'] / 2:g} GiB"
    return page(
        content,
        "Restarts from memory",
        _WHAT,
        f"{content['rounds']} rounds of each, in turns; {content['gib']:g} GiB in {_TENSORS} tensors, one rank.",
        "restarts",
        goals(wanted, form="{:.2f}".format),
        table(("restored", "seconds"), rows(_LOADS, {"seconds": "{:.3f}"})),
        f"Two ranks with {half} under torchrun, which restarts them when one is killed after step 4, in seconds; "
        "the step that they had then:",
        table(("", *forms, "step"), rows(_LAUNCHES, {**forms, "step": "{:.0f}"})),
        f"Saves of {half} that nothing disturbs; CPU time of the last one, of all processes:",
        table(("", "stall, s", "until durable, s", "CPU time, s"), rows(_COSTS, dict.fromkeys(_PRICES, "{:.3f}"))),
        "Steps of 0.25 s, 0.1 GiB, a storage of 0.1 GB/s, a kill at a random moment. Without memory, and with two "
        "buffers, steps pass, or wait, while a save runs:",
        table(("", "steps lost", "longest stall, s"), rows(_LOSSES, {"lost": "{:.0f}", "stall": "{:.2f}"})),
    )


_PRICES = {"stalls": "stall of a save", "durable": "time until durable", "cpu": "CPU time of a save"}
OPTIONS = {
    "gib": {"type": float, "default": 2.0, "help": "of the state that is restored, and saved"},
    "rounds": {"type": int, "default": 2},
}

if __name__ == "__main__":
    run("restarts", measure, render, about=__doc__, options=OPTIONS)
