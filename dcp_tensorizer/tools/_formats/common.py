"""Shared by the formats: the options of a conversion, files that are read by ranges, tensors by key."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..._runtime.threads import cores
from ..._storage.base import RangeReader, Storage
from ...errors import CheckpointError, ConversionError
from .._view import CheckpointView, StoredTensor

_IN_MEMORY = 512 << 20  # bytes of tensors, unless a single one is larger


@dataclass(frozen=True)
class ConvertOptions:
    """Options of a conversion. An option that only one format takes is an error with the others.

    Attributes:
        include: Patterns, as in a shell, of the keys to convert; ``*`` also matches dots. Empty: all.
        strip_prefix: Removed from the beginning of keys that have it.
        dtype: The dtype to which floating-point tensors are converted.
        source_format: One of `FORMATS`; None: recognised by its contents.
        shard_bytes: safetensors: the largest size of a file. A larger tensor gets a file of its own.
        tensor_parallel: tensorizer: the number of files to split into, one for each rank of an inference server.
        split: tensorizer: the dimension along which to split the tensors whose keys match a pattern. The first pattern
            that matches counts. Other tensors are whole in each file.
        buffers: tensorizer: patterns of the keys that are a module's buffers instead of parameters. Integer tensors are
            always buffers.
        exclude: Patterns of the keys to leave out.
        rename: New keys by patterns, in which only ``*`` has a meaning. The n-th ``*`` of a new key stands for the same
            text as the n-th of its pattern. The first pattern that matches a key without ``strip_prefix`` counts.
        add_prefix: Put before all keys, after they have their new names. Each part that ends in a dot is the key of a
            dict around the others.
    """

    include: Sequence[str] = ()
    strip_prefix: str = ""
    dtype: torch.dtype | None = None
    source_format: str | None = None
    shard_bytes: int = 5_000_000_000
    tensor_parallel: int = 1
    split: Mapping[str, int] = field(default_factory=dict)
    buffers: Sequence[str] = ("*running_mean", "*running_var")
    exclude: Sequence[str] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    add_prefix: str = ""


_OF_ONE_FORMAT = {
    "shard_bytes": ("safetensors", "--shard-size"),
    "tensor_parallel": ("tensorizer", "--tensor-parallel"),
    "split": ("tensorizer", "--split"),
    "buffers": ("tensorizer", "--buffer"),
}


def check_options(options: ConvertOptions, to: str, path: str) -> None:
    """Raises `ConversionError`, naming the option, for options that are invalid or would have no effect."""
    _check_values(options)
    defaults = ConvertOptions()
    for name, (of, flag) in _OF_ONE_FORMAT.items():
        if to != of and getattr(options, name) != getattr(defaults, name):
            raise ConversionError(f"{name} ({flag}) is an option of {of}, and means nothing to {to}: leave it out")
    if path.endswith(".safetensors") and options.shard_bytes != defaults.shard_bytes:
        raise ConversionError(
            "shard_bytes (--shard-size) means nothing to a single file: leave it out, or name a directory, whose name "
            "does not end in .safetensors"
        )
    if (options.tensor_parallel > 1) != bool(options.split):
        raise ConversionError(
            "tensor_parallel (--tensor-parallel N) and split (--split FILE) go together: into how many files to split, "
            "and along which dimension of which tensors"
        )


def _check_values(options: ConvertOptions) -> None:
    for name in ("include", "exclude", "buffers"):
        patterns = getattr(options, name)
        if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
            raise ConversionError(f"{name} must be a list of patterns, got {patterns!r}.")
    if options.dtype is not None and not (isinstance(options.dtype, torch.dtype) and options.dtype.is_floating_point):
        raise ConversionError(f"dtype must be a floating-point dtype of torch, got {options.dtype!r}.")
    for name in ("shard_bytes", "tensor_parallel"):
        count = getattr(options, name)
        if type(count) is not int or count < 1:
            raise ConversionError(f"{name} must be an int of at least 1, got {count!r}.")
    for pattern, dimension in options.split.items():
        if type(dimension) is not int:
            raise ConversionError(f"split must give the number of a dimension for {pattern!r}, got {dimension!r}.")


@contextmanager
def naming(storage: Storage, path: str) -> Iterator[None]:
    """Raises errors of reading a file's contents as `ConversionError` with its path, and without credentials.

    Errors of this package pass, and so do those of the storage. `Storage.reading` belongs inside it where a file that
    ends too early is damage: then that is a `ReadError`.
    """
    try:
        yield
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # also what no reader foresees: a huge number, endless nesting, a lack of memory
        what = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ConversionError(storage.scrub(f"{path} cannot be read: {what}")) from storage.cause(error)


class FileRange(io.RawIOBase):
    """A range of a file, as a file of its own."""

    def __init__(self, reader: RangeReader, offset: int, nbytes: int) -> None:
        self._reader = reader
        self._offset = offset
        self._nbytes = nbytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._nbytes}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Reads exactly ``size`` bytes: a damaged length must not allocate that much memory."""
        left = max(0, self._nbytes - self._position)
        if size > left:
            raise EOFError(f"{size:,} bytes should follow, and there are {left:,}")
        return super().read(size) or b""

    def readall(self) -> bytes:
        return self.read(max(0, self._nbytes - self._position))

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._nbytes - self._position))
        if count:
            self._reader.read_into([memoryview(buffer)[:count]], self._offset + self._position)
            self._position += count
        return count


def check_no_objects(view: CheckpointView, format_name: str) -> None:
    """Raises `ConversionError` if there are values that are not tensors."""
    if view.objects:
        key = next(iter(view.objects))
        others = f" (and {len(view.objects) - 1:,} more)" if len(view.objects) > 1 else ""
        raise ConversionError(
            f"{key!r}{others} is not a tensor, which {format_name} cannot hold: leave it out with exclude "
            f"(--exclude), or say what to take with include (--include)"
        )


def tensors_at_once(tensors: Iterable[StoredTensor]) -> int:
    """The number of tensors that may be in memory at once, and so of threads that read them."""
    largest = max((tensor.nbytes for tensor in tensors), default=1)
    return max(1, min(4, cores(), _IN_MEMORY // max(1, largest)))
