"""The files of a model in Hugging Face's layout, as their index and headers describe them. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Raw, Struct
from msgspec.json import Decoder

from .._runtime.threads import in_threads
from .._tensor_file.names import MAX_DIMENSIONS, MAX_NUMBER
from ..errors import MetadataError, NotCommitted, ReadError, UnsupportedFormat
from .safetensors_header import ADAPTER, INDEX, LENGTH, MAX_HEADER, SINGLE, decode_json, is_plain_name, read_index

if TYPE_CHECKING:
    from .._storage.base import FileIdentity, Storage

_ENDING = ".safetensors"
_LONE = {SINGLE, ADAPTER}  # the only file of a model, which a later save in the directory replaces
_MAX_INDEX = 1_000_000_000  # bytes: ten times as many as one file's header may have
_Count = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]


class TensorRecord(Struct):
    dtype: str
    shape: Annotated[tuple[_Count, ...], Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[_Count, _Count]


_decode_header = Decoder(dict[str, Raw]).decode
_decode_record = Decoder(TensorRecord).decode
_decode_notes = Decoder(dict[str, Any]).decode


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
    """A safetensors file, as its header describes it."""

    name: str
    header: bytes  # all bytes before those of the first tensor
    tensors: tuple[StoredBytes, ...]  # in the order of their offsets
    notes: Mapping[str, Any]  # its ``__metadata__``
    # of the file before its header was read; None if the name is not in `_LONE`, or the storage has no identities
    identity: FileIdentity | None = None

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


def read_weight_files(storage: Storage) -> tuple[list[WeightFile], dict[str, str]]:
    """Reads the headers of the files that an index names, or, without an index, of all safetensors files.

    If there are both an index and `SINGLE`, reads only `SINGLE`.

    Returns the files, and the file of each tensor in the index (empty if the index was not read). Raises `NotCommitted`
    if there are no files, `UnsupportedFormat` if the index is that of a delta, and `MetadataError` if the index or a
    header is damaged.
    """
    index, file_of = read_small(storage, INDEX), dict[str, str]()
    if index is None:
        names = {file.name for file in storage.listing()[0] if file.name.endswith(_ENDING)}
    elif has_single(storage):
        names = {SINGLE}
    else:
        file_of = read_weight_map(storage, index)
        names = set(file_of.values())
    if not names:
        raise NotCommitted(f"there is no model in {storage.path}: no file ends in {_ENDING}, or the index is empty")

    def read(name: str) -> WeightFile:
        identity = storage.identity(name) if name in _LONE else None
        return replace(read_weight_file(storage, name), identity=identity)

    return in_threads(read, sorted(names)), file_of


def has_single(storage: Storage) -> bool:
    """Returns whether `SINGLE` is in a directory. It has priority over an index, as in Hugging Face's libraries."""
    return storage.head(SINGLE) is not None


def check_unreplaced(storage: Storage, file: WeightFile) -> None:
    """Raises `ReadError` if a file with an identity was replaced after `read_weight_files` had read its header."""
    if file.identity is not None and storage.identity(file.name) != file.identity:
        raise ReadError(
            f"{storage.path}/{file.name} was replaced while it was loaded, so tensors may be from two models. "
            f"Load it again."
        )


def read_weight_map(storage: Storage, index: bytes) -> dict[str, str]:
    """Returns the file of each tensor in the index of a model.

    Raises `MetadataError` if the index is damaged, and `UnsupportedFormat` if it is that of a delta, whose files hold
    only changes.
    """
    path = f"{storage.path}/{INDEX}"
    try:
        weight_map, version = read_index(index)
    except ValueError as error:
        raise MetadataError(f"{path} is not the index of a model: {error}") from None
    if version is not None:
        raise UnsupportedFormat(delta_alone(storage.path, version))
    for name in set(weight_map.values()):
        check_weight_name(name, path)
    return weight_map


def check_located(path: str, file_of: Mapping[str, str], files: Iterable[WeightFile]) -> None:
    """Raises `MetadataError` if an index, as `read_weight_map` returns it, names a tensor that its file lacks."""
    stored = {file.name: {tensor.key for tensor in file.tensors} for file in files}
    for key, name in file_of.items():
        if key not in stored[name]:
            raise MetadataError(
                f"{path}/{name} lacks {key!r}, which the index locates there. The files were replaced, or belong to "
                f"different models. Copy or download the whole model again."
            )


def delta_alone(path: str, version: str) -> str:
    """Returns the message for a delta's directory that was passed as a model."""
    return (
        f"{path} is not a model: it holds only the changes of version {version} since the previous version. "
        f"Apply the version to a copy, with apply_delta or `dcp-tensorizer publish apply`, and pass the copy."
    )


def read_small(storage: Storage, name: str) -> bytes | None:
    """Reads a file that must fit into memory. If it does not exist, returns None.

    Raises `MetadataError` if the file is larger than an index may be.
    """
    content = storage.read(name, _MAX_INDEX + 1)
    if content is not None and len(content) > _MAX_INDEX:
        raise MetadataError(f"{storage.path}/{name} is larger than an index may be ({_MAX_INDEX:,} bytes)")
    return content


def check_plain_name(name: str, path: str) -> None:
    """Raises `MetadataError` unless ``name``, which was read from the file ``path``, is a plain name."""
    if not is_plain_name(name):
        raise MetadataError(f"{path} names the file {name!r}, which is not a visible file of its directory")


def check_weight_name(name: str, path: str) -> None:
    """Raises `MetadataError` as `check_plain_name` does, and if ``name`` does not end in ``.safetensors``."""
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
                raise ValueError("it is missing, or too short for a header")
            return WeightFile(name, *read_header(reader.read_range, nbytes))
        except ValueError as error:
            raise MetadataError(f"{path} is not a safetensors file, or is damaged: {error}") from None


def read_header(
    read: Callable[[int, int], bytes], nbytes: int
) -> tuple[bytes, tuple[StoredBytes, ...], Mapping[str, Any]]:
    """Returns the header, the tensors and the notes of a `WeightFile` of ``nbytes`` bytes.

    ``read`` takes an offset and a number of bytes. Raises `ValueError` if the header is damaged, or if the tensors do
    not fill the rest of the file without gaps, as the safetensors library requires.
    """
    prefix = read(0, LENGTH.size)
    (length,) = LENGTH.unpack(prefix)
    base = LENGTH.size + length
    if length > MAX_HEADER or base > nbytes:
        raise ValueError(
            f"its header claims to have {length:,} bytes, but the limit is {MAX_HEADER:,}, and the file has {nbytes:,}"
        )
    text = read(LENGTH.size, length)
    raw = decode_json(_decode_header, text)
    notes = decode_json(_decode_notes, raw.pop("__metadata__", Raw(b"{}")))
    records = ((key, decode_json(_decode_record, value)) for key, value in raw.items())
    tensors, end = [], 0
    for key, record in sorted(records, key=lambda item: (item[1].data_offsets, item[0])):
        start, stop = record.data_offsets
        if start != end or stop < start:
            raise ValueError(f"{key!r} is at bytes {start:,} to {stop:,}, which is not a range that starts at {end:,}")
        tensors.append(StoredBytes(key, base + start, stop - start, record.dtype, record.shape))
        end = stop
    if base + end != nbytes:
        raise ValueError(f"its tensors have {end:,} bytes, but {nbytes - base:,} follow its header")
    return prefix + text, tuple(tensors), notes
