"""Restarts from memory: how long they take, what they cost while nothing fails, and how many steps a crash loses.

``python -m benchmarks.restarts`` (about 6 minutes). Each figure beside its peers of the same run: a plain copy of the
same bytes, verified loads from the disk and from the page cache, and the same job without ``survive``.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import torch

from dcp_tensorizer import CheckpointManager
from tests.servers import s3_server

from .harness import cell, machine, rewrite, run_cases, spread, store, stored, table
from .limits import evict, fill_cache
from .pages import goals, opening
from .tiers import SlowProxy

_TENSORS = 300
_SURVIVE = 120.0
_LOADS = ("from memory", "plain copy", "from the page cache", "from the disk")
_COSTS = ("survive=0", "survive=120")
_LOSSES = ("storage alone", "2 buffers", "3 buffers")
_LAUNCHES = ("torchrun, survive=0", "torchrun, survive=120")
_PARTS = (
    ("torchrun", "killed", "started"),
    ("imports", "started", "imported"),
    ("process group", "imported", "connected"),
    ("restored", "made", "restored"),
)
"""What a return under torchrun consists of: a name, the moment when it begins, and the one when it is over."""
_STEP_SECONDS = 0.25
_REMOTE = 0.1e9  # bytes a second
_WHAT = (
    "how long a job that has crashed takes to have its state back, what it costs to keep that while nothing fails, and "
    "how many steps a kill loses where the storage is slow."
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.restarts", description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="of the state that is restored, and saved")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", help="where to save; the temporary directory otherwise")
    parser.add_argument("--redraw", action="store_true", help="the page from the stored results, without measuring")
    options = parser.parse_args()
    if options.redraw:
        rewrite("restarts", _render(stored("restarts")))
        return
    base = {"gib": options.gib}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, tempfile.TemporaryDirectory() as data:
        runtime = Path(folder, "runtime")
        runtime.mkdir(mode=0o700)
        os.environ["XDG_RUNTIME_DIR"] = str(runtime)
        _crash({**base, "what": "crash", "folder": f"{folder}/run"})
        results = run_cases(__spec__.name, [_case(kind, base, folder, "run") for kind in _LOADS], options.rounds)
        _end(f"{folder}/run", options.gib)
        results += run_cases(__spec__.name, [_case(kind, base, folder, "cost") for kind in _COSTS], options.rounds)
        launches = [{"what": kind, "folder": folder, "gib": options.gib / 2} for kind in _LAUNCHES]
        results += run_cases(__spec__.name, launches, options.rounds)
        with s3_server(Path(data)) as server, closing(SlowProxy(server.endpoint, _REMOTE)) as proxy:
            reached = {"bucket": server.bucket, "options": server.options(f"http://127.0.0.1:{proxy.port}")}
            cases = [{"what": kind, "server": reached, "gib": 0.1} for kind in _LOSSES]
            results += run_cases(__spec__.name, cases, options.rounds)
        content = {"machine": machine(folder), "gib": options.gib, "rounds": options.rounds, "results": results}
    store("restarts", content, _render(content))


def _case(kind: str, base: dict[str, Any], folder: str, name: str) -> dict[str, Any]:
    return {"what": kind, **base, "folder": f"{folder}/{name}"}


def _crash(case: dict[str, Any]) -> None:
    """Runs a case that ends as a crash does."""
    subprocess.run([sys.executable, "-m", __spec__.name, json.dumps(case)], check=False)


def _end(folder: str, gib: float) -> None:
    """Asks for a step, so that nothing is kept any more."""
    with CheckpointManager(folder, survive=_SURVIVE) as manager:
        manager.restore({"t0": _state(gib, 0.0)["t0"]}, step=2)


def _state(gib: float, value: float) -> dict[str, torch.Tensor]:
    elements = int(gib * 2**30 / 4 / _TENSORS)
    return {f"t{n}": torch.full((elements,), value) for n in range(_TENSORS)}


def _run(case: dict[str, Any]) -> dict[str, Any]:
    what = case["what"]
    if what == "crash":
        manager = CheckpointManager(case["folder"], survive=_SURVIVE)
        manager.save(1, _state(case["gib"], 1.0), wait=True)
        manager.save(2, _state(case["gib"], 2.0), wait=True)
        manager._job.survival.settle()
        os._exit(1)
    if what in _LOADS:
        return _load(case)
    if what in _COSTS:
        return _cost(case)
    return _launch(case) if what in _LAUNCHES else _loss(case)


def _load(case: dict[str, Any]) -> dict[str, Any]:
    """Seconds until a state is there, into memory that is there already."""
    kind, state = case["what"], _state(case["gib"], 0.0)
    if kind == "plain copy":
        source = _state(case["gib"], 2.0)
        pairs = [(state[key], source[key]) for key in state]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            started = time.perf_counter()
            list(pool.map(lambda pair: pair[0].copy_(pair[1]), pairs))
            return {"seconds": time.perf_counter() - started}
    survive = _SURVIVE if kind == "from memory" else 0.0
    if kind != "from memory":
        (evict if kind == "from the disk" else fill_cache)(Path(case["folder"], "step-2"))
    manager = CheckpointManager(case["folder"], survive=survive)
    started = time.perf_counter()
    assert manager.restore(state) == 2
    seconds = time.perf_counter() - started
    assert all(float(tensor[-1]) == 2.0 for tensor in state.values())
    if kind == "from memory":
        print(json.dumps({"seconds": seconds}), flush=True)
        os._exit(0)  # the next round finds what this one has found
    manager.close()
    return {"seconds": seconds}


def _cost(case: dict[str, Any]) -> dict[str, Any]:
    """Stall, seconds until durable, and CPU time of all processes, of saves that nothing disturbs."""
    state = _state(case["gib"] / 2, 0.0)
    stalls, durable = [], []
    with tempfile.TemporaryDirectory(dir=Path(case["folder"]).parent) as folder:
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
                time.sleep(0.5)  # the keeper takes its digests
                cpu = _cpu() - began
        return {"stalls": stalls[3:], "durable": durable[3:], "cpu": cpu}


def _cpu() -> float:
    """Seconds of CPU time of this process and its children."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def _launch(case: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each part of a return under torchrun, of the rank that was back last; and the step that it had."""
    with tempfile.TemporaryDirectory(dir=case["folder"]) as folder:
        survive = float(case["what"].partition("=")[2])
        job = {"folder": f"{folder}/run", "survive": survive, "gib": case["gib"], "log": folder}
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        script = ["--max-restarts=1", "-m", "benchmarks.restarts_job", json.dumps(job)]
        # Or else the ranks of gloo look for each other where those before them were.
        environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        subprocess.run([*launcher, *script], check=True, capture_output=True, timeout=300, env=environment)
        killed = float(Path(folder, "killed").read_text())
        ranks = [{"killed": killed, **json.loads(Path(folder, f"{rank}.json").read_text())} for rank in (0, 1)]
    last = max(ranks, key=lambda moments: moments["restored"])
    return {name: last[end] - last[begin] for name, begin, end in _PARTS} | {"step": last["step"]}


def _loss(case: dict[str, Any]) -> dict[str, Any]:
    """Steps that a kill at a random moment loses, and the longest stall before it."""
    path = f"s3://{case['server']['bucket']}/{uuid.uuid4().hex}"
    job = {"what": "job", "path": path, "kind": case["what"], **{k: case[k] for k in ("server", "gib")}}
    process = subprocess.Popen(
        [sys.executable, "-m", __spec__.name, json.dumps(job)], stdout=subprocess.PIPE, text=True
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


def _job(job: dict[str, Any]) -> None:
    """Trains and saves each step; says which steps are done. Without memory, a save begins when the last is over."""
    state = _state(job["gib"], 0.0)
    manager = CheckpointManager(job["path"], **_options(job))
    future = None
    for step in range(1, 10_000):
        time.sleep(_STEP_SECONDS)
        for tensor in state.values():
            tensor += 1
        print(json.dumps({"done": step, "stall": None}), flush=True)
        if job["kind"] == "storage alone" and future is not None and not future.done():
            continue  # as who cannot wait does
        started = time.perf_counter()
        future = manager.save(step, state)
        print(json.dumps({"done": step, "stall": time.perf_counter() - started}), flush=True)


def _render(content: dict[str, Any]) -> str:
    found: dict[str, list[dict[str, Any]]] = {}
    for result in content["results"]:
        if "ranks" in result:
            found.setdefault(result["case"]["what"], []).append(result["ranks"])
    loads = {kind: spread(one["seconds"] for one in found.get(kind, [])) for kind in _LOADS}
    medians = {kind: values["median"] for kind, values in loads.items() if values is not None}
    wanted = []
    for peer, goal, quotient in (
        ("plain copy", "<= 1.3", lambda a, b: a / b),
        ("from the disk", ">= 5", lambda a, b: b / a),
        ("from the page cache", ">= 1.5", lambda a, b: b / a),
    ):
        if peer in medians and "from memory" in medians:
            number = quotient(medians["from memory"], medians[peer])
            words = "memory / plain copy, time" if peer == "plain copy" else f"memory, times as fast as {peer}"
            wanted.append((words, goal, f"{number:.2f}"))
    returns = [
        [
            kind,
            *(
                cell(spread(one[name] for one in found.get(kind, [])), form.format)
                for name, form in (*((name, "{:.2f}") for name, _, _ in _PARTS), ("step", "{:.0f}"))
            ),
        ]
        for kind in _LAUNCHES
    ]
    back = spread(one["restored"] for one in found.get(_LAUNCHES[1], []))
    if back is not None:
        wanted.append(
            ("under torchrun: seconds beyond torchrun, imports and the group", "<= 1", f"{back['median']:.2f}")
        )
    costs = [
        [
            kind,
            *(
                cell(spread(value for one in found.get(kind, []) for value in _list(one[name])), "{:.3f}".format)
                for name in ("stalls", "durable", "cpu")
            ),
        ]
        for kind in _COSTS
    ]
    losses = [
        [
            kind,
            *(
                cell(spread(one[name] for one in found.get(kind, [])), form.format)
                for name, form in (("lost", "{:.0f}"), ("stall", "{:.2f}"))
            ),
        ]
        for kind in _LOSSES
    ]
    how_often = f"{content['rounds']} rounds of each, in turns; {content['gib']:g} GiB in {_TENSORS} tensors, one rank."
    header = opening("Restarts from memory", content["machine"], _WHAT, how_often, "restarts")
    return "\n\n".join(
        [
            header,
            goals(wanted),
            table(("restored", "seconds"), [[kind, cell(loads[kind], "{:.3f}".format)] for kind in _LOADS]),
            f"Two ranks with {content['gib'] / 2:g} GiB under torchrun, which starts them again when one is killed "
            "after step 4, in seconds; the step that they had then:",
            table(("", *(name for name, _, _ in _PARTS), "step"), returns),
            f"Saves of {content['gib'] / 2:g} GiB that nothing disturbs; CPU time of the last one, of all processes:",
            table(("", "stall, s", "until durable, s", "CPU time, s"), costs),
            "Steps of 0.25 s, 0.1 GiB, a storage of 0.1 GB/s, a kill at a random moment. Without memory, and with two "
            "buffers, steps pass, or wait, while a save runs:",
            table(("", "steps lost", "longest stall, s"), losses),
        ]
    )


def _list(values: Any) -> list[float]:
    return values if isinstance(values, list) else [values]


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        given = json.loads(sys.argv[1])
        if given["what"] == "job":
            _job(given)
        else:
            print(json.dumps(_run(given)))
    else:
        main()
