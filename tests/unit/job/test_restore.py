"""Load plans for a state that does not fully match the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dcp_tensorizer import StateMismatch
from dcp_tensorizer._job.restore import Selection, SelectivePlanner, fill_beyond


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Makes a mesh of two ranks, of which this rank is the second."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def stored(state: dict[str, tuple[int, ...]], optimizer: torch.optim.Optimizer) -> Metadata:
    """Returns the metadata of a checkpoint with these tensors and the groups of an optimizer."""
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        key: TensorStorageMetadata(
            TensorProperties(torch.float32),
            torch.Size(size),
            [ChunkStorageMetadata(torch.Size([0] * len(size)), torch.Size(size))],
        )
        for key, size in state.items()
    }
    entries |= {f"optimizer.param_groups.0.{name}": BytesStorageMetadata() for name in optimizer.param_groups[0]}
    paths = {key: tuple(int(p) if p == "0" and "groups" in key else p for p in key.split(".")) for key in entries}
    return Metadata(entries, planner_data=paths)


def test_a_rank_without_elements_leaves_what_others_leave(mesh: DeviceMesh) -> None:
    """A rank without elements of a parameter recognises it by its name, and leaves its state out as other ranks do."""
    module = torch.nn.Linear(3, 1)
    for name, size in (("weight", (1, 3)), ("bias", (1,))):
        local = torch.zeros(0, *size[1:])
        shard = DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size(size), stride=(3, 1)[-len(size) :])
        setattr(module, name, torch.nn.Parameter(shard))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    state = {"model": module, "optimizer": optimizer}
    sizes = {"model.weight": (2, 3), "model.bias": (1,)}
    sizes |= {f"optimizer.state.{n}.momentum_buffer": size for n, size in enumerate(sizes.values())}
    metadata = stored(sizes, optimizer)

    def planned(**options: bool) -> dict[str, object]:
        planner = SelectivePlanner("/run/step-1", Selection(**options), state)
        collected = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
        planner.set_up_planner(collected, metadata)
        return {key: value for key, value in planner.state_dict.items() if "groups" not in key}

    assert planned(allow_shape_mismatch=True).keys() == {"model.bias", "optimizer.state.1.momentum_buffer"}
    with pytest.raises(
        StateMismatch, match=r"shapes differ: 'model\.weight' is \(2, 3\) in the checkpoint and \(1, 3\) in"
    ):
        planned()


def test_an_optimizer_is_not_changed_before_all_is_loaded() -> None:
    """Before the load is complete, neither the state nor a learning rate in a tensor has changed."""
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([weight], lr=torch.tensor(0.5))
    optimizer.state[weight] = {"past": [torch.ones(2)]}
    keys = {f"optimizer.state.0.{name}": (2,) for name in ("past.0", "past.1", "exp_avg")}
    metadata = stored(keys, optimizer)
    metadata.planner_data |= {f"optimizer.state.0.past.{n}": ("optimizer", "state", "0", "past", n) for n in (0, 1)}
    metadata.state_dict_metadata["optimizer.param_groups.0.lr"] = TensorStorageMetadata(
        TensorProperties(torch.float32), torch.Size([]), [ChunkStorageMetadata(torch.Size([]), torch.Size([]))]
    )
    planner = SelectivePlanner("/run/step-1", Selection(), {"optimizer": optimizer})
    planner.set_up_planner({"optimizer": optimizer.state_dict()}, metadata)
    planner.state_dict["optimizer.param_groups.0.lr"].fill_(7)
    assert {key for key in planner.state_dict if "state" in key} == keys.keys()
    assert optimizer.state[weight].keys() == {"past"}
    assert (len(optimizer.state[weight]["past"]), optimizer.param_groups[0]["lr"].item()) == (1, 0.5)


def test_elements_beyond_the_stored_size_are_filled_where_a_tensor_describes_them() -> None:
    """The fill covers a tensor of which each rank has two blocks of rows, and a whole tensor."""
    blocks, whole = torch.ones(4, 2), torch.ones(3, 2)
    chunks = {start: torch.Size((start, 0)) for start in (1, 5)}
    blocks.__create_chunk_list__ = lambda: [ChunkStorageMetadata(s, torch.Size((2, 2))) for s in chunks.values()]  # type: ignore[attr-defined]
    blocks.__get_tensor_shard__ = lambda index: blocks[:2] if index.offset == chunks[1] else blocks[2:]  # type: ignore[attr-defined]
    for tensor in (blocks, whole):
        fill_beyond(tensor, torch.Size((2, 2)), 7.0)
    assert blocks[:, 0].tolist() == [1.0, 7.0, 7.0, 7.0]
    assert whole[:, 0].tolist() == [1.0, 1.0, 7.0]
