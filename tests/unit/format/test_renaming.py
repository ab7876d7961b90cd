"""New names of keys by patterns, and the way back."""

from __future__ import annotations

import pytest

from dcp_tensorizer._format.renaming import Renaming, collision, not_inverted


def test_the_first_pattern_that_matches_counts() -> None:
    """The n-th star of a name is what the n-th of its pattern stands for; other characters have no meaning."""
    renaming = Renaming({"model.layers.*.w?": "never", "model.layers.*.*": "h.*.*", "model.*": "*", "lm": "head"})
    names = [renaming.new_name(key) for key in ("model.layers.3.w1", "model.norm", "lm", "other")]
    assert names == ["h.3.w1", "norm", "head", "other"]
    assert list(renaming.unused) == ["model.layers.*.w?"]


@pytest.mark.parametrize("rules", [{"a.*": ""}, {"a": "*"}, {"a.*": "*.*"}])
def test_a_name_that_cannot_be_made_is_refused(rules: dict[str, str]) -> None:
    """It is empty, or has a star more than its pattern."""
    with pytest.raises(ValueError, match="cannot become"):
        Renaming(rules)


def test_a_pattern_that_loses_something_has_no_inverse() -> None:
    """The star that is left out could stand for anything."""
    with pytest.raises(ValueError, match=r"'b' cannot become 'a\.\*'"):
        Renaming({"a.*": "b"}).inverse()


def test_two_keys_of_one_name_and_a_name_that_leads_elsewhere() -> None:
    """Both are found, and named."""
    renaming = Renaming({"a.*": "*"})
    names = {key: renaming.new_name(key) for key in ("a.x", "b.x", "x")}
    assert collision(names) == ("a.x", "x")
    assert not_inverted(renaming, {"a.x": "x"}) is None
    assert not_inverted(renaming, {"a.x": "x", "b": "b"}) == ("b", "a.b")
