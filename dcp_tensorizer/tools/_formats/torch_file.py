"""Reads and writes ``torch.save`` files without holding a whole file in memory.

Such a file is a zip archive with a pickle of the state dict and a record per storage, which tensors may share. With
fake tensors, ``torch.load`` returns the locations of the records instead of reading them, and ``torch.save`` writes a
temporary archive in which these records are empty. This module copies the other records from that archive, and reads
the tensors in blocks. It writes the result with Python's zipfile, which computes the CRC-32s and does not need to seek.
"""

from __future__ import annotations

import bisect
import functools
import io
import pickle
import struct
import tempfile
import threading
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import IO, Any

import torch

from ..._formats.catalog import Piece
from ..._formats.torch_archive import check_saved
from ..._loading.run import copy_elements
from ..._publish.model import written_file
from ..._runtime.forks import free_in_child
from ..._runtime.torch_compat import NEVER_FAKE, FakeTensor, FakeTensorMode, checkpoint_offset, flatten_state_dict
from ..._storage.base import Storage
from ..._tensor_file.dtypes import host_bytes, named_dtype
from ..._tensor_file.regions import Region, part_of
from ..._trust.objects import load_object, loading_object, unsafe_globals
from ...errors import ConversionError, UntrustedObject, WriteError, describe
from .._atomic_output import new_file
from .._view import (
    BLOCK,
    CheckpointView,
    NonStringKey,
    Path,
    StoredObject,
    StoredTensor,
    StoredValue,
    blocks_of,
    empty,
    key_of,
    plain_tensor,
    read_region,
    refused,
    run_of,
)
from .common import ConvertOptions, FileRange, naming

_ALIGNMENT = 64  # bytes, as in torch.save
_NOT_LOCATED = "a sparse, quantized, nested or meta tensor"
# The bytes before an entry's data in a zip file, without name and padding: the header (30), the head of the extra field
# that pads (4), and the extra field for 64-bit sizes (20). Readers skip extra fields with unknown tags.
_BEFORE_DATA = 30 + 4 + 20
_PADDING_TAG = 0x4246


# --- reading ----------------------------------------------------------------------------------------------------------


def read(storage: Storage, name: str) -> CheckpointView:
    path = f"{storage.path}/{name}"
    nbytes = storage.head(name) or 0
    with naming(storage, path), storage.reading(name) as reader:
        state = load_fake(FileRange(reader, 0, nbytes), nbytes, path)
    if not isinstance(state, dict):
        raise ConversionError(f"{path} must hold a state dict, got {type(state).__name__}.")
    try:
        check_size(state)
        values, paths = flatten_state_dict(state)
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{path} cannot be converted: {error}") from error
    paths = exact_paths(state, paths)
    stored: dict[str, StoredValue] = {}
    for key, value in values.items():
        at = tuple(paths[key])
        if is_located(value):
            stored[key] = locate(storage, at, value, name)
        elif isinstance(value, torch.Tensor):
            stored[key] = refused(path, at, f"is {_NOT_LOCATED}")
        elif tensors_in(value):
            stored[key] = refused(path, at, f"is a {type(value).__name__} with tensors in it")
        else:
            stream = io.BytesIO()
            torch.save(value, stream)
            stored[key] = StoredObject(key, at, len(stream.getvalue()), stream.getvalue)
    return CheckpointView(path, "torch", stored)


def locate(storage: Storage, path: Path, tensor: torch.Tensor, file: str, start: int = 0) -> StoredTensor:
    """Makes a stored tensor from one that `load_fake` has loaded. The loaded bytes begin at ``start`` in the file."""
    if not is_located(tensor):
        message = f"{key_of(path)!r} in {storage.path}/{file} is {_NOT_LOCATED}, and cannot be converted. Leave it out."
        raise ConversionError(message)
    shape = tuple(tensor.shape)
    if not tensor.numel():
        return plain_tensor(storage, path, tensor.dtype, shape, file, start)
    offset = start + checkpoint_offset(tensor) + int(tensor.storage_offset()) * tensor.itemsize
    stored = plain_tensor(storage, path, tensor.dtype, shape, file, offset)
    if not tensor.is_contiguous():
        strides = tuple(tensor.stride())
        count = 1 + sum((extent - 1) * step for extent, step in zip(shape, strides, strict=True))
        (piece,) = stored.chunks
        piece = piece._replace(item=piece.item._replace(length=count * tensor.itemsize))
        stored = replace(stored, read=functools.partial(_read_strided, storage, piece, strides), chunks=(piece,))
    is_conj, is_neg = tensor.is_conj(), tensor.is_neg()
    if not is_conj and not is_neg:
        return stored

    def read_resolved(region: Region) -> torch.Tensor:
        value = stored.read(region)
        value = value.conj().resolve_conj() if is_conj else value
        return value.neg() if is_neg else value

    return replace(stored, read=read_resolved)


LAST_STRIDED: list[tuple[Piece, torch.Tensor]] = []
"""The last tensor that was read whole because it is not stored in C order. Cleared once its last block is read."""
_STRIDED_LOCK = free_in_child(threading.Lock())
_RUN = 32 << 20  # bytes of a file to read at once for elements that are not adjacent


def _read_strided(storage: Storage, piece: Piece, strides: Sequence[int], region: Region) -> torch.Tensor:
    """Reads a region of a tensor with these strides in its file, by reading the whole tensor once for all blocks."""
    with _STRIDED_LOCK:
        elements = LAST_STRIDED[0][1] if LAST_STRIDED and LAST_STRIDED[0][0] is piece else None
        LAST_STRIDED.clear()  # before reading, so that memory never holds two such tensors
        if elements is None:
            elements = _read_whole(storage, piece, strides)
        if region == piece.part:
            return elements
        if any(a + n != extent for a, n, extent in zip(region.start, region.size, piece.shape, strict=True)):
            LAST_STRIDED.append((piece, elements))
    part = empty(region.size, elements.dtype)
    copy_elements(part, part_of(elements, region, piece.part))
    return part


def _read_whole(storage: Storage, piece: Piece, strides: Sequence[int]) -> torch.Tensor:
    """Reads a tensor in slices of the dimension with the largest stride. Skips the bytes between slices."""
    run, dtype = run_of(piece.item), named_dtype(piece.item.dtype)
    elements = empty(piece.shape, dtype)
    dim = max(range(len(strides)), key=strides.__getitem__)
    step = max(1, _RUN // max(1, strides[dim] * dtype.itemsize))
    for first in range(0, piece.shape[dim], step):
        part = elements.narrow(dim, first, min(step, piece.shape[dim] - first))
        count = 1 + sum((n - 1) * stride for n, stride in zip(part.shape, strides, strict=True))
        region = Region((first * strides[dim],), (count,))
        stored = read_region(storage, piece.item.name, dtype, [run], region, verify=False)
        copy_elements(part, stored.as_strided(part.shape, strides, 0))
    return elements


# --- writing ----------------------------------------------------------------------------------------------------------


def check(view: CheckpointView, options: ConvertOptions) -> None:
    check_paths(view)
    check_lists(view)


def write(
    view: CheckpointView,
    path: str,
    storage_options: Mapping[str, Any],
    options: ConvertOptions,
    block_bytes: int = BLOCK,
) -> None:
    with new_file(path, storage_options) as (storage, name):
        records = _records(view)
        with written_file(storage, name, archive_size(records)) as write_piece:
            _write_archive(records, _Output(write_piece), block_bytes)


def _records(view: CheckpointView) -> dict[str, bytes | StoredTensor]:
    """Returns the records of the archive by name, in order: the bytes of each, or the tensor that it stores."""
    with FakeTensorMode():
        fakes = {
            key: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for key, tensor in view.tensors.items()
        }
    paths = view.paths
    values = {key: fakes[key] if key in fakes else _loaded(view.objects[key], view.path) for key in paths}
    state = nested(values, paths)
    keys = {id(fake): key for key, fake in fakes.items()}
    # The temporary archive is a sparse file, in which the empty records take no space. An archive contains its own
    # name; "archive" is the name that torch gives to streams.
    with tempfile.TemporaryDirectory(prefix="dcp_tensorizer-") as folder:
        try:
            # torch numbers the records of tensors in the order in which it pickles them.
            tensors = {f"archive/data/{n}": view.tensors[keys[id(fake)]] for n, fake in enumerate(tensors_in(state))}
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save(state, f"{folder}/archive")
        except RecursionError as error:  # an object could be pickled alone, but not inside the state dict
            raise ConversionError(f"{view.path} cannot be converted: its values are nested too deeply.") from error
        except (RuntimeError, OSError) as error:  # torch raises RuntimeError for a full disk
            raise WriteError(
                f"cannot write the temporary archive, which has no tensor data, to {tempfile.gettempdir()}: {error}. "
                f"Set TMPDIR to another folder."
            ) from error
        with zipfile.ZipFile(f"{folder}/archive") as template:
            # The record .format_version would promise that the offsets of records can be computed from their sizes.
            names = [name for name in template.namelist() if name != "archive/.format_version"]
            return {name: tensors[name] if name in tensors else template.read(name) for name in names}


def _loaded(stored: StoredObject, path: str) -> Any:
    """Loads an object, which torch.save can write only as part of the state dict."""
    content = stored.read()
    try:
        with loading_object(stored.key, path):
            value = load_object(content)
    except UntrustedObject as error:
        raise UntrustedObject(
            f"{stored.key!r} in {path} could run code when loaded, and writing a torch.save file requires loading the "
            f"object: {error}. Leave it out."
        ) from None
    try:
        tensors = tensors_in(value)
    except Exception as error:  # for example RecursionError
        raise ConversionError(
            f"{stored.key!r} in {path} cannot be pickled, and so cannot be converted: {describe(error)}. Leave it out."
        ) from error
    if tensors:  # their elements would not be written
        raise ConversionError(
            f"{stored.key!r} in {path} is a {type(value).__name__} with tensors in it, and cannot be converted. "
            f"Leave it out, or load the checkpoint and write the file with torch.save."
        )
    return value


class _Output:
    """A sequential output. Without ``write_piece``, and after a failure, it only counts the bytes."""

    def __init__(self, write_piece: Callable[[memoryview], None] | None = None) -> None:
        self.write_piece = write_piece
        self.position = 0

    def write(self, data: bytes | memoryview) -> int:
        piece = memoryview(data)
        if (write_piece := self.write_piece) is not None:
            self.write_piece = None
            write_piece(piece)
            self.write_piece = write_piece  # not after a failure: zipfile then still closes the record and the archive
        self.position += piece.nbytes
        return piece.nbytes

    def tell(self) -> int:
        return self.position

    def flush(self) -> None:
        """Does nothing: there is no buffer."""


def archive_size(records: Mapping[str, bytes | StoredTensor]) -> int:
    """Returns the size of an archive with these records, without reading tensors."""
    output = _Output()
    _write_archive(records, output, BLOCK)
    return output.position


def _write_archive(records: Mapping[str, bytes | StoredTensor], output: _Output, block_bytes: int) -> None:
    with zipfile.ZipFile(output, "w") as archive:  # type: ignore[call-overload]
        for name, content in records.items():
            entry = zipfile.ZipInfo(name)
            padding = -(output.position + _BEFORE_DATA + len(name.encode())) % _ALIGNMENT
            entry.extra = struct.pack("<HH", _PADDING_TAG, padding) + bytes(padding)
            with archive.open(entry, "w", force_zip64=True) as record:
                if isinstance(content, bytes):
                    record.write(content)
                elif output.write_piece is not None:
                    for region in blocks_of(content, block_bytes):
                        record.write(host_bytes(content.read(region)))
                else:
                    output.position += content.nbytes
            if isinstance(content, StoredTensor):  # zipfile counts no bytes if the archive is only measured
                entry.file_size = entry.compress_size = content.nbytes


# --- loading with fake tensors, which have a location in the file -----------------------------------------------------


def load_fake(file: FileRange, nbytes: int, path: str) -> Any:
    """Loads ``torch.save`` bytes with fake tensors. Those that satisfy `is_located` have a location in the file.

    Raises `UntrustedObject`, with the file's path, if loading would run code, and any other error for a damaged file.
    """
    buffered = io.BufferedReader(file)
    records = check_saved(buffered, nbytes)
    try:
        return _load(buffered, records, weights_only=True)
    except OSError:
        raise
    except Exception as error:
        refused = error
    try:
        # `_Unpickler` never calls the functions in NEVER_FAKE. torch 2.15 no longer allows the one for nested tensors.
        needed = [name for name in unsafe_globals(buffered) if name not in NEVER_FAKE]
    except UntrustedObject:  # not a pickle that torch.save writes
        raise refused from None
    if needed:
        raise UntrustedObject(
            f"{path} could run code when it is loaded ({', '.join(needed)}), and was not loaded. If you trust it, "
            f"load it with torch.load(weights_only=False), and save its state dict."
        )
    return _load(buffered, records, weights_only=False)


def _load(file: IO[bytes], records: Sequence[tuple[int, int]], *, weights_only: bool) -> Any:
    """Loads a value; raises `ValueError` unless the bytes of each tensor lie within a record of the file."""
    file.seek(0)
    with FakeTensorMode():
        pickling = None if weights_only else SimpleNamespace(__name__="pickle", Unpickler=_Unpickler)
        value = torch.load(file, weights_only=weights_only, pickle_module=pickling)
    for tensor in tensors_in(value):
        if not is_located(tensor) or not tensor.numel():
            continue
        nbytes = tensor.untyped_storage().nbytes()
        number = bisect.bisect_right(records, (checkpoint_offset(tensor), 0)) - 1
        if number < 0 or nbytes > records[number][1]:
            raise ValueError(f"a tensor has {nbytes:,} bytes, but no record in the file holds that many at its offset")
    return value


class _Unpickler(pickle.Unpickler):
    """An unpickler that replaces tensors that cannot be fake, such as sparse ones, with meta tensors."""

    def find_class(self, module: str, name: str) -> Any:
        return _stand_in if f"{module}.{name}" in NEVER_FAKE else super().find_class(module, name)


def _stand_in(*arguments: Any) -> torch.Tensor:
    return torch.empty(0, device="meta")


def is_located(value: Any) -> bool:
    """Returns whether a value of `load_fake` is a tensor whose elements are plain bytes in the file."""
    is_strided = isinstance(value, FakeTensor) and value.layout is torch.strided
    return is_strided and not value.is_quantized and not value.is_meta


class _TensorFinder(pickle.Pickler):
    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.tensors: list[Any] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor | torch.UntypedStorage | torch.storage.TypedStorage):
            return None
        self.tensors.append(value)
        return 0


def tensors_in(value: Any) -> Sequence[Any]:
    """Returns all tensors in a value, however nested, in the order in which they are pickled."""
    finder = _TensorFinder()
    finder.dump(value)
    return finder.tensors


# --- nesting flat keys, checked in both directions --------------------------------------------------------------------

_MAX_VALUES = 10_000_000


def nested(values: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[Any, Any]:
    """Builds the nested state dict of values at their paths. No path may be a prefix of another."""
    root: dict[Any, Any] = {}
    for name, value in values.items():
        node: Any = root
        path = paths[name]
        for part, after in zip(path, (*path[1:], None), strict=True):
            child = value if after is None else [] if type(after) is int else {}
            if isinstance(node, list):
                node.extend([None] * (int(part) + 1 - len(node)))
                if after is None or node[int(part)] is None:
                    node[int(part)] = child
                node = node[int(part)]
            else:
                key = part.value if isinstance(part, NonStringKey) else part
                node = node.setdefault(key, child)
    return root


def exact_paths(state: Mapping[Any, Any], paths: Mapping[str, Path]) -> dict[str, Path]:
    """Returns DCP's paths of a state dict, with `NonStringKey` for dict keys that are not strings."""
    keys_of: dict[int, dict[str, Any]] = {}
    exact: dict[str, Path] = {}
    for name, path in paths.items():
        node: Any = state
        parts: list[str | int] = []
        for part in path:
            key: Any = part
            if isinstance(node, Mapping):
                if id(node) not in keys_of:
                    keys_of[id(node)] = {str(key): key for key in node}
                key = keys_of[id(node)][str(part)]
                part = key if isinstance(key, str) else NonStringKey(key)
            parts.append(part)
            node = node[key]
        exact[name] = tuple(parts)
    return exact


def check_size(state: Any) -> None:
    """Raises `ValueError` if a nested state dict has a cycle or more than `_MAX_VALUES` values.

    A container counts once for each reference to it, because flattening visits it each time. This function visits it
    only once, so nested references cannot take exponential time.
    """
    sizes: dict[int, int] = {}  # the sizes of containers; 0 while one is being counted
    left = [(state, False)]
    while left:
        node, is_counted = left.pop()
        members = _members(node)
        if is_counted:
            sizes[id(node)] = 1 + sum(sizes.get(id(member), 1) for member in members)
            if sizes[id(node)] > _MAX_VALUES:
                raise ValueError(f"it holds more than {_MAX_VALUES:,} values")
        elif id(node) not in sizes:
            sizes[id(node)] = 0
            left.append((node, True))
            for member in members:
                if sizes.get(id(member)) == 0:
                    raise ValueError("a container in it contains itself")
                if _members(member):
                    left.append((member, False))


def _members(node: Any) -> Collection[Any]:
    if isinstance(node, Mapping):
        return list(node.values())
    return node if isinstance(node, list | tuple | set | frozenset) else ()


def check_paths(view: CheckpointView) -> None:
    """Raises `ConversionError` if a key is below a value, or if a container would be both a dict and a list."""
    is_list: dict[Path, bool] = {(): False}
    for key, path in view.paths.items():
        for depth, part in enumerate(path):
            if is_list.setdefault(path[:depth], type(part) is int) != (type(part) is int):
                raise ConversionError(
                    f"{key!r} is in a container that would be a dict for some keys and a list for others. Leave it out."
                )
    for key, path in view.paths.items():
        if path in is_list:
            raise ConversionError(f"{key!r} is a value, but other keys are below it. Leave it out.")


def check_names(view: CheckpointView) -> None:
    """Raises `ConversionError` for dict keys that are not strings: DCP would store ``str(key)`` instead."""
    for key, path in view.paths.items():
        for part in path:
            if isinstance(part, NonStringKey):
                raise ConversionError(
                    f"{key!r} is below the dict key {part.value!r} of type {type(part.value).__name__}, which would "
                    f"become a string. Leave it out, or convert to torch."
                )


def check_lists(view: CheckpointView) -> None:
    """Raises `ConversionError` for partial lists, and for two keys that would be equal when flattened again.

    Flattening a partial list would change its keys.
    """
    paths = view.paths
    # Checked before `nested` allocates a huge list: a whole list has no more members than there are keys.
    for key, path in paths.items():
        if any(type(part) is int and part >= len(paths) for part in path):
            raise _partial_list(key)
    values = dict.fromkeys(view.objects) | {key: torch.empty(0, device="meta") for key in view.tensors}
    try:
        flat, _ = flatten_state_dict(nested(values, paths))
    except ValueError as error:
        raise ConversionError(
            f"two keys of {view.path} would get the same name in a flattened state dict ({error}). Leave one out."
        ) from error
    if odd := sorted(flat.keys() ^ values.keys()):
        raise _partial_list(odd[0])


def _partial_list(key: str) -> ConversionError:
    return ConversionError(
        f"{key!r} belongs to a list of which other values are missing. Convert all of the list, or none."
    )
