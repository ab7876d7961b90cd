"""Checkpoints of several ranks: what they hold together, and what is missing."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tensorizer import DecryptionParams, EncryptionParams
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from dcp_tensorizer import (
    CheckpointError,
    MetadataError,
)
from dcp_tensorizer._format.chunks import Region
from dcp_tensorizer._format.encryption import encryption_cipher
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._tools.checkpoint_view import read_parts, unlock_parts
from dcp_tensorizer._tools.formats.registry import open_checkpoint
from dcp_tensorizer.convert import convert

from ...checkpoints import make_checkpoint, tensors_of


def test_ranks_that_saved_for_themselves_are_put_together(tmp_path: Path) -> None:
    """Each part has its own metadata; of what several have, the first rank's is taken."""
    make_checkpoint(tmp_path / "a", {"x": torch.zeros(3), "only0": torch.ones(1)}, rank=0)
    make_checkpoint(tmp_path / "a", {"x": torch.ones(3), "only1": torch.ones(2)}, rank=1)
    convert(tmp_path / "a", tmp_path / "b.pt", "torch")
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    assert {key: value.tolist() for key, value in found.items()} == {"x": [0, 0, 0], "only0": [1], "only1": [1, 1]}


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


def test_a_passphrase_makes_one_key_for_all_ranks(tmp_path: Path) -> None:
    """Where each rank saved for itself: to make it takes long on purpose."""
    params = EncryptionParams.from_string("walrus", opslimit=1, memlimit=8192)
    for rank in range(3):
        make_checkpoint(tmp_path, {f"x{rank}": torch.ones(3)}, None, None, encryption_cipher(params), rank=rank)
    storage = open_storage(tmp_path)
    ciphers = unlock_parts(storage, read_parts(storage), DecryptionParams.from_string("walrus"))
    assert ciphers.keys() == {0, 1, 2}
    assert ciphers[0] is not None
    assert all(cipher is ciphers[0] for cipher in ciphers.values())
