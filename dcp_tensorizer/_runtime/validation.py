"""Checks users' arguments. Errors name the argument, the allowed values and the given value.

For a value that may contain a secret, the error shows only its type.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import threading
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def check_path(value: object) -> None:
    """Raises `TypeError` unless the value is a path or a URL. The error omits the value: a URL may hold a password."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"path must be a str or an os.PathLike, got {_type(value)}.")
    if not isinstance(os.fspath(value), str):
        raise TypeError(
            f"path must be a str or an os.PathLike of a str, got {_type(os.fspath(value))} from {_type(value)}."
        )


def check_timeout(value: object, *, least: float | None = None, name: str = "timeout") -> None:
    """Raises `TypeError` or `ValueError` unless the value is a number of seconds that the system can wait.

    The value must be at least ``least``. Without ``least`` it must be more than 0.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number of seconds, got {_type(value)}.")
    is_enough = float(value) > 0 if least is None else float(value) >= least
    if not (is_enough and float(value) <= threading.TIMEOUT_MAX):
        allowed = "more than 0 seconds" if least is None else f"at least {least:g} seconds"
        raise ValueError(f"{name} must be {allowed}, and at most {threading.TIMEOUT_MAX:.0f}, got {value!r}.")


def check_count(name: str, value: object, *, optional: bool = False) -> None:
    """Raises `TypeError` or `ValueError` unless the value is an int of at least 1, or None if ``optional``."""
    if value is None and optional:
        return
    allowed = "an int of at least 1" + (", or None" if optional else "")
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be {allowed}, got {_type(value)}.")
    if int(value) < 1:
        raise ValueError(f"{name} must be {allowed}, got {value!r}.")


def check_step(step: object) -> int:
    """Returns a step as an int. Raises `TypeError` unless it is an integer, and `ValueError` if it is out of range."""
    if not isinstance(step, Integral) or isinstance(step, bool):
        raise TypeError(f"step must be an int, got {_type(step)}.")
    if not 0 <= int(step) < 2**63:
        raise ValueError(f"step must be at least 0, and less than 2**63, got {step!r}.")
    return int(step)


def check_storage_options(value: object) -> None:
    """Raises `TypeError` unless the value is a mapping with str keys, or None. The error omits its values."""
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise TypeError(f"storage_options must be a mapping, or None, got {_type(value)}.")
    if odd := [key for key in value if not isinstance(key, str)]:
        raise TypeError(f"storage_options must have str keys, got {_type(odd[0])}.")


def check_callable(name: str, value: object) -> None:
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be callable, or None, got {_type(value)}.")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, sorted(choices)))}, got {value!r}.")


def check_type(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be an instance of {kind.__name__}, got {_type(value)}.")


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
