"""The states that are copied to other hosts, and when a copy counts."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from dcp_tensorizer import CheckpointManager, WriteError
from dcp_tensorizer._job.ranks import Agreement
from dcp_tensorizer._memory.copies import CopyOptions, MemoryVote, PeerCopies
from dcp_tensorizer._memory.protocol import Copy, CopyStatus, Plain
from dcp_tensorizer._memory.wire import Address
from dcp_tensorizer._runtime.channel import Done


class _Keeper:
    """Keeper whose status of copies the test sets."""

    is_ours = True

    def __init__(self) -> None:
        self.copied: list[tuple[str, str]] = []
        self.status = CopyStatus()
        self.has_dropped = False

    def ask(self, request: Copy | Plain, kind: type[Done | CopyStatus]) -> Done | CopyStatus:
        if request is Plain.COPY_STATUS:
            return self.status
        if isinstance(request, Copy):
            self.copied.append((request.id, request.confirmed))
            self.status = CopyStatus(request.id, is_running=True)
        else:
            assert request is Plain.DROP_COPIES
            self.has_dropped = True
        return Done()


def ready() -> tuple[PeerCopies, Any]:
    """Makes copies with a partner and enough memory."""
    copies = PeerCopies(Agreement(None), 2, CopyOptions())
    copies._partner, copies.is_ready = Address("10.0.0.2", 5, b""), True
    return copies, _Keeper()


def step(copies: PeerCopies, keeper: Any, state_id: str) -> bool:
    """Runs a step of training, whose state is held. Returns whether the state is copied."""
    copies.advance(copies.vote(keeper))
    copies.order(state_id)
    if is_copied := copies.ordered == state_id:
        copies.start(keeper)
    return is_copied


def test_one_after_the_other() -> None:
    """The next state is copied when the last one is copied from all ranks, and the last one stays until then."""
    copies, keeper = ready()
    assert step(copies, keeper, "a")
    assert not step(copies, keeper, "b")
    assert (copies.confirmed, copies.ordered) == ("", "a")
    keeper.status = CopyStatus("a")
    assert step(copies, keeper, "c")
    assert (copies.confirmed, copies.ordered) == ("a", "c")
    keeper.status = CopyStatus("c")
    assert step(copies, keeper, "d")
    assert keeper.copied == [("a", ""), ("c", "a"), ("d", "c")]


@pytest.mark.promise("copies-cut-off", reason="the warning")
def test_a_copy_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    """A warning says why, the copy before it still counts, and the next state is copied."""
    copies, keeper = ready()
    step(copies, keeper, "a")
    keeper.status = CopyStatus("a")
    step(copies, keeper, "b")
    keeper.status = CopyStatus("b", problem="10.0.0.2 does not answer")
    with caplog.at_level(logging.WARNING):
        assert step(copies, keeper, "c")
    assert caplog.messages == ["a state was not copied to another host: 10.0.0.2 does not answer"]
    assert (copies.is_on, copies.confirmed, copies.ordered) == (True, "a", "c")


def test_a_copy_that_fails_on_another_rank() -> None:
    """A copy that fails on another rank does not count on this rank either."""
    copies, keeper = ready()
    step(copies, keeper, "a")
    keeper.status = CopyStatus("a")
    assert copies.vote(keeper) == MemoryVote()
    copies.advance(MemoryVote(copy_failed=True))
    assert (copies.confirmed, copies.ordered) == ("", "")
    copies.order("b")
    assert copies.vote(keeper) == MemoryVote(copy_failed=True), "its state was not kept here"


def test_a_partner_that_is_full(caplog: pytest.LogCaptureFixture) -> None:
    """A full partner ends the copies on all ranks. `forget` removes the copies that exist."""
    copies, keeper = ready()
    step(copies, keeper, "a")
    keeper.status = CopyStatus("a", problem="there is no memory", is_full=True)
    vote = copies.vote(keeper)
    assert vote == MemoryVote(copy_failed=True, copies_end=True)
    copies.forget(keeper)
    assert keeper.has_dropped
    with caplog.at_level(logging.WARNING):
        copies.advance(vote)
    copies.order("b")
    assert (copies.is_on, copies.ordered) == (False, "")
    assert "as with copies=1: there is no memory" in caplog.text


@pytest.mark.parametrize(
    ("is_begun", "has_keeper", "is_ours"), [(False, True, True), (True, False, True), (True, True, False)]
)
def test_copies_that_are_not_removed(is_begun: bool, has_keeper: bool, is_ours: bool) -> None:
    """Without a copy, or without a keeper of this process, no request to remove copies is sent."""
    copies, keeper = ready()
    keeper.is_ours = is_ours
    if is_begun:
        step(copies, keeper, "a")
    copies.forget(keeper if has_keeper else None)
    assert (keeper.has_dropped, copies.confirmed) == (False, "")


def test_a_partner_that_a_later_run_has() -> None:
    """The vote reports that a later run has claimed the partner."""
    copies, keeper = ready()
    step(copies, keeper, "a")
    keeper.status = CopyStatus("a", problem="claimed", is_claimed=True)
    assert copies.vote(keeper).is_superseded


def test_one_host_alone(caplog: pytest.LogCaptureFixture) -> None:
    """With one host, a warning is logged, and no state is copied."""
    copies = PeerCopies(Agreement(None), 2, CopyOptions())
    with caplog.at_level(logging.WARNING):
        copies.find_partners(None)
    assert not copies.is_on
    assert "as with copies=1: all ranks are on one host" in caplog.text


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"copies": 3}, ValueError, "copies must be 1 or 2, .* got 3"),
        ({"copies": 2, "survive": 0}, ValueError, "copies=2 needs survive="),
        ({"copy_options": {"rate": 2e6}}, TypeError, "copy_options must be an instance of CopyOptions"),
    ],
)
def test_options(tmp_path: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    """The constructor checks the options."""
    with pytest.raises(error, match=words):
        CheckpointManager(tmp_path, **({"survive": 60} | options))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"rate": "fast"}, TypeError, "rate must be a number of bytes a second, or None, got str"),
        ({"rate": 1000}, ValueError, "rate must be None, or finite and at least 1e[+]06 bytes a second, got 1000"),
        ({"failure_domain": 7}, TypeError, "failure_domain must be a string that is not empty, or None, got 7"),
        ({"interface": ""}, TypeError, "interface must be a string that is not empty, or None, got ''"),
    ],
)
def test_how_states_are_copied(options: dict[str, Any], error: type[Exception], words: str) -> None:
    """`CopyOptions` checks its fields."""
    with pytest.raises(error, match=words):
        CopyOptions(**options)


def test_no_libsodium(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies need libsodium, and the error says how to get it."""

    def missing() -> None:
        raise OSError("no such library")

    monkeypatch.setattr("dcp_tensorizer._tensor_file.encryption._secretbox", missing)
    with pytest.raises(WriteError, match="needs libsodium"):
        CheckpointManager(tmp_path, survive=60, copies=2)
