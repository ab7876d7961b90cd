"""Places of elements under other names: in the same tensors, in parts of them, or together in one.

`place` takes the tensors on one side of a `Renaming`. For each tensor on the other side it returns the boxes that make
it up. A save passes its state dict, and gets the tensors of the files. A load passes the tensors of the files, and gets
those of its state dict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from .._index.layouts import Region
from .rename import Match, PartNumber, Parts, Renaming

Shape: TypeAlias = tuple[int, ...]


class Box(NamedTuple):
    """Elements of a tensor, and where they are in another one.

    The regions hold the same elements in the same order. One of them may have another first dimension, of size 1.
    """

    source: str  # the name of the tensor that they come from
    there: Region  # in that tensor
    here: Region  # in the tensor that has the box
    is_same: bool = False  # only the names of the two tensors differ

    def carry(self, region: Region) -> Region | None:
        """Returns where the elements of a region of the source are here; None if none of them is in the box.

        The result has the elements of ``region`` that lie in `there`.
        """
        return _carried(region, self.there, self.here)

    def fetch(self, region: Region) -> Region | None:
        """Returns where the elements of a region here come from; None if none of them is in the box."""
        return _carried(region, self.here, self.there)


def _carried(region: Region, frm: Region, to: Region) -> Region | None:
    common = frm.intersect(region)
    if common is None:
        return None
    moved = common.within(frm)
    extra = len(to.size) - len(moved.size)
    if extra > 0:
        moved = Region((0, *moved.start), (1, *moved.size))
    elif extra < 0:
        moved = Region(moved.start[1:], moved.size[1:])
    return moved.moved(to.start)


@dataclass(slots=True)
class Placed:
    """A tensor on the other side, and the boxes that make it up."""

    shape: Shape
    boxes: list[Box] = field(default_factory=list)


def place(renaming: Renaming, shapes: Mapping[str, Shape]) -> dict[str, Placed]:
    """The tensors on the other side of a renaming, in the order of those that they come from.

    ``shapes`` has the tensors on this side. Raises `ValueError`, naming them, if two would have one name, or a rule
    does not fit their shapes.
    """
    placed: dict[str, Placed] = {}
    joined: dict[str, dict[PartNumber, str]] = {}  # the parts of each tensor that is put together
    rules: dict[str, Match] = {}
    for key, shape in shapes.items():
        match = renaming.find(key)
        whole = Region((0,) * len(shape), shape)
        if match is None or match.rule.is_plain:
            _add(placed, key if match is None else match.new_name(), shape, Box(key, whole, whole, True))
        elif isinstance(match.rule.new_side, Parts):
            for part in _cuts(match.rule.new_side, shape, key):
                boxes = [Box(key, in_whole, in_part) for in_whole, in_part in part.regions]
                _add(placed, match.new_name(*part.number), part.shape, *boxes)
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
    """A part of a tensor."""

    number: PartNumber
    shape: Shape
    regions: list[tuple[Region, Region]]  # each in the tensor, and in the part


def _cuts(parts: Parts, shape: Shape, key: str) -> Iterator[_Part]:
    """Cuts a tensor."""
    outer, inner = (shape[:1], shape[1:]) if parts.is_numbered else ((), shape)
    dim, several, in_group = parts.dim, len(parts.sizes) > 1, sum(parts.sizes)
    units = in_group * parts.groups
    if (parts.is_numbered and not any(outer)) or (several and (len(inner) <= dim or inner[dim] % units)):
        raise ValueError(f"{key!r} has the shape {shape}, which cannot be cut into {parts!r}")
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
    """Puts a tensor together."""
    first = next(iter(keys.values()))
    shape = list(shapes[first])
    count = 1 + max(number.row for number in keys)
    wanted = (PartNumber(part, row) for row in range(count) for part in range(len(parts.names)))
    for number in wanted:
        if number not in keys:
            raise ValueError(
                f"{first!r} cannot become {name!r}: part {number.row} of {parts.names[number.part]!r} is missing"
            )
    if len(parts.names) > 1:
        joined = [keys[PartNumber(part, 0)] for part in range(len(parts.names))]
        for key in joined:
            if len(shapes[key]) <= parts.dim:
                raise ValueError(
                    f"{key!r} has the shape {shapes[key]}, and dim={parts.dim} along which it would be joined"
                )
        shape[parts.dim] = sum(shapes[key][parts.dim] for key in joined)
    whole = (count, *shape) if parts.is_numbered else tuple(shape)
    placed = Placed(whole)
    for part in _cuts(parts, whole, name):
        key = keys[part.number]
        if shapes[key] != part.shape:
            raise ValueError(
                f"{key!r} has the shape {shapes[key]}, and as a part of {name!r} of shape {whole} it needs "
                f"{part.shape}: change rename="
            )
        placed.boxes += [Box(key, in_part, in_whole) for in_whole, in_part in part.regions]
    return placed


def wrong_way_back(renaming: Renaming, placed: Mapping[str, Placed]) -> tuple[str, str, str] | None:
    """A tensor to which the reverse rules do not lead back: its name, a new name, and the name that this leads to.

    None if there is none: then a load with the same rules finds each tensor of a save.
    """
    back = place(renaming.inverse(), {name: of.shape for name, of in placed.items()})
    leads = {(box.source, name, box.here, box.there) for name, of in back.items() for box in of.boxes}
    for name, of in placed.items():
        for box in of.boxes:
            if (name, box.source, box.there, box.here) not in leads:
                other = next((old for new, old, _, _ in leads if new == name), "nothing")
                return box.source, name, other
    return None
