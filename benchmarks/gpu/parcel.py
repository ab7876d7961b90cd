"""Makes the parcel for a machine with a GPU and without a network: ``make gpu-parcel``.

The parcel is one folder: wheels of this package and of what such a machine lacks (it has torch and NumPy), the tests
that need a GPU, the benchmark, and `run.py`. It must stay below 56 MiB, because it travels with the files of the
repository, in 64 MiB. ``--rehearse PYTHON`` runs all calls from a copy of the folder, on the CPU, by an interpreter
that has only torch and NumPy.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .plan import CALLS

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 56 << 20
PYTHON = "3.12"
PACKAGES = (
    *("tensorizer==2.12.1", "boto3==1.43.117", "botocore==1.43.117", "s3transfer==0.19.3", "jmespath==1.1.0"),
    *("redis==8.1.0", "hiredis==3.5.0", "protobuf==7.36.2", "psutil==7.2.2", "libnacl==2.1.0", "isal==1.9.1"),
    *("msgspec==0.22.0", "xxhash==4.1.0", "fsspec==2026.9.0", "safetensors==0.8.0", "python-dateutil==2.9.0.post0"),
    *("six==1.17.0", "urllib3==2.8.0", "pytest==9.2.0", "pytest-timeout==2.4.0", "iniconfig==2.3.1", "pluggy==1.7.0"),
    *("packaging==26.4", "pygments==2.21.0", "hypothesis==6.170.17", "sortedcontainers==2.4.0"),
    *("torch_checkpointing==0.1.1", "runai-model-streamer==0.16.1", "humanize==4.17.0"),
)
_TESTS = (
    "tests/__init__.py",
    *(f"tests/lab/{name}.py" for name in ("__init__", "processes", "states")),
    "tests/warm",
    "tests/gpu",
)
_BENCHMARKS = (
    *(f"benchmarks/{name}.py" for name in ("__init__", "harness", "case", "limits", "savers")),
    "benchmarks/gpu",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rehearse", metavar="PYTHON", type=Path, help="run it all on the CPU, by this interpreter")
    options = parser.parse_args()
    make(options.folder)
    if options.rehearse:
        # Absolute, because the calls run in the parcel; not resolved, because its link leads out of the environment.
        rehearse(options.folder, options.rehearse.absolute())


def make(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "wheels").mkdir(parents=True)
    pip = (sys.executable, "-m", "pip")
    _call(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder / "wheels"), str(ROOT))
    platforms = [f"--platform={name}" for name in ("manylinux_2_28_x86_64", "manylinux2014_x86_64", "any")]
    abis = [f"--abi={name}" for name in (f"cp{PYTHON.replace('.', '')}", "abi3", "none")]
    _call(
        *(*pip, "download", "--quiet", "--no-deps", "--only-binary=:all:", f"--python-version={PYTHON}"),
        *("--implementation=cp", *abis, *platforms, "--dest", str(folder / "wheels"), *PACKAGES),
    )
    for name in (*_TESTS, *_BENCHMARKS):
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, target)
    shutil.copyfile(Path(__file__).with_name("run.py"), folder / "run.py")
    git = ("git", "-C", str(ROOT))
    commit = subprocess.check_output((*git, "rev-parse", "--short=10", "HEAD"), text=True).strip()
    is_dirty = subprocess.check_output((*git, "status", "--porcelain"), text=True)
    (folder / "commit").write_text(f"{commit}{'-dirty' if is_dirty else ''}\n")
    nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {nbytes / 2**20:.1f} MiB, {len(CALLS)} calls: OUT=FOLDER python {folder}/run.py NUMBER")
    if nbytes > MOST_BYTES:
        sys.exit(f"that is more than {MOST_BYTES >> 20} MiB")


def rehearse(folder: Path, python: Path) -> None:
    """Runs all calls of a parcel in an empty environment. Exits with an error if a step was skipped or failed."""
    with tempfile.TemporaryDirectory() as top:
        parcel, out = Path(top) / "parcel", Path(top) / "out"
        shutil.copytree(folder, parcel)
        out.mkdir()
        given = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "TMPDIR", "LANG")}
        given |= {"DCP_TENSORIZER_REHEARSAL": "1", "OUT": str(out), "OMP_NUM_THREADS": "1", "TMPDIR": top}
        for number in range(1, len(CALLS) + 1):
            started = time.monotonic()
            done = subprocess.run([python, "run.py", str(number)], cwd=parcel, env=given)
            print(f"call {number}: exit {done.returncode} after {time.monotonic() - started:.0f} s", flush=True)
            if done.returncode:
                sys.exit(1)
        ended = {name: word for file in out.glob("call-*.json") for name, word in _ended(file).items()}
        planned = {step.name for call in CALLS for step in call}
        if set(ended) != planned or set(ended.values()) != {"done"}:
            sys.exit(f"not all that is planned has run: {ended}")
        print(f"rehearsed: {len(planned)} steps, {sum(len(step.names) for call in CALLS for step in call)} cases")


def _ended(file: Path) -> dict[str, str]:
    ended: dict[str, str] = json.loads(file.read_text())["ended"]
    return ended


def _call(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
