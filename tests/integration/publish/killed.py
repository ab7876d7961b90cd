"""Saves a model, publishes or applies a version, and is killed before each change to the disk, one after the other.

    python -m tests.integration.publish.killed save|publish|apply DIRECTORY

For every kill a child is forked, which sends itself SIGKILL. Then this process checks the directory. It prints the
number of kills, and fails if it finds anything but the old version or the new one.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from dcp_tensorizer import SafetensorsStorageWriter, WriteError, apply_delta, publish
from dcp_tensorizer.tools import collect, list_versions, verify_versions

from ...lab.models import first_state, loaded, next_state, not_of_versions, weight_files, weights_of, write_model

CHANGES = ("fsync", "link", "mkdir", "open", "pwrite", "replace", "rmdir", "unlink", "write")


class Killed:
    """Counts the calls that change the disk, and kills the process before one of them. Pauses before the others."""

    def __init__(self, at: int, pause: Callable[[str], object] = lambda call: None) -> None:
        self._left, self._lock, self._pause = at, threading.Lock(), pause
        for name in CHANGES:
            setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if name != "open" or (len(args) > 1 and args[1] & os.O_CREAT):
                with self._lock:
                    self._left -= 1
                    if self._left < 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                self._pause(name)
            return call(*args, **kwargs)

        return counted


def is_killed(work: Callable[[], object], at: int) -> bool:
    """Runs a function in a child; returns whether the child was killed before the end."""
    child = os.fork()
    if not child:
        Killed(at)
        work()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status == signal.SIGKILL


def prepare(root: Path) -> Path:
    """Publishes three versions, a whole one and two deltas; four models are in ``model-N``."""
    state = first_state()
    for number in range(1, 5):
        write_model(root / f"model-{number}", state)
        if number < 4:
            publish(root / f"model-{number}", root / "published")
        state = next_state(state, number)
    return root / "published"


def kill_publisher(root: Path, max_deltas: int) -> int:
    """Kills a publisher of the fourth version, a delta or a whole one; returns the number of kills."""
    published = prepare(root)
    expected = {number: weights_of(root / f"model-{number}") for number in range(1, 5)}
    for at in range(1000):
        here, copy = root / "here", root / "copy"
        shutil.copytree(published, here)
        killed = is_killed(lambda: publish(root / "model-4", here, max_deltas=max_deltas, keep_latest=2), at)  # noqa: B023
        newest = list_versions(here)[0].version
        assert newest in ((3, 4) if killed else (4,)), (at, newest)
        verified = verify_versions(here)
        assert not verified.damages, (at, verified.damages)
        apply_delta(copy, here)
        assert weights_of(copy) == expected[newest], at
        again = publish(root / "model-4", here, max_deltas=max_deltas, keep_latest=2)  # the next publisher goes on
        assert again.version == newest + 1, at
        assert not_of_versions(here) == [], (at, not_of_versions(here))
        apply_delta(copy, here)
        assert weights_of(copy) == expected[4], at
        shutil.rmtree(here)
        shutil.rmtree(copy)
        if not killed:
            return at
    raise AssertionError("it was killed again and again")


def kill_reader(root: Path, before: int | None) -> int:
    """Kills the update of a copy from a version, or from nothing, to the third; returns the number of kills."""
    published = prepare(root)
    expected = {number: weights_of(root / f"model-{number}") for number in range(1, 5)}
    for at in range(1000):
        copy = root / "copy"
        if before is not None:
            apply_delta(copy, published, version=before)
        killed = is_killed(lambda: apply_delta(copy, published), at)  # noqa: B023
        has_model = (copy / "model.safetensors.index.json").exists()
        assert has_model or (before is None and killed), at
        if has_model:
            assert weights_of(copy) in ([expected[3], expected[before]] if before else [expected[3]]), at
            assert not verify_versions(copy).damages, at
        apply_delta(copy, published)
        assert weights_of(copy) == expected[3], at
        left = {path.name for path in copy.iterdir()}
        weights = {path.name for path in weight_files(copy)}
        assert left == {".publish.lock", "config.json", "model.safetensors.index.json", *weights}, (at, left)
        shutil.rmtree(copy)
        if not killed:
            return at
    raise AssertionError("it was killed again and again")


def kill_first_reader(root: Path) -> int:
    """Kills the update of an empty directory to a version; returns the number of kills.

    The next version has other files. Then the user writes a file under the name of one of the version's files. The next
    update removes the leftovers, and is refused because of the user's file.
    """
    before, after = root / "before", root / "after"
    model = write_model(root / "model", first_state())
    for name in ("added_tokens.json", "notes.txt"):
        (model / name).write_text("published")
    publish(model, before)
    shutil.copytree(before, after)
    other = write_model(root / "other", first_state(), files=1, config='{"rope": 2}')
    publish(other, after)
    for at in range(1000):
        copy = root / "copy"
        copy.mkdir()
        killed = is_killed(lambda: apply_delta(copy, before), at)  # noqa: B023
        has_model = (copy / "model.safetensors.index.json").exists()
        if not has_model:
            (copy / "notes.txt").unlink(missing_ok=True)
            (copy / "notes.txt").write_text("mine")
            message = ""
            try:
                apply_delta(copy, after)
            except WriteError as error:
                message = str(error)
            assert "holds no model, but 'notes.txt'." in message, (at, message)
            left = {path.name for path in copy.iterdir()}
            assert left == {".publish.lock", "notes.txt"}, (at, left)
            assert (copy / "notes.txt").read_text() == "mine", at
            (copy / "notes.txt").unlink()
            apply_delta(copy, after)
            names = {path.name for path in weight_files(copy)} | {"model.safetensors.index.json", "config.json"}
            left = {path.name for path in copy.iterdir()} - names
            assert left == {".publish.lock"}, (at, left)
            assert (copy / "config.json").read_text() == '{"rope": 2}', at
        shutil.rmtree(copy)
        if not killed:
            return at
    raise AssertionError("it was killed again and again")


def save(path: Path, step: int) -> None:
    """Saves a model of several files."""
    with warnings.catch_warnings(), SafetensorsStorageWriter(path, max_shard_bytes=150, overwrite=step > 1) as writer:
        warnings.simplefilter("ignore")
        dcp.save({f"w{n}": torch.full((30,), float(step)) for n in range(3)}, storage_writer=writer, no_dist=True)


def kill_save(root: Path, step: int) -> int:
    """Kills the first save of a model, or one that replaces it; returns the number of kills."""
    for at in range(1000):
        model = root / "model"
        if step > 1:
            save(model, step - 1)
        killed = is_killed(lambda: save(model, step), at)  # noqa: B023
        has_model = (model / "model.safetensors.index.json").exists()
        assert has_model or (step == 1 and killed), at
        if has_model:
            (values,) = {tuple(array.tolist()) for array in loaded(model).values()}
            assert values in [(float(n),) * 30 for n in ({step, max(1, step - 1)} if killed else {step})], at
        if killed and not has_model:
            if at % 2 and model.exists():
                collect(model)
            save(model, 1)  # it is refused if anything is left
        else:
            save(model, 3)
        named = {file.name for file in weight_files(model)}
        left = {path.name for path in model.iterdir() if path.stat().st_size} - {"model.safetensors.index.json"}
        assert left == named, (at, left)  # a record that was not yet written says nothing, and stays
        shutil.rmtree(model)
        if not killed:
            return at
    raise AssertionError("it was killed again and again")


def main(what: str, root: str) -> None:
    directory = Path(root)
    if what == "save":
        kills = kill_save(directory / "new", 1), kill_save(directory / "over", 2)
    elif what == "publish":
        kills = kill_publisher(directory / "delta", 20), kill_publisher(directory / "whole", 2)
    else:
        kills = (
            kill_reader(directory / "behind", 1),
            kill_reader(directory / "empty", None),
            kill_first_reader(directory / "first"),
        )
    sys.stdout.write(" ".join(map(str, kills)))


if __name__ == "__main__":
    main(*sys.argv[1:])
