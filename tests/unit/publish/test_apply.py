"""Tests of `apply_delta`: a copy gets a published version, or does not change."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dcp_tensorizer import (
    CheckpointError,
    ChecksumMismatch,
    MetadataError,
    NotCommitted,
    ReadError,
    StateMismatch,
    UnsupportedFormat,
    WriteError,
    apply_delta,
    publish,
)
from dcp_tensorizer._publish import apply
from dcp_tensorizer._publish.delta import DeltaDecoder, zstd
from dcp_tensorizer._publish.model import header_of
from dcp_tensorizer._publish.versions import Manifest, Published
from dcp_tensorizer.tools import list_versions, verify_versions

from ...lab.models import (
    INDEX,
    first_state,
    loaded,
    next_state,
    publish_versions,
    weight_files,
    weights_of,
    write_model,
)


@pytest.fixture
def versions(tmp_path: Path) -> Path:
    """Publishes five versions: 1 and 4 are whole, 2, 3 and 5 are deltas. The models are in ``model-N`` beside them."""
    return publish_versions(tmp_path, 5)


def files_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != ".publish.lock"}


def edit_index(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((path / INDEX).read_text())
    change(index)
    (path / INDEX).write_text(json.dumps(index))


# --- a directory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5])
def test_an_empty_directory_gets_a_whole_version(tmp_path: Path, versions: Path, version: int) -> None:
    """An empty directory gets the configuration and exactly the bytes of the published model."""
    applied = apply_delta(tmp_path / "copy", versions / f"weight_v{version:06d}")
    assert (applied.version, applied.before, applied.is_whole) == (version, None, True)
    assert weights_of(tmp_path / "copy") == weights_of(tmp_path / f"model-{version}")
    assert (tmp_path / "copy" / "config.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("before", "after", "deltas", "is_whole"), [(1, 2, 1, False), (1, 3, 2, False), (2, 5, 1, True), (4, 5, 1, False)]
)
def test_a_reader_that_lags_catches_up(
    tmp_path: Path, versions: Path, before: int, after: int, deltas: int, is_whole: bool
) -> None:
    """The copy applies several deltas, or the newest whole version and the deltas since; its old files are removed."""
    apply_delta(tmp_path / "copy", versions, version=before)
    applied = apply_delta(tmp_path / "copy", versions, version=after)
    assert (applied.before, applied.deltas, applied.is_whole) == (before, deltas, is_whole)
    assert weights_of(tmp_path / "copy") == weights_of(tmp_path / f"model-{after}")
    assert sorted(files_of(tmp_path / "copy")) == [
        "config.json",
        *(path.name for path in weight_files(tmp_path / "copy")),
        INDEX,
    ]
    assert all(path.name.endswith(f"-v00000{after}.safetensors") for path in weight_files(tmp_path / "copy"))


def test_a_version_that_is_there_is_left_alone(tmp_path: Path, versions: Path) -> None:
    """A second call changes nothing: a delta applied twice would undo itself."""
    apply_delta(tmp_path / "copy", versions)
    before = files_of(tmp_path / "copy")
    applied = apply_delta(tmp_path / "copy", versions)
    assert (applied.before, applied.deltas, applied.nbytes) == (5, 0, 0)
    assert files_of(tmp_path / "copy") == before


@pytest.mark.parametrize("files", [1, 2])
def test_a_copy_that_nobody_has_noted_a_version_for_is_recognised(tmp_path: Path, files: int) -> None:
    """A model without a recorded version is recognised by the SHA-256 of its files; a single file gets an index."""
    state = first_state()
    for number in range(1, 4):
        write_model(tmp_path / f"model-{number}", state, files=files)
        publish(tmp_path / f"model-{number}", tmp_path / "published")
        state = next_state(state, number)
    expected = weights_of(tmp_path / "model-3")
    applied = apply_delta(tmp_path / "model-2", tmp_path / "published")
    assert (applied.before, applied.deltas, applied.is_whole) == (2, 1, False)
    assert weights_of(tmp_path / "model-2") == expected
    assert not (tmp_path / "model-2" / "model.safetensors").exists()


@pytest.mark.parametrize("files", [1, 2])
def test_a_recognised_copy_of_the_wanted_version_gets_a_record(tmp_path: Path, files: int) -> None:
    """An export of the newest version can be verified afterwards, and follows even after that version is removed."""
    state, copy = first_state(), tmp_path / "model-1"
    write_model(copy, state, files=files)
    publish(copy, tmp_path / "published")
    weights = weights_of(copy)
    applied = apply_delta(copy, tmp_path / "published")
    assert (applied.version, applied.before, applied.deltas, applied.nbytes) == (1, 1, 0, 0)
    verified = verify_versions(copy)
    assert (verified.versions, verified.files, verified.damages) == ((1,), files + 1, ())
    assert weights_of(copy) == weights
    for number in (2, 3):
        state = next_state(state, number)
        write_model(tmp_path / f"model-{number}", state, files=files)
        publish(tmp_path / f"model-{number}", tmp_path / "published", max_deltas=1, keep_latest=1)
    assert [info.version for info in list_versions(tmp_path / "published")] == [3]
    applied = apply_delta(copy, tmp_path / "published")
    assert (applied.version, applied.before, applied.is_whole) == (3, 1, True)
    assert weights_of(copy) == weights_of(tmp_path / "model-3")
    assert sorted(files_of(copy)) == ["config.json", *(path.name for path in weight_files(copy)), INDEX]


@pytest.mark.parametrize("config", [None, '{"rope": 3}'])
@pytest.mark.parametrize(("has", "version"), [(2, 2), (2, 3), (3, 5)])
def test_a_recognised_copy_has_all_files_of_the_wanted_version(
    tmp_path: Path, versions: Path, config: str | None, has: int, version: int
) -> None:
    """An export whose configuration is missing or changed is refused: as its own version, before a delta or a whole."""
    copy, expected = tmp_path / f"model-{has}", weights_of(tmp_path / f"model-{version}")
    (copy / "config.json").unlink()
    if config is not None:
        (copy / "config.json").write_text(config)
    before = files_of(copy)
    with pytest.raises(StateMismatch, match=rf"has version {has}, and its .* of version {version}: 'config\.json'\."):
        apply_delta(copy, versions, version=version)
    assert files_of(copy) == before
    (copy / "config.json").write_text("{}")
    assert apply_delta(copy, versions, version=version).before == has
    assert weights_of(copy) == expected


@pytest.mark.parametrize(
    "names",
    [
        [".metadata", "__0_0.distcp", "config.json"],
        ["adapter_config.json", "adapter_model.safetensors"],
        ["config.json"],
        ["step-1/config.json"],
    ],
    ids=["checkpoint", "adapter", "configuration", "folder"],
)
def test_a_directory_with_files_of_no_model_is_refused(tmp_path: Path, versions: Path, names: list[str]) -> None:
    """Only an empty directory gets a whole version, so that no file of a checkpoint or an adapter is replaced."""
    for name in names:
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_text("mine")
    shown = ", ".join(repr(name.partition("/")[0]) for name in names if not name.startswith("."))
    with pytest.raises(WriteError, match=rf"mine holds no model, but {re.escape(shown)}\. Pass an empty directory"):
        apply_delta(tmp_path / "mine", versions)
    found = {str(path.relative_to(tmp_path / "mine")) for path in (tmp_path / "mine").rglob("*") if path.is_file()}
    assert found == {*names, ".publish.lock"}
    assert {(tmp_path / "mine" / name).read_text() for name in names} == {"mine"}


def test_hidden_files_do_not_count(tmp_path: Path, versions: Path) -> None:
    """A directory whose only files are hidden gets a whole version, whose files are all visible."""
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / ".gitattributes").write_text("mine")
    assert apply_delta(tmp_path / "copy", versions).is_whole
    assert (tmp_path / "copy" / ".gitattributes").read_text() == "mine"


@pytest.mark.promise("copy-does-not-fit")
def test_a_model_that_was_not_published_is_refused(tmp_path: Path, versions: Path) -> None:
    """A model that was not published is refused, and does not change."""
    write_model(tmp_path / "foreign", first_state(seed=99))
    before = files_of(tmp_path / "foreign")
    with pytest.raises(StateMismatch, match=r"is not a version in .*published, so no delta fits it"):
        apply_delta(tmp_path / "foreign", versions)
    assert files_of(tmp_path / "foreign") == before


@pytest.mark.promise("copy-does-not-fit", reason="another version")
def test_a_copy_of_a_delta_is_refused(tmp_path: Path, versions: Path) -> None:
    """A copy of a delta's directory is not taken for the model at that version."""
    shutil.copytree(versions / "weight_v000002", tmp_path / "copy")
    before = files_of(tmp_path / "copy")
    with pytest.raises(StateMismatch, match=r"copy is a copy of the delta of version 2, .* an empty directory"):
        apply_delta(tmp_path / "copy", versions, version=2)
    assert files_of(tmp_path / "copy") == before


def test_a_version_of_another_publisher_is_refused(tmp_path: Path, versions: Path) -> None:
    """A version of another directory is refused, even if it has the same number."""
    write_model(tmp_path / "foreign", first_state(seed=99))
    publish(tmp_path / "foreign", tmp_path / "elsewhere")
    apply_delta(tmp_path / "copy", tmp_path / "elsewhere")
    before = files_of(tmp_path / "copy")
    with pytest.raises(StateMismatch, match="comes from another directory of versions"):
        apply_delta(tmp_path / "copy", versions)
    assert files_of(tmp_path / "copy") == before


@pytest.mark.promise("copy-does-not-fit", reason="a damaged copy")
@pytest.mark.parametrize("number", [0, 1])
def test_a_damaged_copy_is_refused(tmp_path: Path, versions: Path, number: int) -> None:
    """One flipped bit, in a changed tensor or another, is an error, because the result is not the published version."""
    apply_delta(tmp_path / "copy", versions, version=1)
    path = sorted((tmp_path / "copy").glob("*.safetensors"))[number]
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)
    before = files_of(tmp_path / "copy")
    with pytest.raises(
        ChecksumMismatch, match=rf"{re.escape(str(path))}(, or its delta in|.*differs from the published file)"
    ):
        apply_delta(tmp_path / "copy", versions, version=3)
    assert files_of(tmp_path / "copy") == before


def test_going_back_must_be_asked_for(tmp_path: Path, versions: Path) -> None:
    """A lower version is applied only if the call names its number."""
    apply_delta(tmp_path / "copy", versions, version=3)
    for version in (4, 5):
        for file in (versions / f"weight_v00000{version}").iterdir():
            file.unlink()
    (versions / "weight_v000003" / INDEX).unlink()
    with pytest.raises(StateMismatch, match=r"has version 3, but the newest in .* is 2"):
        apply_delta(tmp_path / "copy", versions)
    assert apply_delta(tmp_path / "copy", versions, version=2).is_whole
    assert weights_of(tmp_path / "copy") == weights_of(tmp_path / "model-2")


@pytest.mark.parametrize("kind", ["recorded", "recorded without other files", "recognised"])
def test_another_configuration_needs_another_directory(tmp_path: Path, versions: Path, kind: str) -> None:
    """A version with another configuration is refused, because it cannot change atomically with the weights.

    Release 0.1.0 recorded no files beside the weights in copies that it recognised.
    """
    if kind == "recognised":
        shutil.copytree(tmp_path / "model-5", tmp_path / "copy")
    else:
        apply_delta(tmp_path / "copy", versions)
    if kind == "recorded without other files":
        edit_index(tmp_path / "copy", lambda index: index["metadata"]["dcp_tensorizer"].pop("others"))
    write_model(tmp_path / "other", first_state(), config='{"rope": 2}')
    publish(tmp_path / "other", versions)
    before = files_of(tmp_path / "copy")
    with pytest.raises(StateMismatch, match=r"has version 5, and its files .* of version 6: 'config\.json'\."):
        apply_delta(tmp_path / "copy", versions)
    assert files_of(tmp_path / "copy") == before
    apply_delta(tmp_path / "fresh", versions)
    assert (tmp_path / "fresh" / "config.json").read_text() == '{"rope": 2}'


def test_files_of_others_stay(tmp_path: Path, versions: Path) -> None:
    """A file that is only named like an old version of another file is not removed."""
    apply_delta(tmp_path / "copy", versions, version=1)
    (tmp_path / "copy" / "adapter-v000001.safetensors").write_bytes(b"lora")
    (tmp_path / "copy" / "notes.txt").write_bytes(b"mine")
    apply_delta(tmp_path / "copy", versions)
    assert (tmp_path / "copy" / "adapter-v000001.safetensors").read_bytes() == b"lora"
    assert (tmp_path / "copy" / "notes.txt").read_bytes() == b"mine"


def test_several_at_once_do_it_once(tmp_path: Path, versions: Path) -> None:
    """Several processes that update one directory at once, such as the ranks of a server, update it once."""
    apply_delta(tmp_path / "copy", versions, version=1)
    results: list[int] = []
    threads = [
        threading.Thread(target=lambda: results.append(apply_delta(tmp_path / "copy", versions, version=3).deltas))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [0, 0, 0, 2]
    assert weights_of(tmp_path / "copy") == weights_of(tmp_path / "model-3")


def test_a_call_that_waits_gets_the_newest_version(
    tmp_path: Path, versions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another call brings the copy to a version that appeared after the first call began, the first one follows."""
    apply_delta(tmp_path / "copy", versions, version=4)
    lock = apply._lock

    def publish_and_apply_first(descriptor: int) -> bool:
        monkeypatch.undo()
        publish(tmp_path / "model-1", versions)
        assert apply_delta(tmp_path / "copy", versions).version == 6
        return lock(descriptor)

    monkeypatch.setattr(apply, "_lock", publish_and_apply_first)
    applied = apply_delta(tmp_path / "copy", versions)
    assert (applied.version, applied.before, applied.deltas) == (6, 6, 0)


def test_a_directory_of_sglangs_receiver_is_refused(tmp_path: Path, versions: Path) -> None:
    """A directory of SGLang's receiver is refused, because the receiver counts versions itself."""
    (tmp_path / "copy" / ".weight_sync").mkdir(parents=True)
    with pytest.raises(WriteError, match=r"belongs to SGLang's receiver"):
        apply_delta(tmp_path / "copy", versions)


def test_missing_versions_are_named(tmp_path: Path, versions: Path) -> None:
    """The error names the missing version and the existing ones."""
    with pytest.raises(NotCommitted, match=r"no version 9 in .*published: it has versions 1 to 5\. Pass one"):
        apply_delta(tmp_path / "copy", versions, version=9)
    with pytest.raises(NotCommitted, match="nothing has been published in"):
        apply_delta(tmp_path / "copy", tmp_path / "nothing")
    with pytest.raises(WriteError, match="is not a local directory"):
        apply_delta("memory://copy", versions)


@pytest.mark.parametrize(
    ("missing", "needed", "shown"),
    [
        ([2], None, "versions 1 and 3 to 5"),
        ([4], 4, "versions 1 to 3 and 5"),
        ([3], None, "versions 1, 2, 4 and 5"),
        ([1, 2, 4, 5], 1, "only version 3"),
    ],
)
def test_a_gap_is_named(tmp_path: Path, versions: Path, missing: list[int], needed: int | None, shown: str) -> None:
    """The error lists the versions that exist. If the newest builds on a missing one, the error names that one."""
    for number in missing:
        shutil.rmtree(versions / f"weight_v{number:06d}")
    with pytest.raises(NotCommitted, match=rf"there is no version {missing[0]} in .*published: it has {shown}\."):
        apply_delta(tmp_path / "copy", versions, version=missing[0])
    if needed is None:
        assert apply_delta(tmp_path / "copy", versions).version == 5
    else:
        words = rf"builds on version {needed}, which is missing in .*: it has {shown}\. Restore weight_v00000{needed},"
        with pytest.raises(NotCommitted, match=words):
            apply_delta(tmp_path / "copy", versions)
        assert not list((tmp_path / "copy").glob("*.safetensors"))


@pytest.mark.promise("version-removed")
@pytest.mark.parametrize("is_directory", [True, False])
def test_a_version_that_is_removed_while_it_is_read(
    tmp_path: Path, versions: Path, monkeypatch: pytest.MonkeyPatch, is_directory: bool
) -> None:
    """The copy stays as it is, and gets to the newest version that is there."""
    copy: Any = tmp_path / "copy" if is_directory else tensors_of(tmp_path / "model-1")
    if is_directory:
        apply_delta(copy, versions, version=1)
    chain = Published.chain

    def chain_and_remove(published: Published, version: int, after: int | None = None) -> list[Manifest]:
        found = chain(published, version, after)
        if (versions / "weight_v000002").exists():
            shutil.rmtree(versions / "weight_v000002")
        return found

    monkeypatch.setattr(Published, "chain", chain_and_remove)
    with pytest.raises((NotCommitted, ReadError), match="weight_v000002"):
        apply_delta(copy, versions, version=2)
    monkeypatch.undo()
    if is_directory:
        assert weights_of(copy) == weights_of(tmp_path / "model-1")
        assert apply_delta(copy, versions).version == 5
        assert weights_of(copy) == weights_of(tmp_path / "model-5")
    else:
        assert same(copy, tensors_of(tmp_path / "model-1"))


# --- what was made to harm --------------------------------------------------------------------------------------------


def replace_file(index: dict[str, Any], old: str, new: str) -> None:
    index["weight_map"] = {key: new if name == old else name for key, name in index["weight_map"].items()}


@pytest.mark.promise("harmful-version")
@pytest.mark.parametrize(
    "name", ["../../evil.safetensors", "/tmp/evil.safetensors", "..", "a/b.safetensors", ".x.safetensors"]
)
@pytest.mark.parametrize("place", ["weight_map", "files", "others", "origin", "replaced"])
def test_names_in_a_version_cannot_leave_the_directory(tmp_path: Path, versions: Path, name: str, place: str) -> None:
    """Names in any field of a manifest cannot lead to writes or removals outside the directory."""

    def change(index: dict[str, Any]) -> None:
        ours = index["metadata"]["dcp_tensorizer"]
        record = {"nbytes": 1, "sha256": "0" * 64}
        if place == "weight_map":
            replace_file(index, next(iter(index["weight_map"].values())), name)
        elif place == "origin":
            ours["files"][next(iter(ours["files"]))]["origin"] = name
        elif place == "replaced":
            ours["replaced"] = [name]
        else:
            ours.setdefault(place, {})[name] = record

    apply_delta(tmp_path / "copy", versions, version=1)
    before = files_of(tmp_path / "copy")
    edit_index(versions / "weight_v000002", change)
    with pytest.raises(MetadataError, match="is not a visible file of its directory"):
        apply_delta(tmp_path / "copy", versions, version=2)
    assert files_of(tmp_path / "copy") == before


def put_delta(versions: Path, frame: bytes, digest: str = "0" * 32) -> None:
    """Writes a delta of the embedding to version 2, alone in its file."""
    header = header_of({"embed.weight": len(frame)}, {"embed.weight": digest})
    (versions / "weight_v000002" / "delta-evil.safetensors").write_bytes(header + frame)
    edit_index(versions / "weight_v000002", lambda index: change_one(index, "embed.weight", digest))


def change_one(index: dict[str, Any], key: str, digest: str = "0" * 32) -> None:
    """Changes a manifest so that its version changes only one tensor."""
    index["weight_map"] = {key: "delta-evil.safetensors"}
    index["metadata"]["dcp_tensorizer"]["tensors"] = {key: digest}


@pytest.mark.promise("harmful-version", reason="a delta that unpacks to too much")
@pytest.mark.parametrize("kind", ["bomb", "too long", "garbage", "wrong digest"])
def test_a_bad_delta_changes_nothing(tmp_path: Path, versions: Path, kind: str) -> None:
    """A delta is decompressed in pieces, and verified before any file is replaced."""
    nbytes = 700 * 1100 * 2
    frames = {
        "bomb": zstd().compress(bytes(1 << 28), level=1),
        "too long": os.urandom(3 * nbytes),
        "garbage": os.urandom(1000),
        "wrong digest": zstd().compress(bytes(nbytes), level=1),
    }
    apply_delta(tmp_path / "copy", versions, version=1)
    before = files_of(tmp_path / "copy")
    put_delta(versions, frames[kind])
    with pytest.raises(ChecksumMismatch, match=r"'embed\.weight'"):
        apply_delta(tmp_path / "copy", versions, version=2)
    assert files_of(tmp_path / "copy") == before


def test_unknown_tensors_and_unlisted_ones_are_errors(tmp_path: Path, versions: Path) -> None:
    """A delta must change exactly the tensors that its manifest lists and the model has."""
    apply_delta(tmp_path / "copy", versions, version=1)
    frame = zstd().compress(b"\1", level=1)
    header = header_of({"unknown": len(frame)}, {"unknown": "0" * 32})
    (versions / "weight_v000002" / "delta-evil.safetensors").write_bytes(header + frame)
    edit_index(versions / "weight_v000002", lambda index: change_one(index, "unknown"))
    for target in (tmp_path / "copy", tensors_of(tmp_path / "model-1")):
        with pytest.raises(
            MetadataError, match="or an earlier delta, changes tensors that the model does not have: 'unknown'"
        ):
            apply_delta(target, versions, version=2)
    edit_index(versions / "weight_v000002", lambda index: change_one(index, "scale"))
    with pytest.raises(MetadataError, match="does not hold the tensors that the manifest lists"):
        apply_delta(tmp_path / "copy", versions, version=2)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda index: index["metadata"].pop("dcp_tensorizer"), UnsupportedFormat, "not a manifest of dcp_tensorizer"),
        (lambda index: index["metadata"]["dcp_tensorizer"].update(format=2), UnsupportedFormat, "has format 2"),
        (lambda index: index["metadata"].update(version="000007"), MetadataError, "is the manifest of version 7"),
        (lambda index: index["metadata"].update(base_version="000002"), MetadataError, "is inconsistent"),
        (
            lambda index: index["metadata"].update(delta_encoding="overwrite"),
            MetadataError,
            "not a manifest of a version",
        ),
        (lambda index: index["metadata"].update(version="../../01"), MetadataError, "not a manifest of a version"),
        (lambda index: index.pop("weight_map"), MetadataError, "not a manifest of a version"),
    ],
    ids=["another program's", "newer", "another version", "its own base", "overwrite", "no number", "no map"],
)
def test_a_manifest_that_makes_no_sense_is_an_error(
    tmp_path: Path, versions: Path, change: Callable[[dict[str, Any]], object], error: type[Exception], message: str
) -> None:
    """The error names the fault of an invalid manifest."""
    edit_index(versions / "weight_v000002", change)
    with pytest.raises(error, match=message):
        apply_delta(tmp_path / "copy", versions, version=2)
    assert not list((tmp_path / "copy").glob("*.safetensors")) if (tmp_path / "copy").exists() else True


# --- tensors in memory ------------------------------------------------------------------------------------------------


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {key: value for file in path.glob("*.safetensors") for key, value in load_file(file).items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(
        torch.equal(left[key].reshape(-1).view(torch.uint8), right[key].reshape(-1).view(torch.uint8)) for key in right
    )


@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 3), (4, 5)])
def test_tensors_change_in_place(tmp_path: Path, versions: Path, before: int, after: int) -> None:
    """The tensors' version is found by their digests; other names in the mapping, and all memory, stay."""
    state = tensors_of(tmp_path / f"model-{before}")
    places = {key: tensor.data_ptr() for key, tensor in state.items()}
    state["other"] = torch.ones(2)
    applied = apply_delta(state, versions, version=after)
    assert (applied.before, applied.deltas) == (before, after - before)
    assert same(state, tensors_of(tmp_path / f"model-{after}"))
    assert {key: state[key].data_ptr() for key in places} == places
    assert apply_delta(state, versions, version=after).deltas == 0


def test_tensors_in_any_memory(tmp_path: Path, versions: Path) -> None:
    """Parameters, several transposed tensors and NumPy arrays change in place."""
    state: dict[str, Any] = dict(tensors_of(tmp_path / "model-1"))
    transposed = "embed.weight", "layers.0.weight"
    for key in transposed:
        state[key] = torch.nn.Parameter(state[key].t().contiguous().t(), requires_grad=state[key].is_floating_point())
        assert not state[key].is_contiguous()
    state["scale"] = state["scale"].numpy()
    apply_delta(state, versions, version=3)
    state["scale"] = torch.from_numpy(np.asarray(state["scale"]))
    for key in transposed:
        state[key] = state[key].detach().contiguous()
    assert same(state, tensors_of(tmp_path / "model-3"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: state["layers.1.weight"].view(torch.uint8).view(-1)[0].bitwise_xor_(1),
            "no version from 1 to 3",
        ),
        (lambda state: state.pop("scale"), "are missing from the mapping: 'scale'"),
        (lambda state: state.update(scale=torch.zeros(2)), "'scale' has 8 bytes, but was published with 4"),
        (
            lambda state: state.update(scale=1.5),
            "'scale' must be a plain strided tensor .*, got an object of type float",
        ),
    ],
    ids=["another value", "missing", "another size", "no tensor"],
)
def test_tensors_of_another_version_are_refused(
    tmp_path: Path, versions: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    """Tensors of another version are refused before any of them changes."""
    state: dict[str, Any] = dict(tensors_of(tmp_path / "model-1"))
    change(state)
    before = {key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)}
    with pytest.raises(StateMismatch, match=message):
        apply_delta(state, versions, version=3)
    assert all(torch.equal(state[key], value) for key, value in before.items())


def test_a_damaged_delta_changes_no_tensor(tmp_path: Path, versions: Path) -> None:
    """A damaged delta changes no tensor, not even those before it."""
    state = tensors_of(tmp_path / "model-1")
    before = {key: value.clone() for key, value in state.items()}
    path = next((versions / "weight_v000003").glob("delta-00002*"))
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    path.write_bytes(content)
    with pytest.raises(ChecksumMismatch):
        apply_delta(state, versions, version=3)
    assert all(torch.equal(state[key], value) for key, value in before.items())


def test_a_copy_loads_as_the_model_that_was_published(tmp_path: Path, versions: Path) -> None:
    """The safetensors library loads the copy from the files that its index names."""
    apply_delta(tmp_path / "copy", versions)
    copy, model = loaded(tmp_path / "copy"), loaded(tmp_path / "model-5")
    assert {key: value.tobytes() for key, value in copy.items()} == {key: v.tobytes() for key, v in model.items()}


class Interrupted(Exception):
    """An error in the middle of a change."""


def in_memory(path: Path) -> dict[str, Any]:
    """Returns a model's tensors: one changes through a copy, one is an array, and two are one parameter."""
    state: dict[str, Any] = dict(tensors_of(path))
    state["layers.0.weight"] = state["layers.0.weight"].t().contiguous().t()
    state["scale"] = state["scale"].numpy()
    return state


def bytes_of(state: dict[str, Any]) -> dict[str, bytes]:
    return {
        key: torch.as_tensor(value).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for key, value in state.items()
    }


@pytest.mark.parametrize("when", ["on_progress", "a piece", "a copy"])
def test_an_error_at_any_moment_changes_no_tensor(
    tmp_path: Path, versions: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Changed tensors are restored from memory, even if the versions are gone."""
    state, moved = in_memory(tmp_path / "model-1"), tmp_path / "moved"
    before, after = bytes_of(state), bytes_of(dict(tensors_of(tmp_path / "model-3")))
    left = 0

    def interrupt() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise Interrupted

    def in_turn(done: int, total: int) -> None:
        if done > total // 2 and versions.exists():
            versions.rename(moved)
        if when == "on_progress":
            interrupt()

    xor_into, copy = DeltaDecoder.xor_into, torch.Tensor.copy_

    def xor_then_stop(self: DeltaDecoder, data: np.ndarray) -> None:
        xor_into(self, data)
        interrupt()

    def copy_then_stop(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        copied = copy(self, other)
        interrupt()
        return copied

    if when == "a piece":
        monkeypatch.setattr(DeltaDecoder, "xor_into", xor_then_stop)
    elif when == "a copy":
        monkeypatch.setattr(torch.Tensor, "copy_", copy_then_stop)
    stops = 0
    for at in range(1, 100):
        left = at
        try:
            apply_delta(state, versions, version=3, on_progress=in_turn)
        except Interrupted:
            stops += 1
            assert bytes_of(state) == before, at
        else:
            break
        finally:
            if moved.exists():
                moved.rename(versions)
    assert stops >= {"on_progress": 6, "a piece": 8, "a copy": 1}[when]
    assert bytes_of(state) == after


def test_tied_tensors_change_once(tmp_path: Path) -> None:
    """Tied tensors change once; other tensors that share memory are refused, and do not change."""
    first, second = (torch.arange(300.0), torch.arange(300.0) + 1)
    for number, (one, other) in enumerate([(first, first), (second, second), (second, second + 1)], 1):
        (tmp_path / f"tied-{number}").mkdir()
        tensors = {"embed": one, "head": other.clone(), "alone": one.clone()}
        save_file(tensors, tmp_path / f"tied-{number}" / "model.safetensors")
        publish(tmp_path / f"tied-{number}", tmp_path / "published")
    shared = first.clone()
    state = {"embed": shared, "head": shared.view(300), "alone": first.clone()}
    apply_delta(state, tmp_path / "published", version=2)
    assert all(torch.equal(tensor, second) for tensor in state.values())
    with pytest.raises(StateMismatch, match=r"share memory differ in version 3: '(embed|head)'"):
        apply_delta(state, tmp_path / "published")
    assert all(torch.equal(tensor, second) for tensor in state.values())


@pytest.mark.parametrize(
    "value",
    [
        torch.full((1,), 1.5).expand(300),
        torch.as_strided(torch.full((400,), 1.5), (20, 15), (10, 1)),
        torch.full((300,), 1.5).to_sparse(),
        np.broadcast_to(np.float32(1.5), (300,)),
        torch.empty(300, device="meta"),
        np.array([None] * 150, dtype=object),
    ],
    ids=["expanded", "overlapping", "sparse", "broadcast", "meta", "objects"],
)
def test_tensors_that_cannot_change_are_refused_before_others_change(tmp_path: Path, value: Any) -> None:
    """Tensors with overlapping elements, and arrays of objects, are refused before others change."""
    for number in (1, 2):
        (tmp_path / f"flat-{number}").mkdir()
        tensors = {"a": torch.full((300,), float(number)), "b": torch.full((300,), number + 0.5)}
        save_file(tensors, tmp_path / f"flat-{number}" / "model.safetensors")
        publish(tmp_path / f"flat-{number}", tmp_path / "published")
    state = {"a": torch.ones(300), "b": value}
    with pytest.raises(StateMismatch, match="'b' must be a plain strided tensor"):
        apply_delta(state, tmp_path / "published")
    assert torch.equal(state["a"], torch.ones(300))


@pytest.mark.parametrize("is_directory", [True, False])
def test_a_delta_of_another_version_is_an_error(tmp_path: Path, versions: Path, is_directory: bool) -> None:
    """The manifest has the digests of the changed tensors, so the delta of version 2 is refused for version 3."""
    old, new = (
        folder / json.loads((folder / INDEX).read_text())["weight_map"]["embed.weight"]
        for folder in (versions / "weight_v000002", versions / "weight_v000003")
    )
    new.write_bytes(old.read_bytes())
    target: Any = tmp_path / "copy" if is_directory else tensors_of(tmp_path / "model-2")
    if is_directory:
        apply_delta(target, versions, version=2)
    with pytest.raises(
        MetadataError, match=r"delta-\w+-\w+\.safetensors does not belong to version 3: its digest of '"
    ):
        apply_delta(target, versions, version=3)
    if is_directory:
        assert weights_of(target) == weights_of(tmp_path / "model-2")
    else:
        assert same(target, tensors_of(tmp_path / "model-2"))


@pytest.mark.parametrize(
    ("target", "source"),
    [
        ("published/weight_v000001", "published"),
        ("published/weight_v000001", "published/weight_v000002"),
        ("published/weight_v000001", "elsewhere"),
        ("published/weight_v000001/deeper", "published"),
        ("published/weight_v000009", "published"),
        ("published", "published"),
        ("published/copy", "published"),
        ("published/../published/weight_v000002", "published"),
        ("link/weight_v000001", "published"),
        ("published/weight_v000001", "link"),
        ("published/weight_v000001", "file://published"),
        (".", "published"),
    ],
)
def test_a_version_is_no_target(tmp_path: Path, target: str, source: str) -> None:
    """A version, or a directory that contains or is in the directory of versions, is refused by any path."""
    versions = publish_versions(tmp_path, 2)
    publish(tmp_path / "model-1", tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(versions)
    before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
    where = f"file://{tmp_path}/published" if source.startswith("file:") else tmp_path / source
    with pytest.raises(WriteError, match=r"Pass another directory"):
        apply_delta(f"{tmp_path}/{target}", where)
    assert {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()} == before


@pytest.mark.parametrize("bit", [0, 7])
def test_every_flipped_bit_of_a_manifest_is_an_error_of_the_checkpoint(tmp_path: Path, bit: int) -> None:
    """A flipped bit in a manifest is a CheckpointError, or makes no difference."""
    (tmp_path / "model").mkdir()
    save_file({"w": torch.zeros(4)}, tmp_path / "model" / "model.safetensors")
    publish(tmp_path / "model", tmp_path / "published")
    index = tmp_path / "published" / "weight_v000001" / INDEX
    content = index.read_bytes()
    for position in range(0, len(content), 3):
        flipped = bytearray(content)
        flipped[position] ^= 1 << bit
        index.write_bytes(flipped)
        with contextlib.suppress(CheckpointError):
            list_versions(tmp_path / "published")
            assert apply_delta({"w": torch.zeros(4)}, tmp_path / "published").version == 1
