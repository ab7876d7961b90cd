"""Reads and writes the files of ``torch.save``, a file or a part of one, without ever having one in memory.

The file is a zip archive: a pickle of the state dict, and a record with each tensor's elements. With fake tensors,
``torch.load`` says where these records lie instead of reading them, and ``torch.save`` makes an archive in which they
are only room. What else is in that archive becomes part of the result, which Python's zipfile writes: it needs no
seeking, and makes the CRC-32s.
"""

from __future__ import annotations

import bisect
import io
import pickle
import struct
import tempfile
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import IO, Any

import torch

from ..._format.tensor_bytes import host_bytes
from ..._index.chunks import Region
from ..._runtime.torch_compat import NEVER_FAKE, FakeTensor, FakeTensorMode, checkpoint_offset, flatten_state_dict
from ..._storage.base import Storage
from ..._unpickle.inert import check_saved
from ..._unpickle.objects import load_object, unsafe_globals
from ...errors import ConversionError, UntrustedObject, WriteError
from .._atomic_output import new_file, written_file
from .._view import (
    BLOCK,
    CheckpointView,
    NonStringKey,
    Path,
    StoredObject,
    StoredTensor,
    StoredValue,
    blocks_of,
    plain_tensor,
    refused,
)
from .common import FileRange, Options, open_file

_ALIGNMENT = 64  # of tensors in the file, as torch.save has it
_NOT_LOCATED = "a sparse, quantized or nested tensor, or one without data"
# What precedes an entry's data in a zip file beside its name: a header, the beginning of the extra field with our
# padding, and one for 64-bit sizes. Readers skip extra fields whose tag they do not know.
_BEFORE_DATA = 30 + 4 + 20
_PADDING_TAG = 0x4246


# --- reading -------------------------------------------------------------------------------------------------------


def read(storage: Storage, name: str) -> CheckpointView:
    """The contents of a file with a state dict.

    Raises:
        UntrustedObject: it would need code to run.
        ConversionError: it cannot be read, or holds no state dict.
    """
    path = f"{storage.path}/{name}"
    nbytes = storage.head(name) or 0
    with open_file(storage, name) as reader:
        state = load_fake(FileRange(reader, 0, nbytes), nbytes, path)
    if not isinstance(state, dict):
        raise ConversionError(f"{path} holds a {type(state).__name__}, not a state dict")
    try:
        check_size(state)
        values, paths = flatten_state_dict(state)
    except ValueError as error:
        raise ConversionError(f"{path}: {error}") from error
    paths = exact_paths(state, paths)
    stored: dict[str, StoredValue] = {}
    for key, value in values.items():
        place = tuple(paths[key])
        if is_located(value):
            stored[key] = locate(storage, place, value, (name, 0))
        elif isinstance(value, torch.Tensor):
            stored[key] = refused(path, place, f"is {_NOT_LOCATED}")
        elif tensors_in(value):
            stored[key] = refused(path, place, f"is a {type(value).__name__} with tensors in it")
        else:
            stream = io.BytesIO()
            torch.save(value, stream)
            stored[key] = StoredObject(key, place, len(stream.getvalue()), stream.getvalue)
    return CheckpointView(path, "torch", stored)


def locate(storage: Storage, path: Path, tensor: torch.Tensor, place: tuple[str, int]) -> StoredTensor:
    """A tensor of `load_fake`, by where its bytes are.

    Args:
        storage: Where the file is.
        path: In the nested state dict.
        tensor: The fake one.
        place: The file, and where what was loaded begins in it.

    Raises:
        ConversionError: its elements are not plain bytes.
    """
    key = ".".join(map(str, path))
    if not is_located(tensor):
        raise ConversionError(f"{key!r} in {storage.path}/{place[0]} is {_NOT_LOCATED}, which cannot be converted")
    shape = tuple(tensor.shape)
    if not tensor.numel():
        return plain_tensor(storage, path, tensor.dtype, shape, place)
    offset = place[1] + checkpoint_offset(tensor) + int(tensor.storage_offset()) * tensor.itemsize
    strides = None if tensor.is_contiguous() else (tuple(tensor.stride()), 0)
    stored = plain_tensor(storage, path, tensor.dtype, shape, (place[0], offset), strides)
    is_conj, is_neg = tensor.is_conj(), tensor.is_neg()
    if not is_conj and not is_neg:
        return stored

    def read_resolved(region: Region) -> torch.Tensor:
        value = stored.read(region)
        value = value.conj().resolve_conj() if is_conj else value
        return value.neg() if is_neg else value

    return replace(stored, read=read_resolved, chunks=())


# --- writing -------------------------------------------------------------------------------------------------------


def check(view: CheckpointView, options: Options) -> None:
    """Fails for keys that are not one nested state dict."""
    check_paths(view)
    check_lists(view)


def write(
    view: CheckpointView,
    path: str,
    storage_options: Mapping[str, Any],
    options: Options,
    block_bytes: int = BLOCK,
) -> None:
    """Writes a nested state dict of everything, whose tensors are read in blocks.

    Raises:
        UntrustedObject: an object would need code to run.
        ConversionError: an object holds tensors.
    """
    with new_file(path, storage_options) as (storage, name):
        records = _records(view)
        with written_file(storage, name, archive_size(records)) as write_piece:
            _write_archive(records, _Output(write_piece), block_bytes)


def _records(view: CheckpointView) -> dict[str, bytes | StoredTensor]:
    """The records of the archive in order, with their bytes or the tensor that gives them."""
    with FakeTensorMode():
        fakes = {
            key: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for key, tensor in view.tensors.items()
        }
    paths = view.paths
    values = {key: fakes[key] if key in fakes else _loaded(view.objects[key], view.path) for key in paths}
    state = nested(values, paths)
    # torch numbers the records of tensors as it comes across them.
    keys = {id(fake): key for key, fake in fakes.items()}
    tensors = {f"archive/data/{n}": view.tensors[keys[id(fake)]] for n, fake in enumerate(tensors_in(state))}
    # The file is sparse: the room for the tensors takes none. Its name is in it, and is the one that torch gives to a
    # stream.
    with tempfile.TemporaryDirectory(prefix="dcp_tensorizer-") as folder:
        try:
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save(state, f"{folder}/archive")
        except (RuntimeError, OSError) as error:  # a full disk is a RuntimeError there
            raise WriteError(
                f"cannot write the frame of the archive to {tempfile.gettempdir()} (TMPDIR says where): {error}"
            ) from error
        with zipfile.ZipFile(f"{folder}/archive") as template:
            # A record of this name would promise that the place of each record follows from its size.
            names = [name for name in template.namelist() if name != "archive/.format_version"]
            return {name: tensors[name] if name in tensors else template.read(name) for name in names}


def _loaded(stored: StoredObject, path: str) -> Any:
    """An object as it becomes part of the state dict."""
    try:
        value = load_object(stored.read())
    except UntrustedObject as error:
        raise UntrustedObject(
            f"{stored.key!r} in {path} could run code when it is loaded: {error}. It must be loaded to become part of "
            f"a torch.save file: leave it out"
        ) from None
    if tensors_in(value):  # whose elements nothing would fill in
        raise ConversionError(
            f"{stored.key!r} in {path} is a {type(value).__name__} with tensors in it, which cannot be converted: "
            f"leave it out, or load and save it"
        )
    return value


class _Output:
    """A file that is written from front to back, or whose size is only looked for."""

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
        """Nothing is kept back."""


def archive_size(records: Mapping[str, bytes | StoredTensor]) -> int:
    """The size of the archive of some records; no tensor is read."""
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
            if isinstance(content, StoredTensor):  # nothing was written if only the size is looked for
                entry.file_size = entry.compress_size = content.nbytes


# --- loading with fake tensors, which know their place in the file ----------------------------------------------------


def load_fake(file: FileRange, nbytes: int, path: str) -> Any:
    """Loads what ``torch.save`` wrote, with a fake tensor for each tensor; `is_located` says which have their place.

    Raises:
        UntrustedObject: it would need code to run.
        ConversionError: it cannot be read.
    """
    buffered = io.BufferedReader(file)
    try:
        records = check_saved(buffered, nbytes)
    except ValueError as error:
        raise ConversionError(f"{path} cannot be read: {error}") from error
    try:
        return _checked(_load(buffered, weights_only=True), records)
    except OSError:
        raise
    except Exception as error:
        refused = error
    try:
        needed = unsafe_globals(buffered)
    except UntrustedObject:  # not what torch.save writes
        raise ConversionError(f"{path} cannot be read: {type(refused).__name__}: {refused}") from refused
    if needed:
        raise UntrustedObject(
            f"{path} could run code when it is loaded ({', '.join(needed)}), and was not loaded: if you trust it, "
            f"load it with torch.load(weights_only=False), and save its state dict"
        )
    try:
        return _checked(_load(buffered, weights_only=False), records)
    except OSError:
        raise
    except Exception as error:
        raise ConversionError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _load(file: IO[bytes], *, weights_only: bool) -> Any:
    file.seek(0)
    with FakeTensorMode():
        pickling = None if weights_only else SimpleNamespace(__name__="pickle", Unpickler=_Unpickler)
        return torch.load(file, weights_only=weights_only, pickle_module=pickling)


class _Unpickler(pickle.Unpickler):
    """Puts a tensor on the meta device in the place of each that torch cannot make as a fake one: a sparse one, say."""

    def find_class(self, module: str, name: str) -> Any:
        return _stand_in if f"{module}.{name}" in NEVER_FAKE else super().find_class(module, name)


def _stand_in(*arguments: Any) -> torch.Tensor:
    return torch.empty(0, device="meta")


def _checked(value: Any, records: Sequence[tuple[int, int]]) -> Any:
    _check_storages(value, records)
    return value


def _check_storages(value: Any, records: Sequence[tuple[int, int]]) -> None:
    """Checks that the bytes of all tensors lie within records of their file.

    Raises:
        ValueError: some do not.
    """
    for tensor in tensors_in(value):
        if not is_located(tensor) or not tensor.numel():
            continue
        storage = tensor.untyped_storage()
        start = checkpoint_offset(tensor)
        number = bisect.bisect_right(records, (start, 0)) - 1
        if number < 0 or storage.nbytes() > records[number][1]:
            raise ValueError(f"a tensor claims to have {storage.nbytes():,} bytes, more than are stored")


def is_located(value: Any) -> bool:
    """Returns whether a value of `load_fake` is a tensor whose elements lie in the file, as plain bytes."""
    is_strided = isinstance(value, FakeTensor) and value.layout is torch.strided
    return is_strided and not value.is_quantized and not value.is_meta


class _TensorFinder(pickle.Pickler):
    """Looks for tensors wherever a pickle would."""

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
    """A state dict of values at their paths, none of which leads through another's value."""
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
    """The paths that DCP makes of a state dict, with the dicts' keys themselves where those are no strings."""
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
    """Checks how many values there are in a nested state dict, where a container counts as often as it is held.

    Each is looked at once, so that containers which hold each other many times over take no time here; they would where
    the state dict is flattened.

    Raises:
        ValueError: there are too many, or a container holds itself.
    """
    sizes: dict[int, int] = {}  # of containers; 0: it is being counted
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
    """All keys must be one state dict: none below a value, and each container either a dict or a list."""
    is_list: dict[Path, bool] = {(): False}
    for key, path in view.paths.items():
        for depth, part in enumerate(path):
            if is_list.setdefault(path[:depth], type(part) is int) != (type(part) is int):
                raise ConversionError(f"{key!r} would be in a dict that is a list for other keys: leave it out")
    for key, path in view.paths.items():
        if path in is_list:
            raise ConversionError(f"{key!r} cannot be a value, and hold the values of other keys, too: leave it out")


def check_names(view: CheckpointView) -> None:
    """DCP has only names for the keys of dicts."""
    for key, path in view.paths.items():
        for part in path:
            if isinstance(part, NonStringKey):
                raise ConversionError(
                    f"{key!r} is below {part.value!r} in a dict, a key of type {type(part.value).__name__} that would "
                    f"become a string: leave it out, or convert to torch"
                )


def check_lists(view: CheckpointView) -> None:
    """Lists must be whole: of a part of one, flattening the nested state dict would give other keys."""
    paths = view.paths
    for (
        key,
        path,
    ) in paths.items():  # before a list of so many members is made: a whole one has fewer than there are keys
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
