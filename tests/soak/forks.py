"""Forked children of a job that saves: whatever they do, and however they end, nothing of the job changes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader

from dcp_tensorizer import CheckpointManager, WriteError
from dcp_tensorizer._memory import keeper

from ..lab.processes import quietly
from .checks import left_over, same, state
from .tally import HANG, Part, Tally

__all__ = ["PART", "run"]

_NUMBERS = 200_000  # 3 MB
_SURVIVE = 60.0
_SAVES = 8  # of a job
_MOST_CHILDREN = 3
_LONGEST = 0.05  # seconds until a child is forked, and until a signal is sent to it
_WAITS = 5.0  # as long as a child waits for a signal that ends it
_KINDS = ("memory", "local")
_MARK = "DCP_TENSORIZER_SOAK"
_WRONG = 3  # the exit code of a child that has found something wrong


def run(rounds: int, seed: int, folder: Path) -> Tally:
    """Has jobs make ``rounds`` saves, and forks children in each; half of the jobs are killed."""
    chance, tally = random.Random(seed), Tally()
    os.environ[_MARK] = uuid.uuid4().hex
    newest = dict.fromkeys(_KINDS, 0)
    with tempfile.TemporaryDirectory() as runtime:
        os.environ["XDG_RUNTIME_DIR"] = runtime  # a socket's path has to be short
        while tally.rounds < rounds and tally.is_good:
            saves = min(_SAVES, rounds - tally.rounds)
            kind = chance.choice(_KINDS)
            kills_after = chance.randint(1, saves) if chance.random() < 0.5 else None
            _job(tally, folder, kind, newest, (chance.getrandbits(32), saves), chance, kills_after)
            tally.rounds += saves
        for kind in [kind for kind in _KINDS if newest[kind]]:  # to the end, so that nothing is left
            _job(tally, folder, kind, newest, (0, 1), chance, None)
            for name in left_over(folder / kind):
                tally.blame("left", name)
        for name in [path.name for path in Path(runtime).rglob("*")]:
            tally.blame("left", f"{name} of a keeper")
    del os.environ["XDG_RUNTIME_DIR"]
    return tally


def _job(
    tally: Tally,
    folder: Path,
    kind: str,
    newest: dict[str, int],
    what: tuple[int, int],
    chance: random.Random,
    kills_after: int | None,
) -> None:
    """Runs a job, kills it after so many saves if it is to be, and compares what it says with what must be."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.soak.forks", str(folder), kind, *map(str, what)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    hangs = threading.Event()

    def end() -> None:
        hangs.set()
        for left in _processes():
            left.kill()

    watch = threading.Timer(2 * HANG + HANG * what[1], end)
    watch.start()
    saved, said = 0, dict[str, Any]()
    try:
        for line in process.stdout:
            said = json.loads(line)
            _judge(tally, kind, newest, said)
            saved += "saved" in said
            if saved == kills_after and "saved" in said:
                time.sleep(chance.uniform(0.0, _LONGEST))
                process.kill()
        errors = process.stderr.read()
        process.wait(HANG)
    finally:
        watch.cancel()
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
    tally.count("jobs killed" if kills_after else "jobs that ended")
    if hangs.is_set():
        tally.blame("hung", f"a job ({kind}) that said {said} last")
    elif not kills_after and "end" not in said:
        tally.blame("wrong", f"a job ({kind}) ended by itself: {errors[-300:]}")
    _, left = psutil.wait_procs([p for p in _processes() if not _is_keeper(p)], timeout=HANG)
    for other in left:
        tally.blame("left", f"process {other.pid} of a job ({kind})")
        other.kill()


def _judge(tally: Tally, kind: str, newest: dict[str, int], said: dict[str, Any]) -> None:
    if "restored" in said:
        if not said["same"]:
            tally.blame("wrong", f"{kind}: step {said['restored']} was restored with other values")
        if said["restored"] < newest[kind]:
            tally.blame("lost", f"{kind}: step {said['restored']} was restored, and not {newest[kind]}")
        newest[kind] = said["restored"]
    elif "committed" in said:
        newest[kind] = max(newest[kind], said["committed"])
        tally.count("saves committed")
    elif "saved" in said and kind == "memory":  # the one before is kept by then
        newest[kind] = max(newest[kind], said["saved"] - 1)
    elif "child" in said:
        tally.count(f"children: {said['child']}")
        if said["ended"] is None:
            tally.blame("hung", f"{kind}: a child that {said['child']}, while step {said['step']} was saved")
        elif said["ended"] != said["expected"]:
            tally.blame("wrong", f"{kind}: a child ended with {said['ended']} and not {said['expected']}: {said}")


def _processes() -> list[psutil.Process]:
    """All that descends from this run, but for this process."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(_MARK) == os.environ[_MARK]:
                found.append(process)
    return found


def _is_keeper(process: psutil.Process) -> bool:
    try:
        return any(keeper.__name__ in argument for argument in process.cmdline())
    except psutil.Error:
        return False


# --- the job ---------------------------------------------------------------------------------------------------------


def _manager(folder: Path, kind: str) -> CheckpointManager:
    how: dict[str, Any] = {"survive": _SURVIVE} if kind == "memory" else {"local": folder / "disk"}
    return CheckpointManager(folder / kind, save_every=1, keep_latest=2, **how)


def job(folder: Path, kind: str, seed: int, saves: int) -> None:
    """resumes from the newest checkpoint, saves, forks children meanwhile, and says what comes of it."""
    torch.set_num_threads(1)
    chance = random.Random(seed)
    with quietly(), _manager(folder, kind) as manager:
        found = state(0, _NUMBERS, blank=True)
        start = manager.restore(found) or 0
        _say(restored=start, same=not start or same(found, state(start, _NUMBERS)))
        family = _Family(manager, folder, chance)
        for step in range(start + 1, start + saves + 1):
            future = manager.save(step, state(step, _NUMBERS))
            _say(saved=step)
            family.grow(step)
            if future is not None:
                future.result()
                _say(committed=step)
                family.committed = step
    _say(end=True)


def _say(**what: Any) -> None:
    os.write(1, (json.dumps(what) + "\n").encode())


class _Family:
    """The children of a job.

    Attributes:
        committed: The newest step whose save the job has seen the end of.
    """

    def __init__(self, manager: CheckpointManager, folder: Path, chance: random.Random) -> None:
        self.committed = 0
        self._manager, self._folder, self._chance = manager, folder, chance
        self._acts: dict[str, tuple[int, Callable[[], object], int]] = {
            # what it does: how often, how, and how the child ends then
            "exits at once": (3, lambda: None, 0),
            "leaves the block": (3, self._leave, 0),
            "leaves the block by an error": (2, self._fail, 1),
            "closes the manager": (3, self._close, 0),
            "restores": (4, self._restore, 0),
            "saves with the manager": (2, self._save, 0),
            "saves by itself": (1, self._save_by_itself, 0),
            "forks": (2, self._fork, 0),
            "is killed": (2, self._wait, -signal.SIGKILL),
            "is told to end": (2, self._wait, -signal.SIGTERM),
            "is a worker of a DataLoader": (1, lambda: None, 0),
            "is another program": (1, lambda: None, 0),
        }

    def grow(self, step: int) -> None:
        """Forks a few children, from this thread or from another one, and waits for all of them."""
        for _ in range(self._chance.randint(1, _MOST_CHILDREN)):
            time.sleep(self._chance.uniform(0.0, _LONGEST))
            name = self._chance.choices([*self._acts], [weight for weight, *_ in self._acts.values()])[0]
            _, act, expected = self._acts[name]
            if name == "is a worker of a DataLoader":
                loaded = list(DataLoader(range(4), num_workers=2, multiprocessing_context="fork", timeout=HANG))
                ended: int | None = 0 if len(loaded) == 4 else _WRONG
            elif name == "is another program":
                ended = subprocess.run(["true"], preexec_fn=self._close, check=False, timeout=HANG).returncode
            else:
                ended = self._ended(self._forked(name, act), expected)
            _say(child=name, step=step, ended=ended, expected=expected)

    def _forked(self, name: str, act: Callable[[], object]) -> int:
        pids: list[int] = []

        def fork() -> None:
            pid = os.fork()
            if pid == 0:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                act()
                os._exit(0)
            pids.append(pid)

        if name.startswith("leaves") or self._chance.random() < 0.5:
            fork()
        else:
            thread = threading.Thread(target=fork)
            thread.start()
            thread.join()
        return pids[0]

    def _ended(self, pid: int, expected: int) -> int | None:
        """The exit code of a child; None if it hangs."""
        if expected < 0:
            time.sleep(self._chance.uniform(0.0, _LONGEST))
            os.kill(pid, -expected)
        deadline = time.monotonic() + HANG
        while time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return None

    def _leave(self) -> None:
        sys.exit(0)

    def _fail(self) -> None:
        raise KeyError("a child that fails")

    def _close(self) -> None:
        self._manager.wait()
        self._manager.close()

    def _restore(self) -> None:
        found = state(0, _NUMBERS, blank=True)
        step = self._manager.restore(found)
        is_good = step is None or same(found, state(step, _NUMBERS))
        os._exit(0 if is_good and (step or 0) >= self.committed else _WRONG)

    def _save(self) -> None:
        try:
            self._manager.save(1 << 30, state(1, _NUMBERS))
        except WriteError:
            os._exit(0)
        os._exit(_WRONG)

    def _save_by_itself(self) -> None:
        with tempfile.TemporaryDirectory(dir=self._folder) as name, CheckpointManager(Path(name, "own")) as own:
            own.save(1, state(1, _NUMBERS), wait=True)
            is_good = own.restore(state(0, _NUMBERS, blank=True)) == 1
        os._exit(0 if is_good else _WRONG)

    def _fork(self) -> None:
        pid = os.fork()
        if pid == 0:
            self._restore()
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    def _wait(self) -> None:
        time.sleep(_WAITS)


PART = Part(
    title="Forked children",
    unit="saves",
    what="A job with a manager saves, and while it does, children are forked off it, from its main thread and from "
    "others. They leave the manager's block, by an error too, close it, restore, save, fork, are workers of a "
    "DataLoader, or are killed. The manager keeps states in memory, or has a local folder. Each child must end as it "
    "should, each save must be committed, and what a child restores must be whole. Half of the jobs are killed, and "
    "the next one must find the newest step.",
    rounds=500,
    run=run,
)


if __name__ == "__main__":
    job(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
