"""torch's own storage replaced on several ranks."""

import os
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _FileSystemWriter  # a StorageWriter that is no AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_tensorizer import StagingError, installed
from dcp_tensorizer._index.container import is_index

from ..lab.ranks import run_ranks

WORLD = 2


def _state(mesh, value):
    return {"w": distribute_tensor(torch.arange(10.0) * value, mesh, [Shard(0)]), "n": int(value)}


def _save_and_load(rank, folder):
    """Every way to save, and by each what was loaded again by both ways to load."""
    mesh = init_device_mesh("cpu", (WORLD,))
    process = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
    results = {}
    with installed():
        for value, (name, made, options) in enumerate(
            [("id", 0, {}), ("writer", 1, {}), ("process, id", 0, process), ("process, writer", 1, process)], start=1
        ):
            path = folder / name
            os.umask(0o077 if name == "process, writer" else 0o022)
            where = {"storage_writer": FileSystemWriter(path)} if made else {"checkpoint_id": path}
            dcp.async_save(_state(mesh, value), **where, process_group=rank.saves, **options).result()
            loaded = []
            for source in ({"checkpoint_id": path}, {"storage_reader": FileSystemReader(path)}):
                state = _state(mesh, 0)
                dcp.load(state, **source, process_group=rank.saves)
                loaded.append((state["w"].full_tensor().tolist(), state["n"]))
            modes = {oct(file.stat().st_mode & 0o777) for file in path.iterdir()}
            results[name] = is_index((path / ".metadata").read_bytes()), loaded, modes
    return results


def test_every_way_to_save_and_load(tmp_path):
    """By a checkpoint_id and by a FileSystemWriter, on a thread and in a process of torch's: all are ours."""
    for results in run_ranks(WORLD, _save_and_load, tmp_path):
        for value, (name, (ours, loaded, modes)) in enumerate(results.items(), start=1):
            assert ours
            assert loaded == [([float(value * i) for i in range(10)], value)] * 2
            assert modes == {"0o600" if name == "process, writer" else "0o644"}  # of the save, not of torch's process


def _save_what_one_rank_cannot_stage(rank, folder, options):
    """By another package's writer; returns which ranks failed, and with what."""
    state = {"w": torch.ones(3), f"own-{rank.index}": threading.Lock() if rank.index else 0}
    with installed():
        future = dcp.async_save(state, storage_writer=_FileSystemWriter(folder), process_group=rank.saves, **options)
        try:
            future.result()
        except CheckpointException as error:
            return {number: (type(failure[0]), str(failure[0])) for number, failure in error.failures.items()}
    return {}


@pytest.mark.parametrize("kind", [AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS], ids=lambda k: k.name)
def test_no_rank_waits_for_one_that_could_not_stage(tmp_path, kind):
    """A writer that is not of this package is given the error where DCP hands it to every rank."""
    results = run_ranks(WORLD, _save_what_one_rank_cannot_stage, tmp_path, {"async_checkpointer_type": kind})
    for failures in results:
        ((failed, (error, words)),) = failures.items()
        assert (failed, error) == (1, StagingError)
        assert "'own-1'" in words
    assert not (tmp_path / ".metadata").exists()
