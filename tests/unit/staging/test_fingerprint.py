"""Which state dicts are planned alike."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

from dcp_tensorizer._staging.state_tree import fingerprint


def _state(**others: Any) -> dict[str, Any]:
    return {"model": {"w": torch.ones(2, 3), "b": [torch.ones(3), 1]}, "step": 1, **others}


def test_values_do_not_matter() -> None:
    """Neither those of tensors nor those of objects."""
    later = _state(step=7)
    later["model"]["w"] += 1
    assert fingerprint(later) == fingerprint(_state())


@pytest.mark.parametrize(
    "other",
    [
        _state(more=1),
        _state(step="1"),
        _state(step=torch.tensor(1)),
        _state(model={"w": torch.ones(3, 2), "b": [torch.ones(3), 1]}),
        _state(model={"w": torch.ones(2, 3).double(), "b": [torch.ones(3), 1]}),
        _state(model={"w": torch.ones(2, 3), "b": [torch.ones(3)]}),
        _state(model={"w": torch.ones(2, 3), "c": [torch.ones(3), 1]}),
        _state(model=OrderedDict(w=torch.ones(2, 3), b=[torch.ones(3), 1])),
    ],
)
def test_everything_else_does(other: dict[str, Any]) -> None:
    """Keys, types, shapes, dtypes and containers."""
    assert fingerprint(other) != fingerprint(_state())
