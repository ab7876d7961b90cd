"""What ``torch.save`` writes, read and written without ever being in memory: a file, or a part of one.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import IO, Any

import torch

from ..._format.chunks import Region
from ..._format.objects import load_object, unsafe_globals
from ..._format.torch_archive import check_archive, check_pickle, is_archive, record
from ..._memory.tensor_bytes import host_bytes
from ..._storage.base import Storage
from ..._torch_compat import FakeTensor, FakeTensorMode, checkpoint_offset, flatten_state_dict
from ...errors import ConversionError, UntrustedObject, WriteError
from ..atomic_output import new_file, written_file
from ..checkpoint_view import BLOCK, CheckpointView, Path, StoredObject, StoredTensor, blocks_of, plain_tensor
from .common import FileRange, Options, open_file
from .nesting import check_lists, check_paths, check_size, exact_paths, nested

__all__ = ["check", "load_fake", "locate", "read", "write"]

_ALIGNMENT = 64  # of tensors in the file, as torch.save has it
# What precedes an entry's data in a zip file beside its name: a header, the beginning of the extra field with our
# padding, and one for 64-bit sizes. Readers skip extra fields whose tag they do not know.
_BEFORE_DATA = 30 + 4 + 20
_PADDING_TAG = 0x4246
_HAS_DESCRIPTOR = 0x8  # the flag of an entry that is followed by its CRC-32 and its size


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
        raise ConversionError(f"{path} holds a {type(state).__name__}, and no state dict")
    try:
        check_size(state)
        values, paths = flatten_state_dict(state)
    except ValueError as error:
        raise ConversionError(f"{path}: {error}") from error
    paths = exact_paths(state, paths)
    tensors, objects = {}, {}
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            tensors[key] = locate(storage, tuple(paths[key]), value, (name, 0))
        elif _tensors_in(value):
            raise ConversionError(f"{path}: {key!r} is a {type(value).__name__} with tensors in it: leave it out")
        else:
            stream = io.BytesIO()
            torch.save(value, stream)
            objects[key] = StoredObject(key, tuple(paths[key]), len(stream.getvalue()), stream.getvalue)
    return CheckpointView(path, "torch", tensors, objects)


def load_fake(file: FileRange, nbytes: int, path: str) -> Any:
    """Loads what ``torch.save`` wrote, with fake tensors for all tensors.

    Args:
        file: What was written, from its first byte.
        nbytes: How much that is.
        path: For messages.

    Raises:
        UntrustedObject: it would need code to run.
        ConversionError: it cannot be read.
    """
    buffered = io.BufferedReader(file)
    try:
        records = _check_archive(buffered, nbytes)
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
        raise UntrustedObject(f"{path} could run code when it is loaded ({', '.join(needed)}): it was not")
    try:
        return _checked(_load(buffered, weights_only=False), records)
    except OSError:
        raise
    except Exception as error:
        raise ConversionError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _load(file: IO[bytes], *, weights_only: bool) -> Any:
    file.seek(0)
    with FakeTensorMode():
        return torch.load(file, weights_only=weights_only)


def _checked(value: Any, records: Sequence[tuple[int, int]]) -> Any:
    _check_storages(value, records)
    return value


def _check_archive(file: IO[bytes], nbytes: int) -> list[tuple[int, int]]:
    """Where the header of each record begins, and how many bytes the record has, in the file's order.

    The elements of tensors must lie in the file as they are, and where torch looks for them.

    Raises:
        ValueError: they do not, or the archive would take more time or memory than it has bytes.
    """
    is_zip = is_archive(file.read(4))
    file.seek(0)
    if not is_zip:
        raise ValueError("it is no archive (files of torch before 1.6 must be loaded and saved once more)")
    archive = check_archive(file, nbytes)
    infos = archive.infolist()
    for info in infos:
        name = info.filename.lower()  # as torch looks names up
        if name.endswith("/data.pkl"):
            check_pickle(record(archive, info))
        if name.endswith("/byteorder") and record(archive, info) == b"big":
            raise ValueError("it is of a big-endian machine: load and save it once more on this one")
    # With this record, torch counts with a descriptor behind each record, and does not look where the next one is.
    is_counted = any(info.filename.endswith("/.format_version") for info in infos)
    if is_counted and any(info.file_size and not info.flag_bits & _HAS_DESCRIPTOR for info in infos):
        raise ValueError("it is packed again, and not as torch.save does it: load and save it once more")
    return sorted((info.header_offset, info.file_size) for info in infos)


def _check_storages(value: Any, records: Sequence[tuple[int, int]]) -> None:
    """Checks that the bytes of all tensors lie within records of their file.

    Raises:
        ValueError: some do not.
    """
    for tensor in _tensors_in(value):
        if not isinstance(tensor, FakeTensor) or not tensor.numel():
            continue
        storage = tensor.untyped_storage()
        start = checkpoint_offset(tensor)
        number = bisect.bisect_right(records, (start, 0)) - 1
        if number < 0 or storage.nbytes() > records[number][1]:
            raise ValueError(f"a tensor claims to have {storage.nbytes():,} bytes, more than are stored")


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
    if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided or tensor.is_quantized:
        raise ConversionError(f"{key!r}: a {type(tensor).__name__} of layout {tensor.layout} cannot be converted")
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


def _tensors_in(value: Any) -> Sequence[Any]:
    """The tensors anywhere in a value, in the order in which they are pickled."""
    finder = _TensorFinder()
    finder.dump(value)
    return finder.tensors


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
    tensors = {f"archive/data/{n}": view.tensors[keys[id(fake)]] for n, fake in enumerate(_tensors_in(state))}
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
    if _tensors_in(value):  # whose elements nothing would fill in
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
