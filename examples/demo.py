"""A job that saves while it trains is killed in the middle of a save, and resumes with the same losses.

``python -m examples.demo``, or ``make demo``. The job is that of `examples.training`; it runs nine times:

1. undisturbed: what the losses should be;
2. with a save every few steps, until all of its processes are killed in the middle of one;
3. resumed from the newest whole checkpoint on as many ranks: the losses must be those of 1, to the last bit;
4. resumed on fewer ranks: the losses must be the same, except for the effect of adding up gradients in another order;
5. undisturbed on fewer ranks: the effect of that order alone;
6. with each step held in memory, until all its processes are killed between two saves;
7. resumed from memory, at the newest step, which is later than the last save; the losses must be those of 1;
8. on three hosts, which are namespaces of this machine, with each step copied to another host, until one host is lost;
9. resumed on the two remaining hosts and a new one: from a step that is not older than that of 7; the losses must be
   those of 1.

Runs 8 and 9 need root. Without root, the demo prints that, and skips them. The results are in ``demo-output/``.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from torch.multiprocessing.spawn import ProcessContext, ProcessException, spawn

from tests.hosts.lab import SHARED, Host, Lab
from tests.hosts.requirements import missing

from .model import ByteTransformer
from .record import Event, Run, Saving, Stepped, Table, largest_difference
from .training import Job, train, train_on_host

__all__ = ["Runs", "main"]

_OUTPUT = Path("demo-output")
_CHECKPOINTS = _OUTPUT / "checkpoints"
_SURVIVED = _OUTPUT / "survived"
_PICTURE = _OUTPUT / "demo.png"
_STEPS = 30
_SAVE_EVERY = 6
_KILL_AT = 18  # the step whose save is never finished
_LOST_HOST = 1
_KILL_AFTER = 17  # the step after which the run that holds its states in memory is killed; its last save is of step 12
_RANKS, _FEWER = 3, 2
# On fewer ranks, the losses may differ by this many times the difference that the changed order of additions alone
# causes, which is about 1e-6. For comparison: resuming with a fresh optimizer causes a difference of 1e-1, and resuming
# without the first moments of one matrix one of 4e-2. Smaller errors in a state show in its digest.
_TOLERANCE = 10


class DemoError(Exception):
    """A check of the demo failed."""


class Runs(NamedTuple):
    """The runs, in their order. The last two are None if no hosts can be made."""

    undisturbed: Run
    killed: Run
    resumed: Run
    resumed_on_fewer: Run
    undisturbed_on_fewer: Run
    killed_between_saves: Run
    resumed_from_memory: Run
    host_lost: Run | None = None
    resumed_elsewhere: Run | None = None


def main() -> None:
    """Runs the job, checks the runs and draws them. If a check fails, exits with 1."""
    started = time.monotonic()
    shutil.rmtree(_OUTPUT, ignore_errors=True)
    _CHECKPOINTS.mkdir(parents=True)
    _SURVIVED.mkdir()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_OUTPUT.resolve() / "torch")  # torch would make one in /tmp
    try:
        runs = _run_all()
        _check(runs)
    except (DemoError, ProcessException) as error:
        sys.exit(f"\nFAILED: {error}")
    except KeyboardInterrupt:
        sys.exit("\nInterrupted.")
    from .picture import draw  # not at the top: every rank imports this module, and none needs matplotlib

    draw(runs, _PICTURE)
    print(f"\nDone in {time.monotonic() - started:.0f} s. Picture: {_PICTURE}. Checkpoints: {_CHECKPOINTS}/")


def _run_all() -> Runs:
    _introduce()
    undisturbed = _launch(f"1. Undisturbed, on {_RANKS} ranks", _RANKS)
    killed = _launch(
        f"2. The same, saving every {_SAVE_EVERY} steps, until the job is killed", _RANKS, saves=True, kill_at=_KILL_AT
    )
    where = "Resumed from the newest whole checkpoint,"
    return Runs(
        undisturbed,
        killed,
        _launch(f"3. {where} on {_RANKS} ranks", _RANKS, resumes=True),
        _launch(f"4. {where} on {_FEWER} ranks", _FEWER, resumes=True, saves=True),
        _launch(f"5. Undisturbed, on {_FEWER} ranks", _FEWER),
        _launch(
            f"6. Each step held in memory, saving every {_SAVE_EVERY} steps, until the job is killed",
            _RANKS,
            saves=True,
            kill_after=_KILL_AFTER,
            checkpoints=_SURVIVED,
        ),
        _launch(f"7. Resumed from memory, on {_RANKS} ranks", _RANKS, resumes=True, saves=True, checkpoints=_SURVIVED),
        *_lose_a_host(),
    )


def _lose_a_host() -> tuple[Run, Run] | tuple[()]:
    """Runs the job on several hosts, until one host is lost, and then on the remaining hosts and a new one."""
    if (reason := missing()) is not None:
        print(f"\nSkipped runs 8 and 9, the loss of a host: {reason}")
        return ()
    folder = _OUTPUT / "hosts"
    names = (
        f"8. On {_RANKS} hosts, each step copied to another host, until host {_LOST_HOST + 1} is lost",
        f"9. Resumed on the {_RANKS - 1} remaining hosts and a new one",
    )
    job = Job(_STEPS, SHARED / "rendezvous", SHARED / "checkpoints", _SAVE_EVERY, survives=True, copies=2)
    with Lab(folder.resolve()) as lab:
        hosts = lab.hosts(_RANKS)
        lost = _run_on(lab, hosts, names[0], job)
        hosts[_LOST_HOST] = lab.host()
        resumed = _run_on(lab, hosts, names[1], job)
    shutil.rmtree(folder)
    return lost, resumed


def _run_on(lab: Lab, hosts: list[Host], name: str, job: Job) -> Run:
    """Runs the job on some hosts, to its end, or until one of the first hosts is lost."""
    run, is_first = Run(name, len(hosts)), hosts[_LOST_HOST].number <= len(hosts)
    table = Table(run, saves=True, every=_SAVE_EVERY)
    (lab.shared / "rendezvous").unlink(missing_ok=True)
    receiving, sending = Pipe(duplex=False)
    ranks = lab.forked(hosts, train_on_host, job, sending)
    sending.close()
    with receiving, suppress(EOFError):
        while True:
            event = receiving.recv()
            run.add(event)
            table.show(event)
            if is_first and isinstance(event, Stepped) and event.step == _KILL_AFTER:
                hosts[_LOST_HOST].die(with_disk=True)
                table.show_loss(event.step, hosts[_LOST_HOST].name)
                ranks.end()
                return run
    if any(ranks.wait()):
        raise DemoError(f"{name}: {ranks.account()}")
    return run


def _introduce() -> None:
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in ByteTransformer().parameters())
    print(
        f"A transformer of {parameters / 1e6:.1f} M parameters learns Python from the standard library's sources.\n"
        f"With AdamW's moments it has {parameters * 3 * 4 / 1e6:.0f} MB of state, which FSDP2 shards. For each save:\n"
        f"   stall          how long training waited\n"
        f"   durable after  how long until the whole checkpoint was on disk, while training continued"
    )


# --- running -------------------------------------------------------------------------------------------------------


def _launch(
    name: str,
    ranks: int,
    *,
    resumes: bool = False,
    saves: bool = False,
    kill_at: int | None = None,
    kill_after: int | None = None,
    checkpoints: Path = _CHECKPOINTS,
) -> Run:
    """Runs the job on this many processes, to its end or until it is killed: in the save of a step, or after a step."""
    run = Run(name, ranks)
    table = Table(run, saves=saves, every=_SAVE_EVERY)
    rendezvous = _OUTPUT / "rendezvous"
    survives = checkpoints == _SURVIVED
    where = checkpoints if saves or resumes else None
    job = Job(_STEPS, rendezvous, where, _SAVE_EVERY if saves else 0, survives)
    receiving, sending = Pipe(duplex=False)
    context = spawn(train, args=(ranks, job, sending), nprocs=ranks, join=False)
    sending.close()  # so that the pipe ends when the ranks have ended
    try:
        for event in _events(context, receiving):
            run.add(event)
            table.show(event)
            if isinstance(event, Saving) and event.step == kill_at:
                table.show_kill(event.step, _kill_in_mid_save(context, _CHECKPOINTS / f"step-{kill_at:06}"))
                run.killed_in_save = kill_at
                break
            if isinstance(event, Stepped) and event.step == kill_after:
                _kill(context)
                table.show_death(event.step)
                break
    finally:
        for process in context.processes:
            process.kill()
            process.join()
        rendezvous.unlink(missing_ok=True)
    return run


def _events(context: ProcessContext, receiving: Connection) -> Iterator[Event]:
    """Yields the events of rank 0 until every rank has ended. Raises the error of any rank."""
    with receiving:
        while True:
            if not receiving.poll(0.1):
                context.join(timeout=0)
                continue
            try:
                yield receiving.recv()
            except EOFError:
                break
    while not context.join():
        pass


def _kill_in_mid_save(context: ProcessContext, checkpoint: Path) -> str:
    """Kills all ranks while data is being written and nothing is committed. Describes the files that remain.

    A data file shows that every rank has staged its state: the ranks plan the save after that.
    """
    children = psutil.Process().children(recursive=True)
    writers = [child for child in children if "dcp_tensorizer._writer_process.worker" in child.cmdline()]
    _wait_until(lambda: any(checkpoint.glob("*.tensors")), f"no data file appeared in {checkpoint}")
    _kill(context)
    # The demo does not kill the writer processes: they must end after their trainers.
    _wait_until(lambda: not any(map(_runs, writers)), f"writer processes have outlived their trainers: {writers}")
    if (checkpoint / ".metadata").exists():
        raise DemoError(f"{checkpoint} was committed before the kill: the save was too fast for this demo")
    files = len(list(checkpoint.glob("*.tensors")))
    return f"{checkpoint.name}: {files} of {len(writers)} data files, no .metadata, and no process that writes"


def _kill(context: ProcessContext) -> None:
    """Kills all ranks."""
    for pid in context.pids():
        os.kill(pid, signal.SIGKILL)
    for process in context.processes:
        process.join()
        if process.exitcode != -signal.SIGKILL:
            raise DemoError(f"a rank ended with exit code {process.exitcode} before it could be killed")


def _wait_until(condition: Callable[[], bool], failure: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise DemoError(failure)
        time.sleep(0.001)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- checking ------------------------------------------------------------------------------------------------------


def _check(runs: Runs) -> None:
    """Prints the result of each check.

    Raises:
        DemoError: a check failed.
    """
    print("\nChecks")
    _check_state(runs.killed, runs.resumed)
    _check_state(runs.killed, runs.resumed_on_fewer)
    _check_identical(runs.killed, runs.undisturbed)
    _check_identical(runs.resumed, runs.undisturbed)
    _check_close(runs)
    _check_memory(runs.killed_between_saves, runs.resumed_from_memory, runs.undisturbed)
    if runs.host_lost is not None and runs.resumed_elsewhere is not None:
        _check_memory(runs.host_lost, runs.resumed_elsewhere, runs.undisturbed, "a host lost")


def _check_memory(killed: Run, resumed: Run, undisturbed: Run, how: str = "killed") -> None:
    last, saved = max(killed.losses), max(killed.saved, default=0)
    if resumed.loaded is None or resumed.loaded.step < last - 2:  # the last step was still being staged
        raise DemoError(f"{resumed.name}: {how} after step {last}, and resumed from {resumed.loaded}")
    if any(resumed.losses[step] != undisturbed.losses[step] for step in resumed.losses):
        raise DemoError(f"{resumed.name}: the losses differ from the undisturbed ones")
    print(
        f"   ok  {how} after step {last}, resumed from memory at step {resumed.loaded.step} "
        f"(storage alone: step {saved}): losses = undisturbed ones, bit for bit"
    )


def _check_state(killed: Run, resumed: Run) -> None:
    loaded = resumed.loaded
    if loaded is None or loaded.digest != killed.saving[loaded.step].digest:
        raise DemoError(f"{resumed.name}: the loaded state differs from the saved one")
    print(
        f"   ok  state loaded on {resumed.ranks} ranks = state saved by {killed.ranks}, bit for bit "
        f"(SHA-256 {loaded.digest[:16]}...)"
    )


def _check_identical(run: Run, undisturbed: Run) -> None:
    difference = largest_difference(run, undisturbed)
    what = f"{'resumed' if run.loaded else 'killed'} on {run.ranks} ranks, steps {min(run.losses)}-{max(run.losses)}"
    if difference:
        raise DemoError(f"{what}: the losses differ from the undisturbed ones by up to {difference:.1e}")
    print(f"   ok  {what}: losses = undisturbed ones, bit for bit")


def _check_close(runs: Runs) -> None:
    fewer = runs.resumed_on_fewer
    by_order = largest_difference(runs.undisturbed_on_fewer, runs.undisturbed)
    difference = largest_difference(fewer, runs.undisturbed)
    what = f"resumed on {fewer.ranks} ranks, steps {min(fewer.losses)}-{max(fewer.losses)}"
    if difference > _TOLERANCE * by_order:
        raise DemoError(
            f"{what}: the losses differ by up to {difference:.1e}; the order of additions alone causes {by_order:.1e}"
        )
    print(
        f"   ok  {what}: largest difference of the losses {difference:.1e}\n"
        f"       (run 5 against run 1: the order in which {fewer.ranks} ranks add up gradients causes {by_order:.1e})"
    )


if __name__ == "__main__":
    main()
