"""The limits of this machine, measured in the same run: the yardsticks of the other benchmarks."""

from __future__ import annotations

import io
import itertools
import mmap
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensorizer import TensorSerializer

from dcp_tensorizer._runtime.direct_memory import direct_memory
from dcp_tensorizer._tensor_file.encryption import Cipher

_STEP = 8 << 20
_BLOCK = 512 << 10
_IOV_MAX = 1024  # Linux's limit on the buffers of one preadv
_MAX_NAMES = 2000  # the maximum number of names in the index of one of tensorizer's files


class Discard(io.RawIOBase):
    """A seekable file that drops its contents, so that only tensorizer's own work is measured."""

    def __init__(self) -> None:
        self._position = 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset
        return offset

    def write(self, data: Any) -> int:
        count = memoryview(data).nbytes
        self._position += count
        return count


def copy_seconds(state: dict[str, torch.Tensor], rounds: int = 3) -> float:
    """Returns the median of a few plain copies into warm memory, and frees all of that memory."""
    sources = list(state.values())
    starts = list(itertools.accumulate((-(-source.nbytes // 64) * 64 for source in sources), initial=0))
    memory = torch.frombuffer(mmap.mmap(-1, starts[-1]), dtype=torch.uint8)
    targets = [
        memory[start : start + source.nbytes].view(source.dtype).view(source.shape)
        for start, source in zip(starts, sources, strict=False)
    ]
    times = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        torch._foreach_copy_(targets, sources)
        times.append(time.perf_counter() - started)
    return sorted(times[1:])[len(times[1:]) // 2]


def hash_seconds(state: dict[str, torch.Tensor], cores: int) -> float:
    """Measures ``TensorSerializer`` with a sink that drops its input, on this many cores."""
    available = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(available)[:cores])
    try:
        started = time.perf_counter()
        names = list(state)
        for first in range(0, len(names), _MAX_NAMES):
            serializer = TensorSerializer(Discard(), limit_cpu_concurrency=cores)
            serializer.write_state_dict({name: state[name] for name in names[first : first + _MAX_NAMES]})
            serializer.close()
        return time.perf_counter() - started
    finally:
        os.sched_setaffinity(0, available)


def cipher_seconds(state: dict[str, torch.Tensor]) -> float:
    """Measures encryption by libsodium on all cores, into one buffer per thread, in blocks of 512 KiB."""
    cipher = Cipher(bytes(32))
    memory = [tensor.view(torch.uint8).view(-1).numpy().data for tensor in state.values()]
    blocks = [source[start : start + _BLOCK] for source in memory for start in range(0, source.nbytes, _BLOCK)]
    local = threading.local()

    def encrypt(block: memoryview) -> None:
        if not hasattr(local, "buffer"):
            local.buffer, local.nonce = direct_memory(_BLOCK), cipher.new_nonce()
        cipher.encrypt(block, local.buffer[: block.nbytes], local.nonce, 0)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        started = time.perf_counter()
        list(pool.map(encrypt, blocks))
        return time.perf_counter() - started


def direct_write_seconds(folder: Path, nbytes: int) -> float:
    """Measures aligned O_DIRECT writes of 8 MiB from one buffer in huge pages, and an fsync."""
    path = folder / "limit.bin"
    buffer = direct_memory(_STEP)
    np.frombuffer(buffer, dtype=np.uint8)[:] = 7
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        started = time.perf_counter()
        for offset in range(0, nbytes // _STEP * _STEP, _STEP):
            os.pwrite(descriptor, buffer, offset)
        os.fsync(descriptor)
        return time.perf_counter() - started
    finally:
        os.close(descriptor)
        path.unlink()


def cached_read_seconds(paths: Sequence[Path], targets: Sequence[memoryview], threads: int) -> float:
    """Measures parallel ``preadv`` of files in the page cache, into the memory of some tensors, in few calls."""
    descriptors = [os.open(path, os.O_RDONLY) for path in paths]
    reads = []
    pending = list(reversed(targets))
    for descriptor in descriptors:
        offset, end = 0, os.fstat(descriptor).st_size
        while pending and offset < end:
            buffers, start = [], offset
            while pending and offset - start < _STEP and len(buffers) < _IOV_MAX and offset < end:
                target, count = pending.pop(), min(_STEP - (offset - start), end - offset)
                buffers.append(target[:count])
                offset += buffers[-1].nbytes
                if target.nbytes > count:
                    pending.append(target[count:])
            reads.append((descriptor, buffers, start))
    try:
        with ThreadPoolExecutor(threads) as pool:
            started = time.perf_counter()
            list(pool.map(lambda read: os.preadv(*read), reads))
            return time.perf_counter() - started
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def direct_read_seconds(path: Path, nbytes: int, threads: int) -> float:
    """Measures parallel O_DIRECT reads of 8 MiB into one buffer per thread, in huge pages."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    local = threading.local()

    def read(start: int) -> None:
        if not hasattr(local, "buffer"):
            local.buffer = direct_memory(_STEP)
        os.preadv(descriptor, [local.buffer], start)

    try:
        with ThreadPoolExecutor(threads) as pool:
            started = time.perf_counter()
            list(pool.map(read, range(0, nbytes, _STEP)))
            return time.perf_counter() - started
    finally:
        os.close(descriptor)


def evict(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def fill_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                while file.read(_STEP):
                    pass
