"""Brings a checkpoint back into a state dict: all of it, or the keys that are chosen."""

from __future__ import annotations

import dataclasses
import fnmatch
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from .._storage.base import Storage
from ..any_format import open_reader
from ..errors import (
    CheckpointError,
    DecryptionError,
    MetadataError,
    ReadError,
    StateMismatch,
    UnsupportedFormat,
    UntrustedObject,
    WriteError,
    describe,
    unwrap,
)
from ..planner import LoadPlanner
from .catalogue import Step

__all__ = ["Selection", "SelectivePlanner", "error_of_load", "load_first"]

logger = logging.getLogger("dcp_tensorizer")

_LOCK_SECONDS = 60.0  # a clean-up that holds the lock takes milliseconds
_KEYS_SHOWN = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """Which keys of a flattened state dict are loaded.

    A pattern is of a key, or of a list that the key is in: a save takes a list for one value.

    Attributes:
        include: Patterns, as `fnmatch` has them; empty for all keys.
        exclude: Patterns of keys that stay as they are.
        strict: A key that the checkpoint does not have is an error; otherwise it stays as it is.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    strict: bool = True

    @property
    def is_all(self) -> bool:
        """Every key is loaded."""
        return not self.include and not self.exclude

    def has(self, names: Iterable[str]) -> bool:
        """Whether a key is loaded, by its name and those of the lists that it is in."""
        return (not self.include or _matches(names, self.include)) and not _matches(names, self.exclude)

    def check(self, keys: Sequence[str], known: Set[str]) -> None:
        """Raises `MetadataError` for a pattern that is of nothing: it is a slip of the pen.

        Args:
            keys: Of the state, for the message.
            known: The names of all keys, and of the lists that they are in. What is of a key of the checkpoint alone
                may be of another rank's state: each stage of a pipeline has its own.
        """
        for pattern in (*self.include, *self.exclude):
            if not _matches(known, [pattern]):
                shown = ", ".join(map(repr, keys[:_KEYS_SHOWN]))
                raise MetadataError(f"no key of the state matches {pattern!r}. Keys are as these: {shown}")


def load_first(
    folder: Storage,
    steps: Sequence[Step],
    state: dict[str, Any],
    selection: Selection,
    group: dist.ProcessGroup | None,
    options: Mapping[str, Any],
) -> int | None:
    """Loads the first checkpoint that is not damaged; returns which one that is, or None if there are none.

    Args:
        folder: Of the checkpoints.
        steps: Those that may be loaded.
        state: What to load it into.
        selection: Which keys.
        group: Of the ranks.
        options: For the reader.

    Raises:
        CheckpointError: one of them is whole and cannot be loaded, or the last of them is damaged; on any rank, and
            the same on all of them.
    """
    for number, step in enumerate(steps):
        storage = folder.child(step.name)
        planner = SelectivePlanner(storage.path, selection)
        try:
            _load(folder, storage, state, planner, group, options)
        except (ReadError, MetadataError) as error:
            if number + 1 == len(steps) or isinstance(error, _NO_DAMAGE):
                raise
            logger.error("%s cannot be restored; trying the one before: %s", storage.path, error)
            if planner.has_begun:  # the state may hold some of it: nothing may stay as it is now
                selection = dataclasses.replace(selection, strict=True)
        else:
            return number
    return None


_NO_DAMAGE = (DecryptionError, UntrustedObject, UnsupportedFormat, StateMismatch)


def _load(
    folder: Storage,
    storage: Storage,
    state: dict[str, Any],
    planner: SelectivePlanner,
    group: dist.ProcessGroup | None,
    options: Mapping[str, Any],
) -> None:
    """Loads a checkpoint, under a lock that keeps others from deleting it; see `load_first`."""
    with _shared_lock(storage):
        try:
            dcp_load(
                state,
                checkpoint_id=storage.location,
                storage_reader=open_reader(folder.location, **options),
                planner=planner,
                process_group=group,
            )
        except CheckpointException as error:
            failure = error_of_load(storage.path, error)
            raise failure from failure.__cause__


def error_of_load(path: str, error: BaseException) -> CheckpointError:
    """What a load has raised, as an error of this package."""
    cause = unwrap(error)
    if isinstance(cause, CheckpointError):
        return cause
    advice = ". With strict=False it stays as it is" if "Missing key in checkpoint" in str(cause) else ""
    misfit = StateMismatch(f"{path} cannot be loaded: {describe(cause)}{advice}")
    misfit.__cause__ = cause
    return misfit


@contextmanager
def _shared_lock(storage: Storage) -> Iterator[None]:
    if not storage.locks_are_visible:
        yield
        return
    lock = None
    with suppress(WriteError):  # it cannot be locked, and the load says whether it can be read
        lock = storage.lock_directory()
        lock.share(_LOCK_SECONDS)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


class SelectivePlanner(LoadPlanner):
    """Plans loads for the keys that are chosen.

    Attributes:
        has_begun: All ranks have agreed on what to read: from here on the state changes.
    """

    def __init__(self, path: str, selection: Selection) -> None:
        super().__init__(allow_partial_load=not selection.strict)
        self.has_begun = False
        self._path = path
        self._selection = selection

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Called by DCP with what this rank is to read."""
        self.has_begun = True
        return super().finish_plan(new_plan)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Called by DCP with the state and what the checkpoint holds: what is not chosen is in neither from here on."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        assert metadata is not None
        stored = metadata.state_dict_metadata
        if not self._selection.is_all:
            recorded = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
            paths = recorded | getattr(self, "mappings", {})
            names = {key: {key, *_lists_around(paths.get(key, ()))} for key in {*self.state_dict, *stored}}
            self._selection.check(list(self.state_dict), set().union(*names.values()))
            has = self._selection.has
            self.state_dict = {key: value for key, value in self.state_dict.items() if has(names[key])}
            chosen = {key: value for key, value in stored.items() if has(names[key])}
            self.metadata = dataclasses.replace(metadata, state_dict_metadata=chosen)
        if missing := [key for key in self.state_dict if key not in stored]:
            self._report_missing(missing)

    def _report_missing(self, keys: list[str]) -> None:
        shown = ", ".join(map(repr, keys[:_KEYS_SHOWN])) + (", ..." if len(keys) > _KEYS_SHOWN else "")
        if self._selection.strict:
            return  # torch looks for keys of its older releases, and names what is not there
        logger.warning("%s has no %s: they stay as they are (strict=False)", self._path, shown)


def _lists_around(path: Sequence[str | int]) -> Iterator[str]:
    """The names of the lists that a value is in, by its path in the nested state dict."""
    return (".".join(map(str, path[:depth])) for depth, part in enumerate(path) if type(part) is int)


def _matches(names: Iterable[str], patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)
