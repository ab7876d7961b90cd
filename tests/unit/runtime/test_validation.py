"""What users give is checked, and each error names the argument, the value and what is allowed."""

from __future__ import annotations

import math
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_tensorizer._runtime.validation import (
    check_callable,
    check_choice,
    check_count,
    check_path,
    check_storage_options,
    check_timeout,
    check_type,
    did_you_mean,
)


@pytest.mark.parametrize("value", ["/a", "s3://bucket/a", "", Path("a")])
def test_paths_are_strings_and_path_likes(value: Any) -> None:
    """URLs too."""
    check_path(value)


@pytest.mark.parametrize(
    ("value", "kind"), [(b"/a", "bytes"), (7, "int"), (None, "None"), (["s3://user:hunter2@host"], "list")]
)
def test_other_paths_are_refused_by_their_type_alone(value: Any, kind: str) -> None:
    """What was given may hold a password."""
    with pytest.raises(TypeError, match=rf"^path must be a str or an os\.PathLike, got {kind}\.$"):
        check_path(value)


def test_a_path_like_gives_text() -> None:
    """One that gives bytes is refused as bytes are."""

    class Bytes:
        def __fspath__(self) -> bytes:
            return b"/a"

    with pytest.raises(TypeError, match=r"^path must be a str or an os.PathLike of a str, got bytes from Bytes\.$"):
        check_path(Bytes())


@pytest.mark.parametrize("value", [0.1, 1, 600.0, np.float32(5), threading.TIMEOUT_MAX])
def test_timeouts_are_positive_and_finite(value: Any) -> None:
    """Up to what the system can wait for."""
    check_timeout(value)


@pytest.mark.parametrize("value", [0, 0.0, -1, math.inf, -math.inf, math.nan, 1e300])
def test_other_timeouts_are_refused(value: float) -> None:
    """By name and value, with what is allowed."""
    with pytest.raises(
        ValueError, match=rf"^timeout must be more than 0 seconds, and at most 9\d+, got {re.escape(repr(value))}\.$"
    ):
        check_timeout(value)


def test_a_timeout_may_be_none_at_all_where_that_makes_sense() -> None:
    """As in `close`: 0 seconds are allowed, and nothing below."""
    check_timeout(0, least=0)
    for value in (-1e-9, math.inf, math.nan):
        with pytest.raises(ValueError, match=r"must be at least 0 seconds, and at most 9"):
            check_timeout(value, least=0)


@pytest.mark.parametrize("value", ["600", None, True, [600]])
def test_timeouts_are_numbers(value: Any) -> None:
    """Also where a number could be made of what was given."""
    with pytest.raises(TypeError, match=r"^timeout must be a number of seconds, got "):
        check_timeout(value)


@pytest.mark.parametrize("value", [1, 64, np.int64(3), None])
def test_thread_counts(value: Any) -> None:
    """At least one, or None for as many as there are cores."""
    check_count("thread_count", value, optional=True)


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-2, ValueError), (2.0, TypeError), (True, TypeError)])
def test_other_thread_counts_are_refused(value: Any, error: type[Exception]) -> None:
    """0 is not taken for None, nor True for 1."""
    with pytest.raises(error, match=r"^thread_count.* must be an int of at least 1, or None"):
        check_count("thread_count", value, optional=True)


def test_counts_may_have_to_be_given() -> None:
    """Then None is a wrong type."""
    check_count("buffer_bytes", 1)
    with pytest.raises(TypeError, match=r"^buffer_bytes must be an int of at least 1, got None\.$"):
        check_count("buffer_bytes", None)
    with pytest.raises(ValueError, match=r"^buffer_bytes must be an int of at least 1, got 0\.$"):
        check_count("buffer_bytes", 0)


def test_storage_options_are_a_mapping_with_names_for_keys() -> None:
    """Their values are shown by no error."""
    check_storage_options(None)
    check_storage_options({"key": "hunter2"})
    with pytest.raises(TypeError, match=r"^storage_options must be a mapping, or None, got list\.$"):
        check_storage_options([("key", "hunter2")])
    with pytest.raises(TypeError, match=r"^storage_options must have str keys, got int\.$"):
        check_storage_options({7: "hunter2"})


def test_functions() -> None:
    """Anything that can be called, or None."""
    check_callable("on_report", print)
    check_callable("on_report", None)
    with pytest.raises(TypeError, match=r"^on_report must be callable, or None, got int\.$"):
        check_callable("on_report", 5)


def test_choices() -> None:
    """The error lists them."""
    check_choice("staging", "a", ("a", "b"))
    with pytest.raises(ValueError, match=r"^staging must be one of 'a', 'b', got 'c'\.$"):
        check_choice("staging", "c", ("b", "a"))
    with pytest.raises(ValueError, match=r"^staging must be one of 'a', 'b', got \['a'\]\.$"):
        check_choice("staging", ["a"], ("a", "b"))


def test_types() -> None:
    """The error names what is wanted."""
    check_type("limits", 5, int)
    with pytest.raises(TypeError, match=r"^limits must be int, got str\.$"):
        check_type("limits", "5", int)


def test_the_nearest_names_are_a_guess() -> None:
    """One for each name that has one; nothing where none is near."""
    assert did_you_mean(["fp16"], ["float16", "float64"]) == ": did you mean 'float16'?"
    assert did_you_mean(["tokne", "kye"], {"token": 1, "key": 2}) == ": did you mean 'token' and 'key'?"
    assert did_you_mean(["colour"], ["token"]) == ""
