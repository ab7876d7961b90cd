"""Target tensors for the state of an optimizer that has not taken a step, according to the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dcp_tensorizer._job.optimizer_state import OptimizerTarget

Stored = dict[tuple[str | int, ...], TensorStorageMetadata | BytesStorageMetadata]


def tensor(*size: int, dtype: torch.dtype = torch.float32) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(dtype), torch.Size(size), [])


def made(optimizer: torch.optim.Optimizer, stored: Stored) -> dict[Any, Any]:
    """Returns the state that is made for the stored entries, all of them below ``opt``."""
    collected = optimizer.state_dict()
    entries = {".".join(map(str, path)): entry for path, entry in stored.items()}
    paths = {".".join(map(str, path)): path for path in stored}
    OptimizerTarget("opt", optimizer, collected).make_state(entries, paths)
    assert optimizer.state_dict()["state"] == {}
    state: dict[Any, Any] = collected["state"]
    return state


def test_room_is_as_the_checkpoint_has_it() -> None:
    """Tensors have the stored shape and dtype, objects are None, and dicts and lists are nested as saved."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))])
    state = made(
        optimizer,
        {
            ("opt", "state", "0", "moment"): tensor(2, 3),
            ("opt", "state", "0", "factor"): tensor(7, dtype=torch.int64),
            ("opt", "state", "0", "past", 1): tensor(),
            ("opt", "state", "0", "note"): BytesStorageMetadata(),
            ("opt", "state", "scale", "growth"): tensor(1),
            ("opt", "state", "1", "moment"): tensor(2, 3),  # of a parameter that there is not
            ("opt", "param_groups", 1, "lr"): BytesStorageMetadata(),
            ("model", "state", "0", "moment"): tensor(2, 3),
        },
    )
    assert state.keys() == {0, "scale"}
    assert state[0].keys() == {"moment", "factor", "past", "note"}
    assert (state[0]["moment"].shape, state[0]["moment"].dtype) == ((2, 3), torch.float32)
    assert (state[0]["factor"].shape, state[0]["factor"].dtype) == ((7,), torch.int64)
    assert (len(state[0]["past"]), state[0]["past"][1].shape, state[0]["note"]) == (2, (), None)
    assert state["scale"]["growth"].shape == (1,)


def test_room_grows_with_the_parameter() -> None:
    """Dimensions that were as large as those of the parameter grow. A factored moment keeps its dimension of 1."""
    parameter = torch.nn.Parameter(torch.zeros(9, 4))
    collected = torch.optim.SGD([parameter]).state_dict()
    stored = {"moment": tensor(6, 4), "row_var": tensor(6, 1), "col_var": tensor(1, 4), "rows": tensor(6)}
    OptimizerTarget("opt", torch.optim.SGD([parameter]), collected).make_state(
        {f"opt.state.0.{name}": entry for name, entry in stored.items()},
        {f"opt.state.0.{name}": ("opt", "state", "0", name) for name in stored},
        {parameter: torch.Size([6, 4])}.get,
    )
    shapes = {name: tuple(value.shape) for name, value in collected["state"][0].items()}
    assert shapes == {"moment": (9, 4), "row_var": (9, 1), "col_var": (1, 4), "rows": (6,)}


def test_tensors_are_where_the_parameter_is() -> None:
    """Tensors of the parameter's shape are on its device. A step count stays on the host."""
    weight, scale = (torch.nn.Parameter(torch.zeros(size, device="meta")) for size in ((4,), ()))
    stored: Stored = {
        ("opt", "state", number, name): tensor(*size)
        for number, name, size in [("0", "moment", (4,)), ("0", "step", ()), ("1", "moment", ()), ("1", "step", ())]
    }
    state = made(torch.optim.SGD([weight, scale]), stored)
    places = [state[number][name].device.type for number in (0, 1) for name in ("moment", "step")]
    assert places == ["meta", "cpu", "meta", "cpu"]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Makes a mesh of two ranks, of which this rank is the first."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_tensors_are_sharded_as_the_parameter_is(mesh: DeviceMesh) -> None:
    """The sharding of tensors of other shapes is unknown, so only scalars are made."""
    parameter = torch.nn.Parameter(DTensor.from_local(torch.zeros(3, 2), mesh, [Shard(0)]))
    sizes = {"moment": (6, 2), "factor": (6, 1), "step": ()}
    stored: Stored = {("opt", "state", "0", name): tensor(*size) for name, size in sizes.items()}
    state = made(torch.optim.SGD([parameter]), stored)[0]
    assert state.keys() == {"moment", "step"}
    assert (state["moment"].placements, state["moment"].to_local().shape) == ((Shard(0),), (3, 2))
    assert type(state["step"]) is torch.Tensor


def test_a_state_dict_of_another_kind_is_left_alone() -> None:
    """An optimizer with its own kind of state dict is not changed."""
    for collected in ({"moments": {}}, {"state": {}, "param_groups": [{"params": [0, 1]}]}, None, []):
        target = OptimizerTarget("opt", torch.optim.SGD([torch.zeros(2)]), collected)
        target.make_state({"opt.state.0.moment": tensor(2)}, {"opt.state.0.moment": ("opt", "state", "0", "moment")})
        assert collected in ({"moments": {}}, {"state": {}, "param_groups": [{"params": [0, 1]}]}, None, [])


def test_there_is_no_room_for_the_state_of_parameters_that_describe_their_part() -> None:
    """Such a parameter does not determine the sharding of its state."""
    described, plain = torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(2, 3))
    described.__create_chunk_list__ = list  # type: ignore[attr-defined]
    state = made(
        torch.optim.SGD([described, plain]),
        {("opt", "state", number, "moment"): tensor(2, 3) for number in ("0", "1")},
    )
    assert state.keys() == {1}
