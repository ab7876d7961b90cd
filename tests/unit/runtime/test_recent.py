"""Results are found by what they were made from, and the oldest go first."""

from __future__ import annotations

import copy
import pickle

from dcp_tensorizer._runtime.recent import Recent


def test_the_oldest_results_make_room() -> None:
    """A result that is kept again is the newest."""
    recent: Recent[str] = Recent(2)
    for key in (1, 2, 1, 3):
        recent.keep(key, f"of {key}")
    assert [recent.find(key) for key in (1, 2, 3)] == ["of 1", None, "of 3"]


def test_results_may_have_sizes() -> None:
    """All together have no more than the limit; one that is larger is not kept."""
    recent: Recent[bytes] = Recent(10, size=len)
    recent.keep("a", bytes(4))
    recent.keep("a", bytes(6))
    recent.keep("b", bytes(4))
    assert [recent.find(key) for key in "ab"] == [bytes(6), bytes(4)]
    recent.keep("c", bytes(5))
    assert [recent.find(key) for key in "abc"] == [None, bytes(4), bytes(5)]
    recent.keep("d", bytes(11))
    assert [recent.find(key) for key in "bcd"] == [None] * 3


def test_a_copy_is_empty() -> None:
    """It goes to processes that have made none of the results."""
    recent: Recent[bytes] = Recent(10, size=len)
    recent.keep("a", bytes(4))
    for copied in (copy.deepcopy(recent), pickle.loads(pickle.dumps(recent))):
        assert copied.find("a") is None
        copied.keep("b", bytes(11))
        assert copied.find("b") is None
