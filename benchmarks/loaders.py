"""The contenders of the load benchmark: each loads, many times, a state that was written once
in the contender's format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from dcp_tensorizer import LoadPlanner, TensorizerStorageReader, TensorizerStorageWriter

from .savers import State, torch_checkpointing

Write = Callable[[State, Path], None]
Load = Callable[[State, Path], Any]


def nested(state: State) -> dict[str, Any]:
    """Nests a state as trainers do: DCP checks each entry of the outermost dict twice for `Stateful`, 20 us each."""
    return {"model": state}


def _write_ours(**options: Any) -> Write:
    def write(state: State, folder: Path) -> None:
        with TensorizerStorageWriter(folder, **options) as writer:
            dcp.save(nested(state), storage_writer=writer)

    return write


def _load_ours(planner: type[LoadPlanner] | None = None, **options: Any) -> Load:
    def load(state: State, folder: Path) -> None:
        reader = TensorizerStorageReader(folder, **options)
        dcp.load(nested(state), storage_reader=reader, planner=None if planner is None else planner())

    return load


def _write_torch(state: State, folder: Path) -> None:
    dcp.save(nested(state), storage_writer=FileSystemWriter(folder))


def _load_torch(state: State, folder: Path) -> None:
    dcp.load(nested(state), storage_reader=FileSystemReader(folder))


def _write_checkpointing(state: State, folder: Path) -> None:
    manager = torch_checkpointing()
    manager.save(str(folder), {"state": state})
    manager.close()


def _load_checkpointing(state: State, folder: Path) -> None:
    manager = torch_checkpointing()
    loaded = manager.load(str(folder), {"state": state})["state"]
    _into(state, loaded)
    manager.close()


def _write_tensorizer(state: State, folder: Path) -> None:
    folder.mkdir(parents=True)
    serializer = TensorSerializer(str(folder / "state.tensors"))
    serializer.write_state_dict(dict(state))
    serializer.close()


def _load_tensorizer(**options: Any) -> Load:
    return lambda state, folder: dict(TensorDeserializer(str(folder / "state.tensors"), device="cpu", **options))


def _write_safetensors(state: State, folder: Path) -> None:
    folder.mkdir(parents=True)
    save_file(state, folder / "state.safetensors")


def _load_safetensors(state: State, folder: Path) -> None:
    # It maps the file: the pages are read when they are used, as they are here.
    _into(state, load_file(folder / "state.safetensors"))


def _into(state: State, loaded: State) -> None:
    for key, tensor in state.items():
        if loaded[key].data_ptr() != tensor.data_ptr():
            tensor.copy_(loaded[key])


FORMATS: dict[str, tuple[Write, dict[str, Load]]] = {
    "dcp_tensorizer": (
        _write_ours(),
        {
            "dcp_tensorizer": _load_ours(),
            "dcp_tensorizer, LoadPlanner": _load_ours(LoadPlanner),
            "dcp_tensorizer, verify=False": _load_ours(verify=False),
            "dcp_tensorizer, page_cache=False": _load_ours(page_cache=False),
        },
    ),
    "dcp_tensorizer, encrypted": (
        _write_ours(encryption=EncryptionParams(bytes(32))),
        {"dcp_tensorizer, encrypted": _load_ours(encryption=DecryptionParams.from_key(bytes(32)))},
    ),
    "torch.distributed.checkpoint": (_write_torch, {"torch FileSystemReader": _load_torch}),
    "torch_checkpointing": (_write_checkpointing, {"torch_checkpointing": _load_checkpointing}),
    "tensorizer": (
        _write_tensorizer,
        {"TensorDeserializer": _load_tensorizer(), "TensorDeserializer, verified": _load_tensorizer(verify_hash=True)},
    ),
    "safetensors": (_write_safetensors, {"safetensors load_file": _load_safetensors}),
}
"""The writer and the loaders of each format."""
