"""`ShortSwitchInterval`: a short switch interval during a save, and the trainer's afterwards."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from dcp_tensorizer._runtime.interpreter import ShortSwitchInterval

TRAINERS = 0.004


@pytest.fixture(autouse=True)
def trainers_interval() -> Iterator[None]:
    """Sets an unusual switch interval."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(TRAINERS)
    yield
    sys.setswitchinterval(before)


def test_the_interval_is_short_until_the_last_one_has_ended() -> None:
    """The interval is restored after the last of several overlapping users. `end` is idempotent."""
    first, second = ShortSwitchInterval(), ShortSwitchInterval()
    assert sys.getswitchinterval() == 0.0005
    first.end()
    first.end()
    assert sys.getswitchinterval() == 0.0005
    second.end()
    assert sys.getswitchinterval() == TRAINERS


def test_a_freed_object_restores_the_interval() -> None:
    """If a save fails on another rank, DCP calls no further hook on this rank, and the save's objects are freed."""
    turns = ShortSwitchInterval()
    assert sys.getswitchinterval() == 0.0005
    del turns
    assert sys.getswitchinterval() == TRAINERS


def test_an_interval_that_is_shorter_stays() -> None:
    """The constructor does not lengthen an interval that the trainer has set."""
    sys.setswitchinterval(0.0003)
    turns = ShortSwitchInterval()
    assert sys.getswitchinterval() == 0.0003
    turns.end()
    assert sys.getswitchinterval() == 0.0003


def test_an_interval_that_is_set_meanwhile_stays() -> None:
    """`end` does not replace an interval that the trainer has set since."""
    turns = ShortSwitchInterval()
    sys.setswitchinterval(0.002)
    turns.end()
    assert sys.getswitchinterval() == 0.002


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks")
def test_a_forked_child_has_the_trainers_interval() -> None:
    """A forked child, which lacks the save's thread, restores the interval."""
    turns = ShortSwitchInterval()
    child = os.fork()
    if child == 0:
        os._exit(0 if sys.getswitchinterval() == TRAINERS else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sys.getswitchinterval() == 0.0005
    turns.end()
