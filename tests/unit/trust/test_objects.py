"""Saved objects: data loads, whatever could run code or do harm is named, and nothing is run to find that out."""

from __future__ import annotations

import argparse
import collections
import datetime
import fractions
import functools
import io
import math
import os
import pickle
import re
import uuid
import zipfile
import zoneinfo
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_tensorizer import UntrustedObject
from dcp_tensorizer._trust.objects import is_small, load_object, unsafe_globals

from ...lab.saved_objects import STANDARD, Made, archive, same, saved

_RECONSTRUCT = np.zeros(1).__reduce__()[0]
_SCALAR = np.float32(1).__reduce__()[0]
_EMPTY = (np.ndarray, (0,), b"b")
_V8, _V4, _F8, _I4 = ("V8", False, True), ("V4", False, True), np.dtype("f8"), np.dtype("i4")


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
    """With nothing allowed, as what it was."""
    content = saved(STANDARD[name])
    assert unsafe_globals(content) == ()
    assert same(load_object(content), STANDARD[name])


def test_what_numpy_1_and_python_3_13_saved_is_known() -> None:
    """Both have other names for the same modules."""
    content = archive(lambda pickled: pickled.replace(b"numpy._core.", b"numpy.core."), [np.arange(3), np.float32(1)])
    assert same(load_object(content), [np.arange(3), np.float32(1)])
    aligned = np.dtype("i1,f8", align=True)
    assert aligned.__reduce__()[2][7] == 144  # NumPy 1 writes it as a signed byte
    content = archive(lambda pickled: pickled.replace(b"K\x90", b"J\x90\xff\xff\xff"), aligned)
    assert unsafe_globals(content) == ()
    local = b"cpathlib._local\nPurePosixPath"
    assert unsafe_globals(archive(lambda _: b"\x80\x02" + local + b"\nX\x01\x00\x00\x00a\x85R.")) == ()


def test_what_could_run_code_is_named() -> None:
    """Each global once, with its module; of a class in a class that class, and not how it is found."""
    content = saved([Foreign(), Foreign(), re.compile("x"), Outer.Inner(), np.arange(3)])
    assert unsafe_globals(content) == ("re._compile", f"{__name__}.Foreign", f"{__name__}.Outer.Inner")
    with pytest.raises(UntrustedObject, match=r"needs .*Foreign"):
        load_object(content)


def test_what_is_allowed_counts_and_nothing_becomes_allowed() -> None:
    """What a user passes to torch.serialization.add_safe_globals; a load does not change that list."""
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
        (Made(zoneinfo.ZoneInfo._unpickle, ("../x", True)), "zoneinfo.ZoneInfo._unpickle"),
        (Made(bytearray, (10**13,)), "builtins.bytearray"),
        (Made(bytes, (10**13,)), "builtins.bytes"),
        (Made(torch.UntypedStorage, (10**13,)), "torch.storage.UntypedStorage"),
        (Made(fractions.Fraction, ("1e999999999",)), "fractions.Fraction"),
        (Made(fractions.Fraction, (2**1000000, 3)), "fractions.Fraction"),
        (Made(datetime.datetime, (b"\x07\xe4\x01\x02\xc8\x00\x00\x00\x00\x00",)), "datetime.datetime"),
        (Made(datetime.date, (b"\x07\xe4\x01\xff",)), "datetime.date"),
        (Made(collections.defaultdict, (Made(functools.partial, (eval, "1")),)), "collections.defaultdict"),
        (Made(collections.defaultdict, (_SCALAR,)), "collections.defaultdict"),
        (Made(argparse.Namespace, (), ({}, {"a": 1})), "argparse.Namespace"),
        (Made(collections.OrderedDict, (), ({}, {"a": 1})), "collections.OrderedDict"),
        (Made(uuid.UUID, ("0" * 32,)), "uuid.UUID"),
        (Made(torch._tensor._rebuild_from_type_v2, (bytes, torch.Tensor, (10**13,), {})), "_rebuild_from_type_v2"),
        (dtype_of(_V4, 3, "|", None, ("a",), {"a": (_F8, 1 << 20)}, 4, 1, 16), "numpy.dtype"),
        (dtype_of(_V8, 3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 16), "numpy.dtype"),
        (dtype_of(_V8, 3, "|", None, ("a",), {"a": (_F8, -8)}, 8, 1, 16), "numpy.dtype"),
        (dtype_of(_V8, 3, "|", None, ("a",), {"a": (_F8, 0), "b": (_F8, 64)}, 8, 1, 16), "numpy.dtype"),
        (dtype_of(_V8, 3, "|", (_F8, (1 << 40,)), None, None, 8, 1, 0), "numpy.dtype"),
        (dtype_of(("O8", False, True), 3, "|", None, None, None, -1, -1, 0), "numpy.dtype"),
        (dtype_of(("i4", False, False), 3, "<", None, None, None, -1, -1, 0), "numpy.dtype"),
        (array_of(np.dtype("O"), (9,), [1]), "_reconstruct"),
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
def test_what_a_type_would_not_have_written_is_refused(value: Made, refused: str) -> None:
    """Types of data with arguments or states of another's choice: they are named like foreign ones."""
    assert any(name.endswith(refused) for name in unsafe_globals(saved(value)))


def pickled(*parts: bytes) -> bytes:
    return archive(lambda _: b"\x80\x02" + b"".join(parts) + b".")


_LIST, _ORDERED = b"c__builtin__\nlist\n", b"ccollections\nOrderedDict\n"
_GETATTR, _MRO = b"c__builtin__\ngetattr\n", b"X\x03\x00\x00\x00mro"
_DTYPE = b"cnumpy\ndtype\nX\x02\x00\x00\x00i4\x89\x88\x87R"
_STATE = b"(K\x03X\x01\x00\x00\x00<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
_STRUCTURE = b"cnumpy\ndtype\nX\x02\x00\x00\x00V4\x89\x88\x87R"
_FIELDS = b"(K\x03X\x01\x00\x00\x00|NX\x01\x00\x00\x00a\x85}q\x05X\x01\x00\x00\x00a" + _DTYPE + _STATE + b"K\x00\x86s"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not in the format"),
        (b"garbage", "not in the format"),
        (b"\0" + saved([1]), "not in the format"),
        (saved([1])[:-30], "damaged"),
        (archive(bytes, "x" * 100_000, zipfile.ZIP_DEFLATED), "compressed"),
        (archive(lambda _: pickle.dumps([1], 4)), "protocol 4"),
        (archive(lambda _: pickle.dumps([1], 0)), "opcode"),
        (archive(lambda _: b"\x80\x02K\x01"), "cannot be parsed"),
        (pickled(b"R"), "cannot be parsed"),
        (pickled(b"h\x07"), "cannot be parsed"),
        (pickled(b"c../x\nname\n"), "not a valid name"),
        (pickled(b"K\x01)R"), "calls something other than a class"),
        (pickled(_LIST, b"K\x01R"), "calls something other than a class"),
        (pickled(_ORDERED, b"}b"), "no call has made"),
        (pickled(_GETATTR, b"K\x01", _MRO, b"\x86R"), "attribute of a value"),
        (pickled(_GETATTR, _GETATTR, _LIST, _MRO, b"\x86R", _LIST, b"\x86R"), "attribute of a value"),
        (pickled(b"}]K\x01s"), "cannot be hashed"),
        (pickled(b"K\x01Q"), "other than a tensor's storage"),
        (pickled(b"Nr\xff\xff\xff\x7f"), "memo index that is larger than the pickle"),
        (pickled(_STRUCTURE, _FIELDS, b"K\x04K\x01K\x10tbh\x05X\x01\x00\x00\x00aK\x01s"), "description of a dtype"),
    ],
)
def test_what_torch_would_not_have_written_is_refused(content: bytes, reason: str) -> None:
    """Not being able to tell is no permission."""
    with pytest.raises(UntrustedObject, match=f"torch.save does not write such an object: .*{reason}"):
        unsafe_globals(content)


def test_a_dtype_does_not_change_once_it_is_made() -> None:
    """Neither itself nor its fields: an array of it would be of another size than its memory."""
    assert unsafe_globals(pickled(_DTYPE, _STATE)) == ()
    assert unsafe_globals(pickled(_DTYPE, _STATE, _STATE)) == ("numpy.dtype",)
    assert unsafe_globals(pickled(_STRUCTURE, _FIELDS, b"K\x04K\x01K\x10tb")) == ()


def test_a_torch_script_program_is_refused() -> None:
    """``torch.load`` would run it; it knows one by a record."""
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
        b"X\x10\x27\x00\x00"
        + b"x" * 10_000
        + b"q\x00"
        + b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R" * 10_000,
    ],
    ids=["shared", "deep", "sets", "bytes"],
)
def test_what_would_take_time_or_memory_without_end_is_refused(pickled_part: bytes) -> None:
    """At once: keys that are hashed for ever, and a small stream of many large copies."""
    with pytest.raises(UntrustedObject, match=r"hashed|too much time or memory"):
        unsafe_globals(pickled(pickled_part))


_SAMPLES = [saved(STANDARD[name]) for name in ("structured", "object_arrays", "with_tensors", "dates", "uuid", "sets")]


@given(
    st.sampled_from(_SAMPLES), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4)
)
def test_any_stream_gets_an_answer(content: bytes, changes: list[tuple[int, int]]) -> None:
    """Whatever bytes of a pickle are changed: it is refused by names, or as a whole."""

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


def test_values_that_take_for_ever_to_show_are_known() -> None:
    """A list that holds another one twice, and so on."""
    value: list[Any] = []
    for _ in range(100):
        value = [value, value]
    assert not is_small(value)
    array = np.empty(1, dtype=object)
    array[0] = value
    assert not is_small(array)
    assert is_small([math.pi] * 1000)
