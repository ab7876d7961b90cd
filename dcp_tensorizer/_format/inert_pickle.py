"""Pickles, read without a class or a function of this process: what they name stays a name.

The standard library's unpickler, of which every operation that could reach a class, call something, or take more time
than its own bytes is replaced. `pickle.Unpickler` is in C, and lets only the look-up of names be replaced. So a pickle
could change a class that it may look up (BUILD). It could also hash tuples of tuples for ever: a tuple that holds the
same one twice costs two bytes, and doubles the time.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["Made", "Named", "count_parts", "load_inert"]

_BUDGET = 8  # parts of keys, for each byte of a pickle; what no pickle shares needs less than one
_MAX_DEPTH = 64  # of a key


class Named(NamedTuple):
    """A class or a function that a pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Made:
    """What a pickle makes by calling something; each is equal to itself alone, and so costs nothing to hash.

    Attributes:
        what: What is called; of a reference that only ``torch.load`` resolves, ``Named("persistent", "id")``.
        arguments: With what.
        state: What ``__setstate__`` would be given; None: it would not be called.
        members: Added to it afterwards, as to a list, dict or set; a dict's in pairs.
    """

    what: Named
    arguments: tuple[Any, ...]
    state: Any = None
    members: list[Any] = field(default_factory=list)


def load_inert(
    pickled: bytes,
    on_name: Callable[[Named], object] = lambda name: None,
    on_call: Callable[[Made], object] = lambda made: None,
) -> Any:
    """What a pickle holds: values of builtin types, `Named` and `Made`.

    Args:
        pickled: The pickle.
        on_name: Given what it names; may raise.
        on_call: Given what it makes; may raise.

    Raises:
        Exception: it is damaged, or does what no writer does; or what the arguments raise.
    """
    return _Inert(pickled, on_name, on_call).load()


def count_parts(key: Any, limit: int) -> int:
    """How many values must be hashed to hash a key, each as often as the key holds it.

    Raises:
        pickle.UnpicklingError: more than a limit, or one of them cannot be hashed.
    """
    count = 0
    left: list[tuple[Any, int]] = [(key, 0)]
    while left:
        part, depth = left.pop()
        count += 1 + (part.bit_length() >> 6 if type(part) is int else 0)
        if count > limit or depth > _MAX_DEPTH:
            raise pickle.UnpicklingError("its keys are made of too many parts")
        if type(part) is tuple:
            left += [(inner, depth + 1) for inner in part]
        elif type(part) in (list, dict, set, bytearray):
            raise pickle.UnpicklingError(f"it has a key of type {type(part).__name__}")
    return count


class _Inert(pickle._Unpickler):
    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, pickled: bytes, on_name: Callable[[Named], object], on_call: Callable[[Made], object]) -> None:
        super().__init__(io.BytesIO(pickled), encoding="bytes")
        self._on_name = on_name
        self._on_call = on_call
        self._budget = 1000 + _BUDGET * len(pickled)

    def find_class(self, module: str, name: str) -> Any:
        named = Named(module, name)
        self._on_name(named)
        return named

    def persistent_load(self, pid: Any) -> Any:
        return self._made(Named("persistent", "id"), (pid,))

    def get_extension(self, code: int) -> None:
        raise pickle.UnpicklingError("it refers to a registry of this process")

    def _made(self, what: Any, arguments: Any) -> Made:
        if type(what) is not Named or type(arguments) is not tuple:
            raise pickle.UnpicklingError("it calls what cannot be called")
        made = Made(what, arguments)
        self._on_call(made)
        for argument in arguments:  # a set of a list, a dict of pairs: whoever makes it hashes what is in there
            if type(argument) in (list, tuple) and str(what) in _HASHING:
                for member in argument:  # of a dict, pairs of a key and a value
                    is_pair = what.name in ("OrderedDict", "dict") and type(member) in (list, tuple) and member
                    self._check_key(member[0] if is_pair else member)
        return made

    def _check_key(self, key: Any) -> None:
        self._budget -= count_parts(key, self._budget)

    def _call(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._made(self.stack[-1], arguments)

    def _call_with_keywords(self) -> None:
        keywords = self.stack.pop()
        arguments = self.stack.pop()
        self.stack[-1] = self._made(self.stack[-1], (*arguments, keywords))

    def _build(self) -> None:
        state = self.stack.pop()
        made = self.stack[-1]
        if type(made) is not Made:
            raise pickle.UnpicklingError("it changes what it has not made")
        made.state = state

    def _add(self, members: list[Any], kind: type) -> None:
        """Adds members to a container that the pickle has made."""
        container: Any = self.stack[-1]
        if type(container) is Made:
            container.members += members
        elif type(container) is not kind:
            raise pickle.UnpicklingError(f"it adds to a {type(container).__name__}")
        elif isinstance(container, list):
            container += members
        elif isinstance(container, set):
            container.update(members)

    def _set_items(self, members: list[Any]) -> None:
        for key in members[::2]:
            self._check_key(key)
        if type(self.stack[-1]) is dict:
            self.stack[-1].update(zip(members[::2], members[1::2], strict=True))
        else:
            self._add(members, dict)

    def _add_to_set(self, members: list[Any]) -> list[Any]:
        for member in members:
            self._check_key(member)
        return members

    def _append_one(self) -> None:
        member = self.stack.pop()
        self._add([member], list)

    def _append_many(self) -> None:
        self._add(self.pop_mark(), list)

    def _set_one(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        self._set_items([key, value])

    def _set_many(self) -> None:
        self._set_items(self.pop_mark())

    def _make_dict(self) -> None:
        members = self.pop_mark()
        self.append({})
        self._set_items(members)

    def _add_items(self) -> None:
        members = self._add_to_set(self.pop_mark())
        self._add(members, set)

    def _make_frozenset(self) -> None:
        members = self._add_to_set(self.pop_mark())  # which changes what `append` is
        self.append(frozenset(members))

    def _refuse(self) -> None:
        raise pickle.UnpicklingError("it is made in a way that no writer of today does")

    dispatch = pickle._Unpickler.dispatch | {  # type: ignore[assignment]
        code[0]: operation
        for code, operation in {
            pickle.REDUCE: _call,
            pickle.NEWOBJ: _call,
            pickle.NEWOBJ_EX: _call_with_keywords,
            pickle.BUILD: _build,
            pickle.APPEND: _append_one,
            pickle.APPENDS: _append_many,
            pickle.SETITEM: _set_one,
            pickle.SETITEMS: _set_many,
            pickle.DICT: _make_dict,
            pickle.ADDITEMS: _add_items,
            pickle.FROZENSET: _make_frozenset,
            pickle.INST: _refuse,
            pickle.OBJ: _refuse,
            pickle.EXT1: _refuse,
            pickle.EXT2: _refuse,
            pickle.EXT4: _refuse,
            pickle.NEXT_BUFFER: _refuse,
            pickle.READONLY_BUFFER: _refuse,
        }.items()
    }


_HASHING = {"builtins.set", "builtins.frozenset", "collections.Counter", "collections.OrderedDict", "builtins.dict"}
