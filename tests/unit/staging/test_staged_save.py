"""`StagedSave`: when its values may be read, when training may change the state, and which thread saves it."""

from __future__ import annotations

import gc
import pickle
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from dcp_tensorizer import StagingError
from dcp_tensorizer._runtime.threads import Deadline, is_running
from dcp_tensorizer._staging.shared_mappings import SharedWay
from dcp_tensorizer._staging.staged_save import StagedSave, StagingFuture
from dcp_tensorizer._staging.stager import Stager

from ...lab.processes import memory_files
from ...lab.waiting import WAIT, Gate, HeldTensor, in_thread, interrupted_inside, wait_until_inside


def test_overlapped_staging_returns_before_it_has_copied(overlapping: Stager) -> None:
    """The staged state dict exists at once. Its values come later, and only then may training change the state."""
    gate = Gate()
    live = HeldTensor(torch.ones(1000), gate.pass_through)
    result = overlapping.stage({"a": live, "n": 3})
    staging = StagingFuture(result)
    assert staging.result() is result
    assert dict(result)["n"] == 3
    gate.wait_reached()
    changed = threading.Event()

    def train() -> None:
        overlapping.hold_training()
        live.zero_()
        changed.set()

    training = in_thread(train)
    wait_until_inside(training, Stager.hold_training)
    assert not changed.is_set()
    assert not staging.done()
    gate.open()
    assert changed.wait(WAIT)
    result.staged_save.wait_copied()
    assert dict(result)["a"].tolist() == [1.0] * 1000
    assert staging.done()
    training.join(WAIT)


def test_objects_are_copied_before_overlapped_staging_returns(overlapping: Stager) -> None:
    """Contents of dicts and lists are copied at once. Only tensors must not change."""
    gate = Gate()
    held = HeldTensor(torch.ones(2), gate.pass_through)
    state: dict[str, Any] = {"trainer": {"step": 1, "seen": [1, 2], "t": held}}
    result = overlapping.stage(state)
    state["trainer"]["step"] = 2
    state["trainer"]["seen"].append(3)
    del state["trainer"]["t"]
    gate.open()
    result.staged_save.wait_copied()
    copied = dict(result)["trainer"]
    assert (copied["step"], copied["seen"], copied["t"].tolist()) == (1, [1, 2], [1.0, 1.0])


def test_a_future_is_done_even_if_its_callback_comes_late(overlapping: Stager) -> None:
    """A future that is made after the copies are complete is done."""
    result = overlapping.stage({"a": torch.ones(2)})
    overlapping.wait_released()
    staging = StagingFuture(result)
    told: list[bool] = []
    staging.add_done_callback(lambda future: told.append(future.done()))
    assert staging.done()
    assert told == [True]


def test_a_buffer_is_not_free_while_it_is_copied_to(overlapping: Stager) -> None:
    """A save that has ended early does not free a buffer of running copies."""
    gate = Gate()
    result = overlapping.stage({"a": HeldTensor(torch.ones(10), gate.pass_through)})
    saving = in_thread(result.items)
    gate.wait_reached()
    wait_until_inside(saving, StagedSave.wait_copied)
    assert not result.staged_save.over()
    assert not overlapping.saves.drain(overlapping, Deadline(0.05))
    gate.open()
    assert overlapping.saves.drain(overlapping, Deadline(WAIT))


def test_the_save_raises_an_error_of_overlapped_copying(overlapping: Stager) -> None:
    """Training continues, and the future is done."""

    def fail() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    result = overlapping.stage({"a": HeldTensor(torch.ones(10), fail)})
    staging = StagingFuture(result)
    overlapping.wait_released()
    with pytest.raises(StagingError, match="illegal memory access"):
        result.staged_save.wait_copied()
    assert staging.done()


def test_an_error_of_overlapped_staging_releases_training(overlapping: Stager) -> None:
    """If a value cannot be copied, no caller waits."""
    result = overlapping.stage({"lock": threading.Lock(), "a": torch.ones(3)})
    overlapping.hold_training()
    assert isinstance(result.staged_save.error, StagingError)
    assert StagingFuture(result).done()


def test_pickling_waits_for_the_copies(overlapping: Stager) -> None:
    """In PROCESS mode the pickle contains the values."""
    gate = Gate()
    result = overlapping.stage({"a": HeldTensor(torch.arange(3), gate.pass_through)})
    pickled: list[bytes] = []
    pickling = in_thread(lambda: pickled.append(pickle.dumps(result)))
    wait_until_inside(pickling, StagedSave.wait_copied)
    gate.open()
    pickling.join(WAIT)
    assert pickle.loads(pickled[0])["a"].tolist() == [0, 1, 2]


def test_dropping_the_future_frees_everything(overlapping: Stager) -> None:
    """A save that never starts holds its buffer only until the copies are complete."""
    gc.collect()  # what other tests have left in cycles, such as tracebacks
    before = len(memory_files())
    staging = StagingFuture(overlapping.stage({"a": torch.ones(10)}))
    overlapping.wait_released()
    del staging
    overlapping.saves.wait_turn(overlapping)
    overlapping.saves.close()
    gc.collect()
    assert len(memory_files()) == before


def test_a_save_that_ends_without_writing_releases_what_it_took() -> None:
    """Its future is done when its thread has ended, even if only the staged save refers to the future."""
    stager = Stager(way=SharedWay(), overlap_staging=True)
    shared = torch.ones(10).share_memory_()
    told = threading.Event()
    result = stager.stage({"a": shared})
    staged_save, staging = result.staged_save, StagingFuture(result)
    del result
    staging.add_done_callback(lambda future: told.set())
    began, end = threading.Event(), threading.Event()

    def save(taken: Mapping[str, Any]) -> None:
        taken.items()
        began.set()
        assert end.wait(WAIT)

    taken = staging.result()
    saving = in_thread(lambda state=taken: save(state))  # type: ignore[misc]
    assert began.wait(WAIT)
    del staging, taken  # only now: until a save has taken the state, the future is its caller's
    assert not staged_save.over()
    assert not told.is_set()
    end.set()
    assert told.wait(WAIT)
    saving.join(WAIT)
    stager.saves.close()


def test_a_save_is_begun_once_by_the_thread_that_took_it(stager: Stager) -> None:
    """Another thread, or the same thread a second time, gets no staged save."""
    result = stager.stage({"a": torch.ones(1)})
    assert stager.saves.begin(stager) is None
    result.items()
    begun_elsewhere: list[StagedSave | None] = []
    in_thread(lambda: begun_elsewhere.append(stager.saves.begin(stager))).join(WAIT)
    assert begun_elsewhere == [None]
    assert stager.saves.begin(stager) is result.staged_save
    assert stager.saves.begin(stager) is None


def test_pickling_takes_the_staged_state_dict(stager: Stager) -> None:
    """In PROCESS mode the save begins when DCP pickles the dict, which arrives as a plain dict."""
    result = stager.stage({"a": torch.arange(3), "b": {"c": 1}})
    copy = pickle.loads(pickle.dumps(result))
    assert type(copy) is dict
    assert (copy["a"].tolist(), copy["b"]) == ([0, 1, 2], {"c": 1})
    assert result.staged_save.thread is threading.current_thread()


def test_a_state_that_is_given_up_early_is_released_when_its_copies_are_made(overlapping: Stager) -> None:
    """A save that fails during copies does not release the state before they end."""
    gate = Gate()
    result = overlapping.stage({"a": HeldTensor(torch.ones(10), gate.pass_through)})
    staging = StagingFuture(result)
    gate.wait_reached()
    result.staged_save.release()
    waiting = in_thread(overlapping.wait_released)
    wait_until_inside(waiting, Stager.wait_released)
    assert not staging.done()
    gate.open()
    waiting.join(WAIT)
    assert staging.done()
    assert dict(result)["a"].tolist() == [1.0] * 10


def test_shared_tensors_are_released_by_their_save() -> None:
    """The end of the other tensors' copies does not release them."""
    stager = Stager(way=SharedWay())
    shared, private = torch.ones(10).share_memory_(), torch.ones(10)
    result = stager.stage({"shared": shared, "private": private})
    staged_save, staging = result.staged_save, StagingFuture(result)
    staged_save.wait_copied()
    waiting = in_thread(stager.hold_training)
    wait_until_inside(waiting, StagedSave.wait_released)
    assert not staging.done()
    assert staged_save.shared is not None
    staged_save.release()
    waiting.join(WAIT)
    assert staging.done()
    del result, staging
    stager.saves.close()


def test_a_state_without_shared_tensors_is_released_by_its_copies() -> None:
    """The state is released when the copies end, also with `SharedWay`."""
    stager = Stager(way=SharedWay())
    result = stager.stage({"private": torch.ones(10)})
    assert result.staged_save.shared is None
    assert StagingFuture(result).done()
    del result
    stager.saves.close()


def test_a_future_does_not_hold_a_state_dict_that_a_save_has_taken(overlapping: Stager) -> None:
    """A reference to the future does not keep the buffer in use."""
    staging = StagingFuture(overlapping.stage({"a": torch.ones(10)}))
    taken = staging.result()
    staged_save = taken.staged_save  # type: ignore[attr-defined]
    taken.items()
    assert staging.result() == {}
    staged_save.wait_copied()
    staged_save.stager.join()  # it refers to the tensors until it ends
    assert not staged_save.over()
    del taken
    assert staged_save.over()


@pytest.mark.parametrize(
    "error", [RuntimeError("no memory"), StagingError("no memory")], ids=lambda e: type(e).__name__
)
def test_the_first_error_is_kept(error: Exception) -> None:
    """The first error is raised, as a `StagingError`, to all callers that wait."""
    staged_save = StagedSave()
    staged_save.fail(error)
    staged_save.fail(ValueError("later"))
    staged_save.finish()
    assert staged_save.wait_built()
    staged_save.wait_released()
    with pytest.raises(StagingError, match="no memory") as caught:
        staged_save.wait_copied()
    assert caught.value is not staged_save.error


def test_an_interrupted_wait_does_not_end_the_save(stager: Stager) -> None:
    """A save is over when its thread has ended, also after an interrupt of a thread that waited for it."""
    gate = Gate()
    staged = stager.stage({"a": torch.ones(10)})

    def save() -> None:
        staged.staged_save.take()
        gate.pass_through()

    saving = in_thread(save)
    gate.wait_reached()
    with interrupted_inside(StagedSave.wait_over):
        staged.staged_save.wait_over()
    assert not staged.staged_save.over()
    gate.open()
    assert staged.staged_save.wait_over(Deadline(WAIT))
    assert not is_running(saving)
