"""Pickles reach nothing in this process, and take no more time than they have bytes."""

from __future__ import annotations

import collections
import pickle
import time
from typing import Any

import pytest
import torch

from dcp_tensorizer._unpickle.inert import Made, Named, load_inert


class Victim:
    colour = "red"


def doubled(levels: int, wrap: bytes) -> bytes:
    """A pickle of a tuple of two of the tuple before it, ``levels`` deep, that is put into something."""
    return b"\x80\x02" + wrap.replace(b"PAIRS", b"K\x01" + b"2\x86" * levels) + b"."


def test_values_of_builtin_types_are_themselves() -> None:
    """Of every protocol that has them as they are."""
    value = {"a": [1, 2.5, None, True, ("x", "y")], (1, ("b",)): {}, "n": 2**100}
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert load_inert(pickle.dumps(value, protocol)) == value
    for protocol in range(4, pickle.HIGHEST_PROTOCOL + 1):
        assert load_inert(pickle.dumps([{3, 4}, frozenset([5]), b"x"], protocol)) == [{3, 4}, frozenset([5]), b"x"]


def test_objects_stay_names_and_arguments() -> None:
    """Nothing is called; what would be added to them is a list."""
    made = load_inert(pickle.dumps(collections.OrderedDict(a=1), 2))
    assert (made.what, made.arguments, made.members) == (("collections", "OrderedDict"), (), ["a", 1])
    size = load_inert(pickle.dumps(torch.Size([2, 3])))
    assert (size.what, size.arguments) == (("torch", "Size"), ((2, 3),))
    assert load_inert(pickle.dumps(torch.float32)) == Named("torch", "float32")


def test_names_and_calls_are_shown_first() -> None:
    """Whoever asked can refuse either."""
    names: list[Named] = []
    calls: list[Made] = []
    load_inert(pickle.dumps(torch.Size([2])), names.append, calls.append)
    assert names == [("torch", "Size")]
    assert [call.arguments for call in calls] == [((2,),)]


def test_no_class_of_this_process_is_changed() -> None:
    """BUILD with a state of slots sets attributes on whatever is there: here there are only names."""
    module = Victim.__module__.encode()
    attack = b"\x80\x02c" + module + b"\nVictim\nN}\x8c\x06colourX\x05\x00\x00\x00greens\x86b."
    pickle.loads(attack)
    assert Victim.colour == "green"
    Victim.colour = "red"
    with pytest.raises(pickle.UnpicklingError, match="changes a value that it has not made"):
        load_inert(attack)
    assert Victim.colour == "red"


@pytest.mark.parametrize(
    "wrap",
    [
        b"}PAIRSK\x01s",
        b"}(PAIRSK\x01u",
        b"(PAIRSK\x01d",
        b"\x8f(PAIRS\x90",
        b"(PAIRS\x91",
        b"cbuiltins\nset\n]PAIRSa\x85R",
    ],
    ids=["setitem", "setitems", "dict", "set", "frozenset", "set of a list"],
)
def test_nested_keys_end(wrap: bytes) -> None:
    """A key that holds the one before it twice, 60 deep, would be hashed for ever; it is refused at once."""
    assert load_inert(doubled(3, wrap)) is not None
    started = time.monotonic()
    with pytest.raises(pickle.UnpicklingError, match="too many parts"):
        load_inert(doubled(60, wrap))
    assert time.monotonic() - started < 5


def test_a_key_that_is_used_often_has_an_end_too() -> None:
    """A long tuple as the key of one item after the other costs its length each time."""
    long = b"(" + b"K\x01" * 5000 + b"tq\x00"
    with pytest.raises(pickle.UnpicklingError, match="too many parts"):
        load_inert(b"\x80\x02}" + long + b"0" + b"h\x00K\x01s" * 5000 + b".")


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
    """An error, or a name that nobody has called."""
    value: Any = None
    try:
        value = load_inert(attack)
    except Exception as error:
        assert not isinstance(error, MemoryError | RecursionError)  # noqa: PT017
    assert value is None or (isinstance(value, Made) and value.what == ("os", "system"))
