"""Which part of a state is saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from dcp_tensorizer import StagingError
from dcp_tensorizer._job.saves import collected_part


def names(state: dict[str, Any], prefix: str = "") -> list[str]:
    """The keys of nested dicts, joined by dots."""
    found = []
    for key, value in state.items():
        found += names(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [f"{prefix}{key}"]
    return found


def trained(state: dict[str, Any]) -> dict[str, Any]:
    """The part of a state that is trained."""
    return collected_part(state, trainable_only=True)[0]


class Tied(torch.nn.Module):
    """A frozen base whose weight has two names, an adapter, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(2, 2, bias=False).requires_grad_(False)
        self.head = torch.nn.Linear(2, 2, bias=False)
        self.head.weight = self.base.weight
        self.adapter = torch.nn.Linear(2, 1)
        self.register_buffer("scale", torch.ones(1))


def test_all_of_a_state_is_all_of_it() -> None:
    """Modules are asked for their state; everything else is as it is."""
    model = Tied()
    state = {"model": model, "nested": {"empty": {}}, "step": 1}
    assert names(collected_part(state)[0]) == [
        *(f"model.{name}" for name in model.state_dict()),
        "nested.empty",
        "step",
    ]


def test_keys_are_left_out_by_patterns() -> None:
    """Dicts of which nothing is left go, too. The state itself stays as it is."""
    state = {"model": {"base": {"w": 1, "b": 2}, "lora": {"w": 3}}, "data": [1, 2], 7: {"x": 1}, "empty": {}}
    assert names(collected_part(state, ("model.base.*", "data", "7.x"))[0]) == ["model.lora.w", "empty"]
    assert len(names(state)) == 6


def test_frozen_parameters_are_left_out() -> None:
    """Under each of their names; buffers stay."""
    state = trained({"model": Tied(), "step": 1})
    assert names(state) == ["model.scale", "model.adapter.weight", "model.adapter.bias", "step"]


def test_modules_in_between_are_in_no_key() -> None:
    """Activation checkpointing and FSDP1 put some around others: they are in the names of parameters alone."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2).requires_grad_(False), torch.nn.Linear(2, 2))
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, torch.nn.Linear))
    assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_parameters())
    state = trained({"model": model})
    assert names(state) == ["model.1.weight", "model.1.bias"]


def test_frozen_parameters_by_other_names_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """A hook may rename what is in the state dict: then the log says that nothing was left out."""
    model = torch.nn.Linear(2, 2).requires_grad_(False)
    model.register_state_dict_post_hook(lambda module, state, prefix, _: state.update({"w": state.pop("weight")}))
    del model.bias
    assert names(trained({"model": model})) == ["model.w"]
    assert "no frozen parameter of 'model' is in its state dict by its name ('weight')" in caplog.text


def test_parameters_in_dicts_say_themselves_whether_they_are_frozen() -> None:
    """As in a state dict that was made with ``keep_vars=True``."""
    state = {"model": Tied().state_dict(keep_vars=True), "step": 1}
    part = collected_part(state, ("step",), trainable_only=True)[0]
    assert names(part) == ["model.scale", "model.adapter.weight", "model.adapter.bias"]


def test_a_state_that_does_not_say_what_is_trained_is_refused() -> None:
    """The tensors of a plain state dict are all the same."""
    with pytest.raises(StagingError, match="give the module itself in the state"):
        trained({"model": Tied().state_dict()})
