"""The line about the package and what it runs on, which bug reports are asked for."""

import importlib.metadata
import platform
import subprocess
import sys

import dcp_tensorizer
from dcp_tensorizer._version import environment


def test_it_names_what_a_bug_report_needs():
    """The line names the package, its format, Python, torch, tensorizer and the extras whose packages are installed."""
    words, extras = environment().split(", extras: ")
    assert words == (
        f"dcp_tensorizer {dcp_tensorizer.__version__} (format 1), Python {platform.python_version()}, "
        f"torch {importlib.metadata.version('torch')}, tensorizer {importlib.metadata.version('tensorizer')}"
    )
    assert {"cli", "s3", "sftp"} <= set(extras.split(", ")) <= {"azure", "cli", "gcs", "otel", "publish", "s3", "sftp"}


def test_the_import_brings_nothing_and_warns_of_nothing():
    """`import dcp_tensorizer` imports neither torch nor anything else that is slow, with warnings as errors."""
    code = "import sys, dcp_tensorizer; print(sorted({'torch', 'numpy', 'fsspec', 'tensorizer'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-I", "-W", "error", "-c", code], capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_it_is_the_first_line_of_a_jobs_log(tmp_path):
    """The first writer of a process logs it, once, before anything else of the package."""
    code = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(name)s: %(message)s")
import torch, torch.distributed.checkpoint as dcp
from dcp_tensorizer import TensorizerStorageWriter
for step in range(2):
    with TensorizerStorageWriter(f"step-{step}") as writer:
        dcp.save({"w": torch.ones(2)}, storage_writer=writer, no_dist=True)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("dcp_tensorizer: ")]
    assert lines[0] == f"dcp_tensorizer: {environment()}", done.stderr
    assert len([line for line in lines if "extras:" in line]) == 1
