"""Tests of the exchange: ranks read each byte once in all, and every rank gets the values that it needs."""

import functools
import shutil
import uuid

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tensorizer import DecryptionParams, EncryptionParams
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dcp_tensorizer import ChecksumMismatch, ReadError, TensorizerStorageReader, TensorizerStorageWriter, open_reader
from dcp_tensorizer._loading import deliver
from dcp_tensorizer._loading.exchange import Exchange

from ..lab.faults import flip, s3_proxy
from ..lab.ranks import attempt, kill_self, run_ranks
from ..lab.states import assert_same
from .training import random_tensor

MIB = 1 << 20


def _replicated(seed):
    """Returns the state of all ranks of a DDP job: large and small tensors of several dtypes, and objects."""
    state = {f"layer{n}": random_tensor(torch.bfloat16, (1024, 512), seed + n) for n in range(6)}
    state |= {f"norm{n}": random_tensor(torch.float32, (2000,), seed + n) for n in range(8)}  # not in the index
    state["bytes"] = random_tensor(torch.uint8, (333_333,), seed)
    state["scalar"] = torch.tensor(float(seed))
    return state | {"step": seed, "notes": [seed] * 20_000}


def _zeros(state):
    return {key: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for key, v in state.items()}


def _load(rank, path, state, exchange, planner=None, **options):
    """Loads; returns the report."""
    reports = []
    reader = TensorizerStorageReader(path, exchange=exchange, on_report=reports.append, **options)
    dcp.load(state, storage_reader=reader, process_group=rank.saves, planner=planner)
    return reports[0]


def _load_from_s3(rank, url, options):
    wanted = _replicated(7)
    state = _zeros(wanted)
    report = _load(rank, url, state, rank.saves, storage_options=options)
    assert_same(state, wanted)
    return report.nbytes, report.received_bytes


def test_ranks_with_the_same_state_read_it_once(s3):
    """Four ranks read about equal amounts and each byte once, and the server sends no more than that."""
    url = f"s3://{s3.bucket}/{uuid.uuid4().hex}"
    state = _replicated(7)
    with TensorizerStorageWriter(url, storage_options=s3.options()) as writer:
        dcp.save(state, storage_writer=writer)
    nbytes = sum(v.nbytes for v in state.values() if isinstance(v, torch.Tensor))
    with s3_proxy(s3.endpoint) as proxy:
        loads = run_ranks(4, _load_from_s3, url, s3.options(proxy.endpoint))
        assert nbytes <= proxy.sent_bytes <= 1.1 * nbytes
    for read, received in loads:
        assert 0.15 * nbytes < read < 0.35 * nbytes
        assert received > 0.65 * nbytes


def _small_pieces():
    """Makes an exchange use many windows and pieces for a few megabytes."""
    deliver.Exchange = functools.partial(Exchange, window_bytes=1 << 20, round_bytes=100_000)


def _load_mixed(rank, path, key):
    """Loads into targets with other regions, dtypes and strides on each rank."""
    _small_pieces()
    mesh = init_device_mesh("cpu", (2, 2))
    full = random_tensor(torch.float32, (1000, 700), 1)
    common = {
        "rows": DTensor.from_local(torch.zeros(500, 700), mesh, [Replicate(), Shard(0)], run_check=False),
        "columns": DTensor.from_local(torch.zeros(1000, 350), mesh, [Shard(1), Replicate()], run_check=False),
        "layer0": torch.zeros(1024, 512, dtype=torch.bfloat16 if rank.index else torch.float32),
        "layer1": torch.inference_mode()(torch.zeros)(512, 1024, dtype=torch.bfloat16).T,
        "bytes": torch.zeros(333_333, dtype=torch.uint8),
        "notes": None,
        "scalar": torch.tensor(0.0),
    }
    common["tied"] = common["layer2"] = torch.zeros(1024, 512, dtype=torch.bfloat16)
    own = {f"norm{rank.index}": torch.zeros(2000)} | ({"layer5": torch.zeros(1024, 512)} if rank.index == 3 else {})
    state = common | own
    encryption = DecryptionParams.from_key(key)
    report = _load(rank, path, state, rank.saves, encryption=encryption)
    expected = _replicated(7)
    assert_same(state["rows"].to_local(), full.chunk(2)[rank.index % 2])
    assert_same(state["columns"].to_local(), full.chunk(2, dim=1)[rank.index // 2])
    assert_same(state["layer0"], expected["layer0"].to(state["layer0"].dtype))
    assert_same(state["tied"], torch.ones_like(expected["layer2"]))
    for key in {"layer1", "bytes", "notes", "scalar", f"norm{rank.index}"}:
        assert_same(state[key], expected[key])
    if rank.index == 3:
        assert_same(state["layer5"], expected["layer5"].float())
    replicas = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]  # those with the same rows
    rows = {"rows": DTensor.from_local(torch.zeros(500, 700), mesh, [Replicate(), Shard(0)], run_check=False)}
    of_rows = _load(rank, path, rows, replicas, encryption=encryption)
    assert_same(rows["rows"].to_local(), full.chunk(2)[rank.index % 2])
    return report.received_bytes, of_rows.nbytes, of_rows.received_bytes


def test_ranks_that_want_different_things(tmp_path):
    """Ranks exchange data that all need, encrypted or not, and read the rest; a group of replicas exchanges alone.

    Each rank reads targets that share memory, such as tied weights, by itself: the last one is whole.
    """
    state = _replicated(7)
    full = random_tensor(torch.float32, (1000, 700), 1)
    state |= {"rows": full, "columns": full, "tied": torch.ones_like(state["layer2"])}  # it comes after layer2
    encryption = EncryptionParams.random()
    with TensorizerStorageWriter(tmp_path, encryption=encryption) as writer:
        dcp.save(state, storage_writer=writer)
    shared = sum(state[key].nbytes for key in ("layer0", "layer1", "bytes")) + 40_000
    for received, read_of_rows, received_of_rows in run_ranks(4, _load_mixed, tmp_path, bytes(encryption.key)):
        assert 0.7 * shared < received < shared + full.nbytes  # the blocks of columns are common, too
        half = full.nbytes // 2
        assert 0.4 * half < read_of_rows < 0.65 * half
        assert 0.4 * half < received_of_rows < 0.65 * half


class _OneByOne(DefaultLoadPlanner):
    """A custom planner with one scratch buffer."""

    def commit_tensor(self, read_item, tensor):
        super().commit_tensor(read_item, tensor)


class _Refuses(DefaultLoadPlanner):
    """A planner that fails on one rank."""

    def __init__(self, rank):
        super().__init__()
        self._rank = rank

    def load_bytes(self, read_item, value):
        if self._rank == 2:
            raise KeyError("refused")
        super().load_bytes(read_item, value)


def _load_alone(rank, path):
    """Loads that exchange nothing, because one rank cannot, or because each rank loads by itself."""
    expected = _replicated(7)
    state = _zeros(expected)
    report = _load(rank, path, state, rank.saves, _OneByOne() if rank.index == 1 else None)
    assert_same(state, expected)
    alone = _zeros(expected)
    dcp.load(alone, storage_reader=open_reader(path, exchange=rank.saves), no_dist=True)
    assert_same(alone, expected)
    return report.received_bytes


def test_ranks_that_cannot_exchange(tmp_path):
    """If one rank's planner gets tensors one by one, ranks exchange only objects; with no_dist, nothing."""
    with TensorizerStorageWriter(tmp_path) as writer:
        dcp.save(_replicated(7), storage_writer=writer)
    assert all(received < 100_000 for received in run_ranks(2, _load_alone, tmp_path))


def _fail(rank, path, damaged):
    """Loads that fail on one rank: in its read, before it, and after it."""
    _small_pieces()
    state = _zeros(_replicated(7))
    unfit = {"layer3": torch.zeros(1, 512, dtype=torch.bfloat16).expand(1024, 512)} if rank.index == 1 else {}
    loads = [
        lambda: _load(rank, damaged, state, rank.saves),
        lambda: _load(rank, path, state | unfit, rank.saves),
        lambda: _load(rank, path, state, rank.saves, _Refuses(rank.index)),
    ]
    failures = [attempt(load) for load in loads]
    told = [{r: (type(e), str(e)) for r, e in failure.causes.items()} for failure in failures]
    expected = _replicated(7)
    _load(rank, path, state, rank.saves)  # the group is as it was
    assert_same(state, expected)
    return max(failure.seconds for failure in failures), told


def test_a_rank_that_fails_tells_the_others(tmp_path):
    """Each rank raises the cause within seconds: damage that one has read, an unfit target, a planner's error."""
    with TensorizerStorageWriter(tmp_path / "whole") as writer:
        dcp.save(_replicated(7), storage_writer=writer)
    shutil.copytree(tmp_path / "whole", tmp_path / "damaged")
    (file,) = (tmp_path / "damaged").glob("*.tensors")
    flip(file, file.stat().st_size // 2)
    for seconds, (damage, unfit, refused) in run_ranks(3, _fail, tmp_path / "whole", tmp_path / "damaged"):
        assert seconds < 10
        assert {kind for kind, _ in damage.values()} == {ChecksumMismatch}
        assert all(file.name in text for _, text in damage.values())
        assert [kind for kind, _ in unfit.values()] == [ReadError] * 3
        assert all("'layer3'" in text for _, text in unfit.values())
        assert set(refused) == {2}


def _load_with_others(rank, path):
    """Loads in which some ranks of a group do not take part, or exchange with others."""
    state = _zeros(_replicated(7))
    pairs, (lone, *_) = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0], dist.new_subgroups(2)
    loads = [
        lambda: _load(rank, path, state, rank.saves if rank.index else None),
        lambda: _load(rank, path, state, pairs if rank.index < 3 else rank.saves),
        lambda: dcp.load(state, storage_reader=TensorizerStorageReader(path, exchange=lone), process_group=pairs),
    ]
    failures = [attempt(load) for load in loads]
    _load(rank, path, state, pairs)
    assert_same(state, _replicated(7))
    return [(failure.seconds, [str(error) for error in failure.causes.values()]) for failure in failures]


def test_ranks_of_a_group_that_do_not_load_together(tmp_path):
    """All ranks that load raise an error before any of them waits for a missing rank."""
    with TensorizerStorageWriter(tmp_path) as writer:
        dcp.save(_replicated(7), storage_writer=writer)
    for of_rank in run_ranks(4, _load_with_others, tmp_path):
        for (seconds, texts), number in zip(of_rank, (3, 1, 1), strict=True):
            assert seconds < 10
            assert texts and all(f"ranks, but only {number} took part in this load" in text for text in texts)


def _die(rank, path):
    """Loads; the second rank is killed after it has received data."""
    _small_pieces()
    state = _zeros(_replicated(7))
    if rank.index == 1:
        reader = TensorizerStorageReader(
            path, exchange=rank.saves, on_progress=lambda done, total: done and kill_self()
        )
        dcp.load(state, storage_reader=reader, process_group=rank.saves)
    failure = attempt(lambda: _load(rank, path, state, rank.saves))
    dist.destroy_process_group()
    return failure.seconds, [str(error) for error in failure.causes.values()]


def test_a_rank_that_is_killed(tmp_path):
    """The other ranks fail within seconds."""
    with TensorizerStorageWriter(tmp_path) as writer:
        dcp.save(_replicated(7), storage_writer=writer)
    _, *others = run_ranks(2, _die, tmp_path, killed={1})[::-1]
    for seconds, texts in others:
        assert seconds < 20
        assert texts
