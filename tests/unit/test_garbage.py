"""The garbage collector is put off, and never left so."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from dcp_tensorizer._garbage import garbage_stays


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.enable()


def test_no_collections_within() -> None:
    """Within it, and within one in it, the collector is off; afterwards it is on."""
    with garbage_stays():
        assert not gc.isenabled()
        with garbage_stays():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_who_has_no_collector_gets_none() -> None:
    """A trainer that collects when it likes finds the collector as it left it."""
    gc.disable()
    with garbage_stays():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_an_error_leaves_the_collector_on() -> None:
    """As a decorator, too, call after call."""

    @garbage_stays()
    def fails() -> None:
        assert not gc.isenabled()
        raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            fails()
        assert gc.isenabled()


def test_what_was_made_counts_as_old() -> None:
    """So that no collection goes through it a moment later."""
    with garbage_stays():
        made = [[number] for number in range(100_000)]
    assert gc.get_count()[0] < 1000
    assert any(old is made for old in gc.get_objects(generation=2))


def test_what_a_trainer_has_frozen_stays_frozen() -> None:
    """As before it forks, to share memory with its children."""
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with garbage_stays():
            pass
        assert 0 < gc.get_freeze_count() <= frozen  # some may have been freed
    finally:
        gc.unfreeze()
