"""Two nodes, each with an agent of torchrun's: a job saves to S3, and is resumed on another number of processes."""

import json
import os
import socket
import subprocess
import uuid
from pathlib import Path

import pytest
import torch

from .. import warm
from ..lab.states import assert_same

ROOT = Path(__file__).parents[2]
_SECONDS = 120


def _run(mode, nodes, processes, environment, log):
    """Runs the job with an agent for each node, to its end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [warm.python(), "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={processes}"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id={uuid.uuid4().hex}"]
    command += ["--local-addr=127.0.0.1", "--max-restarts=0", f"--log-dir={log}.{mode}"]
    command += ["-m", "tests.e2e.nodes", mode]
    environment = os.environ | environment | {"OMP_NUM_THREADS": "1", "PYTHON_EXEC": warm.python()}
    agents = []
    try:
        for node in range(nodes):
            with open(f"{log}.{mode}.{node}", "wb") as output:
                agents.append(
                    subprocess.Popen(
                        [*command[:3], f"--node-rank={node}", *command[3:]],
                        cwd=ROOT,
                        env=environment,
                        stdout=output,
                        stderr=output,
                    )
                )
        codes = [agent.wait(_SECONDS) for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.terminate()  # which ends its workers
                agent.wait()
    words = "\n".join(Path(f"{log}.{mode}.{node}").read_text(errors="replace")[-4000:] for node in range(nodes))
    assert codes == [0] * nodes, words


@pytest.fixture(scope="module")
def runs(s3, tmp_path_factory):
    """The prefix, and what the job that saved and the one that resumed say of their states."""
    folder = tmp_path_factory.mktemp("nodes")
    prefix = uuid.uuid4().hex
    environment = {"URL": f"s3://{s3.bucket}/{prefix}", "OPTIONS": json.dumps(s3.options())}
    _run("train", 2, 2, environment | {"RESULT": str(folder / "saved")}, folder / "log")
    _run("resume", 1, 3, environment | {"RESULT": str(folder / "loaded")}, folder / "log")
    return prefix, *(torch.load(folder / name, weights_only=False) for name in ("saved", "loaded"))


def test_a_job_of_two_nodes_is_resumed_by_another_number_of_processes(runs):
    """Four processes on two nodes saved, three load: parameters and optimizer are the same in every bit."""
    _, saved, loaded = runs
    assert (saved["world"], loaded["world"]) == (4, 3)
    assert_same(loaded["states"], saved["states"])
    assert len(saved["states"]) == 3


def test_each_process_wrote_an_object_of_its_own(runs, s3):
    """Whichever node it runs on; and nothing but the checkpoints is left."""
    prefix, _, _ = runs
    for step in range(3):
        names = s3.objects(f"{prefix}/{step}")
        assert [name.rpartition("_")[0] for name in names[1:]] == ["__0_0", "__1_0", "__2_0", "__3_0"]
        assert names[0] == ".metadata"
    assert len(s3.objects(f"{prefix}/resumed")) == 4
    assert s3.uploads(prefix) == []
