"""The options of a manager, and the checks of its arguments."""

from __future__ import annotations

import dataclasses
import fnmatch
import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch

from .._runtime.validation import check_count, check_timeout, check_type, did_you_mean
from .._tensor_file.encryption import decryption_key
from .._writer_process.options import SaveLimits
from ..models import Export
from ..reader import TensorizerStorageReader
from ..writer import TensorizerStorageWriter


def check_step(step: object) -> int:
    """Returns a step as an int; raises `TypeError` for other types, and `ValueError` below 0 or beyond 63 bits."""
    if not isinstance(step, Integral) or isinstance(step, bool):
        raise TypeError(f"step must be an int, and is {type(step).__name__}")
    if not 0 <= int(step) < 2**63:
        raise ValueError(f"step={step!r} must be at least 0, and have at most 63 bits")
    return int(step)


def check_metrics(metrics: object) -> dict[str, float]:
    """Returns metrics as plain numbers; a tensor of one element counts as a number.

    Raises `TypeError`, naming the metric, unless they are a mapping from names to numbers.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be a mapping from names to numbers, and is {type(metrics).__name__}")
    checked = {}
    for name, value in metrics.items():
        try:
            checked[name] = float(value.detach() if isinstance(value, torch.Tensor) else value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"metrics[{name!r}] must be a number, and is {type(value).__name__}: {error}") from None
        if not isinstance(name, str):
            raise TypeError(f"metrics must have names for keys, and one is {type(name).__name__}")
    return checked


def check_patterns(name: str, patterns: object) -> tuple[str, ...]:
    """Returns patterns of keys; raises `TypeError` for a string, of which each letter would be a pattern."""
    if isinstance(patterns, str) or not isinstance(patterns, Sequence):
        raise TypeError(f"{name} must be a list of patterns, and is {patterns!r}")
    if odd := [pattern for pattern in patterns if not isinstance(pattern, str)]:
        raise TypeError(f"{name} must be a list of patterns, and {odd[0]!r} is none")
    return tuple(patterns)


def matches(names: Iterable[str], patterns: Iterable[str]) -> bool:
    """Returns whether a pattern matches one of some names, as in `fnmatch`."""
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


def check_growth(grow: object) -> tuple[tuple[str, float | None], ...]:
    """Returns patterns of tensors that may grow, with the value of their new elements; raises `TypeError`."""
    if not isinstance(grow, Mapping):
        raise TypeError(f"grow must be a dict of patterns and values, and is {type(grow).__name__}")
    for pattern, value in grow.items():
        if not isinstance(pattern, str):
            raise TypeError(f"grow must be a dict of patterns and values, and {pattern!r} is no pattern")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise TypeError(f"grow[{pattern!r}] must be a number, or None, and is {type(value).__name__}")
    return tuple(grow.items())


def check_state(state: object) -> None:
    """Raises `TypeError` unless a state is a mapping whose keys can be sorted. A bare module has no key."""
    if not isinstance(state, Mapping):
        name = "optimizer" if isinstance(state, torch.optim.Optimizer) else "model"
        raise TypeError(f'state must be a dict, as {{"{name}": {name}}}, and is {type(state).__name__}')
    try:
        sorted(state)  # dcp.load does the same
    except TypeError:
        kinds = {type(key).__name__: key for key in state}
        shown = " and ".join(f"{key!r}, of type {kind}" for kind, key in list(kinds.items())[:2])
        raise TypeError(
            f"state has keys that cannot be sorted, such as {shown}: a load would fail. Use str keys"
        ) from None


def split_limits(writer_options: dict[str, Any], own: Iterable[str] = ()) -> tuple[SaveLimits, int | None]:
    """Takes the limits out of the writer's options: returns those for the writer, and how many saves may fail.

    The manager counts failures itself, because a writer only knows those of its own rank. ``own`` are the names of the
    manager's own options. Raises `TypeError` for other limits, and for options of neither.
    """
    known = inspect.signature(TensorizerStorageWriter).parameters.keys() - {"path"}
    if unknown := sorted(writer_options.keys() - known):
        choices = {*own, *known}.difference(unknown)  # the name of a constructor's ``**`` is no option
        hint = did_you_mean(unknown[:1], sorted(choices)) or "."
        raise TypeError(
            f"CheckpointManager has no option {unknown[0]!r}{hint} Besides its own it takes those of "
            f"TensorizerStorageWriter"
        )
    limits = writer_options.pop("limits", SaveLimits())
    check_type("limits", limits, SaveLimits)
    assert isinstance(limits, SaveLimits)
    return dataclasses.replace(limits, max_consecutive_failures=None), limits.max_consecutive_failures


def check_survival(seconds: object, every: object, buffers: object, writer_options: Mapping[str, Any]) -> None:
    """Checks the options for states in memory.

    Raises `TypeError` unless they are numbers, and `ValueError` if they are invalid, or not with the writer's
    options.
    """
    check_timeout(seconds, least=0, name="survive")
    if seconds and writer_options.get("staging") == "shared":
        raise ValueError(
            "survive and staging='shared' cannot be combined: what is not copied is gone with the process that has it"
        )
    if seconds and not writer_options.get("cache_staged_state_dict", True):
        raise ValueError("survive and cache_staged_state_dict=False cannot be combined: the buffers hold the states")
    check_count("survive_every", every, optional=True)
    check_count("buffers", buffers)
    if buffers not in (2, 3):
        raise ValueError(f"buffers={buffers!r} must be 2 or 3: one is written, and another one has the newest state")
    if every is not None and not (seconds and buffers == 3):
        raise ValueError("survive_every needs survive= and 3 buffers: it keeps steps beside a save that runs")


def check_export(export: object, writer_options: Mapping[str, Any]) -> None:
    """Checks the options for exports.

    Raises `TypeError` unless it is an `Export`, and `ValueError` if the writer's options leave no staged state to
    export.
    """
    if export is None:
        return
    check_type("export", export, Export)
    if writer_options.get("staging") == "shared":
        raise ValueError("export and staging='shared' cannot be combined: what is not copied changes meanwhile")
    if not writer_options.get("cache_staged_state_dict", True):
        raise ValueError(
            "export and cache_staged_state_dict=False cannot be combined: the buffer holds what is exported"
        )


def options_of_reader(
    folder: str | os.PathLike[str], writer_options: Mapping[str, Any], limits: SaveLimits, given: object
) -> dict[str, Any]:
    """The options of readers: those ``given``, and those of the writer that readers have, too.

    Raises what `TensorizerStorageReader` raises for others.
    """
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"reader_options must be a mapping, or None, and is {type(given).__name__}")
    # A job reads its checkpoint once. To read it past the page cache is quicker, and leaves that memory to the data of
    # training.
    known = {"page_cache": False, "storage_options": writer_options.get("storage_options"), "timeout": limits.timeout}
    if writer_options.get("local") is not None:
        known["local"] = writer_options["local"]
    if (encryption := writer_options.get("encryption")) is not None:
        known["encryption"] = decryption_key(key=bytes(encryption.key))
    options = known | dict(given or {})
    TensorizerStorageReader(folder, **options)  # checks them
    return options
