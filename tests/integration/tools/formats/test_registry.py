"""The format of a path is recognised, and paths without a checkpoint are refused by name."""

from __future__ import annotations

import json
import struct
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from dcp_tensorizer import CheckpointError, ConversionError, MetadataError, NotCommitted, ReadError
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer.tools import convert, report

from ....lab.checkpoints import make_checkpoint
from ....lab.servers import S3Server, SftpServer


def header(described: Any) -> bytes:
    text = json.dumps(described).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", ConversionError),
        (b"nothing that anybody knows", ConversionError),
        (b"|TZR|", CheckpointError),
        (b"|TZR|" + bytes(300), MetadataError),
        (b"|TZR|" + struct.pack("<I32sQ8xQQ", 2, b"", 0, 9, 64) + b"\xff" * 64, MetadataError),
        (b"PK\x03\x04" + bytes(100), ReadError),
        (struct.pack("<Q", 1 << 60) + b"{}", CheckpointError),
        (header({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]}}), MetadataError),
        (header({"x": {"dtype": "Q9", "shape": [2], "data_offsets": [0, 8]}}), MetadataError),
        (header({"x": 5}), MetadataError),
        (header({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}), MetadataError),
        (header({"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}) + b"abcde", MetadataError),
        (header({k: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} for k in "xy"}) + b"abcd", MetadataError),
        (header({"x": {"dtype": "U8", "shape": [1] * 200_000, "data_offsets": [0, 1]}}) + b"a", MetadataError),
        (header({"x": {"dtype": "U8", "shape": [-1, -4], "data_offsets": [0, 4]}}) + b"abcd", MetadataError),
        (header({"x": {"dtype": "U8", "shape": [1 << 70, 0], "data_offsets": [0, 0]}}), MetadataError),
        (struct.pack("<Q", 200_000) + b'{"x":' + b"[" * 199_995, MetadataError),
        (header({"\ud800": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]}}) + b"a", MetadataError),
    ],
)
def test_bad_files_are_named(tmp_path: Path, content: bytes, error: type[Exception]) -> None:
    """Any invalid file is a CheckpointError that names it, and nothing is written."""
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(error, match="bad"):
        convert(tmp_path / "bad", tmp_path / "out", "dcp_tensorizer")
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


def test_nothing_there(tmp_path: Path) -> None:
    """A missing path, and a directory without a checkpoint, are NotCommitted."""
    (tmp_path / "folder").mkdir()
    for path in ("nowhere", "folder"):
        with pytest.raises(NotCommitted, match=path):
            convert(tmp_path / path, tmp_path / "out", "torch")


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_directory_above_checkpoints(tmp_path: Path, s3: S3Server, sftp: SftpServer, slash: str) -> None:
    """For a directory above checkpoints, also on servers, the error names the checkpoints."""
    name = uuid.uuid4().hex
    places: dict[str, dict[str, Any]] = {f"memory://{name}": {}, f"s3://{s3.bucket}/{name}": s3.options()}
    for url, options in (places | {f"sftp://127.0.0.1/{name}": sftp.options()}).items():
        make_checkpoint(f"{url}/run/step-1", {"w": torch.ones(3)}, options=options)
        with pytest.raises(
            NotCommitted, match=f"{url}/run holds no checkpoint .* There is a checkpoint below it: step-1"
        ):
            report([f"{url}/run{slash}"], tmp_path / "out", storage_options=options)
        with pytest.raises(NotCommitted, match=rf"{url}/gone does not exist, or holds no checkpoint\.$"):
            report([f"{url}/gone{slash}"], tmp_path / "out", storage_options=options)
        other = open_storage(f"{url}/other", options)
        other.make_directory()
        other.put("notes", b"text that is of no format", sync=True)
        with pytest.raises(NotCommitted, match=f"{url}/other holds no checkpoint .* Name a checkpoint itself: the dir"):
            report([f"{url}/other{slash}"], tmp_path / "out", storage_options=options)
        with pytest.raises(ConversionError, match=f"{url}/other/notes is in none of the formats"):
            report([f"{url}/other/notes"], tmp_path / "out", storage_options=options)


def test_what_ranks_have_saved_by_torch_for_themselves(tmp_path: Path) -> None:
    """A checkpoint of torch's whose ranks saved independently is refused with advice."""
    dcp.save({"w": torch.ones(2)}, storage_writer=FileSystemWriter(tmp_path / "a"), no_dist=True)
    (tmp_path / "a" / ".metadata").rename(tmp_path / "a" / "__0.metadata")
    with pytest.raises(ConversionError, match=r"a is in torch's own format, and each rank has saved by itself"):
        convert(tmp_path / "a", tmp_path / "out", "torch")
