"""Filesystems of fsspec that are not for several threads, or have listings of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem

from dcp_tensorizer import TensorizerStorageReader
from dcp_tensorizer._storage.fsspec import StreamStorage

from ...lab.checkpoints import make_checkpoint


class _Listing(MemoryFileSystem):
    """A filesystem that answers from a cached listing, as fsspec's FTP does."""

    protocol = "listing"
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, dict[str, Any]] = {}

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        parent, name = path.rsplit("/", 1)
        if parent not in self.kept:
            entries = super().ls(parent, detail=True)
            self.kept[parent] = {entry["name"].rsplit("/", 1)[1]: entry for entry in entries}
        if name not in self.kept[parent]:
            raise FileNotFoundError(path)
        return self.kept[parent][name]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.kept.clear()


def opened(filesystem: MemoryFileSystem, folder: str) -> StreamStorage:
    filesystem.makedirs(folder, exist_ok=True)
    return StreamStorage(filesystem, folder, f"{filesystem.protocol}://{folder}", str, 10.0)


@pytest.mark.parametrize("cache", ["simplecache", "filecache"])
def test_a_filesystem_that_takes_one_thread_at_a_time(tmp_path: Path, cache: str) -> None:
    """Loads through fsspec's caches, which are not thread-safe, send one request at a time."""
    state = {f"w{n}": torch.full((1 << 20,), float(n)) for n in range(6)}
    make_checkpoint(tmp_path / "a", state)
    found = {key: torch.zeros(1 << 20) for key in state}
    options = {cache: {"cache_storage": str(tmp_path / "cache")}}
    reader = TensorizerStorageReader(f"{cache}::file://{tmp_path}/a", storage_options=options[cache])
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert {key: tensor.unique().tolist() for key, tensor in found.items()} == {f"w{n}": [float(n)] for n in range(6)}


def test_a_listing_that_is_older_than_a_file() -> None:
    """A file that another process has written after the listing is found."""
    storage, other = opened(_Listing(), "/listing"), opened(_Listing(), "/listing")
    assert storage.head("file") is None
    other.put("file", b"12345", sync=True)
    assert storage.head("file") == 5
    other.remove("file")
