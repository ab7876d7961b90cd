"""Saves by ``dcp.async_save`` alone whose ranks are really killed while they write, and what a later run loads."""

import logging
import os
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from dcp_tensorizer import TensorizerStorageWriter, installed, open_reader
from dcp_tensorizer._memory.find import list_kept
from dcp_tensorizer._saving.save import Save

from ..lab.processes import keepers_below
from ..lab.ranks import attempt, eventually, kill_self, run_ranks
from ..lab.seams import wait_until_digested
from .kept_state import SECONDS, sharded_state, values_at, values_of


def _save(rank, path, step, writer=None):
    writer = writer or TensorizerStorageWriter(survive=SECONDS)
    future = dcp.async_save(
        sharded_state(rank, step),
        checkpoint_id=path,
        storage_writer=writer,
        async_stager=writer,
        process_group=rank.saves,
    )
    return future.result()


def _die_when_all_write(rank):
    """From now on: each rank is killed when all of them have begun to write."""

    def write_items(save, items):
        dist.barrier(group=rank.saves)
        kill_self()

    Save.write_items = write_items


def _is_killed_while_it_writes(rank, folder, names, steps):
    """Commits a save to each path but the last, and is killed in that one."""
    for name, step in zip(names[:-1], steps[:-1], strict=True):
        _save(rank, folder / name, step)
    _die_when_all_write(rank)
    _save(rank, folder / names[-1], steps[-1])


def _loads(rank, path, **options):
    state = sharded_state(rank, 0)
    dcp.load(state, storage_reader=open_reader(path, **options))
    return values_of(state)


@pytest.mark.parametrize("world_size", [3, 1])
def test_a_save_that_was_cut_off_is_loaded_from_memory(tmp_path, keepers, world_size):
    """On more ranks and on fewer; the save before it is on storage, as always."""
    run_ranks(2, _is_killed_while_it_writes, tmp_path, ["step-1", "step-2"], [1, 2], killed=(0, 1))
    (kept,) = list_kept(tmp_path)
    assert (kept.path, kept.world_size, kept.ranks) == (str(tmp_path / "step-2"), 2, (0, 1))
    assert run_ranks(world_size, _loads, tmp_path / "step-2") == [values_at(2)] * world_size
    assert run_ranks(world_size, _loads, tmp_path / "step-1") == [values_at(1)] * world_size
    _end_all(keepers)


def test_a_checkpoint_that_is_replaced_in_place(tmp_path, keepers):
    """The one that was being saved is newer than the one that is there; without memory that one is loaded."""
    run_ranks(2, _is_killed_while_it_writes, tmp_path, ["newest", "newest"], [1, 2], killed=(0, 1))
    assert run_ranks(2, _loads_from_storage, tmp_path / "newest") == [values_at(1)] * 2
    assert run_ranks(2, _loads, tmp_path / "newest") == [values_at(2)] * 2
    _end_all(keepers)


def _loads_from_storage(rank, path):
    return _loads(rank, path, from_memory=False)


def _saves(rank, path, step):
    with TensorizerStorageWriter() as writer:
        _save(rank, path, step, writer)


def test_what_was_saved_there_since_counts(tmp_path, keepers):
    """Another job has saved to the path: that is loaded, and not what is in memory."""
    run_ranks(2, _is_killed_while_it_writes, tmp_path, ["newest", "newest"], [1, 2], killed=(0, 1))
    run_ranks(2, _saves, tmp_path / "newest", 7)
    assert run_ranks(2, _loads, tmp_path / "newest") == [values_at(7)] * 2
    _end_all(keepers)


def _is_killed_after(rank, path, step):
    """Commits a save, whose state is then also in memory."""
    _save(rank, path, step)
    dist.barrier(group=rank.saves)
    kill_self()


def _damage(keepers):
    """Changes every byte of the states in memory."""
    wait_until_digested(keepers)
    for process in keepers_below(keepers):
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            if os.readlink(link).startswith("/memfd:dcp_tensorizer "):
                with open(link, "r+b", buffering=0) as file:
                    content = file.read()
                    os.pwrite(file.fileno(), bytes(byte ^ 1 for byte in content), 0)


def _loads_and_logs(rank, path):
    """What is loaded, and what errors the log has."""
    said = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("dcp_tensorizer").addHandler(handler)
    return _loads(rank, path), said


def test_memory_that_is_damaged_and_the_same_save_on_storage(tmp_path, keepers):
    """The checkpoint is loaded from there: each rank that has met damage says so at ERROR."""
    run_ranks(2, _is_killed_after, tmp_path / "step-1", 1, killed=(0, 1))
    _damage(keepers)
    for loaded, (of_part, of_storage) in run_ranks(2, _loads_and_logs, tmp_path / "step-1"):
        assert loaded == values_at(1)
        assert "part of" in of_part and "is not used" in of_part and "are not what was saved" in of_part
        assert of_storage.endswith(
            "step-1 cannot be loaded from memory: it is loaded from storage, which has the same save"
        )
    _end_all(keepers)


def _errors_of_load(rank, path):
    failure = attempt(lambda: _loads(rank, path))
    return [f"{type(cause).__name__}: {cause}" for cause in failure.causes.values()]


def test_memory_that_is_damaged_and_another_save_on_storage(tmp_path, keepers):
    """Nothing is loaded, or else ranks could have different saves: the error says how to load what is on storage."""
    run_ranks(2, _is_killed_while_it_writes, tmp_path, ["newest", "newest"], [1, 2], killed=(0, 1))
    _damage(keepers)
    for errors in run_ranks(2, _errors_of_load, tmp_path / "newest"):
        assert all(error.startswith("ReadError: ") for error in errors) and len(errors) == 2
        assert all("load what storage has with open_reader(path, from_memory=False)" in error for error in errors)
    assert run_ranks(2, _loads_from_storage, tmp_path / "newest") == [values_at(1)] * 2
    _end_all(keepers)


def _end_all(keepers):
    """Ends the keepers that a test leaves, as a job that nobody starts again does after its time."""
    for process in keepers_below(keepers):
        process.kill()
        process.wait()
    for socket in keepers.iterdir():
        socket.unlink()
    keepers.rmdir()


def _resumes(rank, folder, keepers):
    """Loads, and saves twice; how many keepers there are then, and what is loaded in the end."""
    writer = TensorizerStorageWriter(survive=SECONDS)
    found = _loads(rank, folder / "step-2")
    counts = []
    for step in (3, 4, 5):
        _save(rank, folder / f"step-{step}", step, writer)
        dist.barrier()
        counts.append(len(keepers_below(keepers)))
        dist.barrier()
    writer.close()
    return found, counts, _loads(rank, folder / "step-5")


def test_the_memory_is_given_back_when_the_job_goes_on(tmp_path, keepers):
    """When all ranks have saved since; and closing the writer ends the new keepers."""
    run_ranks(2, _is_killed_while_it_writes, tmp_path, ["step-1", "step-2"], [1, 2], killed=(0, 1))
    for found, counts, last in run_ranks(2, _resumes, tmp_path, keepers):
        assert (found, last) == (values_at(2), values_at(5))
        assert counts == [4, 2, 2]  # those of the job before are left until the second save begins


def _dies_under_install(rank, folder):
    with installed(writer_options={"survive": SECONDS}):
        _die_when_all_write(rank)
        writer = FileSystemWriter(folder / "step-1")
        dcp.async_save(sharded_state(rank, 1), storage_writer=writer, process_group=rank.saves).result()


def _loads_under_install(rank, folder):
    with installed():
        state = sharded_state(rank, 0)
        dcp.load(state, storage_reader=FileSystemReader(folder / "step-1"))
    return values_of(state)


def test_a_framework_that_knows_nothing_of_it(tmp_path, keepers):
    """It makes torch's writer and torch's reader."""
    run_ranks(2, _dies_under_install, tmp_path, killed=(0, 1))
    assert run_ranks(2, _loads_under_install, tmp_path) == [values_at(1)] * 2
    _end_all(keepers)


def _fails_to_load(rank, path):
    logging.getLogger("torch").setLevel(logging.ERROR)  # it says that there is no metadata
    failure = attempt(lambda: _loads(rank, path))
    return [(type(cause).__name__, str(path) in str(cause)) for cause in failure.causes.values()]


def test_a_rank_whose_state_is_not_here(tmp_path, keepers):
    """A keeper was killed, too: the load fails on all ranks, and names the path; the save before is loaded."""
    run_ranks(2, _is_killed_while_it_writes, tmp_path, ["step-1", "step-2"], [1, 2], killed=(0, 1))
    process = keepers_below(keepers)[0]
    process.kill()
    process.wait()
    for failures in run_ranks(2, _fails_to_load, tmp_path / "step-2"):
        assert failures
        assert all(named for _, named in failures)
    assert run_ranks(2, _loads, tmp_path / "step-1") == [values_at(1)] * 2
    _end_all(keepers)


def _saves_and_ends(rank, path):
    _save(rank, path, 1)


def test_ranks_that_end_without_closing(tmp_path, keepers):
    """Nothing is left of them: what they saved is on storage."""
    run_ranks(2, _saves_and_ends, tmp_path / "step-1")
    assert eventually(lambda: not keepers.exists())
    assert run_ranks(2, _loads, tmp_path / "step-1") == [values_at(1)] * 2
