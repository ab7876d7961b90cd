"""Which states are copied to other hosts, and when a copy counts."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from dcp_tensorizer import CheckpointManager, WriteError
from dcp_tensorizer._job.ranks import Agreement
from dcp_tensorizer._memory.copies import CopyOptions, MemoryVote, PeerCopies
from dcp_tensorizer._memory.protocol import CopyStatus
from dcp_tensorizer._memory.wire import Address


class _Keeper:
    """A keeper that copies as it is told to."""

    is_ours = True

    def __init__(self) -> None:
        self.copied: list[tuple[str, str]] = []
        self.status = CopyStatus()
        self.has_dropped = False

    def copy(self, state_id: str, to: Address, rate: float, keep: str) -> None:
        self.copied.append((state_id, keep))
        self.status = CopyStatus(state_id, is_running=True)

    def copy_status(self) -> CopyStatus:
        return self.status

    def drop_copies(self) -> None:
        self.has_dropped = True


def ready() -> tuple[PeerCopies, Any]:
    """Copies for which there is a partner, and room."""
    copies = PeerCopies(Agreement(None), 2, CopyOptions())
    copies._partner, copies._has_memory = Address("10.0.0.2", 5, b""), True
    return copies, _Keeper()


def step(copies: PeerCopies, keeper: Any, state_id: str) -> bool:
    """A step of training, whose state is kept; whether it is copied."""
    copies.advance(copies.vote(keeper))
    if is_copied := copies.order(state_id):
        copies.start(keeper, state_id)
    return is_copied


def test_one_after_the_other() -> None:
    """The next one is copied when all ranks have the last one, which stays on the other host until then."""
    copies, keeper = ready()
    assert step(copies, keeper, "a")
    assert not step(copies, keeper, "b")
    assert copies.are_awaited and copies.ordered == "a"
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
    """It does not count on this one, either."""
    copies, keeper = ready()
    step(copies, keeper, "a")
    keeper.status = CopyStatus("a")
    assert copies.vote(keeper) == MemoryVote()
    copies.advance(MemoryVote(copy_failed=True))
    assert (copies.confirmed, copies.ordered) == ("", "")
    copies.order("b")
    assert copies.vote(keeper) == MemoryVote(copy_failed=True), "its state was not kept here"


def test_a_partner_that_is_full(caplog: pytest.LogCaptureFixture) -> None:
    """No more is copied, on any rank; and what is there is forgotten when the job resumes from something else."""
    copies, keeper = ready()
    step(copies, keeper, "a")
    keeper.status = CopyStatus("a", problem="there is no memory", is_full=True)
    vote = copies.vote(keeper)
    assert vote == MemoryVote(copy_failed=True, copies_end=True)
    copies.forget(keeper)
    assert keeper.has_dropped
    with caplog.at_level(logging.WARNING):
        copies.advance(vote)
    assert not copies.is_on and not copies.order("b")
    assert "as with copies=1: there is no memory" in caplog.text


def test_a_partner_that_a_later_run_has() -> None:
    """This run learns it."""
    copies, keeper = ready()
    step(copies, keeper, "a")
    keeper.status = CopyStatus("a", problem="claimed", is_claimed=True)
    assert copies.vote(keeper).is_superseded


def test_one_host_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A warning says so, and nothing is copied."""
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
        ({"copy_options": {"rate": 2e6}}, TypeError, "copy_options must be CopyOptions"),
    ],
)
def test_options(tmp_path: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    """They are checked when they are given."""
    with pytest.raises(error, match=words):
        CheckpointManager(tmp_path, **({"survive": 60} | options))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"rate": "fast"}, TypeError, "rate must be a number of bytes a second, or None, got 'fast'"),
        ({"rate": 1000}, ValueError, "rate must be None, or at least 1e[+]06 bytes a second, got 1000"),
        ({"failure_domain": 7}, TypeError, "failure_domain must be a string, or None, got 7"),
        ({"interface": ""}, TypeError, "interface must be a string, or None, got ''"),
    ],
)
def test_how_states_are_copied(options: dict[str, Any], error: type[Exception], words: str) -> None:
    """It is checked when it is given."""
    with pytest.raises(error, match=words):
        CopyOptions(**options)


def test_no_libsodium(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is needed for copies, and the error says what to do."""

    def missing() -> None:
        raise OSError("no such library")

    monkeypatch.setattr("dcp_tensorizer._tensor_file.encryption._secretbox", missing)
    with pytest.raises(WriteError, match="needs libsodium"):
        CheckpointManager(tmp_path, survive=60, copies=2)
