"""Damaged and hostile checkpoints of torch's DCP."""

from __future__ import annotations

import io
import os
import pickle
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_tensorizer import ConversionError, MetadataError, ReadError, open_reader
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer.tools import ConvertOptions, convert, inspect, verify
from dcp_tensorizer.tools._inspect import ChunkInfo

from ....lab.checkpoints import tensors_of
from ....lab.servers import SftpServer


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", ""])
def test_metadata_that_leads_out_of_its_directory(tmp_path: Path, name: str) -> None:
    """A file name that leads out of the checkpoint's directory is refused."""
    dcp.save({"x": torch.ones(3), "o": 5}, checkpoint_id=tmp_path / "a", no_dist=True)
    metadata = pickle.loads((tmp_path / "a" / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = name
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(MetadataError, match=r"not in the metadata's directory"):
        convert(tmp_path / "a", tmp_path / "b", "dcp_tensorizer")


@pytest.mark.parametrize("to", ["safetensors", "dcp_tensorizer"])
@pytest.mark.parametrize("kept", [0, 100])
def test_a_torch_checkpoint_that_is_cut_off(tmp_path: Path, kept: int, to: str) -> None:
    """A truncated data file is a ReadError with key, file and an EOFError as its cause."""
    dcp.save({"x": torch.ones(3000)}, checkpoint_id=tmp_path / "a")
    (path,) = (tmp_path / "a").glob("*.distcp")
    os.truncate(path, kept)
    with pytest.raises(ReadError, match=rf"{path.name} .*'x'") as caught:
        convert(tmp_path / "a", tmp_path / "b", to)
    assert isinstance(caught.value.__cause__, EOFError)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("length", [1 << 60, -1, "x"])
def test_lengths_that_no_file_has(tmp_path: Path, length: Any) -> None:
    """An impossible length in the metadata is refused without allocating memory."""
    dcp.save({"o": 5}, checkpoint_id=tmp_path / "a", no_dist=True)
    metadata = pickle.loads((tmp_path / "a" / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.length = length
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(MetadataError, match="'o'"):
        convert(tmp_path / "a", tmp_path / "b", "dcp_tensorizer")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_location_of_each_chunk(tmp_path: Path) -> None:
    """`inspect` shows where the archive of each chunk of torch's DCP is; chunks of lazy views become plain values."""
    state = {"x": torch.ones(3, 2), "lazy": torch.tensor([1 + 2j]).conj(), "none": torch.ones(0)}
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    infos = pickle.loads((tmp_path / "a" / ".metadata").read_bytes()).storage_data
    located = {index.fqn: (info.length, None, info.relative_path, info.offset) for index, info in infos.items()}
    found = {tensor.key: tensor.chunks for tensor in inspect(tmp_path / "a").tensors}
    assert found == {
        key: (ChunkInfo((0,) * tensor.dim(), tuple(tensor.shape), *located[key]),) for key, tensor in state.items()
    }
    for key, (chunk,) in found.items():
        data = (tmp_path / "a" / str(chunk.file)).read_bytes()[chunk.file_offset or 0 :][: chunk.nbytes]
        assert torch.equal(torch.load(io.BytesIO(data)), state[key])
    assert verify(tmp_path / "a").items == 3
    convert(tmp_path / "a", tmp_path / "b.pt", "torch")
    assert torch.load(tmp_path / "b.pt")["lazy"].tolist() == [1 - 2j]


@pytest.mark.parametrize("name", ["bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"])
def test_dtypes_that_torch_cannot_plan(tmp_path: Path, name: str) -> None:
    """A dtype that DCP cannot plan is refused by key before anything is written."""
    bits = torch.arange(8, dtype=torch.int16 if name == "bits16" else torch.uint8).view(getattr(torch, name))
    torch.save({"bad": bits, "w": torch.arange(3.0)}, tmp_path / "a.pt")
    with pytest.raises(
        ConversionError, match=rf"'bad' has dtype torch\.{name}, which torch's DCP cannot plan. Leave it out"
    ):
        convert(tmp_path / "a.pt", tmp_path / "new" / "b", "dcp")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
    convert(tmp_path / "a.pt", tmp_path / "b", "dcp", options=ConvertOptions(exclude=["bad"]))
    assert {key: tensor.tolist() for key, tensor in tensors_of(tmp_path / "b").items()} == {"w": [0, 1, 2]}


@pytest.mark.parametrize("name", ["run#7", "run?7", "run%237 [1]*"])
def test_an_sftp_path_is_literal(tmp_path: Path, sftp: SftpServer, name: str) -> None:
    """torch's format is written to the SFTP path that `convert` is given, whatever characters it contains."""
    url, options = f"sftp://127.0.0.1/{uuid.uuid4().hex}", sftp.options()
    dcp.save({"x": torch.arange(3.0), "o": 5}, checkpoint_id=tmp_path / "a", no_dist=True)
    convert(tmp_path / "a", f"{url}/{name}", "dcp", storage_options=options)
    files, folders = open_storage(url, options).listing()
    assert (files, folders) == ([], [name])
    state = {"x": torch.zeros(3)}
    dcp.load(state, storage_reader=open_reader(f"{url}/{name}", storage_options=options), no_dist=True)
    assert state["x"].tolist() == [0.0, 1.0, 2.0]
