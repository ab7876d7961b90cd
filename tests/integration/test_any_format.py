"""Tests of open_reader: one reader loads what this package, torch and Hugging Face have saved."""

from __future__ import annotations

import io
import json
import pickle
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from tensorizer import DecryptionParams
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.testing._internal.two_tensor import TwoTensor

from dcp_tensorizer import (
    CheckpointError,
    CheckpointManager,
    DecryptionError,
    MetadataError,
    NotCommitted,
    Parts,
    ReadError,
    SavePlanner,
    TensorizerStorageWriter,
    UntrustedObject,
    installed,
    open_reader,
    unwrap,
)
from dcp_tensorizer.tools import convert

from ..lab.servers import S3Server

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SAVED = {"w": torch.arange(6.0).reshape(2, 3), "step": 7}


def load(path: Path | str, state: dict[str, object] | None = None, **options: object) -> dict[str, object]:
    state = {"w": torch.zeros(2, 3), "step": 0} if state is None else state
    dcp.load(state, storage_reader=open_reader(path, **options))
    return state


def error_of(path: Path | str, state: dict[str, object] | None = None, **options: object) -> CheckpointError:
    with pytest.raises(CheckpointException) as caught:
        load(path, state, **options)
    (failure,) = caught.value.failures.values()
    assert isinstance(failure[0], CheckpointError)
    return failure[0]


def assert_is_saved(state: dict[str, object]) -> None:
    assert torch.equal(state["w"], SAVED["w"])  # type: ignore[arg-type]
    assert state["step"] == 7


def test_it_reads_what_this_package_and_torch_have_saved(tmp_path: Path) -> None:
    """One reader loads both formats one after the other, by checkpoint_id, because each load recognises the format."""
    with TensorizerStorageWriter(tmp_path / "ours") as writer:
        dcp.save(SAVED, storage_writer=writer)
    dcp.save(SAVED, storage_writer=FileSystemWriter(tmp_path / "theirs"))
    assert_is_saved(load(tmp_path / "ours"))
    assert_is_saved(load(str(tmp_path / "theirs")))
    reader = open_reader(tmp_path / "ours")
    for name in ("theirs", "ours", "theirs"):
        state = {"w": torch.zeros(2, 3), "step": 0}
        dcp.load(state, checkpoint_id=tmp_path / name, storage_reader=reader)
        assert_is_saved(state)
        assert reader.checkpoint_id == tmp_path / name


@pytest.mark.parametrize("by", [FileSystemWriter, TensorizerStorageWriter])
def test_targets_that_were_made_in_inference_mode(tmp_path: Path, by: type[StorageWriter]) -> None:
    """They load outside of that mode, as with torch's reader, whatever their dtype and layout, and stay in it."""
    names = ["same", "converted", "strided", "parameter", "wrapper"]
    dcp.save(dict.fromkeys(names, SAVED["w"]), storage_writer=by(tmp_path))
    with torch.inference_mode():
        target = {name: torch.zeros(2, 3) for name in names}
        target["converted"] = target["converted"].double()
        target["strided"] = torch.zeros(3, 2).t()
        target["parameter"] = torch.nn.Parameter(torch.zeros(2, 3))
        target["wrapper"] = TwoTensor(torch.zeros(2, 3).double(), torch.zeros(2, 3).double())
    load(tmp_path, target)
    for tensor in target.values():
        assert tensor.is_inference()
        assert torch.equal(getattr(tensor, "b", tensor).float(), SAVED["w"])


def test_items_that_no_reader_of_torch_loads(tmp_path: Path) -> None:
    """The error for torch's items in safetensors names the option that wrote them, which torch does not read either."""
    writer = FileSystemWriter(tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save({"w": SAVED["w"]}, storage_writer=writer)
    with pytest.raises(CheckpointException):
        dcp.load({"w": torch.zeros(2, 3)}, storage_reader=FileSystemReader(tmp_path))
    error = error_of(tmp_path, {"w": torch.zeros(2, 3)})
    assert isinstance(error, ReadError)
    assert "'w' in" in str(error)
    assert "serialization_format=SAFETENSORS, torch's FileSystemReader cannot load it either" in str(error)


def test_it_reads_what_torchs_writer_has_saved_by_our_planner(tmp_path: Path) -> None:
    """The metadata of this package's planner in torch's format loads, including a framework's fields.

    torch 2.11's writer drops these fields.
    """

    class Writer(FileSystemWriter):
        def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
            metadata.notes = {"m.w": (2, 3)}  # type: ignore[attr-defined]
            super().finish(metadata, results)

    dcp.save({"m": SAVED, "n": 3}, storage_writer=Writer(tmp_path), planner=SavePlanner())
    expected = None if torch.__version__.startswith("2.11.") else {"m.w": (2, 3)}
    for reader in (FileSystemReader(tmp_path), open_reader(tmp_path)):
        assert getattr(reader.read_metadata(), "notes", None) == expected
    state = {"m": {"w": torch.zeros(2, 3), "step": 0}, "n": -1}
    dcp.load(state, storage_reader=open_reader(tmp_path))
    assert_is_saved(state["m"])  # type: ignore[arg-type]
    assert state["n"] == 3


@pytest.mark.parametrize("by", ["open_reader", "install", "convert"])
def test_it_reads_what_megatron_has_saved(tmp_path: Path, by: str) -> None:
    """Megatron's metadata has the plan of each rank, and fields that torch's class lacks."""
    path = tmp_path / "theirs"
    dcp.save(SAVED, checkpoint_id=path)
    metadata = FileSystemReader(path).read_metadata()
    metadata.all_local_plans = [create_default_local_save_plan(SAVED, True)]  # type: ignore[attr-defined]
    metadata.mcore_data = {"w": {"nd_reformulated_orig_global_shape": (6,)}}  # type: ignore[attr-defined]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    if by == "open_reader":
        assert vars(open_reader(path).read_metadata()) | {"storage_meta": None} == vars(metadata) | {
            "storage_meta": None
        }
        assert_is_saved(load(path))
    elif by == "install":
        with installed():
            state = {"w": torch.zeros(2, 3), "step": 0}
            dcp.load(state, checkpoint_id=path)
            found = FileSystemReader(path).read_metadata()
        assert_is_saved(state)
        assert found.mcore_data == metadata.mcore_data  # type: ignore[attr-defined]
    else:
        convert(path, tmp_path / "ours", "dcp_tensorizer")
        assert_is_saved(load(tmp_path / "ours"))


def test_it_reads_safetensors(tmp_path: Path) -> None:
    """A directory in Hugging Face's layout, of several files, is loaded."""
    save_file({"w": SAVED["w"]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"v": torch.ones(3)}, tmp_path / "model-00002-of-00002.safetensors")
    state = {"w": torch.zeros(2, 3), "v": torch.zeros(3)}
    dcp.load(state, storage_reader=open_reader(tmp_path))
    assert torch.equal(state["w"], SAVED["w"])
    assert state["v"].tolist() == [1.0] * 3


def test_a_header_that_contradicts_itself_is_an_error(tmp_path: Path) -> None:
    """A header that contradicts itself is an error that names the file, before any target changes."""
    file = tmp_path / "model.safetensors"
    save_file({"v": torch.ones(3), "w": SAVED["w"]}, file)
    file.write_bytes(file.read_bytes().replace(b'"shape":[2,3]', b'"shape":[2,4]'))
    state = {"v": torch.zeros(3), "w": torch.zeros(2, 4)}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=open_reader(tmp_path))
    assert str(unwrap(caught.value)) == (
        f"{file}: 'w' of shape (2, 4) has 24 bytes stored, which do not match its shape and dtype"
    )
    assert not state["v"].any()


def test_files_that_the_index_does_not_name_are_not_read(tmp_path: Path) -> None:
    """Files of a killed or an earlier save, which the index does not name, are not read."""
    save_file({"w": SAVED["w"]}, tmp_path / "model-00001-of-00001.safetensors")
    save_file({"w": torch.ones(2, 3)}, tmp_path / "model-0123.safetensors")
    assert "has 'w' in two files" in str(error_of(tmp_path))
    index = {"weight_map": {"w": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    state = {"w": torch.zeros(2, 3, dtype=torch.float64)}
    dcp.load(state, storage_reader=open_reader(tmp_path))
    assert torch.equal(state["w"], SAVED["w"].double())


def test_a_lone_file_that_is_replaced_meanwhile(tmp_path: Path) -> None:
    """A file that is replaced during the load is an error, even if both files have the same header."""
    save_file({"w": SAVED["w"]}, tmp_path / "model.safetensors")
    save_file({"w": SAVED["w"] + 1}, tmp_path / "next")

    class Replacing(DefaultLoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            (tmp_path / "next").replace(tmp_path / "model.safetensors")
            return super().create_local_plan()

    target = {"w": torch.zeros_like(SAVED["w"])}
    with pytest.raises(CheckpointException) as raised:
        dcp.load(target, storage_reader=open_reader(tmp_path), planner=Replacing())
    assert re.search(r"model\.safetensors was replaced while it was loaded", str(unwrap(raised.value)))
    dcp.load(target, storage_reader=open_reader(tmp_path))
    assert torch.equal(target["w"], SAVED["w"] + 1)


def read_by(by: str, path: Path | str, into: Path, keys: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Reads a model by a load, or by a conversion."""
    if by == "convert":
        convert(path, into, "safetensors")
        return load_file(into)
    dcp.load(keys, storage_reader=open_reader(path))
    return keys


READ_BY = pytest.mark.parametrize("by", ["open_reader", "convert"])


@READ_BY
@pytest.mark.parametrize("location", ["disk", "remote"])
def test_parts_of_tensors_are_put_together(tmp_path: Path, by: str, location: str) -> None:
    """The parts that torch's writer saves without consolidation are joined, also sharded, on any storage."""
    model, url = tmp_path / "model", f"memory://parts-{uuid.uuid4().hex}"
    writer = HuggingFaceStorageWriter(str(model), save_distributed=True)
    dcp.save({"w": SAVED["w"]}, storage_writer=writer)
    halves = {"shard-00001-model-00001-of-00001.safetensors": 0, "shard-00002-model-00001-of-00001.safetensors": 1}
    for name, row in halves.items():
        note = json.dumps({"w": {"saved_offsets": [row, 0]}})
        save_file({"w": SAVED["w"][row : row + 1]}, model / name, {"DCP_SHARDING_INFO": note})  # type: ignore[index]
    for file in set(model.iterdir()) - {model / name for name in halves}:
        file.unlink()
    if location == "remote":
        fsspec.filesystem("memory").put(f"{model}/", f"{url}/", recursive=True)
    path = model if location == "disk" else url
    state = read_by(by, path, tmp_path / "out.safetensors", {"w": torch.zeros(2, 3)})
    assert torch.equal(state["w"], SAVED["w"])  # type: ignore[arg-type]
    if by == "open_reader":
        column = {"w": torch.zeros(2, 3, dtype=torch.float64)}
        assert torch.equal(read_by(by, path, tmp_path, column)["w"], SAVED["w"].double())  # type: ignore[attr-defined]
        assert "may have only parts of tensors" in str(error_of(path, rename={"w": "v"}))


@READ_BY
def test_parts_that_do_not_make_up_a_tensor_are_refused(tmp_path: Path, by: str) -> None:
    """Parts with a gap, or with a part twice, are an error."""
    for row in (0, 2):
        note = json.dumps({"w": {"saved_offsets": [row, 0]}})
        save_file({"w": torch.ones(1, 3)}, tmp_path / f"shard-{row}.safetensors", {"DCP_SHARDING_INFO": note})
    with pytest.raises((CheckpointException, MetadataError), match="chunks of 'w' do not make up its 9 elements"):
        read_by(by, tmp_path, tmp_path / "out.safetensors", {"w": torch.zeros(3, 3)})


@READ_BY
def test_a_tensor_in_two_files_comes_from_the_one_that_the_index_names(tmp_path: Path, by: str) -> None:
    """If two files have a tensor, it is read from the file that the index names for it."""
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    save_file({"a": torch.ones(1), "w": torch.ones(2)}, tmp_path / first)
    save_file({"b": torch.ones(1), "w": torch.full((2,), 2.0)}, tmp_path / second)
    index = {"weight_map": {"a": first, "b": second, "w": second}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    state = read_by(by, tmp_path, tmp_path / "out.safetensors", {"w": torch.zeros(2)})
    assert state["w"].tolist() == [2.0, 2.0]


@READ_BY
def test_a_tensor_that_only_the_index_names_is_missed(tmp_path: Path, by: str) -> None:
    """The error names the missing tensor and its file, and nothing is loaded."""
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    save_file({"w": torch.ones(2)}, tmp_path / first)
    save_file({"b": torch.ones(2)}, tmp_path / second)
    index = {"weight_map": {"w": first, "b": second, "lost": second}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    state = {"w": torch.zeros(2)}
    with pytest.raises((CheckpointException, MetadataError), match=f"{second} lacks 'lost'"):
        read_by(by, tmp_path, tmp_path / "out.safetensors", state)
    assert not state["w"].any()


def test_new_names_are_for_safetensors(tmp_path: Path) -> None:
    """For other formats, rename= is refused, and so is a rule that does not fit the model."""
    dcp.save(SAVED, storage_writer=FileSystemWriter(tmp_path / "torch"))
    assert "is in the format dcp. Omit rename=" in str(error_of(tmp_path / "torch", rename={"w": "v"}))
    (tmp_path / "model").mkdir()
    save_file({"e.0": torch.ones(2), "e.1": torch.ones(3)}, tmp_path / "model" / "model.safetensors")
    error = error_of(tmp_path / "model", rename={"w": Parts("e.{}")})
    assert "cannot be loaded with these rules of rename=: 'e.1' has the shape (3,)" in str(error)
    save_file({"e.0": torch.ones(2), "e.1": torch.ones(2).half()}, tmp_path / "model" / "model.safetensors")
    assert "differ in their dtypes" in str(error_of(tmp_path / "model", rename={"w": Parts("e.{}")}))


def test_it_reads_what_each_rank_has_saved_for_itself(tmp_path: Path) -> None:
    """Without collectives there is no metadata of all ranks, in this package's format and in torch's."""
    with TensorizerStorageWriter(tmp_path / "ours") as writer:
        dcp.save(SAVED, storage_writer=writer, use_collectives=False)
    dcp.save(SAVED, storage_writer=FileSystemWriter(tmp_path / "theirs"), use_collectives=False)
    for name in ("ours", "theirs"):
        state = {"w": torch.zeros(2, 3), "step": 0}
        dcp.load(state, storage_reader=open_reader(tmp_path / name))
        assert_is_saved(state)


RAN: list[str] = []


def run(value: str) -> None:
    RAN.append(value)


class Runs:
    """An object that runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return run, ("it",)


def torch_saves(path: Path, value: object = 7) -> None:
    dcp.save({**SAVED, "step": value}, storage_writer=FileSystemWriter(path), planner=DefaultSavePlanner())


def with_pickle(path: Path) -> Path:
    """Makes a checkpoint whose metadata runs code."""
    path.mkdir(parents=True)
    (path / ".metadata").write_bytes(pickle.dumps(Runs()))
    return path


def with_object(path: Path) -> Path:
    """Makes a checkpoint of torch's with an object that runs code."""
    torch_saves(path, Runs())
    return path


@pytest.mark.promise("foreign-records")
@pytest.mark.parametrize("make", [with_pickle, with_object])
def test_code_in_what_torch_has_saved_does_not_run(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    """No reader runs code, and no target changes; the error names the types that the object needs."""
    path = make(tmp_path / "step-9")
    state: dict[str, object] = {"w": torch.zeros(2, 3), "step": 0}
    RAN.clear()
    named = r"test_any_format\.run"
    for target in (path, f"file://{path}"):
        error = error_of(target, state=state)
        assert isinstance(error, UntrustedObject)
        assert re.search(named, str(error))
        assert "allow_pickle=True" in str(error)
    with installed(), pytest.raises(CheckpointException, match=named):
        dcp.load(state, checkpoint_id=path)
    with installed(), pytest.raises(CheckpointException, match=named):
        dcp.load(state, storage_reader=FileSystemReader(path))
    for fallback in (False, True):
        with CheckpointManager(tmp_path) as manager, pytest.raises(UntrustedObject, match=named):
            manager.restore(state, fallback=fallback)
    assert RAN == []
    assert state["step"] == 0
    assert not torch.any(state["w"])  # type: ignore[arg-type]


def test_whoever_allows_it_gets_objects_of_any_type(tmp_path: Path) -> None:
    """With ``allow_pickle``, objects of any type load, and so does the metadata of a custom planner."""
    torch_saves(tmp_path, Path("x"))
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.planner_data = Inverse()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert isinstance(error_of(tmp_path), UntrustedObject)
    assert load(tmp_path, allow_pickle=True)["step"] == Path("x")


class Inverse:
    """A value that a planner might store."""


def test_what_torch_has_saved_is_looked_at_before_a_target_changes(tmp_path: Path) -> None:
    """Missing or short files are an error before any target changes; damaged tensors are named with their key."""
    torch_saves(tmp_path)
    (path,) = tmp_path.glob("*.distcp")
    content = path.read_bytes()
    state: dict[str, object] = {"w": torch.ones(2, 3), "step": 0}
    path.write_bytes(content[:-1])
    assert isinstance(error := error_of(tmp_path, state=state), ReadError)
    assert f"{path} has {len(content) - 1:,} bytes" in str(error)
    path.write_bytes(b"\0" * len(content))
    with pytest.raises(CheckpointException, match=f"'step' in {tmp_path} could run code"):
        load(tmp_path)
    path.unlink()
    assert f"{path} does not exist, but '" in str(error_of(tmp_path, state=state))
    assert torch.equal(state["w"], torch.ones(2, 3))  # type: ignore[arg-type]


def test_a_tensor_of_another_shape_is_not_spread_over_the_target(tmp_path: Path) -> None:
    """If a damaged checkpoint's data has another shape than its metadata, the data is not broadcast to the target."""
    torch_saves(tmp_path)
    (path,) = tmp_path.glob("*.distcp")
    stream = io.BytesIO()
    torch.save(torch.ones(1, 1), stream)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        if index.fqn == "w":
            info.offset, info.length = path.stat().st_size, len(stream.getvalue())
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    path.write_bytes(path.read_bytes() + stream.getvalue())
    assert re.search(rf"'w' in {path} cannot be loaded: .*shape \(1, 1\)", str(error_of(tmp_path)))


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    """The error for a path without a checkpoint names some of its files."""
    assert isinstance(error_of(tmp_path / "nowhere"), NotCommitted)
    (tmp_path / "weights.bin").write_text("")
    error = error_of(tmp_path)
    assert isinstance(error, MetadataError)
    assert f"{tmp_path} is not a checkpoint that can be loaded: it holds weights.bin." in str(error)


def test_a_key_is_refused_where_nothing_is_encrypted(tmp_path: Path) -> None:
    """encryption= is refused for other formats, because its user expects authentic data."""
    dcp.save(SAVED, storage_writer=FileSystemWriter(tmp_path))
    error = error_of(tmp_path, encryption=DecryptionParams.from_key(b"k" * 32))
    assert isinstance(error, DecryptionError)
    assert "is in the format dcp, which is not encrypted" in str(error)


def test_arguments_are_checked_where_they_are_given(tmp_path: Path) -> None:
    """Arguments are checked by open_reader, not by each rank's load."""
    with pytest.raises(TypeError, match="timeout"):
        open_reader(tmp_path, timeout="soon")


def test_object_stores(s3: S3Server) -> None:
    """Checkpoints of this package and safetensors load from an object store with the same options."""
    url, options = f"s3://{s3.bucket}/any_format", s3.options()
    with TensorizerStorageWriter(f"{url}/ours", storage_options=options) as writer:
        dcp.save(SAVED, storage_writer=writer)
    assert_is_saved(load(f"{url}/ours", storage_options=options))
    content = safetensors.torch.save({"experts.0": SAVED["w"][0], "experts.1": SAVED["w"][1]})
    s3.client().put_object(Bucket=s3.bucket, Key="any_format/hf/model.safetensors", Body=content)
    state = {"w": torch.zeros(2, 3)}
    reader = open_reader(f"{url}/hf", storage_options=options, rename={"w": Parts("experts.{}")})
    dcp.load(state, storage_reader=reader)
    assert torch.equal(state["w"], SAVED["w"])
    s3.client().put_object(Bucket=s3.bucket, Key="any_format/hf/model.safetensors", Body=b"")
    error = error_of(f"{url}/hf", storage_options=options)
    assert "any_format/hf/model.safetensors is not a safetensors file, or is damaged" in str(error)


def test_ranks_that_find_several_formats_load_nothing(tmp_path: Path) -> None:
    """If ranks find different formats, because a job replaces the checkpoint meanwhile, no rank loads anything."""
    dcp.save(SAVED, storage_writer=FileSystemWriter(tmp_path / "torch"))
    dcp.save(SAVED, storage_writer=TensorizerStorageWriter(tmp_path / "ours"))
    plans, readers = [], [open_reader(tmp_path / name) for name in ("torch", "ours")]
    for reader in readers:
        planner, metadata = DefaultLoadPlanner(), reader.read_metadata()
        planner.set_up_planner({"w": torch.zeros(2, 3)}, metadata)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        plans.append(reader.prepare_local_plan(planner.create_local_plan()))
    for reader in readers:
        with pytest.raises(MetadataError):
            reader.prepare_global_plan(plans)
