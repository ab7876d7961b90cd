"""Models whose weights are quantised by blocks: the same values as with torch's own reader, also sharded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

from dcp_tensorizer import Parts, ReadError, open_reader, unwrap

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SHAPES = {"a.weight": (300, 260), "b.weight": (128, 128), "c.weight": (5, 1000), "d.weight": (128, 128)}


def model(folder: Path, block: int = 128, config: object = None) -> None:
    """A model in two files: quantised weights, and a bias that is not."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"a.bias": torch.rand(300, generator=generator, dtype=torch.bfloat16)}
    scales = {}
    for name, shape in SHAPES.items():
        tensors[name] = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
        blocks = [-(-extent // block) for extent in shape]
        scales[f"{name}_scale_inv"] = torch.rand(blocks, generator=generator)
    save_file(tensors, folder / "model-00001-of-00002.safetensors")
    save_file(scales, folder / "model-00002-of-00002.safetensors")
    files = dict.fromkeys(tensors, "model-00001-of-00002.safetensors")
    files |= dict.fromkeys(scales, "model-00002-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))


def targets(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()} | {"a.bias": torch.zeros(300)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [128, 64])
def test_values_are_those_of_torchs_reader(tmp_path: Path, dtype: torch.dtype, block: int) -> None:
    """To the bit; a block of another size is found in the model's configuration."""
    model(tmp_path, block, None if block == 128 else {"quantization_config": {"weight_block_size": [block, block]}})
    ours, theirs = targets(dtype), targets(dtype)
    dcp.load(ours, storage_reader=open_reader(tmp_path))
    dcp.load(theirs, storage_reader=QuantizedHuggingFaceStorageReader(str(tmp_path), block_size=block))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert ours["a.weight"].count_nonzero() > 70_000


def test_a_target_of_fp8_gets_what_is_stored(tmp_path: Path) -> None:
    """And the scales load as any tensor does."""
    model(tmp_path)
    state = {"b.weight": torch.zeros(128, 128, dtype=torch.float8_e4m3fn), "b.weight_scale_inv": torch.zeros(1, 1)}
    dcp.load(state, storage_reader=open_reader(tmp_path))
    dequantised = {"b.weight": torch.zeros(128, 128)}
    dcp.load(dequantised, storage_reader=open_reader(tmp_path))
    assert torch.equal(state["b.weight"].float() * state["b.weight_scale_inv"], dequantised["b.weight"])


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fnuz])
def test_a_target_of_another_fp8_dtype_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """Neither the stored elements nor the values would be right there."""
    model(tmp_path)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"b.weight": torch.zeros(128, 128, dtype=dtype)}, storage_reader=open_reader(tmp_path))
    assert isinstance(error := unwrap(caught.value), ReadError)
    assert f"'b.weight' is stored as float8_e4m3fn, whose scales do not fit a target of {dtype}" in str(error)


def test_the_progress_is_that_of_the_whole_load(tmp_path: Path) -> None:
    """Though quantised weights are read after all others."""
    model(tmp_path)
    seen: list[tuple[int, int]] = []
    dcp.load(targets(), storage_reader=open_reader(tmp_path, on_progress=lambda *numbers: seen.append(numbers)))
    total = 600 + sum(rows * columns for rows, columns in SHAPES.values())
    assert {of_call for _, of_call in seen} == {total}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert (seen[0], seen[-1]) == ((0, total), (total, total))


def test_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """The error names the weight, both shapes, and where the size of a block is said."""
    model(tmp_path, 64)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(targets(), storage_reader=open_reader(tmp_path))
    error = unwrap(caught.value)
    assert isinstance(error, ReadError)
    words = "'a.weight' has shape (300, 260) and its scales have shape (5, 5), which do not match blocks of 128 x 128"
    assert words in str(error)


def test_a_quantised_weight_may_have_another_name(tmp_path: Path) -> None:
    """Under a rule that only renames; one that cuts it is refused."""
    model(tmp_path)
    state = {"x.weight": torch.zeros(300, 260)}
    dcp.load(state, storage_reader=open_reader(tmp_path, rename={"x.*": "a.*"}))
    expected = targets()
    dcp.load(expected, storage_reader=open_reader(tmp_path))
    assert torch.equal(state["x.weight"], expected["a.weight"])
    joined = {"x.weight": torch.zeros(256, 128)}
    rules = {"x.weight": Parts("b.weight", "d.weight")}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(joined, storage_reader=open_reader(tmp_path, rename=rules))
    assert "'b.weight' is quantised, so rename= cannot cut it, or join it" in str(unwrap(caught.value))
