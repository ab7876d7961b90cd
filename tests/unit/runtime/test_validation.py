"""Checks of arguments: each error names the argument, the allowed values and the given one."""

from __future__ import annotations

import dataclasses
import enum
import math
import re
import threading
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_tensorizer._runtime.validation import (
    check_callable,
    check_choice,
    check_count,
    check_name,
    check_path,
    check_paths,
    check_patterns,
    check_step,
    check_storage_options,
    check_timeout,
    check_type,
    did_you_mean,
    plain,
)


class Text(str):
    """A subclass that another process may be unable to import."""

    def __str__(self) -> str:
        return "other"


class Kind(str, enum.Enum):
    A = "a"


class Number(enum.IntEnum):
    TWO = 2


class Seconds(float):
    """A subclass of float."""


def same(value: Any, expected: Any) -> bool:
    """Returns whether two values, and those in them, are equal and of the same types."""
    if isinstance(expected, dict):
        expected, value = list(expected.items()), list(value.items())
    if isinstance(expected, list | tuple):
        return type(value) is type(expected) and all(map(same, value, expected)) and len(value) == len(expected)
    return type(value) is type(expected) and bool(value == expected)


def test_subclasses_become_plain() -> None:
    """Text and numbers lose their subclass, at any depth; a bool and another object stay."""
    odd = {Text("a"): [Number.TWO, (Seconds(0.5), Kind.A)], "b": {"c": np.float64(1.5)}, "d": True, "e": None}
    assert same(plain(odd), {"a": [2, (0.5, "a")], "b": {"c": 1.5}, "d": True, "e": None})
    other = object()
    assert plain(other) is other


def test_checks_return_plain_values() -> None:
    """What is stored, sent or compared is an int, a float, a str or a tuple, whatever was passed."""
    assert same(check_path(Text("/a")), "/a")
    assert same(check_path(Path("/a")), "/a")
    assert same(check_name("name", Text("a")), "a")
    assert same(check_choice("staging", Kind.A, ("a", "b")), "a")
    for seconds in (np.float16(60), 60, Fraction(60), Seconds(60)):
        assert same(check_timeout(seconds), 60.0)
    assert check_timeout(None, optional=True) is None
    for count in (np.uint8(2), Number.TWO):
        assert same(check_count("every", count), 2)
    assert same(check_storage_options({Text("a"): {"b": Number.TWO}}), {"a": {"b": 2}})
    assert check_storage_options(None) == {}


def test_patterns_and_paths_are_lists() -> None:
    """They may also be iterable only once. One str, whose letters would be the items, is refused."""
    assert same(check_patterns("include", ["a.*", Text("b")]), ("a.*", "b"))
    assert check_patterns("include", (key for key in "ab")) == ("a", "b")
    assert check_paths("files", iter(["/a", Path("b")])) == ("/a", Path("b"))
    for value in ("model.*", [7], 7, {"a": 1}, None):
        with pytest.raises(TypeError, match=r"^include must be a list of patterns, got "):
            check_patterns("include", value)
        with pytest.raises(TypeError, match=r"^files must be a list of paths, got "):
            check_paths("files", value)
    with pytest.raises(ValueError, match=r"^files must not contain an empty path\.$"):
        check_paths("files", ["a", ""])


def test_names_can_be_stored() -> None:
    """A lone surrogate is refused, because UTF-8 has none."""
    with pytest.raises(ValueError, match=r"^name must be valid Unicode, got 'a.ud800', which has a lone surrogate\.$"):
        check_name("name", "a\ud800")
    with pytest.raises(TypeError, match=r"^name must be a str, got int\.$"):
        check_name("name", 7)


@pytest.mark.parametrize("value", ["/a", "s3://bucket/a", "", Path("a")])
def test_paths_are_strings_and_path_likes(value: Any) -> None:
    """A path may be a str, an `os.PathLike` or a URL."""
    check_path(value)


@pytest.mark.parametrize(
    ("value", "kind"), [(b"/a", "bytes"), (7, "int"), (None, "None"), (["s3://user:hunter2@host"], "list")]
)
def test_other_paths_are_refused_by_their_type_alone(value: Any, kind: str) -> None:
    """The error shows only the type, because the value may hold a password."""
    with pytest.raises(TypeError, match=rf"^path must be a str or an os\.PathLike, got {kind}\.$"):
        check_path(value)


def test_a_path_like_of_bytes_is_refused() -> None:
    """An `os.PathLike` that returns bytes is refused, as bytes are."""

    class Bytes:
        def __fspath__(self) -> bytes:
            return b"/a"

    with pytest.raises(TypeError, match=r"^path must be a str or an os.PathLike of a str, got bytes from Bytes\.$"):
        check_path(Bytes())


@pytest.mark.parametrize("value", [0.1, 1, 600.0, np.float32(5), threading.TIMEOUT_MAX])
def test_timeouts_are_positive_and_finite(value: Any) -> None:
    """A timeout may be as long as the system can wait."""
    check_timeout(value)


@pytest.mark.parametrize("value", [0, 0.0, -1, math.inf, -math.inf, math.nan, 1e300, 10**400, -(10**400)])
def test_other_timeouts_are_refused(value: float) -> None:
    """The error has the name, the allowed values and the value."""
    with pytest.raises(
        ValueError, match=rf"^timeout must be more than 0 seconds, and at most 9\d+, got {re.escape(repr(value))}\.$"
    ):
        check_timeout(value)


def test_a_timeout_of_zero() -> None:
    """With `least=0`, as in `close`, 0 seconds are allowed, and negative values are not."""
    check_timeout(0, least=0)
    for value in (-1e-9, math.inf, math.nan):
        with pytest.raises(ValueError, match=r"must be at least 0 seconds, and at most 9"):
            check_timeout(value, least=0)


@pytest.mark.parametrize("value", ["600", None, True, [600]])
def test_timeouts_are_numbers(value: Any) -> None:
    """Values that could be converted to a number are refused."""
    with pytest.raises(TypeError, match=r"^timeout must be a number of seconds, got "):
        check_timeout(value)


@pytest.mark.parametrize("value", [1, 64, np.int64(3), None])
def test_thread_counts(value: Any) -> None:
    """A thread count is at least 1, or None."""
    check_count("thread_count", value, optional=True)


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-2, ValueError), (2.0, TypeError), (True, TypeError)])
def test_other_thread_counts_are_refused(value: Any, error: type[Exception]) -> None:
    """0 does not count as None, nor True as 1."""
    with pytest.raises(error, match=r"^thread_count.* must be an int of at least 1, or None"):
        check_count("thread_count", value, optional=True)


def test_a_required_count() -> None:
    """Without ``optional``, None is refused."""
    check_count("buffer_bytes", 1)
    with pytest.raises(TypeError, match=r"^buffer_bytes must be an int of at least 1, got None\.$"):
        check_count("buffer_bytes", None)
    with pytest.raises(ValueError, match=r"^buffer_bytes must be an int of at least 1, got 0\.$"):
        check_count("buffer_bytes", 0)


def test_steps() -> None:
    """A step is any integer from 0 to 2**63 - 1."""
    assert [check_step(step) for step in (0, np.int32(7), 2**63 - 1)] == [0, 7, 2**63 - 1]
    for step, error in ((-1, ValueError), (2**63, ValueError), (True, TypeError), (1.0, TypeError), ("1", TypeError)):
        with pytest.raises(error, match=r"^step"):
            check_step(step)


def test_storage_options_are_a_mapping_with_names_for_keys() -> None:
    """Other types and keys are refused. Errors show no values."""
    check_storage_options(None)
    check_storage_options({"key": "hunter2"})
    with pytest.raises(TypeError, match=r"^storage_options must be a mapping, or None, got list\.$"):
        check_storage_options([("key", "hunter2")])
    with pytest.raises(TypeError, match=r"^storage_options must have str keys, got int\.$"):
        check_storage_options({7: "hunter2"})


def test_functions() -> None:
    """A callback is callable or None."""
    check_callable("on_report", print)
    check_callable("on_report", None)
    with pytest.raises(TypeError, match=r"^on_report must be callable, or None, got int\.$"):
        check_callable("on_report", 5)


def test_choices() -> None:
    """The error lists the allowed values."""
    check_choice("staging", "a", ("a", "b"))
    with pytest.raises(ValueError, match=r"^staging must be one of 'a', 'b', got 'c'\.$"):
        check_choice("staging", "c", ("b", "a"))
    with pytest.raises(ValueError, match=r"^staging must be one of 'a', 'b', got \['a'\]\.$"):
        check_choice("staging", ["a"], ("a", "b"))


def test_types() -> None:
    """The error names the expected type."""
    assert check_type("limits", 5, int) == 5
    with pytest.raises(TypeError, match=r"^limits must be an instance of int, got str\.$"):
        check_type("limits", "5", int)


@dataclasses.dataclass(frozen=True)
class Limits:
    count: int = 3


class OwnLimits(Limits):
    """A subclass of options."""


def test_a_subclass_of_options_becomes_the_options() -> None:
    """Its fields count, and another process need not know the subclass."""
    limits = check_type("limits", OwnLimits(5), Limits)
    assert (type(limits), limits) == (Limits, Limits(5))


def test_close_names_are_suggested() -> None:
    """Each unknown name gets its closest choice, if one is close."""
    assert did_you_mean(["fp16"], ["float16", "float64"]) == ": did you mean 'float16'?"
    assert did_you_mean(["tokne", "kye"], {"token": 1, "key": 2}) == ": did you mean 'token' and 'key'?"
    assert did_you_mean(["colour"], ["token"]) == ""
