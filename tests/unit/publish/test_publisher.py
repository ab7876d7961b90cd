"""Tests of `publish`: whole versions and deltas, in the layout of other programs, by one publisher at a time."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors import safe_open
from safetensors.numpy import save_file
from torch.distributed.checkpoint.api import CheckpointException

from dcp_tensorizer import (
    ChecksumMismatch,
    MetadataError,
    NotCommitted,
    Publish,
    ReadError,
    UnsupportedFormat,
    WriteError,
    apply_delta,
    open_reader,
    publish,
    unwrap,
)
from dcp_tensorizer._publish.delta import zstd
from dcp_tensorizer._publish.model import read_model
from dcp_tensorizer._publish.publisher import Publication, _Publisher
from dcp_tensorizer._publish.versions import Published
from dcp_tensorizer._storage.base import Refused
from dcp_tensorizer._storage.local import LocalStorage
from dcp_tensorizer.tools import collect_versions, convert, diff, inspect, list_versions, verify_versions

from ...lab.models import INDEX, first_state, loaded, next_state, not_of_versions, weight_files, weights_of, write_model


def published_versions(tmp_path: Path, count: int, **options: object) -> list[dict[str, np.ndarray]]:
    """Publishes some versions; returns their states. The models are in ``model-N``."""
    states = [first_state()]
    for number in range(1, count + 1):
        write_model(tmp_path / f"model-{number}", states[-1])
        publish(tmp_path / f"model-{number}", tmp_path / "published", step=10 * number, **options)  # type: ignore[arg-type]
        states.append(next_state(states[-1], number))
    return states[:-1]


def test_the_first_version_is_the_model_itself(tmp_path: Path) -> None:
    """The first version has an index of all tensors, and the other files under their own names, for other programs."""
    state = published_versions(tmp_path, 1)[0]
    base = tmp_path / "published" / "weight_v000001"
    assert weights_of(base) == weights_of(tmp_path / "model-1")
    visible = {path.name for path in base.iterdir() if not path.name.startswith(".")}
    assert visible == {"config.json", INDEX, *(path.name for path in weight_files(base))}
    assert (base / "config.json").read_text() == "{}"
    assert set(json.loads((base / INDEX).read_text())["weight_map"]) == set(state)


def test_a_delta_holds_what_changed_as_sglang_reads_it(tmp_path: Path) -> None:
    """A delta has the index of SGLang's receiver, and its tensors as rows of bytes."""
    old, new = published_versions(tmp_path, 2)
    delta = tmp_path / "published" / "weight_v000002"
    index = json.loads((delta / INDEX).read_text())
    assert {key: value for key, value in index["metadata"].items() if key != "dcp_tensorizer"} == {
        "version": "000002",
        "base_version": "000001",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "xxh3-128",
    }
    changed = {key for key in new if new[key].tobytes() != old[key].tobytes()}
    assert set(index["weight_map"]) == changed == {"embed.weight", "layers.0.weight", "scale"}
    for name in set(index["weight_map"].values()):
        with safe_open(delta / name, framework="numpy") as file:
            assert {key for key, file_name in index["weight_map"].items() if file_name == name} == set(file.keys())
            assert file.metadata() == {key: xxhash.xxh3_128_hexdigest(new[key].tobytes()) for key in file.keys()}  # noqa: SIM118
            assert all(file.get_tensor(key).dtype == np.uint8 for key in file.keys())  # noqa: SIM118


def test_deltas_follow_until_there_are_enough_of_them(tmp_path: Path) -> None:
    """After the maximum number of deltas, a whole version starts a new chain; each version records its step."""
    published_versions(tmp_path, 6, max_deltas=2)
    versions = list_versions(tmp_path / "published")
    assert [(info.version, info.is_delta, info.base, info.step) for info in versions] == [
        (6, True, 4, 60),
        (5, True, 4, 50),
        (4, False, 4, 40),
        (3, True, 1, 30),
        (2, True, 1, 20),
        (1, False, 1, 10),
    ]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda state: state | {"more": np.zeros(3, np.float32)}, "its tensors, their offsets"),
        (lambda state: {key: state[key] for key in list(state)[1:]}, "its tensors, their offsets"),
        (lambda state: state | {"scale": np.zeros(2, np.int16)}, "its tensors, their offsets"),
    ],
    ids=["a tensor more", "a tensor less", "another dtype"],
)
def test_another_layout_is_published_whole(tmp_path: Path, change: object, why: str) -> None:
    """A model with other tensors, or other locations in the files, is published whole."""
    state = published_versions(tmp_path, 2)[-1]
    write_model(tmp_path / "other", change(state))  # type: ignore[operator]
    version = publish(tmp_path / "other", tmp_path / "published")
    assert (version.version, version.is_delta) == (3, False)
    assert why in version.why_whole
    apply_delta(tmp_path / "copy", tmp_path / "published")
    assert weights_of(tmp_path / "copy") == weights_of(tmp_path / "other")


def test_another_configuration_is_published_whole(tmp_path: Path) -> None:
    """A model with another configuration is published whole, because a delta has only tensors."""
    state = published_versions(tmp_path, 1)[-1]
    write_model(tmp_path / "other", next_state(state, 5), config='{"rope": 2}')
    version = publish(tmp_path / "other", tmp_path / "published")
    assert (version.is_delta, version.why_whole) == (False, "files beside the weights differ from version 1")


def test_a_model_in_one_file_without_an_index(tmp_path: Path) -> None:
    """The whole version of a model of one file gets an index, the manifest; deltas follow."""
    state = first_state()
    write_model(tmp_path / "one", state, files=1)
    publish(tmp_path / "one", tmp_path / "published")
    write_model(tmp_path / "two", next_state(state, 1), files=1)
    assert publish(tmp_path / "two", tmp_path / "published").is_delta
    apply_delta(tmp_path / "copy", tmp_path / "published")
    assert weights_of(tmp_path / "copy") == weights_of(tmp_path / "two")


def test_a_single_file_has_priority_over_an_index(tmp_path: Path) -> None:
    """Of a directory with both, `publish` publishes what `open_reader` loads: the single file."""
    both = write_model(tmp_path / "both", {"w": np.zeros(10)})
    save_file({"w": np.ones(10)}, both / "model.safetensors")
    publish(both, tmp_path / "published")
    apply_delta(tmp_path / "copy", tmp_path / "published")
    assert loaded(tmp_path / "copy")["w"].tolist() == [1.0] * 10
    assert apply_delta(both, tmp_path / "published").version == 1


def test_nothing_has_changed(tmp_path: Path) -> None:
    """An unchanged model becomes a version without tensors, so that its number exists."""
    published_versions(tmp_path, 1)
    version = publish(tmp_path / "model-1", tmp_path / "published")
    assert (version.version, version.is_delta, version.tensors, version.nbytes) == (2, True, 0, 0)
    apply_delta(tmp_path / "copy", tmp_path / "published")
    assert weights_of(tmp_path / "copy") == weights_of(tmp_path / "model-1")


def test_the_version_before_may_be_given(tmp_path: Path) -> None:
    """The given previous model is read instead of the published files, and is verified."""
    published_versions(tmp_path, 2)
    write_model(tmp_path / "new", next_state(loaded(tmp_path / "model-2"), 9))
    with pytest.raises(ChecksumMismatch, match=r"'[\w.]+' in .*model-1/.* is not the published tensor"):
        publish(tmp_path / "new", tmp_path / "published", previous=tmp_path / "model-1")
    assert publish(tmp_path / "new", tmp_path / "published", previous=tmp_path / "model-2").version == 3
    apply_delta(tmp_path / "copy", tmp_path / "published")
    assert weights_of(tmp_path / "copy") == weights_of(tmp_path / "new")


@pytest.mark.promise("published-damaged", reason="one of several deltas")
@pytest.mark.parametrize("decodes", [True, False])
def test_of_several_deltas_the_damaged_one_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, decodes: bool
) -> None:
    """Errors and warnings name the delta's damaged file, not that of a later version, even if its data decodes."""
    states = published_versions(tmp_path, 4)
    published = tmp_path / "published"
    path = min((published / "weight_v000002").glob("delta-*"))
    with safe_open(path, "np") as file:
        frames, notes = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
    for key, frame in frames.items():
        change = bytearray(zstd().decompress(frame.tobytes()) if decodes else frame.tobytes())
        change[-1 if decodes else 0] ^= 1
        frames[key] = np.frombuffer(zstd().compress(bytes(change)) if decodes else bytes(change), np.uint8)
    save_file(frames, path, notes)
    (damage,) = verify_versions(published).damages
    tensors = {key: value.copy() for key, value in states[0].items()}
    with pytest.raises(ChecksumMismatch) as to_directory:
        apply_delta(tmp_path / "copy", published)
    with pytest.raises(ChecksumMismatch) as to_tensors:
        apply_delta(tensors, published)
    version = publish(tmp_path / "model-4", published)
    (warning,) = caplog.messages
    for message in (damage, str(to_directory.value), str(to_tensors.value), version.why_whole, warning):
        assert str(path) in message and "weight_v000004" not in message.partition("because")[2]
        assert f"{path} is damaged: " in message if decodes else f"{path} does not fit " in message
        assert ("differs from version 2" in message) is decodes
    assert all(np.array_equal(tensors[key], value) for key, value in states[0].items())


@pytest.mark.promise("published-damaged", reason="a whole version with deltas")
def test_a_damaged_whole_version_is_named(tmp_path: Path) -> None:
    """If a tensor of a whole version is damaged, the errors name its file, even if deltas change that tensor."""
    published_versions(tmp_path, 3)
    published = tmp_path / "published"
    for path in (published / "weight_v000001").glob("model-*"):
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        (damage,) = verify_versions(published).damages
        with pytest.raises(ChecksumMismatch) as error:
            apply_delta(tmp_path / "copy", published)
        for message in (damage, str(error.value)):
            assert f" in {path} is not the published tensor" in message
        path.write_bytes(whole)


@pytest.mark.promise("published-damaged")
def test_damage_in_what_was_published_does_not_spread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged version is an error of each copy and of verify_versions, and the next version is whole.

    A copy at the damaged version can be updated to the next one.
    """
    published_versions(tmp_path, 2)
    published = tmp_path / "published"
    apply_delta(tmp_path / "follower", published)
    path = next((published / "weight_v000001").glob("model-00002*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(ChecksumMismatch):
        apply_delta(tmp_path / "copy", published)
    (damage,) = verify_versions(published).damages
    assert damage.startswith("version 2: ") and path.name in damage
    progress: list[tuple[int, int]] = []
    write_model(tmp_path / "new", next_state(loaded(tmp_path / "model-2"), 9))
    version = publish(tmp_path / "new", published, on_progress=lambda *done: progress.append(done))
    assert (version.version, version.is_delta) == (3, False)
    assert f"version 2 in {published} cannot be rebuilt: " in version.why_whole and path.name in version.why_whole
    assert [message for message in caplog.messages if message.endswith(f"because {version.why_whole}")]
    assert sorted(progress) == progress and progress[-1][0] <= progress[-1][1]
    assert not_of_versions(published) == []
    assert path.read_bytes() == content
    assert verify_versions(published).damages == (damage,)
    for copy in ("follower", "copy"):
        assert apply_delta(tmp_path / copy, published).is_whole
        assert weights_of(tmp_path / copy) == weights_of(tmp_path / "new")
    write_model(tmp_path / "newer", next_state(loaded(tmp_path / "new"), 10))
    assert publish(tmp_path / "newer", published, keep_latest=1).is_delta
    assert verify_versions(published).versions == (4,)


@pytest.mark.parametrize("damaged", ["delta-*", "model-00001*", INDEX])
@pytest.mark.parametrize("is_missing", [True, False], ids=["missing", "truncated"])
def test_after_damage_of_any_file_the_next_version_is_whole(tmp_path: Path, damaged: str, is_missing: bool) -> None:
    """Of two deltas the first one, or of the whole version a file or the manifest, is missing or truncated."""
    state = published_versions(tmp_path, 3)[-1]
    folder = tmp_path / "published" / ("weight_v000002" if damaged.startswith("delta") else "weight_v000001")
    path = next(folder.glob(damaged))
    path.unlink() if is_missing else os.truncate(path, path.stat().st_size - 2)
    write_model(tmp_path / "new", next_state(state, 9))
    version = publish(tmp_path / "new", tmp_path / "published")
    assert (version.version, version.is_delta) == (4, False)
    assert version.why_whole.startswith(f"version 3 in {tmp_path}/published cannot be rebuilt: ")
    assert apply_delta(tmp_path / "copy", tmp_path / "published").is_whole
    assert weights_of(tmp_path / "copy") == weights_of(tmp_path / "new")


def test_a_version_that_cannot_be_removed_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The new version is published nevertheless, the result names what was removed, and the next one removes the rest.

    With a writer, the warning comes from the process that publishes.
    """
    published_versions(tmp_path, 3, max_deltas=1)
    remove = LocalStorage.remove

    def refused(self: LocalStorage, *names: str) -> None:
        if Path(self.location).name == "weight_v000001":
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), self.location)
        remove(self, *names)

    monkeypatch.setattr(LocalStorage, "remove", refused)
    version = publish(tmp_path / "model-1", tmp_path / "published", max_deltas=1, keep_latest=1)
    assert (version.version, version.removed) == (4, (2,))
    (warning,) = caplog.messages
    assert "weight_v000004 is published, but old versions may remain, until the next publication: " in warning
    assert f"{tmp_path}/published/weight_v000001" in warning
    assert [info.version for info in list_versions(tmp_path / "published")] == [4, 3, 1]
    with pytest.raises(WriteError, match=r"cannot remove versions in .*weight_v000001"):
        collect_versions(tmp_path / "published", keep_latest=1)
    monkeypatch.undo()
    assert publish(tmp_path / "model-2", tmp_path / "published", max_deltas=1, keep_latest=1).removed == (4, 3, 1)


@pytest.mark.parametrize(
    ("model", "target"),
    [
        ("model-1", "published/weight_v000002"),
        ("model-1", "link/weight_v000002"),
        ("model-1", "published/weight_v000009"),
        ("model-1", "model-1"),
        ("model-1", "model-2/../model-1"),
    ],
)
def test_a_version_or_the_model_is_no_directory_of_versions(tmp_path: Path, model: str, target: str) -> None:
    """Versions cannot be nested in a version or in the published model, named by any path."""
    published_versions(tmp_path, 2)
    (tmp_path / "link").symlink_to(tmp_path / "published")
    before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
    with pytest.raises(WriteError, match=r"no versions can be published in .*Pass another directory\.$"):
        publish(tmp_path / model, tmp_path / target)
    assert {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()} == before


def test_a_published_version_can_be_published_again(tmp_path: Path) -> None:
    """A whole version can become the newest one of its own directory of versions."""
    published_versions(tmp_path, 2)
    assert publish(tmp_path / "published" / "weight_v000001", tmp_path / "published").version == 3
    apply_delta(tmp_path / "copy", tmp_path / "published")
    assert weights_of(tmp_path / "copy") == weights_of(tmp_path / "model-1")


def test_a_second_publisher_takes_over_and_the_first_one_is_refused(tmp_path: Path) -> None:
    """The first publisher commits no further version, and does not remove those of the second."""
    state = published_versions(tmp_path, 1)[0]
    source = LocalStorage(write_model(tmp_path / "late", next_state(state, 7)))
    folder = Published(LocalStorage(tmp_path / "published"))
    first = _Publisher(folder, None, read_model(source), None, lambda done, total: None)
    write_model(tmp_path / "second", next_state(state, 8))
    publish(tmp_path / "second", tmp_path / "published")
    with pytest.raises(WriteError, match=r"another publisher has just published|now belongs to another run"):
        first.publish(None, Publish(folder.path))
    apply_delta(tmp_path / "copy", tmp_path / "published")
    assert weights_of(tmp_path / "copy") == weights_of(tmp_path / "second")
    assert list_versions(tmp_path / "published")[0].version == 2


@pytest.mark.parametrize("content", ["{ }", "", "[]"], ids=["longer", "shorter", "as long"])
@pytest.mark.parametrize("moment", ["before the publication", "after its digest"])
def test_a_file_beside_the_weights_that_changes_is_refused(
    tmp_path: Path, moment: str, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No version is published if a file beside the weights changes after the model was read."""
    model = read_model(LocalStorage(write_model(tmp_path / "model", first_state())))
    make = LocalStorage.make_directory

    def change(*arguments: Any) -> None:
        (tmp_path / "model" / "config.json").write_text(content)
        os.utime(tmp_path / "model" / "config.json", (1, 1))
        if arguments:
            make(*arguments)

    if moment == "before the publication":
        change()
    folder = Published(LocalStorage(tmp_path / "published"))
    publisher = _Publisher(folder, None, model, None, lambda done, total: None)
    if moment == "after its digest":
        monkeypatch.setattr(LocalStorage, "make_directory", change)
    with pytest.raises(ReadError, match=r"model/config\.json has changed since the model was saved"):
        publisher.publish(None, Publish(folder.path))
    assert folder.newest() is None


def test_temporary_files_of_saves_are_not_published(tmp_path: Path) -> None:
    """A save in progress, or a killed one, may leave any file of the model under a temporary name."""
    model = write_model(tmp_path / "model", first_state())
    for name in ("config.json", "tokenizer.json", INDEX):
        (model / f"{name}.{'5f' * 16}.tmp").write_text("of a save")
    publish(model, tmp_path / "published")
    base = tmp_path / "published" / "weight_v000001"
    assert {path.name for path in base.glob("[!.]*")} == {
        "config.json",
        INDEX,
        *(path.name for path in weight_files(base)),
    }


def test_no_model_is_an_error_that_names_the_directory(tmp_path: Path) -> None:
    """A directory without a model is an error that names it, and nothing is published."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotCommitted, match=r"there is no model in .*empty: neither model\.safetensors\.index\.json"):
        publish(tmp_path / "empty", tmp_path / "published")
    with pytest.raises(NotCommitted, match="nothing has been published"):
        list_versions(tmp_path / "published")


@pytest.mark.parametrize(
    "name", ["../escaped.safetensors", "/etc/passwd.safetensors", ".hidden.safetensors", "a\0.safetensors"]
)
def test_an_index_cannot_name_files_elsewhere(tmp_path: Path, name: str) -> None:
    """No file outside the model's directory is read or published."""
    model = write_model(tmp_path / "model", first_state())
    (tmp_path / "escaped.safetensors").write_bytes((model / "model-00001-of-00002.safetensors").read_bytes())
    (model / INDEX).write_text(json.dumps({"weight_map": {"embed.weight": name}}))
    with pytest.raises(MetadataError, match="is not a visible file of its directory"):
        publish(model, tmp_path / "published")


def test_an_index_that_names_a_missing_tensor(tmp_path: Path) -> None:
    """A model whose index locates a tensor in a file that lacks it is refused, as readers refuse it."""
    model = write_model(tmp_path / "model", first_state())
    index = json.loads((model / INDEX).read_text())
    index["weight_map"]["missing"] = name = "model-00001-of-00002.safetensors"
    (model / INDEX).write_text(json.dumps(index))
    for use in (lambda: publish(model, tmp_path / "published"), lambda: inspect(model)):
        with pytest.raises(MetadataError, match=f"^{model}/{name} lacks 'missing', which the index locates there"):
            use()
    assert not (tmp_path / "published").exists()


@pytest.mark.parametrize("files", [1, 2])
def test_a_model_without_tensors(tmp_path: Path, files: int) -> None:
    """A model without tensors is refused: readers would refuse its copy, whose index is empty."""
    model = write_model(tmp_path / "model", {}, files=files)
    with pytest.raises(MetadataError, match=f"^{model} is not published: the model has no tensors$"):
        publish(model, tmp_path / "published")
    assert not (tmp_path / "published").exists()


def _load(path: Path) -> None:
    try:
        dcp.load({"scale": torch.zeros(())}, storage_reader=open_reader(path), no_dist=True)
    except CheckpointException as error:
        raise unwrap(error) from None


@pytest.mark.parametrize("made_by", ["published", "sglang"])
def test_a_delta_is_no_model(tmp_path: Path, made_by: str) -> None:
    """A delta is refused as a model by publishers and readers, with advice, also if another program has written it."""
    published_versions(tmp_path, 2)
    delta = tmp_path / "published" / "weight_v000002"
    if made_by == "sglang":
        content = json.loads((delta / INDEX).read_text())
        del content["metadata"]["dcp_tensorizer"]
        (delta / INDEX).write_text(json.dumps(content))
    expected = rf"{delta} is not a model: it holds only the changes of version 2 since .* `dcp-tensorizer pub"
    for use in (
        lambda: publish(delta, tmp_path / "other"),
        lambda: publish(tmp_path / "model-2", tmp_path / "published", previous=delta),
        lambda: inspect(delta),
        lambda: convert(delta, tmp_path / "converted", "safetensors"),
        lambda: diff(tmp_path / "model-2", delta),
        lambda: _load(delta),
    ):
        with pytest.raises(UnsupportedFormat, match=expected):
            use()
    assert not (tmp_path / "converted").exists()
    with pytest.raises(NotCommitted, match="nothing has been published"):
        list_versions(tmp_path / "other")


def test_the_metadata_of_a_delta_shows_why_it_cannot_be_read(tmp_path: Path) -> None:
    """`read_metadata` raises no error, because DCP swallows it: the metadata raises it when read, and shows it."""
    published_versions(tmp_path, 2)
    metadata = open_reader(tmp_path / "published" / "weight_v000002").read_metadata()
    with pytest.raises(UnsupportedFormat, match="holds only the changes of version 2 "):
        metadata.state_dict_metadata.keys()
    assert "holds only the changes of version " in repr(metadata)


def test_steps_are_those_of_a_manager(tmp_path: Path) -> None:
    """A step is any integer from 0 to 2**63 - 1, and another step is refused before anything is published."""
    model = write_model(tmp_path / "model", first_state())
    assert publish(model, tmp_path / "published", step=np.int64(3)).step == 3  # type: ignore[arg-type]
    for step, error in ((True, TypeError), (3.0, TypeError), ("3", TypeError), (-1, ValueError), (2**63, ValueError)):
        with pytest.raises(error, match=r"^step must be "):
            publish(model, tmp_path / "published", step=step)  # type: ignore[arg-type]
    assert [info.step for info in list_versions(tmp_path / "published")] == [3]


@pytest.mark.parametrize("option", [{"max_deltas": 0}, {"keep_latest": 0}, {"max_deltas": True}])
def test_counts_are_checked(tmp_path: Path, option: dict[str, int]) -> None:
    """The counts are checked before anything is read."""
    with pytest.raises((ValueError, TypeError), match=next(iter(option))):
        publish(tmp_path, tmp_path / "published", **option)  # type: ignore[arg-type]


def test_a_publisher_that_goes_on_after_another_one_is_refused(tmp_path: Path) -> None:
    """A publisher uses its lease for each version, and is refused after another publisher has taken the lease."""
    state = published_versions(tmp_path, 1)[0]
    folder = Publish(tmp_path / "published")
    for number, model in enumerate(("a", "b", "c"), 1):
        write_model(tmp_path / model, next_state(state, number))
    _, lease, _ = Publication(str(tmp_path / "a"), folder).publish()
    second, same, _ = Publication(str(tmp_path / "b"), folder, own=lease).publish()
    assert (second.version, same) == (3, lease)
    publish(tmp_path / "a", folder.path)
    with pytest.raises(WriteError, match="now belongs to another run"):
        Publication(str(tmp_path / "c"), folder, own=lease).publish()
    assert list_versions(folder.path)[0].version == 4


def test_versions_in_an_object_store(tmp_path: Path) -> None:
    """Versions in an object store appear with their manifest, without directories or renames."""
    state = first_state()
    for number in (1, 2, 3):
        write_model(tmp_path / f"model-{number}", state)
        publish(tmp_path / f"model-{number}", "memory://bucket/published", max_deltas=1, keep_latest=1)
        state = next_state(state, number)
    assert [info.version for info in list_versions("memory://bucket/published")] == [3]
    apply_delta(tmp_path / "copy", "memory://bucket/published/weight_v000003")
    assert weights_of(tmp_path / "copy") == weights_of(tmp_path / "model-3")


def test_a_manifest_of_which_nobody_knows_keeps_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files stay if their manifest may still arrive; a refused publication leaves no files."""
    published_versions(tmp_path, 1)
    original = LocalStorage.put

    def fails(error: type[Exception]) -> None:
        def put(self: LocalStorage, name: str, *arguments: object, **options: object) -> None:
            if name == INDEX:
                raise error("no answer")
            original(self, name, *arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(LocalStorage, "put", put)

    for error, is_kept in ((Refused, False), (WriteError, True)):
        fails(error)
        with pytest.raises(WriteError, match="no answer"):
            publish(tmp_path / "model-1", tmp_path / "published", max_deltas=1)
        monkeypatch.undo()
        assert (tmp_path / "published" / "weight_v000002").exists() == is_kept
    assert publish(tmp_path / "model-1", tmp_path / "published").version == 2
    assert not_of_versions(tmp_path / "published") == []


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "delta"])
@pytest.mark.parametrize("winner", ["earlier", "later"])
def test_publishers_that_overlap_leave_one_whole_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_whole: bool, winner: str
) -> None:
    """The earlier publication's manifest arrives before or after the later one's, which has written all its files."""
    published, state = tmp_path / "published", first_state()
    models = {
        name: write_model(tmp_path / name, next_state(state, seed)) for seed, name in enumerate(("earlier", "later"))
    }
    if is_whole:  # files beside the weights have the same names in both
        (models["earlier"] / "config.json").write_text('{"rope": 1}')
        (models["later"] / "added_tokens.json").write_text("[]")
    else:
        publish(write_model(tmp_path / "before", state), published)
    put, waiting, refused = LocalStorage.put, list[Callable[[], None]](), list[str]()

    def put_in_turn(self: LocalStorage, name: str, *arguments: Any, **options: Any) -> None:
        if name != INDEX:
            put(self, name, *arguments, **options)
            return
        waiting.append(lambda: put(self, name, *arguments, **options))
        if len(waiting) == 1:  # of the earlier one, whose manifest is on its way while the later one publishes
            try:
                publish(models["later"], published)
            except Refused:
                refused.append("later")
            if winner == "later":
                waiting[0]()
        else:
            if winner == "earlier":
                waiting[0]()
            waiting[1]()

    monkeypatch.setattr(LocalStorage, "put", put_in_turn)
    try:
        publish(models["earlier"], published)
    except Refused:
        refused.append("earlier")
    monkeypatch.undo()
    assert refused == ["later" if winner == "earlier" else "earlier"]
    assert verify_versions(published).damages == ()
    assert not_of_versions(published) == []
    apply_delta(tmp_path / "copy", published)
    assert weights_of(tmp_path / "copy") == weights_of(models[winner])
    others = {path.name: path.read_text() for path in models[winner].iterdir() if path.suffix == ".json"}
    for directory in (tmp_path / "copy", *([published / "weight_v000001"] if is_whole else [])):
        assert all((directory / name).read_text() == others[name] for name in others if name != INDEX)
    assert publish(write_model(tmp_path / "next", state), published).version == (2 if is_whole else 3)
    assert not_of_versions(published) == []


@pytest.mark.parametrize(
    ("metadata", "name"),
    [
        (b'{"total_size": 1e999}', b"a.txt"),
        (b'{"a": "\xff"}', b"a.txt"),
        (b"[1]", b"a.txt"),
        (b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}", b"a.txt"),
        (b"{}", b"caf\xe9.txt"),
    ],
    ids=["endless number", "no UTF-8", "a list", "deep", "a name that is no UTF-8"],
)
def test_what_a_manifest_cannot_hold_is_refused(tmp_path: Path, metadata: bytes, name: bytes) -> None:
    """A model whose manifest could not be decoded is refused, and the next model is published."""
    model = write_model(tmp_path / "odd", first_state())
    index = (model / INDEX).read_bytes()
    (model / INDEX).write_bytes(index.replace(b'{"total_size": 1}', metadata))
    Path(os.fsdecode(os.path.join(os.fsencode(model), name))).write_bytes(b"x")
    with pytest.raises(MetadataError, match=r"odd"):
        publish(model, tmp_path / "published")
    assert not list(tmp_path.glob("published/weight*"))
    published_versions(tmp_path, 1)
    assert verify_versions(tmp_path / "published").damages == ()


def test_metadata_that_json_holds_comes_back(tmp_path: Path) -> None:
    """JSON values in the metadata of an index survive, including null and very large numbers."""
    for number, metadata in enumerate((b"null", b'{"total_size": %d, "\\u00e9": [1.5]}' % 10**50)):
        model = write_model(tmp_path / f"odd-{number}", first_state())
        index = (model / INDEX).read_bytes()
        (model / INDEX).write_bytes(index.replace(b'{"total_size": 1}', metadata))
        publish(model, tmp_path / f"published-{number}")
        notes = json.loads((tmp_path / f"published-{number}" / "weight_v000001" / INDEX).read_text())["metadata"]
        assert (json.loads(metadata) or {}).items() <= notes.items()


def test_a_receiver_like_sglangs_follows(tmp_path: Path) -> None:
    """A program that works like SGLang's receiver follows the versions."""
    published_versions(tmp_path, 3)
    copy, versions = tmp_path / "receiver", sorted((tmp_path / "published").glob("weight_v*"))
    shutil.copytree(versions[0], copy)
    places: dict[str, tuple[Path, int, int]] = {}
    for path in copy.glob("*.safetensors"):
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        for key, entry in json.loads(content[8 : 8 + length]).items():
            if key != "__metadata__":
                assert key not in places
                places[key] = path, 8 + length + entry["data_offsets"][0], 8 + length + entry["data_offsets"][1]
    for version in versions[1:]:
        index = json.loads((version / INDEX).read_text())
        for key, name in index["weight_map"].items():
            path, start, stop = places[key]
            content = bytearray(path.read_bytes())
            with safe_open(version / name, framework="numpy") as file:
                frame, digest = file.get_tensor(key).tobytes(), file.metadata()[key]
            old, change = (
                np.frombuffer(content[start:stop], np.uint8),
                np.frombuffer(zstd().decompress(frame), np.uint8),
            )
            content[start:stop] = (old ^ change).tobytes()
            assert xxhash.xxh3_128_hexdigest(content[start:stop]) == digest
            path.write_bytes(content)
    assert weights_of(copy) == weights_of(tmp_path / "model-3")
    assert (copy / "config.json").read_text() == "{}"
