"""Keys that are no strings, as an unflattened state dict may have them: what torch's own storage does, ours does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter

from dcp_tensorizer import (
    ConversionError,
    LoadPlanner,
    SavePlanner,
    TensorizerStorageReader,
    TensorizerStorageWriter,
    WriteError,
)
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer.tools import convert
from dcp_tensorizer.tools._formats.registry import open_checkpoint
from dcp_tensorizer.tools._inspect import inspect_view
from dcp_tensorizer.tools._verify import verify_files
from dcp_tensorizer.tools._view import read_parts

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

UNFLATTENED = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
STATES: dict[str, dict[Any, Any]] = {
    "int": {1: torch.arange(3.0), 2: "object", -(2**70): torch.ones(2)},
    "tuple": {("a", 1): torch.arange(3.0), ("b",): 5, (): torch.zeros(1)},
    "tuple of tuples": {(("c", (1, 2)), 3): torch.ones(2)},
    "others": {None: torch.arange(3.0)},
    "float": {1.5: torch.arange(3.0)},
    "bytes": {b"x": torch.arange(3.0), b"": torch.empty(0)},
    "surrogates": {"\ud800": torch.arange(3.0)},
}


def through(writer: Any, reader: Any, state: dict[Any, Any], *, asynchronous: bool = False) -> dict[Any, Any]:
    if asynchronous:
        dcp.async_save(state, storage_writer=writer, planner=DefaultSavePlanner(**UNFLATTENED)).result()
    else:
        dcp.save(state, storage_writer=writer, planner=DefaultSavePlanner(**UNFLATTENED))
    loaded = {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None for key, value in state.items()}
    dcp.load(loaded, storage_reader=reader, planner=DefaultLoadPlanner(**UNFLATTENED))
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in loaded.items()}


@pytest.mark.parametrize("name", STATES)
def test_keys_of_all_types(tmp_path: Path, name: str) -> None:
    """Saved at once or in the background, they come back as from torch's own storage, and metadata names them alike."""
    state = STATES[name]
    expected = through(FileSystemWriter(tmp_path / "torch"), FileSystemReader(tmp_path / "torch"), state)
    assert through(TensorizerStorageWriter(tmp_path / "a"), TensorizerStorageReader(tmp_path / "a"), state) == expected
    with TensorizerStorageWriter(tmp_path / "b") as writer:
        assert through(writer, TensorizerStorageReader(tmp_path / "b"), state, asynchronous=True) == expected
    theirs = FileSystemReader(tmp_path / "torch").read_metadata()
    ours = TensorizerStorageReader(tmp_path / "a").read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data


def test_values_go_where_their_keys_are(tmp_path: Path) -> None:
    """`LoadPlanner` sets values in nested dicts under the keys that these have, and adds none: paths are of strings."""
    keys: list[Any] = ["a", 1, -2, 1.5, None, ("b", 2)]
    state = {"values": {key: f"of {key}" for key in keys}, "lists": [{7: 0.5, 8: torch.ones(2)}, {7: 0.25}]}
    dcp.save(state, storage_writer=TensorizerStorageWriter(tmp_path / "a"), planner=SavePlanner())
    loaded: dict[str, Any] = {"values": dict.fromkeys(keys), "lists": [{7: 0.0, 8: torch.zeros(2)}, {7: 0.0}]}
    dcp.load(loaded, storage_reader=TensorizerStorageReader(tmp_path / "a"), planner=LoadPlanner())
    assert loaded["values"] == state["values"]
    assert [part.keys() for part in loaded["lists"]] == [{7: 0, 8: 0}.keys(), {7: 0}.keys()]
    assert (loaded["lists"][0][7], loaded["lists"][0][8].tolist(), loaded["lists"][1][7]) == (0.5, [1.0, 1.0], 0.25)


def test_a_key_that_cannot_be_stored(tmp_path: Path) -> None:
    """Of a class that no reader would know: it is named, and nothing is committed."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011  (DCP's CheckpointException, or ours)
        through(TensorizerStorageWriter(tmp_path), TensorizerStorageReader(tmp_path), {frozenset([1]): torch.ones(2)})
    error = next(iter(caught.value.failures.values()))[0]  # type: ignore[attr-defined]
    assert isinstance(error, WriteError)
    assert "frozenset({1}) cannot be described" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_tools_show_and_convert_them(tmp_path: Path) -> None:
    """By the names that they have as strings; only `torch.save` has the keys themselves."""
    state = {1: torch.arange(3.0), (1, "x"): torch.ones(2), 7: "object"}
    dcp.save(state, storage_writer=TensorizerStorageWriter(tmp_path / "a"), planner=DefaultSavePlanner(**UNFLATTENED))
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "t"), planner=DefaultSavePlanner(**UNFLATTENED))
    storage = open_storage(tmp_path / "a")
    parts = read_parts(storage)
    assert verify_files(storage, parts, full=True).damages == ()
    shown = inspect_view(open_checkpoint(tmp_path / "a", {}), {})
    assert {tensor.key for tensor in shown.tensors} == {"1", "(1, 'x')"}
    for source in "at":
        convert(tmp_path / source, tmp_path / f"{source}.pt", "torch")
        loaded = torch.load(tmp_path / f"{source}.pt")
        assert loaded.keys() == state.keys()
        assert torch.equal(loaded[1], state[1])
        with pytest.raises(ConversionError, match="is below the dict key"):
            convert(tmp_path / source, tmp_path / f"{source}2", "dcp_tensorizer")


def test_two_keys_of_one_name(tmp_path: Path) -> None:
    """A number and its digits are two values of a checkpoint; a conversion would make one of them, and says so."""
    state = {1: torch.arange(3.0), "1": torch.ones(2)}
    dcp.save(state, storage_writer=TensorizerStorageWriter(tmp_path / "a"), planner=DefaultSavePlanner(**UNFLATTENED))
    tensors = open_checkpoint(tmp_path / "a", {}).tensors
    assert {key: tensor.shape for key, tensor in tensors.items()} == {"1": (2,), "1_": (3,)}
    with pytest.raises(ConversionError, match=r"two keys .* would get the same name"):
        convert(tmp_path / "a", tmp_path / "a.pt", "torch")
