"""Tests of the rules that give keys new names, and of their inverses."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_tensorizer._formats import rename
from dcp_tensorizer._formats.rename import Parts, Renaming


def test_the_first_pattern_that_matches_counts() -> None:
    """The n-th star of a name stands for the text of the pattern's n-th star; other characters are literal."""
    renaming = Renaming({"model.layers.*.w?": "never", "model.layers.*.*": "h.*.*", "model.*": "*", "lm": "head"})
    names = [renaming.new_name(key) for key in ("model.layers.3.w1", "model.norm", "lm", "other")]
    assert names == ["h.3.w1", "norm", "head", "other"]
    assert list(renaming.unused) == ["model.layers.*.w?"]


def test_a_rule_for_one_name_counts_in_the_order_of_the_rules() -> None:
    """A rule without stars has priority over later patterns, but not over earlier ones."""
    renaming = Renaming({"a.1": "first", "a.*": "h.*", "a.2": "never", "b": Parts("q", "k"), "c": "[b]?"})
    assert [renaming.new_name(key) for key in ("a.1", "a.2", "a.3", "b", "c", "d")] == [
        "first", "h.2", "h.3", "q", "[b]?", "d"
    ]  # fmt: skip
    assert list(renaming.unused) == ["a.2"]
    back = renaming.inverse()
    assert [match and match.number.part for match in map(back.find, ("q", "k", "b"))] == [0, 1, None]


def test_rules_for_single_names_are_not_tried_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of comparisons with patterns does not grow with the number of rules without stars."""
    compared: list[str] = []
    match = rename._Pattern.match
    monkeypatch.setattr(rename._Pattern, "match", lambda pattern, key: (compared.append(key), match(pattern, key))[1])
    renaming = Renaming({**{f"a.{number}": f"b.{number}" for number in range(100)}, "c.*": "d.*"})
    assert [renaming.new_name(f"a.{number}") for number in range(100)] == [f"b.{number}" for number in range(100)]
    assert renaming.new_name("c.1") == "d.1"
    assert compared == ["c.1"]


@pytest.mark.parametrize("rules", [{"a.*": ""}, {"a": "*"}, {"a.*": "*.*"}])
def test_a_name_that_cannot_be_made_is_refused(rules: dict[str, str]) -> None:
    """A new name that is empty, or has more stars than its pattern, is an error."""
    with pytest.raises(ValueError, match="cannot become"):
        Renaming(rules)


def test_a_pattern_that_loses_something_has_no_inverse() -> None:
    """A star that the new name lacks could stand for any text."""
    with pytest.raises(ValueError, match=r"'b' cannot become 'a\.\*'"):
        Renaming({"a.*": "b"}).inverse()


def test_parts_have_a_number_of_their_name_and_one_of_the_row() -> None:
    """In names of parts ``{}`` stands for a number; in other names it is literal."""
    renaming = Renaming({Parts("e.{}.*.a", "e.{}.*.b"): "experts.*", "*{}": "x*"})
    match = renaming.find("e.12.up.b")
    assert match is not None
    assert (match.stars, match.number, match.new_name()) == (("up",), (1, 12), "experts.up")
    back = renaming.inverse().find("experts.up")
    assert back is not None
    assert [back.new_name(part, 7) for part in (0, 1)] == ["e.7.up.a", "e.7.up.b"]
    assert renaming.new_name("y{}") == "xy"
    assert [renaming.find(key) for key in ("e.up.a", "e.01.up.a", "e.-1.up.a")] == [None] * 3


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (Parts, TypeError, "Parts must have names"),
        (lambda: Parts("q"), ValueError, "the only name of Parts must contain"),
        (lambda: Parts("q.*", "k"), ValueError, "the same number of"),
        (lambda: Parts("q.{}", "k"), ValueError, "each or none"),
        (lambda: Parts("q", "k", sizes=(1,)), ValueError, "one positive size per name, got 2"),
        (lambda: Parts("q", "k", sizes=(1, 0)), ValueError, "one positive size per name, got 2"),
        (lambda: Parts("q", "k", dim=-1), ValueError, "dim=-1"),
        (lambda: Parts("q", "k", groups=0), ValueError, "groups=0"),
        (lambda: Parts("q.{}", groups=2), ValueError, "groups=2 of Parts needs several names"),
        (lambda: Parts("q", "k", dim=0.5), TypeError, "must be ints"),  # type: ignore[arg-type]
        (lambda: Renaming({Parts("q", "k"): Parts("a", "b")}), ValueError, "got Parts on both"),
        (lambda: Renaming({"a": 7}), TypeError, "strings or Parts"),  # type: ignore[dict-item]
        (lambda: Renaming({"a": Parts("q.*", "k.*")}), ValueError, "cannot become"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_makes_no_rule_is_refused(make: Any, error: type[Exception], message: str) -> None:
    """An invalid rule raises an error when it is made."""
    with pytest.raises(error, match=message):
        make()


def test_parts_are_values() -> None:
    """Parts can be keys of a dict, and their repr is the call that makes them."""
    parts = Parts("q", "k", sizes=[3, 1], dim=1)
    assert parts == Parts("q", "k", sizes=(3, 1), dim=1)
    assert {parts: 1}[Parts("q", "k", sizes=(3, 1), dim=1)] == 1
    assert parts != Parts("q", "k", dim=1)
    assert eval(repr(parts)) == parts
