"""Pickles, read without a class or a function of this process: what they name stays a name.

The standard library's unpickler, of which every operation that could reach a class, call something, or take more time
than its own bytes is replaced. `pickle.Unpickler` is in C, and lets only the look-up of names be replaced. So a pickle
could change a class that it may look up (BUILD). It could also hash tuples of tuples for ever: a tuple that holds the
same one twice costs two bytes, and doubles the time.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

from .._runtime.torch_compat import tensor_makers

_BUDGET = 8  # parts of keys, for each byte of a pickle; what no pickle shares needs less than one
_MAX_DEPTH = 64  # of a key


class Named(NamedTuple):
    """A class or a function that a pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Made:
    """Stands for what a pickle makes by a call; each is equal to itself alone, and so costs nothing to hash.

    Attributes:
        what: What is called; of a reference that only ``torch.load`` resolves, ``Named("persistent", "id")``.
        arguments: With what.
        state: What ``__setstate__`` would be given; None: it would not be called.
        members: Added to it afterwards, as to a list, dict or set; a dict's in pairs.
    """

    what: Named
    arguments: tuple[Any, ...]
    state: Any = None
    members: list[Any] = field(default_factory=list)


def load_inert(
    pickled: bytes,
    on_name: Callable[[Named], object] = lambda name: None,
    on_call: Callable[[Made], object] = lambda made: None,
) -> Any:
    """Loads a pickle as values of builtin types, `Named` and `Made`.

    Args:
        pickled: The pickle.
        on_name: Given what it names; may raise.
        on_call: Given what it makes; may raise.

    Raises:
        Exception: it is damaged, or does what no writer does; or what the arguments raise.
    """
    return _Inert(pickled, on_name, on_call).load()


def count_parts(key: Any, limit: int) -> int:
    """The number of values that must be hashed to hash a key, each as often as the key holds it.

    Raises:
        pickle.UnpicklingError: more than a limit, or one of them cannot be hashed.
    """
    count = 0
    left: list[tuple[Any, int]] = [(key, 0)]
    while left:
        part, depth = left.pop()
        count += 1 + (part.bit_length() >> 6 if type(part) is int else 0)
        if count > limit or depth > _MAX_DEPTH:
            raise pickle.UnpicklingError("its keys are made of too many parts")
        if type(part) is tuple:
            left += [(inner, depth + 1) for inner in part]
        elif type(part) in (list, dict, set, bytearray):
            raise pickle.UnpicklingError(f"it has a key of type {type(part).__name__}")
    return count


class _Inert(pickle._Unpickler):
    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, pickled: bytes, on_name: Callable[[Named], object], on_call: Callable[[Made], object]) -> None:
        super().__init__(io.BytesIO(pickled), encoding="bytes")
        self._on_name = on_name
        self._on_call = on_call
        self._budget = 1000 + _BUDGET * len(pickled)

    def find_class(self, module: str, name: str) -> Any:
        named = Named(module, name)
        self._on_name(named)
        return named

    def persistent_load(self, pid: Any) -> Any:
        return self._made(Named("persistent", "id"), (pid,))

    def get_extension(self, code: int) -> None:
        raise pickle.UnpicklingError("it refers to a registry of this process")

    def _made(self, what: Any, arguments: Any) -> Made:
        if type(what) is not Named or type(arguments) is not tuple:
            raise pickle.UnpicklingError("it calls a value that is not callable")
        made = Made(what, arguments)
        self._on_call(made)
        for argument in arguments:  # a set of a list, a dict of pairs: making it hashes the items
            if type(argument) in (list, tuple) and str(what) in _HASHING:
                for member in argument:  # of a dict, pairs of a key and a value
                    is_pair = what.name in ("OrderedDict", "dict") and type(member) in (list, tuple) and member
                    self._check_key(member[0] if is_pair else member)
        return made

    def _check_key(self, key: Any) -> None:
        self._budget -= count_parts(key, self._budget)

    def _call(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._made(self.stack[-1], arguments)

    def _call_with_keywords(self) -> None:
        keywords = self.stack.pop()
        arguments = self.stack.pop()
        self.stack[-1] = self._made(self.stack[-1], (*arguments, keywords))

    def _build(self) -> None:
        state = self.stack.pop()
        made = self.stack[-1]
        if type(made) is not Made:
            raise pickle.UnpicklingError("it changes a value that it has not made")
        made.state = state

    def _add(self, members: list[Any], kind: type) -> None:
        """Adds members to a container that the pickle has made."""
        container: Any = self.stack[-1]
        if type(container) is Made:
            container.members += members
        elif type(container) is not kind:
            raise pickle.UnpicklingError(f"it adds to a {type(container).__name__}")
        elif isinstance(container, list):
            container += members
        elif isinstance(container, set):
            container.update(members)

    def _set_items(self, members: list[Any]) -> None:
        for key in members[::2]:
            self._check_key(key)
        if type(self.stack[-1]) is dict:
            self.stack[-1].update(zip(members[::2], members[1::2], strict=True))
        else:
            self._add(members, dict)

    def _add_to_set(self, members: list[Any]) -> list[Any]:
        for member in members:
            self._check_key(member)
        return members

    def _append_one(self) -> None:
        member = self.stack.pop()
        self._add([member], list)

    def _append_many(self) -> None:
        self._add(self.pop_mark(), list)

    def _set_one(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        self._set_items([key, value])

    def _set_many(self) -> None:
        self._set_items(self.pop_mark())

    def _make_dict(self) -> None:
        members = self.pop_mark()
        self.append({})
        self._set_items(members)

    def _add_items(self) -> None:
        members = self._add_to_set(self.pop_mark())
        self._add(members, set)

    def _make_frozenset(self) -> None:
        members = self._add_to_set(self.pop_mark())  # which changes what `append` is
        self.append(frozenset(members))

    def _refuse(self) -> None:
        raise pickle.UnpicklingError("it is made in a way that no current writer uses")

    dispatch = pickle._Unpickler.dispatch | {  # type: ignore[assignment]
        code[0]: operation
        for code, operation in {
            pickle.REDUCE: _call,
            pickle.NEWOBJ: _call,
            pickle.NEWOBJ_EX: _call_with_keywords,
            pickle.BUILD: _build,
            pickle.APPEND: _append_one,
            pickle.APPENDS: _append_many,
            pickle.SETITEM: _set_one,
            pickle.SETITEMS: _set_many,
            pickle.DICT: _make_dict,
            pickle.ADDITEMS: _add_items,
            pickle.FROZENSET: _make_frozenset,
            pickle.INST: _refuse,
            pickle.OBJ: _refuse,
            pickle.EXT1: _refuse,
            pickle.EXT2: _refuse,
            pickle.EXT4: _refuse,
            pickle.NEXT_BUFFER: _refuse,
            pickle.READONLY_BUFFER: _refuse,
        }.items()
    }


_HASHING = {"builtins.set", "builtins.frozenset", "collections.Counter", "collections.OrderedDict", "builtins.dict"}


# --- checking a file of torch.save before torch.load ------------------------------------------------------------------
#
# An archive that is larger than it looks, or a pickle that takes very long, is refused in time and memory proportional
# to its own bytes.
#
# Python and torch each have a reader of zip archives. They agree on the contents only if the archive has the plain
# layout that torch writes, so nothing else is accepted.

_END = struct.Struct("<4s4HIIH")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR_64 = struct.Struct("<4sIQI")
_LOCAL = struct.Struct("<26xHH")  # of a record's header: the lengths of its name and of what else is before its data
_MAX_DIMENSIONS = 255
_HAS_DESCRIPTOR = 0x8  # the flag of an entry that is followed by its CRC-32 and its size


def is_archive(data: bytes) -> bool:
    """Returns whether some bytes begin as a zip archive does, and so as what ``torch.save`` has written since torch
    1.6.
    """
    return data.startswith(b"PK\3\4")


def check_archive(file: IO[bytes], nbytes: int) -> zipfile.ZipFile:
    """Opens an archive whose records lie in it as they are, each at a place of its own.

    Raises:
        ValueError: it is none, or has records that are compressed, or larger than the archive.
    """
    directory = _directory(file, nbytes)
    file.seek(0)
    try:
        archive = zipfile.ZipFile(file)
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    infos = archive.infolist()
    if any(info.compress_type != zipfile.ZIP_STORED for info in infos):
        raise ValueError("it is compressed: load and save it once more")
    end = 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        if info.file_size != info.compress_size or info.header_offset < end or info.flag_bits & 1:
            raise ValueError(f"its record {info.filename!r} overlaps another one, or is not stored as it is")
        end = info.header_offset + 30 + info.file_size
    if end > directory or len({info.filename.lower() for info in infos}) < len(infos):
        raise ValueError("its records have more bytes than the file, or the same name")
    return archive


def _directory(file: IO[bytes], nbytes: int) -> int:
    """The position of the list of records; it and its end are the last bytes of the file."""
    if nbytes < _END.size:
        raise ValueError("it is too short for an archive")
    signature, _, _, here, total, size, offset, comment = _END.unpack(_read(file, nbytes - _END.size, _END.size))
    end = nbytes - _END.size
    if signature != b"PK\5\6" or comment or here != total:
        raise ValueError("its last bytes are not the end of an archive: it is truncated, or packed again")
    locator_offset = end - _LOCATOR_64.size
    locator = _read(file, locator_offset, _LOCATOR_64.size) if locator_offset >= _END_64.size else b""
    if locator[:4] == b"PK\6\7":
        end = locator_offset - _END_64.size
        _, _, large_end, _ = _LOCATOR_64.unpack(locator)
        large = _END_64.unpack(_read(file, end, _END_64.size))
        if large[0] != b"PK\6\6" or large_end != end or large[6] != large[7]:
            raise ValueError("the end of its list of records is damaged")
        size, offset = large[8], large[9]
    if offset + size != end:
        raise ValueError("its list of records is not where its end says")
    return int(offset)


def record(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """The bytes of a record; not compared with its CRC-32, which torch.save may leave out."""
    assert archive.fp is not None
    names, more = _LOCAL.unpack(_read(archive.fp, info.header_offset, _LOCAL.size))
    return _read(archive.fp, info.header_offset + _LOCAL.size + names + more, info.file_size)


def _read(file: IO[bytes], offset: int, nbytes: int) -> bytes:
    file.seek(offset)
    return file.read(nbytes)


def check_saved(file: IO[bytes], nbytes: int) -> list[tuple[int, int]]:
    """Looks at a file of ``torch.save`` before the weights-only rules of ``torch.load`` are applied to it.

    The elements of tensors must lie in the file as they are, and where torch looks for them.

    Returns:
        Where the header of each record begins, and how many bytes the record has, in the file's order.

    Raises:
        ValueError: they do not, or the archive would take more time or memory than it has bytes.
    """
    is_zip = is_archive(file.read(4))
    file.seek(0)
    if not is_zip:
        raise ValueError("it is no archive (files of torch before 1.6 must be loaded and saved once more)")
    archive = check_archive(file, nbytes)
    infos = archive.infolist()
    for info in infos:
        name = info.filename.lower()  # as torch looks names up
        if name.endswith("/data.pkl"):
            check_pickle(record(archive, info))
        if name.endswith("/byteorder") and record(archive, info) == b"big":
            raise ValueError("it is of a big-endian machine: load and save it once more on this one")
    # With this record, torch counts with a descriptor behind each record, and does not look where the next one is.
    is_counted = any(info.filename.endswith("/.format_version") for info in infos)
    if is_counted and any(info.file_size and not info.flag_bits & _HAS_DESCRIPTOR for info in infos):
        raise ValueError("it was repacked, and not as torch.save packs: load and save it once more")
    return sorted((info.header_offset, info.file_size) for info in infos)


def check_pickle(pickled: bytes) -> None:
    """Looks at a pickle that the weights-only rules of ``torch.load`` are to be applied to.

    Raises:
        ValueError: it would take more time or memory than it has bytes.
    """
    try:
        load_inert(pickled, on_call=_check_call)
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _check_call(made: Made) -> None:
    """Fails for a call that torch allows, and that takes more than its arguments have bytes."""
    if made.what == ("builtins", "bytearray") and any(type(argument) is int for argument in made.arguments):
        raise ValueError("it asks for memory")
    if made.what == ("_codecs", "encode") and made.arguments[1:] != ("latin1",):
        raise ValueError("it encodes text in a way that torch.save does not")
    if made.what.module in tensor_makers:
        _check_dimensions(made.arguments, 0)


def _check_dimensions(value: Any, depth: int) -> None:
    if type(value) is Made:
        value = value.arguments
    if type(value) not in (tuple, list):
        return
    if len(value) > _MAX_DIMENSIONS:
        raise ValueError(f"a tensor of {len(value):,} dimensions")
    if depth < 2:
        for inner in value:
            _check_dimensions(inner, depth + 1)
