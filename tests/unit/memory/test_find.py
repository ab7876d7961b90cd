"""Which ranks can load a state from what of it is in a machine's memory."""

from __future__ import annotations

import pytest

from dcp_tensorizer._memory.find import Elsewhere, Held, KeptParts
from dcp_tensorizer._memory.protocol import KeptHead
from dcp_tensorizer._memory.wire import Address


def parts(*ranks: int, world_size: int) -> KeptParts:
    return KeptParts({rank: KeptHead("a", 1, "run", rank, world_size, None) for rank in ranks})


@pytest.mark.parametrize(
    ("kept", "ranks", "world_size", "expected"),
    [
        (parts(0, 1, world_size=2), [0], 1, True),
        (parts(0, 1, world_size=2), [2], 3, True),
        (parts(1, world_size=2), [1], 2, True),
        (parts(1, world_size=2), [0, 1], 2, False),
        (parts(1, world_size=2), [0], 2, False),
        (parts(0, 1, world_size=4), [0, 1], 4, True),
        (parts(0, 1, world_size=4), [0], 2, False),
    ],
    ids=["whole, fewer", "whole, more", "its own", "not all", "another's", "of one of two machines", "another number"],
)
def test_who_can_load_a_state(kept: KeptParts, ranks: list[int], world_size: int, expected: bool) -> None:
    """Any number of ranks, if all of it is there; otherwise each rank of as many, if its own part is."""
    assert kept.serves(ranks, world_size) is expected


def of(*ranks: int, world_size: int = 2) -> tuple[KeptHead, ...]:
    return tuple(parts(*ranks, world_size=world_size).by_rank.values())


def given(*ranks: int) -> list[Held]:
    return [Held(Address("10.0.0.1", 1, b"secret"), of(*ranks))]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([(of(0), []), (of(1), [])], True),
        ([(of(1), []), (of(0), [])], False),
        ([(of(1), given(1)), (of(0), given(0))], True),
        ([(of(0, 1), given(0, 1)), ((), [])], True),
        ([(of(0, 1), []), ((), [])], False),
        ([(of(0), given(0)), ((), [])], False),
        ([(of(0), []), (of(1), []), ((), [])], False),
        ([(of(0), given(0)), (of(1), given(1)), ((), [])], True),
    ],
    ids=[
        "each its own",
        "hosts in another order",
        "hosts in another order, with copies",
        "a new host, and the copy of what it had",
        "a new host, and no copy",
        "a part is gone",
        "more ranks",
        "more ranks, with copies",
    ],
)
def test_what_all_hosts_have(found: list[tuple[tuple[KeptHead, ...], list[Held]]], expected: bool) -> None:
    """Only states that each rank can load, from its own host or where a keeper gives them to others."""
    elsewhere = Elsewhere()
    elsewhere.take(found)
    assert bool(elsewhere.states(lambda head: True)) is expected
    elsewhere.forget(["a"])
    assert elsewhere.states(lambda head: True) == []


def test_where_the_parts_of_a_state_are() -> None:
    """In the order of the ranks that say so; as many ranks as before need only their own part."""
    here, there = Address("a", 1, b""), Address("b", 1, b"")
    both, last = of(0, 1), of(1)
    elsewhere = Elsewhere([(both, [Held(here, both)]), (last, [Held(there, last)])])
    (state,) = elsewhere.states()
    assert elsewhere.places(state.head) == {0: [here], 1: [here, there]}
    assert elsewhere.own_places(state.head, 1, world_size=2) == {1: [here, there]}
    assert elsewhere.own_places(state.head, 1, world_size=3) == {0: [here], 1: [here, there]}
    assert elsewhere.places(state.head._replace(id="b")) == {}
