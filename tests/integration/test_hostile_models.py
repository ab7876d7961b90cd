"""Tests of hostile models: each header or index is read, or refused with an error that names the file."""

from __future__ import annotations

import contextlib
import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_tensorizer import CheckpointError, SafetensorsStorageWriter, apply_delta, open_reader, publish, unwrap
from dcp_tensorizer.tools import inspect, verify_versions

from ..lab.models import INDEX

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DEEP = b"[" * 200_000 + b"]" * 200_000
FILE = "a.safetensors"
MAP = b'"weight_map":{"w":"a.safetensors"}'


def header(content: bytes | dict[str, Any], data: bytes = b"", length: int | None = None) -> bytes:
    """Returns a safetensors file."""
    text = json.dumps(content).encode() if isinstance(content, dict) else content
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def one(entry: dict[str, Any], nbytes: int = 8, **notes: Any) -> bytes:
    """Returns a file of one tensor."""
    return header(({"__metadata__": notes} if notes else {}) | {"w": entry}, bytes(nbytes))


GOOD = one(tensor())
READ = {
    "good": GOOD,
    "no elements in huge dimensions": one(tensor([2**62, 0], [0, 0]), 0),
    "a hundred dimensions": one(tensor([1] * 100, [0, 4]), 4),
    "a key with NUL": header({"a\0": tensor()}, bytes(8)),
    "an empty key": header({"": tensor()}, bytes(8)),
    "an empty note of parts": one(tensor(), DCP_SHARDING_INFO=""),
}
REFUSED = {
    "nothing": b"",
    "two bytes": b"\1\2",
    "a header of 2^64 bytes": header(b"{}", length=2**64 - 1),
    "a header of 100 MB": header(b"{}", length=99_999_999),
    "no JSON": header(b"xxxxxxxx"),
    "a key that is no UTF-8": header(b'{"\xff":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
    "a dtype that is no UTF-8": header(b'{"w":{"dtype":"F\xff","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
    "a note that is no UTF-8": header(b'{"__metadata__":{"a":"\xff"}}'),
    "a surrogate": header(b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
    "deep": header(DEEP),
    "deep notes": header(b'{"__metadata__":{"a":' + DEEP + b"}}"),
    "a deep tensor": header(b'{"w":' + DEEP + b"}"),
    "a deep dtype": header(b'{"w":{"dtype":' + DEEP + b"}}"),
    "notes in a list": header({"__metadata__": [1]}),
    "no notes": header({"__metadata__": None}),
    "before the data": one(tensor(offsets=[-8, 0])),
    "overlapping": header({"w": tensor(), "v": tensor(offsets=[4, 12])}, bytes(12)),
    "a gap": header({"w": tensor(), "v": tensor([1], [12, 16])}, bytes(16)),
    "backwards": one(tensor(offsets=[8, 0])),
    "behind the file": one(tensor([200], [0, 800])),
    "a huge shape": one(tensor([2**62, 2**62])),
    "a number of 400 digits": one(tensor([10**400])),
    "a negative shape": one(tensor([-1, -2])),
    "half an element": one(tensor([2.5])),
    "many dimensions": one(tensor([1] * 100_000, [0, 4]), 4),
    "an unknown dtype": one(tensor(dtype="Q7")),
    "too few bytes": one(tensor(dtype="F64")),
    "offsets of parts that are no ints": one(tensor(), DCP_SHARDING_INFO='{"w": {"saved_offsets": [1e99]}}'),
    "deep offsets of parts": one(tensor(), DCP_SHARDING_INFO="[" * 100_000),
    "negative offsets of parts": one(tensor(), DCP_SHARDING_INFO='{"w": {"saved_offsets": [-1]}}'),
    "parts without offsets": one(tensor(), DCP_SHARDING_INFO="{}"),
    "endless parts": one(tensor(), DCP_SHARDING_INFO='{"w": {"saved_offsets": [9223372036854775807]}}'),
    "offsets of parts in a list": one(tensor(), DCP_SHARDING_INFO=[1]),
}
INDICES_READ = {
    "no metadata": b"{" + MAP + b"}",
    "null metadata": b'{"metadata":null,' + MAP + b"}",
    "a number of 50 digits": b'{"metadata":{"total_size":%d},' % 10**50 + MAP + b"}",
    "two maps": b'{"weight_map":{"w":"b.safetensors"},' + MAP + b"}",
    "keys of another program": b'{"metadata":{"version":"x"},' + MAP + b"}",
}
INDICES_REFUSED = {
    "a name that is no UTF-8": b'{"weight_map":{"w":"\xff.safetensors"}}',
    "a key that is no UTF-8": b'{"weight_map":{"\xff":"a.safetensors"}}',
    "deep": DEEP,
    "deep metadata": b'{"metadata":{"x":' + DEEP + b"}," + MAP + b"}",
    "above": b'{"weight_map":{"w":"../x.safetensors"}}',
    "from the root": b'{"weight_map":{"w":"/x.safetensors"}}',
    "hidden": b'{"weight_map":{"w":".a.safetensors"}}',
    "a name with NUL": b'{"weight_map":{"w":"a\\u0000.safetensors"}}',
    "a surrogate": b'{"weight_map":{"w":"\\ud800.safetensors"}}',
    "a long name": b'{"weight_map":{"w":"' + b"a" * 5000 + b'.safetensors"}}',
    "an empty name": b'{"weight_map":{"w":""}}',
    "null": b"null",
    "no map": b"{}",
    "a list for a map": b'{"weight_map":[]}',
    "nothing": b"",
    "a mark of bytes": b"\xef\xbb\xbf{" + MAP + b"}",
    "UTF-16": ("{" + MAP.decode() + "}").encode("utf-16"),
    "a missing file": b'{"weight_map":{"w":"b.safetensors"}}',
}
ONLY_TO_PUBLISH = {  # metadata, which only a publisher reads
    "an endless number": b'{"metadata":{"total_size":1e999},' + MAP + b"}",
    "metadata in a list": b'{"metadata":[1],' + MAP + b"}",
    "metadata that is no UTF-8": b'{"metadata":{"x":"\xff"},' + MAP + b"}",
}


@pytest.fixture(scope="module")
def published() -> Any:
    """Returns a directory with one version of a valid model."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        (model / "model.safetensors").write_bytes(GOOD)
        publish(model, Path(folder) / "published")
        yield Path(folder) / "published"


def metadata_of(path: Path) -> set[str]:
    """Returns the keys that a load finds; raises the load's errors."""
    reader = open_reader(path)
    with contextlib.suppress(CheckpointError):
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, True)
        return set(metadata.state_dict_metadata)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"w": torch.zeros(2)}, storage_reader=open_reader(path))
    raise unwrap(caught.value)


def check(model: Path, published: Path, *, is_read: bool, is_published: bool) -> None:
    """Uses a model in each way."""
    versions = model.parent / "versions"
    with contextlib.nullcontext() if is_read else pytest.raises(CheckpointError, match=str(model)):
        assert metadata_of(model)
    for _ in range(2):
        with contextlib.nullcontext() if is_published else pytest.raises(CheckpointError, match=str(model)):
            publish(model, versions)
    if is_published:
        assert verify_versions(versions).damages == ()
    else:
        assert not list(versions.glob("weight*"))
    for use in (lambda: inspect(model), lambda: apply_delta(model, published)):
        with contextlib.suppress(CheckpointError):
            use()


@pytest.mark.parametrize("name", [*READ, *REFUSED])
def test_headers(tmp_path: Path, published: Path, name: str) -> None:
    """Each header is tested in the only file of a model, and in one that an index names."""
    for file in ("model.safetensors", FILE):
        model = tmp_path / file / "model"
        model.mkdir(parents=True)
        (model / file).write_bytes((READ | REFUSED)[name])
        if file == FILE:
            key = {"a key with NUL": "a\0", "an empty key": ""}.get(name, "w")
            (model / INDEX).write_text(json.dumps({"weight_map": {key: FILE}}))
        is_published = (
            name in READ or name.startswith(("an unknown dtype", "too few bytes", "a huge shape")) or "parts" in name
        )
        check(model, published, is_read=name in READ, is_published=is_published)


@pytest.mark.parametrize("name", [*INDICES_READ, *INDICES_REFUSED, *ONLY_TO_PUBLISH])
def test_indices(tmp_path: Path, published: Path, name: str) -> None:
    """Each index is tested beside a valid file; a model is also saved over each of them."""
    model = tmp_path / "model"
    model.mkdir()
    (model / FILE).write_bytes(GOOD)
    (model / INDEX).write_bytes((INDICES_READ | INDICES_REFUSED | ONLY_TO_PUBLISH)[name])
    is_read = name not in INDICES_REFUSED
    check(model, published, is_read=is_read, is_published=is_read and name not in ONLY_TO_PUBLISH)
    with contextlib.suppress(CheckpointException), SafetensorsStorageWriter(model, overwrite=True) as writer:
        dcp.save({"w": torch.ones(2)}, storage_writer=writer)
