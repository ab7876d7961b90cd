"""Tables are as wide as the terminal, and never wrap a name."""

from __future__ import annotations

from dcp_tensorizer._cli.terminal import folded, lay_out

COLUMNS = ["tensor", "shape", ">size"]
ROWS = [
    ["app.model.blocks.0.norm_feed_forward.weight", "256", "1.02 kB"],
    ["app.step", "scalar", "8 B"],
]


def test_what_fits_has_a_line_a_row() -> None:
    """A table that fits has one line per row, with text to the left and numbers to the right."""
    assert list(lay_out(COLUMNS, ROWS, 60)) == [
        "tensor                                       shape      size",
        "app.model.blocks.0.norm_feed_forward.weight  256     1.02 kB",
        "app.step                                     scalar      8 B",
    ]


def test_long_names_stay_whole() -> None:
    """A name that is too long has a line above its other cells."""
    assert list(lay_out(COLUMNS, ROWS, 44)) == [
        "tensor                       shape      size",
        "app.model.blocks.0.norm_feed_forward.weight",
        "                             256     1.02 kB",
        "app.step                     scalar      8 B",
    ]


def test_other_cells_are_broken_between_words() -> None:
    """Other cells wrap after a dot or a space, and numbers are beside the first line."""
    assert list(lay_out(["at", "what", ">size"], [["a", "kept: b.c.d is alive", "8 B"]], 22)) == [
        "at  what          size",
        "a   kept: b.c.d    8 B",
        "    is alive",
    ]


def test_a_word_that_is_too_long_stays_whole() -> None:
    """A word that is longer than the terminal is not split."""
    lines = list(lay_out(COLUMNS, [["a" * 50, "", ""]], 20))
    assert lines[1].startswith("a" * 50)


def test_wide_characters_count_twice() -> None:
    """A wide character takes two columns, as on a terminal."""
    assert list(lay_out(["a", "b"], [["層", "x"], ["ab", "y"]], 80)) == ["a   b", "層  x", "ab  y"]


def test_lines_are_broken_at_spaces() -> None:
    """Lines wrap at spaces, and never within a path."""
    text = "error: /a/long/path holds no checkpoint"
    assert folded(text, 80) == [text]
    assert folded(text, 22) == ["error: /a/long/path", "holds no checkpoint"]
    assert folded(text, 8) == ["error:", "/a/long/path", "holds no", "checkpoint"]
