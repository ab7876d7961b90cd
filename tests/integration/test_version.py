"""The line about the package and what it runs on, in a job's log."""

from __future__ import annotations

from pathlib import Path

from dcp_tensorizer._version import environment

from ..lab.processes import run_python


def test_it_is_the_first_line_of_a_jobs_log(tmp_path: Path) -> None:
    """The first writer of a process logs it, once, before anything else of the package."""
    script = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(name)s: %(message)s")
import torch, torch.distributed.checkpoint as dcp
from dcp_tensorizer import TensorizerStorageWriter
for step in range(2):
    with TensorizerStorageWriter(f"{sys.argv[1]}/step-{step}") as writer:
        dcp.save({"w": torch.ones(2)}, storage_writer=writer, no_dist=True)
"""
    printed = run_python(script, tmp_path).stdout.splitlines()
    lines = [line for line in printed if line.startswith("dcp_tensorizer: ")]
    assert lines[0] == f"dcp_tensorizer: {environment()}"
    assert len([line for line in lines if "extras:" in line]) == 1
