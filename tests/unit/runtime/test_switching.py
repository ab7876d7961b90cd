"""Threads take turns oftener while somebody asks for it, and afterwards as before."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from dcp_tensorizer._runtime.threads import ShortSwitchInterval

TRAINERS = 0.004


@pytest.fixture(autouse=True)
def trainers_interval() -> Iterator[None]:
    """An interval that nobody has by default."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(TRAINERS)
    yield
    sys.setswitchinterval(before)


def test_the_interval_is_short_until_the_last_one_has_ended() -> None:
    """Saves may overlap; ending twice is no error."""
    first, second = ShortSwitchInterval(), ShortSwitchInterval()
    assert sys.getswitchinterval() == 0.0005
    first.end()
    first.end()
    assert sys.getswitchinterval() == 0.0005
    second.end()
    assert sys.getswitchinterval() == TRAINERS


def test_what_nobody_refers_to_has_ended() -> None:
    """A save may fail on another rank: then this rank's thread ends, and no hook is called."""
    turns = ShortSwitchInterval()
    assert sys.getswitchinterval() == 0.0005
    del turns
    assert sys.getswitchinterval() == TRAINERS


def test_an_interval_that_is_shorter_stays() -> None:
    """The trainer has chosen it."""
    sys.setswitchinterval(0.0003)
    turns = ShortSwitchInterval()
    assert sys.getswitchinterval() == 0.0003
    turns.end()
    assert sys.getswitchinterval() == 0.0003


def test_an_interval_that_is_set_meanwhile_stays() -> None:
    """Whoever sets it knows why."""
    turns = ShortSwitchInterval()
    sys.setswitchinterval(0.002)
    turns.end()
    assert sys.getswitchinterval() == 0.002


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks")
def test_a_forked_child_has_the_trainers_interval() -> None:
    """The save's thread is not there."""
    turns = ShortSwitchInterval()
    child = os.fork()
    if child == 0:
        os._exit(0 if sys.getswitchinterval() == TRAINERS else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sys.getswitchinterval() == 0.0005
    turns.end()
