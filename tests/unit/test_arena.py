"""The shared buffer: sizes, places, sharing with other processes, and what is left of it afterwards."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dcp_tensorizer import StagingError
from dcp_tensorizer._memory import memory_limit
from dcp_tensorizer._memory.shared_buffer import SharedBuffer, aligned
from dcp_tensorizer._memory.shared_mappings import attach

from .simulated import SimulatedDevice
from .support import ALL_DTYPES, dtype_name, filled, memory_files, open_descriptors, raw, run_python, same

PAGE = 4096


@pytest.mark.parametrize(("asked", "given"), [(0, PAGE), (1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE)])
def test_capacity_is_whole_pages_and_allocated(asked: int, given: int) -> None:
    """What is asked for, rounded up, with its memory there from the start."""
    buffer = SharedBuffer(asked)
    assert buffer.nbytes == given
    status = os.fstat(buffer.fd)
    assert (status.st_size, status.st_blocks * 512) == (given, given)
    assert buffer.fits(given)
    assert not buffer.fits(given + 1)
    buffer.close()


@pytest.mark.parametrize(("nbytes", "space"), [(0, 0), (1, 64), (63, 64), (64, 64), (65, 128)])
def test_tensors_take_whole_cache_lines(nbytes: int, space: int) -> None:
    """The space of a tensor is a multiple of 64 bytes."""
    assert aligned(nbytes) == space


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
def test_tensors_of_every_dtype_have_places_of_their_own(dtype: torch.dtype) -> None:
    """Aligned to 64 bytes, one behind the other, each with a storage of exactly its size."""
    buffer = SharedBuffer(PAGE)
    tensors = [buffer.allocate(dtype, shape) for shape in ((3,), (2, 5), (), (1, 1, 7))]
    assert [(t.dtype, tuple(t.shape)) for t in tensors] == [(dtype, shape) for shape in ((3,), (2, 5), (), (1, 1, 7))]
    assert [t.untyped_storage().nbytes() for t in tensors] == [n * dtype.itemsize for n in (3, 10, 1, 7)]
    offsets = [buffer.locate(t) for t in tensors]
    expected, position = [], 0
    for tensor in tensors:
        expected.append(position)
        position += aligned(tensor.nbytes)
    assert offsets == expected
    contents = [filled(dtype, tuple(t.shape), seed=n) for n, t in enumerate(tensors)]
    for tensor, content in zip(tensors, contents, strict=True):
        tensor.reshape(-1).view(torch.uint8).copy_(content.reshape(-1).view(torch.uint8))
    assert all(same(t, c) for t, c in zip(tensors, contents, strict=True))
    buffer.close()


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
def test_tensors_without_elements_take_no_space(dtype: torch.dtype) -> None:
    """They are ordinary empty tensors, in no buffer."""
    buffer = SharedBuffer(PAGE)
    tensor = buffer.allocate(dtype, (3, 0))
    assert (tensor.dtype, tuple(tensor.shape)) == (dtype, (3, 0))
    assert buffer.locate(tensor) is None
    assert buffer.locate(buffer.allocate(torch.uint8, (1,))) == 0
    buffer.close()


def test_only_tensors_inside_and_in_c_order_are_located() -> None:
    """Views of buffer tensors are found at their own offset; what is elsewhere, strided or lazily changed is not."""
    buffer, other = SharedBuffer(PAGE), SharedBuffer(PAGE)
    tensor = buffer.allocate(torch.complex64, (4, 4)).fill_(1j)
    assert buffer.locate(tensor) == 0
    assert buffer.locate(tensor[1]) == 32
    assert buffer.locate(tensor[2:]) == 64
    assert buffer.locate(tensor.view(torch.uint8)) == 0
    assert buffer.locate(tensor.t()) is None
    assert buffer.locate(tensor[:, 1]) is None
    assert buffer.locate(torch.ones(3)) is None
    assert buffer.locate(other.allocate(torch.uint8, (3,))) is None
    assert buffer.locate(torch.view_as_real(tensor)) == 0
    assert buffer.locate(tensor.conj()) is None
    assert buffer.locate(torch._neg_view(tensor)) is None
    buffer.close()
    other.close()


def test_a_full_arena_is_an_error_that_says_its_size() -> None:
    """More than was planned for does not go in, and does not overwrite anything."""
    buffer = SharedBuffer(PAGE)
    first = buffer.allocate(torch.uint8, (PAGE - 64,)).fill_(7)
    with pytest.raises(StagingError, match="4,096 bytes is full"):
        buffer.allocate(torch.uint8, (65,))
    assert int(first.min()) == 7
    buffer.close()


def test_an_arena_is_filled_from_the_start_again() -> None:
    """After a reset, the same memory is handed out once more."""
    buffer = SharedBuffer(PAGE)
    buffer.allocate(torch.float32, (100,))
    buffer.reset()
    assert buffer.locate(buffer.allocate(torch.float32, (100,))) == 0
    buffer.close()


def test_in_use_as_long_as_a_tensor_or_a_view_of_one_is_left() -> None:
    """Views count; tensors without elements, which are elsewhere, do not."""
    buffer = SharedBuffer(PAGE)
    assert not buffer.in_use
    tensor, empty = buffer.allocate(torch.float32, (10,)), buffer.allocate(torch.float32, (0,))
    assert buffer.in_use
    view = tensor[2:5].view(torch.uint8)
    del tensor
    assert buffer.in_use
    del view
    assert not buffer.in_use
    del empty
    buffer.close()
    assert not buffer.in_use


def test_closing_gives_memory_and_descriptors_back() -> None:
    """At once where no tensor is left, and twice is as good as once."""
    descriptors, files = open_descriptors(), memory_files()
    buffer = SharedBuffer(10 * PAGE)
    assert len(memory_files()) == len(files) + 1
    buffer.close()
    buffer.close()
    assert memory_files() == files
    assert open_descriptors() == descriptors


def test_a_tensor_outlives_the_arena_it_is_in() -> None:
    """Its memory stays valid until it is gone too."""
    files = memory_files()
    buffer = SharedBuffer(PAGE)
    tensor = buffer.allocate(torch.int64, (3,)).fill_(5)
    buffer.close()
    assert tensor.tolist() == [5, 5, 5]
    assert len(memory_files()) == len(files) + 1
    del tensor
    assert memory_files() == files


def test_a_forgotten_arena_is_given_back() -> None:
    """One that nobody closed goes with its last reference."""
    gc.collect()
    descriptors, files = open_descriptors(), memory_files()
    buffer = SharedBuffer(PAGE)
    del buffer
    gc.collect()
    assert (open_descriptors(), memory_files()) == (descriptors, files)


def test_ids_are_never_used_again() -> None:
    """The writer process tells buffers apart by them."""
    buffers = [SharedBuffer(PAGE) for _ in range(3)]
    ids = [buffer.id for buffer in buffers]
    for buffer in buffers:
        buffer.close()
    last = SharedBuffer(PAGE)
    last.close()
    assert len({*ids, last.id}) == 4


# --- sharing ---------------------------------------------------------------------------------------------------------


def test_an_attached_arena_shows_what_is_written_to_it() -> None:
    """Another mapping of the same descriptor has the same bytes, cannot be written to, and outlives the original."""
    descriptors = open_descriptors()
    buffer = SharedBuffer(2 * PAGE)
    tensor = buffer.allocate(torch.float32, (1000,))
    mapping = attach(os.dup(buffer.fd), buffer.nbytes)
    tensor.copy_(filled(torch.float32, (1000,)))
    assert mapping[:4000] == raw(tensor)
    with pytest.raises(TypeError):
        mapping[0] = 1
    buffer.close()
    assert mapping[:4000] == raw(tensor)
    del tensor
    mapping.close()
    assert open_descriptors() == descriptors


def test_attaching_to_what_is_too_short_closes_the_descriptor(tmp_path: Path) -> None:
    """An error leaves no descriptor behind."""
    descriptors = open_descriptors()
    fd = os.open(tmp_path / "short", os.O_RDWR | os.O_CREAT)
    with pytest.raises(ValueError, match="greater than file size"):
        attach(fd, PAGE)
    assert open_descriptors() == descriptors


def test_another_process_sees_the_bytes() -> None:
    """A process that is given the descriptor maps the same memory."""
    buffer = SharedBuffer(PAGE)
    given = os.dup(buffer.fd)
    buffer.allocate(torch.uint8, (26,)).copy_(torch.arange(97, 123))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # the child only makes system calls, for other threads of this process may hold locks
        mapping = attach(given, PAGE)
        os.write(write, mapping[:26])
        os._exit(0)
    os.close(write)
    os.close(given)
    seen = os.read(read, 100)
    os.close(read)
    assert os.waitpid(child, 0)[1] == 0
    assert seen == b"abcdefghijklmnopqrstuvwxyz"
    buffer.close()


FORK = """
import gc, mmap, os, signal, sys
import torch
from dcp_tensorizer._memory.shared_buffer import SharedBuffer

buffer = SharedBuffer(1 << 20)
tensor = buffer.allocate(torch.uint8, (1000,)).fill_(42)
address = tensor.data_ptr()

def mapped():
    for line in open("/proc/self/maps"):
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return "memfd:dcp_tensorizer" in line
    return False

assert mapped()
child = os.fork()
if child == 0:
    # The pages are not there; whatever the child puts at their address is its own, and stays when the buffer goes.
    assert not mapped()
    # Nor does it keep the memory when the trainer has given it back.
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    assert not [link for link in links if os.path.lexists(link) and "dcp_tensorizer" in os.readlink(link)]
    libc_flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    page = address & ~4095
    MAP_FIXED_NOREPLACE = 0x100000
    got = libc.mmap(page, 4096, 3, libc_flags | MAP_FIXED_NOREPLACE, -1, 0)
    assert got == page, (got, page)
    ctypes.memset(page, 7, 4096)
    del tensor
    buffer.close()
    del buffer
    gc.collect()
    assert ctypes.string_at(page, 4096) == bytes([7]) * 4096
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert tensor.tolist() == [42] * 1000
tensor.fill_(43)
assert os.pread(buffer.fd, 4, 0) == bytes([43]) * 4
del tensor
buffer.close()
assert not mapped()

buffer = SharedBuffer(1 << 20)
child = os.fork()
if child == 0:
    sys.exit(0)  # runs the interpreter's finalizers, the buffer's among them
assert os.waitpid(child, 0)[1] == 0
assert buffer.allocate(torch.uint8, (3,)).fill_(1).tolist() == [1, 1, 1]
os.fstat(buffer.fd)
print("fine")
"""


def test_a_forked_child_neither_has_the_pages_nor_tears_the_arena_down() -> None:
    """DataLoader workers cost no memory, and their end changes nothing for the trainer."""
    assert run_python(FORK).stdout == "fine\n"


# --- memory that is short --------------------------------------------------------------------------------------------


def test_a_shortage_is_known_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has both numbers and what to do, and no memory file was made."""
    files = memory_files()
    monkeypatch.setattr(memory_limit, "_available_memory", lambda: 10_000)
    with pytest.raises(StagingError, match=r"needs 12,288 bytes and 10,000 bytes.*free memory.*more ranks"):
        SharedBuffer(10_001)
    assert memory_files() == files
    buffer = SharedBuffer(2 * PAGE)
    buffer.close()


def test_where_nothing_is_known_of_memory_it_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is no bound."""
    monkeypatch.setattr(memory_limit, "_available_memory", lambda: None)
    buffer = SharedBuffer(PAGE)
    assert buffer.fits(PAGE)
    buffer.close()


def test_a_failing_allocation_is_an_error_and_leaves_nothing() -> None:
    """Where the kernel refuses, the message has its reason."""
    descriptors, files = open_descriptors(), memory_files()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(StagingError, match=r"no 2,097,152 bytes of memory.*File too large"):
            SharedBuffer(2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (open_descriptors(), memory_files()) == (descriptors, files)


def test_this_machine_has_a_bound() -> None:
    """What the kernel says of its memory is understood."""
    available = memory_limit._available_memory()
    assert available is not None
    assert PAGE < available <= os.sysconf("SC_PHYS_PAGES") * PAGE


def cgroup(folder: Path, limit: str, used: int = 0, active: int = 0, inactive: int = 0, *, v1: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(f"{limit}\n")
    (folder / ("memory.usage_in_bytes" if v1 else "memory.current")).write_text(f"{used}\n")
    total = "total_" if v1 else ""
    stat = f"anon 5\nfile 6\n{total}inactive_file {inactive}\n{total}active_file {active}\n"
    (folder / "memory.stat").write_text(stat)


V1 = "9:cpu,cpuacct:/elsewhere\n5:memory:/job/rank:0\n0::/unified\n"
V2 = "0::/job/rank:0\n"


@pytest.mark.parametrize(("version", "top"), [(V2, ""), (V1, "memory")])
def test_the_tightest_cgroup_bounds(tmp_path: Path, version: str, top: str) -> None:
    """Its own limit or an ancestor's, of either version; page cache can be reclaimed and counts as room."""
    membership = tmp_path / "membership"
    membership.write_text(version)
    root, v1 = tmp_path / "cgroup", version == V1
    own = root / top / "job" / "rank:0"
    assert memory_limit._cgroup_headroom(membership, root) is None
    cgroup(own.parent, str(1 << 40) if v1 else "max", v1=v1)
    assert memory_limit._cgroup_headroom(membership, root) == (1 << 40 if v1 else None)
    cgroup(own, "9000", used=3000, active=100, inactive=20, v1=v1)
    assert memory_limit._cgroup_headroom(membership, root) == 6120
    cgroup(root / top, "4000", used=3500, v1=v1)
    assert memory_limit._cgroup_headroom(membership, root) == 500
    cgroup(root / top, "1000", used=5000, v1=v1)
    assert memory_limit._cgroup_headroom(membership, root) == 0


@pytest.mark.parametrize("content", ["", "much", "12x"])
def test_a_cgroup_that_cannot_be_read_is_no_bound(tmp_path: Path, content: str) -> None:
    """Files that are missing, or say what nobody expects, are passed over."""
    assert memory_limit._cgroup_headroom(tmp_path / "missing", tmp_path) is None
    membership = tmp_path / "membership"
    membership.write_text(V2)
    own = tmp_path / "job" / "rank:0"
    cgroup(own, "1000")
    (own / "memory.current").write_text(content)
    assert memory_limit._cgroup_headroom(membership, tmp_path) is None


def test_an_arena_is_registered_once_and_at_its_exact_size() -> None:
    """All of it, at the address where it is mapped; undone while it is still mapped."""
    device = SimulatedDevice()
    buffer = SharedBuffer(PAGE + 1)
    tensor = buffer.allocate(torch.uint8, (3,))
    buffer.pin(device, 0)
    buffer.pin(device, 0)
    assert device.pinned == [(tensor.data_ptr(), 2 * PAGE)]
    buffer.close()
    assert device.pinned == []
    assert tensor.fill_(1).tolist() == [1, 1, 1]  # still mapped, when it was unregistered


def test_a_dropped_arena_is_unregistered() -> None:
    """Nobody needs to close it."""
    device = SimulatedDevice()
    buffer = SharedBuffer(PAGE)
    buffer.pin(device, 0)
    del buffer
    gc.collect()
    assert device.pinned == []


class Refusing(SimulatedDevice):
    """Memory cannot be registered."""

    def pin(self, address: int, nbytes: int, index: int) -> Callable[[], None]:
        raise StagingError("raise the limit of locked memory")


def test_an_arena_that_cannot_be_registered_is_pageable() -> None:
    """One warning, with the device's advice, and memory that works."""
    device = Refusing()
    buffer = SharedBuffer(PAGE)
    with pytest.warns(RuntimeWarning, match="raise the limit of locked memory"):
        buffer.pin(device, 0)
    buffer.pin(device, 0)  # warnings are errors here
    assert buffer.allocate(torch.uint8, (3,)).fill_(1).tolist() == [1, 1, 1]
    buffer.close()
