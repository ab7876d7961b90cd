"""Buffers are reused when their saves are over; saves run one at a time, in the order of staging."""

from __future__ import annotations

import pickle
import threading

import pytest
import torch

from dcp_tensorizer._runtime.threads import Deadline
from dcp_tensorizer._staging.saves import StagedSaves
from dcp_tensorizer._staging.staged_save import StagedSave, StagedStateDict
from dcp_tensorizer._staging.stager import Stager

from ...lab.processes import memory_files
from ...lab.waiting import WAIT, Gate, hold_memory, in_thread, wait_until_inside
from .staging import inode


def test_a_turn_begins_after_the_save_in_progress(stager: Stager) -> None:
    """The next turn begins when the thread that took the staged state dict has ended."""
    first = stager.stage({"a": torch.ones(2)})
    taken, release, turn = threading.Event(), threading.Event(), threading.Event()

    def save() -> None:
        first.items()
        taken.set()
        assert release.wait(WAIT)

    def wait() -> None:
        stager.saves.wait_turn(stager)
        turn.set()

    saving = in_thread(save)
    assert taken.wait(WAIT)
    waiting = in_thread(wait)
    wait_until_inside(waiting, StagedSaves.wait_turn)
    assert not turn.is_set()
    release.set()
    assert turn.wait(WAIT)
    saving.join(WAIT)
    waiting.join(WAIT)


def test_a_buffer_is_used_again_once_its_save_is_over(stager: Stager) -> None:
    """A save of the same size or less reuses the memory file, even while the state dict of the ended thread exists."""
    first = stager.stage({"a": torch.ones(5000)})
    number = inode(first)
    in_thread(first.items).join(WAIT)
    second = stager.stage({"a": torch.zeros(5000)})
    assert inode(second) == number
    assert first.staged_save.buffer is None
    in_thread(second.items).join(WAIT)
    third = stager.stage({"b": torch.full((10,), 3.0)})
    assert inode(third) == number
    assert second.staged_save.buffer is None
    assert dict(third)["b"].tolist() == [3.0] * 10


def test_the_next_save_has_tensors_over_the_same_memory_unless_the_last_was_pickled(stager: Stager) -> None:
    """The buffer retains its tensors between saves. Pickling releases them: torch.multiprocessing moves them."""
    first = stager.stage({"a": torch.ones(5)})
    buffer = first.staged_save.buffer
    assert buffer is not None
    in_thread(first.items).join(WAIT)
    del first
    assert buffer._layout is not None
    second = stager.stage({"a": torch.full((5,), 2.0)})
    assert second.staged_save.buffer is buffer
    assert second["a"].tolist() == [2.0] * 5
    assert pickle.loads(pickle.dumps(second))["a"].tolist() == [2.0] * 5
    assert buffer._layout is None


def test_a_buffer_grows_with_the_state_dict(stager: Stager) -> None:
    """A larger state dict gets a larger buffer, and the smaller one is freed."""
    first = stager.stage({"a": torch.ones(10)})
    assert first.staged_save.buffer is not None
    assert first.staged_save.buffer.nbytes == 4096
    small = inode(first)
    del first
    before = len(memory_files())
    second = stager.stage({"a": torch.ones(5120), "b": torch.ones(1, dtype=torch.uint8)})
    assert second.staged_save.buffer is not None
    assert second.staged_save.buffer.nbytes == 24576  # 20,480 and 64 bytes, in whole pages
    assert inode(second) != small
    assert len(memory_files()) == before


def test_without_a_cache_memory_is_freed_between_saves() -> None:
    """Each save allocates its memory, and the next save frees it."""
    stager, before = Stager(cache_staged_state_dict=False), len(memory_files())
    first = stager.stage({"a": torch.ones(10)})
    number = inode(first)
    in_thread(first.items).join(WAIT)
    del first
    second = stager.stage({"a": torch.ones(10)})
    assert inode(second) != number
    assert len(memory_files()) == before + 1
    del second
    stager.saves.close()
    assert len(memory_files()) == before


def test_a_staged_state_dict_that_no_save_takes(stager: Stager) -> None:
    """Its buffer is not overwritten. The next turn begins after a timeout, with a new buffer."""
    stager.saves.take_seconds = 0.01
    first = stager.stage({"a": torch.ones(4)})
    waiting = in_thread(lambda: stager.saves.wait_turn(stager))
    waiting.join(WAIT)
    assert not waiting.is_alive()
    second = stager.stage({"a": torch.zeros(4)})
    assert inode(second) != inode(first)
    assert dict(first)["a"].tolist() == [1.0] * 4
    assert dict(second)["a"].tolist() == [0.0] * 4


def test_a_dropped_staged_state_dict_frees_its_buffer_at_once(stager: Stager) -> None:
    """A staged state dict without references does not delay the next save."""
    stager.saves.take_seconds = 2 * WAIT
    first = stager.stage({"a": torch.ones(4)})
    number = inode(first)
    del first
    waiting = in_thread(lambda: stager.saves.wait_turn(stager))
    waiting.join(WAIT)
    assert not waiting.is_alive()
    assert inode(stager.stage({"a": torch.zeros(4)})) == number


def test_dropping_a_staged_state_dict_ends_the_wait_for_its_save(stager: Stager) -> None:
    """A thread that waits for the save continues when the dict is dropped."""
    stager.saves.take_seconds = 2 * WAIT
    states = [stager.stage({"a": torch.ones(4)})]
    waiting = in_thread(lambda: stager.saves.wait_turn(stager))
    wait_until_inside(waiting, StagedSave.wait_taken)
    states.clear()
    waiting.join(WAIT)
    assert not waiting.is_alive()


def test_a_tensor_kept_from_a_dropped_staged_state_dict_keeps_the_buffer(stager: Stager) -> None:
    """A custom save that took the tensors out of the dict still owns their memory."""
    first = stager.stage({"a": torch.ones(4)})
    number, tensor = inode(first), dict(first)["a"]
    del first
    second = stager.stage({"a": torch.zeros(4)})
    assert inode(second) != number
    assert tensor.tolist() == [1.0] * 4
    del tensor, second
    assert inode(stager.stage({"a": torch.zeros(4)})) == number


@pytest.mark.parametrize(
    ("groups", "waits"), [(("0", "1"), False), (("0", "0"), True), (("0", None), True), ((None, "1"), True)]
)
def test_only_saves_of_one_process_group_wait_for_each_other(
    stager: Stager, groups: tuple[str | None, str | None], waits: bool
) -> None:
    """Ranks may have staged saves of other groups in another order. An unknown group may be the same."""
    gate, saved = Gate(), threading.Event()
    staged = [stager.stage({"a": torch.full((1000,), float(value))}) for value in range(2)]
    for state, group in zip(staged, groups, strict=True):
        state.staged_save.group = group

    def save_first() -> None:
        staged[0].items()
        gate.pass_through()

    def save_second() -> None:
        staged[1].items()
        saved.set()

    saving = [in_thread(save_first)]
    gate.wait_reached()
    saving.append(in_thread(save_second))
    if waits:
        wait_until_inside(saving[1], StagedSaves.wait_turn)
        assert not saved.is_set()
        gate.open()
    assert saved.wait(WAIT)
    gate.open()
    for thread in saving:
        thread.join(WAIT)
    assert [dict(state)["a"][0].item() for state in staged] == [0.0, 1.0]


def test_saves_run_in_the_order_in_which_they_were_staged(stager: Stager) -> None:
    """A save whose thread starts first waits for the save that was staged before it."""
    first, second = stager.stage({"a": torch.ones(1)}), stager.stage({"a": torch.zeros(1)})
    order: list[str] = []
    first_began, release = threading.Event(), threading.Event()

    def save_second() -> None:
        second.items()
        order.append("second begins")

    def save_first() -> None:
        first.items()
        order.append("first begins")
        first_began.set()
        assert release.wait(WAIT)
        order.append("first ends")

    saving_second = in_thread(save_second)
    wait_until_inside(saving_second, StagedSaves.wait_turn)
    saving_first = in_thread(save_first)
    assert first_began.wait(WAIT)
    wait_until_inside(saving_second, StagedSave.wait_over)
    release.set()
    saving_first.join(WAIT)
    saving_second.join(WAIT)
    assert order == ["first begins", "first ends", "second begins"]


def test_many_saves_run_in_order_whichever_thread_starts_first(stager: Stager) -> None:
    """Six staged saves, started last to first, run one at a time, in order, each with its own values."""
    saves = [stager.stage({"a": torch.full((100,), float(n))}) for n in range(6)]
    seen: list[float] = []
    running = threading.Lock()

    def save(staged_state: StagedStateDict) -> None:
        ((_, tensor),) = staged_state.items()
        assert running.acquire(blocking=False)
        seen.append(tensor.sum().item() / 100)
        running.release()

    threads = [in_thread(lambda s=s: save(s)) for s in reversed(saves)]  # type: ignore[misc]
    for thread in threads:
        thread.join(WAIT)
    assert seen == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_save_that_never_starts_does_not_hold_up_the_next(stager: Stager) -> None:
    """The next save waits for it once, for the time in which a process starts. Later saves do not wait."""
    stager.saves.start_seconds = 0.01
    lost = stager.stage({"a": torch.ones(1)})
    later = [stager.stage({"a": torch.full((1,), float(n))}) for n in range(3)]
    seen: list[float] = []

    def save(state: StagedStateDict) -> None:
        ((_, tensor),) = state.items()
        seen.append(tensor.item())

    for state in later:
        in_thread(lambda state=state: save(state)).join(WAIT)  # type: ignore[misc]
        stager.saves.start_seconds = 2 * WAIT
    assert seen == [0.0, 1.0, 2.0]
    assert lost.staged_save.abandoned
    assert dict(lost)["a"].tolist() == [1.0]


def test_a_save_on_the_staging_thread_is_over_at_the_next_staging(stager: Stager) -> None:
    """A thread that stages and saves has finished its save when it stages again."""
    first = stager.stage({"a": torch.ones(1)})
    first.items()
    stager.saves.wait_turn(stager)
    assert stager.saves.drain(stager, Deadline(0.0))
    second = stager.stage({"a": torch.zeros(1)})
    assert dict(first)["a"].tolist() == [1.0]
    assert inode(second) != inode(first)


def test_closing_frees_the_memory_when_the_last_staged_tensor_is_gone() -> None:
    """The memory of a running save stays valid after `close`, and is freed with its last tensor."""
    stager, before = Stager(), len(memory_files())
    result = stager.stage({"a": torch.ones(100)})
    stager.saves.close()
    assert dict(result)["a"].tolist() == [1.0] * 100
    del result
    assert len(memory_files()) == before


@pytest.mark.parametrize("what", ["wait_turn", "stage"])
def test_a_staging_waits_for_one_that_has_no_memory_yet(
    overlapping: Stager, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The earlier staging may take the idle buffer."""
    gate = Gate()
    hold_memory(monkeypatch, gate.pass_through)
    overlapping.saves.take_seconds = 0.0
    first = overlapping.stage({"a": torch.ones(4)})
    gate.wait_reached()
    second: list[StagedStateDict] = []
    next_one = {
        "wait_turn": lambda: overlapping.saves.wait_turn(overlapping),
        "stage": lambda: second.append(overlapping.stage({"a": torch.zeros(4)})),
    }
    waiting = in_thread(next_one[what])
    wait_until_inside(waiting, StagedSave.wait_built)
    gate.open()
    waiting.join(WAIT)
    assert not waiting.is_alive()
    first.staged_save.wait_copied()
    assert dict(first)["a"].tolist() == [1.0] * 4
    for state in second:
        state.staged_save.wait_copied()
        assert dict(state)["a"].tolist() == [0.0] * 4


def test_a_buffer_that_is_kept_is_not_written_to(stager: Stager) -> None:
    """A buffer with `is_kept` is not reused until that is false."""
    first = stager.stage({"a": torch.ones(4)}, is_kept=True)
    number, buffer = inode(first), first.staged_save.buffer
    assert buffer is not None
    del first
    second = stager.stage({"a": torch.zeros(4)})
    other = inode(second)
    assert other != number
    del second
    buffer.is_kept, stager.saves.spares[stager] = False, 2
    staged = [stager.stage({"a": torch.ones(4)}) for _ in range(2)]
    assert {inode(copy) for copy in staged} == {number, other}
