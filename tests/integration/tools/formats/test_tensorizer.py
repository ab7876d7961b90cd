"""tensorizer files: those of stock tensorizer, files for ranks, and damage."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tensorizer import TensorDeserializer, TensorSerializer
from torch import nn

from dcp_tensorizer import ChecksumMismatch, ConversionError, MetadataError, NotCommitted
from dcp_tensorizer._tensor_file.regions import Region
from dcp_tensorizer.tools import ConvertOptions, convert
from dcp_tensorizer.tools._formats import safetensors, torch_file
from dcp_tensorizer.tools._formats.registry import FORMATS, open_checkpoint

from ....lab.checkpoints import make_checkpoint, tensors_of
from ....lab.states import filled, raw, same


def test_a_stock_module_comes_back_with_its_buffers(tmp_path: Path) -> None:
    """Stock tensorizer loads a converted module with its parameters and buffers."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
            self.rotary = nn.Module()
            self.rotary.register_buffer("table", torch.randn(5))

    model, other = Model(), Model()
    torch.save(model.state_dict(), tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b", "tensorizer", options=ConvertOptions(buffers=("*running_*", "rotary.*")))
    with TensorDeserializer(tmp_path / "b", device="cpu", verify_hash=True) as stock:
        assert stock.load_into_module(other) == len(model.state_dict())
    assert all(same(tensor, other.state_dict()[key]) for key, tensor in model.state_dict().items())
    assert [key for key, _ in other.named_buffers()] == [key for key, _ in model.named_buffers()]


def test_more_names_than_tensorizer_writes(tmp_path: Path) -> None:
    """Stock tensorizer reads a converted file whose index is larger than the 256 KiB that it can write."""
    tensors = {f"{'n' * 900}.{number}": torch.tensor([number]) for number in range(300)}
    save_file(tensors, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "b", "tensorizer")
    with TensorDeserializer(tmp_path / "b", device="cpu") as stock:
        assert [int(stock[key]) for key in tensors] == list(range(300))
    assert all(same(value, tensors[key]) for key, value in tensors_of(tmp_path / "b").items())


def test_files_of_stock_tensorizer(tmp_path: Path) -> None:
    """Files of stock tensorizer are read, and encrypted ones are refused."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).bfloat16()
    serializer = TensorSerializer(tmp_path / "a")
    serializer.write_module(model)
    serializer.close()
    found = tensors_of(tmp_path / "a")
    assert found.keys() == model.state_dict().keys()
    assert all(same(found[key], tensor) for key, tensor in model.state_dict().items())
    content = bytearray((tmp_path / "a").read_bytes())
    struct.pack_into("<IB", content, 5, 4, 1)
    (tmp_path / "b").write_bytes(content)
    with pytest.raises(ConversionError, match="encrypted"):
        tensors_of(tmp_path / "b")


def write_in_blocks(source: Path, target: Path, to: str) -> None:
    """Converts in blocks that are smaller than the tensors."""
    view = open_checkpoint(source, {})
    write = {"safetensors": safetensors.write, "torch": torch_file.write}[to]
    write(view, str(target), {}, ConvertOptions(), block_bytes=1000)


@pytest.mark.parametrize("to", [*FORMATS, "safetensors in blocks", "torch in blocks"])
def test_tensorizer_files_are_verified(tmp_path: Path, to: str) -> None:
    """A conversion compares each tensor with the CRC-32 in its header, also if it reads blocks."""
    to, in_blocks, _ = to.partition(" in blocks")
    write = write_in_blocks if in_blocks else convert
    state = {"good": filled(torch.bfloat16, (50, 40)), "bad": filled(torch.float32, (50, 40)), "none": torch.ones(0)}
    serializer = TensorSerializer(tmp_path / "a")
    serializer.write_state_dict(state)
    serializer.close()
    write(tmp_path / "a", tmp_path / "b", to)
    assert all(same(found, state[key]) for key, found in tensors_of(tmp_path / "b").items())
    content = bytearray((tmp_path / "a").read_bytes())
    content[content.index(raw(state["bad"])) + 4001] ^= 1
    (tmp_path / "c").write_bytes(content)
    with pytest.raises(ChecksumMismatch, match="'bad' is damaged"):
        write(tmp_path / "c", tmp_path / "d", to)
    assert not (tmp_path / "d").exists()
    convert(tmp_path / "c", tmp_path / "d", to, options=ConvertOptions(include=["good"]))


def test_tensorizer_files_are_verified_in_any_order(tmp_path: Path) -> None:
    """A read of any region of a damaged tensor fails, in any order of regions."""
    state = {"x": filled(torch.int32, (50, 40))}
    save_file(state, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "b", "tensorizer")
    stored = open_checkpoint(tmp_path / "b", {}).tensors["x"]
    for region in (Region((0, 3), (50, 5)), Region((20, 0), (1, 40)), Region((0, 0), (50, 40))):
        part = tuple(slice(a, a + n) for a, n in zip(region.start, region.size, strict=True))
        assert same(stored.read(region), state["x"][part])
    content = bytearray((tmp_path / "b").read_bytes())
    content[-20] ^= 1
    (tmp_path / "b").write_bytes(content)
    for region in (Region((0, 3), (50, 5)), Region((20, 0), (1, 40)), Region((0, 0), (50, 40))):
        with pytest.raises(ChecksumMismatch, match="'x'"):
            open_checkpoint(tmp_path / "b", {}).tensors["x"].read(region)


def test_the_first_rule_for_a_split_counts(tmp_path: Path) -> None:
    """Of several rules that match a key, the first one decides the split dimension."""
    make_checkpoint(tmp_path / "a", {"l.weight": filled(torch.float32, (4, 3)), "l.bias": filled(torch.float32, (4,))})
    rules = {"*.bias": 0, "l.*": 0, "*": 1}
    convert(tmp_path / "a", tmp_path / "b", "tensorizer", options=ConvertOptions(tensor_parallel=2, split=rules))
    found = [tensors_of(tmp_path / "b" / f"model-rank-00{rank}.tensors") for rank in (0, 1)]
    for key, tensor in tensors_of(tmp_path / "a").items():
        assert same(torch.cat([part[key] for part in found]), tensor)


def test_the_files_of_a_split_are_read_one_by_one(tmp_path: Path) -> None:
    """The directory with the files of all ranks is refused by the names of these files, each of which converts."""
    make_checkpoint(tmp_path / "a", {"w": filled(torch.float32, (4, 3))})
    convert(tmp_path / "a", tmp_path / "b", "tensorizer", options=ConvertOptions(tensor_parallel=2, split={"w": 0}))
    with pytest.raises(
        NotCommitted, match=r": it holds model-rank-000\.tensors, model-rank-001\.tensors\. Name a check"
    ):
        convert(tmp_path / "b", tmp_path / "c", "torch")
    for rank in (0, 1):
        convert(tmp_path / "b" / f"model-rank-00{rank}.tensors", tmp_path / f"{rank}.pt", "torch")
    parts = [torch.load(tmp_path / f"{rank}.pt")["w"] for rank in (0, 1)]
    assert same(torch.cat(parts), tensors_of(tmp_path / "a")["w"])


def tensorizer_file(path: Path) -> Path:
    save_file({"x": torch.ones(3)}, path.with_suffix(".safetensors"))
    convert(path.with_suffix(".safetensors"), path, "tensorizer")
    return path


def test_an_index_that_is_longer_than_the_file(tmp_path: Path) -> None:
    """An impossible length of the index is refused without allocating memory."""
    content = bytearray(tensorizer_file(tmp_path / "a").read_bytes())
    content[71] ^= 1  # in the length of the index
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(MetadataError, match="281,474,976,972,800 bytes must follow, got 262,"):
        convert(tmp_path / "a", tmp_path / "b", "torch")


@pytest.mark.parametrize("size", [5, 60, 73, 100])
def test_a_file_that_is_cut_off_in_its_index(tmp_path: Path, size: int) -> None:
    """A file that ends within its index is an error that names the file."""
    os.truncate(tensorizer_file(tmp_path / "a"), size)
    with pytest.raises(MetadataError, match=r"/a cannot be read: "):
        convert(tmp_path / "a", tmp_path / "b", "torch")


def test_a_damaged_header(tmp_path: Path) -> None:
    """Damage of any byte of a tensor's header is found."""
    stock = tensorizer_file(tmp_path / "a").read_bytes()
    header = 73 + (256 << 10)
    length = struct.unpack_from("<Q", stock, header)[0]
    assert stock[header + length :][:12] == raw(torch.ones(3))
    for position in range(length):
        content = bytearray(stock)
        content[header + position] ^= 0xFF
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(ChecksumMismatch, match="'x'"):
            open_checkpoint(tmp_path / "a", {}).tensors["x"].read_all()


def test_nested_names(tmp_path: Path) -> None:
    """The paths of a nested state dict of stock tensorizer become its keys."""
    serializer = TensorSerializer(tmp_path / "a")
    serializer.write_state_dict({"model": {"w": torch.ones(2)}, "list": [torch.zeros(1)]})
    serializer.close()
    convert(tmp_path / "a", tmp_path / "b.pt", "torch")
    state = torch.load(tmp_path / "b.pt", weights_only=True)
    assert str(state) == str({"model": {"w": torch.ones(2)}, "list": [torch.zeros(1)]})


def test_two_tensors_by_one_key(tmp_path: Path) -> None:
    """A file with two tensors of one key is refused."""
    serializer = TensorSerializer(tmp_path / "a")
    serializer.write_state_dict({"model": {"w": torch.ones(2)}, "model.w": torch.zeros(1)})
    serializer.close()
    with pytest.raises(ConversionError, match=r"two tensors have the key 'model\.w'"):
        convert(tmp_path / "a", tmp_path / "b", "safetensors")
