"""Checks a ``torch.save`` file before ``torch.load`` reads it with its weights-only rules.

An archive may expand to more than its size, and its pickle may take very long to load. The checks refuse such files in
time and memory proportional to their size.

Python and torch have different readers of zip archives. They agree on the contents only for the plain layout that torch
writes, so no other layout is accepted.
"""

from __future__ import annotations

import struct
import zipfile
from typing import IO, Any

from .._runtime.torch_compat import tensor_makers
from .._tensor_file.names import MAX_DIMENSIONS
from .._trust.inert import Inert, Made, Named

_END = struct.Struct("<4s4HIIH")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR_64 = struct.Struct("<4sIQI")
# In a record's header: the lengths of its name, and of the extra field before its data.
_LOCAL = struct.Struct("<26xHH")
_HAS_DESCRIPTOR = 0x8  # the flag of an entry whose CRC-32 and size follow its data


def check_saved(file: IO[bytes], nbytes: int) -> list[tuple[int, int]]:
    """Checks a ``torch.save`` file before the weights-only rules of ``torch.load`` are applied.

    The elements of tensors must be uncompressed, and at the offsets that torch computes. Returns the offset of each
    record's header and the record's size, in file order. Raises `EOFError` if the end of the file is missing,
    `NotImplementedError` for files that torch can load, but whose tensors are not stored as plain bytes, and
    `ValueError` for any other file, or if the archive would take more time or memory than its size justifies.
    """
    file.seek(0)
    if file.read(4) != b"PK\3\4":
        raise NotImplementedError(
            "it is not a zip archive. Load files of torch < 1.6 with torch, and save them again. If "
            "FileSystemWriter wrote it with serialization_format=SAFETENSORS, torch's FileSystemReader cannot load it "
            "either: save the checkpoint again, without that option."
        )
    archive = check_archive(file, nbytes)
    infos = archive.infolist()
    for info in infos:
        name = info.filename.lower()  # torch's lookup ignores case
        if name.endswith("/data.pkl"):
            check_pickle(_record(file, info))
        if name.endswith("/byteorder") and _record(file, info) == b"big":
            raise NotImplementedError(
                "it is from a big-endian machine. Load it with torch on this machine, and save it again."
            )
    # With this record, torch does not look up offsets: it computes them as if a descriptor followed each record.
    is_counted = any(info.filename.endswith("/.format_version") for info in infos)
    if is_counted and any(info.file_size and not info.flag_bits & _HAS_DESCRIPTOR for info in infos):
        raise NotImplementedError(
            "it was repacked in a layout other than torch.save's. Load it with torch, and save it again."
        )
    return sorted((info.header_offset, info.file_size) for info in infos)


def check_archive(file: IO[bytes], nbytes: int) -> zipfile.ZipFile:
    """Opens an archive of uncompressed records that do not overlap.

    Raises `EOFError` if the end of the file is missing, `NotImplementedError` for a compressed or repacked archive, and
    `ValueError` for any other archive.
    """
    directory = _directory(file, nbytes)
    file.seek(0)
    try:
        archive = zipfile.ZipFile(file)
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    infos = archive.infolist()
    if any(info.compress_type != zipfile.ZIP_STORED for info in infos):
        raise NotImplementedError("it is compressed. Load it with torch, and save it again.")
    end = 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        if info.file_size != info.compress_size or info.header_offset < end or info.flag_bits & 1:
            raise ValueError(f"its record {info.filename!r} overlaps another one, or is not stored as plain bytes")
        end = info.header_offset + 30 + info.file_size
    if end > directory or len({info.filename.lower() for info in infos}) < len(infos):
        raise ValueError("its records overlap its central directory, or two of its records have the same name")
    return archive


def _directory(file: IO[bytes], nbytes: int) -> int:
    """Returns the offset of the central directory, which must end the file, together with its end records."""
    if nbytes < _END.size:
        raise EOFError("it is too short for an archive")
    signature, _, _, here, total, size, offset, comment = _END.unpack(_read(file, nbytes - _END.size, _END.size))
    end = nbytes - _END.size
    if signature != b"PK\5\6":
        raise EOFError("its last bytes are not the end of an archive: it is truncated, or was repacked")
    if comment or here != total:
        raise NotImplementedError("it was repacked. Load it with torch, and save it again.")
    locator_offset = end - _LOCATOR_64.size
    locator = _read(file, locator_offset, _LOCATOR_64.size) if locator_offset >= _END_64.size else b""
    if locator[:4] == b"PK\6\7":
        end = locator_offset - _END_64.size
        _, _, large_end, _ = _LOCATOR_64.unpack(locator)
        large = _END_64.unpack(_read(file, end, _END_64.size))
        if large[0] != b"PK\6\6" or large_end != end or large[6] != large[7]:
            raise ValueError("the end records of its central directory are damaged")
        size, offset = large[8], large[9]
    if offset + size != end:
        raise ValueError("its central directory is not at the offset that its end record gives")
    return int(offset)


def _record(file: IO[bytes], info: zipfile.ZipInfo) -> bytes:
    """Returns the bytes of a record. Does not check its CRC-32, because ``torch.save`` may omit it."""
    names, more = _LOCAL.unpack(_read(file, info.header_offset, _LOCAL.size))
    return _read(file, info.header_offset + _LOCAL.size + names + more, info.file_size)


def _read(file: IO[bytes], offset: int, nbytes: int) -> bytes:
    file.seek(offset)
    return file.read(nbytes)


def check_pickle(pickled: bytes) -> None:
    """Checks a pickle before the weights-only rules of ``torch.load`` are applied.

    Raises `ValueError` if the pickle is damaged, or takes more time or memory than its size justifies.
    """
    try:
        _Bounded(pickled).read()
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


class _Bounded(Inert):
    """A reader that refuses calls that torch's rules allow, but whose cost exceeds the size of their arguments."""

    def call(self, what: Named, arguments: tuple[Any, ...]) -> Made:
        if what.name == "builtins.bytearray" and any(type(argument) is int for argument in arguments):
            raise ValueError("it allocates a bytearray of a given size")
        if what.name == "_codecs.encode" and arguments[1:] != ("latin1",):
            raise ValueError("it encodes text in a way that torch.save does not")
        if what.name.rpartition(".")[0] in tensor_makers:
            _check_dimensions(arguments, 0)
        return Made(what.name, arguments)


def _check_dimensions(value: Any, depth: int) -> None:
    if type(value) is Made:
        value = value.arguments
    if type(value) not in (tuple, list):
        return
    if len(value) > MAX_DIMENSIONS:
        raise ValueError(f"a tensor must have at most {MAX_DIMENSIONS} dimensions, got {len(value):,}")
    if depth < 2:
        for inner in value:
            _check_dimensions(inner, depth + 1)
