"""Allocation of optimizer state before the first step, so that a checkpoint's state can be loaded into it.

An optimizer makes its state in its first step. DCP loads only keys that the state dict has, so it loads no such
state into a new optimizer. This module makes the missing tensors without a step: their sizes come from the checkpoint's
metadata, and their sharding from the parameters of the same shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from .._runtime.torch_compat import DTensor, describes_part, set_element

_Path = Sequence[str | int]


class OptimizerTarget:
    """Optimizer that a checkpoint is loaded into. ``key`` is its key in the state.

    ``collected`` is the result of its ``state_dict``. This class changes only ``collected``, not the optimizer itself.

    Attributes:
        counts: The number of parameters in each group, by the group's number; empty if the state dict of the optimizer
            has a structure other than torch's.
    """

    def __init__(self, key: str, optimizer: torch.optim.Optimizer, collected: Any) -> None:
        self.key = key
        self.counts: dict[int, int] = {}
        self._state: dict[Any, Any] = {}
        self._params: dict[str, tuple[Any, torch.Tensor]] = {}
        try:
            numbers = [number for group in collected["param_groups"] for number in group["params"]]
            params = [param for group in optimizer.param_groups for param in group["params"]]
            state = collected["state"]
        except (LookupError, TypeError, AttributeError):
            return
        if not isinstance(state, dict) or len(numbers) != len(params):
            return
        self.counts = {number: len(group["params"]) for number, group in enumerate(collected["param_groups"])}
        # A copy, because the optimizer's own groups must not change before the whole state is loaded.
        collected["param_groups"] = [
            {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in group.items()}
            for group in collected["param_groups"]
        ]
        collected["state"] = self._state = _copied(state)
        self._params = {str(number): (number, param) for number, param in zip(numbers, params, strict=True)}

    def stored_counts(
        self, keys: Collection[str], read_objects: Callable[[Collection[str]], Mapping[str, Any]]
    ) -> dict[int, int]:
        """Returns how many parameters each of the optimizer's groups has in the checkpoint, by the group's number.

        Omits groups that the checkpoint does not have. ``keys`` are those of the checkpoint's objects.
        """
        older = f"{self.key}.param_groups"  # torch before 2.4 stored all groups as one object
        keys_of = {number: f"{older}.{number}.params" for number in self.counts}
        chosen = {older, *keys_of.values()}.intersection(keys)
        objects = read_objects(chosen) if self.counts and chosen else {}
        if older in objects:
            return {number: len(group["params"]) for number, group in enumerate(objects[older])}
        return {number: len(objects[key]) for number, key in keys_of.items() if key in objects}

    def make_state(
        self,
        stored: Mapping[str, Any],
        paths: Mapping[str, _Path],
        size_before: Callable[[torch.Tensor], torch.Size | None] = lambda param: None,
        dtype_before: Callable[[torch.Tensor], torch.dtype | None] = lambda param: None,
    ) -> None:
        """Adds to the optimizer's state what only the checkpoint has: tensors to load into, and None for each object.

        ``stored`` are the entries that the checkpoint has and the state lacks. ``paths`` are the keys' paths in the
        nested state. ``size_before`` gives the stored size of a parameter that is larger now. State tensors that had
        the parameter's stored size get its new size. ``dtype_before`` gives the stored dtype of a parameter, or None if
        unknown. State tensors that had the parameter's stored dtype get its new dtype.
        """
        for key, entry in stored.items():
            path = paths.get(key, ())
            if not self._is_of_state(path):
                continue
            number, param = self._params.get(str(path[2]), (path[2], None))
            if param is not None and (before := size_before(param)) is not None:
                entry = _larger(entry, before, param.size())
            if not _can_be_made(entry, param) or (param is None and str(number).isdigit()):
                continue  # the sharding is unknown, or this optimizer does not have the parameter
            value = _target_for(entry, param, str(path[-1]), None if param is None else dtype_before(param))
            if len(path) == 3:
                self._state[number] = value
            else:
                set_element(self._state, (number, *path[3:]), value)

    def keys_of(self, is_one: Callable[[torch.Tensor], object], paths: Mapping[str, _Path]) -> Iterator[str]:
        """Yields the keys of the state of parameters for which ``is_one`` is true. ``paths`` as in `make_state`."""
        numbers = {name for name, (_, param) in self._params.items() if is_one(param)}
        if numbers:
            yield from (key for key, path in paths.items() if self._is_of_state(path) and str(path[2]) in numbers)

    def owns(self, path: _Path) -> bool:
        return bool(path) and path[0] == self.key

    def _is_of_state(self, path: _Path) -> bool:
        return len(path) > 2 and path[0] == self.key and path[1] == "state"


def _copied(container: Any) -> Any:
    """Copies nested dicts and lists, but not their values."""
    if type(container) is dict:
        return {key: _copied(value) for key, value in container.items()}
    return [_copied(value) for value in container] if type(container) is list else container


@contextmanager
def dtypes_kept(values: Iterable[object]) -> Iterator[None]:
    """Preserves the dtypes of loaded state in ``load_state_dict`` of the optimizers among ``values``.

    torch casts the state to the dtype of its parameter. This would round float32 master weights and moments of a
    bfloat16 parameter. torch has other rules for ``step``, which this function does not change.
    """
    handles = []
    for optimizer in values:
        if isinstance(optimizer, torch.optim.Optimizer):
            given: dict[str, Any] = {}
            remember = functools.partial(lambda given, _, state: given.update(state), given)
            set_back = functools.partial(_set_back, given)
            handles.append(optimizer.register_load_state_dict_pre_hook(remember))
            handles.append(optimizer.register_load_state_dict_post_hook(set_back, prepend=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _set_back(given: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    numbers = (number for group in given["param_groups"] for number in group["params"])
    params = (param for group in optimizer.param_groups for param in group["params"])
    for number, param in zip(numbers, params, strict=True):
        if number in given["state"] and param in optimizer.state:
            optimizer.state[param] = _as_given(optimizer.state[param], given["state"][number])


def _as_given(cast: Any, given: Any) -> Any:
    if isinstance(given, torch.Tensor) and isinstance(cast, torch.Tensor):
        return cast if cast.dtype == given.dtype else given.to(cast.device)
    if isinstance(given, dict) and isinstance(cast, dict):
        for name in cast.keys() & given.keys() - {"step"}:
            cast[name] = _as_given(cast[name], given[name])
    elif isinstance(given, list | tuple) and type(given) is type(cast):
        return type(cast)(map(_as_given, cast, given))
    return cast


def _can_be_made(entry: Any, param: torch.Tensor | None) -> bool:
    """Returns whether the sharding of a value is known: the value is sharded like its parameter, or is not sharded.

    If a parameter describes its own part (see `describes_part`), the sharding of its optimizer state is unknown.
    """
    if param is not None and describes_part(param):
        return False
    if not isinstance(entry, TensorStorageMetadata) or not isinstance(param, DTensor):
        return True
    return not entry.size or entry.size == param.size()


def _larger(entry: Any, before: torch.Size, after: torch.Size) -> Any:
    """Returns the entry of a value with the sizes of its grown parameter.

    Dimensions in which the value and the stored parameter differ keep their size, such as those of size 1 in a
    factored moment.
    """
    if not isinstance(entry, TensorStorageMetadata) or len(entry.size) != len(before):
        return entry
    grown = (new if size == old else size for size, old, new in zip(entry.size, before, after, strict=True))
    return replace(entry, size=torch.Size(grown))


def _target_for(
    entry: Any, param: torch.Tensor | None, name: str, dtype_before: torch.dtype | None
) -> torch.Tensor | None:
    if not isinstance(entry, TensorStorageMetadata):
        return None
    size, dtype = entry.size, entry.properties.dtype
    if param is not None and name != "step":  # "step" stays on the host and in its dtype, as in torch
        is_alike = size == param.size()
        if dtype is dtype_before and (is_alike or size):  # scalars are float32 for any dtype of the parameter
            dtype = param.dtype
        if is_alike:
            return torch.empty_like(param.detach(), dtype=dtype)
    return torch.empty(size, dtype=dtype, device="cpu")  # `load_state_dict` moves it to the parameter's device
