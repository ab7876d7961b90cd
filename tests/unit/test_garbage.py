"""The garbage collector is put off, and never left so."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_tensorizer import TensorizerStorageWriter
from dcp_tensorizer._memory.garbage import count_as_old, garbage_stays


class _Cycle:
    """Something that only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    gc.collect()
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
    """A trainer that collects the young ones when it likes finds the collector as it left it, and its garbage young."""
    gc.disable()
    with garbage_stays():
        assert not gc.isenabled()
        cycle = weakref.ref(_Cycle())
    assert not gc.isenabled()
    assert cycle() is not None
    gc.collect(1)
    assert cycle() is None


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


def test_garbage_does_not_become_old() -> None:
    """A step's cycles may hold gigabytes of activations: a collection of old ones may be hours away."""
    cycle = weakref.ref(_Cycle())
    count_as_old()
    assert cycle() is None


def test_what_dies_old_is_found() -> None:
    """However often objects are made to count as old, while little else is made: full collections do come again."""
    dead = []
    for _ in range(300):
        cycle = _Cycle()
        cycles = [_Cycle() for _ in range(1000)]
        count_as_old()
        dead.append(weakref.ref(cycle))
        del cycle, cycles
    assert dead[0]() is None


def test_saves_bring_no_full_collection(tmp_path: Path) -> None:
    """It would go through all of torch's objects, and keep training from the interpreter for a sixth of a second."""
    state = {f"layers.{number}.weight": torch.ones(2) for number in range(5000)}
    full = []

    def note(phase: str, info: dict[str, int]) -> None:
        full.extend([info] if phase == "start" and info["generation"] == 2 else [])

    with TensorizerStorageWriter(tmp_path) as writer:
        dcp.async_save(state, storage_writer=writer, no_dist=True).result()
        gc.collect()
        gc.callbacks.append(note)
        try:
            for _ in range(3):
                dcp.async_save(state, storage_writer=writer, no_dist=True).result()
        finally:
            gc.callbacks.remove(note)
    assert full == []


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
