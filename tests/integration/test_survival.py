"""Restarts of a manager's job from memory, in one process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tensorizer import EncryptionParams

from dcp_tensorizer import (
    CheckpointError,
    CheckpointManager,
    Export,
    MetadataError,
    SaveLimits,
    StateMismatch,
    WriteError,
    open_reader,
)
from dcp_tensorizer._index.container import committed
from dcp_tensorizer._memory import runtime_directory, survival
from dcp_tensorizer._memory.client import KeeperConnection, KeeperProcess, connect_to_keepers
from dcp_tensorizer._memory.protocol import Extent, StateHead, StatePart
from dcp_tensorizer._runtime.threads import Deadline
from dcp_tensorizer._saving.engine import engine_of_process
from dcp_tensorizer._saving.save import Save
from dcp_tensorizer._saving.write_plan import Item
from dcp_tensorizer._staging.shared_memory import SharedBuffer
from dcp_tensorizer._storage.local import LocalStorage
from dcp_tensorizer._tensor_file.digests import Digester
from dcp_tensorizer._tensor_file.names import block_size
from dcp_tensorizer._writer_process.protocol import WriteDone

from ..lab.processes import keepers_below, memory_files
from ..lab.seams import wait_held, wait_until_save_is_awaited
from ..lab.waiting import WAIT, Gate


def manager_of(folder: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(folder, **{"stop_signals": (), "survive": WAIT, "survive_every": 1} | options)


def state_of(value: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((1000,), float(value))}, "step": value}


def step_of(state: dict[str, Any]) -> int:
    """Returns the step of a state."""
    assert state["model"]["w"].unique().tolist() == [float(state["step"])]
    return int(state["step"])


def fail(folder: Path, *steps: int, **options: Any) -> None:
    """Runs some steps, none of which is due, and fails, which leaves them in memory."""
    with suppress(ZeroDivisionError), manager_of(folder, **{"save_every": 1000} | options) as manager:
        manager.restore(state_of(0))
        for step in steps:
            manager.save(step, state_of(step))
        raise ZeroDivisionError


def test_a_new_optimizer_gets_its_state_from_memory(tmp_path: Path, sockets: Path) -> None:
    """A new optimizer gets its state from memory as from storage: bit for bit, in its own dtypes, without a step.

    An optimizer with another number of parameters is refused before, and the state stays in memory.
    """
    weight = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    optimizer, new = torch.optim.NAdam([weight]), torch.optim.NAdam([weight])
    weight.grad = torch.rand(1000).bfloat16()
    optimizer.step()
    optimizer.state[weight]["exp_avg"] = torch.rand(1000)
    with suppress(ZeroDivisionError), manager_of(tmp_path / "run", save_every=1000) as manager:
        manager.save(3, {"optimizer": optimizer})
        raise ZeroDivisionError
    with manager_of(tmp_path / "run", save_every=1000) as manager:
        more = torch.optim.NAdam([weight, torch.nn.Parameter(torch.ones(3))])
        with pytest.raises(StateMismatch, match=r"group 0 of 'optimizer' has 1 parameter in the checkpoint and 2 in"):
            manager.restore({"optimizer": more}, strict=False)
        assert more.state_dict()["state"] == {}
        assert manager.restore({"optimizer": new}) == 3
        torch.testing.assert_close(new.state_dict(), optimizer.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("stored", [0, 1], ids=["no checkpoint", "an older checkpoint"])
def test_a_slip_does_not_cost_what_is_in_memory(tmp_path: Path, sockets: Path, stored: int) -> None:
    """After an error for an unknown pattern or a missing key, a second restore loads the state from memory."""
    if stored:
        with manager_of(tmp_path / "run", survive=0, survive_every=None) as manager:
            manager.save(stored, state_of(stored), wait=True)
    fail(tmp_path / "run", 8, 9)
    with manager_of(tmp_path / "run", save_every=1000) as manager:
        with pytest.raises(MetadataError, match=r"no key of the state matches 'modle\.\*'"):
            manager.restore(state_of(0), include=["modle.*"])
        with pytest.raises(CheckpointError, match="other"):
            manager.restore(state_of(0) | {"other": torch.zeros(3)})
        state = state_of(0)
        assert (manager.restore(state), step_of(state)) == (9, 9)


def test_a_run_that_is_suspended_counts_as_alive(
    tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run is refused if a keeper does not answer, with the socket's path, and asks again later."""
    fail(tmp_path / "run", 8, 9)
    (keeper,) = keepers_below(sockets)
    keeper.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(survival, "_ANSWER_SECONDS", 0.1)
    state = state_of(0)
    with manager_of(tmp_path / "run", save_every=1000) as manager:
        with pytest.raises(WriteError, match=f"its keeper on .* does not answer at {sockets}/"):
            manager.restore(state)
        monkeypatch.undo()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(sockets.parent))
        keeper.send_signal(signal.SIGCONT)
        assert (manager.restore(state), step_of(state)) == (9, 9)


def test_a_machine_without_any_directory_for_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No state is held, the log has the reason, and steps are saved to storage and restored from it."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(runtime_directory.tempfile, "gettempdir", _no_directory)
    for before, step in ((None, 1), (1, 2)):
        with manager_of(tmp_path / "run", save_every=1) as manager:
            assert manager.restore(state_of(0)) == before
            manager.save(step, state_of(step), wait=True)
            assert manager.latest() == step
    assert len([m for m in caplog.messages if f"survive={WAIT:g} is off" in m and "No usable temporary" in m]) == 2


def _no_directory() -> str:
    raise FileNotFoundError("No usable temporary directory found")


def test_managers_side_by_side(tmp_path: Path, sockets: Path) -> None:
    """A manager that closes does not take the staging buffers of another one."""
    saves = engine_of_process(devices=False).saves
    with manager_of(tmp_path / "a", buffers=3) as manager:
        manager.save(1, state_of(1), wait=True)
        for options in ({"survive": 0, "survive_every": None}, {"buffers": 2, "survive_every": None}):
            with manager_of(tmp_path / "b", **options) as other:
                other.save(1, state_of(1), force=True)
            assert list(saves.spares.values()) == [2]
    assert list(saves.spares.values()) == []


@pytest.mark.parametrize("every", [2, 1000], ids=["exports", "no export is due"])
def test_a_job_that_exports_has_no_more_buffers_than_it_may(
    tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """The number of staging buffers stays the same if `wait` writes steps that were due during a save."""
    counts, write_items = list[int](), Save.write_items

    def waits(save: Save, items: Sequence[Item]) -> WriteDone:
        if threading.current_thread() is not threading.main_thread():  # an export writes on the thread of its save
            wait_until_save_is_awaited()
        return write_items(save, items)

    monkeypatch.setattr(Save, "write_items", waits)
    export = Export(tmp_path / "model", include=["model.*"], every=every, at_end=False, overwrite=True)
    with manager_of(tmp_path / "run", save_every=1, survive_every=None, export=export) as manager:
        for step in range(1, 11):
            manager.save(step, state_of(step))
            if step % 2 == 0:
                assert manager.latest() == step - 1  # this step is only in memory
                manager.wait()
                assert manager.latest() == step
                counts.append(len(memory_files()))
    assert len(set(counts[1:])) == 1  # the second pair of steps has all buffers that later ones need


def test_a_part_is_saved_when_the_job_goes_back(tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that was held in memory is also saved only in part."""
    gate, write_items = Gate(), Save.write_items

    def waits(save: Save, items: Sequence[Item]) -> WriteDone:
        gate.pass_through()
        return write_items(save, items)

    monkeypatch.setattr(Save, "write_items", waits)
    with manager_of(tmp_path / "run", save_every=1) as manager:
        manager.save(5, state_of(5))
        gate.wait_reached()
        assert manager.save(6, state_of(6), exclude=["step"]) is None
        gate.open()
        manager.save(3, state_of(3), exclude=["model.*"], wait=True)
        paths = {step: manager.path(step) for step in (5, 6, 3)}
    keys = {step: set(open_reader(path).read_metadata().state_dict_metadata) for step, path in paths.items()}
    assert keys == {5: {"model.w", "step"}, 6: {"model.w"}, 3: {"step"}}


def test_a_job_that_has_gone_back_and_dies(tmp_path: Path, sockets: Path) -> None:
    """The next two runs resume from memory, on the new branch."""
    with manager_of(tmp_path / "run", save_every=5) as manager:
        for step in range(1, 11):
            manager.save(step, state_of(step), wait=True)
    with suppress(ZeroDivisionError), manager_of(tmp_path / "run", save_every=1000) as manager:
        assert manager.restore(state_of(0), step=5) == 5
        manager.save(6, state_of(60))
        raise ZeroDivisionError
    fail(tmp_path / "run", 7)
    with manager_of(tmp_path / "run", save_every=1000) as manager:
        assert (manager.restore(state_of(0)), manager.steps()) == (7, [5])
        manager.save(8, state_of(8), force=True, wait=True)
        assert manager.steps() == [5, 8]
    record = committed(LocalStorage(tmp_path / "run" / "step-8")).head
    parent = committed(LocalStorage(tmp_path / "run" / "step-5")).head
    assert record.record is not None
    assert record.record.parent == parent.save_id


def mixed_state() -> dict[str, Any]:
    """Returns tensors of several blocks, one block, one and no element, two views of one storage, and an object."""
    large, pair = torch.rand(2_000_000), torch.rand(100)
    small = {"half": torch.rand(77).bfloat16(), "scalar": torch.tensor(3), "empty": torch.empty(0)}
    return {"large": large, **small, "pair": pair, "first": pair[:10], "text": "some", "step": 1}


@pytest.mark.parametrize("encrypts", [False, True])
def test_the_digests_of_a_save_are_those_that_the_keeper_would_take(
    tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch, encrypts: bool
) -> None:
    """A save sends the digests of the buffer. An encrypted save sends none, and the keeper computes them."""
    told: list[tuple[str, Any]] = []
    tell = KeeperProcess.written

    def written(process: KeeperProcess, number: str, known: Any) -> None:
        told.append((number, known))
        tell(process, number, known)

    monkeypatch.setattr(KeeperProcess, "written", written)
    with manager_of(
        tmp_path / "run", survive_every=None, encryption=EncryptionParams.random() if encrypts else None
    ) as manager:
        manager.save(1, mixed_state(), wait=True)
        wait_held(manager)  # the keeper may be told of it when it has been written
        number, known = told[0]
        assert told == told[:1] * len(told)
        content, digests = taken_from(sockets, number)
        expected = {(extent.offset, extent.nbytes): own for extent, own in digests.items() if not extent.is_inline}
        assert len(expected) == 5 and known == ({} if encrypts else expected)
        assert dict(zip(content.extents, content.digests, strict=True)) == digests


def taken_from(sockets: Path, number: str) -> tuple[StatePart, dict[Extent, bytes]]:
    """Returns a part of a state as a keeper sends it, and the digests of its bytes."""
    (path,) = sockets.iterdir()
    connection = runtime_directory.connect(path)
    assert connection is not None
    with closing(KeeperConnection(connection)) as keeper:
        keeper.wait_listed(WAIT)
        content, buffer = keeper.part(number, 0)
    digests = {}
    for extent in content.extents:
        digester = Digester(block_size(extent.nbytes))
        inline = content.inline[extent.offset :][: extent.nbytes]
        digester.update(
            memoryview(inline if extent.is_inline else os.pread(buffer.number, extent.nbytes, extent.offset))
        )
        digests[extent] = digester.digests()
    buffer.close()
    return content, digests


def test_a_keeper_that_is_stopped_holds_up_no_save(
    tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the keeper does not take the digests, the save is committed, and the keeper is killed."""
    stopped = []
    write_items = Save.write_items

    def stop_and_write(save: Save, items: Sequence[Item]) -> WriteDone:
        (keeper,) = keepers_below(sockets)
        keeper.send_signal(signal.SIGSTOP)
        stopped.append(keeper)
        return write_items(save, items)

    monkeypatch.setattr(Save, "write_items", stop_and_write)
    with manager_of(tmp_path / "run", survive_every=None, limits=SaveLimits(timeout=3.0)) as manager:
        manager.save(1, state_of(1), wait=True)
        stopped[0].wait(WAIT)
    loaded = state_of(0)
    dcp.load(loaded, storage_reader=open_reader(tmp_path / "run" / "step-1"))
    assert step_of(loaded) == 1


def test_a_stopped_keeper_holds_up_training_no_longer_than_the_limit(tmp_path: Path, sockets: Path) -> None:
    """If the keeper does not answer a request to forget a state, it is killed, and training continues."""
    started = time.monotonic()
    with manager_of(tmp_path / "run", limits=SaveLimits(timeout=3.0)) as manager:
        manager.save(1, state_of(1), wait=True)
        (keeper,) = keepers_below(sockets)
        keeper.send_signal(signal.SIGSTOP)
        for step in range(2, 6):
            manager.save(step, state_of(step))
    assert time.monotonic() - started < 50
    keeper.wait(WAIT)


def test_a_keeper_that_can_make_no_socket(tmp_path: Path, sockets: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a keeper ends at its start, one warning of one line has the reason, and saves go on."""
    sockets.mkdir(mode=0o755)
    with manager_of(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(step, state_of(step), wait=True)
        assert manager.steps() == [1, 2]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert f"; the end of its output: {sockets} is not a directory that belongs to this user alone" in warning
    assert "\n" not in warning


@pytest.mark.parametrize("goes_on", ["before it is left", "afterwards"])
def test_a_keeper_is_left_while_it_is_told_digests(sockets: Path, goes_on: str) -> None:
    """A keeper that its trainer leaves while it sends digests stays alive with its states."""
    head = StateHead("a", 1, "run", 0, 1, None)
    with closing(SharedBuffer(4096)) as buffer:
        process = KeeperProcess("job", "run", WAIT)
        part = StatePart(head, buffer.nbytes, (Extent(False, 0, 100),), b"", b"", digests_follow=True)
        process.hold(part, buffer)
        (keeper,) = keepers_below(sockets)
        if goes_on == "afterwards":
            keeper.send_signal(signal.SIGSTOP)
        process.written("a", {(0, 100): b"of a save"})
        process.leave(Deadline(0.1))
        keeper.send_signal(signal.SIGCONT)
        for thread in threading.enumerate():
            if thread.name == "digests":
                thread.join(WAIT)
        (connection,), silent = connect_to_keepers("job", WAIT)
        with closing(connection):
            assert (connection.found.heads, silent) == ((head,), [])
            connection.end()
        keeper.wait(WAIT)
