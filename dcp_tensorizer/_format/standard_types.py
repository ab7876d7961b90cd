"""How the standard library's types of data pickle themselves, with ``torch.save``'s protocol 2.

A maker gets the arguments that a stream gives to a class or function. It returns a stand-in for the result, or raises
`Unexpected` where the type would not have written those: then nothing is known of what they might do. None of these
calls runs code that is not in the table, and none takes more time or memory than a multiple of its arguments.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping
from typing import Any

from . import pickled_values
from .pickled_values import Bytes, Dict, Global, Record, Trusted, Tuple, Unexpected, Value

__all__ = ["CALLED", "CREATED", "PASSIVE", "Maker", "need", "takes"]

Maker = Callable[[str, Tuple], Any]
"""Makes a stand-in of a global's name and the arguments."""

_MAX_DIGITS = 4300  # Python's own limit for decimal digits of an int: reducing a fraction takes their square


def need(condition: object) -> None:
    """Raises `Unexpected` unless a condition holds."""
    if not condition:
        raise Unexpected


def _is(value: Any, *types: type) -> bool:
    return type(value) in types


def takes(*kinds: type, cost: int | None = 1) -> Maker:
    """Takes exactly these types, one after the other."""

    def make(name: str, args: Tuple) -> Value:
        need(tuple(map(type, args)) == kinds)
        return Value(name, cost)

    return make


def _nothing(make: Callable[[str], Any]) -> Maker:
    """Takes no arguments."""

    def make_of_none(name: str, args: Tuple) -> Any:
        need(not args)
        return make(name)

    return make_of_none


# --- bytes and containers ---------------------------------------------------------------------------------------------


def _encoded(name: str, args: Tuple) -> Bytes:
    need(len(args) == 2 and _is(args[0], str) and args[1] == "latin1")
    return Bytes(args[0])


def _bytearray(name: str, args: Tuple) -> Value:
    need(not args or (len(args) == 1 and _is(args[0], Bytes)) or (_is(args[0], str) and args[1:] == ("latin-1",)))
    return Value(name, cost=None)


def _set(name: str, args: Tuple) -> Value:
    need(len(args) == 1 and _is(args[0], list))
    return Value(name, cost=None if name == "builtins.set" else 1 + len(args[0]))


def _slice(name: str, args: Tuple) -> Value:
    need(len(args) == 3)
    return Value(name, cost=None)


class _Deque(Value):
    def extend(self, items: Any) -> None:
        pass


def _deque(name: str, args: Tuple) -> Value:
    need(not args or (len(args) == 2 and args[0] in ((), []) and _is(args[1], int, type(None))))
    return _Deque(name, cost=None)


_FACTORIES = {
    f"builtins.{kind.__name__}" for kind in (bool, bytearray, bytes, complex, dict, float, frozenset, int, list)
} | {"builtins.set", "builtins.str", "builtins.tuple", "collections.Counter", "collections.OrderedDict"}


def _defaultdict(name: str, args: Tuple) -> Value:
    need(len(args) <= 1)
    for factory in args:  # it is called later, without arguments
        need(factory is None or (_is(factory, Global) and (factory.trusted or factory.name in _FACTORIES)))
    return pickled_values.Mapping(name)


def _counter(name: str, args: Tuple) -> Value:
    need(len(args) <= 1 and all(_is(arg, Dict) for arg in args))
    return pickled_values.Mapping(name)


# --- dates and numbers ------------------------------------------------------------------------------------------------


def _from_bytes(kind: Any, nbytes: int) -> Maker:
    """A date or a time of packed bytes, which its own constructor believes."""

    def make(name: str, args: Tuple) -> Value:
        need(1 <= len(args) <= 2 and _is(args[0], Bytes) and len(args[0]) == nbytes)
        need(all((_is(zone, Value) and zone.maker in _ZONES) or _is(zone, Trusted) for zone in args[1:]))
        try:
            kind(args[0].text.encode("latin-1")).replace()  # which checks each field
        except (ValueError, TypeError):
            raise Unexpected from None
        return Value(name)

    return make


def _timezone(name: str, args: Tuple) -> Value:
    need(1 <= len(args) <= 2 and _is(args[0], Value) and args[0].maker == "datetime.timedelta")
    need(all(_is(arg, str) for arg in args[1:]))
    return Value(name)


def _zone_info(name: str, args: Tuple) -> Value:
    need(len(args) == 2 and _is(args[0], str) and _is(args[1], int, bool))
    need(re.fullmatch(r"[\w+-]+(/[\w+-]+)*", args[0], re.ASCII))
    return Value(name)


def _decimal(name: str, args: Tuple) -> Value:
    need(len(args) == 1 and _is(args[0], str))
    return Value(name, cost=1 + len(args[0]))


def _fraction(name: str, args: Tuple) -> Value:
    if len(args) == 1:  # Python 3.10
        need(
            _is(args[0], str) and re.fullmatch(rf"-?\d{{1,{_MAX_DIGITS}}}(/\d{{1,{_MAX_DIGITS}}})?", args[0], re.ASCII)
        )
    else:
        need(len(args) == 2 and all(_is(arg, int) and arg.bit_length() < 3 * _MAX_DIGITS for arg in args))
    return Value(name, cost=_MAX_DIGITS // 10)


def _array(name: str, args: Tuple) -> Value:
    need(len(args) == 2 and _is(args[0], str) and _is(args[1], list))
    need(all(_is(member, int, float, str) for member in args[1]))
    return Value(name, cost=None)


def _strings(name: str, args: Tuple) -> Value:
    need(all(_is(part, str) for part in args))
    return Value(name, cost=1 + len(args))


def _struct_time(name: str, args: Tuple) -> Value:
    need(len(args) == 2 and _is(args[0], Tuple) and _is(args[1], Dict))
    return Value(name, cost=1 + (args[0].cost or 0))


# --- what takes a state -----------------------------------------------------------------------------------------------


def _with_state(check: Callable[[Any], object], cost: int | None = None) -> Maker:
    return _nothing(lambda name: Record(name, check, cost))


def _attributes(state: Any) -> None:
    need(_is(state, Dict))
    state.by_name()


def _only(attribute: str, *kinds: type) -> Callable[[Any], None]:
    def check(state: Any) -> None:
        need(_is(state, Dict) and set(state.by_name()) == {attribute})
        need(_is(state.by_name()[attribute], *kinds))

    return check


def _uuid_state(state: Any) -> None:
    need(_is(state, Dict))
    values = state.by_name()
    need({"int"} <= set(values) <= {"int", "is_safe"} and all(_is(value, int) for value in values.values()))
    need(0 <= values["int"] < 1 << 128)


def _instance_attributes(state: Any) -> None:
    if state is not None:
        _attributes(state)


def _bytes_io_state(state: Any) -> None:
    need(_is(state, Tuple) and len(state) == 3 and _is(state[0], Bytes))
    _instance_attributes(state[2])
    need(_is(state[1], int) and 0 <= state[1] <= len(state[0]))


def _string_io_state(state: Any) -> None:
    need(_is(state, Tuple) and len(state) == 4 and _is(state[0], str))
    _instance_attributes(state[3])
    need(state[1] in (None, "", "\n", "\r", "\r\n") and _is(state[2], int) and 0 <= state[2] <= len(state[0]))


_PATHS = ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
_ZONES = ("datetime.timezone", "zoneinfo.ZoneInfo._unpickle")

CALLED: Mapping[str, Maker] = {
    "_codecs.encode": _encoded,
    "array.array": _array,
    "builtins.bytearray": _bytearray,
    "builtins.bytes": _nothing(lambda name: Bytes("")),
    "builtins.complex": takes(float, float),
    "builtins.frozenset": _set,
    "builtins.range": takes(int, int, int),
    "builtins.set": _set,
    "builtins.slice": _slice,
    "collections.Counter": _counter,
    "collections.OrderedDict": _nothing(lambda name: pickled_values.Mapping(name, attributes=True)),
    "collections.defaultdict": _defaultdict,
    "collections.deque": _deque,
    "datetime.date": _from_bytes(datetime.date, 4),
    "datetime.datetime": _from_bytes(datetime.datetime, 10),
    "datetime.time": _from_bytes(datetime.time, 6),
    "datetime.timedelta": takes(int, int, int),
    "datetime.timezone": _timezone,
    "decimal.Decimal": _decimal,
    "fractions.Fraction": _fraction,
    "time.struct_time": _struct_time,
    "types.SimpleNamespace": _with_state(_attributes),
    "zoneinfo.ZoneInfo._unpickle": _zone_info,
} | {f"{module}.{name}": _strings for module in ("pathlib", "pathlib._local") for name in _PATHS}
"""By name, what a stream may call. Python 3.13 has paths in ``pathlib._local``."""

CREATED: Mapping[str, Maker] = {
    "_io.BytesIO": _with_state(_bytes_io_state),
    "_io.StringIO": _with_state(_string_io_state),
    "argparse.Namespace": _with_state(_attributes),
    "collections.ChainMap": _with_state(_only("maps", list)),
    "collections.UserDict": _with_state(_only("data", Dict)),
    "collections.UserList": _with_state(_only("data", list)),
    "uuid.UUID": _with_state(_uuid_state, cost=1),
}
"""By name, of what a stream may make an instance by ``__new__``, without arguments."""

PASSIVE = _FACTORIES | {"builtins.Ellipsis", "builtins.NotImplemented", "builtins.object", "zoneinfo.ZoneInfo"}
"""What a stream may name, and not call."""
