"""Tests of listing, verifying and removing versions."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dcp_tensorizer import NotCommitted, UnsupportedFormat, apply_delta, publish
from dcp_tensorizer.tools import collect_versions, list_versions, verify_versions

from ...lab.models import INDEX, publish_versions, weight_files, weights_of


@pytest.fixture
def versions(tmp_path: Path) -> Path:
    """Publishes six versions, of which 1 and 4 are whole."""
    return publish_versions(tmp_path, 6)


@pytest.mark.parametrize(
    ("keep", "left"), [(1, [4, 5, 6]), (3, [4, 5, 6]), (4, [1, 2, 3, 4, 5, 6]), (9, [1, 2, 3, 4, 5, 6])]
)
def test_old_versions_go_unless_a_newer_one_needs_them(
    tmp_path: Path, versions: Path, keep: int, left: list[int]
) -> None:
    """The fourth newest version is a delta, so the two before it stay, too."""
    expected = [number for number in range(6, 0, -1) if number not in left]
    assert [info.version for info in collect_versions(versions, keep_latest=keep, dry_run=True)] == expected
    assert len(list_versions(versions)) == 6
    collect_versions(versions, keep_latest=keep)
    assert [info.version for info in list_versions(versions)] == left[::-1]
    assert sorted(path.name for path in versions.iterdir()) == [".publish.claim", *(f"weight_v00000{n}" for n in left)]
    apply_delta(tmp_path / "copy", versions)
    assert weights_of(tmp_path / "copy") == weights_of(tmp_path / "model-6")


def test_files_of_others_stay_in_a_version(versions: Path) -> None:
    """Removing old versions removes the leftovers of dead publications from the others, and no file of the user's."""
    notes = versions / "weight_v000005" / "notes.txt"
    notes.write_text("mine")
    collect_versions(versions, keep_latest=1)
    assert notes.read_text() == "mine"


def test_a_publisher_removes_by_the_same_rule(tmp_path: Path, versions: Path) -> None:
    """A publisher with keep_latest removes the same versions, and numbers continue from the newest."""
    version = publish(tmp_path / "model-1", versions, keep_latest=1, max_deltas=2)
    assert (version.version, version.is_delta, version.removed) == (7, False, (6, 5, 4, 3, 2, 1))
    assert publish(tmp_path / "model-2", versions).version == 8


def test_whole_versions_are_verified_with_their_deltas(tmp_path: Path, versions: Path) -> None:
    """All versions, one version, or a copy can be verified."""
    verified = verify_versions(versions)
    assert (verified.versions, verified.files, verified.damages) == ((3, 6), 6, ())
    assert verify_versions(versions, version=2).versions == (2,)
    apply_delta(tmp_path / "copy", versions)
    copy = verify_versions(tmp_path / "copy")
    assert (copy.versions, copy.files, copy.damages) == ((6,), 2, ())


def test_the_version_of_a_copy_is_checked(tmp_path: Path, versions: Path) -> None:
    """A copy has one version: another one is an error, as in a directory of versions."""
    apply_delta(tmp_path / "copy", versions, version=5)
    assert verify_versions(tmp_path / "copy", version=5).versions == (5,)
    with pytest.raises(NotCommitted, match=r"there is no version 77 in .*copy: it has only version 5"):
        verify_versions(tmp_path / "copy", version=77)


def test_the_directory_of_a_delta_is_verified_with_its_chain(tmp_path: Path, versions: Path) -> None:
    """A delta's directory stands for its version; away from the versions on which it builds, it is refused."""
    assert verify_versions(f"{versions}/weight_v000005/").versions == (5,)
    assert verify_versions(versions / "weight_v000005").damages == ()
    with pytest.raises(NotCommitted, match=r"there is no version 4 in .*weight_v000005: it has only version 5"):
        verify_versions(versions / "weight_v000005", version=4)
    shutil.copytree(versions / "weight_v000005", tmp_path / "alone")
    with pytest.raises(
        UnsupportedFormat,
        match=r"alone is not a model: it holds only the changes of version 5 since .* with apply_delta",
    ):
        verify_versions(tmp_path / "alone")


@pytest.mark.parametrize("version", ["2", True, 2.0, 0])
def test_versions_are_counts(tmp_path: Path, versions: Path, version: object) -> None:
    """A version is any integer of at least 1; another value is refused, and nothing is written."""
    for use in (
        lambda: verify_versions(versions, version=version),  # type: ignore[arg-type]
        lambda: apply_delta(tmp_path / "copy", versions, version=version),  # type: ignore[arg-type]
    ):
        with pytest.raises((TypeError, ValueError), match=r"^version must be an int of at least 1, or None, got "):
            use()
    assert not (tmp_path / "copy").exists()
    assert apply_delta(tmp_path / "copy", versions, version=np.int64(2)).version == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("version", [1, 2, 4, 6])
def test_any_damage_is_named(versions: Path, version: int) -> None:
    """The error names the damaged file and the version that cannot be rebuilt; other chains are whole."""
    path = sorted((versions / f"weight_v00000{version}").glob("*.safetensors"))[-1]
    content = bytearray(path.read_bytes())
    content[-9:] = bytes(byte ^ 255 for byte in content[-9:])  # a single bit may be one that zstd does not use
    path.write_bytes(content)
    (damage,) = verify_versions(versions).damages
    assert damage.startswith(f"version {3 if version < 4 else 6}: ")


def test_a_missing_empty_file_is_named(tmp_path: Path) -> None:
    """A missing file is not taken for an empty file, which has the same SHA-256."""
    publish_versions(tmp_path, 1)
    (tmp_path / "model-1" / "merges.txt").touch()
    publish(tmp_path / "model-1", tmp_path / "own")
    stored = next((tmp_path / "own").glob(f"*/.other-{hashlib.sha256().hexdigest()}-*"))
    stored.unlink()
    (damage,) = verify_versions(tmp_path / "own").damages
    assert damage.endswith(f"{stored.name}: it does not exist")


def test_another_file_under_the_name_of_one_beside_the_weights_is_named(tmp_path: Path) -> None:
    """Another file under a fixed name is reported, because other programs read it; the next publication replaces it."""
    publish_versions(tmp_path, 1)
    named = tmp_path / "published" / "weight_v000001" / "config.json"
    named.unlink()
    named.write_text("[]")
    (damage,) = verify_versions(tmp_path / "published").damages
    assert damage.endswith("config.json is not what was published")
    named.unlink()
    publish(tmp_path / "model-1", tmp_path / "published")
    assert named.read_text() == "{}"


def test_missing_files_are_named(tmp_path: Path, versions: Path) -> None:
    """Missing files of a published version and of a copy are named."""
    next((versions / "weight_v000005").glob("delta-00001*")).unlink()
    (damage,) = verify_versions(versions).damages
    assert "weight_v000005/delta-00001" in damage
    apply_delta(tmp_path / "copy", versions, version=1)
    (tmp_path / "copy" / "config.json").unlink()
    assert verify_versions(tmp_path / "copy").damages == ()
    missing = weight_files(tmp_path / "copy")[0]
    missing.unlink()
    (damage,) = verify_versions(tmp_path / "copy").damages
    assert missing.name in damage


def test_a_version_without_its_manifest_is_none(tmp_path: Path, versions: Path) -> None:
    """A version without a manifest is not listed, and the next publication takes its number."""
    (versions / "weight_v000006" / INDEX).unlink()
    assert list_versions(versions)[0].version == 5
    assert publish(tmp_path / "model-6", versions, max_deltas=2).version == 6
    assert verify_versions(versions).damages == ()


def test_nothing_published_is_an_error(tmp_path: Path) -> None:
    """Listing, verifying and removing report that nothing was published."""
    for function in (list_versions, verify_versions):
        with pytest.raises(NotCommitted, match="nothing has been published in"):
            function(tmp_path)
    with pytest.raises(NotCommitted, match="nothing has been published in"):
        collect_versions(tmp_path, keep_latest=1)


def test_a_version_of_a_newer_release_is_an_error(tmp_path: Path, versions: Path) -> None:
    """Each function that reads a manifest of a newer format raises `UnsupportedFormat`, and changes nothing."""
    path = versions / "weight_v000006" / INDEX
    content = json.loads(path.read_text())
    content["metadata"]["dcp_tensorizer"]["format"] = 77
    path.write_text(json.dumps(content))
    for use in (
        lambda: list_versions(versions),
        lambda: collect_versions(versions, keep_latest=1),
        lambda: verify_versions(versions),
        lambda: publish(tmp_path / "model-6", versions),
        lambda: apply_delta(tmp_path / "copy", versions),
    ):
        with pytest.raises(UnsupportedFormat, match=f"^{path} has format 77, but this release reads format"):
            use()
    assert len([path for path in versions.iterdir() if path.name.startswith("weight_v")]) == 6
