"""The soak's results: parts of a run add up."""

from __future__ import annotations

import pytest

from .tally import Tally, added


def ran(seed: int, tally: Tally) -> dict[str, object]:
    return {"seed": seed, "seconds": 2.0, "commit": "abc", "tally": tally.as_dict()}


def test_runs_with_other_seeds_add_up() -> None:
    """All that is counted does, and the page names each seed; the same seed would count rounds twice."""
    one, other = Tally(rounds=3, counts={"kills": 3}), Tally(rounds=2, counts={"loads": 1})
    other.blame("lost", "a step")
    both = added(ran(1, one), ran(2, other))
    assert both == {
        "seed": "1, 2",
        "seconds": 4.0,
        "commit": "abc",
        "tally": Tally(5, lost=1, counts={"kills": 3, "loads": 1}, found=["lost: a step"]).as_dict(),
    }
    with pytest.raises(ValueError, match="do not add up"):
        added(both, ran(2, other))
