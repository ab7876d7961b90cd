"""Brings checkpoints into other formats and back, as ``dcp-tensorizer convert`` does.

    from dcp_tensorizer.convert import Options, convert

    convert("checkpoint", "model.tensors", "tensorizer", options=Options(select=["model.*"], strip_prefix="model."))

Shards are put together into whole tensors. Tensors are read when it is their turn to be written, so that the memory
needed is that of the largest one, and not that of the checkpoint.
"""

from __future__ import annotations

import fnmatch
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ._format.chunks import Region
from ._format.encryption import check_decryption
from ._tools.checkpoint_view import CheckpointView, Path, StoredObject, StoredTensor
from ._tools.formats.common import Options
from ._tools.formats.registry import FORMATS, TARGETS, open_checkpoint
from .errors import ConversionError, ReadError, WriteError

if TYPE_CHECKING:
    from ._format.encryption import DecryptionParams

__all__ = ["FORMATS", "Converted", "Options", "convert"]

_Value = TypeVar("_Value", StoredTensor, StoredObject)
_Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class Converted:
    """What was converted: ``nbytes`` are those of the tensors in the new file or files."""

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
    options: Options | None = None,
    storage_options: Mapping[str, Any] | None = None,
    encryption: DecryptionParams | None = None,
    on_progress: _Progress = lambda done, total: None,
) -> Converted:
    """Converts a checkpoint of any of the `FORMATS` into any other; what is at ``target`` then is whole, or nothing.

    Args:
        source: A checkpoint of this package or of torch's DCP, a tensorizer file, a safetensors file or a directory of
            them, or a ``torch.save`` file; a local path, or any URL that fsspec opens.
        target: A path or URL where there is nothing yet. ``dcp_tensorizer``, ``dcp`` and tensor-parallel tensorizer
            files take a directory, ``tensorizer`` and ``torch`` a file, and ``safetensors`` a file if the name ends in
            ``.safetensors``, else a directory as Hugging Face lays it out.
        to: The format.
        options: What to convert, and how.
        storage_options: Passed to the fsspec filesystems of source and target.
        encryption: The key of an encrypted source (`tensorizer.DecryptionParams`). The target is not encrypted.
        on_progress: Called with the bytes that were read and the bytes in all; by several threads, one at a time.

    Raises:
        ConversionError: the format cannot hold what there is, which the message names, or there is something at
            ``target``; nothing was written.
        NotCommitted: there is no checkpoint at ``source``.
        DecryptionError: there is no key, a wrong one, or one too many.
        UntrustedObject: an object would need code to run.
        CheckpointError: ``source`` is damaged, or ``target`` cannot be written; nothing is left there.
    """
    started = time.monotonic()
    options = options or Options()
    if to not in TARGETS:
        raise ConversionError(f"{to!r} is none of the formats {', '.join(FORMATS)}")
    if encryption is not None:
        check_decryption(encryption)
    view = open_checkpoint(source, storage_options or {}, options.source_format, encryption)
    source_format = view.format
    view = _select(view, options)
    TARGETS[to].check(view, options)
    try:
        TARGETS[to].write(_with_progress(view, on_progress), os.fspath(target), storage_options or {}, options)
    except WriteError as error:
        if isinstance(error.__cause__, ReadError):  # it was the source
            raise error.__cause__ from error.__cause__.__cause__
        raise
    return Converted(source_format, len(view.tensors), len(view.objects), view.nbytes, time.monotonic() - started)


def _select(view: CheckpointView, options: Options) -> CheckpointView:
    """What is to be converted, under its new names and in its new dtypes."""
    selected = [key for key in (*view.tensors, *view.objects) if _matches(key, options)]
    prefix = options.strip_prefix
    tensors = {t.key: t for t in (_renamed(view.tensors[k], prefix) for k in selected if k in view.tensors)}
    objects = {o.key: o for o in (_renamed(view.objects[k], prefix) for k in selected if k in view.objects)}
    if not selected:
        raise ConversionError(f"{view.path} has no key that matches {', '.join(options.select)}")
    if len(tensors.keys() | objects.keys()) < len(selected):
        raise ConversionError(f"without the prefix {prefix!r}, two keys of {view.path} are the same")
    if prefix and not any(key.startswith(prefix) for key in selected):
        raise ConversionError(f"no key of {view.path} that is to be converted begins with {prefix!r}")
    for stored in objects.values():
        if stored.is_tensor:
            raise ConversionError(
                f"{stored.key!r} is a tensor of a subclass, which only its own class can take apart: leave it out"
            )
    return replace(view, tensors={k: _cast(tensor, options.dtype) for k, tensor in tensors.items()}, objects=objects)


def _matches(key: str, options: Options) -> bool:
    return not options.select or any(fnmatch.fnmatchcase(key, pattern) for pattern in options.select)


def _renamed(value: _Value, prefix: str) -> _Value:
    if not prefix or not value.key.startswith(prefix):
        return value
    path = _stripped(value.path, prefix)
    if not path or not ".".join(map(str, path)):
        raise ConversionError(f"nothing is left of the key {value.key!r} without the prefix {prefix!r}")
    return replace(value, key=".".join(map(str, path)), path=path)


def _stripped(path: Path, prefix: str) -> Path:
    """What is left of a path whose key begins with ``prefix``; it begins with a key of a dict."""
    while path and prefix.startswith(f"{path[0]}."):
        prefix = prefix.removeprefix(f"{path[0]}.")
        path = path[1:]
    if not path or (not prefix and isinstance(path[0], str)):
        return path
    return (str(path[0]).removeprefix(prefix), *path[1:])


def _cast(tensor: StoredTensor, dtype: torch.dtype | None) -> StoredTensor:
    if dtype is None or not tensor.dtype.is_floating_point or tensor.dtype == dtype:
        return tensor

    def read(region: Region) -> torch.Tensor:
        return tensor.read(region).to(dtype)

    return replace(tensor, dtype=dtype, read=read, chunks=())


def _with_progress(view: CheckpointView, on_progress: _Progress) -> CheckpointView:
    total = view.nbytes
    counting = threading.Lock()
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

    return replace(view, tensors={key: counted(tensor) for key, tensor in view.tensors.items()})
