"""What `torch.save` wrote is let through, and what torch would take for ever for is not."""

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

from dcp_tensorizer._trust.objects import load_object
from dcp_tensorizer._trust.torch_archive import check_archive, check_pickle

from .test_inert import doubled


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


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
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_load_as_torch_loads_them(value: Any) -> None:
    """Everything that the weights-only rules accept, after the look at its archive."""
    assert load_object(saved(value)) == value


def test_tensors_load_as_torch_loads_them() -> None:
    """Parameters, views, and a module's state."""
    value = {"w": torch.nn.Parameter(torch.arange(6.0).view(2, 3)), "v": torch.arange(10)[::2]}
    loaded = load_object(saved(value))
    assert all(torch.equal(loaded[key], tensor) for key, tensor in value.items())


def repacked(how: str) -> bytes:
    """A saved file that somebody has packed again, in a way that hides its size or its contents."""
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
    """Each is refused, without being inflated."""
    data = repacked(how)
    with pytest.raises(ValueError, match=r".+"):
        check_archive(io.BytesIO(data), len(data))


def test_every_cut_is_refused() -> None:
    """An archive without its end is none."""
    data = saved([1, 2])
    for length in range(4, len(data)):
        with pytest.raises(ValueError, match=r".+"):
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
def test_pickles_that_would_take_for_ever(attack: bytes) -> None:
    """They pass torch's rules, and are refused before torch sees them."""
    started = time.monotonic()
    with pytest.raises(ValueError, match=r".+"):
        check_pickle(attack)
    assert time.monotonic() - started < 5
