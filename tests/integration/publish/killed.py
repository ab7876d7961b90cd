"""Publishes or applies a version, and is killed before each of its changes to the disk, one after the other.

    python -m tests.integration.publish.killed publish|apply DIRECTORY

For every kill a child is forked, which sends itself SIGKILL. Then this process looks at what is there. It prints how
many times a child was killed, and fails if it found anything but the old version or the new one.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dcp_tensorizer import apply_delta, publish
from dcp_tensorizer.tools import list_versions, verify_versions

from ...models import first_state, next_state, weights_of, write_model

CHANGES = ("fsync", "link", "mkdir", "open", "pwrite", "replace", "rmdir", "unlink", "write")


class Killed:
    """Counts the calls that change the disk, and kills the process before one of them."""

    def __init__(self, at: int) -> None:
        self._left, self._lock = at, threading.Lock()
        for name in CHANGES:
            setattr(os, name, self._counted(getattr(os, name), is_open=name == "open"))

    def _counted(self, call: Callable[..., Any], *, is_open: bool) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if not is_open or (len(args) > 1 and args[1] & os.O_CREAT):
                with self._lock:
                    self._left -= 1
                    if self._left < 0:
                        os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counted


def is_killed(work: Callable[[], object], at: int) -> bool:
    """Does something in a child; returns whether the child was killed before it was done."""
    child = os.fork()
    if not child:
        Killed(at)
        work()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status == signal.SIGKILL


def prepare(root: Path) -> Path:
    """Publishes three versions, a whole one and two deltas; models of four are in ``model-N``."""
    state = first_state()
    for number in range(1, 5):
        write_model(root / f"model-{number}", state)
        if number < 4:
            publish(root / f"model-{number}", root / "published")
        state = next_state(state, number)
    return root / "published"


def kill_publisher(root: Path, max_deltas: int) -> int:
    """Kills a publisher of the fourth version, a delta or a whole one; returns how often."""
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
        again = publish(root / "model-4", here, max_deltas=max_deltas)  # the next publisher goes on
        assert again.version == newest + 1, at
        apply_delta(copy, here)
        assert weights_of(copy) == expected[4], at
        shutil.rmtree(here)
        shutil.rmtree(copy)
        if not killed:
            return at
    raise AssertionError("it was killed again and again")


def kill_reader(root: Path, before: int | None) -> int:
    """Kills what brings a copy from a version, or from nothing, to the third; returns how often."""
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
        left = sorted(path.name for path in copy.iterdir())
        assert left == [
            ".publish.lock",
            "config.json",
            "model-00001-of-00002-v000003.safetensors",
            "model-00002-of-00002-v000003.safetensors",
            "model.safetensors.index.json",
        ], (at, left)
        shutil.rmtree(copy)
        if not killed:
            return at
    raise AssertionError("it was killed again and again")


def main(what: str, root: str) -> None:
    directory = Path(root)
    if what == "publish":
        kills = kill_publisher(directory / "delta", 20), kill_publisher(directory / "whole", 2)
    else:
        kills = kill_reader(directory / "behind", 1), kill_reader(directory / "empty", None)
    sys.stdout.write(" ".join(map(str, kills)))


if __name__ == "__main__":
    main(*sys.argv[1:])
