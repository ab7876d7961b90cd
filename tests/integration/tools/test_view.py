"""Views of checkpoints of several ranks: merged values, and missing parts."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tensorizer import DecryptionParams, EncryptionParams
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from dcp_tensorizer import CheckpointError, ConversionError, MetadataError, tools
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._tensor_file.encryption import encryption_cipher
from dcp_tensorizer._tensor_file.regions import Region
from dcp_tensorizer._trust.objects import load_object
from dcp_tensorizer.tools import ConvertOptions, convert
from dcp_tensorizer.tools._formats.registry import FORMATS, open_checkpoint
from dcp_tensorizer.tools._view import read_parts, unlock_parts, view_checkpoint

from ...lab.checkpoints import make_checkpoint, tensors_of


def test_ranks_that_saved_for_themselves_are_put_together(tmp_path: Path) -> None:
    """Checkpoints of ranks that saved independently are merged: an equal value of all ranks appears once."""
    make_checkpoint(tmp_path / "a", {"x": torch.zeros(3), "only0": torch.ones(1)}, {"step": 7}, rank=0)
    make_checkpoint(tmp_path / "a", {"x": torch.zeros(3), "only1": torch.ones(2)}, {"step": 7}, rank=1)
    convert(tmp_path / "a", tmp_path / "b.pt", "torch")
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    assert found.pop("step") == 7
    assert {key: value.tolist() for key, value in found.items()} == {"x": [0, 0, 0], "only0": [1], "only1": [1, 1]}


def make_diverging(path: Path, second: float, rng: int) -> Path:
    """Makes a checkpoint of two ranks that saved independently, with these values of the second rank."""
    for rank, (value, generator) in enumerate([(0.0, 0), (second, rng)]):
        tensors = {"m.w": torch.full((3,), value), "same": torch.ones(2)}
        make_checkpoint(path, tensors, {"rng": generator}, rank=rank)
    return path


@pytest.mark.parametrize("to", FORMATS)
def test_what_ranks_have_differently_is_there_for_each(tmp_path: Path, to: str) -> None:
    """If the values of a key differ by rank, each appears under a key with its rank, in every format."""
    make_diverging(tmp_path / "a", 1.0, 5)
    options = ConvertOptions(exclude=["*rng"]) if to in ("tensorizer", "safetensors") else ConvertOptions()
    convert(tmp_path / "a", tmp_path / "b", to, options=options)
    found = {key: tensor.tolist() for key, tensor in tensors_of(tmp_path / "b").items()}
    assert found == {"rank0.m.w": [0.0] * 3, "rank1.m.w": [1.0] * 3, "same": [1.0, 1.0]}
    objects = open_checkpoint(tmp_path / "b", {}).objects
    values = {key: load_object(stored.read()) for key, stored in objects.items()}
    assert values == ({} if options.exclude else {"rank0.rng": 0, "rank1.rng": 5})


def test_a_difference_of_a_later_rank_is_seen(tmp_path: Path) -> None:
    """`diff` compares rank by rank, and `inspect` shows the values of all ranks."""
    before, after = make_diverging(tmp_path / "a", 1.0, 5), make_diverging(tmp_path / "b", 2.0, 6)
    found = tools.diff(before, after)
    assert [(change.key, change.before, change.after) for change in found.changed] == [
        ("rank1.m.w", "", ""),
        ("rank1.rng", "5", "6"),
    ]
    assert found.same == 3
    assert [tensor.key for tensor in tools.inspect(before).tensors] == ["same", "rank0.m.w", "rank1.m.w"]


def test_a_name_that_is_taken_is_not_given_to_a_rank(tmp_path: Path) -> None:
    """A key with a rank in its name is made unique if the state dict has a key of that name."""
    for rank in range(2):
        make_checkpoint(tmp_path / "a", {"x": torch.full((1,), float(rank)), "rank1.x": torch.ones(1) * 9}, rank=rank)
    found = {key: tensor.tolist() for key, tensor in tensors_of(tmp_path / "a").items()}
    assert found == {"rank1.x": [9.0], "rank0.x": [0.0], "rank1.x_": [1.0]}


def test_parts_of_a_tensor_that_differ_are_an_error(tmp_path: Path) -> None:
    """Different parts of a tensor on several ranks are an error that names the key, unless the key is excluded."""
    for rank, start in enumerate([0, 0, 2]):
        chunks = {"w": [Region((start,), (2,))]}
        tensors = {"w": torch.full((4,), float(rank)), "v": torch.ones(1)}
        make_checkpoint(tmp_path / "a", tensors, None, chunks, rank=rank)
    with pytest.raises(
        ConversionError, match=r"ranks 0, 1, 2 each saved all or part of 'w' .* the data does not match"
    ):
        convert(tmp_path / "a", tmp_path / "b", "torch")
    convert(tmp_path / "a", tmp_path / "b", "torch", options=ConvertOptions(exclude=["w"]))
    assert tensors_of(tmp_path / "b").keys() == {"v"}


@pytest.mark.parametrize("second", [1.0, 0.0])
def test_encrypted_values_are_compared_as_they_were(tmp_path: Path, second: float) -> None:
    """Encrypted values of ranks are compared decrypted, because equal values have different encrypted bytes."""
    params = EncryptionParams.from_string("walrus", opslimit=1, memlimit=8192)
    for rank, value in enumerate([0.0, second]):
        make_checkpoint(tmp_path, {"x": torch.full((3,), value)}, None, None, encryption_cipher(params), rank=rank)
    view = open_checkpoint(tmp_path, {}, encryption=DecryptionParams.from_string("walrus"))
    assert set(view.tensors) == ({"rank0.x", "rank1.x"} if second else {"x"})


@pytest.mark.parametrize("lost", ["__0_*.tensors", "__1.metadata", "__2.metadata"])
def test_ranks_that_lost_their_metadata_are_missed(tmp_path: Path, lost: str) -> None:
    """Lost metadata or data of any rank is an error that names the missing file."""
    for rank in range(3):
        make_checkpoint(tmp_path / "a", {f"x{rank}": torch.ones(3)}, rank=rank)
    for path in (tmp_path / "a").glob(lost):
        path.unlink()
    words = r"lacks __\d.metadata, the metadata of rank \d" if "metadata" in lost else "__0"
    with pytest.raises(CheckpointError, match=words):
        convert(tmp_path / "a", tmp_path / "b", "torch")


def test_values_of_other_shapes_are_each_rank_s_own(tmp_path: Path) -> None:
    """Values of one key with different shapes on two ranks are not chunks of one tensor."""
    make_checkpoint(tmp_path / "a", {"x": torch.zeros(3)}, rank=0)
    make_checkpoint(tmp_path / "a", {"x": torch.ones(5)}, rank=1)
    found = tensors_of(tmp_path / "a")
    assert {key: tensor.tolist() for key, tensor in found.items()} == {"rank0.x": [0.0] * 3, "rank1.x": [1.0] * 5}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("form", ["dcp", "dcp_tensorizer"])
def test_chunks_that_overlap_are_no_tensor(tmp_path: Path, form: str) -> None:
    """Chunks that overlap and leave a gap are an error, even if they have as many elements as the tensor."""
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


def test_a_passphrase_makes_one_key_for_all_ranks(tmp_path: Path) -> None:
    """The slow derivation of a key from a passphrase runs once for all ranks."""
    params = EncryptionParams.from_string("walrus", opslimit=1, memlimit=8192)
    for rank in range(3):
        make_checkpoint(tmp_path, {f"x{rank}": torch.ones(3)}, None, None, encryption_cipher(params), rank=rank)
    storage = open_storage(tmp_path)
    ciphers = unlock_parts(storage, read_parts(storage), DecryptionParams.from_string("walrus"))
    first, *others = ciphers.values()
    assert first is not None
    assert [cipher is first for cipher in others] == [True, True]


def test_a_chunk_without_a_location_is_named(tmp_path: Path) -> None:
    """A chunk without a location is an error with its key and offset."""
    make_checkpoint(tmp_path, {"x": torch.ones(3)})
    storage = open_storage(tmp_path)
    parts = read_parts(storage)
    metadata = parts[None]
    del metadata.storage_data["items"]["x", (0,)]
    with pytest.raises(MetadataError, match=r"has no data for 'x' at offset \(0,\)"):
        view_checkpoint(storage, parts)
