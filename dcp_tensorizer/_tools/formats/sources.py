"""Opens a checkpoint of any format that can be converted, and tells which it is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..._format.layout import metadata_file_name
from ..._format.metadata import is_ours
from ..._storage.base import RangeReader, Storage
from ..._storage.open import open_storage
from ..._storage.redact import redact
from ...errors import ConversionError, DecryptionError, NotCommitted, ReadError
from ..atomic_output import beside
from ..checkpoint_view import CheckpointView, StoredTensor, read_parts, unlock_parts, view_checkpoint
from . import safetensors as safetensors_module
from . import tensorizer_index
from .dcp import read_checkpoint
from .torch_file import read_state_dict

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from ..._format.encryption import DecryptionParams

__all__ = ["FORMATS", "open_checkpoint", "open_two"]

FORMATS = ("dcp_tensorizer", "tensorizer", "safetensors", "torch", "dcp")
_MAGIC = {b"|TZR|": "tensorizer", b"PK\x03\x04": "torch"}


def open_checkpoint(
    path: str | os.PathLike[str],
    options: Mapping[str, Any],
    form: str | None = None,
    encryption: DecryptionParams | None = None,
) -> CheckpointView:
    """What a checkpoint of some format holds.

    Args:
        path: A local path or URL: of a directory, or of a file.
        options: For the fsspec filesystem of a URL.
        form: One of `FORMATS`; None: look.
        encryption: The key of an encrypted dcp_tensorizer checkpoint.

    Raises:
        NotCommitted: there is nothing.
        ConversionError: it is of no known format, or not of the one that was named.
        DecryptionError: there is no key, a wrong one, or one too many.
        CheckpointError: it is damaged, or cannot be read.
    """
    return _open(_locate(path, options, form), encryption)


def open_two(
    paths: tuple[str, str], options: Mapping[str, Any], encryption: DecryptionParams | None = None
) -> tuple[CheckpointView, CheckpointView]:
    """What two checkpoints hold, of which only one may be encrypted; see `open_checkpoint`."""
    a, b = (_locate(path, options) for path in paths)
    if encryption is not None and not (a.is_encrypted or b.is_encrypted):
        raise DecryptionError(f"neither {a.path} nor {b.path} is encrypted, and a key was given")
    return _open(a, encryption if a.is_encrypted else None), _open(b, encryption if b.is_encrypted else None)


@dataclass(frozen=True, slots=True)
class _Located:
    """A checkpoint that was found; ``parts`` are the metadata of one of this package's, ``name`` is of a file."""

    path: str
    format: str
    storage: Storage
    name: str
    parts: Mapping[int | None, Metadata]

    @property
    def is_encrypted(self) -> bool:
        return any("encryption" in part.storage_data for part in self.parts.values())


def _locate(path: str | os.PathLike[str], options: Mapping[str, Any], form: str | None = None) -> _Located:
    text = os.fspath(path)
    storage, name = open_storage(text, options), ""
    found = _directory_format(storage)
    if found is None:
        storage, name = beside(text, options)
        found = _file_format(storage, name)
    if form is not None and form != found:
        raise ConversionError(f"{redact(text)} is of the format {found}, and not {form}")
    return _Located(redact(text), found, storage, name, read_parts(storage) if found == "dcp_tensorizer" else {})


def _open(found: _Located, encryption: DecryptionParams | None) -> CheckpointView:
    storage = found.storage
    if found.format == "dcp_tensorizer":
        return view_checkpoint(storage, found.parts, unlock_parts(storage, found.parts, encryption))
    if encryption is not None:
        raise DecryptionError(
            f"{found.path} is of the format {found.format}, which is not decrypted here: read it without a key"
        )
    if found.format == "dcp":
        return read_checkpoint(storage, storage.read(metadata_file_name()) or b"")
    return _READERS[found.format](storage, found.name) if found.name else _read_shards(storage)


def _directory_format(storage: Storage) -> str | None:
    """The format of a checkpoint that is a directory, None if it is none."""
    metadata = storage.read(metadata_file_name())
    if metadata is not None:
        return "dcp_tensorizer" if is_ours(metadata) else "dcp"
    if storage.head(metadata_file_name(0)) is not None:
        return "dcp_tensorizer"
    return "safetensors" if _is_directory(storage) else None


def _is_directory(storage: Storage) -> bool:
    return any(storage.head(name) is not None for name in (safetensors_module.INDEX, safetensors_module.SINGLE))


def _file_format(storage: Storage, name: str) -> str:
    path = f"{storage.path}/{name}"
    nbytes = storage.head(name)
    if nbytes is None:
        raise NotCommitted(f"{path} does not exist, or holds no checkpoint")
    try:
        with _opened(storage, name) as (_, read):
            head = read(0, min(9, nbytes))
    except ReadError as error:
        if isinstance(error.__cause__, IsADirectoryError):
            raise NotCommitted(f"{path} holds no checkpoint of a known format ({', '.join(FORMATS)})") from error
        raise
    for magic, form in _MAGIC.items():
        if head.startswith(magic):
            return form
    if head[8:] == b"{":
        return "safetensors"
    raise ConversionError(f"{path} is of none of the formats {', '.join(FORMATS)}")


def _read_tensorizer(storage: Storage, name: str) -> CheckpointView:
    path = f"{storage.path}/{name}"
    with _opened(storage, name) as (_, read), _translated(path):
        found = tensorizer_index.read_file(storage, name, read)
    return CheckpointView(path, "tensorizer", _by_key(found))


def _read_safetensors(storage: Storage, name: str) -> CheckpointView:
    path = f"{storage.path}/{name}"
    with _opened(storage, name) as (_, read), _translated(path):
        return CheckpointView(path, "safetensors", _by_key(safetensors_module.read_file(storage, name, read)))


def _read_torch(storage: Storage, name: str) -> CheckpointView:
    with _opened(storage, name) as (reader, _):
        return read_state_dict(storage, name, reader, storage.head(name) or 0)


_READERS = {"tensorizer": _read_tensorizer, "safetensors": _read_safetensors, "torch": _read_torch}


def _read_shards(storage: Storage) -> CheckpointView:
    """The tensors of a directory as Hugging Face lays it out."""
    names = [safetensors_module.SINGLE]
    if (index := storage.read(safetensors_module.INDEX)) is not None:
        with _translated(f"{storage.path}/{safetensors_module.INDEX}"):
            names = safetensors_module.read_index(index)
    tensors: dict[str, StoredTensor] = {}
    for name in names:
        tensors.update(_read_safetensors(storage, name).tensors)
    return CheckpointView(storage.path, "safetensors", tensors)


@contextmanager
def _opened(storage: Storage, name: str) -> Iterator[tuple[RangeReader, Callable[[int, int], bytes]]]:
    """A file, and a function that gives so many bytes of it from an offset on."""
    path = f"{storage.path}/{name}"
    try:
        reader = storage.open(name)
    except OSError as error:
        raise ReadError(storage.scrub(f"cannot open {path}: {error}")) from error

    def read(offset: int, nbytes: int) -> bytes:
        content = bytearray(nbytes)
        try:
            reader.read_into([memoryview(content)], offset)
        except (OSError, EOFError) as error:
            raise ReadError(storage.scrub(f"cannot read {path}: {type(error).__name__}: {error}")) from error
        return bytes(content)

    try:
        yield reader, read
    finally:
        reader.close()


@contextmanager
def _translated(path: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConversionError(f"{path} cannot be read: it is {error}") from error


def _by_key(tensors: Iterable[StoredTensor]) -> dict[str, StoredTensor]:
    return {tensor.key: tensor for tensor in tensors}
