"""Objects as ``torch.save`` stores them, including objects that no program would save."""

from __future__ import annotations

import argparse
import collections
import datetime
import io
import pathlib
import random
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

__all__ = ["STANDARD", "Made", "archive", "same", "saved"]

_UTC = datetime.timezone.utc

_NAMED = io.BytesIO(b"abc")
_NAMED.name = "x"  # type: ignore[attr-defined]

STANDARD: dict[str, Any] = {
    "bytes": [b"", b"\x00\xff", bytearray(), bytearray(b"\x00\xff")],
    "bytes_io": [io.BytesIO(b"abc"), _NAMED],
    "complex": 1 + 2j,
    "counter": collections.Counter("aab"),
    "defaultdict": collections.defaultdict(list, {"a": [1]}),
    "deque": [collections.deque([1, 2]), collections.deque([1], maxlen=3)],
    "dates": [datetime.date(2020, 2, 29), datetime.time(23, 59, fold=1), datetime.timedelta(-1, 2, 3)],
    "datetimes": [datetime.datetime(2020, 2, 29, 1, 2, 3, 4), datetime.datetime(1, 1, 1, tzinfo=_UTC)],
    "time_zone": datetime.timezone(datetime.timedelta(hours=1), "x"),
    "ellipsis": ...,
    "large_int": [2**100, -(2**5000)],
    "namespace": argparse.Namespace(b=[2]),
    "ordered": collections.OrderedDict(b=1, a=2),
    "paths": [pathlib.Path("/a/b"), pathlib.PurePosixPath("a"), pathlib.PureWindowsPath("c:\\x")],
    "range": [range(1, 9, 2), slice(1, None, 2)],
    "sets": [{1, (2, "x")}, frozenset({frozenset({3}), b"y"})],
    "types": [int, dict, np.float32, torch.float32],
    "random_state": random.getstate(),
    "numpy_random_state": np.random.get_state(),
    "generator_states": [
        np.random.Generator(made(0)).bit_generator.state
        for made in (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64)
    ],
    "arrays": [
        np.arange(6, dtype=dtype).reshape(2, 3) for dtype in ("i1", "u8", "i4", "f2", "f8", "c16", "longdouble")
    ],
    "array_kinds": [
        np.array(3.5),
        np.zeros((0, 4), "f4"),
        np.asfortranarray(np.ones((2, 3))),
        np.array([True, False]),
        np.array(["a", "bb"]),
        np.array([b"a", b"bb"]),
    ],
    "scalars": [np.float32(1.5), np.int64(3), np.bool_(True), np.str_("x"), np.bytes_(b"y"), np.complex64(1j)],
    "dtypes": [np.dtype(name) for name in ("<u4", ">f4", "?", "U3", "S2", "c8")],
    "with_tensors": {"torch": torch.get_rng_state(), "numpy": np.arange(3), "kept": torch.nn.Parameter(torch.ones(2))},
}
"""Values of the standard library's, NumPy's and torch's types that load without permission, by a name for them."""


class Made:
    """Pickles itself in any way: as a callable, its arguments, and perhaps a state."""

    def __init__(self, *how: Any) -> None:
        self._how = how

    def __reduce__(self) -> tuple[Any, ...]:
        return self._how


def saved(value: object) -> bytes:
    """What ``torch.save`` makes of a value."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def archive(change: Callable[[bytes], bytes], value: object = None, compression: int = zipfile.ZIP_STORED) -> bytes:
    """The bytes that ``torch.save`` makes of a value, with its pickle replaced by ``change``."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(value))) as before, zipfile.ZipFile(made, "w", compression) as after:
        for name in before.namelist():
            content = before.read(name)
            after.writestr(name, change(content) if name.endswith("data.pkl") else content)
    return made.getvalue()


def same(a: Any, b: Any) -> bool:
    """Returns whether two of these values are of one type and equal, NaNs and streams included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, io.BytesIO):
        return bool(a.getvalue() == b.getvalue() and a.tell() == b.tell())
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and repr(a) == repr(b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)
