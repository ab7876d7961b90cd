"""The commands as Python functions that return plain, frozen records."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import tracemalloc
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_tensorizer import open_reader, tools
from dcp_tensorizer._storage.base import FileInfo
from dcp_tensorizer._storage.local import LocalStorage
from dcp_tensorizer._tensor_file.regions import Region
from dcp_tensorizer.errors import CheckpointError, DecryptionError, MetadataError, NotCommitted
from dcp_tensorizer.tools import Collected, convert
from dcp_tensorizer.tools._diff import Change
from dcp_tensorizer.tools._formats.registry import TARGETS
from dcp_tensorizer.tools._inspect import ChunkInfo, TensorInfo, Total
from dcp_tensorizer.tools._verify import Damage

from ..lab.checkpoints import make_checkpoint
from ..lab.index_edits import edit_index

KEY = "a key"
RECORDS = [getattr(tools, name) for name in tools.__all__ if inspect.isclass(getattr(tools, name))]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Makes three steps of a tensor in two chunks and an object."""
    for step in (9, 10, 11):
        chunks = {"model.w": [Region((0, 0), (3, 2)), Region((3, 0), (1, 2))]}
        tensors = {"model.w": torch.full((4, 2), float(step)), "model.b": torch.ones(2, dtype=torch.bfloat16)}
        make_checkpoint(tmp_path / "run" / f"step-{step}", tensors, {"lr": 0.5}, chunks)
    return tmp_path / "run"


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_records_are_plain_and_documented(record: type) -> None:
    """Records are frozen, hold builtin types, and have docstrings."""
    assert dataclasses.is_dataclass(record)
    assert record.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert record.__doc__ and not record.__doc__.startswith(f"{record.__name__}(")


def test_functions_are_documented() -> None:
    """Docstrings of functions name all arguments and errors."""
    for name in ("list_checkpoints", "inspect", "verify", "diff", "collect", "report"):
        doc = getattr(tools, name).__doc__
        assert "Args:" in doc and "Raises:" in doc


def test_what_is_listed(run: Path) -> None:
    """`list_checkpoints` returns the highest step first, with the time of each save in UTC."""
    found = tools.list_checkpoints(run)
    assert [(c.path, c.step, c.state) for c in found] == [
        (str(run / f"step-{step}"), step, "committed") for step in (11, 10, 9)
    ]
    assert (found[0].ranks, found[0].tensors, found[0].objects, found[0].leftover_nbytes) == (2, 2, 1, 0)
    assert found[0].saved is not None
    assert timedelta() <= datetime.now(timezone.utc) - found[0].saved < timedelta(minutes=10)


def test_what_is_in_a_checkpoint(run: Path) -> None:
    """`inspect` returns shapes, chunks with locations, values of objects, and totals."""
    found = tools.inspect(run / "step-9")
    assert [tensor.key for tensor in found.tensors] == ["model.w", "model.b"]
    names = {file.rank: file.file for file in found.files}
    first, second = found.tensors[0].chunks
    assert first == ChunkInfo((0, 0), (3, 2), 24, 0, names[0], first.file_offset)
    assert second == ChunkInfo((3, 0), (1, 2), 8, 1, names[1], second.file_offset)
    assert dataclasses.replace(found.tensors[1], chunks=()) == TensorInfo("model.b", (2,), "bfloat16", 4, ())
    assert [(o.key, o.type, o.text, o.value) for o in found.objects] == [("lr", "float", "0.5", 0.5)]
    assert found.by_dtype == {"float32": Total(1, 8, 32), "bfloat16": Total(1, 2, 4)}
    assert [tensor.key for tensor in tools.inspect(run / "step-9", "*.w").tensors] == ["model.w"]
    with pytest.raises(CheckpointError, match=r"no key that matches 'x\*': its keys begin with 'model', 'lr'"):
        tools.inspect(run / "step-9", "x*")


def test_what_is_damaged(run: Path) -> None:
    """`verify` returns no damage, or the damaged files."""
    assert tools.verify(run / "step-9", full=True).damages == ()
    gone = min((run / "step-9").glob("__1_*.tensors"))
    gone.unlink()
    (damage,) = tools.verify(run / "step-9").damages
    assert damage == Damage(gone.name, None, 0, "is missing; lost: 'model.w' (1 in all)")


@pytest.mark.parametrize("is_missing", [False, True])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_damaged_checkpoint_of_torch_hides_no_other_damage(run: Path, is_missing: bool) -> None:
    """`verify` of a folder reports a truncated or missing file of torch's checkpoint, and the damage in the others."""
    dcp.save({"w": torch.ones(1000), "x": torch.ones(9)}, checkpoint_id=run / "step-10a", no_dist=True)
    (data,) = (run / "step-10a").glob("*.distcp")
    if is_missing:
        data.unlink()
    else:
        os.truncate(data, 3000)
    min((run / "step-11").glob("*.tensors")).unlink()
    found = tools.verify(run).damages
    assert {damage.file.partition("/")[0] for damage in found} == {"step-10a", "step-11"}
    assert all(str(data) in damage.what for damage in found if damage.file == "step-10a")


def test_what_differs(run: Path) -> None:
    """`diff` returns the difference of each key."""
    found = tools.diff(run / "step-9", run / "step-11")
    assert found.changed == (Change("model.w", "value", "", "", 8, 8, 2.0, pytest.approx(2 / 11)),)
    assert (found.same, found.added, found.removed) == (2, (), ())


def test_what_is_collected(run: Path) -> None:
    """`collect` with `dry_run` returns what it would remove, and without it removes that."""
    files = {path.name for path in (run / "step-9").iterdir()}
    nbytes = sum(path.stat().st_size for path in (run / "step-9").iterdir())
    (planned,) = tools.collect(run, keep_latest=2, dry_run=True)
    assert (set(planned.files), (run / "step-9").exists()) == (files, True)
    assert planned == Collected(str(run / "step-9"), True, planned.files, nbytes, None, False)
    assert tools.collect(run, keep_latest=2) == (planned,)
    assert {path.name for path in run.iterdir()} == {"step-10", "step-11"}
    assert tools.collect(run, keep_latest=1, older_than=3600.0) == ()
    with pytest.raises(ValueError, match=r"^keep_latest must be an int of at least 1, or None, got 0\.$"):
        tools.collect(run, keep_latest=0)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"older_than": math.nan}, ValueError, "older_than must be at least 0 seconds, .*, got nan"),
        ({"older_than": -1}, ValueError, "older_than must be at least 0 seconds, .*, got -1"),
        ({"older_than": timedelta(days=1)}, TypeError, "older_than must be a number of seconds, .*, got timedelta"),
        ({"keep_latest": True}, TypeError, "keep_latest must be an int of at least 1, or None, got bool"),
        ({"keep_latest": 2.5}, TypeError, "keep_latest must be an int of at least 1, or None, got float"),
        ({"dry_run": 1, "keep_latest": 1}, TypeError, "dry_run must be True or False, got 1"),
    ],
)
def test_what_is_not_collected(run: Path, options: dict[str, Any], error: type[Exception], words: str) -> None:
    """An invalid argument is refused before any checkpoint is removed."""
    before = sorted(path.name for path in run.iterdir())
    with pytest.raises(error, match=f"^{words}"):
        tools.collect(run, **options)
    assert sorted(path.name for path in run.iterdir()) == before


def test_one_path_is_not_a_list(tmp_path: Path) -> None:
    """The letters of a str would be the paths of a report or a trace."""
    with pytest.raises(TypeError, match=r"^checkpoints must be a list of paths, got 'ckpt'\.$"):
        tools.report("ckpt", tmp_path / "report.html")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^sources must be a list of paths, got 'spans'\.$"):
        tools.trace("spans", tmp_path / "trace.json")  # type: ignore[arg-type]


def test_a_path_whose_checkpoints_lie_below(run: Path) -> None:
    """The error for a path above checkpoints names the highest steps, two levels deep."""
    for path, hint in (
        (run, r"below it: step-11, step-10, step-9\.$"),
        (run.parent, r"below it: run/step-11, run/step-10, run/step-9\.$"),
        (run / "step-12", r"there is no such directory\.$"),
    ):
        with pytest.raises(NotCommitted, match=hint):
            tools.inspect(path)
    make_checkpoint(run / "step-100", {"x": torch.ones(1)})
    with pytest.raises(NotCommitted, match=r"below it: step-100, step-11, step-10 and others\.$"):
        tools.inspect(run)


def test_torchs_own_checkpoints_are_listed(run: Path) -> None:
    """`list_checkpoints` lists torch's own checkpoints as such."""
    convert(run / "step-9", run / "step-12", "dcp")
    assert next((c.step, c.state, c.tensors) for c in tools.list_checkpoints(run)) == (12, "torch", None)


@pytest.mark.parametrize("form", sorted(TARGETS))
def test_what_convert_writes_is_inspected_and_verified(tmp_path: Path, form: str) -> None:
    """`inspect` and `verify` read each format that `convert` writes."""
    tensors = {"a.b": torch.arange(6.0).reshape(2, 3), "c": torch.ones(5, dtype=torch.bfloat16)}
    objects = {} if form in ("safetensors", "tensorizer") else {"step": 7}
    make_checkpoint(tmp_path / "source", tensors, objects)
    target = tmp_path / ("target" if form in ("dcp", "dcp_tensorizer", "safetensors") else "target.file")
    convert(tmp_path / "source", target, form)
    found = tools.inspect(target)
    assert {t.key: (t.shape, t.dtype, t.nbytes) for t in found.tensors} == {
        "a.b": ((2, 3), "float32", 24),
        "c": ((5,), "bfloat16", 10),
    }
    assert [(o.key, o.value) for o in found.objects] == list(objects.items())
    assert found.ranks == (1 if form == "dcp_tensorizer" else None)
    assert {file.file: file.nbytes for file in found.files} == {
        path.name: path.stat().st_size
        for path in (target.iterdir() if target.is_dir() else [target])
        if path.suffix in (".tensors", ".distcp", ".safetensors", ".file")
    }
    shown: list[tuple[int, int]] = []
    verified = tools.verify(target, on_progress=lambda done, total: shown.append((done, total)))
    assert (verified.damages, verified.items) == ((), 2 + len(objects))
    assert verified.digests is (form in ("dcp_tensorizer", "tensorizer"))
    assert shown[-1] == (verified.nbytes, verified.nbytes)
    assert verified.nbytes >= 34


def test_damage_in_a_tensorizer_file(tmp_path: Path) -> None:
    """`verify` finds damage in a tensorizer file by its CRC-32, and fails for a truncated file."""
    make_checkpoint(tmp_path / "source", {"a": torch.ones(1000)})
    for form in ("tensorizer", "safetensors"):
        convert(tmp_path / "source", tmp_path / form, form)
    file = tmp_path / "tensorizer"
    content = bytearray(file.read_bytes())
    at = content.find(torch.ones(2).numpy().tobytes())
    content[at] ^= 1
    file.write_bytes(content)
    (damage,) = tools.verify(file).damages
    assert (damage.file, damage.key, damage.offset) == ("tensorizer", "a", at)
    assert "CRC-32" in damage.what
    (model,) = (tmp_path / "safetensors").glob("*.safetensors")
    model.write_bytes(model.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=model.name):
        tools.verify(tmp_path / "safetensors")


def test_a_run_is_verified_as_a_whole(run: Path) -> None:
    """`verify` of a folder verifies all checkpoints of any format, and names damage by step."""
    convert(run / "step-9", run / "step-12", "dcp")
    whole = tools.verify(run)
    assert (whole.checkpoints, whole.damages, whole.digests) == (4, (), False)
    each = [tools.verify(run / f"step-{step}") for step in (9, 10, 11, 12)]
    assert (whole.files, whole.items, whole.nbytes) == tuple(
        sum(getattr(one, name) for one in each) for name in ("files", "items", "nbytes")
    )
    file = min((run / "step-10").glob("*.tensors"))
    file.unlink()
    metadata = bytearray((run / "step-11" / ".metadata").read_bytes())
    metadata[len(metadata) // 2] ^= 1
    (run / "step-11" / ".metadata").write_bytes(metadata)
    found = tools.verify(run)
    assert [damage.file for damage in found.damages] == ["step-11/.metadata", f"step-10/{file.name}"]
    assert found.checkpoints == 3


def test_a_step_that_is_deleted_after_it_was_listed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify` and hints skip a directory that its parent lists, and that no longer exists."""
    listing = LocalStorage.listing

    def stale(storage: LocalStorage) -> tuple[list[FileInfo], list[str]]:
        files, folders = listing(storage)
        return files, [*folders, "step-12"] if folders else folders

    monkeypatch.setattr(LocalStorage, "listing", stale)
    assert tools.verify(run).checkpoints == 3
    with pytest.raises(NotCommitted, match=r"below it: run/step-11, run/step-10, run/step-9\.$"):
        tools.inspect(run.parent)


def test_a_small_index_of_millions_of_chunks(run: Path) -> None:
    """Loads and tools refuse it without the memory that its chunks would take."""

    def forge(rows: Any) -> None:
        count = 8_000_000
        number = next(number for number, row in enumerate(rows.layouts) if row.offsets is not None)
        row = rows.layouts[number]
        row.count, row.offsets, row.sizes = count, [[(0, 1, count)], [(0, 0, count)]], [[(1, 0, count)]] * 2
        for entry in rows.entries:
            if getattr(entry, "layout", None) == number:
                rows.owners[entry.owners] = [(0, 0, count)]

    path = run / "step-11"
    edit_index(path / ".metadata", "entries", forge)
    state = {"model.w": torch.zeros(4, 2)}
    tracemalloc.start()
    try:
        for verb in (tools.inspect, tools.verify, lambda path: tools.diff(path, path)):
            with pytest.raises(MetadataError, match=r"step-11.* takes 48,000,002 numbers"):
                verb(path)
        with pytest.raises(CheckpointException, match="takes 48,000,002 numbers"):
            dcp.load(state, storage_reader=open_reader(path))
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_a_key_that_is_none(run: Path) -> None:
    """A key of a wrong type is a TypeError before anything is read."""
    for verb in (tools.inspect, lambda path, **key: tools.diff(path, path, **key)):
        with pytest.raises((DecryptionError, TypeError), match="encryption"):
            verb(run / "step-9", encryption=KEY)
