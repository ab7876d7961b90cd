"""Tests of the checks of ``torch.save`` files before torch reads them with its weights-only rules."""

from __future__ import annotations

import collections
import io
import random
import struct
import time
import zipfile
from typing import Any

import pytest
import torch

from dcp_tensorizer._formats.torch_archive import check_archive, check_pickle, check_saved

from ...lab.saved_objects import saved
from ..trust.test_inert import doubled

VALUES = [
    5,
    2**100,
    "\ud800",
    b"abc",
    bytearray(b"abc"),
    {"a": [1, (2, 3)], (1, 2): None},
    collections.OrderedDict(a=1),
    collections.Counter("aab"),
    {1, 2},
    1 + 2j,
    torch.Size([1, 2]),
    torch.float32,
    torch.device("cpu"),
    random.Random(0).getstate(),
    {"w": torch.nn.Parameter(torch.arange(6.0).view(2, 3)), "v": torch.arange(10)[::2]},
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_files_that_torch_saves_are_accepted(value: Any) -> None:
    """The check returns the offset and the size of each record, in file order."""
    data = saved(value)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        expected = [(info.header_offset, info.file_size) for info in archive.infolist()]
    assert check_saved(io.BytesIO(data), len(data)) == sorted(expected)


def repacked(how: str) -> bytes:
    """Returns a saved file that was packed again in a way that hides its size or its contents."""
    stock = saved({"w": torch.zeros(100)})
    if how == "comment":
        return stock[:-2] + b"\5\0hello"
    if how == "two ends":
        return stock + stock[-22:]
    if how == "prefix":
        return b"PK\3\4" + stock
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(stock)) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            deflated = zipfile.ZIP_DEFLATED if how == "bomb" and name.endswith("byteorder") else zipfile.ZIP_STORED
            new.writestr(name, bytes(100 << 20) if deflated else old.read(name), deflated)
            if how == "twice":
                new.writestr(name.upper(), old.read(name))
    data = bytearray(stream.getvalue())
    if how == "sizes":
        entry = data.index(b"PK\1\2")
        data[entry + 24 : entry + 28] = struct.pack("<I", 1 << 30)
    if how == "overlap":
        second = data.index(b"PK\1\2", data.index(b"PK\1\2") + 4)
        data[second + 42 : second + 46] = bytes(4)
    return bytes(data)


@pytest.mark.parametrize("how", ["comment", "two ends", "prefix", "bomb", "twice", "sizes", "overlap"])
def test_archives_that_two_readers_could_read_differently(how: str) -> None:
    """Each archive is refused, and none is decompressed."""
    data = repacked(how)
    errors = {"comment": EOFError, "bomb": NotImplementedError}
    with pytest.raises(errors.get(how, ValueError), match=r".+"):
        check_archive(io.BytesIO(data), len(data))


def test_truncated_files_are_refused() -> None:
    """Every prefix of a file lacks the end of the central directory."""
    data = saved([1, 2])
    for length in range(4, len(data)):
        with pytest.raises(EOFError, match=r".+"):
            check_archive(io.BytesIO(data[:length]), length)


@pytest.mark.parametrize(
    "attack",
    [
        doubled(60, b"}PAIRSK\x01s"),
        b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
        b"\x80\x02ctorch\nSize\n(" + b"K\x01" * 200_000 + b"t\x85R.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(NK\x00(" + b"K\x01" * 300 + b"tNtR.",
        b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x08\x00\x00\x00punycode\x86R.",
    ],
    ids=["keys", "memory", "size", "dimensions", "codec"],
)
def test_pickles_that_would_take_forever_are_refused(attack: bytes) -> None:
    """torch's weights-only rules accept these pickles, and the check refuses them first."""
    started = time.monotonic()
    with pytest.raises(ValueError, match=r".+"):
        check_pickle(attack)
    assert time.monotonic() - started < 5
