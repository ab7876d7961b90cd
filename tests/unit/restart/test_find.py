"""Which ranks can load a state from what of it is in a machine's memory."""

from __future__ import annotations

import pytest

from dcp_tensorizer._restart.find import KeptParts
from dcp_tensorizer._restart.protocol import KeptHead


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
