"""Hostile files are refused by name, in time and memory in proportion to their size."""

from __future__ import annotations

import dataclasses
import io
import pickle
import re
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from dcp_tensorizer import (
    CheckpointError,
    ConversionError,
    MetadataError,
    ReadError,
    TensorizerStorageWriter,
    UntrustedObject,
)
from dcp_tensorizer.tools import ConvertOptions, convert
from dcp_tensorizer.tools._formats import torch_file
from dcp_tensorizer.tools._formats.registry import open_checkpoint

from ....lab.checkpoints import make_checkpoint
from ....unit.trust.test_inert import doubled


def archive(pickled: bytes, **records: bytes) -> bytes:
    """Returns a ``torch.save`` file with this pickle and these records."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as made:
        for name, content in {"data.pkl": pickled, "byteorder": b"little", "version": b"3\n", **records}.items():
            made.writestr(f"archive/{name}", content)
    return stream.getvalue()


def repickled(change: Callable[[bytes], bytes], **records: bytes) -> bytes:
    """Returns a ``torch.save`` file of a tensor of 4 bytes, with a changed pickle, and with other records."""
    stream = io.BytesIO()
    torch.save({"x": torch.zeros(4, dtype=torch.uint8)}, stream)
    with zipfile.ZipFile(stream) as stock:
        pickled = next(stock.read(name) for name in stock.namelist() if name.endswith("data.pkl"))
    return archive(change(pickled), **{"data/0": bytes(4), **records})


def bomb() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("archive/data.pkl", pickle.dumps({}, 2))
        made.writestr("archive/byteorder", bytes(300 << 20))
    return stream.getvalue()


def lists_of_lists(levels: int) -> bytes:
    """Returns the pickle of a list that holds the previous list twice, at each level."""
    value: Any = [1]
    for _ in range(levels):
        value = [value, value]
    return pickle.dumps({"x": value}, 2)


def list_in_itself() -> bytes:
    value: list[Any] = []
    value.append(value)
    return pickle.dumps({"x": value}, 2)


def deep(levels: int) -> bytes:
    return b"\x80\x02}X\x01\x00\x00\x00x" + b"]" * levels + b"a" * (levels - 1) + b"s."


FILES = {
    "bomb": bomb(),
    "keys": archive(doubled(60, b"}PAIRSK\x01s")),
    "dimensions": archive(b"\x80\x02ctorch\nSize\n(" + b"K\x01" * 200_000 + b"t\x85R."),
    "memory": archive(b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R."),
    "lists": archive(lists_of_lists(60)),
    "itself": archive(list_in_itself()),
    "deep": archive(deep(50_000)),
    "elements": repickled(lambda pickled: pickled.replace(b"K\x04tq", b"K\x05tq").replace(b"K\x04\x85", b"K\x05\x85")),
    "old": pickle.dumps({}, 2),
}


@pytest.mark.parametrize("name", FILES)
def test_torch_files(tmp_path: Path, name: str) -> None:
    """Zip bombs, endless keys and lists, and impossible sizes are refused in little memory."""
    assert b"K\x05" in FILES["elements"]
    (tmp_path / "bad.pt").write_bytes(FILES[name])
    started = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"bad\.pt"):
            convert(tmp_path / "bad.pt", tmp_path / "out", "dcp_tensorizer")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 << 20
    assert time.monotonic() - started < 60
    assert [path.name for path in tmp_path.iterdir()] == ["bad.pt"]


OBJECTS = {
    "device": (
        repickled(lambda pickled: pickled.replace(b"\x03\0\0\0cpu", b"\x09\0\0\0cuda:1000")),
        ReadError,
        "cannot be loaded: RuntimeError: ",
    ),
    "elements": (FILES["elements"], ReadError, "cannot be loaded: RuntimeError: "),
    "byte order": (
        repickled(lambda pickled: pickled, byteorder=b"weird"),
        ReadError,
        "cannot be loaded: ValueError: Unknown endianness type",
    ),
    "deep": (FILES["deep"], ConversionError, "cannot be pickled, and so cannot be converted: RecursionError: "),
}


class _Replaced(DefaultSavePlanner):
    """Saves ``content`` as each object."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self._content = content

    def transform_object(self, write_item: WriteItem, value: Any) -> Any:
        is_object = write_item.type is WriteItemType.BYTE_IO
        return io.BytesIO(self._content) if is_object else super().transform_object(write_item, value)


@pytest.mark.parametrize("stock", [False, True], ids=["own", "torch"])
@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_objects_of_checkpoints(tmp_path: Path, name: str, stock: bool) -> None:
    """An object that torch cannot load, or cannot pickle again, is refused by key, and leaves no file."""
    content, error, words = OBJECTS[name]
    with (
        nullcontext(dcp.FileSystemWriter(tmp_path / "a")) if stock else TensorizerStorageWriter(tmp_path / "a") as made
    ):
        dcp.save({"w": torch.ones(2), "x": 1}, storage_writer=made, planner=_Replaced(content), no_dist=True)
    with pytest.raises(error, match=f"^'x' in {re.escape(str(tmp_path / 'a'))} {words}"):
        convert(tmp_path / "a", tmp_path / "b.pt", "torch")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    convert(tmp_path / "a", tmp_path / "b.pt", "torch", options=ConvertOptions(exclude=("x",)))
    assert torch.equal(torch.load(tmp_path / "b.pt")["w"], torch.ones(2))


METADATA = {
    "slots": (
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x07\x00\x00\x00version"
        b"X\x05\x00\x00\x00wrongs\x86b.",
        MetadataError,
    ),
    "function": (b"\x80\x02ctorch.serialization\n_get_layout\nN}X\x01\x00\x00\x00xK\x01s\x86b.", MetadataError),
    "keys": (doubled(60, b"}PAIRSK\x01s"), MetadataError),
    "code": (b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.", UntrustedObject),
    "nothing": (pickle.dumps({"a": 1}), MetadataError),
    "size": (pickle.dumps(torch.Size([1])), MetadataError),
}


@pytest.mark.parametrize("name", METADATA)
def test_torch_metadata(tmp_path: Path, name: str) -> None:
    """Hostile metadata is refused quickly, and changes no class of this process."""
    content, error = METADATA[name]
    (tmp_path / ".metadata").write_bytes(content)
    before = dict(vars(Metadata))
    with pytest.raises(error, match=r"\.metadata"):
        open_checkpoint(tmp_path, {})
    assert dict(vars(Metadata)) == before
    assert not hasattr(torch.serialization._get_layout, "x")


@pytest.mark.parametrize(
    "change",
    [
        lambda metadata: metadata.planner_data.update(w=("w", 10**15)),
        lambda metadata: metadata.planner_data.update(w=["w"]),
        lambda metadata: setattr(metadata, "planner_data", 5),
    ],
    ids=["number", "list", "none"],
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_paths_that_a_planner_has_not_recorded(tmp_path: Path, change: Callable[[Any], object]) -> None:
    """Invalid paths in the metadata are ignored: no list of that many members is made."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a", no_dist=True)
    metadata = pickle.loads((tmp_path / "a" / ".metadata").read_bytes())
    change(metadata)
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    convert(tmp_path / "a", tmp_path / "b.pt", "torch")
    assert torch.equal(torch.load(tmp_path / "b.pt")["w"], torch.ones(2))


def test_a_list_that_cannot_be_whole(tmp_path: Path) -> None:
    """A list with one member of a high number is refused without allocating the list."""
    view = open_checkpoint(make_checkpoint(tmp_path / "a", {"w": torch.ones(2)}), {})
    far = dataclasses.replace(view.tensors["w"], path=("w", 10**15))
    with pytest.raises(ConversionError, match="'w' belongs to a list of which other values are missing"):
        torch_file.check(dataclasses.replace(view, values={"w": far}), ConvertOptions())
