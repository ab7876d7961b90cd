"""Tests that torch's ``.metadata`` is read as DCP's own records only, without running code from its pickle."""

from __future__ import annotations

import collections
import enum
import io
import pathlib
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from dcp_tensorizer import CheckpointError, MetadataError, UntrustedObject
from dcp_tensorizer._formats.torch_metadata import read_pickled


def metadata(**changed: Any) -> Metadata:
    """Returns the metadata of a tensor in two chunks and of an object."""
    size = torch.Size([4, 3])
    chunks = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([2, 3])) for row in (0, 2)]
    properties = TensorProperties(torch.bfloat16, requires_grad=True, memory_format=torch.channels_last)
    places = {
        MetadataIndex("w", torch.Size([row, 0]), number): _StorageInfo(f"__{number}_0.distcp", 7, 9)
        for number, row in enumerate((0, 2))
    }
    fields: dict[str, Any] = {
        "state_dict_metadata": {"w": TensorStorageMetadata(properties, size, chunks), "step": BytesStorageMetadata()},
        "planner_data": {"w": ("w",), "step": ("step",)},
        "storage_data": {**places, MetadataIndex("step"): _StorageInfo("__0_0.distcp", 16, 5, ["stream.zstd/1"])},
        "storage_meta": StorageMeta(pathlib.PurePosixPath("/ckpt"), "a-save", None, ["m"]),
        "version": "1.0.0",
    }
    return Metadata(**(fields | changed))


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_what_torch_writes_is_read_as_it_is(protocol: int) -> None:
    """All fields of all records equal those of `pickle.load`."""
    pickled = pickle.dumps(metadata(), protocol)
    found, expected = read_pickled(pickled, ".metadata"), pickle.loads(pickled)
    assert found == expected
    assert found.state_dict_metadata["w"].properties.memory_format == torch.channels_last  # type: ignore[union-attr]
    assert [(index.index, index.offset) for index in found.storage_data] == [
        (0, torch.Size([0, 0])),
        (1, torch.Size([2, 0])),
        (None, None),
    ]


def with_plans() -> Metadata:
    """Returns metadata as Megatron-Core writes it: with the plan of each rank, and notes on each tensor."""
    found = metadata()
    entry = found.state_dict_metadata["w"]
    assert isinstance(entry, TensorStorageMetadata)
    found.all_local_plans = [  # type: ignore[attr-defined]
        SavePlan(
            [
                WriteItem(
                    MetadataIndex("w", chunk.offsets, number),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(chunk, entry.properties, entry.size),
                ),
                WriteItem(MetadataIndex("step"), WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(5)),
            ],
            storage_data=_StoragePrefix(f"__{number}_"),
            planner_data={},
        )
        for number, chunk in enumerate(entry.chunks)
    ]
    found.mcore_data = {"w": {"nd_reformulated_orig_global_shape": (4, 3)}}  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_plans_and_fields_of_frameworks_stay(protocol: int) -> None:
    """Records of DCP's planner and fields that torch's `Metadata` lacks are read."""
    pickled = pickle.dumps(with_plans(), protocol)
    found = read_pickled(pickled, ".metadata")
    assert vars(found) == vars(pickle.loads(pickled)) == vars(with_plans())
    assert [plan.items[0].type for plan in found.all_local_plans] == [WriteItemType.SHARD] * 2  # type: ignore[attr-defined]


def test_classes_of_megatron_are_read_as_those_they_extend() -> None:
    """Megatron-Core up to 0.15 has its own subclasses of plans and metadata, with one more field."""
    pickled = pickle.dumps(with_plans(), 2)
    for kind, theirs in ((Metadata, "MCoreMetadata"), (SavePlan, "MCoreSavePlan")):
        name = f"c{kind.__module__}\n{kind.__name__}\n".encode()
        assert pickled.count(name) == 1
        pickled = pickled.replace(name, f"cmegatron.core.dist_checkpointing.strategies.torch\n{theirs}\n".encode())
    assert vars(read_pickled(pickled, ".metadata")) == vars(with_plans())


def test_what_a_planner_records_is_kept() -> None:
    """Plain values, plain containers and torch's types that describe tensors are read."""
    data = {
        "of": [1, 2.5, None, True, b"x", {3}, frozenset([4])],
        ("a", 0): collections.OrderedDict([("b", torch.Size([2])), ("a", torch.float8_e4m3fn)]),
        "layout": torch.sparse_coo,
        "empty": (),
    }
    for protocol in (4, 5):
        found = read_pickled(pickle.dumps(metadata(planner_data=data), protocol), ".metadata").planner_data
        assert found == data
        assert list(found[("a", 0)]) == ["b", "a"]


def test_old_releases_of_torch_and_python() -> None:
    """torch before 2.3 has a tensor's properties in another module; Python 3.11.0 pickles Enum members by name."""
    entry = TensorStorageMetadata(OldProperties(torch.int8), torch.Size([1]), [])  # type: ignore[arg-type]
    old = metadata(state_dict_metadata={"w": entry})
    del old.storage_meta, old.version
    found = read_pickled(pickle.dumps(old), ".metadata")
    assert found.state_dict_metadata["w"].properties == TensorProperties(torch.int8)  # type: ignore[union-attr]
    assert (found.storage_meta, found.version) == (None, None)

    class ByName(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented

    stream = io.BytesIO()
    ByName(stream, 4).dump(with_plans())
    assert all(name in stream.getvalue() for name in (b"getattr", b"TORCH_CHANNELS_LAST", b"SHARD"))
    assert vars(read_pickled(stream.getvalue(), ".metadata")) == vars(with_plans())


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def name(module: str, attribute: str) -> bytes:
    return text(module) + text(attribute) + b"\x93"


def record(attribute: str) -> bytes:
    return name("torch.distributed.checkpoint.metadata", attribute)


def inside(value: bytes) -> bytes:
    """Returns valid metadata with a pickled value in its planner data."""
    pickled = pickle.dumps(metadata(planner_data="a mark"), 2)
    mark = b"X\x06\x00\x00\x00a mark"
    assert pickled.count(mark) == 1
    return pickled.replace(mark, value)


def plan(attribute: str) -> bytes:
    return name("torch.distributed.checkpoint.planner", attribute)


_RAN = text("ran") + b"\x85"
_MKDIR = name("os", "mkdir")
_STATE = b"}" + text("version") + text("wrong") + b"s"
_NUMBER = b"K\x01"

UNTRUSTED = {
    "a call": _MKDIR + _RAN + b"R",
    "a call of an old pickle": b"cos\nmkdir\n" + _RAN + b"R",
    "a new object": _MKDIR + _RAN + b"\x81",
    "a new object with keywords": _MKDIR + _RAN + b"}\x92",
    "OBJ": b"(" + _MKDIR + text("ran") + b"o",
    "no call": _MKDIR,
    "another name of the module": record("dataclass") + _RAN + b"R",
    "a name in a name": record("os.mkdir") + _RAN + b"R",
    "a method of a class": record("Metadata.__init__") + _RAN + b"R",
    "another name of torch": name("torch", "load") + _RAN + b"R",
    "a dtype that is called": name("torch", "float32") + _RAN + b"R",
    "an attribute of torch": name("builtins", "getattr") + name("torch", "Size") + text("x") + b"\x86R",
    "an attribute with a default": name("builtins", "getattr") + record("_MEM_FORMAT_ENCODING") + b"NN\x87R",
    "getattr itself": name("builtins", "getattr"),
    "a class itself": record("Metadata"),
    "another name of the planner": plan("SavePlanner") + b")R",
    "another class of Megatron": name("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlanner") + b")R",
    "a method of a kind": name("builtins", "getattr") + plan("SavePlan") + text("x") + b"\x86R",
    "a reference": text("ran") + b"Q",
    "another class": name("collections", "Counter") + b")R",
}
DAMAGED = {
    "INST": b"(" + text("ran") + b"ios\nmkdir\n",
    "a registry": b"\x82\x01",
    "a state of a class": record("Metadata") + _STATE + b"b",
    "slots of a class": record("Metadata") + b"N" + _STATE + b"\x86b",
    "a state of a function": name("torch.serialization", "_get_layout") + _STATE + b"b",
    "a state of a dict": b"}" + _STATE + b"b",
    "a layout that is none": name("torch.serialization", "_get_layout") + text("torch.nn") + b"\x85R",
    "a memory format that is none": record("_MEM_FORMAT_ENCODING") + b"K\x07\x85R",
    "a kind of item that is none": plan("WriteItemType") + b"K\x07\x85R",
    "a plan of no items": plan("SavePlan") + b")\x81}" + text("items") + text("ran") + b"sb",
    "items that are none": plan("SavePlan") + b")\x81}" + text("items") + b"]" + _NUMBER + b"asb",
    "a field that hides a method": plan("SavePlan")
    + b")\x81}("
    + (text("items") + b"]")
    + (text("__reduce_ex__") + text("ran"))
    + b"ub",
    "a field without a name": plan("SavePlan") + b")\x81}(" + text("items") + b"]" + _NUMBER + _NUMBER + b"ub",
    "properties without a dtype": record("TensorProperties") + b")\x81}b",
    "metadata without anything": record("Metadata") + b")\x81}b",
    "a shape that allocates": name("torch", "Size") + b"J\xff\xff\xff\x7f\x85R",
    "a shape without end": name("torch", "Size") + b"(" + _NUMBER * 100_000 + b"t\x85R",
    "a path without end": text("a" * 200)
    + b"r\xff\x00\x00\x000"
    + name("pathlib", "PosixPath")
    + b"("
    + b"j\xff\x00\x00\x00" * 1000
    + b"tR",
    "keys in keys": b"}" + _NUMBER + b"2\x86" * 60 + _NUMBER + b"s",
    "lists in lists": b"]" + b"]" * 100_000 + b"a" * 100_000,
    "a list in itself": b"]r\xff\x00\x00\x00j\xff\x00\x00\x00a",
    "twice the value before": _NUMBER + b"2\x86" * 60,
}


@pytest.mark.parametrize("attack", UNTRUSTED)
@pytest.mark.parametrize("place", [lambda value: b"\x80\x04" + value + b".", inside], ids=["alone", "inside"])
def test_what_others_name_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, attack: str, place: Callable[[bytes], bytes]
) -> None:
    """The error names the class or function before anything is called, also in values that no load reads."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UntrustedObject, match=r"^x/\.metadata refers to .*, and was not loaded$"):
        read_pickled(place(UNTRUSTED[attack]), "x/.metadata")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("attack", DAMAGED)
def test_what_no_writer_makes_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, attack: str) -> None:
    """Errors take time and memory in proportion to the bytes, and no class of this process changes."""
    monkeypatch.chdir(tmp_path)
    before, started = dict(vars(Metadata)), time.monotonic()
    with pytest.raises(CheckpointError, match=r"x/\.metadata"):
        read_pickled(inside(DAMAGED[attack]), "x/.metadata")
    assert dict(vars(Metadata)) == before
    assert not hasattr(torch.serialization._get_layout, "version")
    assert not list(tmp_path.iterdir())
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    "change",
    [
        {"storage_data": None},
        {"storage_data": {1: 2}},
        {"state_dict_metadata": {"w": 5}},
        {"storage_meta": 5},
        {"version": 5},
        {"storage_meta": StorageMeta(modules=[5])},  # type: ignore[list-item]
        {"state_dict_metadata": {"w": TensorStorageMetadata(5, torch.Size([1]), [])}},  # type: ignore[arg-type]
        {"state_dict_metadata": {"w": TensorStorageMetadata(TensorProperties(), torch.Size([1]), [5])}},  # type: ignore[list-item]
        {"storage_data": {MetadataIndex("w"): _StorageInfo("../secret", 0, 1)}},
        {"storage_data": {MetadataIndex("w"): _StorageInfo("a", -1, 1)}},
        {"storage_data": {MetadataIndex("w"): _StorageInfo("a", 0, 1, "zstd")}},
    ],
)
def test_fields_are_of_their_types(change: dict[str, Any]) -> None:
    """Fields of other types, and files outside the checkpoint, are errors."""
    with pytest.raises(MetadataError, match=r"^x/\.metadata "):
        read_pickled(pickle.dumps(metadata(**change)), "x/.metadata")
