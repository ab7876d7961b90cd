"""Starts the server, once for the life of this process, and makes the commands that use it."""

from __future__ import annotations

import atexit
import functools
import multiprocessing.util
import os
import secrets
import shlex
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).parent
_running: set[int] = set()


def pids() -> set[int]:
    """The server, if it runs."""
    return set(_running)


@functools.cache
def bin_folder() -> Path:
    """The folder for PATH."""
    folder = Path(multiprocessing.util.get_temp_dir()) / "warm"  # it outlives the tests' own
    folder.mkdir()
    address = f"dcp-tensorizer-tests-{secrets.token_hex(8)}"
    launch = shlex.join([sys.executable, "-IS", str(_HERE / "launch.py"), address, sys.executable])
    for name, words in (("python", ""), ("dcp-tensorizer", "-m dcp_tensorizer")):
        (folder / name).write_text(f'#!/bin/sh\nexec {launch} {words} "$@"\n')
        (folder / name).chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, str(_HERE / "server.py"), address, str(folder / "python")],
        stdin=subprocess.PIPE,  # it ends with us
        stdout=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        start_new_session=True,
    )
    _running.add(server.pid)
    atexit.register(server.communicate)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n", "the server of warm interpreters did not start"
    return folder


def python() -> str:
    """An interpreter, as the first word of a command. What it does not know of options is left to the real one."""
    return str(bin_folder() / "python")
