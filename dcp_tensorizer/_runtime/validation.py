"""Checks users' arguments. Errors name the argument, the allowed values and the given value.

For a value that may contain a secret, the error shows only its type.

Checks return the value in the plain types int, float, str, tuple and dict. Other values, such as NumPy's numbers,
members of an enum and generators, behave differently when they are compared, sent to another process or iterated twice.
So callers use what a check returns, not what the user passed.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import threading
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_T = TypeVar("_T")


def plain(value: Any) -> Any:
    """Converts a value, and the contents of dicts, lists and tuples, from subclasses of the plain types to these types.

    Other processes may be unable to import a subclass. Returns other objects as they are.
    """
    if isinstance(value, str):
        return str.__str__(value)  # `str(value)` may return something else
    if isinstance(value, int | float) and not isinstance(value, bool):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


def check_path(value: object) -> str:
    """Returns a path or a URL as a str.

    Raises `TypeError` for other types. The error omits the value: a URL may hold a password.
    """
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"path must be a str or an os.PathLike, got {_type(value)}.")
    path = os.fspath(value)
    if not isinstance(path, str):
        raise TypeError(f"path must be a str or an os.PathLike of a str, got {_type(path)} from {_type(value)}.")
    return str.__str__(path)


def check_paths(name: str, value: object) -> tuple[str | os.PathLike[str], ...]:
    """Returns the paths in an iterable as a tuple.

    Raises `TypeError` for other values, such as a single path, and `ValueError` if a path is empty.
    """
    paths: tuple[str | os.PathLike[str], ...] = tuple(map(plain, _items(name, value, "paths", str | os.PathLike)))
    if not all(map(check_path, paths)):
        raise ValueError(f"{name} must not contain an empty path.")
    return paths


def check_patterns(name: str, value: object) -> tuple[str, ...]:
    """Returns the patterns in an iterable as a tuple. Raises `TypeError` for other values, such as a str."""
    return tuple(map(plain, _items(name, value, "patterns", str)))


def _items(name: str, value: object, what: str, kind: Any) -> tuple[Any, ...]:
    """Returns the items of an iterable, which may be iterable only once. Refuses a str, whose items are its letters."""
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | os.PathLike | Mapping):
        items = value = tuple(value)
        if all(isinstance(item, kind) for item in items):
            return items
    raise TypeError(f"{name} must be a list of {what}, got {value!r}.")


def check_name(what: str, value: object) -> str:
    """Returns a name as a str. Raises `TypeError` for other types, and `ValueError` if it cannot be stored as UTF-8."""
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, got {_type(value)}.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} must be valid Unicode, got {value!r}, which has a lone surrogate.") from None
    return str.__str__(value)


def check_number(value: object, otherwise: str) -> float:
    """Returns a number as a float, which is infinite if no float is large enough.

    Raises `TypeError` with the message ``otherwise`` and the type unless the value is a number.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{otherwise}, got {_type(value)}.")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]  # typeshed's Real has no comparisons


@overload
def check_timeout(
    value: object, *, least: float | None = None, name: str = "timeout", optional: Literal[False] = False
) -> float: ...
@overload
def check_timeout(
    value: object, *, least: float | None = None, name: str = "timeout", optional: Literal[True]
) -> float | None: ...
def check_timeout(
    value: object, *, least: float | None = None, name: str = "timeout", optional: bool = False
) -> float | None:
    """Returns a timeout in seconds as a float. If ``optional``, returns None for None.

    Raises `TypeError` or `ValueError` unless the timeout is at least ``least`` (without ``least``, more than 0), and
    not longer than the system can wait.
    """
    if value is None and optional:
        return None
    seconds = check_number(value, f"{name} must be a number of seconds" + (", or None" if optional else ""))
    is_enough = seconds > 0 if least is None else seconds >= least
    if not (is_enough and seconds <= threading.TIMEOUT_MAX):
        allowed = "more than 0 seconds" if least is None else f"at least {least:g} seconds"
        raise ValueError(f"{name} must be {allowed}, and at most {threading.TIMEOUT_MAX:.0f}, got {value!r}.")
    return seconds


@overload
def check_count(name: str, value: object, *, optional: Literal[False] = False) -> int: ...
@overload
def check_count(name: str, value: object, *, optional: Literal[True]) -> int | None: ...
def check_count(name: str, value: object, *, optional: bool = False) -> int | None:
    """Returns a number as an int. If ``optional``, returns None for None.

    Raises `TypeError` or `ValueError` unless it is at least 1.
    """
    if value is None and optional:
        return None
    allowed = "an int of at least 1" + (", or None" if optional else "")
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be {allowed}, got {_type(value)}.")
    if int(value) < 1:
        raise ValueError(f"{name} must be {allowed}, got {value!r}.")
    return int(value)


def check_step(step: object) -> int:
    """Returns a step as an int. Raises `TypeError` unless it is an integer, and `ValueError` if it is out of range."""
    if not isinstance(step, Integral) or isinstance(step, bool):
        raise TypeError(f"step must be an int, got {_type(step)}.")
    if not 0 <= int(step) < 2**63:
        raise ValueError(f"step must be at least 0, and less than 2**63, got {step!r}.")
    return int(step)


def check_storage_options(value: object) -> dict[str, Any]:
    """Returns storage options as a dict. Raises `TypeError` unless they are a mapping with str keys, or None.

    The error omits the values.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"storage_options must be a mapping, or None, got {_type(value)}.")
    if odd := [key for key in value if not isinstance(key, str)]:
        raise TypeError(f"storage_options must have str keys, got {_type(odd[0])}.")
    options: dict[str, Any] = plain(dict(value))
    return options


def check_callable(name: str, value: object) -> None:
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be callable, or None, got {_type(value)}.")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, sorted(choices)))}, got {value!r}.")
    return next(choice for choice in choices if choice == value)


def check_type(name: str, value: object, kind: type[_T]) -> _T:
    """Returns an instance of ``kind``. If ``kind`` is a dataclass, converts an instance of a subclass to ``kind``."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be an instance of {kind.__name__}, got {_type(value)}.")
    if dataclasses.is_dataclass(kind) and type(value) is not kind:
        return kind(**{field.name: getattr(value, field.name) for field in dataclasses.fields(kind)})
    return value


def set_fields(options: DataclassInstance, **values: object) -> None:
    """Sets fields of a frozen dataclass, in its ``__post_init__``, to what their checks have returned."""
    for name, value in values.items():
        object.__setattr__(options, name, value)


def check_flags(options: DataclassInstance | None = None, **flags: object) -> None:
    """Raises `TypeError` unless ``flags``, and the fields of ``options`` that are annotated as bool, are bools.

    A field that is annotated as ``bool | None`` may be None. The annotations of ``options`` must be strings.
    """
    fields: tuple[dataclasses.Field[Any], ...] = () if options is None else dataclasses.fields(options)
    given = {field.name: getattr(options, field.name) for field in fields if field.type in ("bool", "bool | None")}
    optional = {field.name for field in fields if field.type == "bool | None"}
    for name, value in (given | flags).items():
        if not (isinstance(value, bool) or (value is None and name in optional)):
            allowed = "True, False or None" if name in optional else "True or False"
            raise TypeError(f"{name} must be {allowed}, got {value!r}.")


def did_you_mean(names: Iterable[str], choices: Iterable[str]) -> str:
    """Returns the end of a message about unknown names: the choices that are close to them, or an empty string."""
    choices = list(choices)
    close = [match for name in names for match in difflib.get_close_matches(name, choices, n=1, cutoff=0.5)]
    return f": did you mean {' and '.join(map(repr, close))}?" if close else ""


def _type(value: object) -> str:
    return "None" if value is None else type(value).__name__
