"""Tests of versions on an object store, which has no directories and no links."""

from __future__ import annotations

from pathlib import Path

from dcp_tensorizer import apply_delta, publish
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer.tools import list_versions, verify_versions

from ...lab.models import first_state, next_state, weights_of, write_model
from ...lab.servers import S3Server


def test_leftovers_of_killed_publishers_go_with_the_next_version(tmp_path: Path, s3: S3Server) -> None:
    """Leftover objects and uploads of killed publishers are removed with the next version; other files stay."""
    url, options, state = f"s3://{s3.bucket}/published", s3.options(), first_state()
    for number in (1, 2):
        publish(write_model(tmp_path / f"model-{number}", state), url, storage_options=options)
        state = next_state(state, number)
    folders = [open_storage(f"{url}/weight_v{number:06d}", options) for number in (2, 3)]
    for folder in folders:
        sink = folder.create("delta-00001-0badcafe.safetensors", 20 << 20, sync=True)
        sink.put_part(0, memoryview(bytes(sink.part_bytes)))
        folder.put("delta-00002-0badcafe.safetensors", b"x", sync=True)
        assert len(folder.uploads()) == 1
    folders[0].put("notes.txt", b"mine", sync=True)
    assert publish(write_model(tmp_path / "model-3", state), url, storage_options=options).version == 3
    assert [folder.uploads() for folder in folders] == [[], []]
    names = [{file.name for file in folder.listing()[0]} for folder in folders]
    assert all(not any("0badcafe" in name for name in of_folder) for of_folder in names)
    assert "notes.txt" in names[0]
    assert verify_versions(url, storage_options=options).damages == ()
    assert [info.version for info in list_versions(url, storage_options=options)] == [3, 2, 1]
    apply_delta(tmp_path / "copy", url, storage_options=options)
    assert weights_of(tmp_path / "copy") == weights_of(tmp_path / "model-3")
