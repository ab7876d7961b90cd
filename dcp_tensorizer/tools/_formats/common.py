"""Code shared by the formats: the options of a conversion, and file ranges as files."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..._runtime.threads import cores
from ..._runtime.validation import check_count, check_patterns, check_type, set_fields
from ..._storage.base import RangeReader, Storage
from ...errors import CheckpointError, ConversionError, MetadataError
from .._view import CheckpointView, StoredTensor

_IN_MEMORY = 512 << 20  # bytes of tensors that a conversion holds at once, unless a single tensor is larger


@dataclass(frozen=True)
class ConvertOptions:
    """Options of a conversion. Raises `ConversionError` if one is invalid.

    `convert` raises `ConversionError` if an option of one format is given for another.

    Attributes:
        include: Shell-style patterns of the keys to convert, in which ``*`` also matches dots. Empty: all keys.
        strip_prefix: Removed from the beginning of keys that have it.
        dtype: The dtype to which floating-point tensors are converted.
        source_format: One of `FORMATS`; None: recognise the format from the source's contents.
        shard_bytes: safetensors: the maximum size of a file. A larger tensor gets a separate file.
        tensor_parallel: tensorizer: the number of files to split into, one for each rank of an inference server.
        split: tensorizer: maps patterns of keys to the dimension along which to split. The first pattern that matches
            counts. Tensors that no pattern matches are whole in each file.
        buffers: tensorizer: patterns of the keys that are a module's buffers instead of parameters. Tensors that are
            neither floating-point nor complex are always buffers.
        exclude: Patterns of the keys to leave out.
        rename: Maps patterns, in which only ``*`` is special, to new keys. The n-th ``*`` of a new key stands for the
            text that the n-th ``*`` of the pattern matched. Patterns are matched after ``strip_prefix``, and the first
            match counts.
        add_prefix: Prepended to all keys, after ``rename``. Each part that ends in a dot is the key of an enclosing
            dict.
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

    def __post_init__(self) -> None:
        try:
            set_fields(
                self,
                include=check_patterns("include", self.include),
                exclude=check_patterns("exclude", self.exclude),
                buffers=check_patterns("buffers", self.buffers),
                shard_bytes=check_count("shard_bytes", self.shard_bytes),
                tensor_parallel=check_count("tensor_parallel", self.tensor_parallel),
                rename=dict(check_type("rename", self.rename, Mapping)),  # type: ignore[type-abstract]
                split=dict(check_type("split", self.split, Mapping)),  # type: ignore[type-abstract]
            )
        except (TypeError, ValueError) as error:
            raise ConversionError(str(error)) from None
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise ConversionError(f"dtype must be a floating-point dtype of torch, got {self.dtype!r}.")
        for pattern, dimension in self.split.items():
            if type(dimension) is not int:
                raise ConversionError(f"split must give the number of a dimension for {pattern!r}, got {dimension!r}.")


_OF_ONE_FORMAT = {
    "shard_bytes": ("safetensors", "--shard-size"),
    "tensor_parallel": ("tensorizer", "--tensor-parallel"),
    "split": ("tensorizer", "--split"),
    "buffers": ("tensorizer", "--buffer"),
}


def check_options(options: ConvertOptions, to: str, path: str) -> None:
    """Raises `ConversionError` for an option that would have no effect."""
    defaults = ConvertOptions()
    for name, (of, flag) in _OF_ONE_FORMAT.items():
        if to != of and getattr(options, name) != getattr(defaults, name):
            raise ConversionError(f"{name} ({flag}) is an option of {of}, and has no effect on {to}. Leave it out.")
    if path.endswith(".safetensors") and options.shard_bytes != defaults.shard_bytes:
        raise ConversionError(
            "shard_bytes (--shard-size) has no effect on a single file. Leave it out, or name a directory (whose name "
            "does not end in .safetensors)."
        )
    if (options.tensor_parallel > 1) != bool(options.split):
        raise ConversionError(
            f"tensor_parallel (--tensor-parallel N) and split (--split FILE) must be used together, got "
            f"tensor_parallel={options.tensor_parallel} and split={dict(options.split)}. Give both."
        )


@contextmanager
def naming(storage: Storage, path: str) -> Iterator[None]:
    """Converts parse errors into `MetadataError`, which counts as damage, with the path and without credentials.

    `CheckpointError` and `OSError` pass through. `NotImplementedError`, for an undamaged file of an unsupported form,
    and `MemoryError` become `ConversionError`. To report a truncated file as `ReadError`, enter `Storage.reading`
    inside this context.
    """
    try:
        yield
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # including OverflowError, RecursionError and MemoryError from hostile files
        what = str(error) if type(error) in (ValueError, NotImplementedError) else f"{type(error).__name__}: {error}"
        kind = ConversionError if isinstance(error, NotImplementedError | MemoryError) else MetadataError
        raise kind(storage.scrub(f"{path} cannot be read: {what}")) from storage.cause(error)


class FileRange(io.RawIOBase):
    """A range of a file as a file object."""

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
        """Reads exactly ``size`` bytes. If fewer are left, raises `EOFError` before it allocates memory."""
        left = max(0, self._nbytes - self._position)
        if size > left:
            raise EOFError(f"{size:,} bytes must follow, got {left:,}")
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
    if view.objects:
        key = next(iter(view.objects))
        others = len(view.objects) - 1
        what = f"{key!r} and {others:,} more are not tensors" if others else f"{key!r} is not a tensor"
        raise ConversionError(
            f"{what}, and {format_name} holds only tensors. Leave {'them' if others else 'it'} out with exclude "
            f"(--exclude), or choose keys with include (--include)."
        )


def tensors_at_once(tensors: Iterable[StoredTensor]) -> int:
    """Returns how many tensors may be in memory at once: the number of threads that read them."""
    largest = max((tensor.nbytes for tensor in tensors), default=1)
    return max(1, min(4, cores(), _IN_MEMORY // max(1, largest)))
