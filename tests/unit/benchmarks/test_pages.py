"""The pages of results: a ratio has a range, and what the range leaves open is said not to be shown."""

from __future__ import annotations

from benchmarks.harness import cell, figure, quotient, rates, scaled, spread
from benchmarks.pages import Comparison, ahead, goals, medians

ONE = {"median": 1.0, "min": 0.9, "max": 1.2}
TWO = {"median": 2.0, "min": 1.6, "max": 2.4}


def test_a_ratio_has_the_range_that_two_ranges_allow() -> None:
    """Of its values the least is that of the least by the greatest; without one of the two there is none."""
    assert quotient(TWO, ONE) == {"median": 2.0, "min": 1.6 / 1.2, "max": 2.4 / 0.9}
    assert quotient(None, ONE) is None and quotient(ONE, None) is None
    assert rates({"median": 2.0, "min": 1.0, "max": 4.0}, 4e9) == {"median": 2.0, "min": 1.0, "max": 4.0}
    assert scaled(ONE, 1e3) == {"median": 1000.0, "min": 900.0, "max": 1200.0}
    assert scaled(None, 2) is None
    assert (spread([]), spread([3, 1, 2])) == (None, {"median": 2, "min": 1, "max": 3})


def test_figures_are_found_by_name() -> None:
    """One that was not measured is None, however much of the way there is."""
    summary = {"a | b": {"stall": ONE, "load": None}}
    assert figure(summary, "a | b", "stall") == ONE
    assert [figure(summary, *path) for path in (("a | b", "load"), ("a | b", "x"), ("x", "stall"))] == [None] * 3


def test_goals_are_reached_missed_or_not_shown() -> None:
    """By the whole range, as it is written; one value alone has no range."""
    rows = [
        ("reached", ">= 1.3", quotient(TWO, ONE)),
        ("missed", "<= 1", quotient(TWO, ONE)),
        ("open", ">= 2", quotient(TWO, ONE)),
        ("one value", "<= 2", 2.0001),
        ("no goal", "", ONE),
        ("nothing", "<= 1", None),
    ]
    page = goals(rows, "A note.", "{:.2f}".format)
    assert [line for line in page.splitlines() if line.startswith("|")][2:] == [
        "| reached | at least 1.3 | 2.00 (1.33-2.67) | yes |",
        "| missed | at most 1 | 2.00 (1.33-2.67) | no |",
        "| open | at least 2 | 2.00 (1.33-2.67) | not shown |",
        "| one value | at most 2 | 2.00 | yes |",
        "| no goal | - | 1.00 (0.90-1.20) | not shown |",
        "| nothing | at most 1 | - | - |",
    ]
    assert page.endswith("A note.")
    assert medians(rows, "{:.1f}".format)[2:] == [
        ("open", ">= 2", "2.0"),
        ("one value", "<= 2", "2.0"),
        ("no goal", "", "1.0"),
        ("nothing", "<= 1", "nan"),
    ]


def test_ratios_without_goals_are_shown_where_the_ranges_are_apart() -> None:
    """Their table has no column of goals."""
    lines = goals([("apart", "", TWO), ("together", "", ONE)], form="{:.1f}".format).splitlines()
    assert lines[0] == "## Ratios"
    assert lines[-2:] == ["| apart | 2.0 (1.6-2.4) | yes |", "| together | 1.0 (0.9-1.2) | not shown |"]


def test_where_a_peer_was_ahead() -> None:
    """The clear cases come first; a peer that is behind is left out."""
    form = "{:.1f}".format
    rows = [
        Comparison("case", "speed", "close", {"median": 1.1, "min": 1.0, "max": 1.3}, "ours", ONE, form),
        Comparison("case", "speed", "faster", TWO, "ours", ONE, form),
        Comparison("case", "time", "slower", TWO, "ours", ONE, form, more_is_better=False),
    ]
    assert [line.split(" | ")[2:] for line in ahead(rows).splitlines() if line.startswith("| case | s")] == [
        ["faster", cell(TWO, form), "ours", cell(ONE, form), "yes |"],
        ["close", "1.1 (1.0-1.3)", "ours", "1.0 (0.9-1.2)", "not shown |"],
    ]
