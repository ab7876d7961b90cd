"""A table of data types that load without the user's permission: how ``torch.save``'s protocol 2 pickles them.

Each type has a maker, which gets the arguments that a pickle passes to the class or function, and returns a placeholder
for the result. The maker raises `Unexpected` for arguments that the type itself would not have written, because their
effect is unknown. Of what a pickle names, makers call only the constructors of dtypes, dates and times.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .._runtime.torch_compat import GET_LAYOUT
from .inert import Made, Named, Unexpected, Value

Arguments = tuple[Any, ...]
Maker = Callable[[str, Arguments], Any]
"""A function that makes the placeholder for the result of a call, from the called name and the arguments."""


def need(condition: object) -> None:
    if not condition:
        raise Unexpected


def _check_attributes(state: Any) -> None:
    need(type(state) is dict and all(type(key) is str for key in state))


def _check_stream(state: Any) -> None:
    need(type(state) is tuple and tuple(map(type, state[:2])) == (bytes, int) and len(state) == 3)
    content, position, attributes = state
    need(0 <= position <= len(content))
    if attributes is not None:
        _check_attributes(attributes)


class _StateValue(Value):
    """A placeholder for a value that takes a state once, if a check accepts the state.

    The state may set attributes. So setting a second state, or appending members, could call one of these attributes.
    """

    def __init__(self, what: str, check: Callable[[Any], None] = _check_attributes) -> None:
        super().__init__(what)
        self._check: Callable[[Any], None] | None = check

    def build(self, state: Any) -> None:
        if self._check is None:
            raise Unexpected
        self._check(state)
        self._check = None


class _MappingValue(_StateValue):
    def update(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        pass


class _Deque(Value):
    def extend(self, items: Sequence[Any]) -> None:
        pass


def _takes(*kinds: type) -> Maker:
    """Returns a maker for arguments of exactly these types; `object` stands for any type."""

    def make(name: str, args: Arguments) -> Value:
        need(len(args) == len(kinds))
        need(all(kind is object or type(arg) is kind for arg, kind in zip(args, kinds, strict=True)))
        return Value(name)

    return make


def _takes_nothing(make: Callable[[str], Any]) -> Maker:
    def make_of_none(name: str, args: Arguments) -> Any:
        need(not args)
        return make(name)

    return make_of_none


def _encoded(name: str, args: Arguments) -> bytes:
    """Decodes the text that protocol 2 writes for bytes, with a character for each byte."""
    need(len(args) == 2 and type(args[0]) is str and args[1] == "latin1")
    try:
        return args[0].encode("latin-1")  # type: ignore[no-any-return]
    except UnicodeEncodeError:
        raise Unexpected from None


def _bytearray(name: str, args: Arguments) -> Value:
    kinds = tuple(map(type, args))
    need(kinds in ((), (bytes,)) or (kinds == (str, str) and args[1] == "latin-1"))
    return Value(name)


def _deque(name: str, args: Arguments) -> Value:
    need(not args or (len(args) == 2 and args[0] in ((), []) and type(args[1]) in (int, type(None))))
    return _Deque(name)


_FACTORIES = {
    f"builtins.{kind.__name__}" for kind in (bool, bytearray, bytes, complex, dict, float, frozenset, int, list)
} | {"builtins.set", "builtins.str", "builtins.tuple", "collections.Counter", "collections.OrderedDict"}


def _defaultdict(name: str, args: Arguments) -> Value:
    need(len(args) <= 1)
    for factory in args:  # the defaultdict calls it without arguments
        need(factory is None or (type(factory) is Named and (factory.trusted or factory.name in _FACTORIES)))
    return _MappingValue(name)


def _from_bytes(kind: Any, nbytes: int) -> Maker:
    """Returns a maker for a date or a time in packed bytes, of which the constructor of ``kind`` checks only a part."""

    def make(name: str, args: Arguments) -> Value:
        need(1 <= len(args) <= 2 and type(args[0]) is bytes and len(args[0]) == nbytes)
        need(all(type(zone) is Made or _is_made_by(zone, "datetime.timezone") for zone in args[1:]))
        try:
            kind(args[0]).replace()  # `replace` checks each field
        except (ValueError, TypeError):
            raise Unexpected from None
        return Value(name)

    return make


def _timezone(name: str, args: Arguments) -> Value:
    need(1 <= len(args) <= 2 and _is_made_by(args[0], "datetime.timedelta"))
    need(all(type(arg) is str for arg in args[1:]))
    return Value(name)


def _is_made_by(value: Any, name: str) -> bool:
    return isinstance(value, Value) and value.what == name


def _path(name: str, args: Arguments) -> Value:
    need(all(type(part) is str for part in args))
    return Value(name)


def _device(name: str, args: Arguments) -> Value:
    need(tuple(map(type, args)) in ((str,), (str, int)))
    return Value(name)


# --- NumPy's arrays, scalars and dtypes -------------------------------------------------------------------------------
#
# NumPy trusts pickles. If a dtype holds objects, but its flags deny that, NumPy dereferences any pointer in the data.
# If fields of a dtype lie outside its items, NumPy reads out of bounds. So this table has only dtypes without fields,
# subarrays or objects. `_DType` makes each dtype with NumPy's constructor, and the pickle must describe exactly that
# dtype. The data of an array must have the size of its shape and dtype.


class _DType(Value):
    """A placeholder for a dtype. `build` sets the dtype, once."""

    def __init__(self, what: str, code: str) -> None:
        super().__init__(what)
        self._code = code
        self._dtype: np.dtype[Any] | None = None

    @property
    def itemsize(self) -> int:
        if self._dtype is None:
            raise Unexpected
        return self._dtype.itemsize

    def build(self, state: Any) -> None:
        need(self._dtype is None and type(state) is tuple and len(state) == 8)
        try:
            made = np.dtype(self._code)
        except (TypeError, ValueError, OverflowError):
            raise Unexpected from None
        if state[1] in ("<", ">"):
            made = made.newbyteorder(state[1])
        reduced: Any = made.__reduce__()
        need(state == reduced[2])
        self._dtype = made


class _Array(Value):
    def build(self, state: Any) -> None:
        need(type(state) is tuple and len(state) == 5 and state[0] == 1)
        _, shape, dtype, order, content = state
        need(type(shape) is tuple and len(shape) <= 64 and all(type(n) is int and 0 <= n < 1 << 63 for n in shape))
        need(isinstance(dtype, _DType) and type(order) in (bool, int) and type(content) is bytes)
        need(dtype.itemsize and len(content) == math.prod(shape) * dtype.itemsize)


def _dtype(name: str, args: Arguments) -> Value:
    need(len(args) == 3 and type(args[0]) is str and args[1:] == (False, True))  # not aligned, copied
    need(re.fullmatch(r"[SUbcfiu]\d{1,10}", args[0], re.ASCII))
    return _DType(name, args[0])


def _reconstruct(name: str, args: Arguments) -> Value:
    need(len(args) == 3 and type(args[0]) is Named and args[1:2] == ((0,),) and args[2] == b"b")
    need(args[0].trusted or args[0].name == "numpy.ndarray")
    return _Array(name)


def _scalar(name: str, args: Arguments) -> Value:
    need(len(args) == 2 and isinstance(args[0], _DType) and type(args[1]) is bytes)
    need(len(args[1]) == args[0].itemsize)
    return Value(name)


CALLED: Mapping[str, Maker] = {
    "_codecs.encode": _encoded,
    "builtins.bytearray": _bytearray,
    "builtins.bytes": _takes_nothing(lambda name: b""),
    "builtins.complex": _takes(float, float),
    "builtins.frozenset": _takes(list),
    "builtins.range": _takes(int, int, int),
    "builtins.set": _takes(list),
    "builtins.slice": _takes(object, object, object),
    "collections.Counter": _takes(dict),
    "collections.OrderedDict": _takes_nothing(_MappingValue),
    "collections.defaultdict": _defaultdict,
    "collections.deque": _deque,
    "datetime.date": _from_bytes(datetime.date, 4),
    "datetime.datetime": _from_bytes(datetime.datetime, 10),
    "datetime.time": _from_bytes(datetime.time, 6),
    "datetime.timedelta": _takes(int, int, int),
    "datetime.timezone": _timezone,
    "numpy.dtype": _dtype,
    "torch.Size": _takes(tuple),
    "torch.device": _device,
    GET_LAYOUT: _takes(str),
    **{
        f"{module}.{name}": _path
        for module in ("pathlib", "pathlib._local")  # the second is Python 3.13's
        for name in ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
    },
    **{
        f"numpy.{core}.multiarray.{function}": make
        for core in ("core", "_core")  # NumPy 1 and NumPy 2
        for function, make in (("_reconstruct", _reconstruct), ("scalar", _scalar))
    },
}
"""The functions and classes that a pickle may call, by name."""

CREATED: Mapping[str, Maker] = {
    "_io.BytesIO": _takes_nothing(lambda name: _StateValue(name, _check_stream)),
    "argparse.Namespace": _takes_nothing(_StateValue),
}
"""The classes whose ``__new__`` a pickle may call, by name."""

PASSIVE = (
    _FACTORIES
    | {"builtins.Ellipsis", "builtins.NotImplemented", "builtins.object"}
    | {"numpy.ndarray", "numpy.bool", "numpy.bool_"}
    | {f"numpy.{kind.__name__}" for kind in np.sctypeDict.values()}
)
"""Names that a pickle may contain. It may call those of them that are also in `CALLED`."""
