"""Tests of loads in one process: targets, conversions, trust, damage, coverage."""

import copy
import logging
import os
import re
import shutil
import time
from collections import Counter

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.testing._internal.two_tensor import TwoTensor

from dcp_tensorizer import (
    CheckpointError,
    ChecksumMismatch,
    MetadataError,
    NotCommitted,
    ReadError,
    TensorizerStorageReader,
    TensorizerStorageWriter,
    UnsupportedFormat,
    UntrustedObject,
    open_reader,
)
from dcp_tensorizer._formats.own import decode
from dcp_tensorizer._saving import write_plan
from dcp_tensorizer._tensor_file.regions import Region
from dcp_tensorizer.reader import LoadReport
from dcp_tensorizer.tools import verify

from ..lab.checkpoints import make_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Custom:
    """An object whose class could run code."""

    def __init__(self, value):
        self.value = value


class Named(torch.Tensor):
    """A tensor subclass that has its own bytes, and fails when it is unpickled."""

    def __setstate__(self, state):
        raise AssertionError("unpickled")


def save(path, state):
    with TensorizerStorageWriter(path) as writer:
        dcp.save(state, storage_writer=writer)


def load(path, state, **options):
    dcp.load(state, storage_reader=TensorizerStorageReader(path, **options))


def cause(caught):
    return caught.value.failures[0][0]


@pytest.fixture
def weights(tmp_path):
    state = {"w": torch.arange(100_000, dtype=torch.float32).view(200, 500)}
    save(tmp_path, state)
    return tmp_path, state["w"]


def test_targets_of_any_layout(weights):
    """Transposed and strided targets receive the values; a target that requires grad stays the same object."""
    path, expected = weights
    target = {"w": torch.zeros(500, 200).t()}
    load(path, target)
    assert torch.equal(target["w"], expected)
    strided = {"w": torch.zeros(400, 1000)[::2, ::2]}
    load(path, strided)
    assert torch.equal(strided["w"], expected)
    parameter = torch.nn.Parameter(torch.zeros(200, 500))
    load(path, {"w": parameter})
    assert torch.equal(parameter.detach(), expected)
    assert parameter.requires_grad


def test_targets_of_one_element(tmp_path):
    """One element of a larger tensor is saved and loaded without its neighbours."""
    base = torch.arange(15.0).view(5, 3)
    save(tmp_path, {"w": base[1:2, 1]})
    other = torch.zeros(5, 3)
    load(tmp_path, {"w": other[3:4, 2]})
    assert other.nonzero().tolist() == [[3, 2]]
    assert other[3, 2] == 4.0


def test_targets_that_are_made_of_other_tensors(weights):
    """The class of a wrapper copies plain values into it, as with torch's reader, also with another dtype."""
    path, expected = weights
    save(path, {f"w{n}": expected + n for n in range(3)})
    target = {f"w{n}": TwoTensor(torch.zeros(200, 500), torch.zeros(200, 500)) for n in range(2)}
    target["w2"] = TwoTensor(torch.zeros(200, 500).double(), torch.zeros(200, 500).double())
    load(path, target)
    for number, tensor in enumerate(target.values()):
        assert torch.equal(tensor.a, (expected + number).to(tensor.dtype))
        assert torch.equal(tensor.b, tensor.a)


def test_in_inference_mode(weights):
    """A load in inference mode returns tensors of that mode."""
    path, expected = weights
    with torch.inference_mode():
        target = {"w": torch.zeros(200, 500, dtype=torch.float64)}
        load(path, target)
    assert torch.equal(target["w"], expected.double())


class LooksFirst(DefaultLoadPlanner):
    """A planner that reads the metadata before DCP lets the storage raise an error."""

    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
        assert metadata.state_dict_metadata["w"].size == state_dict["w"].shape
        super().set_up_planner(state_dict, metadata, is_coordinator)


@pytest.mark.parametrize("make", [TensorizerStorageReader, open_reader])
def test_a_planner_that_looks_into_metadata_that_cannot_be_read(weights, make):
    """If the metadata cannot be read, such a planner gets the reader's error."""
    path, expected = weights
    target = {"w": torch.zeros(200, 500)}
    dcp.load(target, storage_reader=make(path), planner=LooksFirst())
    assert torch.equal(target["w"], expected)
    content = bytearray((path / ".metadata").read_bytes())
    content[-1] ^= 1
    (path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(target, storage_reader=make(path), planner=LooksFirst())
    assert isinstance(cause(caught), MetadataError)


def test_a_safe_conversion_is_done_and_said(weights, caplog):
    """float32 is converted to bfloat16 targets, with one warning that counts them and names the first keys."""
    path, expected = weights
    target = {"w": torch.zeros(200, 500, dtype=torch.bfloat16)}
    load(path, target)
    assert torch.equal(target["w"], expected.to(torch.bfloat16))
    assert "1 tensor is stored as torch.float32 and converted to the torch.bfloat16 of the target: 'w'" in caplog.text
    many = {f"w{number}": torch.full((3,), number + 0.5) for number in range(7)}
    make_checkpoint(path.parent / "many", many)
    caplog.clear()
    loaded = {key: torch.zeros(3, dtype=torch.float64) for key in many}
    load(path.parent / "many", loaded)
    assert {key: value.tolist() for key, value in loaded.items()} == {key: v.tolist() for key, v in many.items()}
    (said,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "7 tensors are stored as torch.float32" in said
    assert said.endswith("of the target: 'w0', 'w1', 'w2', 'w3', 'w4', and 2 more")


def test_a_lossy_conversion_is_an_error(weights):
    """float32 is not converted to integers, and the target does not change."""
    path, _ = weights
    target = {"w": torch.full((200, 500), 7, dtype=torch.int32)}
    with pytest.raises(CheckpointException) as caught:
        load(path, target)
    assert isinstance(cause(caught), ReadError)
    assert "'w'" in str(cause(caught))
    assert bool((target["w"] == 7).all())


@pytest.mark.promise("block-damaged")
@pytest.mark.parametrize("verify", [True, False])
def test_a_flipped_byte_is_found(weights, verify):
    """A damaged block is a ChecksumMismatch that names key, file and offset; verify=False reads it as it is."""
    path, expected = weights
    file = next(path.glob("*.tensors"))
    with open(file, "r+b") as stream:
        stream.seek(file.stat().st_size - 1000)
        byte = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte[0] ^ 0x40]))
    target = {"w": torch.zeros(200, 500)}
    if verify:
        with pytest.raises(CheckpointException) as caught:
            load(path, target)
        assert isinstance(cause(caught), ChecksumMismatch)
        assert "'w'" in str(cause(caught))
        assert file.name in str(cause(caught))
        words = r"bytes [\d,]+ to [\d,]+ of the tensor at byte [\d,]+ are not what was saved"
        assert re.search(words, str(cause(caught)))
    else:
        load(path, target, verify=False)
        assert int((target["w"] != expected).sum()) == 1


def damage(path, offset):
    """Flips one bit of a file."""
    with open(path, "r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 1 << offset % 8]))


@pytest.mark.promise("loaded-is-saved")
@pytest.mark.promise("index-damaged")
def test_a_flip_of_any_byte_is_an_error_or_changes_nothing(tmp_path, monkeypatch):
    """A flip of any byte that a load reads is an error, or changes nothing.

    Damage to `.metadata` is found before a target changes.
    """
    monkeypatch.setattr(write_plan, "INLINE_BYTES", 0)  # small values are read from the data file, too
    state = {
        "model": {"w": torch.arange(60.0).view(6, 10), "half": torch.ones(7, dtype=torch.bfloat16)},
        "step": torch.tensor(3),
        "extra": {"name": "run"},
    }
    save(tmp_path, state)
    (data,) = tmp_path.glob("*.tensors")
    metadata = tmp_path / ".metadata"
    items = list(decode(metadata.read_bytes(), "m").storage_data["items"].values())
    read = {offset for item in items for offset in range(item.offset, item.offset + item.length)}
    others = sorted(set(range(data.stat().st_size)) - read)
    places = [(metadata, offset) for offset in range(metadata.stat().st_size)]
    places += [(data, offset) for offset in [*sorted(read), *others[:40], *others[40::4999], *others[-100:]]]
    outcomes = Counter()
    for path, offset in places:
        damage(path, offset)
        loaded = copy.deepcopy(state)
        loaded["model"]["w"].zero_()
        loaded["model"]["half"].zero_()
        loaded["step"].zero_()
        loaded["extra"] = {"name": ""}
        error = None
        try:
            load(tmp_path, loaded)
        except CheckpointException as raised:
            error = raised.failures[0][0]
        if error is not None:
            assert isinstance(error, MetadataError if path == metadata else CheckpointError)
            assert path != metadata or not loaded["model"]["w"].any()
            outcomes["error", path == metadata or offset in read] += 1
        else:
            assert torch.equal(loaded["model"]["w"], state["model"]["w"])
            assert torch.equal(loaded["model"]["half"], state["model"]["half"])
            assert (int(loaded["step"]), loaded["extra"]) == (3, state["extra"])
            outcomes["identical", path == metadata or offset in read] += 1
        damage(path, offset)
    assert outcomes["error", True] == len(read) + metadata.stat().st_size
    assert outcomes["identical", False] == len(places) - outcomes["error", True]


@pytest.mark.promise("file-missing")
@pytest.mark.promise("loaded-is-saved", reason="files exist before a target changes")
@pytest.mark.parametrize("damage", ["missing", "short", "long"])
def test_files_are_checked_before_a_target_changes(weights, damage):
    """A missing file, or one of another size, is an error that names it and the sizes, and no target has changed."""
    path, _ = weights
    file = next(path.glob("*.tensors"))
    if damage == "missing":
        file.unlink()
    else:
        size = file.stat().st_size
        os.truncate(file, size + (1 if damage == "long" else -1))
    target = {"w": torch.full((200, 500), 7.0)}
    with pytest.raises(CheckpointException) as caught:
        load(path, target)
    assert isinstance(cause(caught), ReadError)
    assert file.name in str(cause(caught))
    if damage != "missing":
        assert f"has {file.stat().st_size:,} bytes instead of {size:,}" in str(cause(caught))
    assert bool((target["w"] == 7).all())


@pytest.mark.promise("chunks-missing")
@pytest.mark.promise("loaded-is-saved", reason="chunks cover each tensor before a target changes")
def test_incomplete_chunks_are_an_error(tmp_path):
    """If chunks do not cover a tensor, the error names it before its target changes."""
    make_checkpoint(tmp_path, {"w": torch.ones(200, 500)}, chunks={"w": [Region((0, 0), (100, 500))]})
    target = {"w": torch.full((200, 500), 7.0)}
    with pytest.raises(CheckpointException) as caught:
        load(tmp_path, target)
    assert isinstance(cause(caught), MetadataError)
    assert "'w'" in str(cause(caught))
    assert bool((target["w"] == 7).all())


def test_objects_need_trust(tmp_path, caplog):
    """An object of a foreign class is reported when it is saved, refused when it is loaded, and can be allowed."""
    save(tmp_path, {"extra": Custom(5)})
    assert "'extra'" in caplog.text
    assert "Custom" in caplog.text
    with pytest.raises(CheckpointException) as caught:
        load(tmp_path, {"extra": None})
    assert isinstance(cause(caught), UntrustedObject)
    for part in ("'extra'", "Custom", "add_safe_globals", "allow_pickle=True"):
        assert part in str(cause(caught))
    state = {"extra": None}
    load(tmp_path, state, allow_pickle=True)
    assert state["extra"].value == 5
    with torch.serialization.safe_globals([Custom]):
        state = {"extra": None}
        load(tmp_path, state)
    assert state["extra"].value == 5


def test_subclasses_with_bytes_need_no_trust(tmp_path):
    """Their bytes are stored without a type, so nothing is unpickled, and the target keeps its type."""
    values = torch.arange(4.0).as_subclass(Named)
    values.attribute = 5  # with one, torch.save stores a state to set
    save(tmp_path, {"w": values})
    assert [file.name for file in tmp_path.iterdir() if b"Named" in file.read_bytes()] == []
    for target in (torch.zeros(4), torch.zeros(4).as_subclass(Named)):
        load(tmp_path, {"w": target})
        assert target.tolist() == [0, 1, 2, 3]


@pytest.mark.promise("not-committed")
def test_no_checkpoint(tmp_path):
    """A path without a checkpoint, or a missing path, is NotCommitted, with the path, and no target changes."""
    target = torch.ones(1)
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointException) as caught:
            load(path, {"w": target})
        assert isinstance(cause(caught), NotCommitted)
        assert str(path) in str(cause(caught))
    torch.save({"w": target}, tmp_path / "model.pt")
    with pytest.raises(CheckpointException) as caught:
        load(tmp_path / "model.pt", {"w": target})
    assert "it is a file like those that torch.save writes: load it with torch.load" in str(cause(caught))
    assert target.item() == 1


class Changing(DefaultLoadPlanner):
    """Changes the checkpoint when all ranks have planned the load, and none has read data."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def finish_plan(self, central_plan):
        self.change()
        return super().finish_plan(central_plan)


@pytest.mark.promise("data-overwritten")
@pytest.mark.parametrize("change", ["overwritten", "removed"])
def test_a_checkpoint_that_changes_while_its_data_is_read(weights, change):
    """It is an error that says so; what another job has saved there loads afterwards."""
    path, expected = weights
    act = (lambda: save(path, {"w": expected + 1})) if change == "overwritten" else (lambda: shutil.rmtree(path))
    target = {"w": torch.zeros(200, 500)}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(target, storage_reader=TensorizerStorageReader(path), planner=Changing(act))
    assert isinstance(cause(caught), ReadError)
    assert "was overwritten or removed" in str(cause(caught))
    if change == "overwritten":
        load(path, target)
        assert torch.equal(target["w"], expected + 1)


@pytest.mark.promise("other-format")
@pytest.mark.parametrize(("form", "words"), [("torch", "open_reader"), ("newer", "has format version 2")])
def test_metadata_of_another_format(tmp_path, form, words):
    """torch's own, and that of a release to come: the error names the format, and no target has changed."""
    if form == "torch":
        dcp.save({"w": torch.zeros(3)}, storage_writer=FileSystemWriter(tmp_path))
    else:
        save(tmp_path, {"w": torch.zeros(3)})
        content = bytearray((tmp_path / ".metadata").read_bytes())
        content[8] += 1
        head = int.from_bytes(content[16:24], "little")
        content[32:48] = xxhash.xxh3_128_digest(bytes(content[:32] + content[48 : 80 + head]))
        (tmp_path / ".metadata").write_bytes(content)
    target = {"w": torch.ones(3)}
    with pytest.raises(CheckpointException) as caught:
        load(tmp_path, target)
    assert isinstance(cause(caught), UnsupportedFormat) and isinstance(cause(caught), MetadataError)
    assert words in str(cause(caught))
    assert target["w"].tolist() == [1, 1, 1]


def test_progress(weights, caplog):
    """The callback counts up to the total, and the load is logged with its rate."""
    path, expected = weights
    calls = []
    with caplog.at_level(logging.INFO, "dcp_tensorizer"):
        load(path, {"w": torch.zeros(200, 500)}, on_progress=lambda done, total: calls.append((done, total)))
    assert (calls[0], calls[-1]) == ((0, expected.nbytes), (expected.nbytes, expected.nbytes))
    assert "GB/s" in caplog.text


class Rows(DefaultLoadPlanner):
    """A planner that loads some rows of a matrix, as the planner of a rank with these rows."""

    def create_local_plan(self):
        origin, rows = torch.Size((0, 0)), torch.Size((50, 0))
        item = (MetadataIndex("w"), origin, MetadataIndex("w", origin, 0), rows, torch.Size((100, 500)))
        return LoadPlan([ReadItem(LoadItemType.TENSOR, *item)])


def test_progress_of_a_part_begins_with_its_own_bytes(weights):
    """The progress of a rank that needs half of a stored tensor counts only that half."""
    path, expected = weights
    calls = []
    target, reader = torch.zeros(100, 500), TensorizerStorageReader(path, on_progress=lambda *call: calls.append(call))
    dcp.load({"w": target}, storage_reader=reader, planner=Rows())
    assert torch.equal(target, expected[50:150])
    assert calls[0] == (0, target.nbytes)


def test_each_load_is_reported(tmp_path, caplog):
    """Each load is reported to the log, to `last_report` and to the callback, with the id of the save."""
    path, state = tmp_path, {"w": torch.ones(100, 70), "step": 5}
    with TensorizerStorageWriter(path) as writer:
        dcp.save(state, storage_writer=writer)
        save_id = writer.last_report.save_id
    reports = []
    reader = TensorizerStorageReader(path, on_report=reports.append)
    assert reader.last_report is None
    before = time.time()
    with caplog.at_level(logging.INFO, "dcp_tensorizer"):
        for _ in range(2):
            dcp.load({"w": torch.zeros(100, 70), "step": 0}, storage_reader=reader)
    first, second = reports
    assert isinstance(first, LoadReport)
    assert second is reader.last_report
    assert (first.path, first.save_id, first.rank, first.items) == (str(path), save_id, 0, 2)
    assert first.load_id == reader.load_id
    items = decode((path / ".metadata").read_bytes(), "m").storage_data["items"]
    assert first.nbytes == sum(item.length for item in items.values())
    assert (
        before <= first.started_at <= first.started_at + first.seconds <= second.started_at + 0.01 <= time.time() + 0.01
    )
    assert first.seconds == pytest.approx(first.plan_seconds + first.read_seconds)
    assert str(second) in caplog.text


def test_saves_and_loads_have_ids(tmp_path):
    """The writer, the reader, the metadata and a save's result have ids, as with torch's own storage."""
    with TensorizerStorageWriter(tmp_path) as writer:
        returned = dcp.save({"w": torch.ones(2)}, storage_writer=writer)
        first = writer.save_id
        assert dcp.async_save({"w": torch.ones(2)}, storage_writer=writer).result().storage_meta.save_id != first
    assert (returned.storage_meta.save_id, returned.storage_meta.checkpoint_id) == (first, str(tmp_path))
    reader = TensorizerStorageReader(tmp_path)
    before, metadata = reader.load_id, reader.read_metadata()
    assert (metadata.storage_meta.load_id, metadata.storage_meta.save_id == first) == (before, False)
    dcp.save({"w": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(tmp_path / "torch"))
    theirs = dcp.FileSystemReader(tmp_path / "torch").read_metadata()
    assert returned.version == metadata.version == theirs.version
    dcp.load({"w": torch.ones(2)}, storage_reader=reader, checkpoint_id=tmp_path)
    assert reader.load_id != before


def test_a_callback_that_fails_does_not_fail_the_load(weights, caplog):
    """The callback's error is logged, and the load succeeds."""
    path, expected = weights

    def fail(report):
        raise RuntimeError("no dashboard")

    target = {"w": torch.zeros(200, 500)}
    load(path, target, on_report=fail)
    assert torch.equal(target["w"], expected)
    assert "on_report failed; the load did not" in caplog.text
    assert "no dashboard" in caplog.text


def test_a_load_that_fails_is_not_reported(weights):
    """A failed load raises its error, and has no report."""
    path, _ = weights
    next(path.glob("*.tensors")).unlink()
    reports = []
    reader = TensorizerStorageReader(path, on_report=reports.append)
    with pytest.raises(CheckpointException):
        dcp.load({"w": torch.zeros(200, 500)}, storage_reader=reader)
    assert (reports, reader.last_report) == ([], None)


def test_objects_are_loaded_whatever_the_default_device_is(tmp_path):
    """Objects and conversions use host memory, whatever the default device."""
    save(tmp_path, {"extra": {"name": "run"}, "w": torch.arange(5.0)})
    state = {"extra": {"name": ""}, "w": torch.zeros(5, dtype=torch.float64)}
    with torch.device("meta"):
        load(tmp_path, state)
    assert state["extra"] == {"name": "run"}
    assert state["w"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"path": 5}, TypeError, "path"),
        ({"path": None}, TypeError, "path"),
        ({"timeout": -1}, ValueError, "timeout must be .*, got -1"),
        ({"timeout": 0}, ValueError, "timeout must be .*, got 0"),
        ({"timeout": float("inf")}, ValueError, "timeout must be .*, got inf"),
        ({"timeout": float("nan")}, ValueError, "timeout must be .*, got nan"),
        ({"timeout": "10"}, TypeError, "timeout"),
        ({"timeout": None}, TypeError, "timeout"),
        ({"thread_count": 0}, ValueError, "thread_count must be .*, got 0"),
        ({"thread_count": 1.5}, TypeError, "thread_count"),
        ({"storage_options": ["key"]}, TypeError, "storage_options"),
        ({"on_progress": 5}, TypeError, "on_progress"),
        ({"on_report": "print"}, TypeError, "on_report"),
    ],
    ids=str,
)
def test_arguments_are_checked_when_they_are_given(options, error, words):
    """The error names the argument, and its value unless that may be a secret."""
    with pytest.raises(error, match=words):
        TensorizerStorageReader(**{"path": "nowhere"} | options)


def test_a_reader_shows_its_options_and_no_secrets():
    """The repr hides the secrets in the path and in the options."""
    reader = TensorizerStorageReader(
        "sftp://user:walrus-password@host/walrus-token/ckpt",
        storage_options={"passphrase": "walrus-token", "port": 2222},
        thread_count=3,
        verify=False,
    )
    assert repr(reader) == (
        "TensorizerStorageReader('sftp://host/***/ckpt', storage_options=['passphrase', 'port'], verify=False, "
        "allow_pickle=False, thread_count=3, page_cache=None, timeout=600.0, encryption=False)"
    )
    shown = repr(TensorizerStorageReader("/a"))
    assert shown.startswith("TensorizerStorageReader('/a', storage_options=[], verify=True")


def test_a_reader_is_used_again(tmp_path):
    """One reader loads several checkpoints, by checkpoint_id."""
    reader = TensorizerStorageReader(tmp_path / "a")
    for name, value in (("a", 1.0), ("b", 2.0)):
        save(tmp_path / name, {"w": torch.full((4,), value)})
    for name, value in (("a", 1.0), ("b", 2.0)):
        state = {"w": torch.zeros(4)}
        dcp.load(state, storage_reader=reader, checkpoint_id=str(tmp_path / name))
        assert state["w"].tolist() == [value] * 4


def test_fake_tensors(tmp_path):
    """With fake tensors, objects are loaded and tensors stay fake, as with torch's reader."""
    path = tmp_path / "checkpoint"
    dcp.save({"w": torch.ones(8, 8), "note": {"step": 3}}, storage_writer=TensorizerStorageWriter(path))
    with FakeTensorMode():
        target = {"w": torch.empty(8, 8), "note": {"step": 0}}
        dcp.load(target, storage_reader=TensorizerStorageReader(path))
    assert type(target["w"]) is FakeTensor
    assert target["note"] == {"step": 3}


def test_a_load_looks_at_the_files_that_it_reads(tmp_path):
    """Values in the metadata load without the data file; other values need the file, and the verify tool reports it."""
    save(tmp_path, {"w": torch.arange(5000.0), "small": torch.arange(3.0), "step": 7})
    (path,) = tmp_path.glob("*.tensors")
    path.unlink()
    state = {"small": torch.zeros(3), "step": 0}
    load(tmp_path, state)
    assert (state["small"].tolist(), state["step"]) == ([0.0, 1.0, 2.0], 7)
    with pytest.raises(CheckpointException, match="is missing"):
        load(tmp_path, {"w": torch.zeros(5000), **state})
    assert [path.name in str(damage) for damage in verify(tmp_path).damages] == [True]
