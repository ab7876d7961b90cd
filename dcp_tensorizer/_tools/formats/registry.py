"""The formats: how each is recognised, read and written."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._format.index import is_index, looks_like_pickle
from ..._format.layout import metadata_file_name
from ..._loading.directory_format import has_data, nothing_committed
from ..._loading.validate import check_files
from ..._storage.base import Storage
from ..._storage.open import open_storage
from ..._storage.redact import redact
from ...errors import CheckpointError, ConversionError, DecryptionError, NotCommitted, ReadError
from ..atomic_output import beside
from ..checkpoint_view import CheckpointView, data_files, read_parts, unlock_parts
from ..listing import where_below
from ..stored_values import view_checkpoint
from . import dcp, dcp_tensorizer, safetensors, tensorizer, torch_file
from .common import Options, open_file, read_range
from .names import FORMATS

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from ..._format.encryption import DecryptionParams

__all__ = ["FORMATS", "TARGETS", "Target", "open_all", "open_checkpoint"]

_FIRST_BYTES = {b"|TZR|": "tensorizer", b"PK\x03\x04": "torch"}
_FILE_READERS = {"tensorizer": tensorizer.read, "safetensors": safetensors.read, "torch": torch_file.read}


class Target(NamedTuple):
    """A format to write.

    Attributes:
        check: Fails if the format cannot hold a checkpoint, before anything is written.
        write: Writes a checkpoint to a path, with options for its filesystem.
    """

    check: Callable[[CheckpointView, Options], None]
    write: Callable[[CheckpointView, str, Mapping[str, Any], Options], None]


TARGETS = {
    "dcp_tensorizer": Target(dcp_tensorizer.check, dcp_tensorizer.write),
    "tensorizer": Target(tensorizer.check, tensorizer.write),
    "safetensors": Target(safetensors.check, safetensors.write),
    "torch": Target(torch_file.check, torch_file.write),
    "dcp": Target(dcp.check, dcp.write),
}


def open_checkpoint(
    path: str | os.PathLike[str],
    options: Mapping[str, Any],
    expected_format: str | None = None,
    encryption: DecryptionParams | None = None,
) -> CheckpointView:
    """What a checkpoint of some format holds.

    Args:
        path: A local path or URL: of a directory, or of a file.
        options: For the fsspec filesystem of a URL.
        expected_format: One of `FORMATS`; None: look.
        encryption: The key of an encrypted dcp_tensorizer checkpoint.

    Raises:
        NotCommitted: there is nothing.
        ConversionError: it is of no known format, or not of the one that was named.
        DecryptionError: there is no key, a wrong one, or one too many.
        CheckpointError: it is damaged, or cannot be read.
    """
    return _open(_locate(path, options, expected_format), encryption)


def open_all(
    paths: Sequence[str | os.PathLike[str]],
    options: Mapping[str, Any],
    encryption: DecryptionParams | None = None,
    *,
    look_at_files: bool = False,
) -> list[CheckpointView]:
    """What several checkpoints hold, of which only some may be encrypted; see `open_checkpoint`.

    With ``look_at_files``, data files of this package's that are missing or of other sizes are a `ReadError`.
    """
    located = [_locate(path, options) for path in paths]
    for location in located if look_at_files else ():
        files = data_files(location.parts)
        check_files(location.storage, files, files)
    if encryption is not None and not any(location.is_encrypted for location in located):
        names = " and ".join(location.path for location in located)
        raise DecryptionError(f"a key was given, and there is nothing encrypted in {names}")
    return [_open(location, encryption if location.is_encrypted else None) for location in located]


@dataclass(frozen=True, slots=True)
class _Location:
    """Where a checkpoint is: ``parts`` is the metadata of one of this package's, ``name`` that of a single file."""

    path: str
    format: str
    storage: Storage
    name: str
    parts: Mapping[int | None, Metadata]

    @property
    def is_encrypted(self) -> bool:
        return any("encryption" in part.storage_data for part in self.parts.values())


def _locate(path: str | os.PathLike[str], options: Mapping[str, Any], expected_format: str | None = None) -> _Location:
    text = os.fspath(path)
    storage, name = open_storage(text, options), ""
    actual = _directory_format(storage)
    if actual is None:
        storage, name = beside(re.sub("(?<=[^:/])/+$", "", text), options)
        actual = _file_format(storage, name)
    if expected_format not in (None, actual):
        raise ConversionError(f"{redact(text)} is of the format {actual}, and not {expected_format}")
    return _Location(redact(text), actual, storage, name, read_parts(storage) if actual == "dcp_tensorizer" else {})


def _open(location: _Location, encryption: DecryptionParams | None) -> CheckpointView:
    storage = location.storage
    if location.format == "dcp_tensorizer":
        return view_checkpoint(storage, location.parts, unlock_parts(storage, location.parts, encryption))
    if encryption is not None:
        raise DecryptionError(
            f"{location.path} is of the format {location.format}, which is not decrypted here: read it without a key"
        )
    try:
        return _read_foreign(location)
    except CheckpointError:
        raise
    except Exception as error:  # what no reader has thought of: a number or a nesting without end, no such memory
        raise ConversionError(f"{location.path} cannot be read: {type(error).__name__}: {error}") from error


def _read_foreign(location: _Location) -> CheckpointView:
    if location.format == "dcp":
        return dcp.read(location.storage, location.storage.read(metadata_file_name()) or b"")
    if not location.name:
        return safetensors.read_directory(location.storage)
    return _FILE_READERS[location.format](location.storage, location.name)


def _directory_format(storage: Storage) -> str | None:
    """The format of a checkpoint that is a directory, None if it is none."""
    metadata = storage.read(metadata_file_name())
    if metadata is not None:
        return "dcp" if looks_like_pickle(metadata) and not is_index(metadata) else "dcp_tensorizer"
    of_rank = storage.read(metadata_file_name(0))
    if of_rank is not None and looks_like_pickle(of_rank) and not is_index(of_rank):
        raise ConversionError(
            f"{storage.path} is of torch's own format, and each rank has saved for itself (use_collectives=False): "
            f"load it with torch's FileSystemReader on as many ranks, and save it with collectives"
        )
    if of_rank is not None:
        return "dcp_tensorizer"
    return "safetensors" if safetensors.is_directory(storage) else None


def _file_format(storage: Storage, name: str) -> str:
    path = f"{storage.path}/{name}"
    nbytes = storage.head(name)
    try:
        if nbytes is None:
            raise NotCommitted(f"{path} does not exist, or holds no checkpoint")
        with open_file(storage, name) as reader:
            head = read_range(reader, 0, min(9, nbytes))
    except (NotCommitted, ReadError) as error:
        if not _is_directory(storage, name):
            raise
        if has_data(directory := storage.child(name)):
            raise nothing_committed(directory) from error
        hint = where_below(directory) or " Name a checkpoint itself: the directory or the file of one save."
        raise NotCommitted(f"{path} holds no checkpoint of a known format ({', '.join(FORMATS)}).{hint}") from error
    for first_bytes, name_of_format in _FIRST_BYTES.items():
        if head.startswith(first_bytes):
            return name_of_format
    if head[8:] == b"{":
        return "safetensors"
    raise ConversionError(f"{path} is of none of the formats {', '.join(FORMATS)}")


def _is_directory(storage: Storage, name: str) -> bool:
    """Whether a name is a directory's: servers do not say so when it is read as a file's."""
    with suppress(CheckpointError):
        files, folders = storage.child(name).listing()
        return bool(folders) or [file.name for file in files] != [name]  # fsspec lists a file as itself
    return False
