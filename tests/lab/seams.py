"""Private parts of the package that tests of several folders use."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch
import xxhash

from dcp_tensorizer import CheckpointManager
from dcp_tensorizer._formats import safetensors
from dcp_tensorizer._job.saves import Saves
from dcp_tensorizer._memory import survival
from dcp_tensorizer._memory.client import KeeperConnection
from dcp_tensorizer._memory.protocol import CopyStatus, Plain
from dcp_tensorizer._memory.runtime_directory import connect
from dcp_tensorizer._storage.base import Storage
from dcp_tensorizer._storage.local_io import Residency
from dcp_tensorizer._tensor_file.dtypes import host_bytes
from dcp_tensorizer._tensor_file.encode import encode
from dcp_tensorizer._tensor_file.encryption import Cipher
from dcp_tensorizer._tensor_file.layout import lay_out
from dcp_tensorizer._tensor_file.names import StoredItem, block_size
from dcp_tensorizer._writer_process.protocol import TensorSource

from .states import dtype_name, raw
from .waiting import wait_until_inside


def wait_held(manager: CheckpointManager) -> None:
    """Waits until the newest state is held in memory (``survive``)."""
    manager._survival.wait_held()


def wait_until_save_is_awaited() -> None:
    """Returns when a manager waits on the main thread for the save in progress."""
    wait_until_inside(threading.main_thread(), Saves.wait)


def status_of_copy(manager: CheckpointManager) -> CopyStatus:
    """The status of the last copy of this rank's states to another host."""
    keeper = manager._survival._keeper
    assert keeper is not None
    return keeper.ask(Plain.COPY_STATUS, CopyStatus)


def leave_no_memory() -> None:
    """Makes this process find no free memory for another staging buffer of ``survive``."""
    survival.available_memory = lambda: 1000


def limit_safetensors_headers(patch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Sets the size from which headers of safetensors files are refused."""
    patch.setattr(safetensors, "MAX_HEADER", nbytes)


def stored_item(length: int, *, offset: int = 0, dtype: str = "uint8", digests: bytes = b"") -> StoredItem:
    return StoredItem(f"__0_0_{'a' * 32}.tensors", "t", offset, length, dtype, "tensor", digests)


class BufferSink:
    """A sink that keeps its contents, in parts of a few bytes if a test wants many."""

    concurrency = 2

    def __init__(self, part_bytes: int = 4 << 20, *, in_order: bool = False) -> None:
        self.part_bytes = part_bytes
        self.in_order = in_order
        if in_order:
            self.concurrency = 1
        self.bytes_written = 0
        self.write_seconds = self.complete_seconds = 0.0
        self.parts: dict[int, bytes] = {}
        self.closed = self.aborted = False

    def put_part(self, number: int, data: memoryview) -> None:
        assert number not in self.parts
        assert not self.in_order or number == len(self.parts)
        self.parts[number] = bytes(data)
        self.bytes_written += data.nbytes

    def complete(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True

    @property
    def content(self) -> bytes:
        """The whole file. Every part but the last has the same size."""
        assert sorted(self.parts) == list(range(len(self.parts)))
        assert all(len(self.parts[number]) == self.part_bytes for number in range(len(self.parts) - 1))
        return b"".join(self.parts[number] for number in sorted(self.parts))


def read_range(storage: Storage, name: str, nbytes: int, offset: int = 0) -> bytes:
    """Reads a range of a file into two buffers."""
    content = bytearray(nbytes)
    view = memoryview(content)
    reader = storage.open(name)
    reader.read_into([view[: nbytes // 3], view[nbytes // 3 :]], offset)
    reader.close()
    return bytes(content)


def sources(tensors: Iterable[tuple[str, torch.Tensor]], kind: str = "tensor") -> tuple[TensorSource, ...]:
    """The tensors of a request."""
    return tuple(TensorSource(n, dtype_name(t.dtype), tuple(t.shape), t.nbytes, kind) for n, t in tensors)


def encrypted_file(
    tensors: Mapping[str, torch.Tensor], cipher: Cipher, threads: int = 1, part_bytes: int = 1 << 20, **options: bool
) -> tuple[bytes, dict[str, StoredItem]]:
    """An encrypted file ``f``, and its items by name; ``options`` are those of a `BufferSink`."""
    sink = BufferSink(part_bytes, **options)
    layout = lay_out(sources(tensors.items()), cipher)
    items = encode(layout, lambda source: host_bytes(tensors[source.name]), sink, threads, file="f")
    assert len(sink.content) == layout.nbytes
    return sink.content, {item.name: item for item in items}


def block_digests(tensor: torch.Tensor) -> bytes:
    """XXH3-64 of each block of a tensor's bytes. If there are several, that of all bytes follows."""
    data = raw(tensor)
    step = block_size(len(data))
    blocks = [xxhash.xxh3_64_digest(data[start : start + step]) for start in range(0, len(data), step)]
    return b"".join(blocks + ([xxhash.xxh3_64_digest(data)] if len(blocks) > 1 else []))


def cached(path: Path, offset: int) -> bool:
    """Returns whether the page cache holds a byte of a file now."""
    with open(path, "rb") as file:
        residency = Residency(file.fileno())
        is_cached = residency.holds_page(offset)
        residency.close()
    return is_cached


def wait_until_digested(folder: Path) -> None:
    """Waits until orphaned keepers have the digests of all their states: damage before that would not be detected."""
    for path in folder.iterdir():
        connection = connect(path)
        assert connection is not None
        keeper = KeeperConnection(connection)
        keeper.wait_listed(60.0)
        for head in keeper.found.heads:
            _, memory = keeper.part(head.id, head.rank)
            memory.close()
        keeper.close()
