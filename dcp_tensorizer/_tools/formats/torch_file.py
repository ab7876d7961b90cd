"""What ``torch.save`` writes, read and written without ever being in memory: a file, or a part of one.

The file is a zip archive: a pickle of the state dict, and a record with each tensor's elements. With fake tensors,
``torch.load`` says where these records lie instead of reading them, and ``torch.save`` makes an archive in which they
are only room. What else is in that archive becomes part of the result, which Python's zipfile writes: it needs no
seeking, and makes the CRC-32s.
"""

from __future__ import annotations

import io
import struct
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..._format.chunks import Region
from ..._format.objects import load_object
from ..._memory.tensor_bytes import host_bytes
from ..._storage.base import Storage
from ..._torch_compat import FakeTensorMode, checkpoint_offset, flatten_state_dict
from ...errors import ConversionError, UntrustedObject, WriteError
from ..atomic_output import new_file, written_file
from ..checkpoint_view import (
    BLOCK,
    CheckpointView,
    Path,
    StoredObject,
    StoredTensor,
    StoredValue,
    blocks_of,
    plain_tensor,
    refused,
)
from .common import FileRange, Options, open_file
from .fake_load import is_located, load_fake, tensors_in
from .nesting import check_lists, check_paths, check_size, exact_paths, nested

__all__ = ["check", "locate", "read", "write"]

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
        raise ConversionError(f"{path} holds a {type(state).__name__}, and no state dict")
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
