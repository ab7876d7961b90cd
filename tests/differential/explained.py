"""The deliberate differences between torch's own storage and ours, each with what tells that it is the one.

``docs/compatibility.md`` has the same list, with the reasons, under "Where we differ from torch's own storage".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .describe import Difference, Failed, differences
from .planners import EACH_ITS_OWN
from .run import Case, Load
from .values import Box, Odd

__all__ = ["ALWAYS", "DIFFERENCES", "Verdict", "judge"]

Holds = Callable[["Context", Difference], bool]


@dataclass(frozen=True)
class Context:
    """A case, and what torch's storage made of it."""

    case: Case
    theirs: Any

    def load(self, difference: Difference) -> Load | None:
        """The load that a difference is in."""
        return self.case.loads[difference.path[1]] if difference.path[0] == "loads" else None


class Verdict:
    """What became of the differences of a case: the names of those that are explained, and the rest."""

    def __init__(self) -> None:
        self.explained: set[str] = set()
        self.unexplained: list[Difference] = []


def judge(case: Case, theirs: Any, ours: Any, saved_synchronously: Callable[[], Any]) -> Verdict:
    """Explains the differences of a case.

    Args:
        theirs: What torch's storage made of it.
        ours: What ours made of it.
        saved_synchronously: What torch's storage makes of it by ``dcp.save``, for cases that save in another way.
    """
    verdict = Verdict()
    context = Context(case, theirs)
    left = _explain(context, _causes_first(case, differences(theirs, ours)), verdict)
    if left and case.mode not in ("save", "threads"):
        # torch's staging may have lost something: then what is saved without staging is what counts, at these places.
        again = _causes_first(case, differences(saved_synchronously(), ours))
        still = [d for d in again if any(_is_within(d.path, at.path) or _is_within(at.path, d.path) for at in left)]
        if {d.path for d in still} != {d.path for d in left}:
            verdict.explained.add(STAGING)
            left = _explain(context, still, verdict)
    verdict.unexplained = left
    return verdict


def _explain(context: Context, found: list[Difference], verdict: Verdict) -> list[Difference]:
    left = []
    for difference in found:
        name = next((name for name, holds in DIFFERENCES.items() if holds(context, difference)), None)
        if name is None:
            left.append(difference)
        else:
            verdict.explained.add(name)
    return left


def _causes_first(case: Case, found: list[Difference]) -> list[Difference]:
    """Leaves out what follows from another difference: where one of two saves failed, there is nothing to load."""
    failed = {
        case.path_of(d.path[2] if len(d.path) > 2 else 0)
        for d in found
        if d.path[0] == "saves" and isinstance(d.theirs, Failed) != isinstance(d.ours, Failed)
    }
    return [d for d in found if d.path[0] == "saves" or _path_of(case, d) not in failed]


def _is_within(path: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return path[: len(other)] == other


def _path_of(case: Case, difference: Difference) -> int:
    kind, number = difference.path[:2]
    return case.loads[number].path if kind == "loads" else number


# --- what tells them apart -------------------------------------------------------------------------------------------


def _ours_fails(difference: Difference, *words: str) -> bool:
    ours = difference.ours
    return isinstance(ours, Failed) and not isinstance(difference.theirs, Failed) and any(w in ours.what for w in words)


def _theirs_fails(difference: Difference, *words: str) -> bool:
    theirs = difference.theirs
    return (
        isinstance(theirs, Failed) and not isinstance(difference.ours, Failed) and any(w in theirs.what for w in words)
    )


def _is_storage_data(context: Context, difference: Difference) -> bool:
    return "storage_data" in difference.path and difference.path[0] in ("saves", "metadata")


def _is_kind_of_checkpoint_id(context: Context, difference: Difference) -> bool:
    return difference.path[-2:] == ("checkpoint_id", 0)


def _is_untrusted(context: Context, difference: Difference) -> bool:
    load = context.load(difference)
    return load is not None and not load.trusted and _ours_fails(difference, "UntrustedObject")


def _is_subclass(context: Context, difference: Difference) -> bool:
    """One with bytes of its own is stored as those. Others are objects: to load one without trust would be wrong."""
    load = context.load(difference)
    if load is None or not _theirs_fails(difference, "UnpicklingError"):
        return False
    loaded = load.target if isinstance(load.target, Box) else context.case.saves
    return load.trusted or repr(Odd("wrapper")) not in repr(loaded)


def _lost_the_save(context: Context, difference: Difference) -> bool:
    load = context.load(difference)
    return load is not None and load.ranks > 1 and _ours_fails(difference, "dropped the storage_data of the plan")


def _saved_apart(context: Context, difference: Difference) -> bool:
    load = context.load(difference)
    if load is None or all(save.together for save in context.case.saves):
        return False
    return _ours_fails(difference, "each rank by itself")


def _is_no_plain_tensor(context: Context, difference: Difference) -> bool:
    words = ("which cannot be saved. Save", "which DCP cannot plan", "which cannot be saved: it has neither")
    return difference.path[0] == "saves" and _ours_fails(difference, *words)


def _does_not_convert(context: Context, difference: Difference) -> bool:
    if _theirs_fails(difference, "\"neg_cpu\" not implemented for 'Float8_e8m0fnu'"):  # a view that is negated
        return True
    return difference.path[0] == "loads" and _ours_fails(difference, "which cannot be converted to the")


def _is_plain_copy(context: Context, difference: Difference) -> bool:
    if context.case.mode in ("save", "threads"):
        return False
    if _theirs_fails(difference, "a leaf Variable that requires grad"):  # torch.load, where such a one has a rare dtype
        return True
    if (difference.theirs, difference.ours) == ("torch.nn.parameter.Parameter", "torch.Tensor"):
        return True
    return not {"stride", "strides", "requires_grad"}.isdisjoint(difference.path)  # the metadata's, from torch 2.14 on


def _is_failed_overwrite(context: Context, difference: Difference) -> bool:
    """torch's has replaced some files of a checkpoint, and then failed."""
    load, case = context.load(difference), context.case
    if load is None or not (case.one_path and len(case.saves) > 1):
        return False
    ends = [
        result for saves in context.theirs["saves"].values() if isinstance(saves, dict) for result in saves.values()
    ]
    return any(isinstance(end, Failed) for end in ends[1:]) and not isinstance(difference.ours, Failed)


def _is_described_in_object(context: Context, difference: Difference) -> bool:
    """Its shards are staged, and an object would need the tensor itself."""
    if context.case.mode in ("save", "threads") or difference.path[0] != "saves":
        return False
    return _ours_fails(difference, "describes which part of a tensor it is, and cannot be pickled")


def _contains_itself(context: Context, difference: Difference) -> bool:
    if context.case.mode in ("save", "threads") or difference.path[0] != "saves":
        return False
    return _ours_fails(difference, "contains itself, or is nested too deeply")


def _disagrees(context: Context, difference: Difference) -> bool:
    if difference.path[0] != "saves":
        return False
    # And torch's cache of plans, after that: it takes the failed save's plans for those of the next one.
    follows = "grows=True" in repr(context.case) and _ours_fails(difference, "KeyError: 'rank ")
    return follows or _ours_fails(difference, "the ranks do not agree on its")


def _is_empty_in_list(context: Context, difference: Difference) -> bool:
    """torch's planner makes None of an empty mapping in a list before it looks for its key, or for that of the list."""
    load = context.load(difference)
    if load is None or load.planner != EACH_ITS_OWN or isinstance(difference.ours, Failed):
        return False
    return (
        isinstance(difference.theirs, Failed)
        and "Missing key in checkpoint state_dict" in difference.theirs.what
        and "items=()" in repr(load.target)
    )


def _has_other_shape(context: Context, difference: Difference) -> bool:
    return difference.path[0] == "saves" and _ours_fails(difference, "the planner has planned a part of shape")


def _is_asked_at_once(context: Context, difference: Difference) -> bool:
    """Of the planner that transposes what is square: a part of a tensor may be, where the whole is not. And of the one
    that shrinks what has several rows: a part may have one.
    """
    load = context.load(difference)
    if load is None or context.case.ranks < 2:
        return False
    return (load.planner == "transposing" and "bits" in difference.path) or (
        load.planner == "shrinking" and _ours_fails(difference, "needs a target of shape")
    )


ALWAYS = ("storage_data", "checkpoint_id")  # in every checkpoint
STAGING = "torch's stagers"
DIFFERENCES: dict[str, Holds] = {
    "storage_data": _is_storage_data,
    "checkpoint_id": _is_kind_of_checkpoint_id,
    "objects that need trust": _is_untrusted,
    "tensor subclasses": _is_subclass,
    "load planners that drop `storage_data`": _lost_the_save,
    "ranks that saved independently": _saved_apart,
    "tensors that are not plain bytes": _is_no_plain_tensor,
    "save planners whose `resolve_data` returns a tensor of a shape other than the planned one": _has_other_shape,
    "ranks that disagree": _disagrees,
    "dtypes that do not convert": _does_not_convert,
    "staged tensors are plain": _is_plain_copy,
    "tensors that describe their part, inside objects": _is_described_in_object,
    "containers that contain themselves": _contains_itself,
    "empty mappings in lists": _is_empty_in_list,
    "overwrites that fail": _is_failed_overwrite,
    "calls of `resolve_tensor`": _is_asked_at_once,
    STAGING: lambda context, difference: False,  # `judge` finds it
}
