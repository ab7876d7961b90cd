"""Runs a call of the plan from a parcel, on the machine with the GPU: ``python run.py 1``, up to 4.

Results go to the folder that ``OUT`` names, a file a step, as they come: a call that is cut off leaves what it has. To
run a call again, or some of its steps (``python run.py 1 staging``), is always possible. It needs nothing installed
but torch and NumPy: the wheels of the parcel are unpacked beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent if (Path(__file__).parent / "wheels").is_dir() else Path.cwd()
REHEARSAL = os.environ.get("DCP_TENSORIZER_REHEARSAL") == "1"
SCALE = 0.01 if REHEARSAL else 1.0


def main() -> None:
    number, names = int(sys.argv[1]), sys.argv[2:]
    sys.path[:0] = [str(HERE)]
    from benchmarks.gpu.plan import CALL_SECONDS, CALLS

    out = Path(os.environ["OUT"])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(_unpacked())])}
    deadline = time.monotonic() + CALL_SECONDS
    ended: dict[str, str] = {}
    for step in CALLS[number - 1]:
        if names and step.name not in names:
            continue
        seconds = min(step.seconds, deadline - time.monotonic())
        print(f"{step.name}: up to {seconds:.0f} s", flush=True)
        if seconds < 10:
            ended[step.name] = "left out: no time was left"
        elif step.what == "tests":
            ended[step.name] = _test(step.names, out / f"{step.name}.xml", seconds, environment)
        else:
            ended[step.name] = _measure(step.what, step.names, out / f"{step.name}.json", seconds, environment)
        print(f"{step.name}: {ended[step.name]}", flush=True)
    (out / f"call-{number}.json").write_text(json.dumps({"ended": ended, "machine": _machine(environment)}, indent=1))
    if any(word != "done" for word in ended.values()):
        sys.exit(f"call {number}: {ended}")


def _unpacked() -> Path:
    """The wheels' contents, in a folder that is made once on this machine."""
    site = Path(tempfile.gettempdir()) / "dcp_tensorizer_parcel"
    if not site.exists():
        made = Path(tempfile.mkdtemp())
        for wheel in sorted((HERE / "wheels").glob("*.whl")):
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(made)
        for data in made.glob("*.data"):
            for kind in ("purelib", "platlib"):
                if (data / kind).is_dir():
                    for path in (data / kind).iterdir():
                        path.rename(made / path.name)
        made.rename(site)
    return site


def _test(paths: tuple[str, ...], file: Path, seconds: float, environment: dict[str, str]) -> str:
    """Runs tests; in a rehearsal they are collected, as they need a GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--confcutdir=tests/gpu", *paths]
    command += ["--collect-only"] if REHEARSAL else [f"--junitxml={file}", "--timeout=60", "-x", "--maxfail=12"]
    code = _run(command, seconds, environment)
    return "done" if code == 0 else f"pytest ended with {code}"


def _measure(what: str, names: tuple[str, ...], file: Path, seconds: float, environment: dict[str, str]) -> str:
    """Runs one case after the other, and stores what each has measured as soon as it has."""
    from benchmarks.harness import run_case

    deadline = time.monotonic() + seconds
    results = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("PARCEL_DISK")) as folder:
        for name in names:
            case = {"what": what, "name": name, "scale": SCALE, "folder": folder}
            left = max(0.1, deadline - time.monotonic())
            found = run_case("benchmarks.gpu.cases:measure", case, left, environment)
            result: dict[str, object] = {"what": what, "name": name}
            result |= {"values": found["ranks"]} if "ranks" in found else found
            results.append(result)
            file.write_text(json.dumps(results, indent=1))
            print(f"  {name or what}: {result.get('error', 'measured')}", flush=True)
    failed = [str(result["name"]) for result in results if "error" in result]
    return f"failed: {failed}" if failed else "done"


def _run(command: list[str], seconds: float, environment: dict[str, str]) -> int:
    try:
        return subprocess.run(command, cwd=HERE, env=environment, timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        return -1


def _machine(environment: dict[str, str]) -> object:
    script = "import json; from benchmarks.gpu.device import describe; print(json.dumps(describe()))"
    done = subprocess.run([sys.executable, "-c", script], cwd=HERE, env=environment, capture_output=True, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr[-500:]


if __name__ == "__main__":
    main()
