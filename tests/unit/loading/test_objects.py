"""Objects are read as they were stored, checked before any of them is unpickled, and delivered."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_tensorizer import UntrustedObject
from dcp_tensorizer._format.layout import StoredItem
from dcp_tensorizer._loading.objects import check_trust, deliver_object, read_objects
from dcp_tensorizer._loading.read_target import ReadTarget

from ...support import stored_item

unpickled: list[str] = []


class Foreign:
    """Notes when it is unpickled."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        unpickled.append(state["name"])


def foreign(name: str) -> Foreign:
    made = Foreign()
    made.__dict__["name"] = name
    return made


def saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def read_item(
    key: str,
    kind: LoadItemType = LoadItemType.BYTE_IO,
    start: tuple[int, ...] = (),
    size: tuple[int, ...] = (),
) -> ReadItem:
    index = MetadataIndex(key)
    return ReadItem(kind, index, torch.Size([0] * len(size)), index, torch.Size(start), torch.Size(size))


def test_objects_are_read_by_one_call_and_those_without_bytes_not_at_all() -> None:
    """Their bytes come back beside their items, in order, with the count of what was read."""
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
    """The first of them; the error says what could be done."""
    objects = [(read_item(key), saved(value)) for key, value in (("fine", [1]), ("odd", foreign("x")))]
    with pytest.raises(UntrustedObject, match=r"'odd' in /ckpt is an object that could run code.*Foreign\)") as caught:
        check_trust("/ckpt", objects)
    assert "add_safe_globals" in str(caught.value)
    assert "allow_pickle=True" in str(caught.value)
    assert unpickled == []


def test_plain_objects_are_trusted() -> None:
    """However often the same one comes."""
    check_trust("/ckpt", [(read_item(key), saved({"rate": 0.1, "names": ["x"]})) for key in "abc"])


def test_an_object_is_handed_to_the_planner() -> None:
    """As a stream of what was stored."""
    planner = DefaultLoadPlanner()
    planner.state_dict = {"extra": None}
    planner.original_state_dict = planner.state_dict
    planner.flatten_state_dict = False
    deliver_object(planner, read_item("extra"), saved({"step": 5}), allow_pickle=False)
    assert planner.state_dict == {"extra": {"step": 5}}


def test_a_tensor_that_was_stored_as_an_object_is_copied_to_its_target() -> None:
    """The region of it that the plan asks for, converted to the target's dtype."""
    planner = DefaultLoadPlanner()
    planner.state_dict = {"x": torch.zeros(2, 3, dtype=torch.float64)}
    item = read_item("x", LoadItemType.TENSOR, (1, 1), (2, 3))
    deliver_object(planner, item, saved(torch.arange(20.0).view(4, 5)), allow_pickle=False)
    assert planner.state_dict["x"].tolist() == [[6, 7, 8], [11, 12, 13]]
