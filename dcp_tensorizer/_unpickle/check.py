"""Finds what a pickle would call, without calling any of it.

`refused_globals` follows the stream of a pickle with stand-ins for all values. So it knows for every class and function
what it would be called with, which state would be set on what, and what would be hashed. It takes time and memory in
proportion to the stream.
"""

from __future__ import annotations

import enum
import pickletools
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from .._runtime.torch_compat import GET_LAYOUT, REBUILD_PREFIX, REBUILD_SUBCLASS
from . import known_types
from .known_types import (
    Bytes,
    Dict,
    Global,
    Maker,
    Trusted,
    Tuple,
    Unexpected,
    Value,
    hash_cost,
    make_tuple,
    need,
    takes,
)


def _device(name: str, args: Tuple) -> Value:
    need(tuple(map(type, args)) in ((str,), (str, int)))
    return Value(name)


_TORCH_CALLED: Mapping[str, Maker] = {
    "torch.Size": takes(Tuple),
    "torch.device": _device,
    GET_LAYOUT: takes(str),
}
_CALLED = {**known_types.CALLED, **known_types.NUMPY_CALLED, **_TORCH_CALLED}
_CREATED = known_types.CREATED
_GETATTR = "builtins.getattr"
_KNOWN = {_GETATTR, *_CALLED, *_CREATED, *known_types.PASSIVE, *known_types.NUMPY_PASSIVE}
_SETS = ("builtins.frozenset", "builtins.set")

_CONSTANTS = {"BININT", "BININT1", "BININT2", "BINFLOAT", "BINUNICODE", "LONG1", "LONG4"}
_NAMED = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_WORK_PER_BYTE = 16  # members that are hashed or copied; what torch.save writes needs less than 2


class Malformed(Exception):
    """``torch.save`` writes no such pickle."""


def refused_globals(
    pickled: bytes, allowed: Mapping[str, Any], torch_globals: Collection[str], max_opcodes: int | None = None
) -> tuple[str, ...]:
    """The names of the classes and functions that a pickle must not use.

    Args:
        pickled: Protocol 2, as ``torch.save`` writes it.
        allowed: What the user trusts, with any arguments and any state, by name.
        torch_globals: Names that ``torch.load`` trusts by itself.
        max_opcodes: Looks at no more of the stream than this.

    Raises:
        Malformed: nothing that can be pickled gives such a stream, or it would take more time than its size explains.
    """
    stream = _Stream(len(pickled), allowed, torch_globals)
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(pickled)):
            if number == max_opcodes:
                break
            stream.step(opcode.name, argument)
    except (ValueError, IndexError, KeyError) as error:  # of pickletools, and of a stack or memo that is too small
        raise Malformed(f"it cannot be parsed ({type(error).__name__}: {error})") from None
    return tuple(sorted(stream.refused()))


class _Stream:
    """The stack and the memo of an unpickler, of stand-ins."""

    def __init__(self, nbytes: int, allowed: Mapping[str, Any], torch_globals: Collection[str]) -> None:
        self._allowed = allowed
        self._torch = torch_globals
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # stacks that MARKs have set aside
        self._memo: dict[int, Any] = {}
        self._nbytes = nbytes
        self._work_left = _WORK_PER_BYTE * nbytes + 1000
        self._refused: set[str] = set()  # that are called, or given what they would not have written
        self._unknown: set[str] = set()
        self._owners: set[str] = set()  # of which attributes are taken
        self._members: dict[str, Global] = {}  # such attributes, and whose they are

    def step(self, opcode: str, argument: Any) -> None:
        """Follows one opcode."""
        if opcode in _CONSTANTS:
            self._stack.append(argument)
        elif opcode in _NAMED:
            self._stack.append(_NAMED[opcode])
        elif opcode in ("BINPUT", "LONG_BINPUT"):
            self._put(argument)
        elif opcode in ("BINGET", "LONG_BINGET"):
            self._get(argument)
        else:
            handler = _HANDLERS.get(opcode)
            if handler is None:
                raise Malformed(f"it has the opcode {opcode}")
            handler(self, argument)

    def refused(self) -> set[str]:
        """The names that would be imported or called, and that nobody has allowed.

        Of an attribute that is called, a class in a class perhaps, that is the attribute. Of another, an Enum's member
        perhaps, it is the class.
        """
        members = {name if owner.trusted else owner.name for name, owner in self._members.items()}
        return self._refused | (self._unknown - self._owners) | members

    # --- the stack ----------------------------------------------------------------------------------------------------

    def _put(self, number: int) -> None:
        if number > self._nbytes:  # Python's unpickler makes room for all numbers before it
            raise Malformed("it keeps a value under a number that is too large")
        self._memo[number] = self._stack[-1]

    def _get(self, number: int) -> None:
        value = self._memo[number]
        if isinstance(value, Dict) and value.frozen:
            raise Malformed("it changes the description of a dtype")
        self._stack.append(value)

    def _protocol(self, number: int) -> None:
        if number != 2:  # others map Python 2's names in another way
            raise Malformed(f"it is of protocol {number}")

    def _mark(self, _: Any) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _pop_mark(self) -> list[Any]:
        members, self._stack = self._stack, self._below.pop()
        return members

    def _tuple(self, count: int | None) -> None:
        if count is None:
            members = self._pop_mark()
        else:
            if len(self._stack) < count:
                raise Malformed("its stack is empty")
            members = self._stack[len(self._stack) - count :]
            del self._stack[len(self._stack) - count :]
        self._stack.append(make_tuple(members))

    def _extend(self, members: Sequence[Any]) -> None:
        target = self._stack[-1]
        if type(target) is list:
            target.extend(members)
        else:
            self._change(target, lambda value: value.extend(members))

    def _update(self, members: Sequence[Any]) -> None:
        if len(members) % 2:
            raise Malformed("a key has no value")
        pairs = list(zip(members[::2], members[1::2], strict=True))
        for key, _ in pairs:
            self._hash(key)
        self._change(self._stack[-1], lambda value: value.update(pairs))

    def _hash(self, key: Any) -> None:
        cost = hash_cost(key)
        if cost is None:
            raise Malformed("it has a key that cannot be hashed")
        self._spend(cost)

    def _spend(self, work: int) -> None:
        self._work_left -= work
        if self._work_left < 0:
            raise Malformed("it takes too much time or memory for its size")

    def _storage(self, _: Any) -> None:
        place = self._stack.pop()
        if not isinstance(place, Tuple) or len(place) != 5 or place[0] != "storage":
            raise Malformed("it refers to something other than a tensor's storage")
        if not isinstance(place[1], Global) or place[1].name not in self._torch:
            raise Malformed("a tensor's storage is of an unknown type")
        self._stack.append(Value("storage"))

    # --- classes and functions ----------------------------------------------------------------------------------------

    def _global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        if not all(part.isidentifier() for part in (*module.split("."), name)):
            raise Malformed(f"{module}.{name} is no name")
        found = self._named(f"{module}.{name}")
        if not (found.trusted or found.name in _KNOWN or found.name in self._torch):
            self._unknown.add(found.name)
        self._stack.append(found)

    def _named(self, name: str) -> Global:
        return Global(name, trusted=name in self._allowed and name != _GETATTR)

    def _attribute(self, args: Tuple) -> Any:
        """Follows a reference of protocol 2 to a class in a class, to its methods, and in some releases to an Enum's
        member.
        """
        if len(args) != 2 or not isinstance(args[0], Global) or type(args[1]) is not str:
            raise Malformed("it takes an attribute of a value")
        owner, attribute = args
        self._members.pop(owner.name, None)
        self._owners.add(owner.name)
        allowed = self._allowed.get(owner.name)
        if isinstance(allowed, enum.EnumMeta) and attribute in allowed.__members__:
            return Trusted(owner.name)
        found = self._named(f"{owner.name}.{attribute}")
        if not (found.trusted or found.name in _CALLED):
            self._members[found.name] = owner
        return found

    def _reduce(self, _: Any) -> None:
        args, function = self._stack.pop(), self._stack.pop()
        self._stack.append(self._call(function, args, _CALLED))

    def _new(self, _: Any) -> None:
        args, function = self._stack.pop(), self._stack.pop()
        self._stack.append(self._call(function, args, _CREATED))

    def _build(self, _: Any) -> None:
        state = self._stack.pop()
        self._spend(sum(map(_size, state)) if isinstance(state, Tuple) else _size(state))
        self._change(self._stack[-1], lambda value: value.build(state))

    def _call(self, function: Any, args: Any, makers: Mapping[str, Maker]) -> Any:
        if not isinstance(function, Global) or not isinstance(args, Tuple):
            raise Malformed("it calls something other than a class or a function")
        if function.name == _GETATTR:
            return self._attribute(args)
        self._members.pop(function.name, None)
        if function.trusted:
            return Trusted(function.name)
        self._spend(sum(map(_size, args)))
        try:
            if function.name == REBUILD_SUBCLASS and function.name in self._torch:
                return self._rebuild_type(args)
            made = self._maker(function.name, makers)(function.name, args)
        except Unexpected:
            self._refused.add(function.name)
            return Trusted(function.name)
        if function.name in _SETS:
            for member in args[0]:
                self._hash(member)
        return made

    def _maker(self, name: str, makers: Mapping[str, Maker]) -> Maker:
        if name not in makers and not self._rebuilds(name):
            raise Unexpected
        return makers.get(name, _rebuilt)

    def _rebuilds(self, name: str) -> bool:
        """torch's own functions that make tensors."""
        return name.startswith(REBUILD_PREFIX) and name in self._torch

    def _rebuild_type(self, args: Tuple) -> Any:
        """A tensor with attributes, or of a subclass: torch calls the first argument with the third."""
        need(len(args) == 4 and isinstance(args[0], Global) and (args[0].trusted or self._rebuilds(args[0].name)))
        return self._call(args[0], args[2], {})

    def _change(self, target: Any, change: Callable[[Any], None]) -> None:
        if not isinstance(target, Value):
            raise Malformed("it changes an immutable value")
        try:
            change(target)
        except Unexpected:
            if "." not in target.maker:
                raise Malformed(f"it changes a {target.maker}") from None
            self._refused.add(target.maker)


def _size(value: Any) -> int:
    """The cost of copying a value, not deeply."""
    if isinstance(value, Dict):
        return 1 + len(value.pairs)
    return 1 + len(value) if isinstance(value, list | tuple | str | Bytes) else 1


def _rebuilt(name: str, args: Tuple) -> Value:
    return Value(name)


_HANDLERS: Mapping[str, Callable[[_Stream, Any], None]] = {
    "PROTO": _Stream._protocol,
    "STOP": lambda stream, _: None,
    "MARK": _Stream._mark,
    "EMPTY_LIST": lambda stream, _: stream._stack.append([]),
    "EMPTY_DICT": lambda stream, _: stream._stack.append(Dict()),
    "EMPTY_TUPLE": lambda stream, _: stream._tuple(0),
    "TUPLE1": lambda stream, _: stream._tuple(1),
    "TUPLE2": lambda stream, _: stream._tuple(2),
    "TUPLE3": lambda stream, _: stream._tuple(3),
    "TUPLE": lambda stream, _: stream._tuple(None),
    "APPEND": lambda stream, _: stream._extend([stream._stack.pop()]),
    "APPENDS": lambda stream, _: stream._extend(stream._pop_mark()),
    "SETITEM": lambda stream, _: stream._update([stream._stack.pop(-2), stream._stack.pop()]),
    "SETITEMS": lambda stream, _: stream._update(stream._pop_mark()),
    "BINPERSID": _Stream._storage,
    "GLOBAL": _Stream._global,
    "REDUCE": _Stream._reduce,
    "NEWOBJ": _Stream._new,
    "BUILD": _Stream._build,
}
