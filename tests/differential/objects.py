"""Values that are no tensors, by name: what users put into state dicts beside their weights."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import io
import pathlib
import random
import threading
import types
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["NEED_TRUST", "OBJECTS", "UNSAVABLE", "Books", "Pair", "TaggedDict", "TaggedList"]


class Pair(NamedTuple):
    first: Any
    second: Any


class TaggedList(list[Any]):
    """A list whose constructor takes something else than members."""

    def __init__(self, tag: str = "tag") -> None:
        super().__init__()
        self.tag = tag


class TaggedDict(dict[Any, Any]):
    """A dict whose constructor takes something else than items."""

    def __init__(self, tag: str = "tag") -> None:
        super().__init__()
        self.tag = tag


class Colour(enum.Enum):
    RED = 1


@dataclass
class Config:
    width: int = 3
    layers: list[int] = field(default_factory=lambda: [1, 2])


class Books:
    """Something with a state of its own, of which DCP knows how to ask for it."""

    def __init__(self, state: dict[Any, Any]) -> None:
        self.state = state
        self.loaded: list[Any] = []

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.loaded.append(state)

    def __repr__(self) -> str:
        return f"Books({self.state!r})"


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: int = 5) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Slotted({self.value})"


class Failing:
    """Neither deepcopy nor pickle get anything out of it."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("it cannot be pickled")


def _bytes_at(position: int) -> io.BytesIO:
    stream = io.BytesIO(b"0123456789")
    stream.seek(position)
    return stream


def _tagged(container: Any) -> Any:
    container.tag = "another"
    if isinstance(container, dict):
        container["k"] = 5
    else:
        container.append(5)
    return container


def _recursive() -> list[Any]:
    value: list[Any] = [1]
    value.append((value,))
    return value


PLAIN: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "true": lambda: True,
    "int": lambda: 3,
    "huge int": lambda: 1 << 80,
    "float": lambda: 0.1,
    "nan": lambda: float("nan"),
    "infinity": lambda: float("-inf"),
    "complex": lambda: 1 - 2j,
    "str": lambda: "é\0\n",
    "empty str": lambda: "",
    "surrogate": lambda: "\ud800",
    "bytes": lambda: b"\0\xff",
    "long str": lambda: "x" * 3000,
    "tuple": lambda: (1, "a", None),
    "empty tuple": lambda: (),
    "list": lambda: [1, [2, "x"]],
    "empty list": list,
    "set": lambda: {3},
    "counter": lambda: [collections.Counter("aab")],
    "ordered in a list": lambda: (collections.OrderedDict(b=1, a=2),),
    "size": lambda: torch.Size([2, 3]),
    "dtype": lambda: torch.bfloat16,
    "device": lambda: torch.device("cpu"),
    "tensors in a tuple": lambda: (torch.arange(3), (torch.ones(2, dtype=torch.bfloat16), 5)),
    "tied in a tuple": lambda: (torch.arange(3),) * 2,
    "parameter in a tuple": lambda: (torch.nn.Parameter(torch.ones(2)),),
    "strided in a tuple": lambda: (torch.arange(6).view(2, 3).t(),),
    "itself": _recursive,
}
NEED_TRUST: dict[str, Callable[[], Any]] = {
    "bytearray": lambda: bytearray(b"ab"),
    "frozenset": lambda: frozenset([1]),
    "range": lambda: range(1, 9, 2),
    "slice": lambda: slice(1, 2),
    "ellipsis": lambda: ...,
    "BytesIO": lambda: _bytes_at(0),
    "BytesIO in the middle": lambda: _bytes_at(4),
    "StringIO": lambda: io.StringIO("text"),
    "namedtuple": lambda: Pair(1, torch.arange(2)),
    "defaultdict in a tuple": lambda: (collections.defaultdict(list, a=[1]),),
    "deque": lambda: collections.deque([1, 2], maxlen=5),
    "datetime": lambda: datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone.utc),
    "timedelta": lambda: datetime.timedelta(seconds=3),
    "path": lambda: pathlib.PurePosixPath("a/b"),
    "decimal": lambda: decimal.Decimal("0.1"),
    "fraction": lambda: fractions.Fraction(1, 3),
    "uuid": lambda: uuid.UUID(int=5),
    "namespace": lambda: types.SimpleNamespace(a=1),
    "enum": lambda: Colour.RED,
    "dataclass": Config,
    "slotted": Slotted,
    "class": lambda: Config,
    "function": lambda: pathlib.Path,
    "tagged list": lambda: _tagged(TaggedList()),
    "tagged dict in a tuple": lambda: (_tagged(TaggedDict()),),
    "array": lambda: np.arange(6, dtype=np.int32).reshape(2, 3),
    "0-dim array": lambda: np.array(1.5),
    "object array": lambda: np.array([1, "a"], dtype=object),
    "numpy scalar": lambda: np.float32(1.5),
    "numpy dtype": lambda: np.dtype("uint32"),
    "numpy RNG": lambda: np.random.RandomState(3).get_state(),
    "numpy generator": lambda: np.random.default_rng(3).bit_generator.state,
    "python RNG": lambda: random.Random(3).getstate(),
    "module": lambda: torch.nn.Linear(1, 1, bias=False).requires_grad_(False).apply(_zeroed),
    "memory format": lambda: torch.channels_last,
    "stateful inside": lambda: [Books({"x": 1})],
}
UNSAVABLE: dict[str, Callable[[], Any]] = {
    "lambda": lambda: lambda: 3,
    "lock": threading.Lock,
    "generator": lambda: (n for n in range(3)),
    "failing": Failing,
    "lock in a list": lambda: [threading.Lock()],
    "view": lambda: memoryview(b"ab"),
}
OBJECTS = PLAIN | NEED_TRUST | UNSAVABLE


def _zeroed(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.zero_()
