"""The engine of a process: what writers share, and when it starts and ends."""

from __future__ import annotations

import gc
import os
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from dcp_tensorizer import SaveLimits, TensorizerStorageReader, TensorizerStorageWriter, WriteError, unwrap
from dcp_tensorizer._runtime.channel import Channel
from dcp_tensorizer._runtime.threads import Deadline, in_background
from dcp_tensorizer._saving.engine import Engine, engine_of_process
from dcp_tensorizer._staging.staged_save import StagedSave
from dcp_tensorizer._tiers.target import FlushTarget
from dcp_tensorizer.writer import SaveReport

from ...lab.processes import memory_files, writer_process
from ...lab.waiting import WAIT, Gate, HeldPlanner, HeldTensor, in_thread, interrupted_inside

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def children() -> list[int]:
    return [child.pid for child in psutil.Process().children()]


def state(value: float, size: int = 1000) -> dict[str, torch.Tensor]:
    return {"w": torch.full((size,), value)}


def loaded(path: Path, size: int = 1000) -> float:
    result = state(0.0, size)
    dcp.load(result, storage_reader=TensorizerStorageReader(path))
    return float(result["w"].mean())


def test_a_writer_for_every_save_uses_one_process_and_one_buffer(tmp_path: Path) -> None:
    """A new writer for every save, never closed, uses the process and the buffer of the first."""
    before, buffers = children(), memory_files()
    with TensorizerStorageWriter(tmp_path / "kept") as kept:
        dcp.async_save(state(0.0), storage_writer=kept).result()
        (process,), buffer = set(children()) - set(before), memory_files() - buffers
        descriptors = len(os.listdir("/proc/self/fd"))
        writers = [TensorizerStorageWriter(tmp_path / "many") for _ in range(500)]
        for value, writer in enumerate(writers[:20]):
            dcp.async_save(state(float(value)), storage_writer=writer).result()
        assert set(children()) - set(before) == {process}
        assert memory_files() - buffers == buffer
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert loaded(tmp_path / "many") == 19.0
        del writers, writer
    gc.collect()
    assert children() == before
    assert memory_files() == buffers


def test_synchronous_saves_start_no_process(tmp_path: Path) -> None:
    """The first staging or `prewarm` starts the writer process; a constructor or a synchronous save does not."""
    before = children()
    with TensorizerStorageWriter(tmp_path) as writer:
        dcp.save(state(1.0), storage_writer=writer)
        assert children() == before
        writer.prewarm(state(1.0))
        assert len(children()) == len(before) + 1
    assert children() == before


def test_closing_one_writer_leaves_the_save_of_another_alone(tmp_path: Path) -> None:
    """`close` returns at once beside another writer's save, which continues; the last `close` ends the process."""
    before, gate = children(), Gate()
    with TensorizerStorageWriter(tmp_path / "slow") as slow:
        future = dcp.async_save(state(1.0), storage_writer=slow, planner=HeldPlanner(gate))
        gate.wait_reached()
        other = in_thread(lambda: _save_and_close(tmp_path / "quick"))
        other.join(WAIT)
        assert loaded(tmp_path / "quick") == 2.0
        process = writer_process().pid
        gate.open()
        future.result()
        assert (writer_process().pid, loaded(tmp_path / "slow")) == (process, 1.0)
    assert children() == before


def test_what_is_staged_while_the_engine_ends_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that another writer stages while `close` waits for the writer process retains its buffer and order."""
    gate, first = Gate(), TensorizerStorageWriter(tmp_path / "first")
    dcp.async_save(state(1.0), storage_writer=first).result()
    engine = first.saver.engine
    with TensorizerStorageWriter(tmp_path / "second") as second:

        def free(*arguments: Any) -> None:
            futures.append(dcp.async_save(state(2.0), storage_writer=second, planner=HeldPlanner(gate)))
            gate.wait_reached()
            Engine.free(engine, *arguments)

        futures: list[Any] = []
        with monkeypatch.context() as patched:
            patched.setattr(engine, "free", free)
            first.close()
        (future,), (saved,) = futures, engine.saves.of(second.saver.stager)
        assert saved.buffer is not None
        assert saved.buffer.fits(1)
        gate.open()
        future.result()
    assert (loaded(tmp_path / "first"), loaded(tmp_path / "second")) == (1.0, 2.0)


@pytest.mark.parametrize("save", [dcp.save, lambda *args, **options: dcp.async_save(*args, **options).result()])
@pytest.mark.parametrize("own", [True, False])
def test_a_signal_handler_cannot_save_while_it_interrupts_a_staging(tmp_path: Path, save: Any, own: bool) -> None:
    """The handler's save raises, with the writer that stages and with another one. The interrupted save succeeds."""

    def handle(*_: object) -> None:
        try:
            save(state(2.0), storage_writer=writer if own else other, checkpoint_id=tmp_path / "last")
        except BaseException as error:
            raised.append(str(unwrap(error)))

    raised: list[str] = []
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with TensorizerStorageWriter(tmp_path / "kept", thread_count=1) as writer, TensorizerStorageWriter() as other:
            held = {"w": HeldTensor(torch.full((1000,), 1.0), lambda: signal.raise_signal(signal.SIGUSR1))}
            dcp.async_save(held, storage_writer=writer).result()
    finally:
        signal.signal(signal.SIGUSR1, before)
    (error,) = raised
    assert "Set a flag in the handler, and save after the handler has returned." in error
    assert loaded(tmp_path / "kept") == 1.0
    assert not (tmp_path / "last").exists()


def _save_and_close(path: Path) -> None:
    with TensorizerStorageWriter(path) as writer:
        dcp.async_save(state(2.0), storage_writer=writer).result()


def test_saves_of_one_thread_run_in_order_whichever_writer_saves(tmp_path: Path) -> None:
    """A thread's second save to a path, by another writer, waits for the first and replaces it."""
    gate = Gate()
    with TensorizerStorageWriter(tmp_path) as first, TensorizerStorageWriter(tmp_path) as second:
        earlier = dcp.async_save(state(1.0), storage_writer=first, planner=HeldPlanner(gate))
        gate.wait_reached()
        later: list[Any] = []
        staging = in_thread(lambda: later.append(first.saver.stager.saves.wait_turn(second.saver.stager)))
        staging.join(WAIT)  # another thread, another writer: it need not wait
        assert later == [None]
        ordered = threading.Thread(target=gate.open)
        ordered.start()
        dcp.async_save(state(2.0), storage_writer=second).result()
        ordered.join(WAIT)
        assert earlier.done()
    assert loaded(tmp_path) == 2.0


def test_a_writer_that_is_abandoned_does_not_take_the_save_of_another_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a writer abandons its save, the killed process's work for another writer is repeated by a fresh process."""
    reports: list[SaveReport] = []
    with (
        TensorizerStorageWriter(tmp_path / "stays", on_report=reports.append) as stays,
        TensorizerStorageWriter(tmp_path / "abandoned") as abandoned,
    ):
        gate = Gate()
        given_up = dcp.async_save(state(1.0), storage_writer=abandoned, planner=HeldPlanner(gate))
        gate.wait_reached()
        process = writer_process()
        process.suspend()
        asked, wait = threading.Event(), Channel.answer
        monkeypatch.setattr(Channel, "answer", lambda *args, **options: (asked.set(), wait(*args, **options))[1])
        future: list[Any] = []
        saving = in_thread(lambda: future.append(dcp.async_save(state(2.0), storage_writer=stays)))
        saving.join(WAIT)
        assert asked.wait(WAIT)
        abandoned.close(timeout=0)
        gate.open()
        future[0].result()
        with pytest.raises(CheckpointException, match="closed"):
            given_up.result()
        assert [report.attempts for report in reports] == [2]
        assert writer_process().pid != process.pid
    assert loaded(tmp_path / "stays") == 2.0
    with pytest.raises(CheckpointException):
        loaded(tmp_path / "abandoned")


def test_failures_are_counted_over_the_writers_of_a_process(tmp_path: Path) -> None:
    """Failures count across writers, so a framework with a writer per save and ignored futures stops."""
    (tmp_path / "file").write_text("")
    limits = SaveLimits(max_consecutive_failures=2)
    with TensorizerStorageWriter(tmp_path / "good") as kept:
        dcp.async_save(state(1.0), storage_writer=kept).result()
        for _ in range(2):
            with TensorizerStorageWriter(tmp_path / "file" / "below", limits=limits) as writer:
                future = dcp.async_save(state(1.0), storage_writer=writer)
                with pytest.raises(CheckpointException):
                    future.result()
        with (
            TensorizerStorageWriter(tmp_path / "file" / "below", limits=limits) as writer,
            pytest.raises(WriteError, match="2 saves in a row were not committed"),
        ):
            dcp.async_save(state(1.0), storage_writer=writer)
    (tmp_path / "file").unlink()
    with TensorizerStorageWriter(tmp_path / "file" / "below", limits=limits) as writer:  # all were closed: it is known
        dcp.async_save(state(2.0), storage_writer=writer).result()
    assert loaded(tmp_path / "file" / "below") == 2.0


def test_with_overlap_the_lock_raises_after_failures_in_a_row(tmp_path: Path) -> None:
    """With overlap, `lock` raises the error once, on the training thread, and the next save is tried again."""
    (tmp_path / "file").write_text("")
    limits = SaveLimits(max_consecutive_failures=1)
    with TensorizerStorageWriter(tmp_path / "file" / "below", limits=limits, overlap_staging=True) as writer:
        for words in ("cannot create", "the last save was not committed"):
            response = dcp.async_save(state(1.0), storage_writer=writer)
            assert isinstance(response, AsyncSaveResponse)
            with pytest.raises(CheckpointException, match=words):
                response.upload_completion.result()
        with pytest.raises(WriteError, match="the last save was not committed"), writer.lock():
            pass
        (tmp_path / "file").unlink()
        response = dcp.async_save(state(2.0), storage_writer=writer)
        with writer.lock():
            pass
        assert isinstance(response, AsyncSaveResponse)
        response.upload_completion.result()
    assert loaded(tmp_path / "file" / "below") == 2.0


def test_there_is_one_engine_for_those_that_see_gpus_and_one_for_the_others() -> None:
    """Writers whose process sees GPUs share one engine, and all others another."""
    assert engine_of_process(devices=False) is engine_of_process(devices=False)
    assert engine_of_process(devices=False) is not engine_of_process(devices=True)


def test_a_user_that_is_gone_has_left() -> None:
    """A writer that was garbage-collected no longer counts as a user of the engine."""

    class User:
        pass

    engine, stays, dropped = Engine(), User(), User()
    engine.open(stays)
    engine.open(dropped)
    assert not engine.leave(stays)
    engine.open(stays)
    del dropped
    gc.collect()
    assert engine.leave(stays)


def test_whoever_is_interrupted_and_saves_again_leaves_the_save_in_progress_alone(tmp_path: Path) -> None:
    """After a Ctrl-C while `async_save` waits for the previous save, that save and a new one have their own values."""
    size = 1_000_000
    with TensorizerStorageWriter() as writer:
        dcp.async_save(state(0.0, size), storage_writer=writer, checkpoint_id=tmp_path / "warm").result()
        process = writer_process()
        process.suspend()
        first = dcp.async_save(state(1.0, size), storage_writer=writer, checkpoint_id=tmp_path / "first")
        with interrupted_inside(StagedSave.wait_over):
            dcp.async_save(state(2.0, size), storage_writer=writer, checkpoint_id=tmp_path / "second")
        assert not first.done()
        resuming = in_background(process.resume)
        dcp.async_save(state(3.0, size), storage_writer=writer, checkpoint_id=tmp_path / "third").result()
        resuming.result()
        first.result()
    assert [loaded(tmp_path / name, size) for name in ("first", "third")] == [1.0, 3.0]
    assert not (tmp_path / "second").exists()


def test_a_flush_that_another_has_replaced_starts_no_process_when_the_engine_has_ended(tmp_path: Path) -> None:
    """A flush that was replaced by one with other credentials starts no process after the engine has ended."""
    engine = Engine()
    both = [
        engine.flushing(FlushTarget(str(tmp_path / "l"), str(tmp_path / "r"), {}, timeout)) for timeout in (10.0, 20.0)
    ]
    assert both[0] is not both[1]
    engine.end_process(Deadline(0.0))
    assert [flushing._has_ended for flushing in both] == [True, True]


def test_a_writer_that_is_closed_while_it_starts_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another thread closes the writer during the start, the save is refused, and no process or memory is left."""
    writer = TensorizerStorageWriter(tmp_path)
    ensure, before = writer.saver._ensure_process, memory_files()

    def ensure_late() -> None:
        in_thread(writer.close).join(WAIT)
        ensure()

    monkeypatch.setattr(writer.saver, "_ensure_process", ensure_late)
    with pytest.raises(CheckpointException, match="closed"):
        dcp.async_save(state(1.0), storage_writer=writer).result()
    assert not writer.saver.engine.client.is_running
    assert memory_files() == before
