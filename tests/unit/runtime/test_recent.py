"""`Recent`: a bounded cache of results."""

from __future__ import annotations

import copy
import pickle

from dcp_tensorizer._runtime.recent import Recent


def test_the_oldest_results_are_removed() -> None:
    """Adding a result again makes it the newest."""
    recent: Recent[str] = Recent(2)
    for key in (1, 2, 1, 3):
        recent.add(key, f"of {key}")
    assert [recent.find(key) for key in (1, 2, 3)] == ["of 1", None, "of 3"]


def test_results_may_have_sizes() -> None:
    """The sizes of the results add up to at most the limit. A result that exceeds it is not cached."""
    recent: Recent[bytes] = Recent(10, size=len)
    recent.add("a", bytes(4))
    recent.add("a", bytes(6))
    recent.add("b", bytes(4))
    assert [recent.find(key) for key in "ab"] == [bytes(6), bytes(4)]
    recent.add("c", bytes(5))
    assert [recent.find(key) for key in "abc"] == [None, bytes(4), bytes(5)]
    recent.add("d", bytes(11))
    assert [recent.find(key) for key in "bcd"] == [None] * 3


def test_a_copy_is_empty() -> None:
    """An unpickled cache has no results, because its process has computed none."""
    recent: Recent[bytes] = Recent(10, size=len)
    recent.add("a", bytes(4))
    for copied in (copy.deepcopy(recent), pickle.loads(pickle.dumps(recent))):
        assert copied.find("a") is None
        copied.add("b", bytes(11))
        assert copied.find("b") is None
