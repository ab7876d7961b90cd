"""Publishes to one directory by two to four publishers at once, of which some are killed, and checks what is there.

    python -m tests.integration.publish.overlapping ROUNDS SEED DIRECTORY

Each publisher is forked, and waits for random moments before its changes to the disk, so that all of them overlap. Half
of them send themselves SIGKILL before one of their changes. Then one more publishes, and cleans up.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

from dcp_tensorizer import CheckpointError, apply_delta, publish
from dcp_tensorizer.tools import list_versions, verify_versions

from ...lab.models import loaded, not_of_versions, weights_of, write_model
from .killed import Killed

CHANGES = 40  # a publisher of a whole version makes some 60 of them, and one that is refused a few
REFUSED, FAILED = 3, 4


def run_round(chance: random.Random, root: Path, counts: Counter[str]) -> list[str]:
    """Runs one round in an empty directory; returns the faults and leftovers."""
    published, models = root / "published", [_model(chance, root / f"model-{number}") for number in range(7)]
    first = chance.randint(0, 2)
    for model in models[:first]:
        publish(model, published)
    if first:
        apply_delta(root / "follower", published)
    children = [_fork(chance, model, published) for model in models[2 : 2 + chance.randint(2, 4)]]
    counts["publishers"] += len(children)
    found = []
    for child in children:
        status = os.waitpid(child, 0)[1]
        outcome = {0: "published", REFUSED << 8: "refused", signal.SIGKILL: "killed"}.get(status)
        counts[f"publishers that were {outcome}"] += 1
        found += [] if outcome else [f"a publisher ended with the status {status}"]
    try:
        before = list_versions(published)[0].version if any(published.glob("weight*/*.index.json")) else 0
        if before:
            found += [f"broken: {damage}" for damage in verify_versions(published).damages]
        counts["versions by overlapping publishers"] += before - first
        version = publish(models[6], published, keep_latest=2).version
        found += [] if version == before + 1 else [f"version {version} follows {before}"]
        found += [f"broken: {damage}" for damage in verify_versions(published).damages]
        found += [f"left over or missing: {name}" for name in not_of_versions(published)]
        for copy in ("fresh", "follower"):
            if copy == "follower" and first and _others(root / copy) != _others(models[6]):
                continue  # weights and configuration cannot change in one moment
            apply_delta(root / copy, published)
            found += [] if weights_of(root / copy) == weights_of(models[6]) else [f"{copy} has other weights"]
            found += [] if _others(root / copy) == _others(models[6]) else [f"{copy} has other files"]
        state = loaded(models[6])
        found += [] if apply_delta(state, published).version == version else ["tensors have another version"]
    except CheckpointError as error:
        found.append(f"{type(error).__name__}: {error}")
    return found


def _model(chance: random.Random, path: Path) -> Path:
    """Returns a model of one layout; a quarter of the models has another configuration."""
    values = np.random.default_rng(chance.randrange(1 << 30))
    state = {name: np.arange(500, dtype=np.float32) for name in "abc"}
    for array in state.values():
        array[values.integers(0, 500, 9)] += 1
    return write_model(path, state, config='{"rope": 2}' if chance.random() < 0.25 else "{}")


def _others(path: Path) -> str:
    return (path / "config.json").read_text()


def _fork(chance: random.Random, model: Path, published: Path) -> int:
    """Publishes in a child that waits before its changes, and may be killed before one; returns its process id."""
    at = chance.randrange(CHANGES) if chance.random() < 0.5 else sys.maxsize
    pauses, slowest = random.Random(chance.random()), chance.choice(["link", "fsync", "open"])
    keep = chance.choice([None, 1, 3])
    child = os.fork()
    if child:
        return child

    def pause(call: str) -> None:
        time.sleep((0.04 if call == slowest else 0.002) * pauses.random())  # a manifest is put by a link

    status = FAILED
    try:
        Killed(at, pause)
        publish(model, published, keep_latest=keep, max_deltas=3)
        status = 0
    except CheckpointError:  # what it reads may be removed meanwhile, too, by a publisher with keep_latest=
        status = REFUSED
    finally:
        os._exit(status)


def main(rounds: int, seed: int, directory: Path) -> None:
    """Runs rounds until one finds a fault."""
    chance, counts = random.Random(seed), Counter[str]()
    for number in range(rounds):
        root = directory / "round"
        root.mkdir()
        found = run_round(chance, root, counts)
        assert not found, (seed, number, found)
        shutil.rmtree(root)
    sys.stdout.write("\n".join(f"{number} {what}" for what, number in sorted(counts.items())))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
