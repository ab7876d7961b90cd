"""The files that back tensors in shared memory: the trainer finds them, and its writer process maps them.

The trainer finds the files in /proc/self/maps. torch's own sharing is not used, because it moves memory that was shared
in another way. The writer process opens an unnamed file through a descriptor of the trainer.
"""

from __future__ import annotations

import mmap
import os
import stat
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..errors import WriteError
from .ways import BufferWay

if TYPE_CHECKING:
    import torch


class MappedFile(NamedTuple):
    """A file that the trainer maps. Device and inode show whether the path still refers to it."""

    path: str
    device: int
    inode: int


class _SharedMapping(NamedTuple):
    start: int
    end: int
    offset: int
    inode: int
    path: str


class SharedMappings:
    """The shared mappings of this process at construction; empty without /proc.

    A mapping may end at any time, and its addresses may then be reused. So `locate` is valid only for tensors alive
    since construction, which `SharedTensors` ensures.
    """

    def __init__(self) -> None:
        self._mappings = _shared_mappings()
        self._starts = [mapping.start for mapping in self._mappings]
        self._descriptors: dict[tuple[int, str], str] | None = None
        self._files: dict[_SharedMapping, MappedFile | None] = {}

    def locate(self, tensor: torch.Tensor) -> tuple[MappedFile, int] | None:
        """Returns the file and offset of a tensor's bytes; None if another process cannot read them in C order."""
        plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        if tensor.device.type != "cpu" or not plain or not tensor.numel():
            return None
        address = tensor.data_ptr()
        number = bisect_right(self._starts, address) - 1
        if number < 0 or address + tensor.nbytes > self._mappings[number].end:
            return None
        mapping = self._mappings[number]
        if mapping not in self._files:
            self._files[mapping] = self._file(mapping)
        file = self._files[mapping]
        return None if file is None else (file, mapping.offset + address - mapping.start)

    def _file(self, mapping: _SharedMapping) -> MappedFile | None:
        if self._descriptors is None:
            self._descriptors = _own_files()
        for path in (mapping.path, self._descriptors.get((mapping.inode, mapping.path), "")):
            try:
                status = os.stat(path)
            except OSError:
                continue
            if status.st_ino == mapping.inode and stat.S_ISREG(status.st_mode):
                return MappedFile(path, status.st_dev, status.st_ino)
        return None


class SharedTensors:
    """Tensors whose memory other processes can read. Keeps the tensors, and so their mappings, alive."""

    def __init__(self, mappings: SharedMappings, tensors: Iterable[torch.Tensor]) -> None:
        self._mappings = mappings
        self._tensors = list(tensors)
        self._ranges = _joined(sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in self._tensors))

    def locate(self, tensor: torch.Tensor) -> tuple[MappedFile, int] | None:
        """Locates one of these tensors, or a part of one, as `SharedMappings.locate` does; None for other tensors."""
        if tensor.device.type != "cpu" or not tensor.numel():
            return None
        address = tensor.data_ptr()
        number = bisect_right(self._ranges, address, key=lambda span: span[0]) - 1
        is_inside = number >= 0 and address + tensor.nbytes <= self._ranges[number][1]
        return self._mappings.locate(tensor) if is_inside else None


class SharedWay(BufferWay):
    """The strategy of ``staging="shared"``: tensors in shared memory are written without a copy."""

    holds_training = True

    def shared(self, tensors: Sequence[torch.Tensor], omitted: set[int]) -> tuple[set[int], SharedTensors | None]:
        mappings = SharedMappings()
        numbers = {n for n, t in enumerate(tensors) if mappings.locate(t) is not None} - omitted
        return numbers, SharedTensors(mappings, [tensors[n] for n in numbers]) if numbers else None


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merges overlapping and adjacent address ranges. ``spans`` must be sorted."""
    joined: list[tuple[int, int]] = []
    for start, end in spans:
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def map_shared(file: MappedFile) -> mmap.mmap:
    """Maps the trainer's shared memory read-only. Raises `WriteError` if it was released or cannot be mapped."""
    try:
        fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) != (file.device, file.inode):
                raise FileNotFoundError("the path now refers to another file")
            return mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:  # ValueError: the file has been truncated to zero bytes
        raise WriteError(
            f"shared memory of the trainer ({file.path}) cannot be mapped by its writer process ({error}). Keep "
            f"references to the tensors until the save is over, or use staging='buffer'."
        ) from error


def _shared_mappings() -> list[_SharedMapping]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    mappings = []
    for line in lines:
        addresses, permissions, offset, _, inode, *path = line.split(None, 5)
        if permissions.endswith("s") and int(inode):
            start, end = (int(address, 16) for address in addresses.split("-"))
            mappings.append(_SharedMapping(start, end, int(offset, 16), int(inode), path[0] if path else ""))
    return mappings


def _own_files() -> dict[tuple[int, str], str]:
    """Returns /proc paths of this process's open files, by inode and name.

    An inode alone is ambiguous: /dev/shm and anonymous memory files both number their inodes from small values.
    """
    paths = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            opened, link = os.stat(f"/proc/self/fd/{name}"), os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # for example, the descriptor of the listing itself
        if stat.S_ISREG(opened.st_mode):
            paths[opened.st_ino, link] = f"/proc/{os.getpid()}/fd/{name}"
    return paths
