"""Recognises the formats, and dispatches to their readers and writers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..._formats.recognise import contents, format_of, has_data, kind_of_file, nothing_committed
from ..._formats.rename import Renaming
from ..._index.container import is_index, looks_like_pickle
from ..._loading.run import check_files
from ..._storage.base import Storage
from ..._storage.open import open_storage
from ..._storage.redact import redact
from ..._tensor_file.encryption import check_decryption
from ..._tensor_file.names import metadata_file_name
from ...errors import CheckpointError, ConversionError, DecryptionError, NotCommitted, ReadError
from .. import FORMATS
from .._atomic_output import beside
from .._find import where_below
from .._view import CheckpointView, Path, data_files, key_of, read_parts, unlock_parts, view_checkpoint
from . import dcp, dcp_tensorizer, safetensors, tensorizer, torch_file
from .common import ConvertOptions, naming

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from ..._tensor_file.encryption import DecryptionParams


_Check = Callable[[CheckpointView, ConvertOptions], None]
"""Raises `ConversionError` if a format cannot hold a checkpoint, before anything is written."""
_Write = Callable[[CheckpointView, str, Mapping[str, Any], ConvertOptions], None]
"""Writes a checkpoint to a path; the mapping holds the options of the storage."""

_FIRST_BYTES = {b"|TZR|": "tensorizer", b"PK\x03\x04": "torch"}
_FILE_READERS = {"tensorizer": tensorizer.read, "safetensors": safetensors.read, "torch": torch_file.read}

TARGETS: dict[str, tuple[_Check, _Write]] = {
    "dcp_tensorizer": (dcp_tensorizer.check, dcp_tensorizer.write),
    "tensorizer": (tensorizer.check, tensorizer.write),
    "safetensors": (safetensors.check, safetensors.write),
    "torch": (torch_file.check, torch_file.write),
    "dcp": (dcp.check, dcp.write),
}


def open_checkpoint(
    path: str | os.PathLike[str],
    options: Mapping[str, Any],
    expected_format: str | None = None,
    encryption: DecryptionParams | None = None,
) -> CheckpointView:
    """Opens a checkpoint of any format: a directory or a file, at a local path or URL.

    ``expected_format`` is one of `FORMATS`; by default, the format is recognised. ``encryption`` is the key of an
    encrypted dcp_tensorizer checkpoint.
    """
    return _open(_locate(path, options, expected_format), encryption)


def open_foreign(
    path: str | os.PathLike[str], options: Mapping[str, Any] | None, encryption: DecryptionParams | None = None
) -> tuple[CheckpointView, dict[str, int]] | None:
    """Opens a checkpoint whose format is not this package's, and returns it with the sizes of its data files.

    If there is no such checkpoint, returns None.
    """
    try:
        location = _locate(path, options or {})
    except (NotCommitted, ConversionError):
        return None
    if location.format == "dcp_tensorizer":
        return None
    view, storage = _open(location, encryption), location.storage
    if location.name:
        return view, {location.name: storage.head(location.name) or 0}
    used = {chunk.item.file for tensor in view.tensors.values() for chunk in tensor.chunks}
    files = [file for file in storage.listing()[0] if file.name in used or file.name.endswith(".distcp")]
    return view, {file.name: file.nbytes for file in files}


def open_all(
    paths: Sequence[str | os.PathLike[str]],
    options: Mapping[str, Any],
    encryption: DecryptionParams | None = None,
    *,
    look_at_files: bool = False,
) -> list[CheckpointView]:
    """Opens several checkpoints (see `open_checkpoint`). With a key, at least one of them must be encrypted.

    With ``look_at_files``, raises `ReadError` if data files of this package's checkpoints are missing or have other
    sizes.
    """
    if encryption is not None:
        check_decryption(encryption)
    located = [_locate(path, options) for path in paths]
    for location in located if look_at_files else ():
        files = data_files(location.parts)
        check_files(location.storage, files, files)
    if encryption is not None and not any(location.is_encrypted for location in located):
        names = " and ".join(location.path for location in located)
        raise DecryptionError(f"a key was given, but nothing is encrypted in {names}. Read without a key.")
    return [_open(location, encryption if location.is_encrypted else None) for location in located]


@dataclass(frozen=True, slots=True)
class _Location:
    """``name`` is empty for a directory, and ``parts`` for a format that is not this package's."""

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
    actual: str | None = None
    with suppress(NotCommitted):  # a file, or nothing
        actual = format_of(storage, 0)
    if actual == "dcp":
        pickled = storage.read(metadata_file_name())
        if pickled is None:
            raise ConversionError(
                f"{storage.path} is in torch's own format, and each rank has saved by itself (use_collectives=False). "
                f"Load it with torch's FileSystemReader on the same number of ranks, and save it with collectives."
            )
        if is_index(pickled):  # from before this package's first release: `read_parts` raises
            actual = "dcp_tensorizer"
    if actual is None:
        storage, name = beside(re.sub("(?<=[^:/])/+$", "", text), options)
        actual = _file_format(storage, name)
    if expected_format not in (None, actual):
        raise ConversionError(f"{redact(text)} must be in the format {expected_format}, got {actual}.")
    return _Location(redact(text), actual, storage, name, read_parts(storage) if actual == "dcp_tensorizer" else {})


def _open(location: _Location, encryption: DecryptionParams | None) -> CheckpointView:
    storage = location.storage
    if location.format == "dcp_tensorizer":
        return view_checkpoint(storage, location.parts, unlock_parts(storage, location.parts, encryption))
    if encryption is not None:
        raise DecryptionError(
            f"{location.path} is in the format {location.format}, for which a key has no effect. Read it without a key."
        )
    with naming(storage, location.path):
        if location.format == "dcp":
            return dcp.read(storage, storage.read(metadata_file_name()) or b"")
        if not location.name:
            return safetensors.read_directory(storage)
        return _FILE_READERS[location.format](storage, location.name)


def _file_format(storage: Storage, name: str) -> str:
    path = f"{storage.path}/{name}"
    nbytes = storage.head(name)
    try:
        if nbytes is None or (nbytes == 0 and _is_directory(storage, name)):  # some storages report directories so
            raise NotCommitted(f"{path} does not exist, or holds no checkpoint.")
        with storage.reading(name) as reader:
            head = reader.read_range(0, min(9, nbytes))
    except (NotCommitted, ReadError) as error:
        if not _is_directory(storage, name):
            raise
        if has_data(directory := storage.child(name)):
            raise nothing_committed(directory) from error
        hint = where_below(directory) or " Name a checkpoint itself: the directory or the file of one save."
        known = ", ".join(FORMATS)
        raise NotCommitted(
            f"{path} holds no checkpoint of a known format ({known}): {contents(directory)}.{hint}"
        ) from error
    for first_bytes, name_of_format in _FIRST_BYTES.items():
        if head.startswith(first_bytes):
            return name_of_format
    if head[8:] == b"{":
        return "safetensors"
    advice = f" It is a file {kind_of_file(head)}." if looks_like_pickle(head) else ""
    raise ConversionError(f"{path} is in none of the formats {', '.join(FORMATS)}.{advice}")


def _is_directory(storage: Storage, name: str) -> bool:
    """Returns whether a directory has this name. On object stores, reading it is like reading a missing file."""
    with suppress(CheckpointError):
        files, folders = storage.child(name).listing()
        return bool(folders) or [file.name for file in files] != [name]  # fsspec lists a file as itself
    return False


# --- renaming keys: strip a prefix, rename, add a prefix --------------------------------------------------------------


def new_paths(paths: Mapping[str, Path], options: ConvertOptions, source: str) -> dict[str, Path]:
    """Returns the new path of each value, by its old key."""
    stripped = {key: _stripped(path, options.strip_prefix) for key, path in paths.items()}
    if options.strip_prefix and all(stripped[key] is paths[key] for key in paths):
        raise ConversionError(f"no selected key of {source} begins with {options.strip_prefix!r}. Change strip_prefix.")
    renamed = _renamed(stripped, options.rename, source)
    *around, begin = options.add_prefix.split(".")  # without a prefix, `around` is empty
    new = {
        key: (*around, f"{begin}{path[0]}", *path[1:]) if begin else (*around, *path) for key, path in renamed.items()
    }
    first: dict[str, str] = {}
    for key, path in new.items():
        if first.setdefault(key_of(path), key) != key:
            raise ConversionError(f"{first[key_of(path)]!r} and {key!r} of {source} would both be {key_of(path)!r}.")
    return new


def _stripped(path: Path, prefix: str) -> Path:
    """Removes ``prefix`` from a path whose key begins with it. The first part of the new path is a str.

    Returns any other path itself.
    """
    whole = path
    if not prefix or not key_of(path).startswith(prefix):
        return whole
    rest = prefix
    while path and rest.startswith(f"{path[0]}."):
        rest = rest.removeprefix(f"{path[0]}.")
        path = path[1:]
    if path and (rest or not isinstance(path[0], str)):
        path = (str(path[0]).removeprefix(rest), *path[1:])
    if not key_of(path):
        raise ConversionError(
            f"nothing is left of the key {key_of(whole)!r} without the prefix {prefix!r}. Leave the key out."
        )
    return path


def _renamed(paths: Mapping[str, Path], rules: Mapping[str, str], source: str) -> dict[str, Path]:
    try:
        renaming = Renaming(rules)
    except ValueError as error:
        raise ConversionError(str(error)) from None
    renamed = {}
    for old, path in paths.items():
        key = key_of(path)
        new = renaming.new_name(key)
        renamed[old] = path if new == key else _moved(path, new)
    for rule in renaming.unused:
        raise ConversionError(f"no selected key of {source} matches {rule!r}. Change rename.")
    return renamed


def _moved(path: Path, key: str) -> Path:
    """Returns the path of a new key: the parts of the old path with which the key begins, then its rest as one part."""
    kept: list[str | int] = []
    for part in path[:-1]:
        if not key.startswith(f"{part}.") or key == f"{part}.":
            break
        kept.append(part)
        key = key.removeprefix(f"{part}.")
    return (*kept, key)
