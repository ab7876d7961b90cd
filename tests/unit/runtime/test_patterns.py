"""Tests of the patterns of keys: they match as `fnmatch` does, and each is compiled once."""

from __future__ import annotations

import fnmatch

import pytest

from dcp_tensorizer._runtime.patterns import matches


@pytest.mark.parametrize(
    "pattern", ["*", "a.*", "*.w", "a.?.w", "[ab].1.w", "[!a]*", "a.1.w", "A.1.w", "", "a\n*", "("]
)
def test_patterns_match_as_in_fnmatch(pattern: str) -> None:
    """Case counts, and ``*`` also matches dots and line ends."""
    for name in ("a.1.w", "b.1.w", "a.10.w", "a\nb", "", "("):
        assert matches((name,), (pattern,)) == fnmatch.fnmatchcase(name, pattern)


def test_one_name_and_one_pattern_are_enough() -> None:
    """The result is true if any name matches any pattern."""
    assert matches(("x", "a.1"), ("b.*", "a.*"))
    assert not matches(("x", "a.1"), ("b.*", "c"))
    assert not matches((), ("*",)) and not matches(("a",), ())


def test_each_pattern_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns stay compiled, even if there is one for each key."""
    compiled: list[str] = []
    translate = fnmatch.translate
    monkeypatch.setattr(fnmatch, "translate", lambda pattern: (compiled.append(pattern), translate(pattern))[1])
    patterns = [f"once.{number}.*" for number in range(1000)]
    assert [sum(matches((f"once.{number}.w",), (pattern,)) for pattern in patterns) for number in (0, 1, 999)] == [
        1
    ] * 3
    assert compiled == patterns
