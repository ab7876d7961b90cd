"""The states in memory that all ranks can load, and their holders."""

from __future__ import annotations

import pytest

from dcp_tensorizer._memory.protocol import Found, StateHead
from dcp_tensorizer._memory.survival import AllMemory
from dcp_tensorizer._memory.wire import Address


def found(*ranks: int, given: bool = False, world_size: int = 2, host: str = "a") -> list[Found]:
    """Returns a keeper that holds the parts of these ranks. With ``given``, it serves them to other hosts."""
    heads = tuple(StateHead("a", 1, "run", rank, world_size, None) for rank in ranks)
    return [Found("run", 1, heads, Address(host, 1, b"secret") if given else None)]


@pytest.mark.parametrize(
    ("keepers", "expected"),
    [
        ([found(0), found(1)], True),
        ([found(1), found(0)], False),
        ([found(1, given=True), found(0, given=True)], True),
        ([found(0, 1, given=True), []], True),
        ([found(0, 1), []], False),
        ([found(0, given=True), []], False),
        ([found(0), found(1), []], False),
        ([found(0, given=True), found(1, given=True), []], True),
        ([found(0, 1)], True),
        ([found(0, 1, world_size=4)], False),
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
        "fewer ranks",
        "parts of a larger state",
    ],
)
def test_what_all_hosts_have(keepers: list[list[Found]], expected: bool) -> None:
    """A state counts if each rank can load it from its own host, or from a keeper that serves other hosts."""
    assert bool(AllMemory(keepers).states()) is expected


def test_where_the_parts_of_a_state_are() -> None:
    """Holders are in the order of the ranks. With the same number of ranks, each needs only its own part."""
    here, there = Address("a", 1, b"secret"), Address("b", 1, b"secret")
    keepers = [found(0, 1, given=True), found(1, given=True, host="b")]
    memory = AllMemory(keepers)
    (head,) = memory.states()
    assert memory.holders(head) == {0: [here], 1: [here, there]}
    assert memory.holders(head, 1) == {1: [here, there]}
    assert AllMemory([*keepers, []]).holders(head, 1) == {0: [here], 1: [here, there]}
    assert memory.holders(head._replace(id="b")) == {}
