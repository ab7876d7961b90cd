"""Tests that reading a pickle uses no class of this process, and takes time in proportion to its bytes."""

from __future__ import annotations

import collections
import pickle
import time
from typing import Any

import pytest
import torch

from dcp_tensorizer._trust.inert import Inert, Made, Malformed, Named


class Victim:
    colour = "red"


def doubled(levels: int, wrap: bytes) -> bytes:
    """Returns a pickle of a tuple that holds the tuple before it twice, ``levels`` deep, put into ``wrap``."""
    return b"\x80\x02" + wrap.replace(b"PAIRS", b"K\x01" + b"2\x86" * levels) + b"."


def test_values_of_builtin_types_are_themselves() -> None:
    """Builtin values are read as equal values, from every protocol that has opcodes for them."""
    value = {"a": [1, 2.5, None, True, ("x", "y")], (1, ("b",)): {}, "n": 2**100}
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert Inert(pickle.dumps(value, protocol)).read() == value
    for protocol in range(4, pickle.HIGHEST_PROTOCOL + 1):
        pickled = pickle.dumps([{3, 4}, frozenset([5]), b"x"], protocol)
        assert Inert(pickled).read() == [{3, 4}, frozenset([5]), b"x"]


def test_objects_stay_names_and_arguments() -> None:
    """A call becomes a record of its name, arguments and members, and a class becomes its name."""
    made = Inert(pickle.dumps(collections.OrderedDict(a=1), 2)).read()
    assert (made.what, made.arguments, made.members) == ("collections.OrderedDict", (), [("a", 1)])
    size = Inert(pickle.dumps(torch.Size([2, 3]))).read()
    assert (size.what, size.arguments) == ("torch.Size", ((2, 3),))
    dtype = Inert(pickle.dumps(torch.float32)).read()
    assert (type(dtype), dtype.name) == (Named, "torch.float32")


def test_a_tuple_that_holds_itself_is_read() -> None:
    """The pickler begins a recursive tuple, discards it (POP), and gets it from the memo."""
    value: tuple[list[Any], ...] = ([],)
    value[0].append(value)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        read = Inert(pickle.dumps(value, protocol)).read()
        assert type(read) is tuple
        assert read[0][0] is read


def test_names_of_python_2_are_mapped() -> None:
    """Before protocol 3, Python 2's names become Python 3's, and a class has one stand-in."""
    names = Inert(b"\x80\x02c__builtin__\nset\nc__builtin__\nset\n\x86.").read()
    assert names[0].name == "builtins.set"
    assert names[0] is names[1]


def test_no_class_of_this_process_is_changed() -> None:
    """BUILD with a state of slots sets attributes of any object: the reader has only stand-ins for names."""
    module = Victim.__module__.encode()
    attack = b"\x80\x02c" + module + b"\nVictim\nN}\x8c\x06colourX\x05\x00\x00\x00greens\x86b."
    pickle.loads(attack)
    assert Victim.colour == "green"
    Victim.colour = "red"
    with pytest.raises(Malformed, match="no call has made"):
        Inert(attack).read()
    assert Victim.colour == "red"


@pytest.mark.parametrize(
    "wrap",
    [
        b"}PAIRSK\x01s",
        b"}(PAIRSK\x01u",
        b"\x8f(PAIRS\x90",
        b"(PAIRS\x91",
        b"cbuiltins\nset\n]PAIRSa\x85R",
        b"c__builtin__\nset\n]PAIRSa\x85R",
    ],
    ids=["setitem", "setitems", "set", "frozenset", "set of a list", "set of Python 2"],
)
def test_nested_keys_end(wrap: bytes) -> None:
    """A key of tuples that each hold the last one twice, 60 deep, is refused before it is hashed."""
    assert Inert(doubled(3, wrap)).read() is not None
    started = time.monotonic()
    with pytest.raises(Malformed, match="too much time or memory"):
        Inert(doubled(60, wrap)).read()
    assert time.monotonic() - started < 5


def test_a_key_that_is_used_often_has_an_end_too() -> None:
    """A long tuple that is the key of many items counts with its length each time."""
    long = b"(" + b"K\x01" * 5000 + b"tq\x00"
    with pytest.raises(Malformed, match="too much time or memory"):
        Inert(b"\x80\x02}" + long + b"0" + b"h\x00K\x01s" * 5000 + b".").read()


@pytest.mark.parametrize(
    "attack",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"(S'true'\nios\nsystem\n.",
        b"(cos\nsystem\nS'true'\no.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02K\x01K\x02R.",
        b"\x80\x02K\x01}b.",
        b"\x80\x02K\x01K\x02a.",
        b"\x80\x02}]K\x01s.",
        b"\x80\x02\x8b\xff\xff\xff\x7f.",
        b"\x80\x02X\xff\xff\xff\x7f.",
        b"\x80\x05\x97.",
        b".",
        b"",
    ],
    ids=repr,
)
def test_hostile_pickles(attack: bytes) -> None:
    """The reader raises an error, or returns the name of a function that it did not call."""
    value: Any = None
    try:
        value = Inert(attack).read()
    except Exception as error:
        assert not isinstance(error, MemoryError | RecursionError)  # noqa: PT017
    assert value is None or (isinstance(value, Made) and value.what in ("os.system", "posix.system"))
