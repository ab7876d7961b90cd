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
