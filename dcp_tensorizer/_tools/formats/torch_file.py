"""What ``torch.save`` writes, read and written without ever being in memory: a file, or a part of one.

torch has both halves: with fake tensors, ``torch.load`` says where each tensor's bytes lie instead of reading them, and
``torch.save`` leaves room for them instead of writing them.
"""

from __future__ import annotations

import io
import pickle
import struct
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

import torch
from isal.isal_zlib import crc32

from ..._format.objects import unsafe_globals
from ..._memory.tensor_bytes import host_bytes
from ..._storage.base import RangeReader, Storage
from ..._torch_compat import FakeTensor, FakeTensorMode, checkpoint_offset, flatten_state_dict
from ...errors import ConversionError, UntrustedObject
from ..checkpoint_view import CheckpointView, NonStringKey, Path, StoredObject, StoredTensor, blocks_of, plain_tensor

__all__ = ["FileView", "load_fake", "locate", "nested", "read_state_dict", "skeleton"]

_PIECE = 4 << 20
# Where the CRC-32 is in what follows an entry's data in a zip file, and in the entry's record in the directory at the
# end; there, too, the lengths of name, extra field and comment, and of the record without them.
_DESCRIPTOR_CRC, _RECORD_CRC, _RECORD_LENGTHS, _RECORD = 4, 16, 28, 46


class FileView(io.RawIOBase):
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

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._nbytes - self._position))
        if count:
            self._reader.read_into([memoryview(buffer)[:count]], self._offset + self._position)
            self._position += count
        return count


def load_fake(file: FileView, path: str) -> Any:
    """Loads what ``torch.save`` wrote, with fake tensors for all tensors.

    Raises:
        UntrustedObject: it would need code to run.
        ConversionError: it cannot be read.
    """
    buffered = io.BufferedReader(file)
    _check_archive(buffered, path)
    try:
        with FakeTensorMode():
            return torch.load(buffered, weights_only=True)
    except Exception as error:
        file.seek(0)
        needed = ", ".join(unsafe_globals_in(file))
        if needed:
            raise UntrustedObject(f"{path} could run code when it is loaded ({needed}): it was not") from None
        raise ConversionError(
            f"{path} cannot be read: {type(error).__name__}: {error} (files of torch before 1.6 must be loaded and "
            f"saved once more)"
        ) from error


def _check_archive(file: IO[bytes], path: str) -> None:
    """The elements of tensors must lie in the file as they are."""
    is_archive = file.read(4) == b"PK\3\4"
    file.seek(0)
    if not is_archive:
        return  # of an old release, or damaged: torch says which
    try:
        archive = zipfile.ZipFile(file)
        orders = [archive.read(name) for name in archive.namelist() if name.endswith("/byteorder")]
    except Exception as error:
        raise ConversionError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    file.seek(0)
    if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
        raise ConversionError(f"{path} is compressed: load and save it once more")
    if b"big" in orders:
        raise ConversionError(f"{path} is of a big-endian machine: load and save it once more on this one")


def unsafe_globals_in(file: FileView) -> Sequence[str]:
    """What the weights-only loader refuses in a file; nothing if it cannot tell."""
    try:
        return sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(io.BufferedReader(file))))
    except Exception:
        return ()


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
    strides = tuple(tensor.stride())
    offset = place[1] + checkpoint_offset(tensor)
    offset += int(tensor.storage_offset()) * tensor.itemsize
    contiguous = tensor.is_contiguous()
    found = plain_tensor(storage, path, tensor.dtype, shape, (place[0], offset), None if contiguous else (strides, 0))
    return _resolved(found, conj=tensor.is_conj(), neg=tensor.is_neg())


def read_state_dict(storage: Storage, name: str, reader: RangeReader, nbytes: int) -> CheckpointView:
    """The contents of a file with a state dict.

    Raises:
        UntrustedObject: it would need code to run.
        ConversionError: it cannot be read, or holds no state dict.
    """
    path = f"{storage.path}/{name}"
    value = load_fake(FileView(reader, 0, nbytes), path)
    if not isinstance(value, dict):
        raise ConversionError(f"{path} holds a {type(value).__name__}, and no state dict")
    try:
        values, paths = flatten_state_dict(value)
    except ValueError as error:
        raise ConversionError(f"{path}: {error}") from error
    paths = _exact(value, paths)
    tensors, objects = {}, {}
    for key, item in values.items():
        if isinstance(item, torch.Tensor):
            tensors[key] = locate(storage, tuple(paths[key]), item, (name, 0))
        elif _holds_tensors(item):
            raise ConversionError(f"{path}: {key!r} is a {type(item).__name__} with tensors in it: leave it out")
        else:
            content = io.BytesIO()
            torch.save(item, content)
            data = content.getvalue()
            objects[key] = StoredObject(key, tuple(paths[key]), len(data), lambda data=data: data)  # type: ignore[misc]
    return CheckpointView(path, "torch", tensors, objects)


def _exact(value: Mapping[Any, Any], paths: Mapping[str, Path]) -> dict[str, Path]:
    """The paths that DCP makes of a state dict, with the keys of its dicts as they are, and not only their names."""
    keys_of: dict[int, dict[str, Any]] = {}
    found = {}
    for name, path in paths.items():
        node: Any = value
        exact: list[str | int] = []
        for part in path:
            key: Any = part
            if isinstance(node, Mapping):
                if id(node) not in keys_of:
                    keys_of[id(node)] = {str(key): key for key in node}
                key = keys_of[id(node)][str(part)]
                part = key if isinstance(key, str) else NonStringKey(key)
            exact.append(part)
            node = node[key]
        found[name] = tuple(exact)
    return found


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


def skeleton(contents: CheckpointView) -> tuple[int, Iterator[memoryview]]:
    """The bytes of a file with everything in it, as a nested state dict.

    Returns:
        How many there are, and they, in order.

    Raises:
        UntrustedObject: an object would need code to run.
        ConversionError: an object holds tensors.
    """
    paths = contents.paths
    with FakeTensorMode():
        values: dict[str, Any] = {t.key: torch.empty(t.shape, dtype=t.dtype) for t in contents.tensors.values()}
    for stored in contents.objects.values():
        content = stored.read()
        try:
            values[stored.key] = torch.load(io.BytesIO(content), weights_only=True)
        except Exception:
            needed = ", ".join(unsafe_globals(content))
            raise UntrustedObject(
                f"{stored.key!r} in {contents.path} is an object that could run code when it is loaded ({needed}), "
                f"and it must be loaded to become part of a torch.save file: leave it out"
            ) from None
        if _holds_tensors(values[stored.key]):  # whose elements no pass fills in
            raise ConversionError(
                f"{stored.key!r} in {contents.path} is a {type(values[stored.key]).__name__} with tensors in it, which "
                f"cannot be converted: leave it out, or load and save it"
            )
    ordered = {key: values[key] for key in paths}
    # Sparse: what is left out for the data takes no room.
    with tempfile.TemporaryDirectory(prefix="dcp_tensorizer-") as folder:
        file = f"{folder}/archive"  # the name is in the file, and this is the one that torch gives to a stream
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(nested(ordered, paths), file)
        room = open(file, "rb")  # noqa: SIM115
    return room.seek(0, io.SEEK_END), _filled(room, contents)


class _TensorFinder(pickle.Pickler):
    """Looks for tensors wherever a pickle would."""

    found = False

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor | torch.UntypedStorage | torch.storage.TypedStorage):
            return None
        self.found = True
        return 0


def _holds_tensors(value: Any) -> bool:
    finder = _TensorFinder(io.BytesIO())
    finder.dump(value)
    return finder.found


def _filled(room: Any, contents: CheckpointView) -> Iterator[memoryview]:
    with room:
        room.seek(0)
        with FakeTensorMode():
            values, _ = flatten_state_dict(torch.load(room, weights_only=True))
        places = sorted(
            (checkpoint_offset(values[key]), key) for key, tensor in contents.tensors.items() if tensor.nbytes
        )
        directory = zipfile.ZipFile(room).start_dir
        checks = {}
        position = 0
        for offset, key in places:
            yield from _copied(room, position, offset)
            tensor = contents.tensors[key]
            check = 0
            for region in blocks_of(tensor):
                piece = host_bytes(tensor.read(region))
                check = crc32(piece, check)
                yield piece
            position = offset + tensor.nbytes
            yield from _copied(room, position, position + _DESCRIPTOR_CRC)
            yield memoryview(struct.pack("<I", check))
            position += _DESCRIPTOR_CRC + 4
            checks[offset] = check
        yield from _copied(room, position, directory)
        yield memoryview(_checked_directory(room, directory, checks))


def _checked_directory(room: Any, start: int, checks: Mapping[int, int]) -> bytes:
    """The end of a zip file, from its directory on, with the CRC-32 of the data that begins at some offsets."""
    entries = zipfile.ZipFile(room).infolist()
    room.seek(start)
    found = bytearray(room.read())
    position = 0
    for entry in entries:
        room.seek(entry.header_offset + 26)
        data = entry.header_offset + 30 + sum(struct.unpack("<HH", room.read(4)))
        if data in checks:
            struct.pack_into("<I", found, position + _RECORD_CRC, checks[data])
        position += _RECORD + sum(struct.unpack_from("<HHH", found, position + _RECORD_LENGTHS))
    return bytes(found)


def _copied(room: Any, start: int, stop: int) -> Iterator[memoryview]:
    room.seek(start)
    while start < stop:
        piece = room.read(min(_PIECE, stop - start))
        start += len(piece)
        yield memoryview(piece)


def _resolved(tensor: StoredTensor, *, conj: bool, neg: bool) -> StoredTensor:
    """A tensor whose stored elements are to be conjugated or negated, as some views are saved."""
    if not conj and not neg:
        return tensor

    def read(region: Any) -> torch.Tensor:
        value = tensor.read(region)
        value = value.conj().resolve_conj() if conj else value
        return value.neg() if neg else value

    return StoredTensor(tensor.key, tensor.path, tensor.dtype, tensor.shape, read)
