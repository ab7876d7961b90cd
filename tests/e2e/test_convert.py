"""What real ranks have saved, in however many pieces, is the same in every format, and after the way back."""

import io
import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tensorizer import TensorDeserializer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dcp_tensorizer import ConversionError, TensorizerStorageWriter
from dcp_tensorizer.tools import ConvertOptions, convert
from dcp_tensorizer.tools._formats.registry import open_checkpoint
from dcp_tensorizer.tools._view import whole

from ..lab.ranks import run_ranks
from ..lab.states import assert_same
from .training import random_tensor

WORLD = 3
ODD = torch.bfloat16  # of the zero-element tensors that tensorizer cannot read


def _whole():
    """The state as it is before it is distributed."""
    dtypes = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.bool]
    state = {f"rows.{dtype}".replace("torch.", ""): random_tensor(dtype, (7, 5), n) for n, dtype in enumerate(dtypes)}
    return state | {
        "columns": random_tensor(torch.float16, (4, 6, 5), 10),
        "replicated": random_tensor(torch.float32, (3, 3), 11),
        "few_rows": random_tensor(torch.bfloat16, (2, 8), 12),
        "scalar": random_tensor(torch.float32, (), 13),
        "large": random_tensor(torch.float32, (1030, 257), 14),
        "empty": torch.empty(0, 4),
    }


def _expected():
    """The whole state."""
    return {"model": _whole(), "odd": torch.empty(4, 0, dtype=ODD)} | _rest()


def _rest():
    return {"optimizer": {"lr": 1e-3, "betas": (0.9, 0.95), "history": [torch.ones(2), 5]}}


def _state(mesh):
    placements = {"columns": Shard(1), "replicated": Replicate(), "scalar": Replicate(), "few_rows": Shard(0)}

    def distribute(tensor, placement):
        return distribute_tensor(tensor, mesh, [placement], src_data_rank=None)  # gloo sends no float8

    tensors = {name: distribute(tensor, placements.get(name, Shard(0))) for name, tensor in _whole().items()}
    return {"model": tensors, "odd": distribute(torch.empty(4, 0, dtype=ODD), Shard(0))} | _rest()


def _save(rank, folder):
    mesh = init_device_mesh("cpu", (rank.world_size,))
    state = _state(mesh)
    with TensorizerStorageWriter(thread_count=1) as writer:
        dcp.async_save(state, checkpoint_id=folder, storage_writer=writer, process_group=rank.saves).result()
    dcp.save(state, checkpoint_id=f"{folder}-torch")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint that three ranks have saved, and beside it torch's own of the same state."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    run_ranks(WORLD, _save, folder)
    return folder, _expected()


def tensors_of(path):
    """Everything in a checkpoint of any format."""
    contents = open_checkpoint(path, {})
    found = {key: tensor.read(whole(tensor.shape)) for key, tensor in contents.tensors.items()}
    return found, {key: stored.read() for key, stored in contents.objects.items()}


def flat(state):
    found, _ = torch.distributed.checkpoint._nested_dict.flatten_state_dict(state)
    return {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("to", ["torch", "dcp", "dcp_tensorizer"])
def test_everything_there_and_back(saved, tmp_path, to):
    """Formats of state dicts take all of it: tensors in every bit, and objects."""
    checkpoint, state = saved
    convert(checkpoint, tmp_path / "there", to)
    convert(tmp_path / "there", tmp_path / "back", "dcp_tensorizer")
    tensors, objects = tensors_of(tmp_path / "back")
    assert_same(tensors, flat(state))
    assert objects == tensors_of(checkpoint)[1]
    assert objects.keys() == {"optimizer.lr", "optimizer.betas", "optimizer.history.1"}


@pytest.mark.parametrize("to", ["tensorizer", "safetensors"])
def test_tensors_there_and_back(saved, tmp_path, to):
    """Formats of models take the tensors, under the names that the model has for them."""
    checkpoint, state = saved
    options = ConvertOptions(include=["model.*"], strip_prefix="model.")
    convert(checkpoint, tmp_path / "there", to, options=options)
    convert(tmp_path / "there", tmp_path / "back", "dcp_tensorizer")
    assert_same(tensors_of(tmp_path / "back")[0], state["model"])


def test_other_libraries_read_it(saved, tmp_path):
    """Stock tensorizer, safetensors, torch.load and dcp.load find the values that were saved."""
    checkpoint, state = saved
    options = ConvertOptions(include=["model.*"], strip_prefix="model.")
    convert(checkpoint, tmp_path / "model.tensors", "tensorizer", options=options)
    with TensorDeserializer(tmp_path / "model.tensors", device="cpu", verify_hash=True) as found:
        assert_same(dict(found.items()), state["model"])
    convert(checkpoint, tmp_path / "model.safetensors", "safetensors", options=options)
    assert_same(load_file(tmp_path / "model.safetensors"), state["model"])
    convert(checkpoint, tmp_path / "state.pt", "torch")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert_same(loaded, state)
    convert(checkpoint, tmp_path / "dcp", "dcp")
    target = {
        "model": {key: torch.zeros_like(tensor) for key, tensor in state["model"].items()},
        "optimizer": {"lr": 0},
    }
    dcp.load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_same(target["model"], state["model"])
    assert target["optimizer"]["lr"] == 1e-3


def test_what_torch_saved_comes_in(saved, tmp_path):
    """torch's own checkpoints, of several ranks, become ours."""
    checkpoint, state = saved
    convert(f"{checkpoint}-torch", tmp_path / "in", "dcp_tensorizer")
    tensors, objects = tensors_of(tmp_path / "in")
    assert_same(tensors, flat(state))
    assert torch.load(io.BytesIO(objects["optimizer.betas"]), weights_only=True) == (0.9, 0.95)


def test_shards_as_hugging_face_names_them(saved, tmp_path):
    """Each tensor is in the file that the index says, and no file is larger than asked."""
    checkpoint, state = saved
    convert(checkpoint, tmp_path / "hf", "safetensors", options=ConvertOptions(include=["model.*"], shard_bytes=1000))
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    names = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert names == [f"model-{n + 1:05}-of-{len(names):05}.safetensors" for n in range(len(names))]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state["model"].values())
    found = {key: load_file(tmp_path / "hf" / name)[key] for key, name in index["weight_map"].items()}
    assert_same(found, {f"model.{key}": tensor for key, tensor in state["model"].items()})


def test_tensor_parallel_files(saved, tmp_path):
    """Each rank's file has its part of what the rules split, and all of the rest."""
    checkpoint, state = saved
    options = ConvertOptions(
        include=["model.columns", "model.large"], tensor_parallel=2, split={"*.columns": 1, "*.large": 0}
    )
    convert(checkpoint, tmp_path / "tp", "tensorizer", options=options)
    for rank in range(2):
        with TensorDeserializer(tmp_path / "tp" / f"model-rank-{rank:03}.tensors", device="cpu") as found:
            expected = {
                "model.columns": state["model"]["columns"].chunk(2, 1)[rank],
                "model.large": state["model"]["large"].chunk(2)[rank],
            }
            assert_same(dict(found.items()), expected)


@pytest.mark.parametrize(
    ("to", "select", "named"),
    [
        ("safetensors", ["optimizer.*"], "optimizer.lr"),
        ("tensorizer", [], "optimizer.lr"),
        ("tensorizer", ["odd", "model.*"], "odd"),
    ],
)
def test_what_a_format_cannot_hold_is_named(saved, tmp_path, to, select, named):
    """Before anything is written."""
    with pytest.raises(ConversionError, match=f"'{named}'"):
        convert(saved[0], tmp_path / "there", to, options=ConvertOptions(include=select))
    assert list(tmp_path.iterdir()) == []
