"""Lists the contents of a checkpoint: its tensors with their locations, and its objects."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .._index.schema import SaveRecord
from .._job.steps import StepNames, read_steps, sound
from .._runtime.patterns import matches
from .._storage.base import Storage
from .._storage.open import open_storage
from .._tensor_file.dtypes import dtype_name
from .._tensor_file.names import StoredItem, data_file_rank, is_data_file_name
from .._trust.objects import load_object
from ..errors import (
    CheckpointError,
    ConversionError,
    DecryptionError,
    NotCommitted,
    UnsupportedFormat,
    UntrustedObject,
)
from ._find import of_manager, read_parts_at
from ._formats.registry import open_foreign
from ._view import (
    CheckpointView,
    Path,
    StoredObject,
    StoredTensor,
    data_files,
    record_of,
    unlock_parts,
    view_checkpoint,
)

if TYPE_CHECKING:
    from .._tensor_file.encryption import DecryptionParams

_MAX_SHOWN = 80  # characters of a value
_MAX_READ = 1 << 20  # bytes; the values of larger objects are not shown
_MAX_NAMED = 8  # prefixes of keys in a message
_THREADS = 16


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """A stored chunk of a tensor.

    Attributes:
        offset, shape: The chunk's region in the tensor.
        nbytes: Stored bytes.
        rank: The rank that wrote the chunk; None for an empty chunk, or if the format has no ranks.
        file, file_offset: The location of the first byte; None for an empty chunk.

    In torch's DCP format, each chunk, even an empty one, is stored as a ``torch.save`` archive of ``nbytes`` bytes.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    nbytes: int
    rank: int | None
    file: str | None
    file_offset: int | None


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor. ``dtype`` is torch's name, such as ``bfloat16``.

    If ranks saved contradictory chunks of the tensor, ``chunks`` is empty.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    chunks: tuple[ChunkInfo, ...]


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """A value that is not a tensor.

    Attributes:
        type: The name of the type; ``?`` if the value was not loaded, for example because loading it would need a
            decryption key, or would run code.
        text: The value in at most 80 characters, or the reason why it is not shown.
        value: The value, if it is a bool, a number or a str, and can be shown; otherwise None.
        nbytes: Stored bytes.
        rank, file, file_offset: As in `ChunkInfo`; None if the format is not this package's.
    """

    key: str
    type: str
    text: str
    value: bool | int | float | str | None
    nbytes: int
    rank: int | None
    file: str | None
    file_offset: int | None


@dataclass(frozen=True, slots=True)
class DataFileInfo:
    """A data file of a checkpoint. If the format has no ranks, ``rank`` is None."""

    file: str
    rank: int | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class Total:
    """The totals of several tensors."""

    tensors: int
    elements: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """The contents of a checkpoint.

    Attributes:
        path: The path, without credentials.
        ranks: The number of ranks that wrote data files; None if the format has no ranks.
        files: The data files.
        tensors, objects: The values whose keys match the pattern, in the order of the state dict.
        by_dtype, by_key: Totals of ``tensors``: by dtype, and by the prefix of each key, up to the first component in
            which the keys differ.
        step, metrics: The step and the metrics that a manager recorded.
        best: As in `CheckpointInfo`.
    """

    path: str
    ranks: int | None
    files: tuple[DataFileInfo, ...]
    tensors: tuple[TensorInfo, ...]
    objects: tuple[ObjectInfo, ...]
    by_dtype: Mapping[str, Total]
    by_key: Mapping[str, Total]
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    best: str | None = None


def inspect(
    checkpoint: str | os.PathLike[str],
    pattern: str = "*",
    *,
    storage_options: Mapping[str, Any] | None = None,
    encryption: DecryptionParams | None = None,
) -> Inspection:
    """Lists the contents of a checkpoint: tensors, the location of each chunk, objects, and files.

    Args:
        checkpoint: The checkpoint, of any format that `convert` reads.
        pattern: A shell-style pattern of the keys to list, such as ``model.*.weight``.
        storage_options: Options of a URL's storage, such as credentials.
        encryption: The key of an encrypted checkpoint. Without the key, the values of objects are not shown.

    Raises:
        NotCommitted: there is no checkpoint.
        UnsupportedFormat: the checkpoint has a format or version that this release does not read.
        DecryptionError: the key is wrong, or given for a checkpoint that is not encrypted.
        CheckpointError: the checkpoint is damaged or cannot be read, or ``pattern`` matches nothing in it.
    """
    storage = open_storage(checkpoint, storage_options)
    try:
        parts = read_parts_at(storage)
    except (NotCommitted, UnsupportedFormat):
        if (foreign := open_foreign(checkpoint, storage_options, encryption)) is None:
            raise
        return inspect_view(*foreign, pattern)
    ciphers = {} if encryption is None else unlock_parts(storage, parts, encryption)
    inspected = inspect_view(view_checkpoint(storage, parts, ciphers), data_files(parts), pattern)
    record = record_of(parts)
    if record is None:
        return inspected
    best = _metric_of_best(storage, record, storage_options) if record.metrics else None
    return replace(inspected, step=record.step, metrics=record.metrics, best=best)


def _metric_of_best(storage: Storage, record: SaveRecord, options: Mapping[str, Any] | None) -> str | None:
    """Returns the metric by which a checkpoint is the best in its manager's folder; None for any other checkpoint."""
    folder, _, name = storage.location.rstrip("/").rpartition("/")
    numbers = [number for number in re.finditer(r"\d+", name) if int(number[0]) == record.step]
    if not numbers:
        return None
    with suppress(CheckpointError, ValueError):  # the folder cannot be read, or is not a manager's
        names = StepNames(f"{name[: numbers[-1].start()]}{{}}{name[numbers[-1].end() :]}")
        rules, steps = of_manager(sound(read_steps(open_storage(folder, options), names)))
        best = rules.best(steps)
        return rules.metric if best is not None and best.name == name else None
    return None


def inspect_view(view: CheckpointView, files: Mapping[str, int], pattern: str = "*") -> Inspection:
    """Lists the values whose keys match a shell-style pattern, in which ``*`` also matches dots.

    ``files`` maps the names of the data files to their sizes.
    """
    tensors = [t for t in view.tensors.values() if matches((t.key,), (pattern,))]
    objects = [o for o in view.objects.values() if matches((o.key,), (pattern,))]
    if pattern != "*" and not (tensors or objects):
        begins = list(dict.fromkeys(map(repr, _groups(list(view.paths.values())))))
        shown = ", ".join(begins[:_MAX_NAMED]) + (", ..." if len(begins) > _MAX_NAMED else "")
        why = f"its keys begin with {shown}" if begins else "it has no keys"
        raise CheckpointError(f"{view.path} has no key that matches {pattern!r}: {why}")
    with ThreadPoolExecutor(_THREADS) as pool:
        described = tuple(pool.map(_object, objects))
    return Inspection(
        view.path,
        len({_rank(name) for name in files}) if view.format == "dcp_tensorizer" else None,
        tuple(DataFileInfo(name, _rank(name), size) for name, size in sorted(files.items())),
        tuple(
            TensorInfo(
                tensor.key,
                tensor.shape,
                dtype_name(tensor.dtype),
                tensor.nbytes,
                tuple(
                    ChunkInfo(chunk.part.start, chunk.part.size, chunk.item.length, *_location(chunk.item))
                    for chunk in tensor.chunks
                ),
            )
            for tensor in tensors
        ),
        described,
        _totals((dtype_name(t.dtype), t) for t in tensors),
        _totals(zip(_groups([t.path for t in tensors]), tensors, strict=True)),
    )


def shown_value(content: bytes) -> tuple[str, str, bool | int | float | str | None]:
    """Describes an object from its ``torch.save`` bytes, without running code from them.

    Returns ``type``, ``text`` and ``value`` of `ObjectInfo`.
    """
    try:
        value = load_object(content)
    except UntrustedObject as error:
        return "?", f"could run code when it is loaded: {error}", None
    except Exception as error:
        return "?", f"cannot be loaded here: {type(error).__name__}: {error}", None
    try:
        text = repr(value)
    except Exception as error:  # Python does not write ints of more than 4,300 digits
        return type(value).__qualname__, f"cannot be shown: {type(error).__name__}", None
    short = text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
    return type(value).__qualname__, short, value if type(value) in (bool, int, float, str) else None


def _object(stored: StoredObject) -> ObjectInfo:
    try:
        too_large = stored.nbytes > _MAX_READ
        shown = ("?", "too large to be shown", None) if too_large else shown_value(stored.read())
    except DecryptionError:
        shown = "?", "encrypted", None
    except ConversionError as error:  # a value of another format that cannot be read
        shown = "?", str(error), None
    return ObjectInfo(stored.key, *shown, stored.nbytes, *_location(stored.item))


def _location(item: StoredItem | None) -> tuple[int | None, str | None, int | None]:
    return (_rank(item.file), item.file, item.offset) if item is not None and item.file else (None, None, None)


def _rank(file: str) -> int | None:
    return data_file_rank(file) if is_data_file_name(file) else None


def _totals(named: Iterable[tuple[str, StoredTensor]]) -> dict[str, Total]:
    by_name: dict[str, list[StoredTensor]] = defaultdict(list)
    for name, tensor in named:
        by_name[name].append(tensor)
    return {
        name: Total(len(some), sum(t.nbytes // t.dtype.itemsize for t in some), sum(t.nbytes for t in some))
        for name, some in by_name.items()
    }


def _groups(paths: list[Path]) -> list[str]:
    """Returns the prefix of each path, down to the first level at which the paths differ."""
    depth = 1
    while len({path[:depth] for path in paths}) == 1 and all(len(path) > depth + 1 for path in paths):
        depth += 1
    return [".".join(map(str, path[:depth])) for path in paths]
