"""Tests of a writer that publishes each of its models, in a separate process."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_tensorizer import (
    CheckpointManager,
    Export,
    Publish,
    SafetensorsStorageWriter,
    WriteError,
    apply_delta,
    publish,
    unwrap,
)
from dcp_tensorizer._models.versions import SavedModel, VersionsOfWriter
from dcp_tensorizer._publish.publisher import Publication
from dcp_tensorizer._runtime.threads import Deadline
from dcp_tensorizer._saving.writer_client import WriterClient
from dcp_tensorizer._storage.local import LocalStorage
from dcp_tensorizer._writer_process.options import SaveLimits, SaveOptions
from dcp_tensorizer.tools import list_versions, verify_versions
from dcp_tensorizer.writer import SaveReport

from ...lab.models import weights_of, write_model
from ...lab.processes import workers
from ...lab.waiting import WAIT

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state(step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    weights = {f"layers.{n}.w": torch.randn(100, 60) for n in range(3)}
    return {key: weight * (1 + step * 1e-3) for key, weight in weights.items()} | {"frozen": torch.ones(5)}


@pytest.fixture
def publications_may_begin(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until this event is set, no publication begins."""
    may_begin, original = threading.Event(), WriterClient.publish

    def held(self: WriterClient, request: Publication, *arguments: Any) -> Any:
        assert may_begin.wait(WAIT)
        return original(self, request, *arguments)

    monkeypatch.setattr(WriterClient, "publish", held)
    return may_begin


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("in_place", [False, True], ids=["a directory each", "one directory"])
def test_each_model_becomes_a_version(tmp_path: Path, is_async: bool, in_place: bool) -> None:
    """The first version is whole, and later ones are deltas of the cast model; a copy gets exactly their bytes."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "max_shard_bytes": 20_000, "overwrite": True}
    published = tmp_path / "published"
    with SafetensorsStorageWriter(publish=Publish(published, max_deltas=2), **options) as writer:
        for step in range(4):
            model = tmp_path / ("model" if in_place else f"model-{step}")
            if is_async:
                dcp.async_save(state(step), storage_writer=writer, checkpoint_id=model).result()
            else:
                dcp.save(state(step), storage_writer=writer, checkpoint_id=model)
            version = writer.wait_published()
            assert version is not None
            assert version.version == step + 1
            apply_delta(tmp_path / "copy", published)
            assert weights_of(tmp_path / "copy") == weights_of(model)
    versions = list_versions(published)
    assert [info.is_delta for info in versions] == [False, True, True, False]
    assert [info.tensors for info in versions] == [4, 3, 3, 4]
    assert verify_versions(published).damages == ()


def test_the_model_before_is_read_where_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The previous model is read from its own files, instead of being rebuilt from the published ones."""
    seen: list[str | None] = []
    original = WriterClient.publish

    def noted(self: WriterClient, request: Publication, *arguments: Any) -> Any:
        previous = request.previous
        seen.append(None if previous is None else Path(previous).name)
        return original(self, request, *arguments)

    monkeypatch.setattr(WriterClient, "publish", noted)
    options: dict[str, Any] = {"max_shard_bytes": 20_000, "overwrite": True}
    with SafetensorsStorageWriter(publish=Publish(tmp_path / "published"), **options) as writer:
        for step, name in enumerate(("a", "b", "b", "a")):
            dcp.save(state(step), storage_writer=writer, checkpoint_id=tmp_path / name)
            writer.wait_published()
    assert seen == [None, "a", "b", "b"]
    assert all(len(list((tmp_path / name).glob("*.safetensors"))) == 4 for name in "ab")
    assert verify_versions(tmp_path / "published").damages == ()


@pytest.mark.parametrize(("max_shard_bytes", "count"), [(20_000, 4), (1_000_000, 1)], ids=["files", "one file"])
def test_a_save_waits_for_no_version(
    tmp_path: Path, publications_may_begin: threading.Event, max_shard_bytes: int, count: int
) -> None:
    """Of several models that wait to be published, only the newest is; their files stay until then."""
    model, published = tmp_path / "model", tmp_path / "published"
    options: dict[str, Any] = {"max_shard_bytes": max_shard_bytes, "overwrite": True, "publish": Publish(published)}
    with SafetensorsStorageWriter(model, **options) as writer:
        expected = []
        for step in range(4):
            dcp.async_save(state(step), storage_writer=writer).result()
            expected.append(weights_of(model))
        version, files = writer.wait_published(0), len(list(model.glob("*.safetensors")))
        publications_may_begin.set()
        assert (version, files) == (None, 2 * count)  # the first one is being published, and the last one waits
        version = writer.wait_published()
    assert version is not None
    assert (version.version, version.is_delta) == (2, True)
    for number, step in ((1, 0), (2, 3)):
        apply_delta(tmp_path / f"copy-{number}", published, version=number)
        assert weights_of(tmp_path / f"copy-{number}") == expected[step]
    assert len(list(model.glob("*.safetensors"))) == count
    assert {path.name for path in model.iterdir() if not path.name.endswith(".safetensors")} == {
        "model.safetensors.index.json"
    }


def test_a_version_has_the_files_of_one_save(tmp_path: Path, publications_may_begin: threading.Event) -> None:
    """The files in ``files=`` are those of the published save, even if the next save has replaced them or added one."""
    files, model, published = (tmp_path / name for name in ("files", "model", "published"))
    for folder in (files, model):
        folder.mkdir()
    (files / ".gitattributes").write_text("hidden")
    (files / "config.json").write_text("first")
    (model / "notes.txt").write_text("notes")
    (model / f"config.json.{'5f' * 16}.tmp").write_text("of another save")
    with SafetensorsStorageWriter(model, files=[files], overwrite=True, publish=Publish(published)) as writer:
        dcp.save(state(1), storage_writer=writer)
        first = weights_of(model)
        (files / "config.json").write_text("the second")
        (files / "merges.txt").write_text("added")
        dcp.save(state(2), storage_writer=writer)
        publications_may_begin.set()
        writer.wait_published()
    found = []
    for version in (1, 2):
        copy = tmp_path / f"copy-{version}"
        apply_delta(copy, published, version=version)
        visible = [path for path in copy.iterdir() if not path.name.startswith((".", "model"))]
        found.append({path.name: path.read_text() for path in visible})
    assert found == [
        {"config.json": "first", "notes.txt": "notes"},
        {"config.json": "the second", "merges.txt": "added", "notes.txt": "notes"},
    ]
    assert [weights_of(tmp_path / "copy-1"), weights_of(tmp_path / "copy-2")] == [first, weights_of(model)]
    assert verify_versions(published).damages == ()


def test_a_file_that_was_not_in_files_may_not_change(tmp_path: Path, publications_may_begin: threading.Event) -> None:
    """If a later save replaces such a file, the earlier model is not published, and the later one is."""
    files, model, published = (tmp_path / name for name in ("files", "model", "published"))
    for folder in (files, model):
        folder.mkdir()
    (model / "config.json").write_text("first")
    with SafetensorsStorageWriter(model, files=[files], overwrite=True, publish=Publish(published)) as writer:
        dcp.save(state(1), storage_writer=writer)
        (files / "config.json").write_text("the second")
        dcp.save(state(2), storage_writer=writer)
        publications_may_begin.set()
        with pytest.raises(
            WriteError, match=r"cannot be published: .*config\.json has changed since the model was saved"
        ):
            writer.wait_published()
    apply_delta(tmp_path / "copy", published)
    assert weights_of(tmp_path / "copy") == weights_of(model)
    assert (tmp_path / "copy" / "config.json").read_text() == "the second"
    assert [info.version for info in list_versions(published)] == [1]


def wait_until_idle(versions: VersionsOfWriter) -> None:
    """Waits until nothing is being published, without consuming its error."""
    for thread in threading.enumerate():
        if thread.name == "publish":
            thread.join(WAIT)
    assert not versions.is_busy


def test_an_export_is_not_blamed_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the export that was not published, and the later export is published."""
    original, failures = WriterClient.publish, iter([WriteError("no space left")])

    def published(self: WriterClient, request: Publication, *arguments: Any) -> Any:
        for failure in failures:
            raise failure
        return original(self, request, *arguments)

    monkeypatch.setattr(WriterClient, "publish", published)
    export = Export(tmp_path / "model-{}", every=1, publish=Publish(tmp_path / "published"))
    with CheckpointManager(tmp_path / "run", save_every=1, export=export) as manager:
        manager.save(1, {"model": state(1)})
        manager._saves.wait()
        wait_until_idle(manager._exports.writer.saver.versions)  # type: ignore[union-attr]
        manager.save(2, {"model": state(2)})
        with pytest.raises(WriteError) as caught:
            manager.wait()
    assert str(caught.value) == (
        f"step 2 was exported, but an earlier export was not published: the model is saved to {tmp_path / 'model-1'}, "
        f"but cannot be published: no space left"
    )
    assert weights_of(tmp_path / "published" / "weight_v000001") == weights_of(tmp_path / "model-2")


def test_a_closed_writer_leaves_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the writer is closed while a model waits to be published, only the last model's files stay."""
    begun, goes_on = threading.Event(), threading.Event()
    publish_one, end_process = WriterClient.publish, WriterClient.end_process

    def held(self: WriterClient, request: Publication, *arguments: Any) -> Any:
        done = publish_one(self, request, *arguments)
        begun.set()
        assert goes_on.wait(WAIT)
        return done

    def ended(self: WriterClient, deadline: Deadline) -> None:
        goes_on.set()
        end_process(self, deadline)

    monkeypatch.setattr(WriterClient, "publish", held)
    monkeypatch.setattr(WriterClient, "end_process", ended)
    model, options = tmp_path / "model", {"max_shard_bytes": 20_000, "overwrite": True}
    writer = SafetensorsStorageWriter(model, publish=Publish(tmp_path / "published"), **options)  # type: ignore[arg-type]
    dcp.save(state(0), storage_writer=writer)
    assert begun.wait(WAIT)
    dcp.save(state(1), storage_writer=writer)
    writer.close(0)
    assert len(list(model.glob("*.safetensors"))) == 4
    assert not [path for path in model.iterdir() if path.suffix not in (".safetensors", ".json")]
    assert f"{model}: not published, because the writer was closed" in caplog.text


def test_a_job_that_stops_waits_for_a_publication_only_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """close() stops waiting at its deadline; the model is saved, and the log names what was not published."""
    closes, end_process = threading.Event(), WriterClient.end_process
    publishing: list[WriterClient] = []

    def held(self: WriterClient, request: Publication, *arguments: Any) -> Any:
        publishing.append(self)
        assert closes.wait(WAIT)
        raise WriteError("the writer was closed before the model was published")

    def ended(self: WriterClient, deadline: Deadline) -> None:
        if self in publishing:
            closes.set()
        end_process(self, deadline)

    monkeypatch.setattr(WriterClient, "publish", held)
    monkeypatch.setattr(WriterClient, "end_process", ended)
    model = tmp_path / "model-1"
    export = Export(tmp_path / "model-{}", every=1, publish=Publish(tmp_path / "published"))
    manager = CheckpointManager(tmp_path / "run", export=export, limits=SaveLimits(timeout=5.0))

    os.kill(os.getpid(), signal.SIGTERM)
    manager.save(1, {"model": state(1)})
    assert manager.stopping
    manager.close()
    words = (
        f"the model is saved to {model}, but cannot be published: the writer was closed before the model was published"
    )
    assert words in caplog.text
    assert (model / "model.safetensors").exists()


def test_a_closed_writer_publishes_no_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After the deadline of close(), the publishing process is killed, and no other one starts."""
    before = workers()
    writer = SafetensorsStorageWriter(publish=Publish(tmp_path / "published"))
    dcp.save(state(0), storage_writer=writer, checkpoint_id=tmp_path / "a")
    writer.wait_published()
    (process,) = (worker for worker in workers() if worker not in before)
    process.suspend()
    dcp.save(state(1), storage_writer=writer, checkpoint_id=tmp_path / "b")
    writer.close(0.1)
    assert [worker for worker in workers() if worker not in before] == []
    assert (tmp_path / "b" / "model.safetensors").exists()
    assert [info.version for info in list_versions(tmp_path / "published")] == [1]
    assert "cannot be published: the writer was closed before the model was published" in caplog.text


def test_a_file_that_readers_prefer_to_an_index_is_not_replaced(tmp_path: Path) -> None:
    """A single file that is being published cannot be replaced, so the save is refused, and nothing changes."""
    with SafetensorsStorageWriter(tmp_path / "model") as writer:
        dcp.save(state(0), storage_writer=writer)
    before = weights_of(tmp_path / "model")
    options: dict[str, Any] = {"overwrite": True, "publish": Publish(tmp_path / "published")}
    with SafetensorsStorageWriter(tmp_path / "model", **options) as writer:
        with pytest.raises(CheckpointException) as caught:
            dcp.save(state(1), storage_writer=writer)
        assert writer.wait_published() is None
    assert str(unwrap(caught.value)).startswith(f"{tmp_path / 'model'} holds model.safetensors, which a save would")
    assert weights_of(tmp_path / "model") == before
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["model.safetensors"]


@pytest.mark.promise("not-published")
def test_a_model_that_cannot_be_published_is_saved(tmp_path: Path) -> None:
    """If another job has taken the directory, the next save raises the error, or a call that waits does."""
    published = tmp_path / "published"
    reports: list[SaveReport] = []
    with SafetensorsStorageWriter(publish=Publish(published), on_report=reports.append) as writer:
        dcp.async_save(state(0), storage_writer=writer, checkpoint_id=tmp_path / "a").result()
        writer.wait_published()
        write_model(tmp_path / "other", {"w": torch.ones(3).numpy()})
        publish(tmp_path / "other", published)
        dcp.async_save(state(1), storage_writer=writer, checkpoint_id=tmp_path / "b").result()
        with pytest.raises(WriteError) as caught:
            writer.wait_published()
        dcp.save(state(2), storage_writer=writer, checkpoint_id=tmp_path / "c")
        wait_until_idle(writer.saver.versions)  # type: ignore[attr-defined]
        with pytest.raises(CheckpointException) as of_save:
            dcp.save(state(3), storage_writer=writer, checkpoint_id=tmp_path / "d")
    assert str(unwrap(of_save.value)).startswith(f"the model is saved to {tmp_path / 'c'}, but cannot be published: ")
    message = str(caught.value)
    assert message.startswith(f"the model is saved to {tmp_path / 'b'}, but cannot be published: ")
    assert "now belongs to another run" in message
    assert [Path(report.path).name for report in reports] == list("abcd")
    assert all((tmp_path / name / "model.safetensors").exists() for name in "abcd")
    assert [info.version for info in list_versions(published)] == [2, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SafetensorsStorageWriter(publish="published"), "publish must be"),  # type: ignore[arg-type]
        (lambda: Publish("published", max_deltas=0), "max_deltas must be .*, got 0"),
        (lambda: Publish("published", keep_latest=1.5), "keep_latest must be"),  # type: ignore[arg-type]
    ],
    ids=["a path", "no deltas", "half a version"],
)
def test_options_are_checked(make: Any, message: str) -> None:
    """Options are checked when they are given."""
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_a_manager_publishes_what_it_exports(tmp_path: Path) -> None:
    """A manager publishes every second export, from the save's staged copy, and the last step at the end."""
    export = Export(tmp_path / "model", every=2, overwrite=True, publish=Publish(tmp_path / "published"))
    with CheckpointManager(tmp_path / "run", save_every=1, export=export) as manager:
        for step in range(1, 6):
            manager.save(step, {"model": state(step), "step": step})
            manager.wait()
            if step in (2, 4):
                apply_delta(tmp_path / "copy", tmp_path / "published")
                assert weights_of(tmp_path / "copy") == weights_of(tmp_path / "model")
    versions = list_versions(tmp_path / "published")
    assert [(info.version, info.is_delta, info.tensors) for info in versions] == [
        (3, True, 3),
        (2, True, 3),
        (1, False, 4),
    ]
    apply_delta(tmp_path / "copy", tmp_path / "published")
    assert weights_of(tmp_path / "copy") == weights_of(tmp_path / "model")


def test_a_restarted_job_publishes_after_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a published file is damaged, the first version after a restart is whole, and the log names the damage."""
    versions = []
    for _ in range(2):
        writer = SafetensorsStorageWriter(tmp_path / "model", overwrite=True, publish=Publish(tmp_path / "published"))
        with writer:
            for step in range(2):
                dcp.save(state(step), storage_writer=writer)
                versions.append(writer.wait_published())
        next((tmp_path / "published" / "weight_v000001").glob("model-00001*")).write_bytes(b"")
    assert [version.is_delta for version in versions if version is not None] == [False, True, False, True]
    (warning,) = [message for message in caplog.messages if "is a whole version, because" in message]
    assert f"weight_v000003 is a whole version, because version 2 in {tmp_path}/published cannot be rebuilt" in warning
    apply_delta(tmp_path / "copy", tmp_path / "published")
    assert weights_of(tmp_path / "copy") == weights_of(tmp_path / "model")


def test_a_job_that_is_to_stop_waits_for_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last save is complete when `save` returns, even if nothing has been published yet."""
    goes_on, original = threading.Event(), WriterClient.publish

    def held(self: WriterClient, request: Publication, *arguments: Any) -> Any:
        assert goes_on.wait(WAIT)
        return original(self, request, *arguments)

    monkeypatch.setattr(WriterClient, "publish", held)
    export = Export(tmp_path / "model-{}", every=1, publish=Publish(tmp_path / "published"))
    with CheckpointManager(tmp_path / "run", save_every=1, export=export) as manager:
        os.kill(os.getpid(), signal.SIGTERM)
        manager.save(1, {"model": state(1)})
        assert (manager.stopping, manager.latest()) == (True, 1)
        assert not (tmp_path / "published").exists()
        goes_on.set()
    assert [info.version for info in list_versions(tmp_path / "published")] == [1]


class _HungStorage(LocalStorage):
    """A directory that no longer responds."""

    def head(self, name: str) -> int | None:
        threading.Event().wait()
        return None


def test_a_model_on_a_disk_that_hangs_keeps_nobody_waiting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A directory that hangs, or cannot be released, blocks no other call."""

    def release() -> None:
        raise OSError("cannot unlock")

    for name in "ab":
        write_model(tmp_path / name, {"w": torch.ones(3).numpy()})
    versions = VersionsOfWriter(
        Publish(tmp_path / "published"), SaveOptions(thread_count=1, limits=SaveLimits(timeout=30))
    )
    versions.add(SavedModel(_HungStorage(tmp_path / "a"), None, {}, None, release))
    version = versions.wait(Deadline(WAIT))
    assert version is not None
    assert (version.version, versions.is_busy) == (1, False)
    assert "a: files of the replaced model may be left over: " in caplog.text
    versions._write = SaveOptions(thread_count=1, limits=SaveLimits(timeout=0.01))
    versions.add(SavedModel(LocalStorage(tmp_path / "b"), None, {}, None, lambda: None))
    with pytest.raises(WriteError, match=r"a has not responded for 0\.01 s: its disk or its server hangs"):
        versions.wait(Deadline(WAIT))
    versions.end(Deadline(WAIT))
