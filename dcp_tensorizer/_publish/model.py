"""A model as Hugging Face lays it out: a directory of safetensors files, their index, and other small files.

Headers are decoded here, and elements stay bytes. No tensor is made, so nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .._formats.safetensors_header import (
    ADAPTER,
    INDEX,
    LENGTH,
    MAX_HEADER,
    SINGLE,
    encode_header,
    is_plain_name,
    read_header,
    read_index,
)
from .._runtime.threads import in_threads
from .._storage.base import FileIdentity, RangeReader, Storage
from .._tensor_file.encode import FileParts
from .._tensor_file.names import is_ours
from ..errors import MetadataError, NotCommitted, ReadError
from .delta import PIECE

READ_BYTES = 8 * PIECE
"""Bytes that are read at once: an object store takes as long for less."""

_ENDING = ".safetensors"
_LONE = {SINGLE, ADAPTER}  # files of models without an index; later versions of them have the same names


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """The place of a tensor's bytes in a file. ``dtype`` is safetensors' name of it."""

    key: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A safetensors file, by its header."""

    name: str
    header: bytes  # the bytes up to the first tensor's
    tensors: tuple[StoredBytes, ...]  # in the order of their offsets
    notes: Mapping[str, Any]  # its ``__metadata__``
    identity: FileIdentity | None = None  # before the header was read; None with an index, or if there is none

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Model:
    """The files of a model's directory."""

    storage: Storage
    index: bytes | None  # the contents of the index; None if there is none, because all tensors are in one file
    weights: dict[str, WeightFile]  # the safetensors files, by name
    others: tuple[str, ...]  # the names of the other files: the configuration, the tokenizer and any others


def read_model(storage: Storage, index: bytes | None = None) -> Model:
    """Reads the index and the headers of a model's directory.

    ``index`` is one that has been replaced, but whose files are still there. Raises `NotCommitted` if there is no
    model, and `MetadataError` if its index or a header is damaged.
    """
    if index is None:
        index = read_small(storage, INDEX)
    if index is None:
        if storage.head(SINGLE) is None:
            raise NotCommitted(f"there is no model in {storage.path}: neither {INDEX} nor {SINGLE}")
        names = {SINGLE}
    else:
        names = set(_read_weight_map(storage, index).values())
    weights = {name: read_weight_file(storage, name) for name in sorted(names)}
    files = (file.name for file in storage.listing()[0])
    return Model(storage, index, weights, tuple(sorted(filter(_is_other, files))))


def _is_other(name: str) -> bool:
    """Returns whether a file belongs to a model besides its weights and index; files of a save in progress do not."""
    return not name.endswith(_ENDING) and name != INDEX and is_plain_name(name) and not is_ours(name)


def read_weight_files(storage: Storage) -> list[WeightFile]:
    """Reads the headers of the files that an index names, or, without an index, of all safetensors files.

    Raises `NotCommitted` if there are none, and `MetadataError` if the index or a header is damaged.
    """
    index = read_small(storage, INDEX)
    if index is not None:
        is_lone = storage.head(SINGLE) is not None  # which Hugging Face's libraries prefer
        names = {SINGLE} if is_lone else set(_read_weight_map(storage, index).values())
    else:
        names = {file.name for file in storage.listing()[0] if file.name.endswith(_ENDING)}
    if not names:
        raise NotCommitted(f"there is no model in {storage.path}: no file ends in {_ENDING}")

    def read(name: str) -> WeightFile:
        identity = storage.identity(name) if name in _LONE else None
        return replace(read_weight_file(storage, name), identity=identity)

    return in_threads(read, sorted(names))


def check_unreplaced(storage: Storage, file: WeightFile) -> None:
    """Raises `ReadError` if a file has been replaced since `read_weight_files`: its data may not fit its header."""
    if file.identity is not None and storage.identity(file.name) != file.identity:
        raise ReadError(
            f"{storage.path}/{file.name} was replaced while it was loaded, and what was loaded may be of two models: "
            f"load it again"
        )


def _read_weight_map(storage: Storage, index: bytes) -> dict[str, str]:
    path = f"{storage.path}/{INDEX}"
    try:
        weight_map = read_index(index)
    except ValueError as error:
        raise MetadataError(f"{path} is not the index of a model: {error}") from None
    for name in set(weight_map.values()):
        check_weight_name(name, path)
    return weight_map


def read_small(storage: Storage, name: str) -> bytes | None:
    """Reads a file that must fit into memory; None if there is none.

    Raises `MetadataError` if it is larger than any file of its kind.
    """
    content = storage.read(name, MAX_HEADER + 1)
    if content is not None and len(content) > MAX_HEADER:
        raise MetadataError(f"{storage.path}/{name} has more than {MAX_HEADER:,} bytes, which no index has")
    return content


def check_plain_name(name: str, path: str) -> None:
    """Raises `MetadataError` if a name in a file leads out of its directory."""
    if not is_plain_name(name):
        raise MetadataError(f"{path} names the file {name!r}, which is no visible file of its directory")


def check_weight_name(name: str, path: str) -> None:
    """Raises `MetadataError` if a name in a file leads out of its directory, or is not a safetensors file's."""
    check_plain_name(name, path)
    if not name.endswith(_ENDING):
        raise MetadataError(f"{path} names the file {name!r}, which is no safetensors file")


def read_weight_file(storage: Storage, name: str) -> WeightFile:
    """Reads the header of a safetensors file; raises `MetadataError` if it is damaged."""
    path = f"{storage.path}/{name}"
    nbytes = storage.head(name)
    with storage.reading(name) as reader:
        try:
            if nbytes is None or nbytes < LENGTH.size:
                raise ValueError("it is too short for a header")
            header = read_header(reader.read_range, nbytes)
        except ValueError as error:
            raise MetadataError(f"{path} is not a safetensors file, or damaged: {error}") from None
    tensors = []
    for key, record in header.tensors.items():
        start, stop = record.data_offsets
        tensors.append(StoredBytes(key, len(header.content) + start, stop - start, record.dtype, record.shape))
    return WeightFile(name, header.content, tuple(tensors), header.notes)


def read_blocks(storage: Storage, name: str) -> Iterator[bytes]:
    """Reads a file from front to back; yields nothing if it is empty. Raises `ReadError`."""
    nbytes = storage.head(name)
    if nbytes is None:
        raise ReadError(f"cannot open {storage.path}/{name}: it does not exist")
    if nbytes:
        with storage.reading(name) as reader:
            for start in range(0, nbytes, READ_BYTES):
                yield reader.read_range(start, min(READ_BYTES, nbytes - start))


class TensorReader:
    """Reads the tensors of an open file. Its errors name the file and the tensor."""

    def __init__(self, storage: Storage, name: str, reader: RangeReader) -> None:
        self._storage, self._name, self._reader = storage, name, reader
        self.path = f"{storage.path}/{name}"

    def read_into(self, block: np.ndarray, tensor: StoredBytes, start: int) -> None:
        """Reads bytes of a tensor, from ``start`` on, into an array of ``uint8``; raises `ReadError`."""
        try:
            self._reader.read_into([block.data], tensor.offset + start)
        except (OSError, EOFError) as error:
            message = f"cannot read {tensor.key!r} in {self.path}: {error}"
            raise ReadError(self._storage.scrub(message)) from self._storage.cause(error)


@contextmanager
def reading_tensors(storage: Storage, name: str) -> Iterator[TensorReader]:
    """Opens a file for a block, to read its tensors; raises `ReadError`."""
    try:
        reader = storage.open(name)
    except OSError as error:
        raise ReadError(storage.scrub(f"cannot open {storage.path}/{name}: {error}")) from storage.cause(error)
    try:
        yield TensorReader(storage, name, reader)
    finally:
        reader.close()


@contextmanager
def written_file(storage: Storage, name: str, nbytes: int) -> Iterator[Callable[[memoryview], None]]:
    """Writes a file of ``nbytes`` bytes; yields a function that takes them in order, piece by piece.

    Raises `WriteError` if the file cannot be written. Then there is no file.
    """
    with storage.writing(f"create {storage.path}/{name}"):
        sink = storage.create(name, nbytes, sync=True)
    parts = FileParts(nbytes, sink, filling=2, writing=sink.concurrency)
    offset = 0

    def write_piece(piece: memoryview) -> None:
        nonlocal offset
        if piece.nbytes:
            parts.fill(offset, np.frombuffer(piece, dtype=np.uint8))
            offset += piece.nbytes

    with storage.writing(f"write {storage.path}/{name}"):
        try:
            yield write_piece
            parts.finish()
            sink.complete()
        except BaseException as error:
            parts.abandon(error)
            sink.abort()
            raise


def header_of(sizes: Mapping[str, int], notes: Mapping[str, str]) -> bytes:
    """Returns the beginning of a safetensors file of rows of bytes, up to the first row.

    ``sizes`` has the number of bytes in each row by its name, and ``notes`` becomes its ``__metadata__``.
    """
    described: dict[str, Any] = {"__metadata__": dict(notes)}
    position = 0
    for key, nbytes in sizes.items():
        described[key] = {"dtype": "U8", "shape": [nbytes], "data_offsets": [position, position + nbytes]}
        position += nbytes
    return encode_header(described)
