"""Checks the arguments of a manager, and derives from them the options of its writer and its readers."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .._runtime.validation import (
    check_count,
    check_name,
    check_timeout,
    check_type,
    did_you_mean,
    plain,
)
from .._tensor_file.encryption import decryption_key
from .._writer_process.options import SaveLimits
from ..models import Export
from ..reader import TensorizerStorageReader
from ..writer import TensorizerStorageWriter


def check_metrics(metrics: object) -> dict[str, float]:
    """Returns metrics as floats. A tensor of one element counts as a number.

    Raises `TypeError` unless ``metrics`` maps names to numbers, and `ValueError` if a name is not valid Unicode.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be a mapping from names to numbers, got {type(metrics).__name__}.")
    checked = {}
    for name, value in metrics.items():
        try:
            if isinstance(value, (str, bytes)):
                raise TypeError("text is not converted")
            number = float(value.detach() if isinstance(value, torch.Tensor) else value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise TypeError(f"metrics[{name!r}] must be a number, got {type(value).__name__}: {error}") from None
        checked[check_name("metrics: each name", name)] = number
    return checked


def check_growth(grow: object) -> tuple[tuple[str, float | None], ...]:
    if not isinstance(grow, Mapping):
        raise TypeError(f"grow must be a dict of patterns and values, got {type(grow).__name__}.")
    checked: dict[str, float | None] = {}
    for pattern, value in grow.items():
        if not isinstance(pattern, str):
            raise TypeError(f"grow must have str patterns as keys, got {pattern!r}.")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise TypeError(f"grow[{pattern!r}] must be a number, or None, got {type(value).__name__}.")
        checked[plain(pattern)] = plain(value)
    return tuple(checked.items())


def check_state(state: object) -> None:
    if not isinstance(state, Mapping):
        name = "optimizer" if isinstance(state, torch.optim.Optimizer) else "model"
        raise TypeError(f'state must be a dict, such as {{"{name}": {name}}}, got {type(state).__name__}.')
    try:
        sorted(state)  # dcp.load does the same
    except TypeError:
        kinds = {type(key).__name__: key for key in state}
        shown = " and ".join(f"{key!r} ({kind})" for kind, key in list(kinds.items())[:2])
        raise TypeError(
            f"state has keys that cannot be sorted, such as {shown}, so a load would fail. Use str keys."
        ) from None


def split_limits(writer_options: dict[str, Any], own: Iterable[str] = ()) -> tuple[SaveLimits, int | None]:
    """Removes the limits from the writer's options. Returns the writer's limits, and how many saves in a row may fail.

    The manager itself counts failures, because a writer counts them only on the coordinator. ``own`` are the names of
    the manager's own options.
    """
    known = inspect.signature(TensorizerStorageWriter).parameters.keys() - {"path"}
    if unknown := sorted(writer_options.keys() - known):
        choices = {*own, *known}.difference(unknown)  # `own` includes the name of the parameter `**writer_options`
        hint = did_you_mean(unknown[:1], sorted(choices)) or "."
        raise TypeError(
            f"CheckpointManager has no option {unknown[0]!r}{hint} Besides its own options, it takes those of "
            f"TensorizerStorageWriter."
        )
    limits = writer_options.pop("limits", SaveLimits())
    limits = check_type("limits", limits, SaveLimits)
    return dataclasses.replace(limits, max_consecutive_failures=None), limits.max_consecutive_failures


def check_survival(
    seconds: object, every: object, buffers: object, writer_options: Mapping[str, Any]
) -> tuple[float, int | None, int]:
    """Checks ``survive``, ``survive_every`` and ``buffers``, and returns them."""
    seconds = check_timeout(seconds, least=0, name="survive")
    if seconds and writer_options.get("staging") == "shared":
        raise ValueError(
            "survive cannot be combined with staging='shared': a state that is not copied is lost with its process."
        )
    if seconds and not writer_options.get("cache_staged_state_dict", True):
        raise ValueError("survive cannot be combined with cache_staged_state_dict=False: the buffers hold the states.")
    every = check_count("survive_every", every, optional=True)
    buffers = check_count("buffers", buffers)
    if buffers not in (2, 3):
        raise ValueError(f"buffers must be 2 or 3, got {buffers!r}.")
    if every is not None and not (seconds and buffers == 3 and writer_options.get("staging") != "device"):
        raise ValueError(
            "survive_every needs survive=, buffers=3 and a staging other than 'device', because it holds steps while a "
            "save runs."
        )
    return seconds, every, buffers


def check_export(export: object, writer_options: Mapping[str, Any]) -> None:
    if export is None:
        return
    check_type("export", export, Export)
    if writer_options.get("staging") == "shared":
        raise ValueError(
            "export cannot be combined with staging='shared': training changes a state that is not copied."
        )
    if not writer_options.get("cache_staged_state_dict", True):
        raise ValueError("export cannot be combined with cache_staged_state_dict=False: exports read the buffer.")


def check_no_local_folder(writer_options: Mapping[str, Any]) -> None:
    """Raises `ValueError` if options of a writer for a framework send checkpoints to a local folder first."""
    for name in ("local", "max_unflushed"):
        if writer_options.get(name) is not None:
            raise ValueError(
                f"writer_options has {name!r}, but frameworks load and remove checkpoints at the path, where each "
                f"checkpoint would arrive only after its save. Leave {name} out, or save with "
                f"CheckpointManager(local=...)."
            )


def options_of_reader(
    folder: str | os.PathLike[str], writer_options: Mapping[str, Any], limits: SaveLimits, given: object
) -> dict[str, Any]:
    """Returns the options of readers: those of ``given``, and defaults, most of which are the writer's options."""
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"reader_options must be a mapping, or None, got {type(given).__name__}.")
    # A job reads its checkpoint once. Bypassing the page cache is faster, and leaves the cache to training data.
    known = {"page_cache": False, "storage_options": writer_options.get("storage_options"), "timeout": limits.timeout}
    if writer_options.get("local") is not None:
        known["local"] = writer_options["local"]
    if (encryption := writer_options.get("encryption")) is not None:
        known["encryption"] = decryption_key(key=bytes(encryption.key))
    options = known | dict(given or {})
    TensorizerStorageReader(folder, **options)  # checks them
    return options
