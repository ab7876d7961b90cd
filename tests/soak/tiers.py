"""Kills at random moments of a flush: what was durable locally reaches the remote, whole, and nothing is mixed."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch
import torch.distributed.checkpoint as dcp

from dcp_tensorizer import NotCommitted, TensorizerStorageReader, TensorizerStorageWriter, unwrap
from dcp_tensorizer._tiers.queue import OPEN, Queue
from dcp_tensorizer.tools import collect

from .tally import HANG, Part, Tally

__all__ = ["PART", "run"]

_TENSORS, _NUMBERS = 4, 1_000_000  # 16 MB: a flush takes a tenth of a second and more
_SAVES = 3  # before a kill


def state_of(step: int) -> dict[str, object]:
    """A state in which each number is the step."""
    return {f"t{n}": torch.full((_NUMBERS,), float(step)) for n in range(_TENSORS)} | {"step": step}


def job(folder: Path, first: int) -> None:
    """Saves, says which step is durable locally, and has it flushed until somebody ends the job."""
    writer = TensorizerStorageWriter(folder / "remote", local=folder / "local", max_unflushed=_SAVES + 1)
    writer.prewarm(state_of(0))
    for step in range(first, first + _SAVES):
        path = (
            folder / "remote" / ("latest" if step % 2 else f"step-{step}")
        )  # one place twice, and places of their own
        dcp.async_save(state_of(step), storage_writer=writer, checkpoint_id=path).result()
        print(json.dumps({"durable": step, "place": path.name}), flush=True)
    writer.wait_remote()
    print(json.dumps({"flushed": True}), flush=True)
    signal.pause()


def run(rounds: int, seed: int, folder: Path) -> Tally:
    """Starts a job, kills it at a random moment of its flush, has the next one finish it; each kill is a round."""
    chance, tally = random.Random(seed), Tally()
    durable: dict[str, int] = {}
    for number in range(rounds):
        try:
            _round(chance, tally, folder, number * _SAVES + 1, durable)
        except subprocess.TimeoutExpired:
            tally.blame("hung", f"round {number}")
            break
        tally.rounds += 1
    _look_at_the_end(tally, folder, durable)
    return tally


def _round(chance: random.Random, tally: Tally, folder: Path, first: int, durable: dict[str, int]) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.soak.tiers", str(folder), str(first)]
    killed = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    dies_in = chance.choice(("trainer", "writer process"))
    before, first_saves = dict(durable), chance.randint(1, _SAVES)
    try:
        for line in killed.stdout:
            said = json.loads(line)
            if "durable" in said:
                durable[said["place"]] = said["durable"]
                first_saves -= 1
            if first_saves <= 0:
                break
        time.sleep(chance.uniform(0.0, 0.4))
        if dies_in == "trainer":
            _kill(killed)
        else:
            _kill_writer(killed.pid)
            for line in killed.stdout:  # a fresh writer process goes on by itself
                said = json.loads(line)
                if "flushed" in said:
                    break
                durable[said["place"]] = said["durable"]
            _kill(killed)
        for line in killed.stdout:  # what it had said in its last moments
            said = json.loads(line)
            if "durable" in said:
                durable[said["place"]] = said["durable"]
    finally:
        killed.kill()
        killed.wait()
        killed.stdout.close()
    tally.count(f"kills of the {dies_in}")
    left = [entry.state for entry in Queue(folder / "local").entries() if entry.state in OPEN]
    tally.count("kills of the trainer in the middle of a flush", dies_in == "trainer" and bool(left))
    _look_after_kill(tally, folder, before, durable)
    _pick_up(tally, folder)
    for place, step in durable.items():
        found = _load(tally, folder, place)
        # The one that was being saved when the job died may be there, too: nobody was told of it.
        if found is None or found < step:
            tally.blame("lost", f"{place} holds step {found} and not {step}")
        durable[place] = found or step
    for place in sorted(durable, key=lambda place: durable[place])[:-_SAVES]:
        if place != "latest":  # so that the disk does not fill up
            shutil.rmtree(folder / "remote" / place)
            del durable[place]


def _kill(job: subprocess.Popen[str]) -> None:
    """Kills a trainer, and waits for the end of its writer process: until then the save that it wrote is not dead."""
    children = psutil.Process(job.pid).children()
    job.kill()
    job.wait(HANG)
    psutil.wait_procs(children, HANG)


def _kill_writer(trainer: int) -> None:
    """Kills the writer process of a trainer, if it has one now."""
    children = Path(f"/proc/{trainer}/task/{trainer}/children")
    found = [int(pid) for task in children.parent.parent.glob("*/children") for pid in task.read_text().split()]
    for pid in found:
        if b"_writer_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
            subprocess.run(["kill", "-9", str(pid)], check=False, capture_output=True)


def _look_after_kill(tally: Tally, folder: Path, before: dict[str, int], durable: dict[str, int]) -> None:
    """Each place holds a whole checkpoint on the remote alone, none older than before the job."""
    for place in durable:
        found = _load(tally, folder, place)
        tally.count("loads from the remote right after a kill")
        if (found or 0) < before.get(place, 0):
            tally.blame("lost", f"{place} held step {before[place]}, and holds {found} after a kill")


def _load(tally: Tally, folder: Path, place: str) -> int | None:
    """The step of a checkpoint on the remote, as a node without the local disk sees it."""
    state = state_of(0)
    try:
        dcp.load(state, storage_reader=TensorizerStorageReader(folder / "remote" / place))
    except BaseException as error:
        if not isinstance(unwrap(error), NotCommitted):
            tally.blame("wrong", f"{place}: {unwrap(error)}")
        return None
    step = state["step"]
    values = {value for n in range(_TENSORS) for value in state[f"t{n}"].unique().tolist()}  # type: ignore[attr-defined]
    if values != {float(step)}:  # type: ignore[arg-type]
        tally.blame("wrong", f"{place} of step {step} holds {sorted(values)[:4]}")
    return int(step)  # type: ignore[call-overload, no-any-return]


def _pick_up(tally: Tally, folder: Path) -> None:
    """The next job with the local folder flushes what is there."""
    with TensorizerStorageWriter(folder / "remote", local=folder / "local") as writer:
        if not writer.wait_remote(HANG):
            tally.blame("hung", "the flush after a death")
    for place in sorted((folder / "remote").iterdir()):
        names = [path.name for path in place.iterdir()]
        if len(names) > 2:
            tally.blame("left", f"{place.name} holds {len(names)} files")


def _look_at_the_end(tally: Tally, folder: Path, durable: dict[str, int]) -> None:
    """Without the local folder everything is there; and in that folder nothing but the newest.

    A save that was killed before its local commit leaves files, which the next save there or ``gc`` removes.
    """
    collect(folder / "local")
    steps = [path.name for path in (folder / "local").iterdir() if path.name != ".flush"]
    if len(steps) > 1:
        tally.blame("left", f"the local folder holds {', '.join(sorted(steps))}")
    shutil.rmtree(folder / "local")
    for place, step in durable.items():
        if _load(tally, folder, place) != step:
            tally.blame("lost", f"{place} of step {step}, at the end")


PART = Part(
    title="Tiers",
    unit="kills",
    what="A job saves to a local folder, and is killed at a random moment of its flush, or its writer process is. "
    "Right after that each place on the remote must hold one whole checkpoint, as old as before or newer. When the "
    "next job has flushed what was left, the remote alone must hold all that was reported as durable locally.",
    rounds=200,
    run=run,
)


if __name__ == "__main__":
    job(Path(sys.argv[1]), int(sys.argv[2]))
