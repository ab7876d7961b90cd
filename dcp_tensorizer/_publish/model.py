"""A model in Hugging Face's layout: a directory of safetensors files, their index, and other small files.

Reads and writes bytes, not tensors, and does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from .._formats.safetensors_header import INDEX, SINGLE, encode_header, is_plain_name
from .._formats.weight_files import (
    StoredBytes,
    WeightFile,
    check_located,
    has_single,
    read_small,
    read_weight_file,
    read_weight_map,
)
from .._storage.base import Storage
from .._tensor_file.encode import FileParts
from .._tensor_file.names import is_of_save
from ..errors import NotCommitted, ReadError
from .delta import PIECE

READ_BYTES = 8 * PIECE
"""Bytes that are read in one call. On an object store, each read has the latency of a request."""


OtherFile = bytes | tuple[int, float | None]
"""A file beside the weights: its contents, or its size and the time of its last write on the storage."""


@dataclass(frozen=True, slots=True)
class Model:
    storage: Storage
    index: bytes | None  # the contents of the index; None for a model of one file without an index
    weights: dict[str, WeightFile]  # the safetensors files, by name
    others: Mapping[str, OtherFile]  # by name: the configuration, the tokenizer and any others


def read_model(storage: Storage, index: bytes | None = None, others: Mapping[str, OtherFile] | None = None) -> Model:
    """Reads the index and the headers of a model's directory.

    Without ``index``, reads the model that `read_weight_files` would read. Pass ``index`` to read a model whose index
    was replaced, but whose files still exist, and ``others`` to read a model whose other files may have been replaced.
    """
    file_of = dict[str, str]()
    if index is None and has_single(storage):
        names = {SINGLE}
    elif index is None and (index := read_small(storage, INDEX)) is None:
        raise NotCommitted(f"there is no model in {storage.path}: neither {INDEX} nor {SINGLE}")
    else:
        file_of = read_weight_map(storage, index)
        names = set(file_of.values())
    weights = {name: read_weight_file(storage, name) for name in sorted(names)}
    check_located(storage.path, file_of, weights.values())
    return Model(storage, index, weights, other_files(storage) if others is None else others)


def other_files(storage: Storage) -> dict[str, OtherFile]:
    files = sorted(storage.listing()[0], key=attrgetter("name"))
    return {file.name: (file.nbytes, file.modified) for file in files if is_other_file(file.name)}


def is_other_file(name: str) -> bool:
    """Returns whether a file in a model's directory is beside the weights, and neither hidden nor a save's own file."""
    return is_plain_name(name) and not (name == INDEX or name.endswith(".safetensors") or is_of_save(name))


def read_blocks(storage: Storage, name: str) -> Iterator[bytes]:
    nbytes = storage.head(name)
    if nbytes is None:
        raise ReadError(f"cannot open {storage.path}/{name}: it does not exist")
    if nbytes:
        with storage.reading(name) as reader:
            for start in range(0, nbytes, READ_BYTES):
                yield reader.read_range(start, min(READ_BYTES, nbytes - start))


Read = Callable[[StoredBytes, int, np.ndarray], object]
"""Fills an array of ``uint8`` with the bytes of a tensor from an offset on."""


@contextmanager
def reading_tensors(storage: Storage, name: str) -> Iterator[Read]:
    """Opens a file for the duration of the ``with`` statement, and yields a function that reads its tensors."""
    path = f"{storage.path}/{name}"
    try:
        reader = storage.open(name)
    except OSError as error:
        raise ReadError(storage.scrub(f"cannot open {path}: {error}")) from storage.cause(error)

    def read(tensor: StoredBytes, start: int, block: np.ndarray) -> None:
        try:
            reader.read_into([block.data], tensor.offset + start)
        except (OSError, EOFError) as error:
            message = f"cannot read {tensor.key!r} in {path}: {error}"
            raise ReadError(storage.scrub(message)) from storage.cause(error)

    with closing(reader):
        yield read


@contextmanager
def written_file(storage: Storage, name: str, nbytes: int) -> Iterator[Callable[[memoryview], None]]:
    """Writes a file of ``nbytes`` bytes; yields a function that takes its pieces in order.

    If the file cannot be written, removes it and raises `WriteError`.
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
    """Returns the header of a safetensors file whose tensors are one-dimensional, of dtype U8.

    ``sizes`` has the size of each tensor in bytes, by its name. ``notes`` becomes the ``__metadata__``.
    """
    described: dict[str, Any] = {"__metadata__": dict(notes)}
    position = 0
    for key, nbytes in sizes.items():
        described[key] = {"dtype": "U8", "shape": [nbytes], "data_offsets": [position, position + nbytes]}
        position += nbytes
    return encode_header(described)
