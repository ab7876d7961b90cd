"""Interprets a pickle without executing it: placeholders replace the classes and functions that it names, and the
results of its calls. None of these names is looked up or imported.

`Inert` takes time and memory proportional to the size of the pickle. Python's unpickler does not: a tuple that holds
the same tuple twice takes two bytes, and doubles the time of hashing. With Python's unpickler a pickle can also change
every class that it may look up (with the opcode BUILD).

Subclasses decide what a pickle may do.
"""

from __future__ import annotations

import pickle
import pickletools
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any

# The maximum number of values to hash, copy or build, per byte of a pickle. A pickle whose values are not shared needs
# fewer than 2.
WORK_PER_BYTE = 16
# The maximum depth of nested values: Python hashes tuples by unbounded recursion. torch's own values are less than 10
# deep.
MAX_DEPTH = 64
_HASHING = {"builtins.dict", "builtins.frozenset", "builtins.set", "collections.Counter", "collections.OrderedDict"}
_OF_PAIRS = {"builtins.dict", "collections.OrderedDict"}


class Malformed(ValueError):
    """A pickle that no writer makes, or that takes more time or memory than its size justifies."""


class Unexpected(Exception):
    """A call, a state or members that the type of the value would not write into a pickle."""


class Named:
    """A placeholder for a class or a function ``module.name``, which is neither looked up nor imported.

    A pickle has one placeholder for each name. ``trusted`` means that the user allows the name with any arguments.
    """

    __slots__ = ("name", "trusted")

    def __init__(self, name: str, *, trusted: bool = False) -> None:
        self.name = name
        self.trusted = trusted


class Value:
    """A placeholder for the result of a call. It takes no state and no members, and equals only itself.

    ``what`` names the called function or class.
    """

    __slots__ = ("what",)

    def __init__(self, what: str) -> None:
        self.what = what

    def build(self, state: Any) -> None:
        """Sets a state, as ``__setstate__`` would."""
        raise Unexpected

    def extend(self, items: Sequence[Any]) -> None:
        raise Unexpected

    def update(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        raise Unexpected


class Made(Value):
    """A placeholder for the result of a call, which records the arguments, the last state and the members.

    ``state`` is None if the pickle sets no state. ``members`` are what the pickle adds after the call: elements of
    a list or a set, or pairs of keys and values of a dict.
    """

    __slots__ = ("arguments", "members", "state")

    def __init__(self, what: str, arguments: tuple[Any, ...]) -> None:
        super().__init__(what)
        self.arguments = arguments
        self.state: Any = None
        self.members: list[Any] = []

    def build(self, state: Any) -> None:
        self.state = state

    def extend(self, items: Sequence[Any]) -> None:
        self.members += items

    def update(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        self.members += pairs


def hash_cost(key: Any, most: int) -> int:
    """Returns the cost of hashing a key: 1 for each value in it, and 1 for each 64 bits of an integer.

    A value that the key contains several times counts each time. Raises `Malformed` if the cost exceeds ``most``, if
    values are nested too deeply, or if one is not hashable.
    """
    cost = 0
    left: list[tuple[Any, int]] = [(key, 0)]
    while left:
        part, depth = left.pop()
        kind = type(part)
        cost += 1
        if kind is tuple:
            left += [(inner, depth + 1) for inner in part]
        elif kind is int:
            cost += part.bit_length() >> 6
        elif kind in (list, dict, set):
            raise Malformed("it has a key that cannot be hashed")
        if cost > most or depth > MAX_DEPTH:
            raise Malformed("it has keys that take too much time or memory to be hashed")
    return cost


class Inert:
    """An interpreter of a pickle. It makes values of builtin types, `Named`, and the results of `call` and `new`.

    ``protocol`` is the newest allowed protocol. Opcodes of protocols before 2 are refused unless newer protocols
    still use them.
    """

    def __init__(self, pickled: bytes, protocol: int = pickle.HIGHEST_PROTOCOL) -> None:
        self._pickled = pickled
        self._newest = protocol
        self._names: dict[tuple[str, str], Named] = {}
        self._work_left = 1000 + WORK_PER_BYTE * len(pickled)

    def read(self, max_opcodes: int | None = None) -> Any:
        """Reads the value. Returns None if the pickle has more than ``max_opcodes`` opcodes.

        Raises `Malformed` if no writer makes such a pickle, or if it takes more time than its size justifies.
        """
        try:
            return self._follow(len(self._pickled) + 1 if max_opcodes is None else max_opcodes)
        except Malformed:
            raise
        # IndexError and struct.error: a read past the end of the data or of a stack. KeyError: no such memo entry.
        except (ValueError, IndexError, KeyError, struct.error) as error:
            raise Malformed(f"it cannot be parsed ({type(error).__name__}: {error})") from None

    # --- what subclasses decide ---------------------------------------------------------------------------------------

    def name(self, module: str, name: str) -> Named:
        """Makes the placeholder for a class or a function. Called once for each name."""
        return Named(f"{module}.{name}")

    def call(self, what: Named, arguments: tuple[Any, ...]) -> Any:
        return Made(what.name, arguments)

    def new(self, what: Named, arguments: tuple[Any, ...]) -> Any:
        """Makes the placeholder for the result of a class's ``__new__``."""
        return self.call(what, arguments)

    def refer(self, reference: Any) -> Any:
        """Makes the placeholder for a persistent id, which only the caller of ``pickle.load`` could resolve."""
        return self.call(Named("persistent.id"), (reference,))

    def build(self, target: Any, state: Any) -> None:
        self._change(target, "build", state)

    def update(self, target: Any, members: list[Any]) -> None:
        """Sets keys of a dict or of the result of a call. ``members`` alternates keys and values."""
        if len(members) % 2:
            raise Malformed("a key has no value")
        self._hash(keys := members[::2])
        pairs = zip(keys, members[1::2], strict=True)
        if type(target) is dict:
            target.update(pairs)
        else:
            self._change(target, "update", list(pairs))

    def refuse(self, what: str) -> None:
        """Refuses a state or members that a value does not take. ``what`` is `Value.what`."""
        raise Malformed(f"it sets the state or members of a {what}")

    # --- the stream ---------------------------------------------------------------------------------------------------

    def _follow(self, max_opcodes: int) -> Any:
        pickled, known = self._pickled, _KNOWN[self._newest]
        stack: list[Any] = []
        below: list[list[Any]] = []  # stacks below each MARK
        memo: dict[int, Any] = {}
        protocol = position = 0
        for _ in repeat(None, max_opcodes):
            code = known[pickled[position]]
            position += 1
            if code == _MEMOIZE:
                memo[len(memo)] = stack[-1]
            elif code == _BINGET:
                stack.append(memo[pickled[position]])
                position += 1
            elif code == _LONG_BINGET:
                stack.append(memo[_UINT4.unpack_from(pickled, position)[0]])
                position += 4
            elif code == _BINPUT:
                memo[pickled[position]] = stack[-1]
                position += 1
            elif code == _BININT1:
                stack.append(pickled[position])
                position += 1
            elif code == _MARK:
                below.append(stack)
                stack = []
            elif code == _TUPLE1:
                stack[-1] = (stack[-1],)
            elif code == _TUPLE2:
                stack[-2:] = [(stack[-2], stack[-1])]
            elif code in _CONSTANTS:
                stack.append(_CONSTANTS[code])
            elif code in _EMPTY:
                stack.append(_EMPTY[code]())
            elif code == _REDUCE:
                arguments = stack.pop()
                stack[-1] = self._make(self.call, stack[-1], arguments)
            elif code == _BUILD:
                state = stack.pop()
                self.build(stack[-1], state)
            elif code == _SETITEMS:
                items, stack = stack, below.pop()
                self.update(stack[-1], items)
            elif code == _NEWOBJ:
                arguments = stack.pop()
                stack[-1] = self._make(self.new, stack[-1], arguments)
            elif code in _CONTENTS:
                unpack_from, nbytes, make = _CONTENTS[code]
                (count,) = unpack_from(pickled, position)
                position += nbytes + count
                if position > len(pickled):
                    raise Malformed("it cannot be parsed (it is too short)")
                stack.append(make(pickled[position - count : position]))
            elif code in _NUMBERS:
                unpack_from, nbytes = _NUMBERS[code]
                stack += unpack_from(pickled, position)
                position += nbytes
            elif code == _LONG_BINPUT:
                (number,) = _UINT4.unpack_from(pickled, position)
                if number > len(pickled):  # Python's unpickler allocates memory for all smaller indices
                    raise Malformed("it has a memo index that is larger than the pickle")
                memo[number] = stack[-1]
                position += 4
            elif code == _TUPLE:
                members, stack = tuple(stack), below.pop()
                stack.append(members)
            elif code == _TUPLE3:
                stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
            elif code == _SETITEM:
                value, key = stack.pop(), stack.pop()
                self.update(stack[-1], [key, value])
            elif code == _APPENDS:
                items, stack = stack, below.pop()
                self._extend(stack[-1], items)
            elif code == _APPEND:
                item = stack.pop()
                self._extend(stack[-1], [item])
            elif code == _GLOBAL:
                middle = pickled.index(b"\n", position)
                end = pickled.index(b"\n", middle + 1)
                stack.append(
                    self._named(pickled[position:middle].decode(), pickled[middle + 1 : end].decode(), protocol)
                )
                position = end + 1
            elif code == _BINPERSID:
                stack[-1] = self.refer(stack[-1])
            elif code == _POP and stack:
                del stack[-1]
            elif code in (_POP, _POP_MARK):
                stack = below.pop()
            elif code == _DUP:
                stack.append(stack[-1])
            elif code == _PROTO:
                protocol = pickled[position]
                if not 2 <= protocol <= self._newest:
                    raise Malformed(f"it uses pickle protocol {protocol}")
                position += 1
            elif code == _STOP:
                return stack.pop()
            elif code == _STACK_GLOBAL:
                name, module = stack.pop(), stack.pop()
                stack.append(self._named(module, name, protocol))
            elif code == _ADDITEMS:
                items, stack = stack, below.pop()
                self._extend(stack[-1], items)
            elif code == _FROZENSET:
                items, stack = stack, below.pop()
                self._hash(items)
                stack.append(frozenset(items))
            elif code == _NEWOBJ_EX:
                keywords, arguments = stack.pop(), stack.pop()
                stack[-1] = self._make(self.new, stack[-1], arguments, keywords)
            elif code == _FRAME:
                position += 8
            else:
                code = pickled[position - 1]
                raise Malformed(f"it has the opcode {_OPCODES[code].name if code in _OPCODES else code}")
        return None

    def _named(self, module: Any, name: Any, protocol: int) -> Named:
        if type(module) is not str or type(name) is not str:
            raise Malformed("it has a global whose name is not a string")
        if protocol < 3:  # pickles of these protocols have Python 2's names
            module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        if (module, name) not in self._names:
            self._names[module, name] = self.name(module, name)
        return self._names[module, name]

    def _make(self, make: _Make, what: Any, arguments: Any, *keywords: Any) -> Any:
        if type(what) is not Named or type(arguments) is not tuple:
            raise Malformed("it calls something other than a class or a function, or passes no tuple of arguments")
        if what.name in _HASHING:
            for argument in arguments:
                if type(argument) in (list, tuple):
                    is_pairs = what.name in _OF_PAIRS
                    self._hash([m[0] if is_pairs and type(m) in (list, tuple) and m else m for m in argument])
        return make(what, arguments + keywords)

    def _extend(self, target: Any, members: list[Any]) -> None:
        if type(target) is list:
            target += members
        elif type(target) is set:
            self._hash(members)
            target.update(members)
        else:
            self._change(target, "extend", members)

    def _change(self, target: Any, method: str, by: Any) -> None:
        if not isinstance(target, Value):
            raise Malformed("it changes a value that no call has made")
        try:
            getattr(target, method)(by)
        except Unexpected:
            self.refuse(target.what)

    def _hash(self, keys: Sequence[Any]) -> None:
        work = 0
        for key in keys:
            work += 1 if type(key) is str or type(key) is Made else hash_cost(key, self._work_left - work)
        self._work_left -= work
        if self._work_left < 0:
            raise Malformed("it takes too much time or memory for its size")


_Make = Callable[[Named, tuple[Any, ...]], Any]
_UINT4 = struct.Struct("<I")
# The opcodes, as ints.
_MARK, _TUPLE, _TUPLE1, _TUPLE2, _TUPLE3, _BININT1 = (
    pickle.MARK + pickle.TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3 + pickle.BININT1
)
_BINGET, _LONG_BINGET, _BINPUT, _LONG_BINPUT, _MEMOIZE = (
    pickle.BINGET + pickle.LONG_BINGET + pickle.BINPUT + pickle.LONG_BINPUT + pickle.MEMOIZE
)
_GLOBAL, _STACK_GLOBAL, _REDUCE, _NEWOBJ, _NEWOBJ_EX, _BUILD, _BINPERSID = (
    pickle.GLOBAL
    + pickle.STACK_GLOBAL
    + pickle.REDUCE
    + pickle.NEWOBJ
    + pickle.NEWOBJ_EX
    + pickle.BUILD
    + pickle.BINPERSID
)
_APPEND, _APPENDS, _SETITEM, _SETITEMS, _ADDITEMS, _FROZENSET = (
    pickle.APPEND + pickle.APPENDS + pickle.SETITEM + pickle.SETITEMS + pickle.ADDITEMS + pickle.FROZENSET
)
_POP, _POP_MARK, _DUP, _PROTO, _FRAME, _STOP = (
    pickle.POP + pickle.POP_MARK + pickle.DUP + pickle.PROTO + pickle.FRAME + pickle.STOP
)


def _text(content: bytes) -> str:
    return content.decode("utf-8", "surrogatepass")


# Opcodes that are followed by a size and a value, with the functions that read both.
_CONTENTS: Mapping[int, tuple[Callable[[bytes, int], tuple[int]], int, Callable[[bytes], Any]]] = {
    code[0]: (struct.Struct(layout).unpack_from, struct.calcsize(layout), make)
    for code, layout, make in (
        (pickle.BINUNICODE, "<I", _text),
        (pickle.SHORT_BINUNICODE, "<B", _text),
        (pickle.BINUNICODE8, "<Q", _text),
        (pickle.BINBYTES, "<I", bytes),
        (pickle.SHORT_BINBYTES, "<B", bytes),
        (pickle.BINBYTES8, "<Q", bytes),
        (pickle.LONG1, "<B", pickle.decode_long),
        (pickle.LONG4, "<I", pickle.decode_long),
    )
}
_NUMBERS: Mapping[int, tuple[Callable[[bytes, int], tuple[Any, ...]], int]] = {
    code[0]: (struct.Struct(layout).unpack_from, struct.calcsize(layout))
    for code, layout in ((pickle.BININT2, "<H"), (pickle.BININT, "<i"), (pickle.BINFLOAT, ">d"))
}
_CONSTANTS = {pickle.NONE[0]: None, pickle.NEWTRUE[0]: True, pickle.NEWFALSE[0]: False, pickle.EMPTY_TUPLE[0]: ()}
_EMPTY: Mapping[int, Callable[[], Any]] = {
    pickle.EMPTY_LIST[0]: list,
    pickle.EMPTY_DICT[0]: dict,
    pickle.EMPTY_SET[0]: set,
}
_OPCODES = {ord(opcode.code): opcode for opcode in pickletools.opcodes}
_KNOWN = {  # by protocol, for each byte: the byte if it is an opcode of this or an earlier protocol, otherwise -1
    protocol: [code if code in _OPCODES and _OPCODES[code].proto <= protocol else -1 for code in range(256)]
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)
}
