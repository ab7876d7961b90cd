"""Loads a checkpoint, or a state in memory, into a state dict: all of it, or a selection of keys."""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack, closing, suppress
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.stateful import Stateful

from .._index.schema import SaveRecord
from .._loading.deliver import EMPTY_DICT, keys_below_empty_dicts, recorded_paths
from .._memory.checkpoint import StateReader
from .._memory.protocol import StateHead
from .._memory.survival import AllMemory, Predecessors
from .._memory.wire import Address
from .._models.ties import identity_of
from .._planning.read_items import has_older_keys
from .._runtime.patterns import matches
from .._runtime.torch_compat import local_parts, whole_size
from .._runtime.validation import check_flags
from .._storage.base import Storage
from ..data_parallel import other_sizes
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
    listed,
    unwrap,
)
from ..planner import LoadPlanner
from ..reader import AnyFormatReader
from .optimizer_state import OptimizerTarget, dtypes_kept
from .ranks import Agreement, Heartbeats
from .steps import Step

logger = logging.getLogger("dcp_tensorizer")

_LOCK_SECONDS = 60.0  # a load's timeout for the directory's lock, which a clean-up holds for milliseconds
_SHAPES_SHOWN = 20
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """Selection of keys of a flattened state dict. The attributes are the arguments of `CheckpointManager.restore`.

    Patterns match a key, or the name of a list that contains the key, because the ``exclude`` of a save matches a list
    by its name.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    strict: bool = True
    allow_shape_mismatch: bool = False
    grow: tuple[tuple[str, float | None], ...] = ()

    def __post_init__(self) -> None:
        check_flags(self)

    def has(self, names: Iterable[str]) -> bool:
        """Returns whether a key is selected, given its name and the names of the lists that contain it."""
        return (not self.include or matches(names, self.include)) and not matches(names, self.exclude)

    def value_beyond(self, key: str) -> tuple[float | None] | None:
        """Returns the value of a tensor's new elements, by the first pattern that matches its key, in a tuple of one.

        If the tensor may not be larger than the stored one, returns None.
        """
        return next(((value,) for pattern, value in self.grow if matches((key,), (pattern,))), None)

    def check(self, keys: Sequence[str], known: Set[str]) -> None:
        """Raises `MetadataError` for a pattern that matches nothing, which is probably a typo.

        ``keys`` are the state's, for the message. ``known`` are the names of all keys, and of the lists that contain
        them. They include keys that only the checkpoint has, because each pipeline stage has its own keys.
        """
        for pattern in (*self.include, *self.exclude, *(pattern for pattern, _ in self.grow)):
            if not matches(known, [pattern]):
                raise MetadataError(
                    f"no key of the state matches {pattern!r}, and no key of the checkpoint does. The state has "
                    f"{listed(keys)}"
                )


def load_first(
    folder: Storage,
    steps: Sequence[Step],
    state: dict[str, Any],
    selection: Selection,
    heartbeats: Heartbeats,
    options: Mapping[str, Any],
) -> int | None:
    """Loads the first undamaged checkpoint. Returns its index in ``steps``, or None if ``steps`` is empty.

    Raises `CheckpointError`, on all ranks, if an undamaged checkpoint cannot be loaded, if the last one is damaged, or
    if a rank is gone.
    """
    for number, step in enumerate(steps):
        storage = folder.child(step.name)
        planner = SelectivePlanner(storage.path, selection, state)
        try:
            _load(folder, storage, state, planner, heartbeats, options)
        except (ReadError, MetadataError) as error:
            if number + 1 == len(steps) or isinstance(error, _NO_DAMAGE):
                raise
            logger.error("%s cannot be restored; trying the previous checkpoint: %s", storage.path, error)
            if planner.has_begun:  # part of the state may be overwritten, so the next load must overwrite all of it
                selection = dataclasses.replace(selection, strict=True, allow_shape_mismatch=False)
        else:
            return number
    return None


_NO_DAMAGE = (DecryptionError, UntrustedObject, UnsupportedFormat, StateMismatch)


def _load(
    folder: Storage,
    storage: Storage,
    state: dict[str, Any],
    planner: SelectivePlanner,
    heartbeats: Heartbeats,
    options: Mapping[str, Any],
) -> None:
    """Loads a checkpoint, under a lock that prevents its deletion."""
    with ExitStack() as stack:
        if storage.locks_are_visible:
            with suppress(WriteError):  # without a lock, the load still shows whether the checkpoint can be read
                stack.enter_context(storage.lock_directory()).share(_LOCK_SECONDS)
        reader = AnyFormatReader(folder.location, **options)
        heartbeats.watch_load(reader)
        planner.read_objects = reader.read_objects
        try:
            with dtypes_kept(state.values()):
                dcp_load(
                    state,
                    checkpoint_id=storage.location,
                    storage_reader=reader,
                    planner=planner,
                    process_group=heartbeats.group,
                    no_dist=heartbeats.group is None,
                )
        except RuntimeError as error:
            if (gone := heartbeats.error_of(error, f"{storage.path} was not loaded")) is None:
                raise
            raise gone from error
        except CheckpointException as error:
            failure = error_of_load(storage.path, error)
            raise failure from failure.__cause__


class Problem(NamedTuple):
    """Reason why a state in memory could not be loaded."""

    error: CheckpointError
    is_damage: bool  # the state is damaged; if False, it does not fit the target
    is_whole: bool  # all parts of the state were available; if False, the state may fit once all are available
    has_touched: bool  # part of the target may have been overwritten


def load_from_memory(
    found: Predecessors,
    head: StateHead,
    memory: AllMemory,
    path: str,
    agreement: Agreement,
    state: dict[str, Any],
    selection: Selection,
    options: Mapping[str, Any],
) -> SaveRecord | Problem:
    """Loads the state that `Survival.newest_state` found, and returns its record.

    If the load fails on any rank, logs why, and returns the `Problem`. ``path`` is the job's folder. Raises
    `CheckpointError`, on all ranks, if a complete state does not fit the target, or a rank is gone.
    """
    started = time.perf_counter()
    name = f"the state of step {head.step} in memory on rank {agreement.rank}"
    load = functools.partial(_loaded, found, head, agreement.rank, name, state, selection, options)
    loaded, own = load(memory.holders(head, agreement.rank))
    problems = agreement.gathered(own)
    is_part = head.world_size == agreement.size and memory.holders(head)
    if is_part and any(p is not None and not (p.is_damage or p.is_whole) for p in problems):
        loaded, own = load(memory.holders(head))  # the target has a different sharding, so each rank needs all parts
        problems = agreement.gathered(own)
    if problem := joint_problem(problems):
        logger.error("the state of step %d in memory cannot be loaded: %s", head.step, problem.error)
        return problem
    found.forget_all_but(head.id)
    with dtypes_kept(state.values()):
        for key, value in loaded.items():
            if isinstance(state[key], Stateful):
                state[key].load_state_dict(value)
            else:
                state[key] = value
    seconds = time.perf_counter() - started
    logger.info("%s: step %d is restored from memory (%.3f s)", path, head.step, seconds)
    assert head.record is not None
    return head.record


def _loaded(
    found: Predecessors,
    head: StateHead,
    rank: int,
    path: str,
    state: dict[str, Any],
    selection: Selection,
    options: Mapping[str, Any],
    elsewhere: Mapping[int, Sequence[Address]],
) -> tuple[dict[str, Any], Problem | None]:
    """Loads a state on this rank alone. Returns the loaded values, and the problem or None.

    ``elsewhere`` has, by the rank of each part, the keepers that hold the part, on any host. If a part is damaged or
    unreadable, the next keeper that holds it is used.
    """
    damaged: set[tuple[int, str]] = set()
    is_whole, has_begun = True, False
    first: CheckpointError | None = None
    while True:
        planner = SelectivePlanner(path, selection, state)
        checkpoint = None
        try:
            plain = {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state.items()}
            checkpoint = found.open(head.id, rank, path, elsewhere, damaged)
            is_whole = checkpoint.is_whole
            reader = StateReader(checkpoint, options)
            planner.read_objects = reader.read_objects
            with closing(checkpoint), warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # torch warns of a load in a single process
                dcp_load(plain, storage_reader=reader, planner=planner, no_dist=True)
        except (Exception, CheckpointException) as error:
            cause = error_of_load(path, error)
            has_begun = has_begun or planner.has_begun
            first = first or cause
            part = checkpoint.part_in(str(cause)) if checkpoint is not None and isinstance(cause, ReadError) else None
            if checkpoint is None or part is None:
                return {}, Problem(first, isinstance(cause, ReadError), is_whole, has_begun)
            holder = checkpoint.holders[part]
            damaged.add((part, holder))
            logger.error("rank %d's part of step %d, from %s, is not used: %s", part, head.step, holder, str(cause))
        else:
            return plain, None


def joint_problem(problems: Sequence[Problem | None]) -> Problem | None:
    """Joins the problems of all ranks. Raises `CheckpointError` if a complete state does not fit a rank's target."""
    found = [problem for problem in problems if problem is not None]
    if misfit := next((problem for problem in found if problem.is_whole and not problem.is_damage), None):
        raise misfit.error
    if not found:
        return None
    # A rank that succeeded has changed its target as well.
    has_touched = any(problem is None or problem.has_touched for problem in problems)
    return found[0]._replace(is_damage=any(problem.is_damage for problem in found), has_touched=has_touched)


def error_of_load(path: str, error: BaseException) -> CheckpointError:
    cause = unwrap(error)
    if isinstance(cause, CheckpointError):
        return cause
    is_missing = "Missing key in checkpoint" in str(cause)
    advice = ". With strict=False, the value of a missing key stays as it is" if is_missing else ""
    misfit = StateMismatch(f"{path} cannot be loaded: {describe(cause).rstrip('.')}{advice}")
    misfit.__cause__ = cause
    return misfit


class SelectivePlanner(LoadPlanner):
    """Load planner for selected keys, which also makes the state of optimizers that have not taken a step.

    ``path`` is the checkpoint's, for messages. Once ``has_begun`` is true, all ranks have agreed on what to read, and
    the state may change. Set ``read_objects`` to the reader's method before the load.
    """

    def __init__(self, path: str, selection: Selection, state: Mapping[str, Any]) -> None:
        super().__init__(allow_partial_load=not selection.strict)
        self.has_begun = False
        self.read_objects: Callable[[Collection[str]], Mapping[str, Any]] = lambda keys: {}
        self._path = path
        self._selection = selection
        self._grown: dict[str, tuple[torch.Size, float | None]] = {}  # the stored size, and the value of new elements
        self._dtype_before: Callable[[torch.Tensor], torch.dtype | None] = lambda parameter: None
        self._modules = {key: value for key, value in state.items() if isinstance(value, torch.nn.Module)}
        self._of_optimizers = {key: value for key, value in state.items() if isinstance(value, torch.optim.Optimizer)}

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        self.has_begun = True
        for key, (stored, value) in self._grown.items():
            if value is not None:
                fill_beyond(self.state_dict[key], stored, value)
        return super().finish_plan(new_plan)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        optimizers = [
            OptimizerTarget(key, optimizer, state_dict.get(key)) for key, optimizer in self._of_optimizers.items()
        ]
        self._set_up(state_dict, metadata, is_coordinator)
        self._check_counts(optimizers)
        misfits, grown = self._misfits(), self._growing(self._selection.value_beyond)
        misfits = {key: shapes for key, shapes in misfits.items() if key not in grown}
        left = set(misfits) if self._selection.allow_shape_mismatch else set()
        if optimizers:
            paths = recorded_paths(metadata)
            is_left = self._of_parameters(dict.fromkeys(left, True))
            stored = ((key, metadata.state_dict_metadata[key]) for key in grown)
            sizes = {key: entry.size for key, entry in stored if isinstance(entry, TensorStorageMetadata)}
            size_before = self._of_parameters(sizes)
            of_grown = {key for optimizer in optimizers for key in optimizer.keys_of(size_before, paths)}
            if more := self._more():
                of_left = {key for optimizer in optimizers for key in optimizer.keys_of(is_left, paths)}
                left |= of_left - of_grown  # a tied parameter may have grown under only one of its names
                for optimizer in optimizers:
                    rest = {key: entry for key, entry in more.items() if key not in left}
                    optimizer.make_state(rest, paths, size_before, self._dtype_before)
                self._set_up(state_dict, metadata, is_coordinator)
            grown |= self._growing(lambda key: (0.0,) if key in of_grown else None) | grown
            misfits = {key: shapes for key, shapes in misfits.items() if key not in grown}
            left -= grown.keys()
        self._report(misfits, left)
        self._enlarge(grown)
        self._drop(left)
        if more := self._more():
            self._drop(self._report_lost(more, metadata, optimizers))  # so that the reader does not report them again
            asked = tuple(f"{key}." for key in state_dict)
            if is_coordinator and (unasked := [key for key in more if key.startswith(asked)]):
                logger.info("%s also has %s, which the state does not have", self._path, listed(unasked))

    def _check_counts(self, optimizers: Sequence[OptimizerTarget]) -> None:
        """Raises `StateMismatch` if a parameter group has a different number of parameters in the checkpoint.

        The optimizer would refuse such groups, but only after all other values are loaded.
        """
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata.items()
        objects = [key for key, entry in stored if isinstance(entry, BytesStorageMetadata)]
        for optimizer in optimizers:
            for number, there in optimizer.stored_counts(objects, self.read_objects).items():
                if (here := optimizer.counts.get(number, 0)) != there:
                    raise StateMismatch(
                        f"{self._path} cannot be loaded, not even with strict=False: group {number} of "
                        f"{optimizer.key!r} has {there:,} parameter{'' if there == 1 else 's'} in the checkpoint and "
                        f"{here:,} in the state. Make the optimizer with the saved groups, and call add_param_group() "
                        f"for new parameters after restore(); or restore with exclude=[{optimizer.key + '.*'!r}], "
                        f"which leaves the optimizer as it is"
                    )

    def _growing(self, value_of: Callable[[str], tuple[float | None] | None]) -> dict[str, tuple[float | None]]:
        """Finds the tensors that are larger than the stored ones in some dimension, and smaller in none.

        ``value_of`` is like `Selection.value_beyond`.
        """
        assert self.metadata is not None
        stored, growing = self.metadata.state_dict_metadata, {}
        for key, tensor in self.state_dict.items():
            entry = stored.get(key)
            if not isinstance(tensor, torch.Tensor) or not isinstance(entry, TensorStorageMetadata):
                continue
            size = whole_size(tensor)
            is_larger = len(size) == len(entry.size) and size != entry.size
            is_larger = is_larger and all(a >= b for a, b in zip(size, entry.size, strict=True))
            if is_larger and (value := value_of(key)) is not None:
                growing[key] = value
        return growing

    def _enlarge(self, grown: Mapping[str, tuple[float | None]]) -> None:
        """Sets the sizes in the metadata to those of the larger targets, so that chunks are parts of the targets."""
        assert self.metadata is not None
        if not grown:
            return
        stored = dict(self.metadata.state_dict_metadata)
        for key, (value,) in grown.items():
            entry = stored[key]
            assert isinstance(entry, TensorStorageMetadata)
            self._grown[key] = entry.size, value
            stored[key] = dataclasses.replace(entry, size=whole_size(self.state_dict[key]))
        self.metadata = dataclasses.replace(self.metadata, state_dict_metadata=stored)
        shown = [(key, tuple(size)) for key, (size, _) in self._grown.items()]
        logger.info("%s is loaded into larger tensors (grow). Keys and stored shapes: %s", self._path, listed(shown))

    def _of_parameters(self, of_keys: Mapping[str, _T]) -> Callable[[torch.Tensor], _T | None]:
        """Returns a function that finds the value for a parameter, given values by key.

        The function finds the key by the parameter's name in a module, or by its memory. Memory alone is not enough: a
        rank may have no element of a parameter, and the result must be the same on all ranks.
        """
        numbers = {
            id(parameter): of_keys[name]
            for key, module in self._modules.items()
            for inner, parameter in module.named_parameters(remove_duplicate=False)
            if (name := f"{key}.{WRAPPERS.sub('', inner)}") in of_keys
        }
        tensors = ((self.state_dict.get(key), value) for key, value in of_keys.items())
        same = {identity_of(tensor.detach()): value for tensor, value in tensors if isinstance(tensor, torch.Tensor)}
        same.pop(None, None)
        return lambda parameter: numbers.get(id(parameter)) or same.get(identity_of(parameter.detach()))

    def _set_up(self, state_dict: dict[str, Any], metadata: Metadata, is_coordinator: bool) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        stored = metadata.state_dict_metadata
        if self._of_optimizers:  # even if the selection leaves the parameters out
            of_optimizers = tuple(f"{key}." for key in self._of_optimizers)
            entries = ((key, stored.get(key)) for key in self.state_dict if not key.startswith(of_optimizers))
            dtypes = {key: e.properties.dtype for key, e in entries if isinstance(e, TensorStorageMetadata)}
            self._dtype_before = self._of_parameters(dtypes)
        if not (self._selection.include or self._selection.exclude or self._selection.grow):
            return
        paths = dict(recorded_paths(metadata)) | getattr(self, "mappings", {})
        names = {}  # of each key, and of the lists that contain it
        for key in {*self.state_dict, *stored}:
            path = paths.get(key, ())
            lists = (".".join(map(str, path[:depth])) for depth, part in enumerate(path) if type(part) is int)
            names[key] = {key, *lists}
        self._selection.check(list(self.state_dict), set().union(*names.values()))
        self._drop({key for key in names if not self._selection.has(names[key])})

    def _drop(self, keys: Collection[str]) -> None:
        assert self.metadata is not None
        if keys:
            self.state_dict = {key: value for key, value in self.state_dict.items() if key not in keys}
            stored = self.metadata.state_dict_metadata
            chosen = {key: entry for key, entry in stored.items() if key not in keys}
            self.metadata = dataclasses.replace(self.metadata, state_dict_metadata=chosen)

    def _more(self) -> dict[str, Any]:
        """Returns the entries that the checkpoint has and the state lacks."""
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        more = stored.keys() - self.state_dict.keys()
        return {key: entry for key, entry in stored.items() if key in more} if more else {}

    def _has_older_keys(self) -> bool:
        """Returns whether the checkpoint stores a dict or list of the state as one object, as torch before 2.4 did.

        If so, torch's planner looks values up under these older keys, and itself reports missing ones.
        """
        assert self.metadata is not None
        return has_older_keys(self.metadata, self.state_dict, self.original_state_dict)

    def _misfits(self) -> dict[str, str]:
        """Finds the tensors that are stored in a different shape, with both shapes as text."""
        assert self.metadata is not None
        stored, misfits = self.metadata.state_dict_metadata, {}
        for key, value in self.state_dict.items():
            entry = stored.get(key)
            if isinstance(value, torch.Tensor) and isinstance(entry, TensorStorageMetadata):
                shape = whole_size(value)
                if shape != entry.size:
                    misfits[key] = f"{key!r} is {tuple(entry.size)} in the checkpoint and {tuple(shape)} in the state"
        return misfits

    def _report(self, misfits: Mapping[str, str], left: Set[str]) -> None:
        """Warns about keys that stay unchanged, or raises `StateMismatch` if the selection does not allow that."""
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        missing = [key for key in self.state_dict if key not in stored]
        problems = []
        sizes = other_sizes(missing, stored)
        for name, (there, here) in sizes.items():
            reason = (
                f"{name!r} was saved by {there} data-parallel rank{'s' if there > 1 else ''}, and there "
                f"{'are' if here > 1 else 'is'} now {here}: each of its states belongs to one rank's share of the "
                f"data, and cannot be divided"
            )
            if self._selection.strict:
                problems.append(
                    f"{reason}. Restore with exclude=[{name + '.*'!r}], and begin the next epoch, or train on as many "
                    f"data-parallel ranks as before"
                )
            else:
                logger.warning("%s: %s. The current value stays as it is (strict=False)", self._path, reason)
        missing = [key for key in missing if not other_sizes([key], stored)] if sizes else missing
        if missing and not self._selection.strict:
            logger.warning("%s has no %s. Such keys stay as they are (strict=False)", self._path, listed(missing))
        elif missing and not self._has_older_keys():
            problems.append(f"it has no {listed(missing)}. With strict=False such keys stay as they are")
        shapes = "; ".join(list(misfits.values())[:_SHAPES_SHOWN])
        if len(misfits) > _SHAPES_SHOWN:
            shapes += f"; and {len(misfits) - _SHAPES_SHOWN} more"
        if misfits and self._selection.allow_shape_mismatch:
            state = [key for key in left if key not in misfits]
            logger.warning(
                "%s has tensors in other shapes, and these keys stay as they are (allow_shape_mismatch=True): %s%s",
                self._path,
                shapes,
                f". So does their optimizer state: {listed(sorted(state))}" if state else "",
            )
        elif misfits:
            problems.append(
                f"shapes differ: {shapes}. With allow_shape_mismatch=True such keys stay as they are; grow= loads a "
                f"smaller tensor into a part of a larger one"
            )
        if problems:
            raise StateMismatch(f"{self._path} cannot be loaded: {'. '.join(problems)}")

    def _report_lost(
        self, more: Mapping[str, Any], metadata: Metadata, optimizers: Sequence[OptimizerTarget]
    ) -> list[str]:
        """Warns about stored values that the state cannot take, and returns their keys.

        If the selection is strict, raises `StateMismatch` instead.
        """
        if self._has_older_keys():
            return []
        paths = recorded_paths(metadata)
        advice = ""
        lost = [key for key in more if any(optimizer.owns(paths.get(key, ())) for optimizer in optimizers)]
        if lost and all(_is_setting(paths[key], self.state_dict) for key in lost):
            advice = (
                "the parameter groups of the optimizer have no such setting. A scheduler adds 'initial_lr', for "
                "example. Make the scheduler before restore()"
            )
        elif lost:
            advice = (
                "the optimizer cannot take such values: its parameters or groups differ from those of the saved one, "
                "or the values differ in shape from their sharded parameters. In the latter case, call the optimizer's "
                "step() before restore()"
            )
        elif lost := keys_below_empty_dicts(self.original_state_dict, more, metadata):
            advice = EMPTY_DICT
        if not lost:
            return []
        problem = f"{self._path} has {listed(lost)}, and {advice}"
        if self._selection.strict:
            raise StateMismatch(f"{problem}. Leave such keys out with exclude=, or pass strict=False, which only warns")
        logger.warning("%s. These values are not loaded (strict=False)", problem)
        return lost


def _is_setting(path: Sequence[str | int], state: Mapping[str, Any]) -> bool:
    """Returns whether a path is that of a setting in a parameter group, and the state has that group."""
    return path[-3:-2] == ("param_groups",) and any(
        key.startswith(f"{'.'.join(map(str, path[:-1]))}.") for key in state
    )


def fill_beyond(tensor: torch.Tensor, stored: torch.Size, value: float) -> None:
    """Sets this rank's elements of a tensor outside the stored size."""
    for offsets, part in local_parts(tensor):
        for dim, (extent, offset) in enumerate(zip(stored, offsets, strict=True)):
            begin = min(max(0, extent - offset), part.size(dim))
            part.detach().narrow(dim, begin, part.size(dim) - begin).fill_(value)


# Activation checkpointing and FSDP1 add these parts to the names of parameters, but not to the keys of state dicts.
WRAPPERS = re.compile(r"\b(_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
