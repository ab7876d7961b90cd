"""Tensorizer files: encoding tensors into a sink, the index of a file, block digests; the only use of tensorizer.

Every file is one that stock ``tensorizer.TensorDeserializer`` opens.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from tensorizer import TensorSerializer

from ._layout import INDEX_CAPACITY, block_size
from ._storage import Sink
from .errors import ChecksumMismatch

__all__ = [
    "IndexEntry",
    "block_digests",
    "check_blocks",
    "encode",
    "host_bytes",
    "read_index",
    "unsafe_globals",
]

# magic, then: data version, feature flags, tensor bytes, unused, tensor count, length of the index
# (tensorizer's ``_FileHeader``)
_PROLOGUE = struct.Struct("<5sI32sQ8xQQ")
_MAGIC = b"|TZR|"
_HEAD = _PROLOGUE.size + INDEX_CAPACITY
_VERSIONED = 2  # ``_FileFeatureFlags.versioned_headers``: each index entry is preceded by its own version
_LONG_DIMENSIONS = 5  # from this entry version on dimensions have 64 bits (``LONG_TENSOR_TENSORIZER_VERSION``)

# Tensors that are not in the staging buffer may need a copy each while they are written (from a GPU, or to make
# them contiguous); in batches, that is never more than this.
_BATCH_BYTES = 256 << 20


class IndexEntry(NamedTuple):
    """Where a tensor's bytes are in a tensorizer file."""

    offset: int
    length: int


def encode(tensors: Sequence[tuple[str, torch.Tensor]], sink: Sink, threads: int) -> list[IndexEntry]:
    """Writes a complete tensorizer file and closes the sink.

    Args:
        tensors: Names, unique within the file, and tensors with at least one element each, in file order.
        sink: Where to; aborted when anything fails.
        threads: Upper bound on hashing threads.

    Returns:
        Where each tensor's data is, in the order given.

    Raises:
        OSError: the sink failed.
    """
    recorder = _HeadRecorder(sink)
    try:
        serializer = TensorSerializer(recorder, limit_cpu_concurrency=threads)
        for batch in _batches(tensors):
            serializer.write_state_dict({name: _on_host(tensor) for name, tensor in batch})
        serializer.close()
    except BaseException:
        # Before the serializer is collected: its finalizer closes the file, which would complete it.
        sink.abort()
        raise
    index = read_index(bytes(recorder.head))
    return [index[name] for name, _ in tensors]


def read_index(head: bytes) -> dict[str, IndexEntry]:
    """Reads the index from the first 256 KiB and a few bytes of a tensorizer file.

    Raises:
        ValueError: those are not a tensorizer file's.
    """
    if len(head) < _PROLOGUE.size or not head.startswith(_MAGIC):
        raise ValueError("not a tensorizer file")
    _, _, flags, _, count, _ = _PROLOGUE.unpack_from(head)
    versioned = flags[0] & _VERSIONED
    stream = io.BytesIO(head)
    stream.seek(_PROLOGUE.size)
    index = {}
    for _ in range(count):
        version = _unpack(stream, "<I") if versioned else 1
        name = stream.read(_unpack(stream, "<H")).decode()
        _unpack(stream, "<B")  # kind of tensor
        stream.read(_unpack(stream, "<B"))  # dtype
        stream.read(_unpack(stream, "<B") * (8 if version >= _LONG_DIMENSIONS else 4))
        _header, offset, length = struct.unpack("<QQQ", stream.read(24))
        index[name] = IndexEntry(offset, length)
    return index


def block_digests(data: memoryview) -> bytes:
    """XXH3-64 of each block of a tensor's bytes (see `_layout.block_size`)."""
    step = block_size(data.nbytes)
    return b"".join(xxhash.xxh3_64_digest(data[start : start + step]) for start in range(0, data.nbytes, step))


def check_blocks(data: memoryview, first: int, step: int, digests: bytes) -> None:
    """Compares whole blocks, from the ``first`` on, with their digests.

    Raises:
        ChecksumMismatch: naming the offset of the first damaged block in the tensor.
    """
    for number, start in enumerate(range(0, data.nbytes, step), first):
        if xxhash.xxh3_64_digest(data[start : start + step]) != digests[8 * number : 8 * number + 8]:
            raise ChecksumMismatch(f"bytes {number * step:,} to {number * step + step:,}")


def unsafe_globals(data: bytes) -> tuple[str, ...]:
    """What ``torch.load(weights_only=True)`` would refuse in a saved object: ``module.name`` of each."""
    try:
        return tuple(sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data)))))
    except Exception:
        return ("an object that the weights-only loader cannot parse",)


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in C order, in host memory; a copy only where they are not so already."""
    return _on_host(tensor).contiguous().reshape(-1).view(torch.uint8).numpy().data


class _HeadRecorder:
    """Passes everything on to a sink and remembers the head of the file, where the index is."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.head = bytearray(_HEAD)
        self.tell, self.seek, self.flush, self.close = sink.tell, sink.seek, sink.flush, sink.close
        self.readable, self.writable, self.seekable = sink.readable, sink.writable, sink.seekable

    def write(self, data: Any) -> int:
        position = self._sink.tell()
        if position < _HEAD:
            head = bytes(np.frombuffer(data, dtype=np.uint8)[: _HEAD - position])
            self.head[position : position + len(head)] = head
        return self._sink.write(data)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    # One element is contiguous whatever its strides are, but cannot be viewed as bytes with all of them.
    return plain.as_strided(plain.shape, (1,) * plain.ndim) if plain.numel() == 1 else plain


def _batches(tensors: Sequence[tuple[str, torch.Tensor]]) -> Iterable[list[tuple[str, torch.Tensor]]]:
    batch: list[tuple[str, torch.Tensor]] = []
    nbytes = 0
    for name, tensor in tensors:
        copied = tensor.device.type != "cpu" or not tensor.is_contiguous()
        if batch and copied and nbytes + tensor.nbytes > _BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append((name, tensor))
        nbytes += tensor.nbytes if copied else 0
    yield batch


def _unpack(stream: io.BytesIO, fmt: str) -> int:
    return int(struct.unpack(fmt, stream.read(struct.calcsize(fmt)))[0])
