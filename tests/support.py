"""Values and small helpers that several unit tests need."""

from __future__ import annotations

import logging
import os
import re
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch
import xxhash

from dcp_tensorizer._memory.client import KeeperConnection
from dcp_tensorizer._memory.runtime_directory import connect
from dcp_tensorizer._storage.base import Storage
from dcp_tensorizer._storage.local_io import Residency
from dcp_tensorizer._tensor_file.dtypes import host_bytes
from dcp_tensorizer._tensor_file.encode import encode
from dcp_tensorizer._tensor_file.encryption import Cipher
from dcp_tensorizer._tensor_file.layout import lay_out
from dcp_tensorizer._tensor_file.names import StoredItem, block_size
from dcp_tensorizer._writer_process.protocol import TensorSource

from . import warm

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dcp_tensorizer"
WORKER = "dcp_tensorizer._writer_process.worker"
_MOUNT_NAMESPACE = ("unshare", "--map-root-user", "--mount", "sh", "-c")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for name in ("complex32", "bcomplex32"):  # torch warns of each, once a process, that it is experimental
        if isinstance(getattr(torch, name, None), torch.dtype):
            torch.empty(0, dtype=getattr(torch, name))


def _plain_dtypes() -> list[torch.dtype]:
    """Every dtype that can be saved: not torch's quantised ones, opaque bits, and integers below a byte."""
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    plain = {dtype for dtype in dtypes if not re.match(r"torch\.(q|bits|u?int[1-7]$)", str(dtype))}
    return sorted(plain, key=str)


ALL_DTYPES = _plain_dtypes()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def filled(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor of arbitrary but repeatable bytes; NaNs and infinities occur."""
    count = 1
    for extent in shape:
        count *= extent
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def is_mapped(address: int) -> bool:
    """Returns whether this process has memory at an address."""
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in ranges)


def is_so_in_child(look: Callable[[], bool]) -> bool:
    """Returns whether a function returns True in a forked child."""
    child = os.fork()
    if child == 0:
        os._exit(0 if look() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def raw(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor in C order, after conjugation and negation."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    if not plain.numel():
        return b""
    if plain.numel() == 1:  # contiguous whatever its strides are
        plain = plain.as_strided((1,), (1,))
    if not plain.is_contiguous():
        plain = plain.view(torch.uint8).contiguous() if plain.itemsize == 1 else plain.contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits (NaNs are equal to themselves)."""
    return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)


def stored_item(length: int, *, offset: int = 0, dtype: str = "uint8", digests: bytes = b"") -> StoredItem:
    return StoredItem(f"__0_0_{'a' * 32}.tensors", "t", offset, length, dtype, "tensor", digests)


def is_a_servant(process: psutil.Process) -> bool:
    """Servers that programs and ranks are forked off live as long as we do, and so does a resource tracker."""
    if process.pid in warm.pids():
        return True
    try:
        arguments = " ".join(process.cmdline())
        return "multiprocessing.resource_tracker" in arguments or "from multiprocessing.forkserver" in arguments
    except psutil.Error:
        return True


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
    """What a request says of tensors."""
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


def directories_in(folder: Path) -> list[str]:
    """The names of the directories in a folder, sorted: those of a manager's checkpoints."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def block_digests(tensor: torch.Tensor) -> bytes:
    """XXH3-64 of each block of a tensor's bytes. If there are several, that of all bytes follows."""
    data = raw(tensor)
    step = block_size(len(data))
    blocks = [xxhash.xxh3_64_digest(data[start : start + step]) for start in range(0, len(data), step)]
    return b"".join(blocks + ([xxhash.xxh3_64_digest(data)] if len(blocks) > 1 else []))


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """The operating system refuses files larger than this, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def run_python(
    script: str, *arguments: object, timeout: float = 600.0, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs a script in an interpreter of its own. If it fails, this fails with its output.

    A ``fresh`` one begins and ends as every interpreter does; the others have imported torch already.
    """
    return _run([sys.executable if fresh else warm.python(), "-c", script, *map(str, arguments)], timeout)


def can_mount(mounts: str) -> bool:
    """Whether this system lets these tests mount something where nobody else sees it."""
    return subprocess.run([*_MOUNT_NAMESPACE, mounts], capture_output=True, check=False).returncode == 0


def run_python_with(mounts: str, script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The same where shell commands have mounted something before: ``$1`` in them is the script's first argument."""
    command = f'script="$1" && shift && {mounts} && exec "$0" -c "$script" "$@"'
    return _run([*_MOUNT_NAMESPACE, command, sys.executable, script, *map(str, arguments)], 600.0)


def _run(command: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        env=os.environ | {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@contextmanager
def quietly() -> Iterator[None]:
    """Without the logs of saves and loads that fail as they should, and without warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def open_descriptors() -> dict[int, str]:
    """The descriptors of this process and what they refer to."""
    targets = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            targets[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the one that listed them
    return targets


def forget(path: Path) -> None:
    """Drops a file's pages from the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached(path: Path, offset: int) -> bool:
    """Whether the page cache holds a byte of a file now."""
    with open(path, "rb") as file:
        residency = Residency(file.fileno())
        is_cached = residency.holds_page(offset)
        residency.close()
    return is_cached


def writer_process() -> psutil.Process:
    """The writer process of this process; there must be just one."""
    (process,) = workers()
    return process


def workers() -> list[psutil.Process]:
    """The writer processes of this process that live."""
    children = psutil.Process().children()
    alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if WORKER in _command(child)]


def keepers_below(folder: Path) -> list[psutil.Process]:
    """The processes whose sockets are in a folder: other jobs on this machine may keep something, too."""
    processes = psutil.process_iter(["cmdline"])
    return [p for p in processes if any(word.startswith(f"{folder}/") for word in p.info["cmdline"] or ())]


def wait_until_digested(folder: Path) -> None:
    """Waits until keepers whose trainers are gone have the digests of all that they keep: they see no damage before."""
    for path in folder.iterdir():
        connection = connect(path)
        assert connection is not None
        keeper = KeeperConnection(connection)
        keeper.look(60.0)
        for head in keeper.found.heads:
            _, memory = keeper.take(head.id, head.rank)
            memory.close()
        keeper.close()


def end_keepers(folder: Path) -> None:
    """Ends those that are left, as their time does; and waits for those that this process has left to others."""
    for process in keepers_below(folder):
        process.kill()
        process.wait()
    for child in psutil.Process().children():
        if child.status() == psutil.STATUS_ZOMBIE:
            child.wait()


def _command(process: psutil.Process) -> list[str]:
    """A process' command line. One that has just been started has none for a moment, and one that has died, no more."""
    deadline = time.monotonic() + 1.0
    with suppress(psutil.Error):
        while not (command := process.cmdline()) and time.monotonic() < deadline:
            time.sleep(0.001)
        return command
    return []


def kill(process: psutil.Process) -> None:
    """Kills a child, and returns when it is dead; its parent can still ask how it ended."""
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def memory_files() -> set[int]:
    """The inodes of the buffers' memory files that this process has open or mapped."""
    mark = "memfd:dcp_tensorizer"
    opened = {os.stat(f"/proc/self/fd/{fd}").st_ino for fd, target in open_descriptors().items() if mark in target}
    return opened | {int(line.split()[4]) for line in Path("/proc/self/maps").read_text().splitlines() if mark in line}
