"""Tests of saved objects: common data loads, and any other type is named without running code."""

from __future__ import annotations

import argparse
import collections
import datetime
import functools
import io
import os
import pickle
import re
import zipfile
import zoneinfo
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_tensorizer import UntrustedObject
from dcp_tensorizer._trust.objects import load_object, unsafe_globals

from ...lab.saved_objects import STANDARD, Made, archive, same, saved

_RECONSTRUCT = np.zeros(1).__reduce__()[0]
_SCALAR = np.float32(1).__reduce__()[0]
_EMPTY = (np.ndarray, (0,), b"b")
_F8, _I4 = np.dtype("f8"), np.dtype("i4")


class Foreign:
    pass


class Outer:
    class Inner:
        pass


def dtype_of(code: tuple[Any, ...], *state: Any) -> Made:
    return Made(np.dtype, code, state)


def array_of(dtype: Any, shape: tuple[int, ...], content: Any) -> Made:
    return Made(_RECONSTRUCT, _EMPTY, (1, shape, dtype, False, content))


@pytest.mark.parametrize("name", STANDARD)
def test_data_of_the_standard_library_of_numpy_and_of_torch_loads(name: str) -> None:
    """Each value loads without permission, and equals the saved one."""
    content = saved(STANDARD[name])
    assert unsafe_globals(content) == ()
    assert same(load_object(content), STANDARD[name])


def test_what_numpy_1_and_python_3_13_saved_is_known() -> None:
    """Both have different names for the same modules."""
    content = archive(lambda pickled: pickled.replace(b"numpy._core.", b"numpy.core."), [np.arange(3), np.float32(1)])
    assert same(load_object(content), [np.arange(3), np.float32(1)])
    local = b"cpathlib._local\nPurePosixPath"
    assert unsafe_globals(archive(lambda _: b"\x80\x02" + local + b"\nX\x01\x00\x00\x00a\x85R.")) == ()


def test_what_could_run_code_is_named() -> None:
    """Each global is named once, with its module. A nested class is named itself, without its outer class."""
    content = saved([Foreign(), Foreign(), re.compile("x"), Outer.Inner(), np.arange(3)])
    assert unsafe_globals(content) == ("re._compile", f"{__name__}.Foreign", f"{__name__}.Outer.Inner")
    with pytest.raises(UntrustedObject, match=r"needs .*Foreign"):
        load_object(content)


def test_what_is_allowed_counts_and_nothing_becomes_allowed() -> None:
    """Types passed to torch.serialization.add_safe_globals load, and a load does not change their list."""
    with torch.serialization.safe_globals([Outer.Inner, (Foreign, f"{__name__}.Foreign")]):
        allowed = set(torch.serialization.get_safe_globals())
        assert isinstance(load_object(saved([Outer.Inner(), np.arange(3), Foreign()]))[0], Outer.Inner)
        assert set(torch.serialization.get_safe_globals()) == allowed


@pytest.mark.parametrize(
    ("value", "refused"),
    [
        (Made(os.system, ("true",)), "posix.system"),
        (Made(eval, ("1",)), "builtins.eval"),
        (Made(collections.OrderedDict.fromkeys, ([],)), "collections.OrderedDict.fromkeys"),
        (Made(zoneinfo.ZoneInfo.from_file, (io.BytesIO(),)), "zoneinfo.ZoneInfo.from_file"),
        (Made(bytearray, (10**13,)), "builtins.bytearray"),
        (Made(bytes, (10**13,)), "builtins.bytes"),
        (Made(torch.UntypedStorage, (10**13,)), "torch.storage.UntypedStorage"),
        (Made(datetime.datetime, (b"\x07\xe4\x01\x02\xc8\x00\x00\x00\x00\x00",)), "datetime.datetime"),
        (Made(datetime.date, (b"\x07\xe4\x01\xff",)), "datetime.date"),
        (Made(collections.defaultdict, (Made(functools.partial, (eval, "1")),)), "collections.defaultdict"),
        (Made(collections.defaultdict, (_SCALAR,)), "collections.defaultdict"),
        (Made(argparse.Namespace, (), ({}, {"a": 1})), "argparse.Namespace"),
        (Made(collections.OrderedDict, (), ({}, {"a": 1})), "collections.OrderedDict"),
        (Made(torch._tensor._rebuild_from_type_v2, (bytes, torch.Tensor, (10**13,), {})), "_rebuild_from_type_v2"),
        (dtype_of(("V8", False, True), 3, "|", None, ("a",), {"a": (_F8, -8)}, 8, 1, 16), "numpy.dtype"),
        (dtype_of(("i4", False, True), 3, "<", (_F8, (1 << 40,)), None, None, 8, 1, 0), "numpy.dtype"),
        (dtype_of(("i8", False, True), 3, "<", None, None, None, -1, -1, 63), "numpy.dtype"),
        (dtype_of(("U2", False, True), 3, "<", None, None, None, 4, 4, 8), "numpy.dtype"),
        (dtype_of(("O8", False, True), 3, "|", None, None, None, -1, -1, 63), "numpy.dtype"),
        (dtype_of(("i4", False, False), 3, "<", None, None, None, -1, -1, 0), "numpy.dtype"),
        (array_of(np.dtype("O"), (1,), b"\0" * 8), "_reconstruct"),
        (array_of(_I4, (2,), b"\0" * 4), "_reconstruct"),
        (array_of(_I4, (1 << 62, 1 << 62), b""), "_reconstruct"),
        (array_of(Made(np.dtype, ("i4", False, True)), (1,), b"\0" * 4), "_reconstruct"),
        (Made(_RECONSTRUCT, (np.ndarray, (1 << 40,), b"b")), "_reconstruct"),
        (Made(_SCALAR, (_I4, b"")), "scalar"),
        (Made(_SCALAR, (np.dtype("O"), b"\0" * 8)), "scalar"),
        (Made(np.ndarray, ((1 << 40,),)), "numpy.ndarray"),
    ],
)
def test_what_a_type_would_not_have_written_is_named(value: Made, refused: str) -> None:
    """Known types with forged arguments or states are named like unknown types."""
    assert any(name.endswith(refused) for name in unsafe_globals(saved(value)))


def pickled(*parts: bytes) -> bytes:
    return archive(lambda _: b"\x80\x02" + b"".join(parts) + b".")


_LIST, _ORDERED = b"c__builtin__\nlist\n", b"ccollections\nOrderedDict\n"
_GETATTR, _MRO = b"c__builtin__\ngetattr\n", b"X\x03\x00\x00\x00mro"
_DTYPE = b"cnumpy\ndtype\nX\x02\x00\x00\x00i4\x89\x88\x87R"
_STATE = b"(K\x03X\x01\x00\x00\x00<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not in the zip format"),
        (b"garbage", "not in the zip format"),
        (b"\0" + saved([1]), "not in the zip format"),
        (saved([1])[:-30], "damaged"),
        (archive(lambda _: pickle.dumps([1], 4)), "protocol 4"),
        (archive(lambda _: pickle.dumps([1], 0)), "opcode"),
        (archive(lambda _: b"\x80\x02K\x01"), "cannot be parsed"),
        (pickled(b"R"), "cannot be parsed"),
        (pickled(b"h\x07"), "cannot be parsed"),
        (pickled(b"c../x\nname\n"), "not a valid name"),
        (pickled(b"K\x01)R"), "calls something other than a class"),
        (pickled(_LIST, b"K\x01R"), "calls something other than a class"),
        (pickled(_ORDERED, b"}b"), "no call has made"),
        (pickled(_GETATTR, b"K\x01", _MRO, b"\x86R"), "getattr with arguments other than"),
        (pickled(_GETATTR, _GETATTR, _LIST, _MRO, b"\x86R", _LIST, b"\x86R"), "getattr with arguments other than"),
        (pickled(b"}]K\x01s"), "cannot be hashed"),
        (pickled(b"K\x01Q"), "other than a tensor's storage"),
        (pickled(b"Nr\xff\xff\xff\x7f"), "memo index that is larger than the pickle"),
    ],
)
def test_what_torch_would_not_have_written_is_refused(content: bytes, reason: str) -> None:
    """A pickle that cannot be judged is refused as a whole, with the reason."""
    with pytest.raises(UntrustedObject, match=f"torch.save does not write such an object: .*{reason}"):
        unsafe_globals(content)


def test_a_dtype_does_not_change_once_it_is_made() -> None:
    """A second state is refused: an array of the dtype would be of another size than its memory."""
    assert unsafe_globals(pickled(_DTYPE, _STATE)) == ()
    assert unsafe_globals(pickled(_DTYPE, _STATE, _STATE)) == ("numpy.dtype",)


_ATTRIBUTE = b"}X\x0c\x00\x00\x00__setstate__" + _LIST + b"s"
_STREAM = b"c_io\nBytesIO\n)\x81"


@pytest.mark.parametrize(
    ("content", "refused"),
    [
        ((_ORDERED, b")R", _ATTRIBUTE, b"b}b"), "collections.OrderedDict"),
        ((_ORDERED, b")R", _ATTRIBUTE, b"bK\x01a"), "collections.OrderedDict"),
        ((_STREAM, b"(ccollections\nOrderedDict\n", b"tb"), "_io.BytesIO"),
        ((b"cargparse\nNamespace\n)\x81", _ATTRIBUTE, b"b}b"), "argparse.Namespace"),
        ((b"ccollections\ndeque\n)R", _ATTRIBUTE, b"b"), "collections.deque"),
    ],
    ids=["state", "members", "stream", "namespace", "deque"],
)
def test_attributes_are_never_called(content: tuple[bytes, ...], refused: str) -> None:
    """A pickle could set ``__setstate__`` or ``append``, and call it by a second state or by adding members."""
    assert unsafe_globals(pickled(*content)) == (refused,)


def test_a_torch_script_program_is_refused() -> None:
    """``torch.load`` recognises a program by a record, and would run it."""
    stream = io.BytesIO(saved([1]))
    with zipfile.ZipFile(stream, "a") as program:
        program.writestr("archive/constants.pkl", b"")
    with pytest.raises(UntrustedObject, match="TorchScript"):
        unsafe_globals(stream.getvalue())


@pytest.mark.parametrize(
    "pickled_part",
    [
        b")q\x00" + b"h\x00h\x00\x86q\x00" * 200 + b"}h\x00Ns",  # 2**200 members to hash
        b")" + b"\x85" * 100_000 + b"q\x00}h\x00Ns",  # deeper than the stack of a thread
        b"]q\x00(" + b"K\x01" * 10_000 + b"e" + b"c__builtin__\nset\nq\x01" + b"h\x01h\x00\x85R" * 10_000,
    ],
    ids=["shared", "deep", "sets"],
)
def test_keys_that_take_forever_to_hash_are_refused(pickled_part: bytes) -> None:
    """Keys in keys, and one large set that is made many times, are refused before anything is hashed."""
    with pytest.raises(UntrustedObject, match=r"hashed|too much time or memory"):
        unsafe_globals(pickled(pickled_part))


_SAMPLES = [saved(STANDARD[name]) for name in ("arrays", "scalars", "with_tensors", "dates", "bytes_io", "sets")]


@given(
    st.sampled_from(_SAMPLES), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4)
)
def test_any_stream_gets_an_answer(content: bytes, changes: list[tuple[int, int]]) -> None:
    """A pickle with changed bytes loads, or its names are refused, or it is refused as a whole."""

    def change(pickled: bytes) -> bytes:
        made = bytearray(pickled)
        for place, value in changes:
            made[place % len(made)] = value
        return bytes(made)

    with zipfile.ZipFile(io.BytesIO(content)) as before:
        pickle_bytes = next(before.read(name) for name in before.namelist() if name.endswith("data.pkl"))
    try:
        names = unsafe_globals(archive(lambda _: change(pickle_bytes)))
    except UntrustedObject:
        names = ()
    assert all("." in name for name in names)
