"""Shared memory is located, mapped by other processes, and distinguished from other memory."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest
import torch

from dcp_tensorizer import WriteError
from dcp_tensorizer._staging import shared_mappings
from dcp_tensorizer._staging.shared_mappings import MappedFile, SharedMappings, SharedTensors, map_shared
from dcp_tensorizer._staging.shared_memory import SharedBuffer

from ...lab.states import raw


def seen(tensor: torch.Tensor) -> bytes:
    """Returns the bytes of a tensor as another mapping of its file shows them."""
    place = SharedMappings().locate(tensor)
    assert place is not None
    file, offset = place
    mapping = map_shared(file)
    content = mapping[offset : offset + tensor.nbytes]
    mapping.close()
    return content


def test_memory_that_torch_shares_is_located() -> None:
    """Another mapping shows the current values. The tensor stays at its address."""
    tensor = torch.arange(10_000).share_memory_()
    address = tensor.data_ptr()
    assert seen(tensor) == raw(tensor)
    tensor.fill_(7)
    assert seen(tensor) == raw(tensor)
    assert tensor.data_ptr() == address


def test_views_are_found_at_their_offset() -> None:
    """A view is a part of a larger storage, as flat parameters are."""
    tensor = torch.arange(10_000).share_memory_()
    for view in (tensor[3000:3010], tensor.view(100, 100)[7], tensor[9999:]):
        assert seen(view) == raw(view)


def test_other_shared_memory_is_located(tmp_path: Path) -> None:
    """The memory may be a mapped file, or a memory file without a name."""
    (tmp_path / "weights").write_bytes(bytes(range(200)))
    assert seen(torch.from_file(str(tmp_path / "weights"), shared=True, size=200, dtype=torch.uint8)) == bytes(
        range(200)
    )
    buffer = SharedBuffer(4096)
    assert seen(buffer.allocate(torch.uint8, (10,)).fill_(3)) == b"\3" * 10
    buffer.close()


def test_a_file_of_another_name_with_the_same_inode_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unnamed memory files and /dev/shm number their inodes independently."""
    buffer = SharedBuffer(4096)
    tensor = buffer.allocate(torch.uint8, (10,))
    true = shared_mappings._shared_mappings()
    monkeypatch.setattr(
        shared_mappings, "_shared_mappings", lambda: [m._replace(path="/dev/shm/x (deleted)") for m in true]
    )
    assert SharedMappings().locate(tensor) is None
    monkeypatch.setattr(shared_mappings, "_shared_mappings", lambda: true)
    assert SharedMappings().locate(tensor) is not None
    del tensor
    buffer.close()


def test_a_mapping_of_a_part_of_a_file_is_located(tmp_path: Path) -> None:
    """Offsets count from the start of the file."""
    page = mmap.PAGESIZE
    (tmp_path / "f").write_bytes(b"a" * page + b"b" * page)
    with (tmp_path / "f").open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), page, offset=page)
    tensor = torch.frombuffer(mapping, dtype=torch.uint8)[10:20]
    place = SharedMappings().locate(tensor)
    assert place is not None
    assert (place[0].path, place[1]) == (str(tmp_path / "f"), page + 10)
    assert seen(tensor) == b"b" * 10


def test_private_and_anonymous_memory_is_not_located() -> None:
    """Ordinary tensors, and anonymous shared memory, have no file that another process could map."""
    anonymous = mmap.mmap(-1, 4096)
    mappings = SharedMappings()
    assert mappings.locate(torch.arange(3)) is None
    assert mappings.locate(torch.frombuffer(anonymous, dtype=torch.uint8)) is None


def test_memory_without_the_values_in_order_is_not_located() -> None:
    """Transposed, strided, lazily conjugated and empty tensors are not located."""
    tensor = torch.arange(100.0).view(10, 10).share_memory_()
    complex_ = torch.zeros(4, dtype=torch.complex64).share_memory_()
    mappings = SharedMappings()
    assert mappings.locate(tensor) is not None
    assert [
        mappings.locate(t) for t in (tensor.t(), tensor[:, 3], tensor[:0], complex_.conj(), complex_.conj().imag)
    ] == [None] * 5


def test_a_file_that_is_gone_or_another_is_an_error(tmp_path: Path) -> None:
    """`map_shared` raises `WriteError` with advice if the path is missing, names another file, or is empty."""
    path = tmp_path / "f"
    path.write_bytes(b"a" * 100)
    status = os.stat(path)
    map_shared(MappedFile(str(path), status.st_dev, status.st_ino)).close()
    with pytest.raises(WriteError, match=r"the path now refers to another file.*staging='buffer'"):
        map_shared(MappedFile(str(path), status.st_dev, status.st_ino + 1))
    path.write_bytes(b"")
    with pytest.raises(WriteError, match="cannot mmap an empty file"):
        map_shared(MappedFile(str(path), status.st_dev, status.st_ino))
    with pytest.raises(WriteError, match="Keep references to the tensors"):
        map_shared(MappedFile(str(tmp_path / "missing"), status.st_dev, status.st_ino))


def other_memory_at(mapping: mmap.mmap) -> None:
    """Puts anonymous memory where a file was mapped, as the kernel does when it reuses an unmapped range."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    map_fixed = 0x10
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | map_fixed
    assert libc.mmap(address, len(mapping), mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address


def test_a_later_tensor_at_the_addresses_of_an_unmapped_file_is_not_located(tmp_path: Path) -> None:
    """`SharedTensors` locates only its own tensors, which hold their mappings alive."""
    (tmp_path / "dataset").write_bytes(b"x" * mmap.PAGESIZE)
    with (tmp_path / "dataset").open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    saved = torch.arange(1000).share_memory_()
    mappings = SharedMappings()
    shared = SharedTensors(mappings, [saved])
    other_memory_at(mapping)
    made = torch.frombuffer(mapping, dtype=torch.uint8)
    assert made.tolist() == [0] * mmap.PAGESIZE
    assert mappings.locate(made) is not None
    assert shared.locate(made) is None
    assert shared.locate(saved) == mappings.locate(saved)


def test_parts_of_shared_tensors_are_located() -> None:
    """Parts may overlap several tensors. Ranges beyond the tensors, and meta tensors, are not located."""
    tensor = torch.arange(100).share_memory_()
    mappings = SharedMappings()
    shared = SharedTensors(mappings, [tensor[50:60], tensor[20:60], tensor[30:40], tensor[80:90]])
    for part in (tensor[20:60], tensor[50:60], tensor[35:45], tensor[59:60], tensor[80:81]):
        assert shared.locate(part) == mappings.locate(part) is not None
    for part in (tensor[19:21], tensor[55:61], tensor[60:80], tensor[85:91], tensor[20:20], tensor.to("meta")):
        assert shared.locate(part) is None
