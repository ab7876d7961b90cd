"""The published tests find what a storage does wrong. That right ones pass is shown by every storage of the package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcp_tensorizer._storage.local import LocalStorage
from dcp_tensorizer.storage import FileInfo, Ranges, Sink, Storage
from dcp_tensorizer.testing import StorageTests


class Wrong(LocalStorage):
    """A storage of which each subclass has one fault."""


class ReplacesAlways(Wrong):
    def put(self, name: str, data: bytes, *, sync: bool, replace: bool = True, save_id: str = "") -> None:
        super().put(name, data, sync=sync, save_id=save_id)


class Appends(Wrong):
    def put(self, name: str, data: bytes, *, sync: bool, replace: bool = True, save_id: str = "") -> None:
        super().put(name, (self.read(name) or b"") + data, sync=sync, replace=replace, save_id=save_id)


class ReadsShort(Wrong):
    def open(self, name: str) -> Any:
        path = Path(self.path, name)
        return Ranges(lambda start, stop: path.read_bytes()[start:stop].ljust(stop - start, b"\0"))


class ReadsAll(Wrong):
    def read(self, name: str, most: int | None = None) -> bytes | None:
        return super().read(name)


class LeavesParts(Wrong):
    def create(self, name: str, nbytes: int, *, sync: bool) -> Sink:
        sink = super().create(name, nbytes, sync=sync)
        sink._abort = lambda: None
        return sink


class MissesWithAnError(Wrong):
    def remove(self, *names: str) -> None:
        for name in names:
            Path(self.path, name).unlink()


class ListsAll(Wrong):
    def listing(self) -> tuple[list[FileInfo], list[str]]:
        below = [path for path in Path(self.path).rglob("*") if path.is_file()]
        return [FileInfo(path.name, path.stat().st_size, None, None) for path in below], []


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (ReplacesAlways, StorageTests.test_put_refuses_to_replace),
        (Appends, StorageTests.test_put_replaces_a_whole_file),
        (ReadsShort, StorageTests.test_reading_past_the_end),
        (ReadsAll, StorageTests.test_a_part_of_a_file),
        (LeavesParts, StorageTests.test_a_failed_write_leaves_nothing),
        (MissesWithAnError, StorageTests.test_missing),
    ],
    ids=lambda value: value.__name__,
)
def test_a_fault_fails_a_test(kind: type[Storage], test: Callable[..., None], tmp_path: Path) -> None:
    """Each fault fails its test, which a correct storage passes."""
    right, wrong = LocalStorage(tmp_path / "right"), kind(tmp_path / "wrong")
    right.make_directory()
    wrong.make_directory()
    test(StorageTests(), right)
    with pytest.raises((AssertionError, OSError, pytest.fail.Exception)):
        test(StorageTests(), wrong)


def test_a_listing_of_all_that_is_below_fails(tmp_path: Path) -> None:
    """A listing that also contains the files of subdirectories fails its test."""
    storage = ListsAll(tmp_path)
    with pytest.raises(AssertionError):
        StorageTests().test_listing(storage, str(tmp_path), {})
