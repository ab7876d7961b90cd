"""The files of a model in Hugging Face's layout, by their index and headers. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .._runtime.threads import in_threads
from ..errors import MetadataError, NotCommitted, ReadError
from .safetensors_header import ADAPTER, INDEX, LENGTH, MAX_HEADER, SINGLE, is_plain_name, read_header, read_index

if TYPE_CHECKING:
    from .._storage.base import FileIdentity, Storage

_ENDING = ".safetensors"
_LONE = {SINGLE, ADAPTER}  # files of models without an index, whose later versions have the same names


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """The location of a tensor's bytes in a file. ``dtype`` is safetensors' name of the dtype."""

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
    identity: FileIdentity | None = (
        None  # of the file before the header was read; None with an index, or if the storage has none
    )

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


def read_weight_files(storage: Storage) -> tuple[list[WeightFile], dict[str, str]]:
    """Reads the headers of the files that an index names, or, without an index, of all safetensors files.

    Returns the files, and the file of each tensor in the index (empty without an index). Raises `NotCommitted` if there
    are no files, and `MetadataError` if the index or a header is damaged.
    """
    index, file_of = read_small(storage, INDEX), dict[str, str]()
    if index is None:
        names = {file.name for file in storage.listing()[0] if file.name.endswith(_ENDING)}
    elif storage.head(SINGLE) is not None:  # Hugging Face's libraries prefer it
        names = {SINGLE}
    else:
        file_of = read_weight_map(storage, index)
        names = set(file_of.values())
    if not names:
        raise NotCommitted(f"there is no model in {storage.path}: no file ends in {_ENDING}")

    def read(name: str) -> WeightFile:
        identity = storage.identity(name) if name in _LONE else None
        return replace(read_weight_file(storage, name), identity=identity)

    return in_threads(read, sorted(names)), file_of


def check_unreplaced(storage: Storage, file: WeightFile) -> None:
    """Raises `ReadError` if a file was replaced after `read_weight_files`: its data may not match the header."""
    if file.identity is not None and storage.identity(file.name) != file.identity:
        raise ReadError(
            f"{storage.path}/{file.name} was replaced while it was loaded, so tensors may be from two models. "
            f"Load it again."
        )


def read_weight_map(storage: Storage, index: bytes) -> dict[str, str]:
    """Returns the file of each tensor in an index. Raises `MetadataError` if the index is damaged."""
    path = f"{storage.path}/{INDEX}"
    try:
        weight_map = read_index(index)
    except ValueError as error:
        raise MetadataError(f"{path} is not the index of a model: {error}") from None
    for name in set(weight_map.values()):
        check_weight_name(name, path)
    return weight_map


def read_small(storage: Storage, name: str) -> bytes | None:
    """Reads a file that must fit into memory. If it does not exist, returns None.

    Raises `MetadataError` if the file is larger than any index.
    """
    content = storage.read(name, MAX_HEADER + 1)
    if content is not None and len(content) > MAX_HEADER:
        raise MetadataError(f"{storage.path}/{name} is larger than an index may be ({MAX_HEADER:,} bytes)")
    return content


def check_plain_name(name: str, path: str) -> None:
    """Raises `MetadataError` unless ``name``, read from a file, is in the directory."""
    if not is_plain_name(name):
        raise MetadataError(f"{path} names the file {name!r}, which is not a visible file of its directory")


def check_weight_name(name: str, path: str) -> None:
    """Raises `MetadataError` unless ``name``, read from a file, is a safetensors file in the directory."""
    check_plain_name(name, path)
    if not name.endswith(_ENDING):
        raise MetadataError(f"{path} names the file {name!r}, which is not a safetensors file")


def read_weight_file(storage: Storage, name: str) -> WeightFile:
    """Reads the header of a safetensors file. Raises `MetadataError` if it is damaged."""
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
