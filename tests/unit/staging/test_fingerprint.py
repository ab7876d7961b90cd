"""`fingerprint`: equal for state dicts that have equal plans."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch

from dcp_tensorizer._runtime.torch_compat import write_items as write_items_of
from dcp_tensorizer._staging.state_tree import fingerprint


def _state(**others: Any) -> dict[str, Any]:
    return {"model": {"w": torch.ones(2, 3), "b": [torch.ones(3), 1]}, "step": 1, **others}


def test_values_do_not_matter() -> None:
    """State dicts that differ in values of tensors and objects have equal fingerprints."""
    later = _state(step=7)
    later["model"]["w"] += 1
    assert fingerprint(later) == fingerprint(_state())


def _described(offset: int) -> torch.Tensor:
    """A part of a tensor, which describes itself."""
    part = torch.ones(2, 3)
    whole = torch.ones(8, 3)

    def write_items(key: str, value: object) -> list[Any]:
        (item,) = write_items_of(key, whole)
        return [replace(item, index=replace(item.index, offset=torch.Size((offset, 0))))]

    part.__create_write_items__ = write_items  # type: ignore[attr-defined]
    return part


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
def test_structure_matters(other: dict[str, Any]) -> None:
    """Other keys, types, shapes, dtypes and containers give other fingerprints."""
    assert fingerprint(other) != fingerprint(_state())


def test_described_parts_matter() -> None:
    """The parts of two ranks may have one shape, but have different fingerprints."""
    first, same, other = (fingerprint({"w": _described(offset)}) for offset in (0, 0, 2))
    assert first == same
    assert first != other
    assert first != fingerprint({"w": torch.ones(2, 3)})
