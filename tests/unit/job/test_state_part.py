"""The part of a state that is saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from dcp_tensorizer import StagingError
from dcp_tensorizer._job.saves import collected_part


def names(state: dict[str, Any], prefix: str = "") -> list[str]:
    """Returns the keys of nested dicts, joined by dots."""
    found = []
    for key, value in state.items():
        found += names(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [f"{prefix}{key}"]
    return found


def trained(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of a state that is trained."""
    return collected_part(state, trainable_only=True)[0]


class Tied(torch.nn.Module):
    """Module with a frozen base whose weight has two names, an adapter, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(2, 2, bias=False).requires_grad_(False)
        self.head = torch.nn.Linear(2, 2, bias=False)
        self.head.weight = self.base.weight
        self.adapter = torch.nn.Linear(2, 1)
        self.register_buffer("scale", torch.ones(1))


def test_all_of_a_state_is_all_of_it() -> None:
    """Modules are replaced by their state dicts, and other values stay."""
    model = Tied()
    state = {"model": model, "nested": {"empty": {}}, "step": 1}
    assert names(collected_part(state)[0]) == [
        *(f"model.{name}" for name in model.state_dict()),
        "nested.empty",
        "step",
    ]


def test_keys_are_left_out_by_patterns() -> None:
    """A dict without remaining keys is left out as well. The state itself does not change."""
    state = {"model": {"base": {"w": 1, "b": 2}, "lora": {"w": 3}}, "data": [1, 2], 7: {"x": 1}, "empty": {}}
    assert names(collected_part(state, ("model.base.*", "data", "7.x"))[0]) == ["model.lora.w", "empty"]
    assert len(names(state)) == 6


def test_frozen_parameters_are_left_out() -> None:
    """Frozen parameters are left out under each of their names, and buffers stay."""
    state = trained({"model": Tied(), "step": 1})
    assert names(state) == ["model.scale", "model.adapter.weight", "model.adapter.bias", "step"]


def test_modules_in_between_are_in_no_key() -> None:
    """The wrappers of activation checkpointing and FSDP1 are in the names of parameters, but not in keys."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2).requires_grad_(False), torch.nn.Linear(2, 2))
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, torch.nn.Linear))
    assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_parameters())
    state = trained({"model": model})
    assert names(state) == ["model.1.weight", "model.1.bias"]


def test_frozen_parameters_by_other_names_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """If a hook has renamed the keys of a state dict, a warning names a frozen parameter that was not found."""
    model = torch.nn.Linear(2, 2).requires_grad_(False)
    model.register_state_dict_post_hook(lambda module, state, prefix, _: state.update({"w": state.pop("weight")}))
    del model.bias
    assert names(trained({"model": model})) == ["model.w"]
    assert "no key in the state dict of 'model' is the name of a frozen parameter, such as 'weight'" in caplog.text


def test_parameters_in_dicts_say_themselves_whether_they_are_frozen() -> None:
    """Parameters in dicts, as ``keep_vars=True`` leaves them, have their own ``requires_grad``."""
    state = {"model": Tied().state_dict(keep_vars=True), "step": 1}
    part = collected_part(state, ("step",), trainable_only=True)[0]
    assert names(part) == ["model.scale", "model.adapter.weight", "model.adapter.bias"]


def test_a_state_that_does_not_say_what_is_trained_is_refused() -> None:
    """The tensors of a plain state dict do not tell which of them are trained."""
    with pytest.raises(StagingError, match="Put the module itself into the state"):
        trained({"model": Tied().state_dict()})
