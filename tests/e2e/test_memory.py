"""What tools need in memory is bounded by the largest tensor, not by the checkpoint."""

import json
import re
import struct
import subprocess

import pytest

from .. import warm

LIMIT = 112 << 20  # beyond what it takes to import torch, which depends on its build
TENSOR = 8 << 20
COUNT = 4 * LIMIT // TENSOR

# RLIMIT_DATA: what a process writes to, stacks and heaps; not what it maps of files, which the system can drop.
LIMITED = """
import atexit, ctypes, resource, sys, threading
ctypes.CDLL(None).mallopt(-8, 2)  # M_ARENA_MAX
def now(name):  # KiB; ru_maxrss would be that of whoever has started this process
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))
import dcp_tensorizer.tools._convert, json
before = now("VmHWM")
atexit.register(lambda: print(now("VmHWM") - before, file=sys.stderr))
threading.stack_size(1 << 20)
limit = (now("VmData") << 10) + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
from dcp_tensorizer._cli.app import run
sys.exit(next(filter(None, map(run, json.loads(sys.argv[2]))), 0))
"""


def limited(*commands):
    """Runs commands of the command line in so much memory, and with as few threads as a small machine has.

    They run one after the other in one process, until one fails. Its output is theirs.
    """
    arguments = json.dumps([[str(argument) for argument in command] for command in commands])
    return subprocess.run(
        [warm.python(), "-c", LIMITED, str(LIMIT), arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def documents(text):
    """The JSON documents that several commands have written, one after the other."""
    while text := text.strip():
        found, end = json.JSONDecoder().raw_decode(text)
        yield found
        text = text[end:]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint of four times the limit; most of it zeros, so that it is quickly made."""
    folder = tmp_path_factory.mktemp("large")
    names = [f"layer.{number:03}" for number in range(COUNT)]
    described = {
        name: {"dtype": "F32", "shape": [TENSOR // 4096, 1024], "data_offsets": [n * TENSOR, (n + 1) * TENSOR]}
        for n, name in enumerate(names)
    }
    head = json.dumps(described).encode()
    with open(folder / "sparse.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for number in range(COUNT):
            file.seek(8 + len(head) + number * TENSOR)
            file.write(struct.pack("<f", number + 1))
        file.truncate(8 + len(head) + COUNT * TENSOR)
    done = limited(["convert", folder / "sparse.safetensors", folder / "checkpoint", "--to", "dcp_tensorizer"])
    assert done.returncode == 0, done.stderr
    return folder / "checkpoint"


@pytest.mark.parametrize("to", ["tensorizer", "safetensors", "torch", "dcp"])
def test_converting_four_times_the_memory_there_is(large, tmp_path, to):
    """Each format is written, and read, a tensor at a time."""
    target = tmp_path / "converted"
    done = limited(
        ["convert", large, target, "--to", to, "--json"],
        ["diff", large.parent / "sparse.safetensors", target, "--json"],
    )
    assert done.returncode == 0, done.stderr
    _, found = documents(done.stdout)
    assert (found["same"], found["bytes"]) == (COUNT, 2 * COUNT * TENSOR)


def test_verifying_four_times_the_memory_there_is(large):
    """With and without tensorizer's own hashes."""
    done = limited(["verify", large, "--json"], ["verify", large, "--json", "--full"])
    assert done.returncode == 0, done.stderr
    assert [found["bytes"] >= COUNT * TENSOR for found in documents(done.stdout)] == [True, True]


def test_a_report_of_four_times_the_memory_there_is(large, tmp_path):
    """Every tensor is read, and of each no more than its statistics is kept."""
    done = limited(["report", large, "-o", tmp_path / "report.html", "--json"])
    assert done.returncode == 0, done.stderr
    assert int(done.stderr.split()[-1]) << 10 < LIMIT  # all that came after the imports, also what is shared
    found = json.loads(re.search(r'id="data">(.*?)</script>', (tmp_path / "report.html").read_text())[1])
    assert [rows[0][8] for *_, rows in found["tensors"]] == [float(number + 1) for number in range(COUNT)]


def test_the_limit_bites():
    """What needs the whole checkpoint in memory does not get it."""
    script = (
        LIMITED.split("from dcp_tensorizer")[0] + "import torch\ntorch.empty(int(sys.argv[2]), dtype=torch.uint8)\n"
    )
    done = subprocess.run(
        [warm.python(), "-c", script, str(LIMIT), str(COUNT * TENSOR)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert "not enough memory" in done.stderr or "DefaultCPUAllocator" in done.stderr
