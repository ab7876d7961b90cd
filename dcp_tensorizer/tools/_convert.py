"""Converts checkpoints to other formats and back."""

from __future__ import annotations

import fnmatch
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from .._runtime.forks import free_in_child
from .._runtime.validation import check_type, did_you_mean
from .._tensor_file.regions import Region
from ..errors import ConversionError, ReadError, WriteError
from . import FORMATS
from ._formats.common import ConvertOptions, check_options
from ._formats.registry import TARGETS, new_paths, open_checkpoint
from ._view import CheckpointView, StoredTensor, StoredValue, key_of

if TYPE_CHECKING:
    from .._tensor_file.encryption import DecryptionParams

_Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class Converted:
    """The result of a conversion.

    Attributes:
        source_format: The source's format, one of `FORMATS`.
        tensors: Number of converted tensors.
        objects: Number of converted objects.
        nbytes: Bytes of the converted tensors, each counted once.
        seconds: The time taken.
    """

    source_format: str
    tensors: int
    objects: int
    nbytes: int
    seconds: float


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    *,
    options: ConvertOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    encryption: DecryptionParams | None = None,
    on_progress: _Progress = lambda done, total: None,
) -> Converted:
    """Converts a checkpoint between any two of the `FORMATS`. A failed conversion leaves no result at the target.

    Args:
        source: A checkpoint of this package or of torch's DCP, a tensorizer file, a safetensors file, a directory of
            safetensors files, or a ``torch.save`` file of torch 1.6 or newer; a local path, or any URL that fsspec
            opens.
        target: A local path or URL. Nothing may exist there, except an empty directory if the format writes a
            directory. Links are followed. ``dcp_tensorizer``, ``dcp``, and ``tensorizer`` with ``tensor_parallel``
            write a directory; ``torch``, and ``tensorizer`` otherwise, a file. ``safetensors`` writes a file if the
            name ends in ``.safetensors``, and otherwise a directory in Hugging Face's layout.
        to: The target's format.
        options: What to convert, and how.
        storage_options: Options of the storages of source and target, such as credentials.
        encryption: The key of an encrypted source (`tensorizer.DecryptionParams`). The target is not encrypted.
        on_progress: Called with the bytes converted so far, and the total: `Converted.nbytes`. Several threads call it,
            one at a time.

    Raises:
        TypeError: ``options`` is not an instance of `ConvertOptions`.
        ConversionError: the conversion is not possible as requested: for example, ``target`` exists, an option is
            invalid, or the format cannot hold a value (the message names its key).
        NotCommitted: there is no checkpoint at ``source``.
        DecryptionError: the key is missing, wrong, or given for a ``source`` that is not encrypted.
        UntrustedObject: loading an object would run code.
        CheckpointError: ``source`` is damaged or cannot be read, or ``target`` cannot be written.
    """
    started = time.monotonic()
    options = ConvertOptions() if options is None else check_type("options", options, ConvertOptions)
    for name in (to, *filter(None, [options.source_format])):
        if name not in FORMATS:
            raise ConversionError(
                f"the format must be one of {', '.join(FORMATS)}, got {name!r}{did_you_mean([str(name)], FORMATS)}"
            )
    check_options(options, to, os.fspath(target))
    view = open_checkpoint(source, storage_options or {}, options.source_format, encryption)
    source_format = view.format
    view = _select(view, options)
    check, write = TARGETS[to]
    check(view, options)
    try:
        write(_with_progress(view, on_progress), os.fspath(target), storage_options or {}, options)
    except WriteError as error:
        if isinstance(error.__cause__, ReadError):  # raised by reading the source
            raise error.__cause__ from error.__cause__.__cause__
        raise
    return Converted(source_format, len(view.tensors), len(view.objects), view.nbytes, time.monotonic() - started)


def _select(view: CheckpointView, options: ConvertOptions) -> CheckpointView:
    def is_in(key: str, patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)

    selected = [key for key in view.paths if is_in(key, options.include or "*") and not is_in(key, options.exclude)]
    if not selected:
        excluded = f" and does not match {' or '.join(options.exclude)}" if options.exclude else ""
        raise ConversionError(f"{view.path} has no key that matches {' or '.join(options.include) or '*'}{excluded}.")
    paths = new_paths({key: view.values[key].path for key in selected}, options, view.path)
    values: dict[str, StoredValue] = {}
    for key, path in paths.items():
        value = view.values[key]
        if isinstance(value, StoredTensor):
            value = _cast(value, options.dtype)
        elif value.fault:
            raise ConversionError(f"{view.path}: {key!r} {value.fault}, and cannot be converted. Leave it out.")
        named = value if path == value.path else replace(value, key=key_of(path), path=path)
        values[named.key] = named
    return replace(view, values=values)


def _cast(tensor: StoredTensor, dtype: torch.dtype | None) -> StoredTensor:
    if dtype is None or not tensor.dtype.is_floating_point or tensor.dtype == dtype:
        return tensor

    def read(region: Region) -> torch.Tensor:
        return tensor.read(region).to(dtype)

    try:
        torch.empty(1, dtype=tensor.dtype, device="cpu").to(dtype)
    except NotImplementedError:
        raise ConversionError(
            f"{tensor.key!r} has dtype {tensor.dtype}, which torch cannot convert to {dtype}. Leave it out."
        ) from None
    return replace(tensor, dtype=dtype, read=read, chunks=())


def _with_progress(view: CheckpointView, on_progress: _Progress) -> CheckpointView:
    total = view.nbytes
    counting = free_in_child(threading.Lock())
    done = 0

    def counted(tensor: StoredTensor) -> StoredTensor:
        def read(region: Region) -> torch.Tensor:
            nonlocal done
            value = tensor.read(region)
            with counting:
                done += value.nbytes
                on_progress(min(done, total), total)
            return value

        return replace(tensor, read=read)

    return replace(view, values=dict(view.values) | {key: counted(tensor) for key, tensor in view.tensors.items()})
