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
