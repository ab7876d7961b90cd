"""How many cores are a rank's."""

from __future__ import annotations

import os

import pytest

from dcp_tensorizer._threads import cores


@pytest.mark.parametrize(
    ("on_node", "bound_to", "ranks", "expected"),
    [
        (64, 64, None, 64),
        (64, 64, "8", 8),
        (64, 8, "8", 8),  # each rank is bound to its own
        (64, 4, None, 4),
        (2, 2, "32", 1),
        (2, 2, "0", 2),
        (2, 2, "many", 2),
    ],
)
def test_ranks_share_the_cores_of_their_node(
    monkeypatch: pytest.MonkeyPatch, on_node: int, bound_to: int, ranks: str | None, expected: int
) -> None:
    """As `torchrun` says how many they are; what it does not say is no error."""
    monkeypatch.setattr(os, "cpu_count", lambda: on_node)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(bound_to)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert cores() == expected
