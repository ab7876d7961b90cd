"""The container of a checkpoint's index, which is stored as ``.metadata``.

    start     80 bytes: magic, version, the lengths of head and file, a digest of start and head, a MAC
    head      MessagePack: the time of the save, the versions of this package and torch, the data files, and the
              location of each section
    sections  MessagePack (only the planner's data may be the bytes of ``torch.save``), one after the other: the entries
              of the state dict, the planner's data, small values, and for each rank the locations of what it wrote

The head has a digest of each section, so that a section can be read, checked and decoded separately. `schema` has the
types of the contents, and ``docs/reference/format.md`` describes them for other programs.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
import xxhash

from .._tensor_file.names import Seal, is_data_file_name, metadata_file_name
from .._version import INDEX_VERSION
from ..errors import MetadataError, UnsupportedFormat
from .schema import DataFile, Head, Section, SectionKind, decode_head, encode_rows

if TYPE_CHECKING:
    from .._storage.base import Storage

FIRST_BYTES = 1 << 20
"""The number of bytes that the first request for an index reads: usually the whole index of up to a hundred ranks."""

_Rows = TypeVar("_Rows")

_MAGIC = b"\x89DCPTZR\n"
# Magic, version, bytes of the head, bytes of the file. Every version has these fields, the digest and the MAC.
_FIXED = struct.Struct("<8sQQQ")
_DIGEST = 16
_MAC = 32
_START = _FIXED.size + _DIGEST + _MAC
_METADATA = metadata_file_name()
_PICKLE = b"\x80"  # the first byte of any pickle of protocol 2 or later
_OLD_TRAILER = b"\x00DCPTZR1"  # near the end of the pickles that this package wrote before its first release


class Part(NamedTuple):
    """A section to be packed. ``files`` are the data files that its locations refer to."""

    kind: SectionKind
    rank: int | None
    content: bytes
    files: tuple[DataFile, ...] = ()


class IndexFile(NamedTuple):
    """An index, of which the first bytes have been read."""

    path: str
    head: Head
    data: bytes  # the first bytes of the file
    read: Callable[[int, int], bytes] | None = None  # reads bytes at an offset; None if ``data`` is the whole file

    @property
    def seal(self) -> Seal:
        """The proof that the index was made with the checkpoint's key, if the checkpoint is encrypted."""
        fixed, _, mac, packed = _start_of(self.data)
        return Seal(_strong(fixed, packed), bytes(mac))

    @property
    def files(self) -> dict[str, int]:
        return {file.name: file.nbytes for section in self.head.sections for file in section.files}

    def section(self, section: Section) -> bytes | memoryview:
        """Returns the bytes of a section, after checking their digests.

        Raises `MetadataError` if the bytes are damaged, and `ReadError` if they cannot be read.
        """
        start = head_end(self.data) + section.offset
        if self.read is None or start + section.nbytes <= len(self.data):
            content: bytes | memoryview = memoryview(self.data)[start : start + section.nbytes]
        else:
            content = self.read(start, section.nbytes)
        if xxhash.xxh3_128_digest(content) != section.digest:
            raise MetadataError(
                f"{self.path} is damaged, or was overwritten while it was read: a checksum does not match. Load the "
                f"checkpoint again, or another one."
            )
        if section.strong is not None and _strong(content) != section.strong:
            raise _damaged(self.path, "the BLAKE2b digest of a section does not match")
        return content


# --- writing ----------------------------------------------------------------------------------------------------------


def pack(head: Head, parts: Iterable[Part], sign: Callable[[bytes], bytes] | None = None) -> bytes:
    """Packs the index, and sets the sections of ``head``. ``sign`` returns a fingerprint's MAC; None: no encryption."""
    contents = []
    offset = 0
    for part in parts:
        strong = None if sign is None else _strong(part.content)
        nbytes = len(part.content)
        digest = xxhash.xxh3_128_digest(part.content)
        head.sections.append(Section(part.kind, part.rank, offset, nbytes, digest, strong, list(part.files)))
        contents.append(part.content)
        offset += nbytes
    packed = encode_rows(head)
    fixed = _FIXED.pack(_MAGIC, INDEX_VERSION, len(packed), _START + len(packed) + offset)
    mac = bytes(_MAC) if sign is None else sign(_strong(fixed, packed))
    return b"".join((fixed, _digest(fixed, mac, packed), mac, packed, *contents))


def _digest(*pieces: bytes | memoryview) -> bytes:
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece)
    return state.digest()


def _strong(*pieces: bytes | memoryview) -> bytes:
    state = hashlib.blake2b(digest_size=32)
    for piece in pieces:
        state.update(piece)
    return state.digest()


# --- reading ----------------------------------------------------------------------------------------------------------


def is_index(data: bytes) -> bool:
    """Returns whether bytes begin like an index, or end like this package's metadata from before its first release."""
    return data.startswith(_MAGIC) or data[-24:-16] == _OLD_TRAILER


def looks_like_pickle(data: bytes) -> bool:
    return data.startswith(_PICKLE)


def head_end(data: bytes) -> int:
    """Returns the end of an index's head, where the sections begin; 0 if there is no complete start."""
    return _START + int(_FIXED.unpack_from(data)[2]) if data.startswith(_MAGIC) and len(data) >= _START else 0


def committed(storage: Storage, name: str = _METADATA) -> IndexFile | None:
    """Opens the index of the checkpoint in a directory, or the index ``name`` of one rank.

    If no checkpoint is committed, returns None. Raises what `open_index` raises.
    """
    data = storage.read(name, FIRST_BYTES)
    if data is None:
        return None
    path, size = f"{storage.path}/{name}", (storage.head(name) or 0) if len(data) == FIRST_BYTES else len(data)

    def read(offset: int, nbytes: int) -> bytes:
        if offset + nbytes > size:  # checked before allocating memory for missing bytes
            raise _damaged(path, f"it has {size:,} bytes instead of at least {offset + nbytes:,}")
        return storage.read_range(name, offset, nbytes)

    file = open_index(path, data, read)
    if (recorded := int(_FIXED.unpack_from(data)[3])) != size:
        raise _damaged(path, f"it has {size:,} bytes instead of {recorded:,}")
    return file


def open_index(path: str, data: bytes, read: Callable[[int, int], bytes]) -> IndexFile:
    """Opens an index whose first `FIRST_BYTES` bytes, or all bytes, have been read.

    ``read`` reads bytes at an offset. Raises `MetadataError` if the file is damaged, has another version or is no
    index, and `ReadError` if it cannot be read.
    """
    if len(data) < FIRST_BYTES or not data.startswith(_MAGIC):
        return IndexFile(path, read_head(data, path), data)
    data = _at_least(head_end(data), data, read)
    head = read_head(data, path, whole=False)
    # Every load needs all sections except the locations, which come last. One more request reads all that it needs.
    sections = max((s.offset + s.nbytes for s in head.sections if s.kind != "places"), default=0)
    return IndexFile(path, head, _at_least(head_end(data) + sections, data, read), read)


def _at_least(nbytes: int, data: bytes, read: Callable[[int, int], bytes]) -> bytes:
    return data + read(len(data), nbytes - len(data)) if nbytes > len(data) else data


def read_head(data: bytes, path: str, *, whole: bool = True) -> Head:
    """Checks and decodes the head. Raises `MetadataError` if it is damaged, has another version or is no index.

    ``data`` is the beginning of the file, or, if ``whole`` is true, all of it.
    """
    if not data.startswith(_MAGIC):
        raise _not_an_index(path, data)
    if len(data) < _START:
        raise _damaged(path, f"it ends after {len(data):,} bytes")
    _, version, head_nbytes, nbytes = _FIXED.unpack_from(data)
    if head_nbytes > len(data) - _START:
        raise _damaged(path, "its head is incomplete")
    fixed, digest, mac, packed = _start_of(data)
    if _digest(fixed, mac, packed) != digest:
        raise _damaged(path, "its checksum does not match")
    if version != INDEX_VERSION:
        raise UnsupportedFormat(
            f"{path} has format version {version}, and this release reads version {INDEX_VERSION}. Install the "
            f"release of dcp_tensorizer that wrote it, or a newer one."
        )
    if nbytes < len(data) or (whole and nbytes != len(data)):
        raise _damaged(path, f"it has {len(data):,} bytes instead of {nbytes:,}")
    head = decoded(decode_head, packed, path)
    _check_head(head, nbytes - _START - head_nbytes, path)
    return head


def decoded(decode: Callable[[bytes | memoryview], _Rows], content: bytes | memoryview, path: str) -> _Rows:
    """Decodes bytes. Raises `MetadataError`, naming the path, if they are not of the expected type."""
    try:
        return decode(content)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise invalid_index(path, str(error)) from None


def invalid_index(path: str, what: str) -> MetadataError:
    """Returns the error for an index whose digests match, but which no writer would write."""
    return MetadataError(f"{path} is not a valid dcp_tensorizer index: {what}. Load another checkpoint.")


def _start_of(data: bytes) -> tuple[memoryview, memoryview, memoryview, memoryview]:
    """Returns the fixed fields, the digest, the MAC and the head."""
    view, mac_offset = memoryview(data), _FIXED.size + _DIGEST
    return view[: _FIXED.size], view[_FIXED.size : mac_offset], view[mac_offset:_START], view[_START : head_end(data)]


def _check_head(head: Head, nbytes: int, path: str) -> None:
    end = 0
    for section in head.sections:
        if section.offset != end or (section.strong is None) != (head.encryption is None):
            raise invalid_index(path, "its sections leave gaps or overlap, or a strong digest is missing or unexpected")
        end += section.nbytes
    if end != nbytes:
        raise invalid_index(path, f"its sections have {end:,} bytes, and {nbytes:,} follow its head")
    kinds = [section.kind for section in head.sections]
    first = [kind for kind in kinds if kind != "places"]
    if first != kinds[: len(first)] or len(set(first)) < len(first) or {"paths", "planner"} <= set(first):
        raise invalid_index(path, f"its sections {kinds} are an invalid combination, or in the wrong order")
    if "entries" not in first:
        raise invalid_index(path, "it has no section of entries")
    names = [file.name for section in head.sections for file in section.files]
    if len(set(names)) < len(names):
        raise invalid_index(path, "it names a data file twice")
    for name in names:
        if not is_data_file_name(name):
            raise invalid_index(path, f"{name!r} is not the name of a data file")


def _not_an_index(path: str, data: bytes) -> MetadataError:
    if data[-24:-16] == _OLD_TRAILER:
        return UnsupportedFormat(
            f"{path} is a pickle that dcp_tensorizer wrote before its first release. No release reads such a pickle. "
            f"Load the checkpoint with the revision that wrote it, and save it with torch's own FileSystemWriter."
        )
    if data.startswith(_PICKLE):
        return UnsupportedFormat(
            f"{path} was not written by dcp_tensorizer: it is a pickle, such as torch's own FileSystemWriter writes. "
            f"Load the checkpoint with open_reader, inspect it with `dcp-tensorizer report`, or convert it with "
            f"`dcp-tensorizer convert`."
        )
    return MetadataError(
        f"{path} was not written by dcp_tensorizer, or is damaged at its beginning. Load another checkpoint."
    )


def _damaged(path: str, why: str) -> MetadataError:
    return MetadataError(f"{path} is damaged: {why}. Load another checkpoint.")
