"""New names of keys by patterns, and the reverse."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias


class Parts:
    """One tensor as its parts, in a rule of ``rename``: experts one by one, or queries, keys and values by themselves.

    One side of a rule is the name of the whole tensor, and the other side its parts::

        {
            "layers.*.experts.w1": Parts("model.layers.*.mlp.experts.{}.gate_proj.weight"),
            "*.qkv.weight": Parts("*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight", sizes=(4, 1, 1)),
        }

    With ``{}`` in the names there are parts for each index of the whole tensor's first dimension, which they do not
    have; ``{}`` stands for the index. Several names cut the tensor along ``dim``.

    Megatron's fused projection has the heads of one group after the other, each group with its queries, its key and its
    value. With ``groups``, each part is taken from all groups: with 32 heads of queries in 8 groups,
    ``Parts("*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight", sizes=(4, 1, 1), groups=8)``.

    Args:
        names: Patterns with the same number of ``*`` each, as the other side has. All have ``{}``, or none.
        dim: The dimension along which several names cut, as the parts count it.
        sizes: The ratio of the parts' sizes along it. By default they are equal.
        groups: The number of groups along it, each with all parts.

    Raises:
        TypeError: a name is no string, or a number is none.
        ValueError: the names do not belong together, or a number is not allowed.
    """

    __slots__ = ("dim", "groups", "names", "sizes")

    def __init__(self, *names: str, dim: int = 0, sizes: Sequence[int] = (), groups: int = 1) -> None:
        if not names or not all(isinstance(name, str) for name in names):
            raise TypeError(f"Parts takes names, all strings, and got {names!r}")
        if not all(type(number) is int for number in (dim, groups, *sizes)):
            raise TypeError(f"dim, sizes and groups of Parts are ints, and are {dim!r}, {sizes!r} and {groups!r}")
        kinds = {(name.count("*"), name.count("{}")) for name in names}
        if len(kinds) > 1 or kinds.pop()[1] > 1:
            raise ValueError(f"all names of Parts have as many * and at most one {{}}, all or none: {names!r}")
        if len(names) == 1 and not self._is_numbered(names):
            raise ValueError(f"one part is the whole: {names[0]!r} has no {{}}")
        self.names: tuple[str, ...] = names
        self.dim = dim
        self.sizes = tuple(sizes) or (1,) * len(names)
        self.groups = groups
        if dim < 0 or groups < 1 or len(self.sizes) != len(names) or min(self.sizes) < 1:
            raise ValueError(
                f"Parts has dim={dim}, groups={groups}, and {len(names)} names with the sizes {self.sizes}"
            )
        if len(names) == 1 and groups > 1:
            raise ValueError(f"groups={groups} needs several names, and there is one: {names[0]!r}")

    @staticmethod
    def _is_numbered(names: Sequence[str]) -> bool:
        return "{}" in names[0]

    @property
    def is_numbered(self) -> bool:
        """Returns whether there are parts for each index of the first dimension."""
        return self._is_numbered(self.names)

    def __repr__(self) -> str:
        """The call that makes it."""
        numbers = f"dim={self.dim}, sizes={self.sizes}, groups={self.groups}"
        return f"Parts({', '.join(map(repr, self.names))}, {numbers})"

    def __eq__(self, other: object) -> bool:
        """Compares the arguments."""
        return isinstance(other, Parts) and self._arguments() == other._arguments()

    def __hash__(self) -> int:
        """Hashes its arguments, so that parts can be keys of a dict."""
        return hash(self._arguments())

    def _arguments(self) -> tuple[object, ...]:
        return self.names, self.dim, self.sizes, self.groups


Rules: TypeAlias = Mapping[Any, "str | Parts"]
"""The keys are strings or `Parts`, too. Type checkers would take no ``dict[str, str]`` for a mapping of both."""


class PartNumber(NamedTuple):
    """The number of a part of a tensor."""

    part: int  # of the names of its `Parts`
    row: int  # in the first dimension, where `Parts.is_numbered`


class Match(NamedTuple):
    """A key that a rule matches."""

    rule: Rule
    stars: tuple[str, ...]
    number: PartNumber

    def new_name(self, part: int = 0, row: int = 0) -> str:
        """The new name, or that of a part of it."""
        return self.rule.new[part].filled(self.stars, row)


class Rule(NamedTuple):
    """A rule, and what it was made of."""

    old: tuple[_Pattern, ...]
    new: tuple[_Pattern, ...]
    old_side: str | Parts
    new_side: str | Parts

    @classmethod
    def of(cls, old: object, new: object) -> Rule:
        if not isinstance(old, str | Parts) or not isinstance(new, str | Parts):
            raise TypeError(f"rename must give new keys by patterns, strings or Parts, and has {old!r}: {new!r}")
        if isinstance(old, Parts) and isinstance(new, Parts):
            raise ValueError(f"one side of a rule is a whole tensor, and both are parts: {old!r}, {new!r}")
        return cls(_patterns(old), _patterns(new), old, new)

    @property
    def is_plain(self) -> bool:
        """Returns whether it only gives a tensor another name."""
        return isinstance(self.old_side, str) and isinstance(self.new_side, str)

    def match(self, key: str) -> Match | None:
        """Matches a key, or returns None."""
        for number, pattern in enumerate(self.old):
            if (found := pattern.match(key)) is not None:
                return Match(self, found[0], PartNumber(number, found[1]))
        return None


class Renaming:
    """Gives keys new names.

    Args:
        rules: New names by patterns, in which only ``*`` has a meaning. The n-th ``*`` of a new name stands for the
            same text as the n-th of its pattern. The first pattern that matches a key counts. Other keys stay as they
            are. One side of a rule may be `Parts`.

    Attributes:
        unused: The patterns that have not matched a key yet.

    Raises:
        TypeError: a rule is not of strings and parts.
        ValueError: a new name is empty, or has more ``*`` than its pattern.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = [Rule.of(old, new) for old, new in rules.items()]
        for rule in self._rules:
            if not all(pattern.text for pattern in rule.new) or rule.new[0].stars > rule.old[0].stars:
                raise ValueError(f"{rule.old_side!r} cannot become {rule.new_side!r}: that is empty, or has a * more")
        self.unused = dict.fromkeys(rules)

    def find(self, key: str) -> Match | None:
        """The rule for a key, if there is one."""
        for rule in self._rules:
            if (match := rule.match(key)) is not None:
                self.unused.pop(rule.old_side, None)
                return match
        return None

    def new_name(self, key: str) -> str:
        """The new name of a key, where no rule has parts."""
        match = self.find(key)
        return key if match is None else match.new_name()

    def inverse(self) -> Renaming:
        """The reverse rules. Raises `ValueError` if a new name has fewer ``*`` than its pattern."""
        return Renaming({rule.new_side: rule.old_side for rule in self._rules})


class _Pattern:
    """A name with ``*`` and, among parts, ``{}`` in it."""

    def __init__(self, text: str, *, is_numbered: bool) -> None:
        self.text = text
        self.stars = text.count("*")
        self._pieces = re.split(r"(\*|\{\})" if is_numbered else r"(\*)", text)
        groups = {"*": "(.*)", "{}": "(0|[1-9][0-9]*)"}
        regex = (groups[piece] if place % 2 else re.escape(piece) for place, piece in enumerate(self._pieces))
        self._regex = re.compile("".join(regex), re.DOTALL)

    def match(self, key: str) -> tuple[tuple[str, ...], int] | None:
        """Returns the texts that the stars stand for, and the number."""
        if (found := self._regex.fullmatch(key)) is None:
            return None
        signs = list(zip(self._pieces[1::2], found.groups(), strict=True))
        number = next((int(text) for sign, text in signs if sign == "{}"), 0)
        return tuple(text for sign, text in signs if sign == "*"), number

    def filled(self, stars: Sequence[str], number: int) -> str:
        """The name with what the stars stand for, and the number."""
        pieces, left = list(self._pieces), iter(stars)
        pieces[1::2] = (next(left) if sign == "*" else str(number) for sign in pieces[1::2])
        return "".join(pieces)


def _patterns(side: str | Parts) -> tuple[_Pattern, ...]:
    if isinstance(side, str):
        return (_Pattern(side, is_numbered=False),)
    return tuple(_Pattern(name, is_numbered=side.is_numbered) for name in side.names)
