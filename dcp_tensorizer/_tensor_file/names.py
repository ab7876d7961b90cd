"""The names of a checkpoint's files, the locations of stored items, and the sizes of blocks."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

# tensorizer reserves 256 KiB for the index of a file and fails on the first entry past it
# (``TensorSerializer.__init__``, ``metadata_size``).
INDEX_CAPACITY = 256 * 1024

MAX_DIMENSIONS = 255
"""The maximum number of dimensions of a tensor: a tensorizer file has one byte for this number."""
MAX_NUMBER = 2**63 - 1
"""The largest size, offset or length in a file: a signed integer of 64 bits."""

# Digests are per block, so that partial reads can be verified. With at most 64 blocks, a tensor has at most 520 bytes
# of digests, and a slice of rows reads at most two blocks more than it needs. A block of less than 64 KiB would take
# longer to request than to read. A block of more than 8 MiB would not fit into a reader's buffers, so tensors of more
# than 512 MiB have more than 64 blocks.
_MAX_BLOCKS = 64
_MIN_BLOCK = 64 * 1024
_MAX_BLOCK = 8 << 20
# Blocks start at a multiple of the size of the largest element (complex128), so that no element spans two blocks.
_BLOCK_ALIGNMENT = 16
# Blocks of an encrypted item are encrypted separately, so a block must fit into a small buffer. Maximum size and
# alignment are those of tensorizer's own encrypted chunks. Each block adds 24 bytes of metadata.
_MAX_ENCRYPTED_BLOCK = 2 << 20
_ENCRYPTED_ALIGNMENT = 64

NONCE_BYTES, MAC_BYTES = 24, 16  # of libsodium's secretbox

# Small values that are not sharded, such as an optimizer's step, are spread over the files of all ranks. A load would
# open each file for a few bytes. So these values are also stored in the index, which every load reads.
INLINE_BYTES = 4 << 10
"""The largest item, in bytes, that is also stored in the index."""
MAX_INLINE_BYTES = 1 << 20
"""The maximum total size of the items that are also stored in the index, in bytes."""

_DATA_FILE = re.compile(r"__\d+_\d+_[0-9a-f]{32}\.tensors")
_METADATA_FILE = re.compile(r"(__\d+)?\.metadata")
_RECORD_FILE = re.compile(r"__[0-9a-f]{32}\.saving")
_SAVE_ID = re.compile(r"(?<=[_.])[0-9a-f]{32}(?=\.(tensors|saving|tmp)$)")
_TEMPORARY_FILE = re.compile(r"((__\d+)?\.metadata|[^/]+\.safetensors(\.index\.json)?)\.[0-9a-f]{32}\.tmp")
_TEMPORARY_FILE_OF_JOB = re.compile(r"(latest|\.[^/]+\.claim)\.[0-9a-f]{32}\.tmp")


class StoredItem(NamedTuple):
    """The location of the bytes of one write item."""

    file: str
    """Data file, relative to the checkpoint's directory. Empty for an item without bytes."""
    name: str
    """Name of the tensor in that file: the item's FQN, unless a tensorizer file cannot hold it."""
    offset: int
    """First byte of the data in the file."""
    length: int
    """Bytes of data."""
    dtype: str
    """dtype of the stored data without ``torch.``, such as ``bfloat16``. ``uint8`` for objects."""
    kind: str
    """``tensor``: C-contiguous elements. ``object``: the ``torch.save`` data of a value. ``wrapper``: the
    ``torch.save`` data of a tensor of a subclass that has no storage."""
    digests: bytes
    """XXH3-64 of each stored block, 8 bytes each, big-endian, in order (see `block_size`). If an unencrypted item has
    several blocks, the digest of the whole item follows, for readers that read all of it."""
    nonce_and_macs: bytes = b""
    """The nonce of an encrypted item's first block, which increases by 1 per block, then the MAC of each block."""

    @classmethod
    def empty(cls, dtype: str, kind: str = "tensor") -> StoredItem:
        """Returns an item without bytes, which needs no file."""
        return cls("", "", 0, 0, dtype, kind, b"")

    @property
    def block(self) -> int:
        return block_size(self.length, encrypted=bool(self.nonce_and_macs))


class Derivation(NamedTuple):
    """The parameters with which libsodium's ``crypto_pwhash`` derives a key from a passphrase."""

    opslimit: int
    memlimit: int
    algorithm: int
    salt: bytes


class Seal(NamedTuple):
    """The proof that an encrypted checkpoint's index is the one that was saved."""

    fingerprint: bytes  # BLAKE2b-256 of everything in the index
    mac: bytes  # of the fingerprint, with the checkpoint's key (`Cipher.sign`)


def block_size(nbytes: int, *, encrypted: bool = False) -> int:
    """Returns the size of a block, in bytes, of an item of ``nbytes`` bytes. The item's last block may be shorter."""
    if nbytes <= _MIN_BLOCK:  # most tensors are small
        return _MIN_BLOCK
    per_block = -(-nbytes // _MAX_BLOCKS)
    if encrypted:
        return min(_MAX_ENCRYPTED_BLOCK, max(_MIN_BLOCK, _round_up(per_block, _ENCRYPTED_ALIGNMENT)))
    return min(_MAX_BLOCK, max(_MIN_BLOCK, _round_up(per_block, _BLOCK_ALIGNMENT)))


def metadata_file_name(rank: int | None = None) -> str:
    """Returns ``.metadata``, or the name of a rank's own file if ranks save without collectives."""
    return ".metadata" if rank is None else f"__{rank}.metadata"


def is_metadata_file_name(name: str) -> bool:
    return _METADATA_FILE.fullmatch(name) is not None


def is_temporary_file_name(name: str) -> bool:
    """Returns whether ``name`` is a temporary name of a metadata file, a safetensors file, or a model's index."""
    return _TEMPORARY_FILE.fullmatch(name) is not None


def is_temporary_file_of_job(name: str) -> bool:
    """Returns whether ``name`` is the temporary name of a file that a job writes next to its checkpoints."""
    return _TEMPORARY_FILE_OF_JOB.fullmatch(name) is not None


def is_temporary_file_of(name: str, save_ids: Collection[str]) -> bool:
    """Returns whether ``name`` is the temporary name of any file of these saves, such as a model's tokenizer."""
    match = _SAVE_ID.search(name)
    return match is not None and name.endswith(".tmp") and match.group() in save_ids


def name_of_temporary(name: str) -> str:
    """Returns the final name of a file from its temporary name. Both names may exist: see `Storage.mark`."""
    return name[: -len(".0123456789abcdef0123456789abcdef.tmp")]


def data_file_name(rank: int, number: int, save_id: str) -> str:
    """Returns the name of a rank's ``number``-th data file in a save. No two saves share a name."""
    return f"__{rank}_{number}_{save_id}.tensors"


def is_data_file_name(name: str) -> bool:
    """Returns whether `data_file_name` makes ``name``. Such a name cannot lead out of the checkpoint's directory."""
    return _DATA_FILE.fullmatch(name) is not None


def record_file_name(save_id: str) -> str:
    """Returns the name of the record of a save.

    While a record exists, the files of its save are part of a checkpoint only if the metadata names them.
    """
    return f"__{save_id}.saving"


def is_record_file_name(name: str) -> bool:
    return _RECORD_FILE.fullmatch(name) is not None


def save_id_in(name: str) -> str:
    """Returns the id of the save that wrote a data file, a record or a temporary file."""
    match = _SAVE_ID.search(name)
    assert match is not None, name
    return match.group()


def is_ours(name: str) -> bool:
    """Returns whether this package makes files of this name in a checkpoint's directory."""
    patterns = (_DATA_FILE, _METADATA_FILE, _TEMPORARY_FILE, _RECORD_FILE)
    return any(pattern.fullmatch(name) for pattern in patterns)


def is_of_save(name: str) -> bool:
    """Returns whether ``name`` belongs to a checkpoint or to a save, not to a model.

    The temporary names of all files of a save belong to the save, including that of a model's tokenizer.
    """
    return is_ours(name) or _SAVE_ID.search(name) is not None


def data_file_rank(name: str) -> int:
    return int(name.split("_")[2])


def index_entry_size(name: str, ndim: int) -> int:
    """Returns an upper bound for the size, in bytes, of a tensor's entry in the index of a tensorizer file.

    An entry consists of the data version (4), the name's length (2) and the name, the kind of tensor (1), the dtype's
    length (1) and the dtype (at most 48), the number of dimensions (1) and the dimensions (8 each at most), and three
    64-bit integers.
    """
    return 4 + 2 + len(name.encode()) + 1 + 1 + 48 + 1 + 8 * ndim + 24


def _round_up(value: int, quantum: int) -> int:
    return -(-value // quantum) * quantum
