"""What has happened in a directory of checkpoints, and so what may be found there.

A save replaces what was there before at some moment between its beginning and its end. So a load may find any save that
began before the load ended, unless another one was done in between: begun after that save's end, and ended before the
load began. A save whose process was killed may have been done, or not.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import replace

from .actors import KEEP, Event
from .tally import Tally

__all__ = ["History"]

_LINKS = {"best": "step-0", "best-parts": "checkpoint-1"}
_REMOVABLE = re.compile(r"(?:step|checkpoint)-(\d+)")
_REPLACED = "overwritten"  # in what an error says


class History:
    """Takes what actors tell, and blames what must not be."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._saves: dict[str, list[Event]] = defaultdict(list)  # those that may have been done, copies among them
        self._removed: dict[str, Event] = {}
        self._open: dict[str, Event] = {}  # by actor, what it is about to do
        self._ended: dict[str, list[Event]] = defaultdict(list)  # by actor, of this round

    def note(self, actor: str, event: Event) -> None:
        """Takes what an actor tells."""
        begun = self._open.pop(actor, None)
        if event.kind == "death" and begun is not None:
            event = replace(begun, ended=event.ended, outcome="killed")
        if event.ended is None:
            self._open[actor] = event
        elif event.kind != "death":
            self._ended[actor].append(event)
            if event.kind in ("save", "copy") and event.outcome in ("done", "killed"):
                self._saves[event.path].append(event)
            elif event.kind == "remove" and event.outcome == "done":
                self._removed[event.path] = event

    def judge(self, where: str) -> None:
        """Looks at what has happened since the last time, when nothing is in progress any more."""
        ended, self._ended = self._ended, defaultdict(list)
        judges = {"save": self._judge_save, "copy": self._judge_copy, "remove": self._judge_removal}
        for events in ended.values():
            for event in events:
                if event.kind in judges:
                    judges[event.kind](where, event)
        ranks = [[event for event in events if event.kind == "load"] for events in ended.values()]
        for one, *others in zip(*filter(None, ranks), strict=False):
            if any((one.path, one.outcome, one.step) != (o.path, o.outcome, o.step) for o in others):
                self._tally.blame("wrong", f"{where}: ranks of one load differ: {one} {others}")
        for loads in ranks:
            for load, following in zip(loads, [*loads[1:], None], strict=False):
                self._judge_load(where, load, following)

    def paths(self) -> list[str]:
        """Of all checkpoints that may ever have been."""
        return sorted(self._saves)

    def expected(self, path: str, began: float, ended: float) -> set[int | None]:
        """What a load may find that began and ended at these moments: steps, and None for nothing."""
        first, _, rest = path.partition("/")
        first = _LINKS.get(first, first)
        removal = self._removed.get(first)
        if removal is not None and _end(removal) < began:
            return {None}
        saves = [save for save in self._saves["/".join(filter(None, (first, rest)))] if save.began <= ended]
        done = [save for save in saves if save.outcome == "done" and _end(save) < began]
        last = max((save.began for save in done), default=-math.inf)
        found: set[int | None] = {save.step for save in saves if _end(save) >= last}
        return found | {None} if not done or (removal is not None and removal.began <= ended) else found

    def _judge_load(self, where: str, load: Event, following: Event | None) -> None:
        tally = self._tally
        tally.count("loads, counted on each rank")
        expected = self.expected(load.path, load.began, _end(load))
        what = f"{where}: load of {load.path}: {load.outcome} {load.step} {load.words}"
        if load.outcome in ("done", "nothing"):
            if load.step not in expected:
                tally.blame("lost", f"{what}, not one of {expected}")
            tally.count("loads: whole" if load.outcome == "done" else "loads: nothing there")
            return
        if load.outcome == "Wrong":
            tally.blame("wrong", what)
        elif None in expected:
            tally.count("loads: refused, as the checkpoint was just being removed")
        elif _REPLACED in load.words:
            tally.count("loads: refused, as the checkpoint was just being replaced")
        else:
            tally.blame("wrong", what)
        if None not in expected and (following is None or following.path != load.path):
            tally.blame("lost", f"{what}, again and again")

    def _judge_save(self, where: str, save: Event) -> None:
        before = [other for other in self._saves[save.path] if other is not save and other.began <= _end(save)]
        is_once = save.path.startswith("once/")
        if save.outcome == "killed":
            self._tally.count("saves: the saver was killed")
        elif save.outcome == "done":
            self._tally.count("saves: committed")
            if is_once and any(other.outcome == "done" for other in before):
                self._tally.blame("lost", f"{where}: {save.path} was saved more than once")
        elif is_once and before:
            self._tally.count("saves: refused, as there was one and overwrite=False")
        else:
            self._tally.blame("wrong", f"{where}: save to {save.path}: {save.outcome} {save.words}")

    def _judge_copy(self, where: str, copy: Event) -> None:
        self._tally.count("checkpoints copied or moved in")
        if copy.outcome != "done" or copy.step != 0:
            self._tally.blame("lost", f"{where}: copy to {copy.path}: {copy.outcome} {copy.step} {copy.words}")

    def _judge_removal(self, where: str, removal: Event, keep: int = KEEP) -> None:
        if removal.outcome != "done":
            self._tally.count("collections: refused, as something was in progress there, or a link leads there")
            if "cannot remove" in removal.outcome:
                self._tally.blame("wrong", f"{where}: collection of {removal.path}: {removal.outcome}")
            return
        self._tally.count("collections: a checkpoint removed")
        if not self._may_go(removal, keep):
            self._tally.blame("lost", f"{where}: {removal.path} was collected")

    def _may_go(self, removal: Event, keep: int) -> bool:
        """Whether enough checkpoints are higher, and enough newer, than one that was removed."""
        number = _number(removal.path)
        if number is None or removal.path in _LINKS.values():
            return False
        own = max(save.began for path in self._saves for save in self._saves[path] if _unit(path) == removal.path)
        others: dict[str, list[Event]] = defaultdict(list)
        for path, saves in self._saves.items():
            if _number(_unit(path)) is not None and _unit(path) != removal.path:
                others[_unit(path)] += [save for save in saves if save.began < _end(removal)]
        higher = sum(bool(saves) and (_number(unit) or 0) > number for unit, saves in others.items())
        newer = sum(any(_end(save) > own for save in saves) for saves in others.values())  # as far as can be told
        return higher >= keep and newer >= keep

    def finally_removed(self, removal: Event) -> None:
        """Takes a removal of the last collection, which keeps one checkpoint."""
        self._removed[removal.path] = removal
        self._judge_removal("at the end", removal, keep=1)


def _unit(path: str) -> str:
    """The directory that is one checkpoint, perhaps of parts."""
    return path.partition("/")[0]


def _number(unit: str) -> int | None:
    match = _REMOVABLE.fullmatch(unit)
    return None if match is None else int(match[1])


def _end(event: Event) -> float:
    return math.inf if event.ended is None else event.ended
