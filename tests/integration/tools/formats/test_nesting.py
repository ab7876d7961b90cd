"""Nested state dicts stay nested, or are refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from dcp_tensorizer import ConversionError
from dcp_tensorizer.tools import ConvertOptions, convert

from ....lab.checkpoints import tensors_of


def test_nested_state_is_nested_again(tmp_path: Path) -> None:
    """Nested dicts and lists survive conversions through torch's formats and back."""
    state = {"model": {"a.b": torch.ones(2)}, "list": [torch.zeros(1), {"x": torch.ones(1)}], "n": {"m": 3}}
    torch.save(state, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b", "dcp_tensorizer")
    assert set(tensors_of(tmp_path / "b")) == {"model.a.b", "list.0", "list.1.x"}
    convert(tmp_path / "b", tmp_path / "c.pt", "torch")
    found = torch.load(tmp_path / "c.pt", weights_only=True)
    assert str(found) == str(state)


def test_keys_that_are_no_strings(tmp_path: Path) -> None:
    """Dict keys that are not strings survive in a torch file, and are refused by DCP's formats."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"optimizer": optimizer.state_dict(), None: {1.5: torch.ones(1)}}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.pt", "torch")
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    assert str(found) == str(torch.load(tmp_path / "a.pt", weights_only=True))
    convert(tmp_path / "a.pt", tmp_path / "c.pt", "torch", options=ConvertOptions(("optimizer*",), "optimizer."))
    assert str(torch.load(tmp_path / "c.pt", weights_only=True)) == str(optimizer.state_dict())
    convert(
        tmp_path / "a.pt",
        tmp_path / "d.pt",
        "torch",
        options=ConvertOptions(("optimizer.state.*",), "optimizer.state."),
    )
    assert list(torch.load(tmp_path / "d.pt", weights_only=True)) == [0, 1]
    for to in ("dcp", "dcp_tensorizer"):
        with pytest.raises(ConversionError, match=r"'optimizer\.state\.0\.step' is below the dict key 0 of"):
            convert(tmp_path / "a.pt", tmp_path / "e", to)
    convert(tmp_path / "a.pt", tmp_path / "e.safetensors", "safetensors", options=ConvertOptions(("*exp_avg",)))
    assert "optimizer.state.1.exp_avg" in tensors_of(tmp_path / "e.safetensors")


@pytest.mark.parametrize("to", ["torch", "dcp", "dcp_tensorizer"])
def test_a_key_that_would_hold_others(tmp_path: Path, to: str) -> None:
    """A renamed key that would be both a value and a container is refused."""
    torch.save({"model": {"x": torch.ones(2)}, "x": {"y": torch.ones(1)}}, tmp_path / "a.pt")
    with pytest.raises(ConversionError, match="'x' is a value, but other keys are below it"):
        convert(tmp_path / "a.pt", tmp_path / "b", to, options=ConvertOptions(strip_prefix="model."))
    torch.save({"m": {"a": {"x": torch.ones(2)}}, "a": [torch.ones(1)]}, tmp_path / "c.pt")
    with pytest.raises(ConversionError, match=r"'a\.0' is in a container that would be a dict"):
        convert(tmp_path / "c.pt", tmp_path / "b", to, options=ConvertOptions(strip_prefix="m."))
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_a_part_of_a_list(tmp_path: Path, to: str) -> None:
    """A partly selected list is refused, because its members would get other keys."""
    torch.save({"groups": [{"w": torch.ones(2)}, {"w": torch.ones(2)}], "l": [5, torch.ones(1)]}, tmp_path / "a.pt")
    for pattern in ("groups.1.*", "l.0"):
        with pytest.raises(ConversionError, match="belongs to a list of which other values are missing"):
            convert(tmp_path / "a.pt", tmp_path / "b", to, options=ConvertOptions(include=[pattern]))
    convert(tmp_path / "a.pt", tmp_path / "b", to, options=ConvertOptions(include=["groups.*"]))
    assert tensors_of(tmp_path / "b").keys() == {"groups.0.w", "groups.1.w"}
