"""A process whose mounts nobody else sees, and which end with it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from ..lab.processes import quietly
from .tally import HANG, Tally, Unavailable

__all__ = ["apart"]

_CLONE_NEWNS = 0x20000  # of unshare(2): mounts of its own

_Rounds = Callable[[int, int, Path, Tally], object]


def apart(work: _Rounds, rounds: int, seed: int, folder: Path) -> Tally:
    """Runs rounds in such a process; ``work`` is called there with all that follows it, and a tally.

    Raises:
        Unavailable: this user cannot mount a file system from a file.
    """
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        raise Unavailable("to mount a file system from a file needs root, and mkfs.ext4")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([work.__module__])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_there, args=(work, rounds, seed, folder, theirs))
    process.start()
    theirs.close()
    tally = Tally()
    try:
        if ours.poll(HANG * (rounds + 2)):
            tally = ours.recv()
        else:
            tally.blame("hung", "the process with mounts of its own")
    except EOFError:
        raise RuntimeError("the process with mounts of its own died") from None
    finally:
        process.join(HANG)
        process.kill()  # a thread that hangs
        process.join()
    return tally


def _there(work: _Rounds, rounds: int, seed: int, folder: Path, connection: Connection) -> None:
    torch.set_num_threads(1)
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    tally = Tally()
    with quietly():
        work(rounds, seed, folder, tally)
    connection.send(tally)
