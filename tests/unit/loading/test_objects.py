"""Tests of objects: they are read as stored, checked before any is unpickled, and delivered."""

from __future__ import annotations

import array
import collections
import datetime
import decimal
import enum
import fractions
import functools
import importlib
import io
import re
import time
import types
import uuid
import zoneinfo
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_tensorizer import ReadError, UntrustedObject
from dcp_tensorizer._loading.deliver import check_trust, deliver_object, read_objects
from dcp_tensorizer._loading.plan import ReadTarget
from dcp_tensorizer._tensor_file.names import StoredItem

from ...lab.saved_objects import Made, archive, saved
from ...lab.seams import stored_item

unpickled: list[str] = []


class Foreign:
    """An object that records when it is unpickled."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        unpickled.append(state["name"])


class Member(enum.Enum):
    A = "a"


class Bits(enum.Flag):
    A = 1
    B = 2


class Outer:
    class Inner:
        pass

    class Letter(enum.Enum):
        X = 1


class Point(NamedTuple):
    x: int
    y: Any


@dataclass
class Settings:
    member: enum.Enum
    inner: Outer.Inner
    points: list[Point]


@dataclass(slots=True)
class Slotted:
    x: int


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any


def foreign(name: str) -> Foreign:
    made = Foreign()
    made.__dict__["name"] = name
    return made


def read_item(
    key: str,
    kind: LoadItemType = LoadItemType.BYTE_IO,
    start: tuple[int, ...] = (),
    size: tuple[int, ...] = (),
) -> ReadItem:
    index = MetadataIndex(key)
    return ReadItem(kind, index, torch.Size([0] * len(size)), index, torch.Size(start), torch.Size(size))


def test_objects_are_read_by_one_call_and_those_without_bytes_not_at_all() -> None:
    """All objects are read in one call; the results are in order, with the number of bytes read."""
    contents = {"a": b"123", "empty": b"", "b": b"45678"}
    calls: list[list[str]] = []

    def fetch(targets: Sequence[ReadTarget]) -> int:
        calls.append([target.key for target in targets])
        for target in targets:
            assert (target.in_place, target.run) == (True, (0, target.item.length))
            target.tensor.copy_(torch.frombuffer(bytearray(contents[target.key]), dtype=torch.uint8))
        return 1000

    items: list[tuple[ReadItem, StoredItem]] = [
        (read_item(key), stored_item(len(content), dtype="float32")) for key, content in contents.items()
    ]
    objects, nbytes = read_objects(items, fetch)
    assert [(item.dest_index.fqn, content) for item, content in objects] == list(contents.items())
    assert (calls, nbytes) == ([["a", "b"]], 1000)


def test_an_object_that_is_refused_is_named_and_never_unpickled() -> None:
    """The error names one key, the number of others, and what to do; no object is unpickled."""
    objects = [(read_item(key), saved(value)) for key, value in (("fine", [1]), ("odd", foreign("x")), ("b", Member.A))]
    with pytest.raises(UntrustedObject, match=r"'odd' and 1 more in /ckpt could run code.*Foreign.*Member") as caught:
        check_trust("/ckpt", objects)
    assert "add_safe_globals" in str(caught.value)
    assert "allow_pickle=True" in str(caught.value)
    assert unpickled == []


def test_an_object_that_nothing_would_have_saved_is_named() -> None:
    """The error gives no advice to allow types, because that would not help."""
    objects = [(read_item("odd"), archive(lambda _: b"\x80\x02R."))]
    with pytest.raises(
        UntrustedObject, match=r"'odd' in /ckpt could run code .*torch.save does not write such an object"
    ) as caught:
        check_trust("/ckpt", objects)
    assert "add_safe_globals" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        [Member.A],
        [Bits.A | Bits.B, Outer.Letter.X],
        [Settings(Member.A, Outer.Inner(), [Point(1, 2)])],
        [Slotted(1), Frozen(datetime.date(2020, 1, 1)), Made(getattr, (Member, "A"))],
        [np.random.default_rng(0), np.ma.array([1], mask=[True]), np.rec.array([(1,)], dtype=[("x", "i4")])],
        [np.dtype("f4", metadata={"a": 1}), np.array(["a"], np.dtypes.StringDType())],
        [np.zeros(2, [("a", "i4", (2,))]), np.array([1, "a"], dtype=object), np.datetime64("2020-01-01")],
        [decimal.Decimal(1), fractions.Fraction(1, 3), uuid.UUID(int=5), array.array("d", [1.5])],
        [time.gmtime(0), datetime.datetime(2020, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC"))],
        [io.StringIO("x"), collections.ChainMap({}), collections.UserDict(a=1), types.SimpleNamespace(a=1)],
        [{"all": [Member.A, Settings(Bits.A, Outer.Inner(), []), Frozen(Slotted(2))]}, Point(3, np.arange(3))],
    ],
    ids=[
        "enum",
        "enums",
        "dataclass",
        "dataclasses",
        "numpy",
        "dtypes",
        "arrays",
        "numbers",
        "times",
        "containers",
        "all",
    ],
)
def test_the_advice_is_complete(values: list[Any]) -> None:
    """Following the advice in the message once suffices for all objects of a load."""
    objects = [(read_item(str(number)), saved(value)) for number, value in enumerate(values)]
    with pytest.raises(UntrustedObject) as caught:
        check_trust("/ckpt", objects)
    advised = re.search(r"add_safe_globals\(\[(.*?)\]\)", str(caught.value))
    assert advised is not None
    with torch.serialization.safe_globals([imported(name) for name in advised[1].split(", ")]):
        check_trust("/ckpt", objects)
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.state_dict = {}
        for item, content in objects:
            deliver_object("/ckpt", planner, item, content)
    assert len(planner.state_dict) == len(values)


def imported(name: str) -> Any:
    """Returns the value of a dotted name, as in a program that imports its module."""
    module, _, attributes = name.rpartition(".")
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ImportError:
            module, _, more = module.rpartition(".")
            attributes = f"{more}.{attributes}"
    return functools.reduce(getattr, attributes.split("."), found)


def test_what_cannot_be_loaded_here_is_named() -> None:
    """The error names the key of an object whose type this Python lacks."""
    content = archive(lambda _: b"\x80\x02cpathlib._elsewhere\nPath\n.")
    with pytest.raises(
        ReadError, match=r"'extra' in /ckpt cannot be loaded: ModuleNotFoundError: .*pathlib._elsewhere"
    ):
        deliver_object("/ckpt", DefaultLoadPlanner(flatten_state_dict=False), read_item("extra"), content)


def test_plain_objects_are_trusted() -> None:
    """Plain objects pass the check, even if one occurs several times."""
    check_trust("/ckpt", [(read_item(key), saved({"rate": 0.1, "names": ["x"]})) for key in "abc"])


def test_an_object_is_handed_to_the_planner() -> None:
    """The planner gets a stream of the stored bytes."""
    planner = DefaultLoadPlanner()
    planner.state_dict = {"extra": None}
    planner.original_state_dict = planner.state_dict
    planner.flatten_state_dict = False
    deliver_object("/ckpt", planner, read_item("extra"), saved({"step": 5}))
    assert planner.state_dict == {"extra": {"step": 5}}


def test_a_tensor_that_was_stored_as_an_object_is_copied_to_its_target() -> None:
    """The target gets the region in the plan, converted to its dtype."""
    planner = DefaultLoadPlanner()
    planner.state_dict = {"x": torch.zeros(2, 3, dtype=torch.float64)}
    item = read_item("x", LoadItemType.TENSOR, (1, 1), (2, 3))
    deliver_object("/ckpt", planner, item, saved(torch.arange(20.0).view(4, 5)))
    assert planner.state_dict["x"].tolist() == [[6, 7, 8], [11, 12, 13]]


def test_a_tensor_that_was_stored_as_an_object_is_unpickled_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensor is unpickled in host memory, and is not narrowed if all of it is needed."""
    places = []
    load = torch.load

    def noted(*arguments: Any, **options: Any) -> Any:
        places.append(options["map_location"])
        return load(*arguments, **options)

    monkeypatch.setattr(torch, "load", noted)
    monkeypatch.setattr(torch.Tensor, "narrow", None)
    planner = DefaultLoadPlanner()
    planner.state_dict = {"x": torch.zeros(4, 5)}
    deliver_object("/ckpt", planner, read_item("x", LoadItemType.TENSOR, (0, 0), (4, 5)), saved(torch.ones(4, 5)))
    assert planner.state_dict["x"].sum() == 20
    assert places == ["cpu"]
