"""Power cuts: a file system of its own, which is shut down in the midst of saves, and mounted again.

It is ext4 in a file, mounted where no other process sees it. The shutdown writes nothing more, not even the journal:
what was not made durable is gone. All rounds run in one process, on one file system; only `mount` is started in each.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import random
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException

from dcp_tensorizer import SafetensorsStorageWriter, SaveLimits, TensorizerStorageWriter
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer.errors import CheckpointError
from dcp_tensorizer.tools import ConvertOptions, convert
from dcp_tensorizer.tools._formats.registry import open_checkpoint
from dcp_tensorizer.tools._gc import plan_collection, remove

from .checks import Wrong, collect_all, left_over, load, state
from .mounts import apart
from .tally import HANG, Part, Tally

__all__ = ["PART", "run"]

_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
_NO_LOG_FLUSH = 2
_DISK_BYTES = 256 << 20
# The first is what people have. The others keep less order than POSIX asks for, and flush nothing by themselves.
_MOUNTS = ("defaults", "noauto_da_alloc,commit=300", "data=writeback,noauto_da_alloc,commit=300")
_NUMBERS = 150_000
_FORMATS = ("safetensors", "dcp_tensorizer", "dcp", "tensorizer")
_CONVERTED = "converted"
_MODELS = {"models/several": 1_000_000, "models/one": 10_000_000}  # the most bytes in a file of each
_KEEP = 2
# A part of each state does not change. Now and then it is written all the same.
_REUSE: dict[str, Any] = {
    "reuse_unchanged": True,
    "limits": SaveLimits(max_consecutive_failures=None, max_reuses=5),
}
_LONGEST = 0.8  # seconds until the power is cut: a few saves


def run(rounds: int, seed: int, folder: Path) -> Tally:
    """Cuts the power ``rounds`` times.

    Raises:
        Unavailable: this user cannot mount a file system from a file.
    """
    return apart(_on_disk, rounds, seed, folder)


def _on_disk(rounds: int, seed: int, folder: Path, tally: Tally) -> None:
    with _disk(folder) as disk:
        _rounds(rounds, seed, disk, tally)


class _Disk:
    """The file system."""

    def __init__(self, image: Path, root: Path) -> None:
        self.root = root
        self._image = image

    def mount(self, options: str) -> None:
        _call("mount", "-t", "ext4", "-o", f"loop,{options}", str(self._image), str(self.root))

    def cut(self) -> None:
        """From here on nothing is written, and every call fails."""
        descriptor = os.open(self.root, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(descriptor)

    def unmount(self) -> bool:
        """Whether nobody has a file open there, soon."""
        deadline = time.monotonic() + HANG
        while subprocess.run(["umount", str(self.root)], stderr=subprocess.DEVNULL, check=False).returncode:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True


def _call(*command: str) -> None:
    subprocess.run(command, check=True)


@contextmanager
def _disk(folder: Path) -> Iterator[_Disk]:
    image, root = folder / "disk", folder / "mounted"
    root.mkdir()
    with open(image, "wb") as file:
        file.truncate(_DISK_BYTES)
    _call("mkfs.ext4", "-q", "-F", str(image))
    try:
        yield _Disk(image, root)
    finally:
        subprocess.run(["umount", str(root)], stderr=subprocess.DEVNULL, check=False)


class _Ledger:
    """What each path may hold: steps, and None for nothing."""

    def __init__(self) -> None:
        self.may_hold: dict[str, set[int | None]] = {}
        self.committed: set[int] = set()  # the steps below `run`

    @contextmanager
    def change(self, name: str, becomes: int | None) -> Iterator[None]:
        """Something changes what is at a path. If it fails, nobody knows what is there."""
        self.may_hold[name] = self.may_hold.get(name, {None}) | {becomes}
        yield
        self.may_hold[name] = {becomes}


class _Round:
    """What is done until the power is cut, by three threads."""

    def __init__(self, root: Path, ledger: _Ledger, writer: TensorizerStorageWriter, steps: Iterator[int]) -> None:
        self._root, self._ledger, self._writer, self._steps = root, ledger, writer, steps
        self._is_cut = threading.Event()
        self.errors: list[BaseException] = []
        self.reusing: list[str] = []  # saves that wrote not everything
        self._threads = [
            threading.Thread(target=self._repeat, args=(w,), daemon=True)
            for w in (self._save, self._tend, self._export)
        ]

    def run(self, seconds: float, cut: Callable[[], None]) -> int:
        """Lets the threads work for a while, cuts the power, and returns how many of them did not end."""
        for thread in self._threads:
            thread.start()
        time.sleep(seconds)
        cut()
        self._is_cut.set()
        for thread in self._threads:
            thread.join(HANG)
        return sum(thread.is_alive() for thread in self._threads)

    def _repeat(self, work: Callable[[], None]) -> None:
        while not self._is_cut.is_set():
            try:
                work()
            except (CheckpointException, CheckpointError, OSError):
                self._is_cut.wait(HANG)  # nothing fails before
            except BaseException as error:
                self.errors.append(error)
                return

    def _save(self) -> None:
        """Asynchronous saves over one path."""
        step = next(self._steps)
        with self._ledger.change("latest", step):
            dcp.async_save(
                state(step, _NUMBERS), checkpoint_id=self._root / "latest", storage_writer=self._writer
            ).result()
            self._count_reuse(self._writer)

    def _count_reuse(self, writer: TensorizerStorageWriter) -> None:
        if writer.last_report is not None and writer.last_report.reused_nbytes:
            self.reusing.append(writer.last_report.save_id)

    def _tend(self) -> None:
        """A save to a directory of its own, a collection, a conversion."""
        step = next(self._steps)
        name = f"run/step-{step}"
        with self._ledger.change(name, step), TensorizerStorageWriter(self._root / name, **_REUSE) as writer:
            dcp.save(state(step, _NUMBERS), storage_writer=writer, no_dist=True)
            self._count_reuse(writer)
        self._ledger.committed.add(step)
        self._collect()
        target, format_ = f"{_CONVERTED}/{step}", _FORMATS[step % len(_FORMATS)]
        with self._ledger.change(target, step):
            convert(
                self._root / name, self._root / target, format_, options=ConvertOptions(include=["weight*", "nested*"])
            )

    def _export(self) -> None:
        """A model over the one before, of several files or of one."""
        step = next(self._steps)
        for name, shard_bytes in _MODELS.items():
            writer = SafetensorsStorageWriter(self._root / name, overwrite=True, max_shard_bytes=shard_bytes)
            with self._ledger.change(name, step), writer:
                dcp.save(_model(step), storage_writer=writer, no_dist=True)

    def _collect(self) -> None:
        """``gc --keep 2`` of the steps, and of what is overwritten; what was converted is no step."""
        paths = [self._root / "run", self._root / "latest"]
        removals = [r for path in paths if path.exists() for r in plan_collection(open_storage(path), _KEEP, None)]
        for removal in removals:
            if not removal[1].whole:
                remove(removal)
                continue
            name = os.path.relpath(removal[1].path, self._root)
            step = int(name.rpartition("-")[2])
            if step in sorted(self._ledger.committed)[-_KEEP:]:
                self.errors.append(Wrong(f"gc --keep {_KEEP} takes {name}"))
            with self._ledger.change(name, None):
                collected = remove(removal)
                if collected.kept:
                    raise CheckpointError(collected.kept)
            self._ledger.committed.discard(step)


def _rounds(count: int, seed: int, disk: _Disk, tally: Tally) -> None:
    chance, ledger, steps = random.Random(seed), _Ledger(), itertools.count(1)
    with TensorizerStorageWriter(**_REUSE) as writer:
        writer.prewarm(state(0, _NUMBERS))
        for number in range(count):
            disk.mount(chance.choice(_MOUNTS))
            work = _Round(disk.root, ledger, writer, steps)
            hung = work.run(chance.uniform(0, _LONGEST), disk.cut)
            tally.count("saves that reused a file", len(work.reusing))
            for error in work.errors:
                tally.blame("wrong", f"round {number}: {error!r}")
            if hung or not disk.unmount():
                tally.blame("hung", f"round {number}: {hung} threads" if hung else f"round {number}: a file is open")
                return
            disk.mount("defaults")
            tally.rounds += 1
            for name in sorted(ledger.may_hold):
                _check(disk.root, name, ledger, tally, number)
            _clean_up(disk.root, ledger, tally, number)
            if not disk.unmount():
                tally.blame("left", f"round {number}: a file is open after the loads")
                return


def _check(root: Path, name: str, ledger: _Ledger, tally: Tally, number: int) -> None:
    """Loads what is at a path. From here on this is what it holds."""
    allowed = ledger.may_hold[name]
    is_converted = name.startswith(_CONVERTED)
    kind = "models" if name in _MODELS else "converted checkpoints" if is_converted else "checkpoints"
    tally.count(f"{kind} loaded")
    try:
        if name in _MODELS:
            found = _step_of_model(root / name)
        else:
            found = _converted(root / name) if is_converted else load(root / name, _NUMBERS, no_dist=True)
    except Exception as error:
        tally.blame("wrong", f"round {number}: {name}: {error!r}")
        shutil.rmtree(root / name)  # so that it counts once
        return
    if found not in allowed:
        tally.blame("lost", f"round {number}: {name} holds {found}, not one of {allowed}")
    if len(allowed) > 1 and found is not None:
        newest = found == max(step for step in allowed if step is not None)
        tally.count(
            "were being changed, and hold the new one" if newest else "were being changed, and hold the old one"
        )
    elif len(allowed) > 1:
        tally.count("were being changed, and hold nothing")
    ledger.may_hold[name] = {found}
    if name.startswith("run/") and found is not None:
        ledger.committed.add(found)


def _converted(path: Path) -> int | None:
    """The step of what was converted; None if there is nothing."""
    if not path.exists():
        return None
    read = {key: tensor.read_all() for key, tensor in open_checkpoint(str(path), {}).tensors.items()}
    step = int(read["weight"][0])
    expected = state(step, _NUMBERS)
    flat = {**expected, "nested.scale": expected["nested"]["scale"]}
    if any(not value.equal(flat[key]) for key, value in read.items()) or len(read) != 6:
        raise Wrong(f"{path} is not what step {step} saved")
    return step


def _model(step: int) -> dict[str, torch.Tensor]:
    return {f"w{number}": torch.full((_NUMBERS,), float(step)) for number in range(3)}


def _step_of_model(path: Path) -> int | None:
    """The step of a model, as Hugging Face's libraries find it; None if there is none."""
    names, index = [path / "model.safetensors"], path / "model.safetensors.index.json"
    if not names[0].exists():
        if not index.exists():
            return None
        names = [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    tensors = {key: tensor for name in names for key, tensor in load_file(name).items()}
    step = int(tensors["w0"][0])
    expected = _model(step)
    if set(tensors) != set(expected) or any(not tensor.equal(expected[key]) for key, tensor in tensors.items()):
        raise Wrong(f"{path} is not what step {step} exported")
    return step


def _clean_up(root: Path, ledger: _Ledger, tally: Tally, number: int) -> None:
    """What is done after a crash: a collection, after which nothing is left over. What was converted goes."""
    shutil.rmtree(root / _CONVERTED, ignore_errors=True)
    collect_all(root)
    for path in left_over(root):
        tally.blame("left", f"round {number}: {path}")
    for path in (root / "run").glob("step-*"):
        if not any(path.iterdir()):
            tally.count("empty directories that saves in progress left")
            path.rmdir()
    ledger.may_hold = {name: steps for name, steps in ledger.may_hold.items() if (root / name).exists()}
    ledger.committed = {step for step in ledger.committed if ledger.may_hold.get(f"run/step-{step}") == {step}}


PART = Part(
    title="Power cuts",
    unit="power cuts",
    what="An ext4 file system in a file is shut down at a random moment, without a write of its journal, and mounted "
    "again. Until then one thread overwrites a checkpoint with asynchronous saves. Another saves to new directories, "
    f"runs `gc --keep {_KEEP}`, and converts. A third one exports models over the ones before. "
    "A tensor of each state stays the same, and most saves reuse its file. Afterwards every checkpoint is loaded and "
    "compared bit for bit. What was "
    "reported as done must be there; what was in progress may have been done or not. The mount options vary: some give "
    "up what ext4 does to help programs that do not call fsync.",
    rounds=100,
    run=run,
)
