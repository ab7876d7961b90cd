"""A storage that drops data files, ``drop:///FOLDER``, to measure saves without a disk.

It is registered as another package's storage would be, so it also works in the writer process. The folder stores small
files, but only the sizes of data files. This module does not import torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dcp_tensorizer._writer_process.jobs import FileJob
from dcp_tensorizer._writer_process.options import SaveOptions
from dcp_tensorizer._writer_process.protocol import FileRequest, TensorSource
from dcp_tensorizer.storage import FileInfo, Ranges, RemoteStorage, Scrubber, Sink

from .case import Case

_PART = 4 << 20  # as on a local disk
_AT_ONCE = 6
_IN_A_FILE = 2000  # the maximum number of names in a file
_METADATA = "Metadata-Version: 2.1\nName: dropped\nVersion: 0\n"
_ENTRY = "[dcp_tensorizer.storages]\ndrop = benchmarks.dropped:DropStorage\n"


def register(folder: Path) -> None:
    """Registers the protocol ``drop`` for this process and its children, by an entry point below ``folder``."""
    package = folder / "dropped-0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text(_METADATA)
    (package / "entry_points.txt").write_text(_ENTRY)
    sys.path.append(str(folder))


class DropStorage(RemoteStorage):
    def __init__(self, url: str, options: Mapping[str, Any], timeout: float) -> None:
        super().__init__(url, url.partition("://")[2], Scrubber(options), timeout)

    def create(self, name: str, nbytes: int, *, sync: bool) -> DropSink:
        return DropSink(self._full(name))

    def open(self, name: str) -> Ranges:
        return Ranges(lambda start, stop: Path(self._full(name)).read_bytes()[start:stop])

    def remove(self, *names: str) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                os.remove(self._full(name))

    def make_directory(self) -> None:
        os.makedirs(self._root, exist_ok=True)

    def _read(self, name: str, most: int | None) -> bytes:
        with open(self._full(name), "rb") as file:
            return file.read(-1 if most is None else most)

    def _head(self, name: str) -> int:
        return os.stat(self._full(name)).st_size

    def _list(self) -> tuple[list[FileInfo], list[str]]:
        found = [(entry, entry.stat()) for entry in os.scandir(self._root)]
        files = [FileInfo(e.name, s.st_size, s.st_mtime, s.st_ctime) for e, s in found if e.is_file()]
        return files, [entry.name for entry, _ in found if entry.is_dir()]

    def _put_file(self, name: str, data: bytes, *, sync: bool, replace: bool) -> None:
        with open(self._full(name), "wb" if replace else "xb") as file:
            file.write(data)


class DropSink(Sink):
    part_bytes = _PART
    concurrency = _AT_ONCE

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def _put_part(self, number: int, data: memoryview) -> None:
        """Drops the part."""

    def _complete(self) -> None:
        with open(self._path, "xb") as file:
            file.truncate(self.bytes_written)

    def _abort(self) -> None:
        """Does nothing: nothing was written."""


# --- the writer process's own work, without a process -----------------------------------------------------------------


class Passes(NamedTuple):
    """The number of times that each byte of a file is read or written in memory, by the storage and the encoder."""

    read: float
    """Reads of the tensors, for all hashes and the copy together: from memory once, piece by piece."""
    copied: float
    """Writes into parts."""
    sent: float
    """Reads of parts, by the device."""


def encode(case: Case, folder: Path) -> Passes:
    """Writes ``count`` tensors of ``nbytes`` bytes each by ``threads`` threads, and counts the passes."""
    count, nbytes = case["count"], case["nbytes"]
    memory = np.ones(count * nbytes, dtype=np.uint8)
    begin = memory.ctypes.data
    sources = [TensorSource(f"t{n}", "uint8", (nbytes,), nbytes, offset=n * nbytes) for n in range(count)]
    files = [
        FileRequest(f"{first}.tensors", tuple(sources[first : first + _IN_A_FILE]))
        for first in range(0, count, _IN_A_FILE)
    ]
    seen = {"read": 0, "copied": 0, "sent": 0}

    def contents(source: TensorSource) -> memoryview:
        seen["read"] += source.nbytes
        return memory[source.offset : source.offset + source.nbytes].data

    class Counted(DropSink):
        def _put_part(self, number: int, data: memoryview) -> None:
            seen["sent"] += data.nbytes
            if not begin <= np.frombuffer(data, dtype=np.uint8).ctypes.data < begin + memory.nbytes:
                seen["copied"] += data.nbytes

    class CountedStorage(DropStorage):
        def create(self, name: str, nbytes: int, *, sync: bool) -> DropSink:
            return Counted(self._full(name))

    storage = CountedStorage(f"drop://{folder}", {}, 60.0)
    FileJob(storage, files, contents, SaveOptions(thread_count=case["threads"])).run()
    return Passes(**{name: total / max(1, seen["sent"]) for name, total in seen.items()})
