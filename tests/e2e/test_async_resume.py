"""Jobs that save asynchronously, and die: what a restarted one begins from.

Frameworks that note the newest step in a file of its own have begun at step 0 again, without a word, because nobody
wrote that file for asynchronous saves. Here a checkpoint's own commit is the note.
"""

import logging

import torch

from dcp_tensorizer import CheckpointManager

from ..lab.ranks import eventually, kill_self, run_ranks


def _state(step):
    return {"w": torch.full((1000, 1000), float(step)), "step": step}


def _train(rank, folder, steps):
    """Saves each step and waits for none; dies when the last save has begun to write, and may be committed."""
    manager = CheckpointManager(folder, stop_signals=())
    for step in range(1, steps + 1):
        manager.save(step, _state(step))
    last = folder / f"step-{steps}"
    assert eventually(lambda: list(last.glob("*.tensors")))
    kill_self()


def _resume(rank, folder):
    """Restores; returns the step, what was loaded, and the warnings."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("dcp_tensorizer").addHandler(handler)
    state = _state(-1)
    with CheckpointManager(folder, stop_signals=()) as manager:
        step = manager.restore(state)
    return step, state["step"], state["w"].unique().tolist(), said


def test_a_job_goes_on_from_its_newest_asynchronous_save(tmp_path):
    """The one in progress, if it was committed, or the one before: also without the file that names the newest."""
    run_ranks(2, _train, tmp_path, 4, killed=(0, 1))
    newest = max(int(path.parent.name[5:]) for path in tmp_path.glob("step-*/.metadata"))
    assert newest in (3, 4)
    (tmp_path / "latest").unlink()
    for step, saved, values, _ in run_ranks(2, _resume, tmp_path):
        assert (step, saved, values) == (newest, newest, [float(newest)])


def test_a_job_that_begins_anew_says_so(tmp_path):
    """If not even its first save was committed, it begins at 0, and a warning names that save."""
    run_ranks(2, _train, tmp_path, 1, killed=(0, 1))
    (tmp_path / "step-1" / ".metadata").unlink(missing_ok=True)  # the kill may have come too late
    (step, saved, _, said), _ = run_ranks(2, _resume, tmp_path)
    assert (step, saved) == (None, -1)
    assert any("The files of saves that never finished were removed from 'step-1'" in line for line in said), said
