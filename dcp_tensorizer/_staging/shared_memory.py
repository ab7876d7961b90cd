"""The staging buffer: one block of memory for the staged tensors, which the trainer and its writer process share."""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import math
import mmap
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .._runtime.forks import Descriptor, Finalizer, anonymous_file, keep_from_children, limit_advice
from .._runtime.memory_limit import check_free_memory
from .._runtime.threads import Workers, cores, in_threads
from .._runtime.torch_compat import is_plain
from ..errors import StagingError
from .device import PIN_BYTES, Device, pin_if_possible

if TYPE_CHECKING:
    from .tensor_copy import Batches

# The alignment of tensors in a buffer: a multiple of the vector width, the largest element size and the cache line.
_ALIGNMENT = 64
_PAGE = mmap.PAGESIZE
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14, <asm-generic/mman-common.h>; not named in the mmap module
_STEP = 256 << 20  # bytes allocated between two checks of the free memory
_HUGE_PAGE = 2 << 20
_MAX_THREADS = 16  # that allocate one buffer; an estimate: more than four have not been measured
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
_ids = itertools.count()

_MAP_FIXED = 0x10  # <asm-generic/mman-common.h>; not named in the mmap module


class SharedBuffer:
    """Shared memory of ``nbytes`` bytes, rounded up to pages. It is filled from the start, and emptied as a whole.

    The constructor allocates all of it, or raises `StagingError` and allocates nothing. While ``is_kept`` is true, the
    contents may be needed after their save, and the buffer is not reused.

    With ``pin_for``, a device and its index, the constructor registers the buffer as `pin` does: each part while the
    next one is allocated.
    """

    def __init__(self, nbytes: int, pin_for: tuple[Device, int] | None = None) -> None:
        self.id = next(_ids)
        self.nbytes = max(_PAGE, -(-nbytes // _PAGE) * _PAGE)
        check_free_memory(self.nbytes)
        try:
            self._descriptor = Descriptor(anonymous_file("dcp_tensorizer"))
        except OSError as error:
            raise StagingError(f"cannot create the staging buffer: {error}{limit_advice(error)}") from error
        try:
            self._map: mmap.mmap | None = _map(self.fd, self.nbytes)
            self._base = _address(self._map)
            self._undo: list[Callable[[], None]] = []
            with ExitStack() as on_error:
                on_error.callback(_undo_all, self._undo)
                with _Registering(self._base, pin_for, self._undo) as registering:
                    _allocate(self.fd, self._base, self.nbytes, registering.advance)
                if hasattr(fcntl, "F_ADD_SEALS"):  # a process that reads past the end of a truncated file gets SIGBUS
                    with suppress(OSError):  # not a memory file
                        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
                on_error.pop_all()
        except StagingError:
            self._descriptor.close()
            raise
        except (OSError, MemoryError) as error:
            self._descriptor.close()
            advice = limit_advice(error)
            advice = advice or ". Free memory, raise the memory limit, or shard the state dict over more ranks."
            raise StagingError(
                f"cannot allocate {self.nbytes:,} bytes for the staging buffer ({error}){advice}"
            ) from error
        self._mapping = weakref.ref(self._map)
        keep_from_children(self._map)
        self._used = 0
        self._made: list[torch.Tensor] = []  # by the last `allocate_all`
        self._layout: tuple[list[torch.dtype], list[torch.Size], list[int]] | None = None  # of `_made`, with addresses
        self.batches: Batches | None = None  # the copies of the last state staged in this buffer
        self.is_kept = False
        self._pinning = pin_for is not None
        self._release = Finalizer(self, _release, self._descriptor, self._undo)

    @property
    def fd(self) -> int:
        """The descriptor of the memory. Raises `OSError` if it has been closed."""
        return self._descriptor.number

    def pin(self, device: Device, index: int) -> None:
        """Registers the buffer for copies from a GPU, once, as `pin_if_possible` does."""
        if not self._pinning:
            self._pinning = True
            self.at_close(pin_if_possible(device, self._base, self.nbytes, index))

    def at_close(self, undo: Callable[[], None]) -> None:
        """Registers a function to call before the memory is freed."""
        self._undo.append(undo)

    def reset(self) -> None:
        """Empties the buffer. Later tensors reuse the memory of earlier ones."""
        self._used = 0

    @property
    def in_use(self) -> bool:
        """Returns whether a tensor of the buffer is alive. Each tensor refers to the mapping, even after `close`.

        Releases the tensors of `allocate_all` first.
        """
        self.forget()
        own = 1 if self._map is None else 2  # the argument of `getrefcount`, and `_map`
        return self._mapping() is not None and sys.getrefcount(self._mapping()) > own

    def fits(self, nbytes: int) -> bool:
        """Returns whether tensors of ``nbytes`` bytes in all, including alignment, fit into the empty buffer.

        Also returns False if other code has closed the descriptor: the mapping stays valid, but no other process could
        map the buffer.
        """
        return nbytes <= self.nbytes and self._descriptor.is_ours

    def allocate(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Returns an uninitialised C-contiguous tensor in the buffer, with a storage of its own.

        If tensors shared a storage, pickling one through torch.multiprocessing would move the whole buffer to other
        memory.
        """
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        assert self._map is not None, "the buffer is closed"
        nbytes = count * dtype.itemsize
        offset = self._used
        self._used += aligned(nbytes)
        if self._used > self.nbytes:
            raise StagingError(f"the staging buffer of {self.nbytes:,} bytes is full")
        flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset)
        if len(shape) == 1:
            return flat
        return flat.resize_(*shape) if shape else flat.view(())  # takes half the time of a view; does not reallocate

    def allocate_all(self, dtypes: list[torch.dtype], shapes: list[torch.Size]) -> list[torch.Tensor]:
        """Allocates all tensors of a state in an empty buffer, as `allocate` does, and returns aliases of them.

        The buffer retains the tensors for the next state. If the next state has the same dtypes and shapes, this method
        only makes new aliases, which takes an eighth of the time.
        """
        # Addresses are compared because torch.multiprocessing moves storages that it pickles.
        if self._layout != (dtypes, shapes, _addresses(self._made)):
            self.forget()  # frees the tensors before new ones are made
            self._made = list(map(self.allocate, dtypes, shapes))
            self._layout = dtypes, shapes, _addresses(self._made)
        # Not `Tensor.detach`: it takes twice as long, and releases the GIL, which then has to be reacquired.
        return list(map(attrgetter("data"), self._made))

    def forget(self) -> None:
        """Releases the tensors that `allocate_all` has retained."""
        self._made, self._layout = [], None

    def locate(self, tensor: torch.Tensor) -> int | None:
        """Returns the offset of a tensor's bytes in the buffer; None if the buffer does not hold them in C order."""
        offset = tensor.data_ptr() - self._base
        inside = offset >= 0 and offset + tensor.nbytes <= self.nbytes
        return offset if inside and is_plain(tensor) else None

    def close(self) -> None:
        """Frees the memory once no tensor in it is alive. Idempotent."""
        self.forget()
        self._release()
        self._map = None


def _addresses(tensors: list[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))


def aligned(nbytes: int) -> int:
    """Returns the bytes that a tensor of ``nbytes`` bytes takes in a shared buffer."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _release(descriptor: Descriptor, undo: list[Callable[[], None]]) -> None:
    try:
        _undo_all(undo)
    finally:
        descriptor.close()


def _undo_all(undo: list[Callable[[], None]]) -> None:
    while undo:
        undo.pop()()


class _Registering:
    """A thread that registers the parts of a buffer while further parts are allocated.

    ``undo`` receives the functions that unregister the parts. When the ``with`` block ends without an error, all
    allocated memory is registered, unless the system has refused a part. Then the context manager unregisters all other
    parts, and issues a warning, as `pin_if_possible` does.
    """

    def __init__(self, address: int, pin_for: tuple[Device, int] | None, undo: list[Callable[[], None]]) -> None:
        self._address, self._pin_for, self._undo = address, pin_for, undo
        self._made = self._begun = 0
        self._error: StagingError | None = None
        self._pool = Workers(1, "pin")  # waits for its work even if the caller is interrupted

    def __enter__(self) -> _Registering:
        return self

    def advance(self, made: int) -> None:
        """Starts registering the complete parts within the first ``made`` bytes, which are allocated."""
        self._made = made
        start, stop = self._begun, made // PIN_BYTES * PIN_BYTES
        if start < stop and self._pin_for is not None:
            with suppress(RuntimeError):  # no more threads: `__exit__` registers the rest
                self._pool.submit(self._register, start, stop)
                self._begun = stop

    def _register(self, start: int, stop: int) -> None:
        if self._pin_for is not None and self._error is None and start < stop:
            device, index = self._pin_for
            try:
                self._undo.append(device.pin(self._address + start, stop - start, index))
            except StagingError as error:
                self._error = error

    def __exit__(self, kind: object, *error: object) -> None:
        self._pool.shutdown()
        if kind is None:
            self._register(self._begun, self._made)
        if self._error is not None:
            _undo_all(self._undo)
            warnings.warn(str(self._error), RuntimeWarning, stacklevel=3)


def _map(fd: int, nbytes: int) -> mmap.mmap:
    """Maps a file, which may still be shorter than ``nbytes``. On Linux, does not duplicate its descriptor.

    `mmap` duplicates it (before Python 3.13 always), and later closes the duplicate's number, even if that belongs to
    another file by then.
    """
    if sys.platform != "linux":
        os.ftruncate(fd, nbytes)
        return mmap.mmap(fd, nbytes)
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # reserves addresses, no memory
    replace = ctypes.CDLL(None, use_errno=True).mmap
    replace.restype = ctypes.c_void_p
    replace.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = _address(mapping)
    if replace(address, nbytes, access, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return mapping


def _address(mapping: mmap.mmap) -> int:
    return torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()


def _allocate(fd: int, address: int, nbytes: int, made: Callable[[int], object]) -> None:
    """Allocates the memory and its page table: faulting page by page in the first copy takes three times as long.

    Allocates in steps, because the ranks of a node allocate concurrently, and each must see what the others have taken.
    Several threads share a step, because clearing pages is CPU work. A single thread is faster if it reserves small
    pages before it populates the table. Populating the table also gives huge pages, if the system grants them: they are
    allocated in a ninth of the time, freed in a fiftieth, and read as a file in a third. After each step, calls
    ``made`` with the bytes allocated so far.

    Raises `StagingError` if other processes have taken the memory, and `OSError` if allocation fails.
    """
    os.ftruncate(fd, nbytes)
    is_huge = _has_huge_pages()
    if is_huge:
        advise(address, nbytes, _MADV_HUGEPAGE)
    threads = min(cores(), _MAX_THREADS)
    for start in range(0, nbytes, _STEP):
        length = min(_STEP, nbytes - start)
        check_free_memory(nbytes, allocated=start)
        if threads == 1 and not is_huge:
            _reserve(fd, start, length)
        share = -(-length // threads)
        share = -(-share // _HUGE_PAGE) * _HUGE_PAGE
        parts = [(address + at, min(share, start + length - at)) for at in range(start, start + length, share)]
        with suppress(RuntimeError):  # no more threads: a system limit, or the interpreter is shutting down
            in_threads(lambda part: advise(*part, _MADV_POPULATE_WRITE), parts)
        _reserve(fd, start, length)  # allocates the pages that are still missing, or raises
        made(start + length)


def _has_huge_pages() -> bool:
    """Returns whether the system gives huge pages for shared memory, always or on request.

    ``deny`` and ``force`` apply to all sizes. Since Linux 6.11 each size has its own setting, which may be ``inherit``.
    """
    settings = []
    for folder in ("", f"hugepages-{_HUGE_PAGE >> 10}kB"):
        text = ""
        with suppress(OSError):
            text = (_HUGE_PAGES / folder / "shmem_enabled").read_text()
        settings.append(text.partition("[")[2].partition("]")[0])
    common, of_size = settings
    if common in ("deny", "force"):
        return common == "force"
    return (common if of_size in ("", "inherit") else of_size) in ("always", "within_size", "advise")


def _reserve(fd: int, start: int, length: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, start, length)


def advise(address: int, nbytes: int, advice: int) -> None:
    """Calls madvise through ctypes: `mmap.madvise` holds the GIL, which would stop training.

    Ignores errors: an older kernel does not know all advice.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)
