"""Maps keys to new names by patterns, maps the elements of their tensors, and reverses both.

A rule may rename a tensor, cut it into parts, or make it a part of another. `place` takes the tensors on one side of a
`Renaming`, and returns for each tensor on the other side the boxes that make it up. A save passes its state dict, and
gets the tensors of the files. A load passes the tensors of the files, and gets those of its state dict.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from .._tensor_file.regions import Region, carried


class Parts:
    """The parts of a tensor in a rule of ``rename``: for example single experts, or queries, keys and values.

    One side of a rule names the whole tensor, and the other side its parts::

        {
            "layers.*.experts.w1": Parts("model.layers.*.mlp.experts.{}.gate_proj.weight"),
            "*.qkv.weight": Parts("*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight", sizes=(4, 1, 1)),
        }

    With ``{}`` in the names, there are parts for each index of the whole tensor's first dimension, and ``{}`` stands
    for the index. The parts do not have this dimension. With several names, the tensor is cut along ``dim``.

    Megatron's fused projection has the heads group by group: the queries of a group, its key and its value. With
    ``groups``, each part is collected from all groups: for 32 query heads in 8 groups, ``Parts("*.q_proj.weight",
    "*.k_proj.weight", "*.v_proj.weight", sizes=(4, 1, 1), groups=8)``.

    Args:
        names: Patterns with as many ``*`` each as the other side. Either all or none have ``{}``.
        dim: The dimension along which the tensor is cut if there are several names, counted as in the parts: with
            ``{}``, 0 is the whole tensor's second dimension.
        sizes: The ratio of the parts' sizes along ``dim``. By default the sizes are equal.
        groups: The number of groups along ``dim``, each with all parts.

    Raises:
        TypeError: there are no names, a name is not a string, or a number is not an int.
        ValueError: the names differ in their numbers of ``*`` or ``{}``, a name has several ``{}``, a single name has
            no ``{}``, or a number is out of range or does not fit the names.
    """

    __slots__ = ("dim", "groups", "names", "sizes")

    def __init__(self, *names: str, dim: int = 0, sizes: Sequence[int] = (), groups: int = 1) -> None:
        if not names or not all(isinstance(name, str) for name in names):
            raise TypeError(f"Parts must have names, and all must be strings, got {names!r}.")
        if not all(type(number) is int for number in (dim, groups, *sizes)):
            raise TypeError(f"dim, sizes and groups of Parts must be ints, got {dim!r}, {sizes!r} and {groups!r}.")
        kinds = {(name.count("*"), name.count("{}")) for name in names}
        if len(kinds) > 1 or kinds.pop()[1] > 1:
            raise ValueError(
                f"names of Parts must all have the same number of *, and either one {{}} each or none, got {names!r}."
            )
        self.names: tuple[str, ...] = names
        if len(names) == 1 and not self.is_numbered:
            raise ValueError(f"the only name of Parts must contain {{}}, got {names[0]!r}.")
        self.dim = dim
        self.sizes = tuple(sizes) or (1,) * len(names)
        self.groups = groups
        if dim < 0 or groups < 1 or len(self.sizes) != len(names) or min(self.sizes) < 1:
            raise ValueError(
                f"Parts must have dim >= 0, groups >= 1 and one positive size per name, got {len(names)} name(s), "
                f"dim={dim}, groups={groups} and sizes={self.sizes}."
            )
        if len(names) == 1 and groups > 1:
            raise ValueError(f"groups={groups} of Parts needs several names, got {names[0]!r}.")

    @property
    def is_numbered(self) -> bool:
        """Returns whether there are parts for each index of the first dimension."""
        return "{}" in self.names[0]

    def __repr__(self) -> str:
        numbers = f"dim={self.dim}, sizes={self.sizes}, groups={self.groups}"
        return f"Parts({', '.join(map(repr, self.names))}, {numbers})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Parts) and self._arguments() == other._arguments()

    def __hash__(self) -> int:
        return hash(self._arguments())

    def _arguments(self) -> tuple[object, ...]:
        return self.names, self.dim, self.sizes, self.groups


Rules: TypeAlias = Mapping[Any, "str | Parts"]
"""The keys are strings or `Parts`. They are typed Any, because type checkers would not accept a ``dict[str, str]`` as a
mapping with keys of type ``str | Parts``."""


class PartNumber(NamedTuple):
    part: int  # the index of the name in its `Parts`
    row: int  # the index in the first dimension, if `Parts.is_numbered`


class Match(NamedTuple):
    rule: Rule
    stars: tuple[str, ...]
    number: PartNumber

    def new_name(self, part: int = 0, row: int = 0) -> str:
        """Returns the new name of the key, or of one of its parts if the rule cuts its tensor."""
        return self.rule.new[part].filled(self.stars, row)


class Rule(NamedTuple):
    """A rule: the patterns of its two sides, and the sides as the caller wrote them."""

    old: tuple[_Pattern, ...]
    new: tuple[_Pattern, ...]
    old_side: str | Parts
    new_side: str | Parts


class Renaming:
    """Rules that give keys new names.

    Args:
        rules: New names by patterns, in which only ``*`` is special. The n-th ``*`` of a new name stands for the same
            text as the n-th ``*`` of its pattern. The first pattern that matches a key applies. Keys without a match do
            not change. One side of a rule may be `Parts`.

    Attributes:
        unused: The old sides of the rules that have not matched a key.

    Raises:
        TypeError: a rule is not made of strings and `Parts`.
        ValueError: a new name is empty, or has more ``*`` than its pattern; or both sides of a rule are `Parts`.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules: list[Rule] = []
        self._names: dict[str, tuple[int, Match]] = {}  # old names without * and {}, with positions in all old names
        self._patterns: list[tuple[int, Rule, int, _Pattern]] = []  # the others: position, rule, number in the rule
        for old, new in rules.items():
            if not isinstance(old, str | Parts) or not isinstance(new, str | Parts):
                raise TypeError(f"rename must map strings or Parts to strings or Parts, got {old!r}: {new!r}.")
            if isinstance(old, Parts) and isinstance(new, Parts):
                raise ValueError(f"one side of a rule must be a whole tensor, got Parts on both: {old!r}, {new!r}.")
            rule = Rule(_patterns(old), _patterns(new), old, new)
            if not all(pattern.text for pattern in rule.new) or rule.new[0].stars > rule.old[0].stars:
                raise ValueError(
                    f"{old!r} cannot become {new!r}: the new name is empty, or has more * than the old one"
                )
            for number, pattern in enumerate(rule.old):
                position = len(self._names) + len(self._patterns)
                if pattern.is_plain:
                    self._names.setdefault(pattern.text, (position, Match(rule, (), PartNumber(number, 0))))
                else:
                    self._patterns.append((position, rule, number, pattern))
            self._rules.append(rule)
        self.unused = dict.fromkeys(rules)

    def find(self, key: str) -> Match | None:
        of_name, match = self._names.get(key, (math.inf, None))
        for position, rule, number, pattern in self._patterns:
            if position > of_name:
                break
            if (found := pattern.match(key)) is not None:
                match = Match(rule, found[0], PartNumber(number, found[1]))
                break
        if match is not None:
            self.unused.pop(match.rule.old_side, None)
        return match

    def new_name(self, key: str) -> str:
        """Returns the new name of a key, for rules without parts."""
        match = self.find(key)
        return key if match is None else match.new_name()

    def inverse(self) -> Renaming:
        """Returns the reverse rules. Raises `ValueError` if a new name has fewer ``*`` than its pattern."""
        try:
            return Renaming({rule.new_side: rule.old_side for rule in self._rules})
        except ValueError as error:
            raise ValueError(f"rename= is not reversible: {error}") from None


class _Pattern:
    """A name with ``*`` and, in parts, ``{}``."""

    def __init__(self, text: str, *, is_numbered: bool) -> None:
        self.text = text
        self.stars = text.count("*")
        self._pieces = re.split(r"(\*|\{\})" if is_numbered else r"(\*)", text)
        self.is_plain = len(self._pieces) == 1

    @functools.cached_property
    def _regex(self) -> re.Pattern[str]:
        groups = {"*": "(.*)", "{}": "(0|[1-9][0-9]*)"}
        regex = (groups[piece] if number % 2 else re.escape(piece) for number, piece in enumerate(self._pieces))
        return re.compile("".join(regex), re.DOTALL)

    def match(self, key: str) -> tuple[tuple[str, ...], int] | None:
        """Returns the texts that the stars stand for, and the number that ``{}`` stands for, or 0."""
        if (found := self._regex.fullmatch(key)) is None:
            return None
        signs = list(zip(self._pieces[1::2], found.groups(), strict=True))
        number = next((int(text) for sign, text in signs if sign == "{}"), 0)
        return tuple(text for sign, text in signs if sign == "*"), number

    def filled(self, stars: Sequence[str], number: int) -> str:
        pieces, left = list(self._pieces), iter(stars)
        pieces[1::2] = (next(left) if sign == "*" else str(number) for sign in pieces[1::2])
        return "".join(pieces)


def _patterns(side: str | Parts) -> tuple[_Pattern, ...]:
    if isinstance(side, str):
        return (_Pattern(side, is_numbered=False),)
    return tuple(_Pattern(name, is_numbered=side.is_numbered) for name in side.names)


# --- the elements under new names -------------------------------------------------------------------------------------

Shape: TypeAlias = tuple[int, ...]


class Box(NamedTuple):
    """A region of a source tensor, and the region of a renamed, cut or joined tensor that takes its elements.

    The regions hold the same elements in the same order. One of them may have an additional first dimension, of size 1.
    """

    source: str
    there: Region  # in the source tensor
    here: Region  # in the renamed, cut or joined tensor
    is_same: bool = False  # only the names of the two tensors differ

    def carry(self, region: Region) -> Region | None:
        """Maps a region of the source to the tensor that has the box; returns None if the region is outside the box.

        The result has the elements of ``region`` that lie in `there`.
        """
        return carried(region, self.there, self.here)

    def fetch(self, region: Region) -> Region | None:
        """Maps a region of the tensor that has the box to the source; returns None if the region is outside the box."""
        return carried(region, self.here, self.there)


@dataclass(slots=True)
class Placed:
    shape: Shape
    boxes: list[Box] = field(default_factory=list)


def place(renaming: Renaming, shapes: Mapping[str, Shape]) -> dict[str, Placed]:
    """Returns the tensors on the other side of a renaming, in the order of their sources.

    ``shapes`` are those of the tensors on this side. Raises `ValueError`, naming the tensors, if two would have the
    same name, a part of a tensor is missing, or a rule does not fit their shapes.
    """
    placed: dict[str, Placed] = {}
    joined: dict[str, dict[PartNumber, str]] = {}  # the parts of each tensor that is joined
    rules: dict[str, Match] = {}
    for key, shape in shapes.items():
        match = renaming.find(key)
        whole = Region((0,) * len(shape), shape)
        if match is None:
            _add(placed, key, shape, Box(key, whole, whole, True))
        elif isinstance(match.rule.new_side, Parts):
            for part in _cuts(match.rule.new_side, shape, key):
                boxes = [Box(key, in_whole, in_part) for in_whole, in_part in part.regions]
                _add(placed, match.new_name(*part.number), part.shape, *boxes)
        elif isinstance(match.rule.old_side, str):
            _add(placed, match.new_name(), shape, Box(key, whole, whole, True))
        else:
            name = match.new_name()
            if rules.setdefault(name, match).rule is not match.rule or (name in placed and name not in joined):
                raise _taken(placed[name], key, name)
            placed.setdefault(name, Placed(shape, [Box(key, whole, whole)]))  # until all parts are known
            joined.setdefault(name, {})[match.number] = key
    for name, parts in joined.items():
        side = rules[name].rule.old_side
        assert isinstance(side, Parts)
        placed[name] = _join(name, side, parts, shapes)
    return placed


def _add(placed: dict[str, Placed], name: str, shape: Shape, *boxes: Box) -> None:
    if name in placed:
        raise _taken(placed[name], boxes[0].source, name)
    placed[name] = Placed(shape, list(boxes))


def _taken(placed: Placed, key: str, name: str) -> ValueError:
    return ValueError(f"{placed.boxes[0].source!r} and {key!r} would both be {name!r}: change rename=")


class _Part(NamedTuple):
    number: PartNumber
    shape: Shape
    regions: list[tuple[Region, Region]]  # each in the tensor, and in the part


def _cuts(parts: Parts, shape: Shape, key: str) -> Iterator[_Part]:
    outer, inner = (shape[:1], shape[1:]) if parts.is_numbered else ((), shape)
    dim, several, in_group = parts.dim, len(parts.sizes) > 1, sum(parts.sizes)
    units = in_group * parts.groups
    if (parts.is_numbered and not any(outer)) or (several and (len(inner) <= dim or inner[dim] % units)):
        raise ValueError(f"{key!r} of shape {shape} cannot be cut into {parts!r}")
    for index in range(*outer) if outer else (0,):
        lead, one = ((index,), (1,)) if outer else ((), ())
        first = 0
        for number, size in enumerate(parts.sizes):
            start, of_part, region = [0] * len(inner), list(inner), list(inner)
            regions = []
            for group in range(parts.groups):
                there = list(start)
                if several:
                    unit = inner[dim] // units
                    of_part[dim], region[dim] = unit * size * parts.groups, unit * size
                    start[dim], there[dim] = unit * size * group, unit * (in_group * group + first)
                in_whole = Region((*lead, *there), (*one, *region))
                regions.append((in_whole, Region(tuple(start), tuple(region))))
            yield _Part(PartNumber(number, index), tuple(of_part), regions)
            first += size


def _join(name: str, parts: Parts, keys: Mapping[PartNumber, str], shapes: Mapping[str, Shape]) -> Placed:
    first = next(iter(keys.values()))
    shape = list(shapes[first])
    count = 1 + max(number.row for number in keys)
    wanted = (PartNumber(part, row) for row in range(count) for part in range(len(parts.names)))
    for number in wanted:
        if number not in keys:
            pattern = parts.names[number.part].replace("{}", str(number.row))
            raise ValueError(f"{first!r} cannot become {name!r}: no key for {pattern!r}")
    if len(parts.names) > 1:
        joined = [keys[PartNumber(part, 0)] for part in range(len(parts.names))]
        for key in joined:
            if len(shapes[key]) <= parts.dim:
                raise ValueError(f"{key!r} has the shape {shapes[key]}, and cannot be joined along dim={parts.dim}")
        shape[parts.dim] = sum(shapes[key][parts.dim] for key in joined)
    whole = (count, *shape) if parts.is_numbered else tuple(shape)
    placed = Placed(whole)
    for part in _cuts(parts, whole, name):
        key = keys[part.number]
        if shapes[key] != part.shape:
            raise ValueError(
                f"{key!r} has the shape {shapes[key]}, but as a part of {name!r} of shape {whole} it needs "
                f"{part.shape}: change rename="
            )
        placed.boxes += [Box(key, in_part, in_whole) for in_whole, in_part in part.regions]
    return placed


def wrong_way_back(renaming: Renaming, placed: Mapping[str, Placed]) -> tuple[str, str, str] | None:
    """Returns the name of a tensor whose new name the reverse rules do not map back to it.

    Also returns the new name, and the name to which the reverse rules map it. If there is no such tensor, returns None.
    """
    back = place(renaming.inverse(), {name: of.shape for name, of in placed.items()})
    leads = {(box.source, name, box.here, box.there) for name, of in back.items() for box in of.boxes}
    for name, of in placed.items():
        for box in of.boxes:
            if (name, box.source, box.there, box.here) not in leads:
                other = next((old for new, old, _, _ in leads if new == name), "nothing")
                return box.source, name, other
    return None
