"""Stand-ins for what a pickle would make: they know what a stream may still do to a value, and none of it is done.

Whatever is not here is itself: numbers, strings, booleans, None, and lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = [
    "Bytes",
    "Dict",
    "Global",
    "Mapping",
    "Record",
    "Trusted",
    "Tuple",
    "Unexpected",
    "Value",
    "hash_cost",
    "make_tuple",
]

_MAX_COST = 10_000  # Python hashes nested tuples by recursion, which no limit of its own stops


class Unexpected(Exception):
    """A stream makes a value in a way in which the value's own type would not have written it."""


class Global:
    """A class or a function, by its name; nothing is looked up or imported.

    Args:
        name: Its module and its name.
        trusted: The user allows it, with any arguments.
    """

    def __init__(self, name: str, *, trusted: bool) -> None:
        self.name = name
        self.trusted = trusted


class Value:
    """An instance.

    Args:
        maker: The global that made it.
        cost: What it costs to hash it once; None if it cannot be hashed.
    """

    def __init__(self, maker: str, cost: int | None = 1) -> None:
        self.maker = maker
        self.cost = cost

    def build(self, state: Any) -> None:
        """Takes a state, as ``__setstate__`` would."""
        raise Unexpected

    def extend(self, items: Sequence[Any]) -> None:
        """Takes further members."""
        raise Unexpected

    def update(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Takes further keys and values."""
        raise Unexpected


class Trusted(Value):
    """Of a type that the user allows, or that is refused and of which no more needs to be known."""

    def build(self, state: Any) -> None:
        pass

    def extend(self, items: Sequence[Any]) -> None:
        pass

    def update(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        pass


class Tuple(tuple[Any, ...]):
    """A tuple that knows what it costs to hash it, however its members are shared."""

    cost: int | None


class Bytes(Value):
    """Bytes, as the text that protocol 2 writes for them: a character a byte."""

    def __init__(self, text: str) -> None:
        super().__init__("bytes")
        self.text = text

    def __len__(self) -> int:
        return len(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, bytes) and self.text.encode("latin-1", "replace") == other

    __hash__ = None  # type: ignore[assignment]


class Dict(Value):
    """A dict, as a list of keys and values: no key of a stream is hashed. A frozen one is in use and may not change."""

    def __init__(self) -> None:
        super().__init__("dict", cost=None)
        self.pairs: list[tuple[Any, Any]] = []
        self.frozen = False

    def update(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        if self.frozen:
            raise Unexpected
        self.pairs.extend(pairs)

    def by_name(self) -> dict[str, Any]:
        """Raises `Unexpected` unless all keys are strings."""
        if not all(type(key) is str for key, _ in self.pairs):
            raise Unexpected
        return dict(self.pairs)


class Mapping(Value):
    """An OrderedDict or the like: takes keys and values, and with ``attributes`` also those of the instance."""

    def __init__(self, maker: str, *, attributes: bool = False) -> None:
        super().__init__(maker, cost=None)
        self._attributes = attributes

    def update(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        pass

    def build(self, state: Any) -> None:
        if not self._attributes or not isinstance(state, Dict):
            raise Unexpected
        state.by_name()


class Record(Value):
    """Takes one state, if a check accepts it."""

    def __init__(self, maker: str, check: Callable[[Any], object], cost: int | None = 1) -> None:
        super().__init__(maker, cost)
        self._check: Callable[[Any], object] | None = check

    def build(self, state: Any) -> None:
        if self._check is None:
            raise Unexpected
        self._check(state)
        self._check = None


def hash_cost(value: Any) -> int | None:
    """What it costs to hash a value once, in members and 64-bit words; None if it cannot be hashed or takes long."""
    if isinstance(value, Tuple | Value):
        return value.cost
    if isinstance(value, list):
        return None
    return 1 + value.bit_length() // 64 if isinstance(value, int) else 1


def make_tuple(members: Sequence[Any]) -> Tuple:
    """A tuple whose cost is known, in the time that its members take to count."""
    made = Tuple(members)
    costs = [hash_cost(member) for member in members]
    total = 1 + sum(cost for cost in costs if cost is not None)
    made.cost = None if None in costs or total > _MAX_COST else total
    return made
