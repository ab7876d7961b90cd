"""Runs a call of the plan from a parcel, on the machine with the GPU: ``python run.py 1``, then ``2``.

Each result is written to the folder that ``OUT`` names as soon as it is measured, so a call that is killed leaves its
results. A call, or some of its steps (``python run.py 1 staging``), can run again. ``--seconds 200`` limits its time.
Cases write to /dev/shm, or to the folder that ``PARCEL_DISK`` names. The machine needs only torch and NumPy: the
wheels of the parcel are unpacked to the temporary folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).resolve().parent if (Path(__file__).parent / "wheels").is_dir() else Path.cwd()
REHEARSAL = os.environ.get("DCP_TENSORIZER_REHEARSAL") == "1"
SCALE = 0.01 if REHEARSAL else 1.0
PLACE = os.environ.get("PARCEL_DISK") or "/dev/shm"


def main() -> None:
    sys.path[:0] = [str(HERE)]
    from benchmarks.gpu.plan import CALLS, SECONDS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", type=int, choices=range(1, len(CALLS) + 1))
    parser.add_argument("names", nargs="*", help="of its steps; by default all")
    parser.add_argument("--seconds", type=float, help="that the call may take; by default as planned")
    options = parser.parse_args()
    number: int = options.number
    names: list[str] = options.names
    out = Path(os.environ["OUT"])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(_unpacked())])}
    deadline = time.monotonic() + (options.seconds or SECONDS[number - 1])
    file = out / f"call-{number}.json"
    before = json.loads(file.read_text()) if file.exists() else {"ended": {}, "steps": {}}
    ended: dict[str, str] = {}
    steps: dict[str, object] = {}
    machine = _machine(environment)

    def write() -> None:
        content = {"machine": machine, "ended": before["ended"] | ended, "steps": before["steps"] | steps}
        file.write_text(json.dumps(content, indent=1))

    for step in CALLS[number - 1]:
        if names and step.name not in names:
            continue
        seconds = min(step.seconds, deadline - time.monotonic())
        print(f"{step.name}: up to {seconds:.0f} s", flush=True)
        if seconds < 10:
            ended[step.name] = "left out: no time was left"
        elif step.what == "tests":
            ended[step.name] = _test(step.names, out, seconds, environment)
        else:
            results: list[dict[str, object]] = []
            steps[step.name] = results
            ended[step.name] = _measure(step.what, step.names, seconds, environment, results, write)
        print(f"{step.name}: {ended[step.name]}", flush=True)
        write()
    if any(word != "done" for word in ended.values()):
        sys.exit(f"call {number}: {ended}")


def _unpacked() -> Path:
    """Unpacks the wheels once; the folder has the digest of the wheels in its name."""
    wheels = sorted((HERE / "wheels").glob("*.whl"))
    digest = hashlib.sha256(b"".join(hashlib.sha256(wheel.read_bytes()).digest() for wheel in wheels)).hexdigest()
    site = Path(tempfile.gettempdir()) / f"dcp_tensorizer_parcel_{digest[:16]}"
    if not site.exists():
        made = Path(tempfile.mkdtemp())
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(made)
        for data in made.glob("*.data"):
            for kind in ("purelib", "platlib"):
                if (data / kind).is_dir():
                    for path in (data / kind).iterdir():
                        path.rename(made / path.name)
        made.rename(site)
    return site


def _test(paths: tuple[str, ...], out: Path, seconds: float, environment: dict[str, str]) -> str:
    """Runs each file of tests in a process. A rehearsal only collects the tests, because they need a GPU."""
    deadline = time.monotonic() + seconds
    environment = environment | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # plugins may be for another pytest
    running = {}
    for path in paths:
        name = Path(path).stem
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_timeout"]
        command += ["--confcutdir=tests/gpu", path]
        if REHEARSAL:
            command.append("--collect-only")
        else:  # xunit1 has the properties that tests record
            command += [f"--junitxml={out / name}.xml", "--override-ini=junit_family=xunit1"]
            command += ["--timeout=60", "--durations=3"]
        running[name] = subprocess.Popen(
            command, cwd=HERE, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    bad = []
    for name, process in running.items():
        try:
            said, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
        print(said[-6000:], flush=True)
        bad += [f"{name} ended with {process.returncode}"] if process.returncode else []
    return ", ".join(bad) or "done"


def _measure(
    what: str,
    names: tuple[str, ...],
    seconds: float,
    environment: dict[str, str],
    results: list[dict[str, object]],
    write: Callable[[], None],
) -> str:
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(dir=PLACE) as folder:
        for name in names:
            case = {"what": what, "name": name, "scale": SCALE, "folder": folder}
            left = max(0.1, deadline - time.monotonic())
            found = _in_child(case, left, environment)
            result: dict[str, object] = {"what": what, "name": name, "files": PLACE}
            result |= {"values": found["ranks"]} if "ranks" in found else found
            results.append(result)
            write()
            print(f"  {name or what}: {result.get('error', 'measured')}", flush=True)
    failed = [str(result["name"]) for result in results if "error" in result]
    return f"failed: {failed}" if failed else "done"


def _in_child(case: dict[str, object], seconds: float, environment: dict[str, str]) -> dict[str, object]:
    """Measures a case in a fork of this process, which has imported all that cases need.

    The imports take ten seconds on a machine with a remote disk. This process must not use CUDA: a fork could not.
    """
    os.environ.update(environment)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # so that `is_available` does not start CUDA
    sys.path[:0] = [path for path in environment["PYTHONPATH"].split(os.pathsep) if path not in sys.path]
    from benchmarks.case import quiet
    from benchmarks.gpu.cases import measure

    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.setsid()
        quiet()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        try:
            with tempfile.TemporaryDirectory(dir=str(case["folder"]), ignore_cleanup_errors=True) as folder:
                answer: dict[str, object] = {"ranks": measure(case, Path(folder))}
        except BaseException:
            answer = {"error": "\n".join(traceback.format_exc().strip().splitlines()[-12:])}
        os.write(writer, json.dumps(answer).encode())  # a pipe takes 64 KiB at once
        os._exit(0)
    os.close(writer)
    ready, _, _ = select.select([reader], [], [], seconds)
    said = os.read(reader, 1 << 16) if ready else b""
    os.close(reader)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # its children too
    os.waitpid(child, 0)
    found: dict[str, object] = (
        json.loads(said) if said else {"error": "no time was left for it" if not ready else "died"}
    )
    return found


def _machine(environment: dict[str, str]) -> object:
    script = "import json; from benchmarks.gpu.device import describe; print(json.dumps(describe()))"
    done = subprocess.run([sys.executable, "-c", script], cwd=HERE, env=environment, capture_output=True, text=True)
    if done.returncode:
        return done.stderr[-500:]
    return {**json.loads(done.stdout), "commit": (HERE / "commit").read_text().strip()}


if __name__ == "__main__":
    main()
