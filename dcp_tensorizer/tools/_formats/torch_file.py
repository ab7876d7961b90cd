"""Reads and writes the files of ``torch.save`` without ever having a whole file in memory.

Such a file is a zip archive: a pickle of the state dict, and a record with each tensor's elements. With fake tensors,
``torch.load`` gives the locations of these records instead of reading them, and ``torch.save`` makes an archive in
which they are empty space. The other parts of that archive are copied to the result, which Python's zipfile writes: it
does not seek, and computes the CRC-32s.
"""

from __future__ import annotations

import bisect
import functools
import io
import math
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
from ..._loading.run import copy_elements
from ..._publish.model import written_file
from ..._runtime.forks import free_in_child
from ..._runtime.torch_compat import NEVER_FAKE, FakeTensor, FakeTensorMode, checkpoint_offset, flatten_state_dict
from ..._storage.base import Storage
from ..._tensor_file.dtypes import host_bytes, named_dtype
from ..._tensor_file.regions import Region, part_of
from ..._trust.objects import load_object, unsafe_globals
from ..._trust.torch_archive import check_saved
from ...errors import ConversionError, UntrustedObject, WriteError
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

_ALIGNMENT = 64  # tensors in the file are aligned as torch.save aligns them
_NOT_LOCATED = "a sparse, quantized or nested tensor, or one without data"
# The bytes before an entry's data in a zip file, without its name: a header, the beginning of the extra field with our
# padding, and one for 64-bit sizes. Readers skip extra fields with unknown tags.
_BEFORE_DATA = 30 + 4 + 20
_PADDING_TAG = 0x4246


# --- reading ----------------------------------------------------------------------------------------------------------


def read(storage: Storage, name: str) -> CheckpointView:
    """The contents of a file with a state dict.

    Raises `UntrustedObject` if it would need code to run, and `ConversionError` if it cannot be read or has no state
    dict.
    """
    path = f"{storage.path}/{name}"
    nbytes = storage.head(name) or 0
    with naming(storage, path), storage.reading(name) as reader:
        state = load_fake(FileRange(reader, 0, nbytes), nbytes, path)
    if not isinstance(state, dict):
        raise ConversionError(f"{path} holds a {type(state).__name__}, not a state dict")
    with naming(storage, path):
        check_size(state)
        values, paths = flatten_state_dict(state)
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
    """Makes the tensor at a path from one of `load_fake`, whose ``torch.save`` bytes begin at ``start`` in a file.

    Raises `ConversionError` if its elements are not plain bytes.
    """
    if not is_located(tensor):
        message = f"{key_of(path)!r} in {storage.path}/{file} is {_NOT_LOCATED}, which cannot be converted"
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

    return replace(stored, read=read_resolved, chunks=())


LAST_STRIDED: list[tuple[Piece, torch.Tensor]] = []
"""The last tensor that was read whole because its elements are not stored in C order, until its last block is read."""
_STRIDED_LOCK = free_in_child(threading.Lock())
_RUN = 32 << 20  # bytes of a file to read at once for elements that are not adjacent


def _read_strided(storage: Storage, piece: Piece, strides: Sequence[int], region: Region) -> torch.Tensor:
    """Reads a region of a tensor that has these strides in a file: reads the whole tensor, once for all its blocks."""
    with _STRIDED_LOCK:
        elements = LAST_STRIDED[0][1] if LAST_STRIDED and LAST_STRIDED[0][0] is piece else None
        LAST_STRIDED.clear()  # first, so that two are never in memory
        if elements is None:
            elements = _read_whole(storage, piece, strides)
        if any(a + n != extent for a, n, extent in zip(region.start, region.size, piece.shape, strict=True)):
            LAST_STRIDED.append((piece, elements))
    part = empty(region.size, elements.dtype)
    copy_elements(part, part_of(elements, region, piece.part))
    return part


def _read_whole(storage: Storage, piece: Piece, strides: Sequence[int]) -> torch.Tensor:
    run = run_of(piece.item)
    dtype = named_dtype(piece.item.dtype)

    def read_run(start: int, count: int) -> torch.Tensor:
        return read_region(storage, piece.item.name, dtype, [run], Region((start,), (count,)), verify=False)

    def gather(target: torch.Tensor, first: int) -> None:
        """Reads elements that are not adjacent, in runs: by halves, quarters, and so on."""
        extents = [(n - 1) * step for n, step in zip(target.shape, strides, strict=True)]
        count = 1 + sum(extents)
        if count * target.itemsize <= _RUN:
            copy_elements(target, read_run(first, count).as_strided(target.shape, strides, 0))
            return
        dim = max(range(len(extents)), key=extents.__getitem__)
        half = target.shape[dim] // 2
        gather(target.narrow(dim, 0, half), first)
        gather(target.narrow(dim, half, target.shape[dim] - half), first + half * strides[dim])

    if run.shape[0] <= math.prod(piece.shape):
        return read_run(0, run.shape[0]).as_strided(piece.shape, strides, 0)
    # For example a few columns of a large matrix: only these stay in memory, not the bytes between them.
    elements = empty(piece.shape, dtype)
    gather(elements, 0)
    return elements


# --- writing ----------------------------------------------------------------------------------------------------------


def check(view: CheckpointView, options: ConvertOptions) -> None:
    """Raises `ConversionError` for keys that are not one nested state dict."""
    check_paths(view)
    check_lists(view)


def write(
    view: CheckpointView,
    path: str,
    storage_options: Mapping[str, Any],
    options: ConvertOptions,
    block_bytes: int = BLOCK,
) -> None:
    """Writes a nested state dict of everything; tensors are read in blocks.

    Raises `UntrustedObject` if an object would need code to run, and `ConversionError` if an object holds tensors.
    """
    with new_file(path, storage_options) as (storage, name):
        records = _records(view)
        with written_file(storage, name, archive_size(records)) as write_piece:
            _write_archive(records, _Output(write_piece), block_bytes)


def _records(view: CheckpointView) -> dict[str, bytes | StoredTensor]:
    """The records of the archive in order, with their bytes or the tensor whose elements they are."""
    with FakeTensorMode():
        fakes = {
            key: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for key, tensor in view.tensors.items()
        }
    paths = view.paths
    values = {key: fakes[key] if key in fakes else _loaded(view.objects[key], view.path) for key in paths}
    state = nested(values, paths)
    # torch numbers the records of tensors in the order in which it pickles them.
    keys = {id(fake): key for key, fake in fakes.items()}
    tensors = {f"archive/data/{n}": view.tensors[keys[id(fake)]] for n, fake in enumerate(tensors_in(state))}
    # The file is sparse, so that the space for the tensors takes none. The archive contains its own name, here the one
    # that torch gives to streams.
    with tempfile.TemporaryDirectory(prefix="dcp_tensorizer-") as folder:
        try:
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save(state, f"{folder}/archive")
        except (RuntimeError, OSError) as error:  # a full disk is a RuntimeError there
            raise WriteError(
                f"cannot write the frame of the archive to {tempfile.gettempdir()} (TMPDIR says where): {error}"
            ) from error
        with zipfile.ZipFile(f"{folder}/archive") as template:
            # A record of this name would promise that the places of records follow from their sizes.
            names = [name for name in template.namelist() if name != "archive/.format_version"]
            return {name: tensors[name] if name in tensors else template.read(name) for name in names}


def _loaded(stored: StoredObject, path: str) -> Any:
    """Loads an object that becomes part of the state dict."""
    try:
        value = load_object(stored.read())
    except UntrustedObject as error:
        raise UntrustedObject(
            f"{stored.key!r} in {path} could run code when it is loaded: {error}. It must be loaded to become part of "
            f"a torch.save file: leave it out"
        ) from None
    if tensors_in(value):  # their elements would not be written
        raise ConversionError(
            f"{stored.key!r} in {path} is a {type(value).__name__} with tensors in it, which cannot be converted: "
            f"leave it out, or load and save it"
        )
    return value


class _Output:
    """A file that is written from front to back, or of which only the size is computed."""

    def __init__(self, write_piece: Callable[[memoryview], None] | None = None) -> None:
        self.write_piece = write_piece
        self.position = 0

    def write(self, data: bytes | memoryview) -> int:
        piece = memoryview(data)
        if self.write_piece is not None:
            self.write_piece(piece)
        self.position += piece.nbytes
        return piece.nbytes

    def tell(self) -> int:
        return self.position

    def flush(self) -> None:
        """Does nothing: there is no buffer."""


def archive_size(records: Mapping[str, bytes | StoredTensor]) -> int:
    """The size of the archive of some records, without reading tensors."""
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
            if isinstance(content, StoredTensor):  # of which nothing is written if only the size is computed
                entry.file_size = entry.compress_size = content.nbytes


# --- loading with fake tensors, which have a location in the file -----------------------------------------------------


def load_fake(file: FileRange, nbytes: int, path: str) -> Any:
    """Loads ``torch.save`` bytes with fake tensors; `is_located` returns which of them have a location in the file.

    Raises `UntrustedObject`, with the file's path, if it would need code to run, and any other error if it is damaged.
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
        # What `_Unpickler` replaces is not called: torch 2.15 no longer trusts the function that makes nested tensors.
        needed = [name for name in unsafe_globals(buffered) if name not in NEVER_FAKE]
    except UntrustedObject:  # not what torch.save writes
        raise refused from None
    if needed:
        raise UntrustedObject(
            f"{path} could run code when it is loaded ({', '.join(needed)}), and was not loaded: if you trust it, "
            f"load it with torch.load(weights_only=False), and save its state dict"
        )
    return _load(buffered, records, weights_only=False)


def _load(file: IO[bytes], records: Sequence[tuple[int, int]], *, weights_only: bool) -> Any:
    """Raises `ValueError` unless the bytes of all tensors lie within records of their file."""
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
            raise ValueError(f"a tensor claims to have {nbytes:,} bytes, more than are stored")
    return value


class _Unpickler(pickle.Unpickler):
    """Makes tensors on the meta device in place of those that torch cannot make as fake ones, such as sparse ones."""

    def find_class(self, module: str, name: str) -> Any:
        return _stand_in if f"{module}.{name}" in NEVER_FAKE else super().find_class(module, name)


def _stand_in(*arguments: Any) -> torch.Tensor:
    return torch.empty(0, device="meta")


def is_located(value: Any) -> bool:
    """Returns whether a value of `load_fake` is a tensor whose elements lie in the file, as plain bytes."""
    is_strided = isinstance(value, FakeTensor) and value.layout is torch.strided
    return is_strided and not value.is_quantized and not value.is_meta


class _TensorFinder(pickle.Pickler):
    """Finds tensors wherever a pickle would contain them."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.tensors: list[Any] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor | torch.UntypedStorage | torch.storage.TypedStorage):
            return None
        self.tensors.append(value)
        return 0


def tensors_in(value: Any) -> Sequence[Any]:
    """The tensors anywhere in a value, in the order in which they are pickled."""
    finder = _TensorFinder()
    finder.dump(value)
    return finder.tensors


# --- nesting flat keys, checked in both directions --------------------------------------------------------------------

_MAX_VALUES = 10_000_000


def nested(values: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[Any, Any]:
    """A nested state dict of values at their paths; no path may lead through another's value."""
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
    """The paths that DCP makes of a state dict, but with the dicts' own keys if those are not strings."""
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
    """Raises `ValueError` if a nested state dict has too many values, counting a container at each reference, or has a
    cycle.

    Each container is visited once, so that containers with many references to each other take no time here. Flattening
    the state dict would take long.
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
    """Raises `ConversionError` unless all keys are one state dict: none below a value, each container a dict or a
    list.
    """
    is_list: dict[Path, bool] = {(): False}
    for key, path in view.paths.items():
        for depth, part in enumerate(path):
            if is_list.setdefault(path[:depth], type(part) is int) != (type(part) is int):
                raise ConversionError(f"{key!r} would be in a dict that is a list for other keys: leave it out")
    for key, path in view.paths.items():
        if path in is_list:
            raise ConversionError(f"{key!r} cannot be a value, and hold the values of other keys, too: leave it out")


def check_names(view: CheckpointView) -> None:
    """Raises `ConversionError` for dict keys that are not strings: DCP has only names for them."""
    for key, path in view.paths.items():
        for part in path:
            if isinstance(part, NonStringKey):
                raise ConversionError(
                    f"{key!r} is below {part.value!r} in a dict, a key of type {type(part.value).__name__} that would "
                    f"become a string: leave it out, or convert to torch"
                )


def check_lists(view: CheckpointView) -> None:
    """Raises `ConversionError` for partial lists: flattening them again would give other keys."""
    paths = view.paths
    for (
        key,
        path,
    ) in paths.items():  # checked before a huge list is made: a whole one has no more members than there are keys
        if any(type(part) is int and part >= len(paths) for part in path):
            raise _partial_list(key)
    values = dict.fromkeys(view.objects) | {key: torch.empty(0, device="meta") for key in view.tensors}
    try:
        flat, _ = flatten_state_dict(nested(values, paths))
    except ValueError as error:
        raise ConversionError(f"two keys of {view.path} would be one: {error}") from error
    if odd := sorted(flat.keys() ^ values.keys()):
        raise _partial_list(odd[0])


def _partial_list(key: str) -> ConversionError:
    return ConversionError(f"{key!r} belongs to a list that is only partly selected: convert all of it, or nothing")
