"""`ProgressLine` on a real terminal."""

import os
import pty
import re
import subprocess
import sys

from ..lab.processes import ROOT

SCRIPT = """
import sys
import torch
import torch.distributed.checkpoint as dcp
from dcp_tensorizer import CheckpointManager, TensorizerStorageReader, TensorizerStorageWriter
from dcp_tensorizer.progress import ProgressLine

state, folder = {"weight": torch.ones(250_000)}, sys.argv[1]
line = ProgressLine("saving")
with CheckpointManager(f"{folder}/run", save_every=1, on_progress=line) as manager:
    manager.save(1, state)
with TensorizerStorageWriter(f"{folder}/alone", on_progress=line) as writer:
    dcp.save(state, storage_writer=writer)
dcp.load(state, storage_reader=TensorizerStorageReader(f"{folder}/alone", on_progress=ProgressLine()))
"""


def said(tmp_path, stderr, read):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "TERM": "xterm"}
    command = [sys.executable, "-c", SCRIPT, tmp_path]
    with subprocess.Popen(command, env=environment, stderr=stderr, stdout=subprocess.DEVNULL) as process:
        words = read(process)
    assert process.returncode == 0, words
    return words


def test_a_terminal_shows_bytes_and_rate_from_the_first_moment(tmp_path):
    """Saves of a manager and of a writer, and a load, show a line, which is cleared at the end."""
    ours, theirs = pty.openpty()

    def read(process):
        os.close(theirs)
        found = b""
        try:
            while part := os.read(ours, 4096):
                found += part
        except OSError:  # EIO: nobody has the terminal open any more
            pass
        return found.decode()

    try:
        lines = said(tmp_path, theirs, read).split("\r\x1b[K")
    finally:
        os.close(ours)
    shown = [line for line in lines if line]
    first = [line for line in shown if " 0 B of" in line]
    assert first == ["saving: 0 B of 1.00 MB, 0 B/s"] * 2 + ["loading: 0 B of 1.00 MB, 0 B/s"]
    assert all(re.fullmatch(r"(saving|loading): .* of 1\.00 MB, .*/s(, \d+ s left)?", line) for line in shown)
    assert lines[-1] == ""


def test_a_stream_that_is_not_a_terminal_gets_nothing(tmp_path):
    """The log file of a scheduler is such a stream."""
    assert said(tmp_path, subprocess.PIPE, lambda process: process.stderr.read()) == b""
