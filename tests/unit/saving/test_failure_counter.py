"""The count of failed saves in a row, and the error at the limit."""

import threading

import pytest

from dcp_tensorizer._saving.failures import FailureCounter, FailuresInARow
from dcp_tensorizer.errors import WriteError


def _fail(counter, times):
    for number in range(times):
        counter.begin(f"/ckpt/step-{number}")
        counter.failed(WriteError(f"no space {number}"))
        counter.end()


def test_the_limit_names_the_last_error_and_the_last_commit():
    """At the limit, the error contains the last failure and the last committed checkpoint."""
    counter = FailureCounter()
    counter.begin("/ckpt/step-0")
    counter.committed()
    _fail(counter, 2)
    counter.in_a_row("/ckpt/step-9").check(3)
    _fail(counter, 1)
    with pytest.raises(WriteError, match=r"3 saves in a row.*no space 0.*was committed: /ckpt/step-0"):
        counter.in_a_row("/ckpt/step-9").check(3)


def test_the_count_of_another_rank():
    """A rank that has seen no error itself names none."""
    words = "2 saves in a row were not committed. The last checkpoint that was committed: none. Fix the cause"
    with pytest.raises(WriteError, match=f"^{words}"):
        FailuresInARow().check(2, count=2)


def test_a_commit_starts_the_count_again():
    """A committed save resets the count."""
    counter = FailureCounter()
    _fail(counter, 1)
    counter.begin("/ckpt/step-0")
    counter.committed()
    _fail(counter, 1)
    counter.in_a_row("/ckpt/step-9").check(2)


def test_a_save_that_another_rank_failed_counts_too(caplog):
    """A save whose `finish` was never called counts as failed on the coordinator, and is logged."""
    counter = FailureCounter()
    counter.begin("/ckpt/a")
    counter.set_coordinator(True)
    counter.begin("/ckpt/b")
    with pytest.raises(WriteError, match="another rank or a collective failed"):
        counter.in_a_row("/ckpt/a").check(1)
    assert "the save to /ckpt/a was not committed" in caplog.text


def test_a_save_without_a_path_is_called_so(caplog):
    """Messages call it "a save without a path". A failure that this rank has raised is logged once."""
    counter = FailureCounter()
    counter.begin("")
    counter.failed(WriteError("give the writer a path"))
    counter.end()
    assert [record.getMessage() for record in caplog.records] == [
        "a save without a path failed: give the writer a path",
    ]


def test_other_ranks_do_not_count():
    """Only the coordinator sees commits, so another rank never counts a save as failed."""
    counter = FailureCounter()
    counter.begin("/ckpt/a")
    counter.set_coordinator(False)
    counter.begin("/ckpt/a")  # fails before DCP names its coordinator, which is that of the last save
    counter.end()
    counter.in_a_row("/ckpt/a").check(1)


def test_a_rank_may_coordinate_one_save_and_not_another():
    """Saves of several process groups run concurrently, and each counts on the coordinator of its group."""
    counter = FailureCounter()

    def others():
        counter.begin("/ckpt/others")
        counter.set_coordinator(False)

    saving = threading.Thread(target=others)
    counter.begin("/ckpt/own")
    saving.start()
    saving.join()
    counter.set_coordinator(True)
    counter.committed()
    counter.end()
    counter.in_a_row("/ckpt/own").check(1)
    counter.in_a_row("/ckpt/others").check(1)


def test_groups_and_paths_are_counted_apart():
    """Failures of one process group do not count for another group or another folder."""
    counter = FailureCounter()
    for number in range(2):
        counter.begin(f"/ckpt/step-{number}/model", "saves")
        counter.failed(WriteError("no space"))
        counter.begin("/ckpt/good", "saves")
        counter.committed()
    counter.in_a_row("/ckpt/step-2/optimizer", "saves").check(1)
    counter.in_a_row("/ckpt/step-2/model", "exports").check(1)
    with pytest.raises(WriteError, match=r"2 saves in a row.*no space.*was committed: /ckpt/good"):
        counter.in_a_row("/ckpt/step-2/model", "saves").check(2)


def test_no_limit():
    """With a limit of None, `check` never raises."""
    counter = FailureCounter()
    _fail(counter, 10)
    counter.in_a_row("/ckpt/step-9").check(None)


def test_the_save_after_the_refused_one_is_tried():
    """After a refusal, one more failure refuses the next save, and a committed save resets the count."""
    counter = FailureCounter()
    _fail(counter, 2)
    in_a_row = counter.in_a_row("/ckpt/step-9")
    for times in (2, 3):
        assert f"{times} saves in a row" in str(in_a_row.refusal(2))
        with pytest.raises(WriteError, match=f"{times} saves in a row"):
            in_a_row.check(2)
        in_a_row.check(2)
        assert (in_a_row.refusal(2), in_a_row.count, in_a_row.unreported) == (None, times, 0)
        _fail(counter, 1)
    in_a_row.committed("/ckpt/step-9")
    in_a_row.failed("no space")
    assert (in_a_row.refusal(2), in_a_row.unreported) == (None, 1)
