"""The staging buffer: sizes, tensors, other processes, and what remains afterwards."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dcp_tensorizer import StagingError
from dcp_tensorizer._runtime import memory_limit
from dcp_tensorizer._staging import shared_memory
from dcp_tensorizer._staging.shared_memory import SharedBuffer, aligned

from ...lab.processes import memory_files, open_descriptors
from ...lab.simulated import SimulatedDevice
from ...lab.states import ALL_DTYPES, dtype_name, filled, raw, same

PAGE = 4096


@pytest.mark.parametrize(("asked", "given"), [(0, PAGE), (1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE)])
def test_capacity_is_whole_pages_and_allocated(asked: int, given: int) -> None:
    """The size is rounded up to pages, and all of it is allocated."""
    buffer = SharedBuffer(asked)
    assert buffer.nbytes == given
    status = os.fstat(buffer.fd)
    assert (status.st_size, status.st_blocks * 512) == (given, given)
    assert buffer.fits(given)
    assert not buffer.fits(given + 1)
    buffer.close()


@pytest.mark.parametrize(("nbytes", "space"), [(0, 0), (1, 64), (63, 64), (64, 64), (65, 128)])
def test_tensors_take_whole_cache_lines(nbytes: int, space: int) -> None:
    """`aligned` rounds up to 64 bytes."""
    assert aligned(nbytes) == space


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
def test_tensors_of_every_dtype_have_separate_storages(dtype: torch.dtype) -> None:
    """Tensors are aligned to 64 bytes and adjacent. Each storage has exactly the tensor's size."""
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
    """They are ordinary empty tensors outside the buffer."""
    buffer = SharedBuffer(PAGE)
    tensor = buffer.allocate(dtype, (3, 0))
    assert (tensor.dtype, tuple(tensor.shape)) == (dtype, (3, 0))
    assert buffer.locate(tensor) is None
    assert buffer.locate(buffer.allocate(torch.uint8, (1,))) == 0
    buffer.close()


def test_only_tensors_inside_and_in_c_order_are_located() -> None:
    """Views are located at their own offset. Strided, lazily changed and foreign tensors are not located."""
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


def test_a_full_buffer_is_an_error_with_its_size() -> None:
    """A tensor that does not fit raises `StagingError`, and overwrites nothing."""
    buffer = SharedBuffer(PAGE)
    first = buffer.allocate(torch.uint8, (PAGE - 64,)).fill_(7)
    with pytest.raises(StagingError, match="4,096 bytes is full"):
        buffer.allocate(torch.uint8, (65,))
    assert int(first.min()) == 7
    buffer.close()


def test_a_buffer_is_filled_from_the_start_again() -> None:
    """After `reset`, the first tensor has the first address again."""
    buffer = SharedBuffer(PAGE)
    buffer.allocate(torch.float32, (100,))
    buffer.reset()
    assert buffer.locate(buffer.allocate(torch.float32, (100,))) == 0
    buffer.close()


def test_in_use_as_long_as_a_tensor_or_a_view_of_one_is_left() -> None:
    """Views count as tensors. Tensors without elements do not count."""
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


def layout() -> tuple[list[torch.dtype], list[torch.Size]]:
    """The dtypes and shapes of some tensors."""
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]
    return dtypes, [torch.Size(shape) for shape in ((2, 5), (), (3, 0), (7,))]


def test_tensors_of_the_same_layout_are_aliases_of_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the same addresses, but operations on one do not show in the next."""
    buffer = SharedBuffer(PAGE)
    first = buffer.allocate_all(*layout())
    assert [(t.dtype, t.shape) for t in first] == list(zip(*layout(), strict=True))
    assert [t.untyped_storage().nbytes() for t in first] == [40, 2, 0, 7]
    assert [buffer.locate(t) for t in first] == [0, 64, None, 128]
    first[0].fill_(3.0).requires_grad_().data = torch.zeros(1)
    buffer.reset()
    with monkeypatch.context() as patch:
        patch.setattr(SharedBuffer, "allocate", None)
        second = buffer.allocate_all(*layout())
    assert [(t.dtype, t.shape, t.requires_grad) for t in second] == [(*of, False) for of in zip(*layout(), strict=True)]
    assert [buffer.locate(t) for t in second] == [0, 64, None, 128]
    assert second[0].tolist() == [[3.0] * 5] * 2
    del first, second
    buffer.close()


@pytest.mark.parametrize("number", range(4))
def test_tensors_of_another_layout_are_made_anew(number: int) -> None:
    """Another dtype, another shape, or another number of tensors."""
    buffer = SharedBuffer(PAGE)
    buffer.allocate_all(*layout())
    dtypes, shapes = layout()
    match number:
        case 0:
            dtypes[0] = torch.int32
        case 1:
            shapes[0] = torch.Size((5, 2))
        case 2:
            del dtypes[-1], shapes[-1]
        case _:
            dtypes.append(torch.uint8)
            shapes.append(torch.Size((1,)))
    buffer.reset()
    made = buffer.allocate_all(dtypes, shapes)
    assert [(t.dtype, t.shape) for t in made] == list(zip(dtypes, shapes, strict=True))
    assert [buffer.locate(t) for t in made if t.numel()] == [64 * n for n in range(len(made) - (len(made) > 2))]
    del made
    buffer.close()


def test_a_tensor_whose_storage_was_moved_is_made_anew() -> None:
    """torch.multiprocessing moves the storages that it pickles."""
    buffer = SharedBuffer(PAGE)
    buffer.allocate_all(*layout())[0].share_memory_()
    buffer.reset()
    assert [buffer.locate(t) for t in buffer.allocate_all(*layout())] == [0, 64, None, 128]
    buffer.close()


def test_retained_tensors_are_not_in_use() -> None:
    """Only tensors with other references are. `close` frees the memory in spite of retained tensors."""
    files = memory_files()
    buffer = SharedBuffer(PAGE)
    tensors = buffer.allocate_all(*layout())
    assert buffer.in_use
    view = tensors[0][1]
    del tensors
    assert buffer.in_use
    del view
    assert not buffer.in_use
    buffer.reset()
    del buffer.allocate_all(*layout())[:]
    buffer.close()
    assert memory_files() == files


def test_closing_frees_memory_and_descriptors() -> None:
    """Without tensors `close` frees them at once. It is idempotent."""
    descriptors, files = open_descriptors(), memory_files()
    buffer = SharedBuffer(10 * PAGE)
    assert len(memory_files()) == len(files) + 1
    buffer.close()
    buffer.close()
    assert memory_files() == files
    assert open_descriptors() == descriptors


def test_a_tensor_outlives_the_buffer_it_is_in() -> None:
    """The memory is valid until the last tensor is freed."""
    files = memory_files()
    buffer = SharedBuffer(PAGE)
    tensor = buffer.allocate(torch.int64, (3,)).fill_(5)
    buffer.close()
    assert tensor.tolist() == [5, 5, 5]
    assert len(memory_files()) == len(files) + 1
    del tensor
    assert memory_files() == files


def test_a_dropped_buffer_is_freed() -> None:
    """A buffer without references is freed without `close`."""
    gc.collect()
    descriptors, files = open_descriptors(), memory_files()
    buffer = SharedBuffer(PAGE)
    del buffer
    gc.collect()
    assert (open_descriptors(), memory_files()) == (descriptors, files)


def test_ids_are_never_used_again() -> None:
    """The writer process distinguishes buffers by their ids."""
    buffers = [SharedBuffer(PAGE) for _ in range(3)]
    ids = [buffer.id for buffer in buffers]
    for buffer in buffers:
        buffer.close()
    last = SharedBuffer(PAGE)
    last.close()
    assert len({*ids, last.id}) == 4


# --- sharing ---------------------------------------------------------------------------------------------------------


def test_a_second_mapping_shows_the_contents() -> None:
    """It is read-only and outlives the buffer."""
    descriptors = open_descriptors()
    buffer = SharedBuffer(2 * PAGE)
    tensor = buffer.allocate(torch.float32, (1000,))
    mapping = mmap.mmap(buffer.fd, buffer.nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
    tensor.copy_(filled(torch.float32, (1000,)))
    assert mapping[:4000] == raw(tensor)
    with pytest.raises(TypeError):
        mapping[0] = 1
    buffer.close()
    assert mapping[:4000] == raw(tensor)
    del tensor
    mapping.close()
    assert open_descriptors() == descriptors


def test_another_process_sees_the_bytes() -> None:
    """A process that inherits the descriptor maps the same memory."""
    buffer = SharedBuffer(PAGE)
    given = os.dup(buffer.fd)
    buffer.allocate(torch.uint8, (26,)).copy_(torch.arange(97, 123))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # the child only makes system calls, for other threads of this process may hold locks
        mapping = mmap.mmap(given, PAGE, mmap.MAP_SHARED, mmap.PROT_READ)
        os.write(write, mapping[:26])
        os._exit(0)
    os.close(write)
    os.close(given)
    seen = os.read(read, 100)
    os.close(read)
    assert os.waitpid(child, 0)[1] == 0
    assert seen == b"abcdefghijklmnopqrstuvwxyz"
    buffer.close()


@pytest.mark.parametrize(
    ("common", "of_size", "has_them"),
    [
        (None, None, False),
        ("always", None, True),
        ("within_size", None, True),
        ("advise", None, True),
        ("force", "never", True),
        ("never", None, False),
        ("deny", "always", False),
        ("never", "advise", True),
        ("never", "within_size", True),
        ("never", "always", True),
        ("advise", "inherit", True),
        ("advise", "never", False),
        ("never", "inherit", False),
    ],
)
def test_huge_pages_where_the_system_has_them(
    common: str | None, of_size: str | None, has_them: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each setting of the system is respected. All of the buffer is allocated either way."""
    advices: list[int] = []
    advise = shared_memory.advise

    def noted(address: int, nbytes: int, advice: int) -> None:
        advices.append(advice)
        advise(address, nbytes, advice)

    monkeypatch.setattr(shared_memory, "cores", lambda: 1)
    monkeypatch.setattr(shared_memory, "_HUGE_PAGES", tmp_path)
    monkeypatch.setattr(shared_memory, "advise", noted)
    monkeypatch.setattr(shared_memory, "_STEP", 1 << 20)
    for folder, word in (("", common), ("hugepages-2048kB", of_size)):
        if word is not None:
            words = ["always", "inherit", "within_size", "advise", "never", "deny", "force"]
            (tmp_path / folder).mkdir(exist_ok=True)
            text = " ".join(f"[{one}]" if one == word else one for one in words)
            (tmp_path / folder / "shmem_enabled").write_text(f"{text}\n")
    buffer = SharedBuffer((4 << 20) + 1)
    try:
        status = os.fstat(buffer.fd)
        assert status.st_size == buffer.nbytes == (4 << 20) + 4096
        assert status.st_blocks * 512 >= buffer.nbytes
        assert advices == [14] * has_them + [23] * 5
        buffer.allocate(torch.uint8, (buffer.nbytes,)).fill_(7)
        assert os.pread(buffer.fd, 1, buffer.nbytes - 1) == b"\7"
    finally:
        buffer.close()


@pytest.mark.parametrize("threads", ["are there", "are short"])
def test_several_threads_make_the_pages(threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread gets a share of whole huge pages. Shares without a thread are allocated in another way."""
    made: list[tuple[int, int]] = []
    advise = shared_memory.advise

    def noted(address: int, nbytes: int, advice: int) -> None:
        made.append((address, nbytes))
        advise(address, nbytes, advice)

    def short(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(shared_memory, "advise", noted)
    monkeypatch.setattr(shared_memory, "_STEP", 12 << 20)
    monkeypatch.setattr(shared_memory, "cores", lambda: 3)
    if threads == "are short":
        monkeypatch.setattr(shared_memory, "in_threads", short)
    buffer = SharedBuffer(17 << 20)
    try:
        assert os.fstat(buffer.fd).st_blocks * 512 >= buffer.nbytes
        shares = [(0, 4), (4, 4), (8, 4), (12, 2), (14, 2), (16, 1)]
        base = buffer.allocate(torch.uint8, (buffer.nbytes,)).data_ptr()
        expected = [(base + (start << 20), length << 20) for start, length in shares]
        assert sorted(made) == ([] if threads == "are short" else expected)
    finally:
        buffer.close()


# --- memory that is short --------------------------------------------------------------------------------------------


def test_a_shortage_is_known_before_anything_is_allocated() -> None:
    """The error has the needed bytes, and no memory file is made."""
    files = memory_files()
    with pytest.raises(StagingError, match=r"needs 1,125,899,906,842,624 bytes, but only [\d,]+ bytes"):
        SharedBuffer(1 << 50)
    assert memory_files() == files


def test_memory_that_other_ranks_take_is_noticed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """If other ranks allocate concurrently, the error comes before the kernel kills a rank, and all memory is freed."""
    monkeypatch.setattr(shared_memory, "_STEP", 1 << 20)
    left = iter(range(10 << 20, 0, -2 << 20))  # this one takes half of what goes
    monkeypatch.setattr(memory_limit, "available_memory", lambda: next(left))
    before = memory_files(), open_descriptors()
    words = r"needs 8,388,608 bytes, of which 1,048,576 are allocated, but only 6,291,456 bytes"
    with pytest.raises(StagingError, match=words):
        SharedBuffer(8 << 20)
    assert (memory_files(), open_descriptors()) == before


def test_a_failing_allocation_is_an_error_and_leaves_nothing() -> None:
    """The error has the kernel's reason: a file size limit is not a shortage of memory."""
    descriptors, files = open_descriptors(), memory_files()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(
            StagingError,
            match=r"cannot allocate 2,097,152 bytes .*File too large.*Raise the file size limit",
        ):
            SharedBuffer(2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (open_descriptors(), memory_files()) == (descriptors, files)


def test_a_system_that_refuses_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a sandbox, the error names the call to allow."""

    def refuse(*arguments: object) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(StagingError, match=r"Operation not permitted: .*refuses memfd_create.*seccomp"):
        SharedBuffer(4096)


# --- memory that is registered for a device -------------------------------------------------------------------------


def test_a_buffer_is_registered_once_and_at_its_exact_size() -> None:
    """The whole mapping is registered, and unregistered before it is unmapped."""
    device = SimulatedDevice()
    buffer = SharedBuffer(PAGE + 1)
    tensor = buffer.allocate(torch.uint8, (3,))
    buffer.pin(device, 0)
    buffer.pin(device, 0)
    assert device.pinned == [(tensor.data_ptr(), 2 * PAGE)]
    buffer.close()
    assert device.pinned == []
    assert tensor.fill_(1).tolist() == [1, 1, 1]  # still mapped, when it was unregistered


def test_parts_are_registered_while_others_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread registers each whole part, and the caller the rest. All of it is unregistered."""
    monkeypatch.setattr(shared_memory, "_STEP", 1 << 20)
    monkeypatch.setattr(shared_memory, "PIN_BYTES", 2 << 20)
    device = Threads()
    buffer = SharedBuffer((5 << 20) + 1, (device, 0))
    base = buffer.allocate(torch.uint8, (1,)).data_ptr()
    assert device.pinned == [(base, 2 << 20), (base + (2 << 20), 2 << 20), (base + (4 << 20), (1 << 20) + PAGE)]
    threads = [name.partition("_")[0] for name in device.threads]
    assert threads == ["pin", "pin", threading.current_thread().name]
    buffer.pin(device, 0)
    assert len(device.pinned) == 3
    buffer.close()
    assert device.pinned == []


@pytest.mark.parametrize("refused", [1, 3], ids=["on the other thread", "in the end"])
def test_parts_that_cannot_be_registered_leave_none(refused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One refused part gives one warning, and the other parts are unregistered."""
    monkeypatch.setattr(shared_memory, "_STEP", 1 << 20)
    monkeypatch.setattr(shared_memory, "PIN_BYTES", 1 << 20)
    device = Threads(refused)
    with pytest.warns(RuntimeWarning, match="no more"):
        buffer = SharedBuffer((2 << 20) + 1, (device, 0))
    assert device.pinned == []
    assert len(device.threads) == refused
    buffer.pin(device, 0)  # warnings are errors here
    buffer.close()


def test_an_error_undoes_what_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a shortage no part stays registered, and no registration is running."""
    monkeypatch.setattr(shared_memory, "_STEP", 1 << 20)
    monkeypatch.setattr(shared_memory, "PIN_BYTES", 1 << 20)
    left = iter([1 << 30] * 3)
    monkeypatch.setattr(memory_limit, "available_memory", lambda: next(left, 0))
    device, before = Threads(), memory_files()
    with pytest.raises(StagingError, match="of which 2,097,152 are allocated"):
        SharedBuffer(8 << 20, (device, 0))
    assert len(device.threads) == 2
    assert (device.pinned, memory_files()) == ([], before)


class Threads(SimulatedDevice):
    """A device that records the threads that register memory, and refuses the last registration."""

    def __init__(self, refused: int = 0) -> None:
        super().__init__()
        self.threads: list[str] = []
        self._refused = refused

    def pin(self, address: int, nbytes: int, index: int) -> Callable[[], None]:
        self.threads.append(threading.current_thread().name)
        if len(self.threads) == self._refused:
            raise StagingError("no more")
        return super().pin(address, nbytes, index)


def test_a_dropped_buffer_is_unregistered() -> None:
    """A buffer without references is unregistered without `close`."""
    device = SimulatedDevice()
    buffer = SharedBuffer(PAGE)
    buffer.pin(device, 0)
    del buffer
    gc.collect()
    assert device.pinned == []


class Refusing(SimulatedDevice):
    """A device that refuses to register memory."""

    def pin(self, address: int, nbytes: int, index: int) -> Callable[[], None]:
        raise StagingError("raise the limit of locked memory")


def test_a_buffer_that_cannot_be_registered_is_pageable() -> None:
    """The device's advice is a warning, and the memory works."""
    device = Refusing()
    buffer = SharedBuffer(PAGE)
    with pytest.warns(RuntimeWarning, match="raise the limit of locked memory"):
        buffer.pin(device, 0)
    buffer.pin(device, 0)  # warnings are errors here
    assert buffer.allocate(torch.uint8, (3,)).fill_(1).tolist() == [1, 1, 1]
    buffer.close()
