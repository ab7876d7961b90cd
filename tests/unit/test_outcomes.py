"""Counting saves that were not committed."""

import pytest

from dcp_tensorizer._saving.failure_counter import FailureCounter
from dcp_tensorizer.errors import WriteError


def _fail(outcomes, times):
    for number in range(times):
        outcomes.begin(f"/ckpt/{number}")
        outcomes.failed(WriteError(f"no space {number}"))
        outcomes.settle()


def test_the_limit_names_the_last_error_and_the_last_commit():
    """After as many failures in a row as allowed, the error says what failed last and what is still good."""
    outcomes = FailureCounter(3)
    outcomes.begin("/ckpt/good")
    outcomes.committed()
    _fail(outcomes, 2)
    outcomes.check()
    _fail(outcomes, 1)
    with pytest.raises(WriteError, match=r"3 saves in a row.*no space 0.*Last committed: /ckpt/good"):
        outcomes.check()


def test_a_commit_starts_the_count_again():
    """Only failures in a row count."""
    outcomes = FailureCounter(2)
    _fail(outcomes, 1)
    outcomes.begin("/ckpt/good")
    outcomes.committed()
    _fail(outcomes, 1)
    outcomes.check()


def test_a_save_that_another_rank_failed_counts_too(caplog):
    """The coordinator sees that `finish` was never called, counts it, and logs it."""
    outcomes = FailureCounter(1)
    outcomes.set_coordinator(True)
    outcomes.begin("/ckpt/a")
    outcomes.begin("/ckpt/b")
    with pytest.raises(WriteError, match="another rank failed"):
        outcomes.check()
    assert "the save to /ckpt/a was not committed" in caplog.text


def test_other_ranks_do_not_count():
    """A rank that is not the coordinator never learns of a commit, so it must not take a save for failed."""
    outcomes = FailureCounter(1)
    outcomes.set_coordinator(False)
    outcomes.begin("/ckpt/a")
    outcomes.settle()
    outcomes.check()


def test_no_limit():
    """None never raises."""
    outcomes = FailureCounter(None)
    _fail(outcomes, 10)
    outcomes.check()
