"""Tests of models in Hugging Face's layout, saved by one process: their files, errors, and leftovers of failures."""

from __future__ import annotations

import json
import logging
import math
import re
import signal
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException

from dcp_tensorizer import (
    CheckpointManager,
    Export,
    Publish,
    SafetensorsStorageWriter,
    TensorizerStorageWriter,
    WriteError,
    WriterProcessDied,
    unwrap,
)
from dcp_tensorizer._formats.safetensors import NAMES, PAIRS
from dcp_tensorizer._saving.writer_client import WriterClient
from dcp_tensorizer._storage.base import Refused
from dcp_tensorizer._storage.local import LocalStorage
from dcp_tensorizer._storage.s3 import S3Storage
from dcp_tensorizer._tensor_file.names import is_record_file_name, save_id_in
from dcp_tensorizer._writer_process.client import WriterProcess
from dcp_tensorizer.tools import collect

from .. import warm
from ..lab.models import INDEX, weight_files
from ..lab.processes import ROOT, kill
from ..lab.seams import limit_safetensors_headers
from ..lab.servers import S3Server
from ..lab.simulated import SimulatedDevice
from ..lab.states import dtype_name, filled, same
from ..lab.waiting import WAIT

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.usefixtures("one_writer_process"),  # a process that casts imports torch first
]


def save(path: Path | str, state: Mapping[str, Any], *, is_async: bool = True, **options: Any) -> None:
    with SafetensorsStorageWriter(path, **options) as writer:
        if is_async:
            dcp.async_save(dict(state), storage_writer=writer).result()
        else:
            dcp.save(dict(state), storage_writer=writer)


def refused(path: Path | str, state: Mapping[str, Any], **options: Any) -> str:
    """Returns the error of a save that fails."""
    with pytest.raises(CheckpointException) as caught:
        save(path, state, is_async=False, **options)
    error = unwrap(caught.value)
    assert isinstance(error, WriteError)
    return str(error)


def names(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def loaded(path: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a model, from the files that its index names."""
    return {key: tensor for file in weight_files(path) for key, tensor in load_file(file).items()}


def state() -> dict[str, torch.Tensor]:
    layers = {f"layers.{n}.w": torch.full((50, 20), float(n)) for n in range(4)}
    embedding = torch.arange(3000.0).view(100, 30)
    others = {"n": torch.tensor(7), "none": torch.empty(0, 3), "turned": torch.arange(12.0).view(3, 4).T}
    return {"embed": embedding, **layers, **others, "head": embedding}


def expected() -> dict[str, torch.Tensor]:
    return {key: tensor.contiguous() for key, tensor in state().items() if key != "head"}


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_files_are_what_the_library_makes_of_the_whole_state(tmp_path: Path, is_async: bool) -> None:
    """The files have the library's bytes, in one file or in several; tied tensors are written once."""
    save(tmp_path / "one", state(), is_async=is_async)
    save(tmp_path / "many", state(), is_async=is_async, max_shard_bytes=10_000)
    count = len(names(tmp_path / "many")) - 1
    assert names(tmp_path / "one") == ["model.safetensors"]
    assert names(tmp_path / "many") == [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)] + [
        INDEX
    ]
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected().values())
    assert set(index["weight_map"]) == set(expected())
    for file in (tmp_path / "one").glob("*.safetensors"), (tmp_path / "many").glob("*.safetensors"):
        for path in file:
            with safe_open(path, "pt") as opened:
                keys = list(opened.keys())
                assert opened.metadata() == {"format": "pt"}
            save_file({key: expected()[key] for key in keys}, tmp_path / "file", metadata={"format": "pt"})
            assert path.read_bytes() == (tmp_path / "file").read_bytes()


def specials(dtype: torch.dtype) -> torch.Tensor:
    """Returns NaNs, infinities, zeros, the smallest and the largest numbers, and numbers between representable ones."""
    numbers = [
        0.0,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        -math.nan,
        1e-45,
        6e-8,
        1e-40,
        65504.0,
        65520.0,
        3.4e38,
        1.00390625,
    ]
    numbers += [448.0, 464.0, 57344.0, 61440.0, 1.0009765625, 1.0029296875]
    listed = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    return torch.cat([listed, filled(dtype, (4099,))])


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_progress_ends_with_all_bytes_of_the_files(tmp_path: Path, is_async: bool) -> None:
    """Progress starts with 0, never decreases, always has the same total, and ends with it."""
    seen: list[tuple[int, int]] = []
    save(
        tmp_path, state(), is_async=is_async, max_shard_bytes=10_000, on_progress=lambda *numbers: seen.append(numbers)
    )
    total = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert (seen[0], seen[-1]) == ((0, total), (total, total))
    assert seen == sorted(seen)
    assert {of_all for _, of_all in seen} == {total}


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=dtype_name
)
def test_a_cast_is_that_of_the_tensor(tmp_path: Path, dtype: torch.dtype) -> None:
    """A cast in the writer process or in this one has the bits of ``tensor.to(dtype)``; integers stay."""
    sources = {dtype_name(d): specials(d) for d in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
    sources["ints"] = torch.arange(9)
    wanted = {key: tensor.to(dtype) if tensor.is_floating_point() else tensor for key, tensor in sources.items()}
    save(tmp_path / "there", sources, dtype=dtype)
    save(tmp_path / "here", sources, dtype=dtype, is_async=False)
    for path in (tmp_path / "there", tmp_path / "here"):
        found = load_file(path / "model.safetensors")
        assert {key: same(found[key], tensor) for key, tensor in wanted.items()} == dict.fromkeys(wanted, True)


def test_what_is_on_a_device_is_cast_there(tmp_path: Path) -> None:
    """Tensors on a device are cast before they cross the bus, so the writer process casts nothing."""
    device = SimulatedDevice()
    sources = {f"w{n}": device.declare(filled(torch.float32, (300, 400), seed=n)) for n in range(3)}
    sources["ints"] = device.declare(torch.arange(9))
    with SafetensorsStorageWriter(tmp_path, dtype=torch.bfloat16) as writer:
        writer.saver.stager._device = device
        writer.saver.engine.client._device = device
        staged = writer.stage(sources)
        assert {key: staged[key].dtype for key in ("w0", "ints")} == {"w0": torch.bfloat16, "ints": torch.int64}
        dcp.save(staged, storage_writer=writer)
    found = load_file(tmp_path / "model.safetensors")
    wanted = {key: tensor.bfloat16() if tensor.is_floating_point() else tensor for key, tensor in sources.items()}
    assert {key: same(found[key], tensor) for key, tensor in wanted.items()} == dict.fromkeys(wanted, True)


def test_every_dtype_of_the_format_comes_through(tmp_path: Path) -> None:
    """Every dtype of the format, including pairs of 4-bit floats, is written exactly."""
    tensors = {dtype_name(dtype): filled(dtype, (5, 6)) for dtype in NAMES}
    save(tmp_path / "model", tensors)
    found = load_file(tmp_path / "model" / "model.safetensors")
    pairs = tensors.pop(dtype_name(PAIRS))
    assert same(found.pop(dtype_name(PAIRS)).view(torch.uint8), pairs.view(torch.uint8))
    assert {key: same(found[key], tensor) for key, tensor in tensors.items()} == dict.fromkeys(found, True)


def test_names_are_changed_by_patterns_and_files_come_along(tmp_path: Path) -> None:
    """Keys are renamed by patterns, and all files of a directory except weights and a checkpoint's are copied."""
    (tmp_path / "from").mkdir()
    others = ("config.json", "tokenizer.json", "configuration_ckpt.py", "empty")
    weights = ("pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "rust_model.ot", "model.onnx", "m.onnx_data")
    weights += ("last.ckpt", "model.ckpt.index", "model.ckpt.data-00000-of-00001", "model.tensors", "X.GGUF")
    weights += (".metadata", "__1.metadata", ".metadata.tmp", "__0_0.distcp")
    weights += tuple(name.format("5f" * 16) for name in ("__0_0_{}.tensors", "__{}.saving", "config.json.{}.tmp"))
    indexes = (INDEX, "pytorch_model.bin.index.json", "tf_model.h5.index.json", "flax_model.msgpack.index.json")
    for name in (*others, *weights, *indexes):
        (tmp_path / "from" / name).write_text(f'"{name}"' if name != "empty" else "")
    (tmp_path / "extra.txt").write_text("extra")
    rename = {"layers.*.w": "model.layers.*.weight", "embed": "model.embed"}
    save(tmp_path / "to", state(), rename=rename, files=[tmp_path / "from", tmp_path / "extra.txt"])
    assert names(tmp_path / "to") == sorted([*others, "extra.txt", "model.safetensors"])
    assert {name: (tmp_path / "to" / name).read_text() for name in others} == {
        name: f'"{name}"' if name != "empty" else "" for name in others
    }
    renamed = {f"model.layers.{n}.weight" for n in range(4)} | {"model.embed", "n", "none", "turned"}
    assert set(loaded(tmp_path / "to")) == renamed


CONFIG = {"torch_dtype": "float32", "n": 1e-05, "text_config": {"dtype": "float32", "vision_config": {"a": 1}}}


def test_files_and_patterns_may_be_iterable_only_once(tmp_path: Path) -> None:
    """A writer copies the files of `Path.glob`, and an export selects the keys of a generator, in each save."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    with SafetensorsStorageWriter(tmp_path / "a", files=(tmp_path / "hf").glob("*.json")) as writer:  # type: ignore[arg-type]
        for path in (tmp_path / "a", tmp_path / "b"):
            dcp.save({"w": torch.ones(2)}, storage_writer=writer, checkpoint_id=path)
            assert names(path) == ["config.json", "model.safetensors"]
    patterns = (pattern for pattern in ["model.*"])
    export = Export(tmp_path / "model-{}", every=np.int64(1), include=patterns)  # type: ignore[arg-type]
    with CheckpointManager(tmp_path / "run", export=export, stop_signals=()) as manager:
        for step in (1, 2):
            manager.save(step, {"model": {"w": torch.full((2,), float(step))}, "step": step}, wait=True)
    assert {step: list(loaded(tmp_path / f"model-{step}")) for step in (1, 2)} == {1: ["w"], 2: ["w"]}


@pytest.mark.parametrize(
    ("config", "dtype", "written"),
    [
        (json.dumps(CONFIG), None, json.dumps(CONFIG)),
        (
            json.dumps(CONFIG | {"quantization_config": {"dtype": "float32"}}),
            torch.bfloat16,
            CONFIG
            | {"torch_dtype": "bfloat16", "text_config": {"dtype": "bfloat16", "vision_config": {"a": 1}}}
            | {"quantization_config": {"dtype": "float32"}},
        ),
        ('{"dtype":  "float16", "dtype_of": "float32"}', torch.float16, '{"dtype":  "float16", "dtype_of": "float32"}'),
        ('{"n": 1}', torch.bfloat16, '{"n": 1}'),
        ("[]", torch.bfloat16, "[]"),
        ("no json", torch.bfloat16, "no json"),
    ],
    ids=["no cast", "cast", "the same", "no dtype", "a list", "no json"],
)
def test_the_configuration_names_the_dtype_of_a_cast(
    tmp_path: Path, config: str, dtype: torch.dtype | None, written: Any
) -> None:
    """The copied configuration names the new dtype wherever it named one, also in nested configurations."""
    (tmp_path / "config.json").write_text(config)
    save(tmp_path / "to", state(), files=[tmp_path / "config.json"], dtype=dtype)
    found = (tmp_path / "to" / "config.json").read_text()
    assert (found if isinstance(written, str) else json.loads(found)) == written


@pytest.mark.promise("model-save-fails", reason="its files")
@pytest.mark.parametrize("failure", ["index", "one file", "another save"])
def test_files_that_come_along_are_replaced_by_the_commit(
    tmp_path: Path, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed save leaves the copied files of the previous model; in an empty directory it leaves no file."""
    source, path = tmp_path / "config.json", tmp_path / "model"
    options: dict[str, Any] = {"files": [source], "overwrite": True}
    options["max_shard_bytes"] = 1_000_000 if failure == "one file" else 10_000
    commit = LocalStorage.complete_shared if failure == "one file" else LocalStorage.put_if
    others: list[str] = []

    def fail(self: LocalStorage, what: Any, *arguments: Any, **keywords: Any) -> Any:
        if getattr(what, "name", what) not in (INDEX, "model.safetensors") or others:
            return commit(self, what, *arguments, **keywords)
        if failure == "one file":
            raise OSError(28, "No space left on device")
        if failure == "index":
            raise Refused("no space")
        others.append("another")
        source.write_text("another")
        save(path, state(), **options)
        return commit(self, what, *arguments, **keywords)

    def config() -> dict[str, str]:
        return {name: (path / name).read_text() for name in names(path) if "config" in name}

    for before in ({}, {"config.json": "old"}):
        for content in before.values():
            source.write_text(content)
            save(path, state(), **options)
        source.write_text("new")
        with monkeypatch.context() as patched:
            patched.setattr(LocalStorage, commit.__name__, fail)
            refused(path, state(), **options)
        assert config() == (dict.fromkeys(["config.json"], "another") if others else before)
        others.clear()
    source.write_text("last")
    save(path, state(), **options)
    assert config() == {"config.json": "last"}


def test_an_adapter_is_one_file_beside_its_configuration(tmp_path: Path) -> None:
    """An adapter has the file name that PEFT reads; another adapter replaces it atomically."""
    (tmp_path / "adapter_config.json").write_text("{}")
    adapter = {"base_model.model.q.lora_A.default.weight": torch.ones(2, 4)}
    options: dict[str, Any] = {"files": [tmp_path / "adapter_config.json"]}
    options["rename"] = {"*.lora_A.default.weight": "*.lora_A.weight"}
    save(tmp_path / "to", adapter, **options)
    assert names(tmp_path / "to") == ["adapter_config.json", "adapter_model.safetensors"]
    assert list(load_file(tmp_path / "to" / "adapter_model.safetensors")) == ["base_model.model.q.lora_A.weight"]
    assert "holds a model already" in refused(tmp_path / "to", adapter, **options)
    key = next(iter(adapter))
    save(tmp_path / "to", {key: torch.zeros(2, 4)}, overwrite=True, **options)
    assert load_file(tmp_path / "to" / "adapter_model.safetensors").popitem()[1].tolist() == [[0.0] * 4] * 2
    two = adapter | {"more.lora_A.default.weight": torch.ones(2, 4)}
    assert "PEFT loads only adapters of one file, but this adapter needs 2 files" in refused(
        tmp_path / "2", two, max_shard_bytes=40, **options
    )
    with pytest.raises(ValueError, match="publish= cannot publish adapters"):
        SafetensorsStorageWriter(tmp_path / "to", files=[tmp_path], publish=Publish(tmp_path / "published"))


def test_a_model_is_replaced_only_if_that_is_asked_for(tmp_path: Path) -> None:
    """The new files have other names, and the old ones are removed after the new index is in place."""
    save(tmp_path / "model", state(), max_shard_bytes=10_000)
    before = names(tmp_path / "model")
    assert "holds a model already. Save to another path, or pass overwrite=True" in refused(tmp_path / "model", state())
    assert names(tmp_path / "model") == before
    new = {key: tensor + 1 for key, tensor in expected().items()}
    save(tmp_path / "model", new, max_shard_bytes=10_000, overwrite=True)
    assert not set(before) & set(names(tmp_path / "model")) - {INDEX}
    assert all(
        re.fullmatch(r"model-[0-9a-f]{32}-\d{5}-of-\d{5}\.safetensors", n) for n in names(tmp_path / "model")[:-1]
    )
    assert {key: same(tensor, new[key]) for key, tensor in loaded(tmp_path / "model").items()} == dict.fromkeys(
        new, True
    )
    save(tmp_path / "model", {"a": torch.ones(3)}, overwrite=True)  # of one file, but the index has to go on
    assert loaded(tmp_path / "model")["a"].tolist() == [1.0] * 3
    assert len(names(tmp_path / "model")) == 2


def test_a_model_of_one_file_is_replaced_by_one_of_one_file(tmp_path: Path) -> None:
    """A model of one file replaces another atomically; several files, which it would hide, are refused."""
    save(tmp_path / "model", {"a": torch.ones(3)})
    save(tmp_path / "model", {"a": torch.zeros(3)}, overwrite=True)
    assert loaded(tmp_path / "model")["a"].tolist() == [0.0] * 3
    words = refused(tmp_path / "model", state(), max_shard_bytes=10_000, overwrite=True)
    assert "holds model.safetensors, which readers prefer to an index, but the new model needs an index" in words
    assert names(tmp_path / "model") == ["model.safetensors"]


def test_files_that_no_index_names_are_not_mixed_with_new_ones(tmp_path: Path) -> None:
    """Files that no index names are refused; with overwrite=True they stay, and the index names other files."""
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"?")
    words = refused(tmp_path, state(), max_shard_bytes=10_000)
    assert "holds model-00001-of-00002.safetensors, which no index lists" in words
    save(tmp_path, state(), max_shard_bytes=10_000, overwrite=True)
    assert (tmp_path / "model-00001-of-00002.safetensors").read_bytes() == b"?"
    assert set(loaded(tmp_path)) == set(expected())


def test_a_checkpoint_is_not_joined_by_a_model(tmp_path: Path) -> None:
    """A model is refused in the directory of a checkpoint, because readers could not choose."""
    with TensorizerStorageWriter(tmp_path) as writer:
        dcp.save({"a": torch.ones(2)}, storage_writer=writer)
    assert "holds a checkpoint. Save the model to another path" in refused(tmp_path, state(), overwrite=True)


@pytest.mark.parametrize(
    ("state", "options", "words"),
    [
        ({"w": torch.ones(2), "step": 7}, {}, "'step' is not a tensor, and safetensors holds only tensors. Leave it"),
        ({"w": torch.ones(2, dtype=torch.complex128)}, {}, "'w' is of torch.complex128, which safetensors does not"),
        ({"a": torch.ones(2), "b": torch.ones(2)}, {"rename": {"*": "c*", "x": "y"}}, "rules of rename=: 'x'"),
        ({"m.a": torch.ones(2), "a": torch.ones(2)}, {"rename": {"m.*": "*"}}, "'m.a' and 'a' would both be 'a'"),
        ({"m.a": torch.ones(2), "b": torch.ones(2)}, {"rename": {"m.*": "*"}}, "would map back to 'm.b'"),
        ({"__metadata__": torch.ones(2)}, {}, "'__metadata__' cannot be a key in safetensors"),
        (
            {"a": torch.ones(2)},
            {"rename": {"a": "__metadata__"}},
            "'__metadata__' (renamed from 'a') cannot be a key in safetensors",
        ),
    ],
    ids=["object", "dtype", "unused rule", "collision", "no way back", "key", "renamed key"],
)
def test_what_cannot_be_saved_is_refused(
    tmp_path: Path, state: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    """The error names the key and what to do, and no file is left."""
    assert words in refused(tmp_path / "model", state, **options)
    assert names(tmp_path / "model") == []


def test_files_that_would_be_parts_of_the_model_are_refused(tmp_path: Path) -> None:
    """Files that look like parts of the model, or cannot be read, are refused."""
    for name in ("x.safetensors", ".metadata"):
        (tmp_path / name).write_bytes(b"")
        words = refused(tmp_path / "model", state(), files=[tmp_path / name])
        assert (
            f"files= has {tmp_path / name}, which is named like weights or like a file of a checkpoint. Leave it out"
            in words
        )
    assert f"files= has {tmp_path / 'missing'}, which cannot be read" in refused(
        tmp_path / "model", state(), files=[tmp_path / "missing"]
    )
    assert names(tmp_path / "model") == []


def test_a_storage_that_several_processes_cannot_write_to_is_refused() -> None:
    """The error names the storages that can hold a model; the writer raises it, or the save with such an id."""
    words = "memory://models/a: several processes cannot .* Save the model to a local directory, a network mount or S3"
    with pytest.raises(WriteError, match=words):
        SafetensorsStorageWriter("memory://models/a")
    with pytest.raises(CheckpointException) as caught, SafetensorsStorageWriter() as writer:
        dcp.save(state(), storage_writer=writer, checkpoint_id="memory://models/a")
    assert re.search(words, str(unwrap(caught.value)))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "bfloat16"}, TypeError, "dtype must be an instance of dtype, got str"),
        ({"dtype": torch.int8}, ValueError, "dtype must be a floating-point dtype of safetensors, got torch.int8"),
        ({"rename": {"a*": "b"}}, ValueError, "'b' cannot become 'a*'"),
        ({"max_shard_bytes": 0}, ValueError, "max_shard_bytes must be an int of at least 1, got 0."),
        ({"files": "config.json"}, TypeError, "files must be a list of paths, got 'config.json'"),
        ({"on_progress": 5}, TypeError, "on_progress"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_are_checked(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """An invalid argument is an error of the constructor, which names the argument and the allowed values."""
    with pytest.raises(error, match=re.escape(message)):
        SafetensorsStorageWriter("x", **options)


def test_a_writer_process_that_dies_is_replaced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After the first death, the pieces are written again; a second death fails the save and leaves the old model."""
    deaths = [1]
    original: Callable[..., Any] = WriterProcess.ask

    def ask(self: WriterProcess, *arguments: Any) -> Any:
        if deaths[0]:
            deaths[0] -= 1
            kill(psutil.Process(self.pid))
        return original(self, *arguments)

    monkeypatch.setattr(WriterProcess, "ask", ask)
    with caplog.at_level(logging.WARNING, "dcp_tensorizer"):
        save(tmp_path, state(), max_shard_bytes=10_000)
    assert "writing once more with a fresh process" in caplog.text
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    assert set(loaded(tmp_path)) == set(expected())
    deaths[0] = 2
    with pytest.raises(CheckpointException) as caught:
        save(tmp_path, state(), max_shard_bytes=10_000, overwrite=True)
    assert isinstance(unwrap(caught.value), WriterProcessDied)
    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == before


def test_an_index_that_cannot_be_written_leaves_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the index cannot be written, the old model stays, and no new file is left."""
    save(tmp_path, state(), max_shard_bytes=10_000)
    before = names(tmp_path)

    def put(*arguments: Any, **options: Any) -> None:
        raise Refused("the disk is full")

    monkeypatch.setattr(LocalStorage, "put", put)
    assert "the disk is full" in refused(tmp_path, state(), max_shard_bytes=10_000, overwrite=True)
    assert names(tmp_path) == before
    assert set(loaded(tmp_path)) == set(expected())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"every": 2}, ValueError, "every= exports several models to one path. Put {} for the step into the path"),
        ({"every": 0}, ValueError, "every must be an int of at least 1, or None, got 0."),
        ({"include": "model.*"}, TypeError, "include must be a list of patterns, got 'model.*'"),
        ({"dtype": torch.int8}, ValueError, "dtype must be a floating-point dtype of safetensors, got torch.int8"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_exported_is_checked(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """The options of an export are checked when it is made, not when the first export is due."""
    with pytest.raises(error, match=re.escape(message)):
        Export("models", **options)


@pytest.mark.parametrize("options", [{"staging": "shared"}, {"cache_staged_state_dict": False}])
def test_a_manager_that_keeps_no_copy_exports_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    """An export with a manager that makes no staged copy is an error."""
    with pytest.raises(ValueError, match="cannot be combined"):
        CheckpointManager(tmp_path, export=Export(tmp_path / "model"), **options)


@pytest.fixture
def prefix(s3: S3Server) -> Iterator[str]:
    """Yields a prefix for objects, which are deleted afterwards."""
    name = uuid.uuid4().hex
    yield name
    for key in s3.objects(name):
        s3.client().delete_object(Bucket=s3.bucket, Key=f"{name}/{key}")


@pytest.mark.parametrize(
    ("bucket", "changes", "cause"),
    [
        ("no-such-bucket-x", {}, "the bucket 'no-such-bucket-x' does not exist"),
        ("tests-bucket", {"secret": "wrong-secret-x"}, "403: Forbidden"),
    ],
)
def test_a_model_that_cannot_be_read_before_its_save(
    s3: S3Server, bucket: str, changes: dict[str, str], cause: str
) -> None:
    """If the bucket is missing, or access is denied, the save raises `WriteError`, with path and cause."""
    url = f"s3://{bucket}/model"
    with pytest.raises(CheckpointException) as raised:
        save(url, {"w": torch.ones(2)}, storage_options=s3.options() | changes)
    error = unwrap(raised.value)
    assert type(error) is WriteError
    assert re.match(f"cannot save to {url}: cannot (read|list) {url}.*{cause}", str(error)), str(error)


def in_shards(storage_options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Returns the options of a writer that replaces a model, and a state of two files."""
    options = {"max_shard_bytes": 1_000_000, "storage_options": storage_options, "overwrite": True}
    return options, {"a": torch.ones(250_000), "b": torch.ones(250_000)}


_KILLED = """
import os, signal, sys, torch, torch.distributed.checkpoint as dcp
from dcp_tensorizer import SafetensorsStorageWriter
from dcp_tensorizer._storage.s3 import S3Storage
original = getattr(S3Storage, sys.argv[3])
def killed(self, *arguments, **options):
    if any(("-00002-of" if sys.argv[3] == "begin_shared" else "model") in str(argument) for argument in arguments):
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, *arguments, **options)
setattr(S3Storage, sys.argv[3], killed)
options = {"storage_options": eval(sys.argv[2]), "max_shard_bytes": 1_000_000}
writer = SafetensorsStorageWriter(sys.argv[1], overwrite=len(sys.argv) > 4, **options)
dcp.save({"a": torch.ones(250_000), "b": torch.ones(250_000)}, storage_writer=writer, no_dist=True)
"""


def test_files_that_come_along_are_uploads_of_their_own(
    s3: S3Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied files are separate uploads; a failed save completes none of them, and leaves no upload."""
    url = f"s3://{s3.bucket}/{prefix}"
    contents = {"config.json": b"old", "empty": b"", "tokenizer.json": bytes(range(256)) * (9 << 12)}
    options, tensors = in_shards(s3.options())
    options["files"] = [tmp_path / name for name in contents]

    def write(state: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
        for name, content in contents.items():
            (tmp_path / name).write_bytes(content)
        save(url, state, **options)
        bodies = {name: s3.client().get_object(Bucket=s3.bucket, Key=f"{prefix}/{name}")["Body"] for name in contents}
        return {name: body.read() for name, body in bodies.items()}

    assert write(tensors) == contents
    contents["config.json"] = b"new"

    def put_if(*arguments: Any, **keywords: Any) -> bool:
        raise Refused("no")

    with monkeypatch.context() as patched:
        patched.setattr(S3Storage, "put_if", put_if)
        with pytest.raises(CheckpointException):
            write(tensors)
    body = s3.client().get_object(Bucket=s3.bucket, Key=f"{prefix}/config.json")["Body"]
    assert (body.read(), s3.uploads(prefix)) == (b"old", [])
    assert write(tensors) == contents


@pytest.mark.parametrize(("at", "begun"), [("open_shared", 2), ("begin_shared", 1)])
def test_uploads_of_a_killed_coordinator_are_aborted(s3: S3Server, at: str, begun: int) -> None:
    """The record of the killed coordinator names its uploads, so the next save to the path aborts them.

    gc aborts them when they are old enough.
    """
    prefix = uuid.uuid4().hex
    url, options = f"s3://{s3.bucket}/{prefix}/model", s3.options()
    command = [warm.python(), "-c", _KILLED, url, repr(options), at]
    for end in ("save", "gc"):
        assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == -signal.SIGKILL
        assert len(s3.uploads(prefix)) == begun
        if end == "save":
            save(url, {"a": torch.ones(3)}, storage_options=options)
            assert s3.objects(prefix) == ["model/model.safetensors"]
            s3.client().delete_object(Bucket=s3.bucket, Key=f"{prefix}/model/model.safetensors")
            continue
        (removal,) = collect(url, older_than=3600.0, storage_options=options)
        assert "a save or a copy may be in progress" in str(removal.kept)
        (removal,) = collect(url, older_than=0.0, storage_options=options)
        assert removal.kept is None
    assert (s3.uploads(prefix), s3.objects(prefix)) == ([], [])


def test_files_of_a_coordinator_that_was_killed_before_the_index(s3: S3Server) -> None:
    """The record names the killed save's files, so the next save or gc removes them; other files stay."""
    prefix = uuid.uuid4().hex
    url, options = f"s3://{s3.bucket}/{prefix}/model", s3.options()
    files = [f"model/model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for end in ("save", "gc", "another's file"):
        command = [warm.python(), "-c", _KILLED, url, repr(options), "put_if"]
        assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == -signal.SIGKILL
        record, *found = s3.objects(prefix)
        assert (found, s3.uploads(prefix)) == (files, [])
        if end == "save":
            save(url, {"a": torch.ones(3)}, storage_options=options)
            file, index = s3.objects(prefix)
            assert index == "model/model.safetensors.index.json"
            assert file not in (*files, record)
        elif end == "gc":
            (removal,) = collect(url, older_than=0.0, storage_options=options)
            assert removal.kept is None
            assert s3.objects(prefix) == []
        else:
            s3.client().put_object(Bucket=s3.bucket, Key=f"{prefix}/{files[0]}", Body=b"another's")
            message = refused(url, {"a": torch.ones(3)}, storage_options=options)
            assert f"holds {files[0].removeprefix('model/')}, which no index lists" in message
        for key in s3.objects(prefix):
            s3.client().delete_object(Bucket=s3.bucket, Key=f"{prefix}/{key}")


@pytest.mark.parametrize("has_index", [True, False], ids=["several files", "one file"])
def test_files_of_a_killed_coordinator_beside_a_model(s3: S3Server, prefix: str, has_index: bool) -> None:
    """The next save with overwrite=True removes the files; until then, their record stays."""
    url, options = f"s3://{s3.bucket}/{prefix}/model", s3.options()
    state = {"a": torch.ones(250_000), "b": torch.ones(250_000)}
    shards = {"max_shard_bytes": 1_000_000} if has_index else {}
    save(url, state, storage_options=options, **shards)
    before = s3.objects(prefix)
    kill = [warm.python(), "-c", _KILLED, url, repr(options), "put_if", "overwrite"]
    if not has_index:  # readers prefer the one file, so a save of several refuses: these are of a save before it
        s3.client().delete_object(Bucket=s3.bucket, Key=f"{prefix}/{before[0]}")
    assert subprocess.run(kill, cwd=ROOT, capture_output=True).returncode == -signal.SIGKILL
    left = set(s3.objects(prefix)) - set(before)
    assert len(left) == 3 + has_index, "two files, its record, and one of the save that it was to replace"
    if not has_index:
        s3.client().put_object(Bucket=s3.bucket, Key=f"{prefix}/{before[0]}", Body=b"a model")
    assert "holds a model already" in refused(url, state, storage_options=options, **shards)
    assert set(s3.objects(prefix)) == {*before, *left}
    save(url, state, storage_options=options, overwrite=True, **shards)
    assert len(s3.objects(prefix)) == len(before)
    assert left.isdisjoint(s3.objects(prefix))


@pytest.mark.parametrize("moment", ["unmark", "remove"], ids=["after the index", "before the first file"])
@pytest.mark.parametrize("end", ["save", "gc"])
def test_files_that_a_killed_coordinator_was_to_remove(s3: S3Server, prefix: str, moment: str, end: str) -> None:
    """The next save or gc removes the replaced model, but not files that have replaced its files meanwhile."""
    url, options = f"s3://{s3.bucket}/{prefix}/model", s3.options()
    shards: dict[str, Any] = {"max_shard_bytes": 1_000_000, "storage_options": options, "overwrite": True}
    save(url, state := {"a": torch.ones(250_000), "b": torch.ones(250_000)}, **shards)
    replaced, others, _ = s3.objects(prefix)
    kill = [warm.python(), "-c", _KILLED, url, repr(options), moment, "overwrite"]
    assert subprocess.run(kill, cwd=ROOT, capture_output=True).returncode == -signal.SIGKILL
    assert {replaced, others} < set(s3.objects(prefix))
    s3.client().put_object(Bucket=s3.bucket, Key=f"{prefix}/{others}", Body=b"another's")
    if end == "save":
        save(url, state, **shards)
    else:
        (removal,) = collect(url, older_than=0.0, storage_options=options)
        assert removal.kept is None
    index = s3.client().get_object(Bucket=s3.bucket, Key=f"{prefix}/model/{INDEX}")["Body"].read()
    named = {f"model/{name}" for name in json.loads(index)["weight_map"].values()}
    assert set(s3.objects(prefix)) == {*named, f"model/{INDEX}", others}


def test_a_save_whose_files_another_has_removed_is_refused(
    s3: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another save removes a paused save's files as leftovers, the paused save is refused; the other is whole."""
    url, options = f"s3://{s3.bucket}/{prefix}/model", s3.options()
    shards, state = in_shards(options)
    save(url, state, **shards)
    other = [warm.python(), "-c", _KILLED, url, repr(options), "adopt", "overwrite"]
    original, puts = S3Storage.put_if, []

    def late(self: S3Storage, *arguments: Any, **given: Any) -> bool:
        puts.append(arguments[0])
        assert subprocess.run(other, cwd=ROOT, capture_output=True).returncode == 0
        return original(self, *arguments, **given)

    monkeypatch.setattr(S3Storage, "put_if", late)
    assert "another save has just written a model" in refused(url, state, **shards)
    assert puts == [INDEX]
    index = s3.client().get_object(Bucket=s3.bucket, Key=f"{prefix}/model/{INDEX}")["Body"].read()
    named = set(json.loads(index)["weight_map"].values())
    assert set(s3.objects(prefix)) == {f"model/{name}" for name in (INDEX, *named)}


def test_a_replaced_model_keeps_its_record_until_it_is_removed(
    s3: S3Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that removes older files late, after the next save has written the record again, leaves the record."""
    url, options = f"s3://{s3.bucket}/{prefix}/model", s3.options()
    shards, state = in_shards(options)
    goes_on, original, seen = threading.Event(), WriterClient.publish, list[list[str]]()

    def held(self: WriterClient, *arguments: Any) -> Any:
        seen.append(s3.objects(prefix))
        assert goes_on.wait(WAIT)
        return original(self, *arguments)

    with SafetensorsStorageWriter(url, publish=Publish(tmp_path), **shards) as writer:
        dcp.save(state, storage_writer=writer)
        assert writer.wait_published() is not None
        monkeypatch.setattr(WriterClient, "publish", held)
        for _ in range(2):
            dcp.save(state, storage_writer=writer)
        goes_on.set()
        assert writer.wait_published() is not None
    objects = [key.rpartition("/")[2] for key in seen[-1]]  # the files of the first save are removed by then
    (record,) = filter(is_record_file_name, objects)
    assert len([name for name in objects if save_id_in(record) in name]) == 3, "the second save's record and two files"
    assert len(objects) == 6, "the files of the third save, and its index"
    assert len(s3.objects(prefix)) == 3


def test_files_that_are_being_published_are_not_those_of_a_dead_save(
    s3: S3Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are being published stay until then, even if killed saves and other saves follow meanwhile."""
    url, options = f"s3://{s3.bucket}/{prefix}/model", s3.options()
    shards, state = in_shards(options)
    goes_on, original = threading.Event(), WriterClient.publish

    def held(self: WriterClient, *arguments: Any) -> Any:
        assert goes_on.wait(WAIT)
        return original(self, *arguments)

    monkeypatch.setattr(WriterClient, "publish", held)
    save(url, state, **shards)
    with SafetensorsStorageWriter(url, publish=Publish(tmp_path), **shards) as writer:
        goes_on.set()
        dcp.save(state, storage_writer=writer)
        assert writer.wait_published() is not None
        goes_on.clear()
        kill = [warm.python(), "-c", _KILLED, url, repr(options), "put_if", "overwrite"]
        assert subprocess.run(kill, cwd=ROOT, capture_output=True).returncode == -signal.SIGKILL
        dcp.save(state, storage_writer=writer)  # keeps the files of the model before, with which it is compared
        index = s3.client().get_object(Bucket=s3.bucket, Key=f"{prefix}/model/{INDEX}")["Body"].read()
        published = {f"model/{name}" for name in json.loads(index)["weight_map"].values()}
        for _ in range(2):
            dcp.save(state, storage_writer=writer)
        gone = published - set(s3.objects(prefix))
        goes_on.set()
        assert gone == set()
        version = writer.wait_published()
        assert version is not None
        assert version.version == 3
    assert len(s3.objects(prefix)) == 3


def test_a_header_that_safetensors_would_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose header exceeds the limit of safetensors fails before the old model is replaced."""
    with SafetensorsStorageWriter(tmp_path / "model", overwrite=True) as writer:
        dcp.save({"w": torch.arange(4.0)}, storage_writer=writer)
        limit_safetensors_headers(monkeypatch, 1000)
        with pytest.raises(CheckpointException) as caught:
            dcp.save({"w": torch.zeros(1), "v" * 1000: torch.zeros(1)}, storage_writer=writer)
    words = "the header of a safetensors file with 2 tensors would have 1,144 bytes, and safetensors allows 1,000"
    assert f"{tmp_path}/model: {words}" in str(unwrap(caught.value))
    assert load_file(tmp_path / "model" / "model.safetensors")["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
