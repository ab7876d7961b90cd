"""A table of data types of the standard library and NumPy: how they pickle themselves with ``torch.save``'s protocol 2.

Each type has a maker, which gets the arguments that a pickle passes to the class or function, and returns a stand-in
for the result. The maker raises `Unexpected` for arguments that the type itself would not have written, because their
effect is unknown. No maker runs code outside this table, or takes time or memory that is not proportional to its
arguments.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .inert import Made, Named, Unexpected, Value

Arguments = tuple[Any, ...]
Maker = Callable[[str, Arguments], Any]
"""A function that makes the stand-in for the result of a call, from the called name and the arguments."""

# Python's own limit for decimal digits: reducing a fraction takes time proportional to their square.
_MAX_DIGITS = 4300


def need(condition: object) -> None:
    """Raises `Unexpected` unless a condition holds."""
    if not condition:
        raise Unexpected


def by_name(value: Any) -> dict[str, Any]:
    """Returns a value that is a dict with str keys. Raises `Unexpected` for any other."""
    need(type(value) is dict and all(type(key) is str for key in value))
    return value  # type: ignore[no-any-return]


class MappingValue(Value):
    """A stand-in for an OrderedDict or a similar mapping. With ``attributes`` it also takes attributes."""

    def __init__(self, what: str, *, attributes: bool = False) -> None:
        super().__init__(what, cost=None)
        self._attributes = attributes

    def update(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        pass

    def build(self, state: Any) -> None:
        need(self._attributes)
        by_name(state)


class StateValue(Value):
    """A stand-in for a value that takes a state once, if a check accepts the state."""

    def __init__(self, what: str, check: Callable[[Any], object], cost: int | None = 1) -> None:
        super().__init__(what, cost)
        self._check: Callable[[Any], object] | None = check

    def build(self, state: Any) -> None:
        if self._check is None:
            raise Unexpected
        self._check(state)
        self._check = None


def _is(value: Any, *types: type) -> bool:
    return type(value) in types


def takes(*kinds: type, cost: int | None = 1) -> Maker:
    """Returns a maker for arguments of exactly these types."""

    def make(name: str, args: Arguments) -> Value:
        need(tuple(map(type, args)) == kinds)
        return Value(name, cost)

    return make


def _nothing(make: Callable[[str], Any]) -> Maker:
    def make_of_none(name: str, args: Arguments) -> Any:
        need(not args)
        return make(name)

    return make_of_none


# --- bytes and containers ---------------------------------------------------------------------------------------------


def _encoded(name: str, args: Arguments) -> bytes:
    """Decodes the text that protocol 2 writes for bytes, with a character for each byte."""
    need(len(args) == 2 and _is(args[0], str) and args[1] == "latin1")
    try:
        return args[0].encode("latin-1")  # type: ignore[no-any-return]
    except UnicodeEncodeError:
        raise Unexpected from None


def _bytearray(name: str, args: Arguments) -> Value:
    need(not args or (len(args) == 1 and _is(args[0], bytes)) or (_is(args[0], str) and args[1:] == ("latin-1",)))
    return Value(name, cost=None)


def _set(name: str, args: Arguments) -> Value:
    need(len(args) == 1 and _is(args[0], list))
    return Value(name, cost=None if name == "builtins.set" else 1 + len(args[0]))


def _slice(name: str, args: Arguments) -> Value:
    need(len(args) == 3)
    return Value(name, cost=None)


class _Deque(Value):
    def extend(self, items: Any) -> None:
        pass


def _deque(name: str, args: Arguments) -> Value:
    need(not args or (len(args) == 2 and args[0] in ((), []) and _is(args[1], int, type(None))))
    return _Deque(name, cost=None)


_FACTORIES = {
    f"builtins.{kind.__name__}" for kind in (bool, bytearray, bytes, complex, dict, float, frozenset, int, list)
} | {"builtins.set", "builtins.str", "builtins.tuple", "collections.Counter", "collections.OrderedDict"}


def _defaultdict(name: str, args: Arguments) -> Value:
    need(len(args) <= 1)
    for factory in args:  # the defaultdict calls it without arguments
        need(factory is None or (_is(factory, Named) and (factory.trusted or factory.name in _FACTORIES)))
    return MappingValue(name)


def _counter(name: str, args: Arguments) -> Value:
    need(len(args) <= 1 and all(_is(arg, dict) for arg in args))
    return MappingValue(name)


# --- dates and numbers ------------------------------------------------------------------------------------------------


def _from_bytes(kind: Any, nbytes: int) -> Maker:
    """Returns a maker for a date or a time of packed bytes, which the constructors of ``kind`` do not check."""

    def make(name: str, args: Arguments) -> Value:
        need(1 <= len(args) <= 2 and _is(args[0], bytes) and len(args[0]) == nbytes)
        need(all((_is(zone, Value) and zone.what in _ZONES) or _is(zone, Made) for zone in args[1:]))
        try:
            kind(args[0]).replace()  # `replace` checks each field
        except (ValueError, TypeError):
            raise Unexpected from None
        return Value(name)

    return make


def _timezone(name: str, args: Arguments) -> Value:
    need(1 <= len(args) <= 2 and _is(args[0], Value) and args[0].what == "datetime.timedelta")
    need(all(_is(arg, str) for arg in args[1:]))
    return Value(name)


def _zone_info(name: str, args: Arguments) -> Value:
    need(len(args) == 2 and _is(args[0], str) and _is(args[1], int, bool))
    need(re.fullmatch(r"[\w+-]+(/[\w+-]+)*", args[0], re.ASCII))
    return Value(name)


def _decimal(name: str, args: Arguments) -> Value:
    need(len(args) == 1 and _is(args[0], str))
    return Value(name, cost=1 + len(args[0]))


def _fraction(name: str, args: Arguments) -> Value:
    if len(args) == 1:  # Python 3.10
        need(
            _is(args[0], str) and re.fullmatch(rf"-?\d{{1,{_MAX_DIGITS}}}(/\d{{1,{_MAX_DIGITS}}})?", args[0], re.ASCII)
        )
    else:
        need(len(args) == 2 and all(_is(arg, int) and arg.bit_length() < 3 * _MAX_DIGITS for arg in args))
    return Value(name, cost=_MAX_DIGITS // 10)


def _array(name: str, args: Arguments) -> Value:
    need(len(args) == 2 and _is(args[0], str) and _is(args[1], list))
    need(all(_is(member, int, float, str) for member in args[1]))
    return Value(name, cost=None)


def _strings(name: str, args: Arguments) -> Value:
    need(all(_is(part, str) for part in args))
    return Value(name, cost=1 + len(args))


# --- types that take a state ------------------------------------------------------------------------------------------


def _with_state(check: Callable[[Any], object], cost: int | None = None) -> Maker:
    return _nothing(lambda name: StateValue(name, check, cost))


def _only(attribute: str, kind: type) -> Callable[[Any], None]:
    def check(state: Any) -> None:
        need(set(by_name(state)) == {attribute} and _is(state[attribute], kind))

    return check


def _uuid_state(state: Any) -> None:
    values = by_name(state)
    need({"int"} <= set(values) <= {"int", "is_safe"} and all(_is(value, int) for value in values.values()))
    need(0 <= values["int"] < 1 << 128)


def _bytes_io_state(state: Any) -> None:
    need(_is(state, tuple) and len(state) == 3 and _is(state[0], bytes))
    need(state[2] is None or by_name(state[2]) is not None)
    need(_is(state[1], int) and 0 <= state[1] <= len(state[0]))


def _string_io_state(state: Any) -> None:
    need(_is(state, tuple) and len(state) == 4 and _is(state[0], str))
    need(state[3] is None or by_name(state[3]) is not None)
    need(state[1] in (None, "", "\n", "\r", "\r\n") and _is(state[2], int) and 0 <= state[2] <= len(state[0]))


_PATHS = ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
_ZONES = ("datetime.timezone", "zoneinfo.ZoneInfo._unpickle")

CALLED: Mapping[str, Maker] = {
    "_codecs.encode": _encoded,
    "array.array": _array,
    "builtins.bytearray": _bytearray,
    "builtins.bytes": _nothing(lambda name: b""),
    "builtins.complex": takes(float, float),
    "builtins.frozenset": _set,
    "builtins.range": takes(int, int, int),
    "builtins.set": _set,
    "builtins.slice": _slice,
    "collections.Counter": _counter,
    "collections.OrderedDict": _nothing(lambda name: MappingValue(name, attributes=True)),
    "collections.defaultdict": _defaultdict,
    "collections.deque": _deque,
    "datetime.date": _from_bytes(datetime.date, 4),
    "datetime.datetime": _from_bytes(datetime.datetime, 10),
    "datetime.time": _from_bytes(datetime.time, 6),
    "datetime.timedelta": takes(int, int, int),
    "datetime.timezone": _timezone,
    "decimal.Decimal": _decimal,
    "fractions.Fraction": _fraction,
    "types.SimpleNamespace": _with_state(by_name),
    "zoneinfo.ZoneInfo._unpickle": _zone_info,
} | {f"{module}.{name}": _strings for module in ("pathlib", "pathlib._local") for name in _PATHS}
"""The functions and classes that a pickle may call, by name. Python 3.13 has paths in ``pathlib._local``."""

CREATED: Mapping[str, Maker] = {
    "_io.BytesIO": _with_state(_bytes_io_state),
    "_io.StringIO": _with_state(_string_io_state),
    "argparse.Namespace": _with_state(by_name),
    "collections.ChainMap": _with_state(_only("maps", list)),
    "collections.UserDict": _with_state(_only("data", dict)),
    "collections.UserList": _with_state(_only("data", list)),
    "uuid.UUID": _with_state(_uuid_state, cost=1),
}
"""The classes whose ``__new__`` a pickle may call without arguments, by name."""

PASSIVE = _FACTORIES | {"builtins.Ellipsis", "builtins.NotImplemented", "builtins.object", "zoneinfo.ZoneInfo"}
"""The names that a pickle may contain but not call."""


# --- NumPy's arrays, scalars and dtypes -------------------------------------------------------------------------------
#
# NumPy trusts pickles. A dtype with fields outside its items reads out of bounds, and a dtype whose flags hide objects
# dereferences any pointer. So the dtype is made here by NumPy's constructor, which checks its arguments. The result
# must equal the dtype that the pickle describes. Arrays must have the size of their shape.

_MAX_NESTED = 32  # nested dtypes: NumPy compares and shows them by recursion
_MAX_EMPTY = 1 << 20  # elements of an array whose items have no bytes
_ALIGNED = 0x80  # NumPy's NPY_ALIGNED_STRUCT


class DType(Value):
    """A stand-in for a dtype. `build` sets the dtype, once.

    ``fields`` is the dict that describes the fields of a structured dtype. NumPy holds a reference to this dict.
    ``depth`` counts nested dtypes.
    """

    def __init__(self, what: str, code: str) -> None:
        super().__init__(what)
        self._code = code
        self._dtype: np.dtype[Any] | None = None
        self.fields: dict[str, Any] | None = None
        self.depth = 1

    @property
    def dtype(self) -> np.dtype[Any]:
        if self._dtype is None:
            raise Unexpected
        return self._dtype

    def build(self, state: Any) -> None:
        need(self._dtype is None and type(state) is tuple and len(state) in (8, 9))
        try:
            made = self._make(*state)
        except (TypeError, ValueError, OverflowError, SyntaxError):
            raise Unexpected from None
        reduced: Any = made.__reduce__()
        _, (code, *_), (_, order, _, _, _, itemsize, alignment, flags, *_) = reduced
        need(code == self._code and state[1] == order and tuple(map(type, state[5:8])) == (int, int, int))
        need(state[5:7] == (itemsize, alignment) and (state[7] - flags) % 256 == 0)  # NumPy 1 has signed flags
        self._dtype = made

    def _make(
        self,
        version: Any,
        order: Any,
        base: Any,
        names: Any,
        fields: Any,
        nbytes: Any,
        align: Any,
        flags: Any,
        *unit: Any,
    ) -> np.dtype[Any]:
        need(type(version) is int and version == 3 + len(unit))
        need(not unit or self._code in ("M8", "m8"))
        if base is not None:
            need(names is None and fields is None and type(base) is tuple and len(base) == 2)
            need(isinstance(base[0], DType) and _is_shape(base[1]))
            self._nest(base[0])
            return np.dtype((base[0].dtype, tuple(base[1])))
        if names is not None:
            return self._structure(names, fields, nbytes, flags)
        need(fields is None)
        made = np.dtype(_with_unit(self._code, *unit[0]) if unit else self._code)
        return made.newbyteorder(order) if order in ("<", ">") else made

    def _structure(self, names: Any, fields: Any, nbytes: Any, flags: Any) -> np.dtype[Any]:
        need(type(names) is tuple and all(type(name) is str for name in names))
        self.fields = by_name(fields)
        listed = [fields.get(name) for name in names]
        need(all(type(f) is tuple and len(f) in (2, 3) and isinstance(f[0], DType) for f in listed))
        for field in listed:
            self._nest(field[0])
        titles = [field[2] if len(field) == 3 else None for field in listed]
        need(all(title is None or type(title) is str for title in titles))
        made = np.dtype(
            {
                "names": list(names),
                "formats": [field[0].dtype for field in listed],
                "offsets": [field[1] for field in listed],
                "titles": titles,
                "itemsize": nbytes,
            },
            align=bool(flags & _ALIGNED),
        )
        assert made.fields is not None
        need(set(fields) == set(made.fields))
        need(all(fields[key][0].dtype == made.fields[key][0] for key in fields))
        need(all(fields[key][1:] == tuple(made.fields[key][1:]) for key in fields))
        return made

    def _nest(self, inner: DType) -> None:
        self.depth = max(self.depth, inner.depth + 1)
        need(self.depth <= _MAX_NESTED)


class _Array(Value):
    """A stand-in for an array. `build` checks its shape, dtype and contents."""

    def __init__(self, what: str) -> None:
        super().__init__(what, cost=None)
        self._built = False

    def build(self, state: Any) -> None:
        need(not self._built and type(state) is tuple and len(state) == 5 and state[0] == 1)
        _, shape, dtype, order, content = state
        need(_is_shape(shape) and isinstance(dtype, DType) and type(order) in (bool, int))
        count = math.prod(shape)
        if dtype.dtype.hasobject:
            need(type(content) is list and len(content) == count)
        else:
            need(type(content) is bytes and len(content) == count * dtype.dtype.itemsize)
            need(dtype.dtype.itemsize or count <= _MAX_EMPTY)
        self._built = True


def _is_shape(shape: Any) -> bool:
    return type(shape) is tuple and len(shape) <= 64 and all(type(n) is int and 0 <= n < 1 << 63 for n in shape)


def _with_unit(code: str, metadata: Any, unit: Any) -> str:
    """Returns the name of a datetime64 or timedelta64 type. ``unit`` is (unit, numerator, denominator, 1)."""
    need(metadata is None or metadata == {})
    need(type(unit) is tuple and len(unit) == 4 and type(unit[0]) is bytes and unit[0].isalpha())
    need(all(type(n) is int and n > 0 for n in unit[1:]) and unit[2:] == (1, 1))
    return code if unit[0] == b"generic" else f"{code}[{unit[1]}{unit[0].decode()}]"


def _dtype(name: str, args: Arguments) -> Value:
    need(len(args) == 3 and type(args[0]) is str and args[1:] == (False, True))  # not aligned, copied
    need(re.fullmatch(r"[MOSUVbcfimu]\d{1,10}", args[0], re.ASCII))
    return DType(name, args[0])


def _reconstruct(name: str, args: Arguments) -> Value:
    need(len(args) == 3 and isinstance(args[0], Named) and args[1:2] == ((0,),) and args[2] == b"b")
    need(args[0].trusted or args[0].name == "numpy.ndarray")
    return _Array(name)


def _scalar(name: str, args: Arguments) -> Value:
    need(len(args) == 2 and isinstance(args[0], DType) and type(args[1]) is bytes)
    dtype = args[0].dtype
    need(not dtype.hasobject and len(args[1]) == dtype.itemsize)
    return Value(name, cost=1 + dtype.itemsize)


NUMPY_CALLED: Mapping[str, Maker] = {"numpy.dtype": _dtype} | {
    f"numpy.{core}.multiarray.{function}": make
    for core in ("core", "_core")  # NumPy 1 and NumPy 2
    for function, make in (("_reconstruct", _reconstruct), ("scalar", _scalar))
}
"""The functions and classes of NumPy that a pickle may call, by name."""

NUMPY_PASSIVE = {"numpy.ndarray", "numpy.bool", "numpy.bool_"} | {
    f"numpy.{kind.__name__}" for kind in np.sctypeDict.values()
}
"""The names of NumPy that a pickle may contain but not call."""
