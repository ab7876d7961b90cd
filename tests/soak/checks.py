"""What the parts of the soak save, how they load it, and what may lie in a directory of checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_tensorizer import TensorizerStorageReader
from dcp_tensorizer._formats.safetensors_header import INDEX, SINGLE, files_named
from dcp_tensorizer._job.steps import LATEST
from dcp_tensorizer._storage.lease import lease_file_name
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._tensor_file.names import is_metadata_file_name
from dcp_tensorizer.errors import CheckpointError, NotCommitted
from dcp_tensorizer.tools import Collected, collect
from dcp_tensorizer.tools._view import data_files, read_parts

__all__ = ["Wrong", "cause_of", "collect_all", "left_over", "load", "state"]

_BESIDE = {"config.json", LATEST, lease_file_name("step-N")}  # what people, and jobs, put beside checkpoints
_KEEP_ALL = 1 << 30


class Wrong(Exception):
    """A checkpoint was loaded that is not what anybody saved."""


def state(step: int, numbers: int, name: str = "weight", blank: bool = False) -> dict[str, Any]:
    """A state of ``numbers`` and a few more, each of which tells its step, and as many that are always the same."""
    values = torch.arange(numbers) + step
    small = {f"{name}.small{n}": torch.full((7 + n,), step, dtype=torch.float64) for n in range(3)}
    full = {name: values, f"{name}.frozen": torch.arange(numbers), **small, "nested": {"scale": torch.tensor(step)}}
    return {**(_zeroed(full) if blank else full), "step": 0 if blank else step}


def _zeroed(values: dict[str, Any]) -> dict[str, Any]:
    return {key: _zeroed(v) if isinstance(v, dict) else torch.zeros_like(v) for key, v in values.items()}


def load(path: Path, numbers: int, name: str = "weight", **options: Any) -> int | None:
    """The step of the checkpoint at a path, None if there is none.

    Raises:
        Wrong: it is not whole, or not what was saved.
        CheckpointError: the loading rank's own, for what could not be loaded.
    """
    target = state(0, numbers, name, blank=True)
    try:
        dcp.load(target, storage_reader=TensorizerStorageReader(path), **options)
    except CheckpointException as error:
        cause = cause_of(error)
        if isinstance(cause, NotCommitted):
            return None
        raise cause from None
    step = int(target["step"])
    if not same(target, state(step, numbers, name)):
        raise Wrong(f"{path} is not what step {step} saved")
    return step


def same(one: Any, other: Any) -> bool:
    """Whether two states have the same keys and bits."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def cause_of(error: BaseException) -> Exception:
    """The first rank's own error."""
    if isinstance(error, CheckpointException):
        (cause, _), *_ = error.failures.values()
        assert isinstance(cause, Exception)
        return cause
    assert isinstance(error, Exception)
    return error


def collect_all(root: Path, keep: int = _KEEP_ALL) -> tuple[Collected, ...]:
    """``gc --older-than 0``: for when nothing is in progress. Without ``keep`` all checkpoints stay."""
    return collect(root, keep_latest=keep, older_than=0.0)


def left_over(root: Path) -> list[str]:
    """Files below a directory that no metadata, and no index of a model, names."""
    left = []
    for folder, _, files in os.walk(root):
        metadata = {name for name in files if is_metadata_file_name(name)}
        try:
            known = data_files(read_parts(open_storage(folder))).keys() if metadata else set()
        except CheckpointError:  # damaged, which shows when it is loaded
            continue
        model = {SINGLE}
        if INDEX in files:
            model |= {INDEX} | files_named(Path(folder, INDEX).read_bytes())
        left += [f"{folder}/{name}" for name in set(files) - known - metadata - model - _BESIDE]
    return sorted(left)
