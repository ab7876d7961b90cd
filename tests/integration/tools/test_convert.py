"""Conversions in one process: every dtype and layout, odd, bad and hostile sources, and what failures leave."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from tensorizer import TensorDeserializer, TensorSerializer
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from dcp_tensorizer import (
    CheckpointError,
    ChecksumMismatch,
    ConversionError,
    MetadataError,
    NotCommitted,
    ReadError,
    TensorizerStorageWriter,
    UntrustedObject,
)
from dcp_tensorizer._format.chunks import Region
from dcp_tensorizer._saving.commit import commit
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._storage.stream import StreamStorage
from dcp_tensorizer._tools import chunk_reader
from dcp_tensorizer._tools.checkpoint_view import blocks_of
from dcp_tensorizer._tools.chunk_reader import whole
from dcp_tensorizer._tools.formats import dcp_tensorizer as targets, safetensors, torch_file
from dcp_tensorizer._tools.formats.registry import FORMATS, open_checkpoint
from dcp_tensorizer._tools.retention import collect, find, plan_collection
from dcp_tensorizer.convert import Options, convert

from ...checkpoints import ODD, make_checkpoint
from ...support import ALL_DTYPES, filled, raw, same

SAFETENSORS_LACKS = {torch.complex32, torch.complex128, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2}


class Custom:
    """What no weights-only loader takes."""


def tensors_of(path: str | Path) -> dict[str, torch.Tensor]:
    tensors = open_checkpoint(path, {}).tensors
    return {key: tensor.read(whole(tensor.shape)) for key, tensor in tensors.items()}


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_in_every_format(tmp_path: Path, dtype: torch.dtype, to: str) -> None:
    """There and back in every bit, or an error that names the key and leaves nothing."""
    state = {"half": filled(dtype, (5, 4)), "columns": filled(dtype, (5, 4), 1), "zero": filled(dtype, (), 2)}
    make_checkpoint(tmp_path / "a", state, chunks=ODD)
    if to == "safetensors" and dtype in SAFETENSORS_LACKS:
        with pytest.raises(ConversionError, match="'half'"):
            convert(tmp_path / "a", tmp_path / "b", to)
        assert [path.name for path in tmp_path.iterdir()] == ["a"]
        return
    convert(tmp_path / "a", tmp_path / "b", to)
    convert(tmp_path / "b", tmp_path / "c", "dcp_tensorizer")
    found = tensors_of(tmp_path / "c")
    assert found.keys() == state.keys()
    assert all(same(found[key], tensor) for key, tensor in state.items())


@pytest.mark.parametrize("to", FORMATS)
def test_tensors_without_elements(tmp_path: Path, to: str) -> None:
    """They keep shape and dtype; the kind that makes a tensorizer file unreadable is an error that names the key."""
    state = {"a": torch.ones(2), "plain": torch.empty(0, 3), "odd": torch.empty(2, 0, dtype=torch.bfloat16)}
    make_checkpoint(tmp_path / "a", state)
    options = Options()
    if to == "tensorizer":
        with pytest.raises(ConversionError, match="'odd'"):
            convert(tmp_path / "a", tmp_path / "b", to)
        options = Options(select=["a", "plain"])
    convert(tmp_path / "a", tmp_path / "b", to, options=options)
    found = tensors_of(tmp_path / "b")
    assert {key: (tuple(t.shape), t.dtype) for key, t in found.items()} == {
        key: (tuple(t.shape), t.dtype) for key, t in state.items() if key in found
    }
    assert len(found) == (2 if to == "tensorizer" else 3)
    if to == "tensorizer":
        with TensorDeserializer(tmp_path / "b", device="cpu", verify_hash=True) as stock:
            assert stock["plain"].shape == (0, 3)


def test_nested_state_is_nested_again(tmp_path: Path) -> None:
    """Dicts in dicts, and lists, through torch's formats and back."""
    state = {"model": {"a.b": torch.ones(2)}, "list": [torch.zeros(1), {"x": torch.ones(1)}], "n": {"m": 3}}
    torch.save(state, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b", "dcp_tensorizer")
    assert set(tensors_of(tmp_path / "b")) == {"model.a.b", "list.0", "list.1.x"}
    convert(tmp_path / "b", tmp_path / "c.pt", "torch")
    found = torch.load(tmp_path / "c.pt", weights_only=True)
    assert str(found) == str(state)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(3.0).expand(4, 3),
        torch.arange(12.0).view(3, 4)[1:, 1::2],
        torch.arange(100.0)[7:9],
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        nn.Parameter(torch.ones(2, 3)),
        torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    ],
    ids=["transposed", "expanded", "strided", "part", "conjugated", "negated", "parameter", "channels last"],
)
def test_views_that_torch_saved(tmp_path: Path, tensor: torch.Tensor) -> None:
    """torch.save keeps strides and lazy bits; here each tensor is its own elements in order."""
    torch.save({"x": tensor}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b", "dcp_tensorizer")
    expected = tensor.detach().clone().resolve_conj().resolve_neg()
    found = tensors_of(tmp_path / "b")["x"]
    assert torch.equal(found, expected)
    assert found.is_contiguous()


def test_selecting_renaming_and_casting(tmp_path: Path) -> None:
    """Floating-point tensors are cast as torch casts them, others are not."""
    make_checkpoint(tmp_path / "a", {"m.w": filled(torch.float32, (3, 3)), "m.n": torch.arange(3), "o": torch.ones(1)})
    options = Options(select=["m.*"], strip_prefix="m.", dtype=torch.bfloat16)
    done = convert(tmp_path / "a", tmp_path / "b.safetensors", "safetensors", options=options)
    found = tensors_of(tmp_path / "b.safetensors")
    assert (done.tensors, done.nbytes, found.keys()) == (2, 3 * 3 * 2 + 3 * 8, {"w", "n"})
    assert same(found["w"], filled(torch.float32, (3, 3)).bfloat16())
    assert same(found["n"], torch.arange(3))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(select=["none.*"]), "none"),
        (Options(strip_prefix="zz."), "zz"),
        (Options(strip_prefix="a.b"), "nothing is left"),
        (Options(strip_prefix="a."), "are the same"),
        (Options(source_format="torch"), "dcp_tensorizer, and not torch"),
        (Options(tensor_parallel=2, split={"*.w": 0}), "no key matches"),
        (Options(select=["a.b"], tensor_parallel=2, split={"a.b": 0}), "'a.b' of shape .3,. cannot be split"),
        (Options(select=["a.b"], tensor_parallel=2, split={"a.b": 1}), "cannot be split"),
    ],
)
def test_what_cannot_be_done_is_said_first(tmp_path: Path, options: Options, words: str) -> None:
    """And nothing is written."""
    make_checkpoint(tmp_path / "a", {"a.b": torch.ones(3), "b": torch.ones(3)})
    with pytest.raises(ConversionError, match=words):
        convert(tmp_path / "a", tmp_path / "b", "tensorizer", options=options)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_stock_module_comes_back_with_its_buffers(tmp_path: Path) -> None:
    """Parameters and buffers are registered as what they are."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
            self.rotary = nn.Module()
            self.rotary.register_buffer("table", torch.randn(5))

    model, other = Model(), Model()
    torch.save(model.state_dict(), tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b", "tensorizer", options=Options(buffers=("*running_*", "rotary.*")))
    with TensorDeserializer(tmp_path / "b", device="cpu", verify_hash=True) as stock:
        assert stock.load_into_module(other) == len(model.state_dict())
    assert all(same(tensor, other.state_dict()[key]) for key, tensor in model.state_dict().items())
    assert [key for key, _ in other.named_buffers()] == [key for key, _ in model.named_buffers()]


def test_more_names_than_tensorizer_writes(tmp_path: Path) -> None:
    """An index of over 256 KiB, which stock tensorizer cannot write, but reads."""
    tensors = {f"{'n' * 90}.{number}": torch.tensor([number]) for number in range(2500)}
    save_file(tensors, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "b", "tensorizer")
    with TensorDeserializer(tmp_path / "b", device="cpu") as stock:
        assert [int(stock[key]) for key in tensors] == list(range(2500))
    assert all(same(value, tensors[key]) for key, value in tensors_of(tmp_path / "b").items())


def test_files_of_stock_tensorizer(tmp_path: Path) -> None:
    """As stock tensorizer writes a module; an encrypted one is refused in so many words."""
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


def test_blocks_make_up_a_tensor(tmp_path: Path) -> None:
    """However small the blocks are."""
    tensor = filled(torch.int16, (3, 4, 5))
    make_checkpoint(tmp_path / "a", {"x": tensor})
    stored = open_checkpoint(tmp_path / "a", {}).tensors["x"]
    for nbytes in (1, 14, 20, 40, 64, 1000):
        blocks = [stored.read(region).reshape(-1) for region in blocks_of(stored, nbytes)]
        assert max(block.nbytes for block in blocks) <= max(nbytes, 2)
        assert same(torch.cat(blocks).view(3, 4, 5), tensor)


def header(described: Any) -> bytes:
    text = json.dumps(described).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", ConversionError),
        (b"nothing that anybody knows", ConversionError),
        (b"|TZR|", CheckpointError),
        (b"|TZR|" + bytes(300), ConversionError),
        (b"|TZR|" + struct.pack("<I32sQ8xQQ", 2, b"", 0, 9, 64) + b"\xff" * 64, ConversionError),
        (b"PK\x03\x04" + bytes(100), ConversionError),
        (struct.pack("<Q", 1 << 60) + b"{}", CheckpointError),
        (header({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]}}), ConversionError),
        (header({"x": {"dtype": "Q9", "shape": [2], "data_offsets": [0, 8]}}), ConversionError),
        (header({"x": 5}), ConversionError),
        (header({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}), ReadError),
    ],
)
def test_bad_files_are_named(tmp_path: Path, content: bytes, error: type[Exception]) -> None:
    """Whatever a file holds, the error is one of this package's, names it, and leaves nothing behind."""
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(error, match="bad"):
        convert(tmp_path / "bad", tmp_path / "out", "dcp_tensorizer")
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


def test_nothing_there(tmp_path: Path) -> None:
    """A path without anything, and one with a directory of something else."""
    (tmp_path / "folder").mkdir()
    for path in ("nowhere", "folder"):
        with pytest.raises(NotCommitted, match=path):
            convert(tmp_path / path, tmp_path / "out", "torch")


def test_no_code_is_run(tmp_path: Path) -> None:
    """Pickles of torch files, of objects and of torch's metadata meet an allow-list each."""
    torch.save({"x": Custom()}, tmp_path / "a.pt")
    with pytest.raises(UntrustedObject, match="Custom"):
        convert(tmp_path / "a.pt", tmp_path / "out", "dcp_tensorizer")
    make_checkpoint(tmp_path / "b", {"t": torch.ones(1)}, {"x": Custom()})
    with pytest.raises(UntrustedObject, match=r"'x'.*Custom"):
        convert(tmp_path / "b", tmp_path / "out", "torch")
    convert(tmp_path / "b", tmp_path / "c", "dcp")  # takes the bytes as they are
    assert (
        open_checkpoint(tmp_path / "c", {}).objects["x"].read()
        == open_checkpoint(tmp_path / "b", {}).objects["x"].read()
    )
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(os.path.join))
    with pytest.raises(UntrustedObject, match=r"posixpath\.join"):
        convert(tmp_path / "d", tmp_path / "out", "torch")
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", ""])
def test_metadata_that_leads_out_of_its_directory(tmp_path: Path, name: str) -> None:
    """A checkpoint from elsewhere does not get other files into what is made of it."""
    dcp.save({"x": torch.ones(3), "o": 5}, checkpoint_id=tmp_path / "a", no_dist=True)
    metadata = pickle.loads((tmp_path / "a" / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = name
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(MetadataError, match="not beside it"):
        convert(tmp_path / "a", tmp_path / "b", "dcp_tensorizer")


@pytest.mark.parametrize("to", FORMATS)
def test_a_source_that_breaks_off_leaves_nothing(tmp_path: Path, to: str) -> None:
    """Damage that shows in the middle of the work: the error names the file, and no part of a result is there."""
    make_checkpoint(tmp_path / "a", {"first": torch.ones(100), "last": filled(torch.uint8, (300_000,))})
    (path,) = (tmp_path / "a").glob("*.tensors")
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size - 1000)
        file.write(b"damaged")
    with pytest.raises(ReadError, match=path.name):
        convert(tmp_path / "a", tmp_path / "b", to)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("to", FORMATS)
def test_what_is_there_stays(tmp_path: Path, to: str) -> None:
    """Neither a file nor a directory with something in it is written over."""
    make_checkpoint(tmp_path / "a", {"x": torch.ones(3)})
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").write_text("mine")
    with pytest.raises(ConversionError, match="exists"):
        convert(tmp_path / "a", tmp_path / "b", to)
    assert (tmp_path / "b" / "mine").read_text() == "mine"


@pytest.mark.parametrize("to", FORMATS)
def test_a_file_that_is_there_stays(tmp_path: Path, to: str) -> None:
    """Also where a directory would be written, which is said before the work."""
    make_checkpoint(tmp_path / "a", {"x": torch.ones(3)})
    (tmp_path / "b").write_text("mine")
    with pytest.raises(ConversionError, match="exists"):
        convert(tmp_path / "a", tmp_path / "b", to)
    assert (tmp_path / "b").read_text() == "mine"


def test_objects_that_hold_tensors_do_not_become_a_torch_file(tmp_path: Path) -> None:
    """Their elements would be zeros there: the error names the key, and nothing is written."""
    pair = {"x": torch.ones(3), "pair": (1, [torch.ones(2)]), "plain": (1, 2)}
    with TensorizerStorageWriter(tmp_path / "a") as writer:
        dcp.save(pair, storage_writer=writer)
    with pytest.raises(ConversionError, match=r"'pair' .*is a tuple with tensors in it.*leave it out"):
        convert(tmp_path / "a", tmp_path / "b", "torch")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    convert(tmp_path / "a", tmp_path / "b", "torch", options=Options(select=("x", "plain")))
    assert torch.load(tmp_path / "b")["plain"] == (1, 2)


@pytest.mark.parametrize("kept", [0, 100])
def test_a_torch_checkpoint_that_is_cut_off(tmp_path: Path, kept: int) -> None:
    """The error names key and file."""
    dcp.save({"x": torch.ones(3000)}, checkpoint_id=tmp_path / "a")
    (path,) = (tmp_path / "a").glob("*.distcp")
    os.truncate(path, kept)
    with pytest.raises(CheckpointError, match=rf"{path.name} .*'x'"):
        convert(tmp_path / "a", tmp_path / "b", "safetensors")


@pytest.mark.parametrize("to", FORMATS)
def test_urls(tmp_path: Path, to: str) -> None:
    """From any storage to any storage; a conversion that fails leaves nothing there either."""
    state = {"x": filled(torch.float32, (50, 30)), "y": filled(torch.int64, (7,))}
    make_checkpoint(tmp_path / "a", state)
    memory = fsspec.filesystem("memory")
    try:
        convert(tmp_path / "a", f"memory://converted/{to}", to)
        convert(f"memory://converted/{to}", "memory://converted/back", "dcp_tensorizer")
        found = tensors_of("memory://converted/back")
        assert all(same(found[key], tensor) for key, tensor in state.items())
        with pytest.raises(ConversionError, match="exists"):
            convert(tmp_path / "a", f"memory://converted/{to}", to)
        (path,) = (tmp_path / "a").glob("*.tensors")
        path.write_bytes(path.read_bytes()[:-200])
        with pytest.raises(ReadError):
            convert(tmp_path / "a", "memory://converted/failed", to)
        assert not memory.find("/converted/failed")
    finally:
        memory.rm("/converted", recursive=True)


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    """It is told of tensor bytes, and never runs backwards."""
    make_checkpoint(tmp_path / "a", {"x": filled(torch.float32, (50, 30)), "y": torch.ones(7)}, {"o": 1})
    seen: list[tuple[int, int]] = []
    convert(tmp_path / "a", tmp_path / "b", "dcp_tensorizer", on_progress=lambda *now: seen.append(now))
    assert seen[-1] == (1507 * 4, 1507 * 4)
    assert seen == sorted(seen)


def test_ranks_that_saved_for_themselves_are_put_together(tmp_path: Path) -> None:
    """Each part has its own metadata; of what several have, the first rank's is taken."""
    make_checkpoint(tmp_path / "a", {"x": torch.zeros(3), "only0": torch.ones(1)}, rank=0)
    make_checkpoint(tmp_path / "a", {"x": torch.ones(3), "only1": torch.ones(2)}, rank=1)
    convert(tmp_path / "a", tmp_path / "b.pt", "torch")
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    assert {key: value.tolist() for key, value in found.items()} == {"x": [0, 0, 0], "only0": [1], "only1": [1, 1]}


def test_a_torch_file_that_holds_no_state_dict(tmp_path: Path) -> None:
    """It is said what it holds."""
    stream = io.BytesIO()
    torch.save([1, 2], stream)
    (tmp_path / "a.pt").write_bytes(stream.getvalue())
    with pytest.raises(ConversionError, match="list"):
        convert(tmp_path / "a.pt", tmp_path / "b", "dcp_tensorizer")


@pytest.mark.parametrize("lost", ["__0_*.tensors", "__1.metadata", "__2.metadata"])
def test_ranks_that_lost_their_metadata_are_missed(tmp_path: Path, lost: str) -> None:
    """In the middle, or the last one while its data is there; what is lost else shows when it is read."""
    for rank in range(3):
        make_checkpoint(tmp_path / "a", {f"x{rank}": torch.ones(3)}, rank=rank)
    for path in (tmp_path / "a").glob(lost):
        path.unlink()
    words = r"lacks __\d.metadata, the metadata of rank \d" if "metadata" in lost else "__0"
    with pytest.raises(CheckpointError, match=words):
        convert(tmp_path / "a", tmp_path / "b", "torch")


def test_a_conversion_under_way_is_not_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its directory is claimed, as a save's is, until it has its name."""
    make_checkpoint(tmp_path / "a", {"x": torch.ones(3)})
    kept = []

    def collecting(*arguments: Any, **committing: Any) -> set[str]:
        kept.extend(collect(removal).kept for removal in plan_collection(find(open_storage(tmp_path)), None, None))
        return commit(*arguments, **committing)

    monkeypatch.setattr(targets, "commit", collecting)
    convert(tmp_path / "a", tmp_path / "b", "dcp_tensorizer")
    assert kept == ["a save is under way there"]
    assert same(tensors_of(tmp_path / "b")["x"], torch.ones(3))
    assert find(open_storage(tmp_path / "b"))[0].state == "committed"


@pytest.mark.parametrize("how", ["compressed", "big-endian"])
def test_torch_files_that_do_not_hold_the_elements_as_they_are(tmp_path: Path, how: str) -> None:
    """An archive that somebody compressed, or a machine with the other byte order wrote, is no source."""
    torch.save({"x": filled(torch.float32, (1000,))}, tmp_path / "stock.pt")
    form = zipfile.ZIP_DEFLATED if how == "compressed" else zipfile.ZIP_STORED
    with zipfile.ZipFile(tmp_path / "stock.pt") as stock, zipfile.ZipFile(tmp_path / "a.pt", "w", form) as out:
        for name in stock.namelist():
            out.writestr(name, b"big" if name.endswith("byteorder") and how == "big-endian" else stock.read(name))
    with pytest.raises(ConversionError, match=rf"a\.pt is .*{how}"):
        convert(tmp_path / "a.pt", tmp_path / "b", "safetensors")
    assert not (tmp_path / "b").exists()


def test_keys_that_are_no_strings(tmp_path: Path) -> None:
    """An optimizer's state is found again in a torch file; DCP's formats, which have only strings, refuse it."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"optimizer": optimizer.state_dict(), None: {1.5: torch.ones(1)}}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.pt", "torch")
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    assert str(found) == str(torch.load(tmp_path / "a.pt", weights_only=True))
    convert(tmp_path / "a.pt", tmp_path / "c.pt", "torch", options=Options(("optimizer*",), "optimizer."))
    assert str(torch.load(tmp_path / "c.pt", weights_only=True)) == str(optimizer.state_dict())
    convert(tmp_path / "a.pt", tmp_path / "d.pt", "torch", options=Options(("optimizer.state.*",), "optimizer.state."))
    assert list(torch.load(tmp_path / "d.pt", weights_only=True)) == [0, 1]
    for to in ("dcp", "dcp_tensorizer"):
        with pytest.raises(ConversionError, match=r"'optimizer\.state\.0\.step' is below 0 in a dict"):
            convert(tmp_path / "a.pt", tmp_path / "e", to)
    convert(tmp_path / "a.pt", tmp_path / "e.safetensors", "safetensors", options=Options(("*exp_avg",)))
    assert "optimizer.state.1.exp_avg" in tensors_of(tmp_path / "e.safetensors")


def test_torch_files_have_right_checksums(tmp_path: Path) -> None:
    """Whoever reads the archive with a zip library finds it whole, and nothing in it tells where it was made."""
    state = {"x": filled(torch.float32, (50, 30)), "y": filled(torch.int64, (7,)), "none": torch.empty(0)}
    make_checkpoint(tmp_path / "a", state, {"n": 5})
    for name in ("b.pt", "c.pt"):
        convert(tmp_path / "a", tmp_path / name, "torch")
    with zipfile.ZipFile(tmp_path / "b.pt") as archive:
        assert archive.testzip() is None
        assert {name.split("/")[0] for name in archive.namelist()} == {"archive"}
    assert (tmp_path / "b.pt").read_bytes() == (tmp_path / "c.pt").read_bytes()


@pytest.mark.parametrize("to", ["torch", "dcp", "dcp_tensorizer"])
def test_a_key_that_would_hold_others(tmp_path: Path, to: str) -> None:
    """After a prefix is gone, a tensor cannot take the place of a dict."""
    torch.save({"model": {"x": torch.ones(2)}, "x": {"y": torch.ones(1)}}, tmp_path / "a.pt")
    with pytest.raises(ConversionError, match="'x' cannot be a value, and hold"):
        convert(tmp_path / "a.pt", tmp_path / "b", to, options=Options(strip_prefix="model."))
    torch.save({"m": {"a": {"x": torch.ones(2)}}, "a": [torch.ones(1)]}, tmp_path / "c.pt")
    with pytest.raises(ConversionError, match=r"'a\.0' would be in a dict"):
        convert(tmp_path / "c.pt", tmp_path / "b", to, options=Options(strip_prefix="m."))
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_a_part_of_a_list(tmp_path: Path, to: str) -> None:
    """Its other elements would be missing, or it would be taken for a list of another kind."""
    torch.save({"groups": [{"w": torch.ones(2)}, {"w": torch.ones(2)}], "l": [5, torch.ones(1)]}, tmp_path / "a.pt")
    for pattern in ("groups.1.*", "l.0"):
        with pytest.raises(ConversionError, match="belongs to a list of which not all"):
            convert(tmp_path / "a.pt", tmp_path / "b", to, options=Options(select=[pattern]))
    convert(tmp_path / "a.pt", tmp_path / "b", to, options=Options(select=["groups.*"]))
    assert tensors_of(tmp_path / "b").keys() == {"groups.0.w", "groups.1.w"}


def test_of_several_ranks_values_of_other_shapes_the_first_is_taken(tmp_path: Path) -> None:
    """Each rank has its own by the same key: they are no chunks of one tensor."""
    make_checkpoint(tmp_path / "a", {"x": torch.zeros(3)}, rank=0)
    make_checkpoint(tmp_path / "a", {"x": torch.ones(5)}, rank=1)
    assert tensors_of(tmp_path / "a")["x"].tolist() == [0, 0, 0]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("form", ["dcp", "dcp_tensorizer"])
def test_chunks_that_overlap_are_no_tensor(tmp_path: Path, form: str) -> None:
    """They have as many elements as it, and leave a gap."""
    regions = [Region((0,), (2,)), Region((1,), (2,))]
    if form == "dcp_tensorizer":
        make_checkpoint(tmp_path / "a", {"x": torch.ones(4)}, None, {"x": regions})
    else:
        dcp.save({"x": torch.ones(4)}, checkpoint_id=tmp_path / "a", no_dist=True)
        metadata = pickle.loads((tmp_path / "a" / ".metadata").read_bytes())
        (place,) = metadata.storage_data.values()
        entry = metadata.state_dict_metadata["x"]
        entry.chunks[:] = [ChunkStorageMetadata(torch.Size(b.start), torch.Size(b.size)) for b in regions]
        metadata.storage_data = {MetadataIndex("x", torch.Size(region.start)): place for region in regions}
        (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(MetadataError, match="'x' do not make up its 4 elements"):
        open_checkpoint(tmp_path / "a", {})


def test_views_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many blocks there are of a tensor whose elements do not lie in order; then it is let go."""
    tensor = filled(torch.int32, (100, 100)).t()
    torch.save({"x": tensor, "y": torch.ones(2, 3).t()}, tmp_path / "a.pt")
    reads = []
    fetch = chunk_reader.fetch
    monkeypatch.setattr(
        chunk_reader, "fetch", lambda storage, parts, **how: [reads.append(1), fetch(storage, parts, **how)]
    )
    monkeypatch.setattr(safetensors, "blocks_of", lambda stored, n: blocks_of(stored, 1000))
    convert(tmp_path / "a.pt", tmp_path / "b.safetensors", "safetensors")
    assert len(reads) == 2
    assert chunk_reader.STRIDED.is_empty
    assert same(tensors_of(tmp_path / "b.safetensors")["x"], tensor.contiguous())


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("by", ["a block at a time", "whole"])
def test_tensorizer_files_are_verified(tmp_path: Path, to: str, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the CRC-32 in each tensor's header, however it is read."""
    if by == "a block at a time":
        monkeypatch.setattr(safetensors, "blocks_of", lambda stored, n: blocks_of(stored, 1000))
        monkeypatch.setattr(torch_file, "blocks_of", lambda stored, n: blocks_of(stored, 1000))
    state = {"good": filled(torch.bfloat16, (50, 40)), "bad": filled(torch.float32, (50, 40)), "none": torch.ones(0)}
    serializer = TensorSerializer(tmp_path / "a")
    serializer.write_state_dict(state)
    serializer.close()
    convert(tmp_path / "a", tmp_path / "b", to)
    assert all(same(found, state[key]) for key, found in tensors_of(tmp_path / "b").items())
    content = bytearray((tmp_path / "a").read_bytes())
    content[content.index(raw(state["bad"])) + 4001] ^= 1
    (tmp_path / "c").write_bytes(content)
    with pytest.raises(ChecksumMismatch, match="'bad' is damaged"):
        convert(tmp_path / "c", tmp_path / "d", to)
    assert not (tmp_path / "d").exists()
    convert(tmp_path / "c", tmp_path / "d", to, options=Options(select=["good"]))


def test_tensorizer_files_are_verified_in_any_order(tmp_path: Path) -> None:
    """Columns, or blocks from the end: then all of the tensor is looked at first."""
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


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_lengths_that_no_file_has(tmp_path: Path) -> None:
    """A damaged head does not make anybody ask for memory."""
    make_checkpoint(tmp_path / "a", {"x": torch.ones(3)})
    convert(tmp_path / "a", tmp_path / "b", "tensorizer")
    content = bytearray((tmp_path / "b").read_bytes())
    content[71] ^= 1  # in the length of the index
    (tmp_path / "b").write_bytes(content)
    with pytest.raises(ConversionError, match="its index would have"):
        convert(tmp_path / "b", tmp_path / "c", "torch")
    dcp.save({"o": 5}, checkpoint_id=tmp_path / "d", no_dist=True)
    for length in (1 << 60, -1, "x"):
        metadata = pickle.loads((tmp_path / "d" / ".metadata").read_bytes())
        for info in metadata.storage_data.values():
            info.length = length
        (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(MetadataError, match="'o'"):
            convert(tmp_path / "d", tmp_path / "c", "dcp_tensorizer")


def test_the_first_rule_for_a_split_counts(tmp_path: Path) -> None:
    """Also for what can be split at all: a later one for the same key has no say."""
    make_checkpoint(tmp_path / "a", {"l.weight": filled(torch.float32, (4, 3)), "l.bias": filled(torch.float32, (4,))})
    rules = {"*.bias": 0, "l.*": 0, "*": 1}
    convert(tmp_path / "a", tmp_path / "b", "tensorizer", options=Options(tensor_parallel=2, split=rules))
    found = [tensors_of(tmp_path / "b" / f"model-rank-00{rank}.tensors") for rank in (0, 1)]
    for key, tensor in tensors_of(tmp_path / "a").items():
        assert same(torch.cat([part[key] for part in found]), tensor)


def test_a_destination_that_is_a_link(tmp_path: Path) -> None:
    """What it leads to is written, and it stays."""
    make_checkpoint(tmp_path / "a", {"x": torch.ones(3)})
    (tmp_path / "disk").mkdir()
    (tmp_path / "b").symlink_to("disk")
    (tmp_path / "c").symlink_to("disk/new")
    for name in "bc":
        if name == "c":
            (tmp_path / "disk" / "model.safetensors").unlink()
        convert(tmp_path / "a", tmp_path / name, "safetensors")
        assert (tmp_path / name).is_symlink()
        assert same(tensors_of(tmp_path / name)["x"], torch.ones(3))
    assert (tmp_path / "disk" / "new" / "model.safetensors").exists()


def test_a_destination_that_is_a_mount_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can take its place, which is said before the work."""
    make_checkpoint(tmp_path / "a", {"x": torch.ones(3)})
    (tmp_path / "b").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "b")
    with pytest.raises(ConversionError, match="is a mount point"):
        convert(tmp_path / "a", tmp_path / "b", "safetensors")
    assert list((tmp_path / "b").iterdir()) == []


@pytest.mark.parametrize("to", ["dcp_tensorizer", "safetensors", "dcp"])
def test_a_failure_leaves_what_others_put_there(tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a directory off local disks, where a result cannot be written elsewhere first."""
    make_checkpoint(tmp_path / "a", {"x": torch.ones(300), "y": filled(torch.float32, (300,))})
    (path,) = (tmp_path / "a").glob("*.tensors")
    path.write_bytes(path.read_bytes()[:-200])
    memory = fsspec.filesystem("memory")
    entered = StreamStorage.make_directory

    def in_background(storage: StreamStorage) -> None:
        entered(storage)
        memory.pipe_file("/converted/b/.metadata", b"of another job")
        memory.pipe_file("/converted/b/notes.txt", b"mine")

    monkeypatch.setattr(StreamStorage, "make_directory", in_background)
    try:
        with pytest.raises(ReadError):
            convert(tmp_path / "a", "memory://converted/b", to)
        assert sorted(memory.find("/converted")) == ["/converted/b/.metadata", "/converted/b/notes.txt"]
    finally:
        memory.rm("/converted", recursive=True)
