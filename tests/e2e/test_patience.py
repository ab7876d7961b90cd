"""A rank that is stopped: the others wait for it as long as the job's own timeout says, and name it."""

import os
import signal
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from dcp_tensorizer import CheckpointManager, SaveLimits, TensorizerStorageReader, WriteError
from dcp_tensorizer._saving.writer_client import WriterClient

from ..lab.ranks import run_ranks

TIMEOUT = 3.0
"""Of the managers' groups."""
_STARTS = timedelta(minutes=5)
"""Of the job's own group while the ranks come to a scene, however busy the machine is."""


def _stop(*_arguments):
    """Stops this process, until another rank lets it go on."""
    os.kill(os.getpid(), signal.SIGSTOP)


def _slowly(write):
    """A write that takes longer than the ranks' patience for one that gives no sign of life."""

    def slow(*arguments):
        threading.Event().wait(1.5 * TIMEOUT)
        return write(*arguments)

    return slow


def _job(rank, folder):
    """Each scene in a manager of its own; what went wrong on this rank in each, and how many seconds it took."""
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank.index, world_size=2, timeout=_STARTS)
    store = dist.distributed_c10d._get_default_store()
    if rank.index:
        store.set("pid", str(os.getpid()))
    stopped = psutil.Process(int(store.get("pid")))
    state = {"x": torch.full((1000,), float(rank.index))}
    told = {}
    stops = {
        "agreement": (CheckpointManager, "latest"),
        "write": (WriterClient, "write"),
        "read": (TensorizerStorageReader, "read_data"),
    }
    for scene, (owner, name) in stops.items():
        slow = rank.index and scene == "agreement"
        dist.barrier()
        _set_pg_timeout(timedelta(seconds=TIMEOUT))
        manager = CheckpointManager(f"{folder}/checkpoints", limits=SaveLimits(max_consecutive_failures=None))
        with mock.patch.object(WriterClient, "write", _slowly(WriterClient.write)) if slow else nullcontext():
            manager.save(0, state, wait=True)
        stop = (
            mock.patch.object(owner, name, _stop) if rank.index else mock.patch.object(owner, "nothing", 0, create=True)
        )
        with stop:
            begun = time.monotonic()
            try:
                if scene == "read":
                    manager.restore(state)
                else:
                    manager.latest()
                    manager.save(1, state, force=True, wait=True)
            except WriteError as error:
                told[scene] = str(error), time.monotonic() - begun
            if not rank.index:
                stopped.resume()
        manager.close(5.0)
        assert not [thread for thread in threading.enumerate() if thread.name == "signs-of-life"]
        _set_pg_timeout(_STARTS)
        dist.barrier()
    dist.destroy_process_group()
    return told


def _job_with_a_typo(rank, folder):
    """A manager whose constructor raises an error on one rank; returns the error of each rank."""
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank.index, world_size=2, timeout=_STARTS)
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    _set_pg_timeout(timedelta(seconds=TIMEOUT))
    try:
        CheckpointManager(f"{folder}/checkpoints", reader_options={"verfy": True} if rank.index else None)
    except (TypeError, WriteError) as error:
        told = type(error), str(error)
    store.set(f"told-{rank.index}", "")
    store.wait(["told-0", "told-1"], _STARTS)
    dist.destroy_process_group()
    return told


@pytest.mark.promise("manager-not-made")
def test_a_rank_whose_manager_is_not_made(tmp_path):
    """If one rank's constructor raises an error, that of the other rank raises `WriteError` after the timeout."""
    first, second = run_ranks(2, _job_with_a_typo, tmp_path, distributed=False)
    assert first[0] is WriteError and "another rank has ended or does not respond" in first[1]
    assert second[0] is TypeError and "'verfy'" in second[1]


@pytest.mark.promise("rank-stopped")
def test_a_rank_that_is_stopped(tmp_path):
    """A save, a wait and a restore fail within the job's timeout, and name the rank; one that is slow fails nothing."""
    told, _ = run_ranks(2, _job, tmp_path, distributed=False)
    assert told.keys() == {"agreement", "write", "read"}
    assert all(
        f"rank 0 has waited {TIMEOUT:g} s, the timeout of its process group" in words for words, _ in told.values()
    )
    assert all("Rank 1 has not arrived" in words for words, _ in told.values())
    assert "make the same call" in told["agreement"][0]
    assert "have written their part" in told["write"][0] and "step-1 was not saved" in told["write"][0]
    assert "have read their part" in told["read"][0] and "step-0 was not loaded" in told["read"][0]
    assert all(TIMEOUT <= seconds < TIMEOUT + 10 for _, seconds in told.values())
