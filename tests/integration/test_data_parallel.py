"""`DataParallelState`: states load on the same number of ranks, and are refused on another number."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_tensorizer import CheckpointManager, StateMismatch
from dcp_tensorizer.data_parallel import DataParallelState, other_sizes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Loader:
    """A data loader that saves its position."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "workers": [{"next": torch.tensor(self.position)}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        assert state["workers"][0]["next"].item() == self.position


def test_a_loader_resumes_at_its_position(tmp_path: Path) -> None:
    """With as many ranks as before."""
    loader = Loader()
    with CheckpointManager(tmp_path, stop_signals=()) as manager:
        manager.save(1, {"loader": DataParallelState(Loader(7)), "w": torch.ones(3)}, wait=True)
        manager.restore({"loader": DataParallelState(loader), "w": torch.zeros(3)})
    assert loader.position == 7


@pytest.mark.parametrize("size", [2, 4])
def test_another_number_of_ranks_is_refused(tmp_path: Path, size: int, caplog: pytest.LogCaptureFixture) -> None:
    """The error has the reason, and comes before any change. The loader can be left out."""
    loader, w = Loader(), torch.zeros(3)
    state = {"jobs": {"loader": DataParallelState(loader, 1, size).state_dict()}, "w": w}
    with CheckpointManager(tmp_path, stop_signals=()) as manager:
        manager.save(1, {"jobs": {"loader": DataParallelState(Loader(7), 1, 3).state_dict()}, "w": torch.ones(3)})
        manager.wait()
        with pytest.raises(StateMismatch) as caught:
            manager.restore(state)
        assert str(caught.value) == (
            f"{tmp_path}/step-1 cannot be loaded: 'jobs.loader' was saved by 3 data-parallel ranks, and there are "
            f"now {size}: "
            f"each of its states belongs to one rank's share of the data, and cannot be divided. Restore with "
            f"exclude=['jobs.loader.*'], and begin the next epoch, or train on as many data-parallel ranks as before"
        )
        assert w.eq(0).all()
        manager.restore(state, exclude=["jobs.loader.*"])
        assert w.eq(1).all()
        with caplog.at_level(logging.WARNING, "dcp_tensorizer"):
            manager.restore(state, strict=False)
        assert "cannot be divided. The current value stays as it is (strict=False)" in caplog.text


def test_only_other_numbers_are_found() -> None:
    """`other_sizes` ignores keys that are missing for another reason."""
    stored = ["a.data-parallel-0-of-2.x", "a.data-parallel-1-of-2.x", "b"]
    assert other_sizes(["a.data-parallel-0-of-3.x"], stored) == {"a": (2, 3)}
    assert other_sizes(["data-parallel-0-of-3"], ["data-parallel-1-of-4"]) == {"": (4, 3)}
    assert other_sizes(["a.data-parallel-0-of-2.y", "c", "d.data-parallel-0-of-3.x"], stored) == {}


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2)])
def test_a_rank_is_below_the_size(rank: int, size: int) -> None:
    """Other ranks raise `ValueError`."""
    with pytest.raises(ValueError, match=rf"^rank must be at least 0 and less than size={size}, got {rank}.$"):
        DataParallelState(Loader(), rank, size)
