"""Which part of a state is saved: all of it, or what is trained, or what no pattern leaves out."""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.stateful import Stateful

from ..errors import StagingError

__all__ = ["WRAPPERS", "StatePart"]

logger = logging.getLogger("dcp_tensorizer")

# Of activation checkpointing and of FSDP1: modules in between, which are in the names of parameters, but not in state
# dicts.
WRAPPERS = re.compile(r"\b(_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


class StatePart(NamedTuple):
    """A part of a state.

    Attributes:
        exclude: Patterns of keys that are left out, as `fnmatch` has them. Keys are those of nested dicts, joined by
            dots. A list is one value.
        trainable_only: Leave frozen parameters out: those of modules, and others that say themselves that they are.
    """

    exclude: tuple[str, ...] = ()
    trainable_only: bool = False

    @property
    def is_all(self) -> bool:
        """Nothing is left out."""
        return not self.exclude and not self.trainable_only

    def of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The part of a state, whose ``Stateful`` values are asked for theirs. The state is not changed.

        Raises:
            StagingError: nothing in the state says what is trained.
        """
        collected = {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state.items()}
        if self.is_all:
            return collected
        frozen = _frozen(state, collected) if self.trainable_only else set()
        says_it = (torch.nn.Module, torch.nn.Parameter)
        if self.trainable_only and not any(isinstance(value, says_it) for value in _values(state)):
            raise StagingError(
                "trainable_only=True, and nothing in the state says what is trained: give the module itself in the "
                'state, as {"model": model}, or name with exclude= what is to be left out'
            )
        return self._without(collected, "", frozen)

    def _without(self, state: Mapping[str, Any], prefix: str, frozen: set[str]) -> dict[str, Any]:
        part: dict[str, Any] = {}
        for key, value in state.items():
            name = f"{prefix}{key}"
            if isinstance(value, dict) and value:
                if inner := self._without(value, f"{name}.", frozen):
                    part[key] = inner
            elif not self._leaves_out(name, value, frozen):
                part[key] = value
        return part

    def _leaves_out(self, name: str, value: object, frozen: set[str]) -> bool:
        if self.trainable_only and isinstance(value, torch.nn.Parameter) and not value.requires_grad:
            return True
        return name in frozen or any(fnmatch.fnmatchcase(name, pattern) for pattern in self.exclude)


def _frozen(state: Mapping[str, Any], collected: Mapping[str, Any]) -> set[str]:
    """The keys of the frozen parameters of modules, under each of their names in what was collected of them."""
    frozen = set()
    for key, value in state.items():
        if isinstance(value, torch.nn.Module):
            parameters = value.named_parameters(remove_duplicate=False)
            names = {WRAPPERS.sub("", name) for name, parameter in parameters if not parameter.requires_grad}
            if names and names.isdisjoint(collected[key]):
                logger.warning(
                    "trainable_only=True: no frozen parameter of %r is in its state dict by its name (%r): if they are "
                    "there by other names, leave them out with exclude=",
                    key,
                    min(names),
                )
            frozen |= {f"{key}.{name}" for name in names}
    return frozen


def _values(state: Mapping[str, Any]) -> Iterator[Any]:
    """What is in nested dicts."""
    for value in state.values():
        if isinstance(value, dict):
            yield from _values(value)
        else:
            yield value
