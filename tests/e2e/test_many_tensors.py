"""State dicts with more tensors than a tensorizer file's index or a process's descriptors can hold."""

import resource

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter
from dcp_tensorizer._storage.local import LocalStorage

from ..lab.ranks import run_ranks
from ..lab.states import assert_same
from .training import random_tensor

COUNT = 6000
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.uint16,
    torch.complex64,
    torch.bool,
)
SHAPES = ((), (1,), (3, 5), (7,), (0, 4))


def _state():
    """6,000 tensors under names of 180 characters, of every dtype in every shape."""
    cases = [(DTYPES[n % len(DTYPES)], SHAPES[n // len(DTYPES) % len(SHAPES)], n) for n in range(COUNT)]
    return {f"layers.{seed:04}.".ljust(180, "w"): random_tensor(dtype, shape, seed) for dtype, shape, seed in cases}


def _save_and_load(rank, folder):
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    state = _state()
    with TensorizerStorageWriter(folder) as writer:
        dcp.async_save(state, storage_writer=writer, process_group=rank.saves).result()
    loaded = {key: torch.zeros_like(value) for key, value in state.items()}
    dcp.load(loaded, storage_reader=TensorizerStorageReader(folder), process_group=rank.saves)
    return loaded


def test_six_thousand_tensors_under_a_limit_of_128_descriptors(tmp_path):
    """A rank's 6,000 tensors cost no descriptors, continue in further files, and come back bit-exact."""
    (loaded,) = run_ranks(1, _save_and_load, tmp_path / "checkpoint")
    expected = _state()
    assert {len(key) for key in expected} == {180}
    assert_same(loaded, expected)
    assert len(list((tmp_path / "checkpoint").glob("*.tensors"))) > 1


@pytest.fixture
def few_descriptors():
    """At most 128 open files in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_descriptors")
def test_a_checkpoint_of_more_files_than_descriptors_loads(tmp_path, monkeypatch):
    """As a checkpoint of many ranks has: 200 files, loaded by one process that may open 128."""
    monkeypatch.setattr(LocalStorage, "max_file_bytes", 12)  # room for one tensor
    state = {f"layer{number}": torch.full((3,), float(number)) for number in range(200)}
    with TensorizerStorageWriter(tmp_path) as writer:
        dcp.save(state, storage_writer=writer)
    assert len(list(tmp_path.glob("*.tensors"))) == 200
    loaded = {key: torch.zeros(3) for key in state}
    dcp.load(loaded, storage_reader=TensorizerStorageReader(tmp_path))
    assert_same(loaded, state)
