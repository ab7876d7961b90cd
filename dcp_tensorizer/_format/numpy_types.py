"""How NumPy's arrays, scalars and dtypes pickle themselves.

NumPy believes what it unpickles: a dtype whose fields lie outside of its items reads foreign memory, and one with an
object where its flags deny that follows any pointer. So a dtype is made here by NumPy's constructor, which checks what
it is given, and must be the one that the stream describes. Arrays must have as many bytes as their shape says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from .pickled_values import Bytes, Dict, Global, Tuple, Unexpected, Value
from .standard_types import Maker, need

__all__ = ["CALLED", "PASSIVE"]

_MAX_NESTED = 32  # dtypes in dtypes; NumPy compares and shows them by recursion
_MAX_EMPTY = 1 << 20  # elements of an array whose items have no bytes
_ALIGNED = 0x80  # NumPy's NPY_ALIGNED_STRUCT


class _DType(Value):
    """A dtype; it is known when it has its state, and then it does not change any more."""

    def __init__(self, maker: str, code: str) -> None:
        super().__init__(maker)
        self._code = code
        self._dtype: np.dtype[Any] | None = None
        self.depth = 1

    @property
    def dtype(self) -> np.dtype[Any]:
        if self._dtype is None:
            raise Unexpected
        return self._dtype

    def build(self, state: Any) -> None:
        need(self._dtype is None and isinstance(state, Tuple) and len(state) in (8, 9))
        try:
            made = self._make(*state)
        except (TypeError, ValueError, OverflowError, SyntaxError):
            raise Unexpected from None
        reduced: Any = made.__reduce__()
        _, (code, *_), (_, order, _, _, _, itemsize, alignment, flags, *_) = reduced
        need(code == self._code and state[1] == order and tuple(map(type, state[5:8])) == (int, int, int))
        need(state[5:7] == (itemsize, alignment) and (state[7] - flags) % 256 == 0)  # NumPy 1 has a signed byte there
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
            need(names is None and fields is None and isinstance(base, Tuple) and len(base) == 2)
            need(isinstance(base[0], _DType) and _is_shape(base[1]))
            self._nest(base[0])
            return np.dtype((base[0].dtype, tuple(base[1])))
        if names is not None:
            return self._structure(names, fields, nbytes, flags)
        need(fields is None)
        made = np.dtype(_with_unit(self._code, *unit[0]) if unit else self._code)
        return made.newbyteorder(order) if order in ("<", ">") else made

    def _structure(self, names: Any, fields: Any, nbytes: Any, flags: Any) -> np.dtype[Any]:
        need(isinstance(names, Tuple) and all(type(name) is str for name in names) and isinstance(fields, Dict))
        by_name = fields.by_name()
        fields.frozen = True  # NumPy keeps this very dict
        places = [by_name.get(name) for name in names]
        need(all(isinstance(p, Tuple) and len(p) in (2, 3) and isinstance(p[0], _DType) for p in places))
        for place in places:
            self._nest(place[0])
        titles = [place[2] if len(place) == 3 else None for place in places]
        need(all(title is None or type(title) is str for title in titles))
        made = np.dtype(
            {
                "names": list(names),
                "formats": [place[0].dtype for place in places],
                "offsets": [place[1] for place in places],
                "titles": titles,
                "itemsize": nbytes,
            },
            align=bool(flags & _ALIGNED),
        )
        assert made.fields is not None
        need(set(by_name) == set(made.fields))
        need(all(by_name[key][0].dtype == made.fields[key][0] for key in by_name))
        need(all(tuple(by_name[key][1:]) == tuple(made.fields[key][1:]) for key in by_name))
        return made

    def _nest(self, inner: _DType) -> None:
        self.depth = max(self.depth, inner.depth + 1)
        need(self.depth <= _MAX_NESTED)


class _Array(Value):
    """An array of which only the type is known; its state has the rest."""

    def __init__(self, maker: str) -> None:
        super().__init__(maker, cost=None)
        self._built = False

    def build(self, state: Any) -> None:
        need(not self._built and isinstance(state, Tuple) and len(state) == 5 and state[0] == 1)
        _, shape, dtype, order, content = state
        need(_is_shape(shape) and isinstance(dtype, _DType) and type(order) in (bool, int))
        count = math.prod(shape)
        if dtype.dtype.hasobject:
            need(type(content) is list and len(content) == count)
        else:
            need(isinstance(content, Bytes) and len(content) == count * dtype.dtype.itemsize)
            need(dtype.dtype.itemsize or count <= _MAX_EMPTY)
        self._built = True


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, Tuple) and len(shape) <= 64 and all(type(n) is int and 0 <= n < 1 << 63 for n in shape)


def _with_unit(code: str, metadata: Any, unit: Any) -> str:
    """The name of a datetime64 or timedelta64 type: its unit, as (unit, how many, in how many, 1)."""
    need(metadata is None or (isinstance(metadata, Dict) and not metadata.pairs))
    need(isinstance(unit, Tuple) and len(unit) == 4 and isinstance(unit[0], Bytes) and unit[0].text.isalpha())
    need(all(type(n) is int and n > 0 for n in unit[1:]) and unit[2:] == (1, 1))
    return code if unit[0].text == "generic" else f"{code}[{unit[1]}{unit[0].text}]"


def _dtype(name: str, args: Tuple) -> Value:
    need(len(args) == 3 and type(args[0]) is str and args[1:] == (False, True))  # no alignment, and a copy
    need(re.fullmatch(r"[MOSUVbcfimu]\d{1,10}", args[0], re.ASCII))
    return _DType(name, args[0])


def _reconstruct(name: str, args: Tuple) -> Value:
    need(len(args) == 3 and isinstance(args[0], Global) and args[1:2] == ((0,),) and args[2] == b"b")
    need(args[0].trusted or args[0].name == "numpy.ndarray")
    return _Array(name)


def _scalar(name: str, args: Tuple) -> Value:
    need(len(args) == 2 and isinstance(args[0], _DType) and isinstance(args[1], Bytes))
    dtype = args[0].dtype
    need(not dtype.hasobject and len(args[1]) == dtype.itemsize)
    return Value(name, cost=1 + dtype.itemsize)


CALLED: Mapping[str, Maker] = {"numpy.dtype": _dtype} | {
    f"numpy.{core}.multiarray.{function}": make
    for core in ("core", "_core")  # of NumPy 1, and of NumPy 2
    for function, make in (("_reconstruct", _reconstruct), ("scalar", _scalar))
}
"""By name, what a stream may call."""

PASSIVE = {"numpy.ndarray", "numpy.bool", "numpy.bool_"} | {f"numpy.{kind.__name__}" for kind in np.sctypeDict.values()}
"""What a stream may name, and not call."""
