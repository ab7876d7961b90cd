"""What the soak would blame."""

from .. import warm
from . import preemption
from .actors import Event
from .history import History
from .tally import Tally


def test_a_preempted_job_is_judged(tmp_path):
    """A step that was done twice, one that was left out and another loss than that of an undisturbed run are found."""
    job = preemption.Preempted(tmp_path, 4, warm.python())
    (_, first), (_, second), (_, third), _ = preemption.losses(4)
    (tmp_path / "log").write_text(f"1 {first}\n2 {second}\n2 {second}\n3 {second}\n")
    assert third != second
    tally = Tally()
    preemption.judge(job, 4, tally)
    assert (tally.lost, tally.wrong, tally.counts["steps done twice"]) == (2, 1, 1)


def _history(*events):
    """Of events that one actor told: each a kind, a path, a step, and when it began and ended."""
    tally = Tally()
    history = History(tally)
    for kind, path, step, began, ended in events:
        history.note("actor", Event(kind, path, step, began))
        history.note("actor", Event(kind, path, step, began, ended, "done"))
    history.judge("here")
    return tally, history


def test_what_a_load_may_find():
    """A save in progress or done, but none that another one has replaced; nothing, only before the first."""
    saves = [("save", "a", 1, 1.0, 2.0), ("save", "a", 2, 3.0, 5.0)]
    _, history = _history(*saves)
    moments = {0.5: {None}, 1.5: {None, 1}, 2.5: {1}, 4.0: {1, 2}, 6.0: {2}}
    assert {moment: history.expected("a", moment, moment) for moment in moments} == moments
    assert history.expected("a", 2.5, 4.0) == {1, 2}
    for step, lost in ((1, 1), (2, 0), (None, 1)):
        tally, _ = _history(*saves, ("load", "a", step, 6.0, 7.0))
        assert tally.lost == lost


def test_what_a_collection_may_remove():
    """What enough others are higher and newer than; never what a link leads to, or what is no step."""
    saves = [("save", f"step-{n}", n, float(n), n + 0.5) for n in (0, 1, 2, 3, 4)] + [("save", "latest", 0, 0.0, 0.5)]
    for path, lost in (("step-1", 0), ("step-2", 1), ("step-0", 1), ("latest", 1)):
        tally, history = _history(*saves, ("remove", path, None, 6.0, 7.0))
        assert (path, tally.lost) == (path, lost)
        assert history.expected(path, 8.0, 8.0) == {None}
