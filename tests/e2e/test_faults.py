"""Processes that are killed: the writer's, and the trainer itself."""

import logging
import logging.handlers
import os
import signal

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader

from dcp_tensorizer import SaveLimits, TensorizerStorageReader, TensorizerStorageWriter, WriterProcessDied
from dcp_tensorizer._tensor_file.names import data_file_rank

from ..lab.processes import workers
from ..lab.ranks import attempt, eventually, kill_self, run_ranks
from ..lab.states import assert_same

WORLD = 2
VICTIM = 1  # the rank whose processes are killed; the other one coordinates
SECONDS = 30
BIG = 64 << 20  # elements of four bytes: they take a core some 0.2 s to hash, in which to be killed


def _state(index, seed, size=100):
    """A rank's own state."""
    values = torch.arange(size, dtype=torch.int32) * 7 + seed
    return {f"rank{index}": values, f"half{index}": torch.tensor([-0.0, float("nan"), seed]).bfloat16()}


def _loaded(folder, index, size=100):
    """What a checkpoint holds of a rank's state."""
    state = {key: torch.zeros_like(value) for key, value in _state(index, 0, size).items()}
    dcp.load(state, storage_reader=TensorizerStorageReader(folder), no_dist=True)
    return state


def _stop_in_mid_write(folder, index, future, files=1, but=None):
    """Stops this rank's writer process when it has begun a file, the ``files``-th of the rank; returns it."""
    assert eventually(lambda: len(list(folder.glob(f"__{index}_*.tensors"))) == files and workers() not in ([], [but]))
    (worker,) = workers()
    worker.suspend()
    assert eventually(lambda: worker.status() == psutil.STATUS_STOPPED)
    assert not future.done()
    return worker


def _kill_writers(rank, folder):
    """Saves while the victim's writer process is signalled, killed when idle, killed when writing, and killed twice."""
    victim = rank.index == VICTIM
    pids, told, warnings = [], {}, logging.handlers.BufferingHandler(1000)
    logging.getLogger("dcp_tensorizer").addHandler(warnings)
    warnings.setLevel(logging.WARNING)
    with TensorizerStorageWriter(limits=SaveLimits(max_consecutive_failures=None), thread_count=1) as writer:

        def tell(name):
            """What the trainer sees of a save that is over."""
            told[name] = writer.last_report.attempts, [record.getMessage() for record in warnings.buffer]
            warnings.flush()

        def save(name, seed, size=100):
            return dcp.async_save(
                _state(rank.index, seed, size),
                checkpoint_id=folder / name,
                storage_writer=writer,
                process_group=rank.saves,
            )

        save("undisturbed", 1).result()
        (worker,) = workers()
        pids.append(worker.pid)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            worker.send_signal(number)
        future = save("signalled", 2)
        assert [int(item) for item in DataLoader([1, 2, 3], num_workers=2, multiprocessing_context="fork")] == [1, 2, 3]
        future.result()
        pids.append(workers()[0].pid)
        if victim:
            worker.kill()
            assert eventually(lambda: worker.status() == psutil.STATUS_ZOMBIE)
        warnings.flush()
        save("idle", 3).result()
        tell("idle")
        (worker,) = workers()
        pids.append(worker.pid)
        future = save("writing", 4, BIG)
        if victim:
            _stop_in_mid_write(folder / "writing", rank.index, future).kill()
        future.result()
        tell("writing")
        pids.append(workers()[0].pid)
        future = save("undisturbed", 5, BIG)
        if victim:
            first = _stop_in_mid_write(folder / "undisturbed", rank.index, future, files=2)
            first.kill()
            _stop_in_mid_write(folder / "undisturbed", rank.index, future, files=2, but=first).kill()
        failure = attempt(future.result)
        dist.barrier()
        kept = _loaded(folder / "undisturbed", rank.index)
        save("undisturbed", 6).result()
    return pids, failure, kept, told


class DoomedWriter(TensorizerStorageWriter):
    """Its trainer can be killed when all data is written, and nothing committed."""

    doomed = False

    def finish(self, metadata, results):
        if self.doomed:
            kill_self()
        super().finish(metadata, results)


def _rename_and_die(source, target, rename=os.replace):
    rename(source, target)
    kill_self()


def _die(rank, folder):
    """Each rank is a trainer of its own and is killed at a point of its own while it overwrites its checkpoint."""
    point = POINTS[rank.index]
    folder = folder / point
    writer = DoomedWriter(folder / "checkpoint", thread_count=1)
    dcp.save(_state(0, 1), storage_writer=writer)
    writer.prewarm(_state(0, 1))  # which starts the process
    (folder / "writer").write_text(str(workers()[0].pid))
    writer.doomed = point == "before the commit"
    if point == "right after the commit":
        os.replace = _rename_and_die
    if point == "idle":
        dcp.async_save(_state(0, 2), storage_writer=writer).result()
        child = os.fork()  # as a data loader does; it keeps the trainer's descriptors open
        if not child:
            signal.pause()
        (folder / "child").write_text(str(child))
        kill_self()
    in_mid_write = point in ("writing", "writing, with its writer")
    future = dcp.async_save(_state(0, 2, BIG if in_mid_write else 100), storage_writer=writer)
    if in_mid_write:
        process = _stop_in_mid_write(folder / "checkpoint", 0, future, files=2)
        if point == "writing, with its writer":
            process.kill()
        kill_self()
    if point == "never, and nothing is closed":
        return
    future.result()
    raise AssertionError("not killed")


POINTS = (
    "writing",
    "writing, with its writer",
    "before the commit",
    "right after the commit",
    "idle",
    "never, and nothing is closed",
)


def _die_among_others(rank, folder):
    """One of two ranks is killed while both overwrite a checkpoint; returns what the other one saw."""
    with TensorizerStorageWriter(folder / "checkpoint", thread_count=1) as writer:
        dcp.async_save(_state(rank.index, 1), storage_writer=writer, process_group=rank.saves).result()
        dist.barrier()
        size = BIG if rank.index == VICTIM else 100
        future = dcp.async_save(_state(rank.index, 2, size), storage_writer=writer, process_group=rank.saves)
        if rank.index == VICTIM:
            _stop_in_mid_write(folder / "checkpoint", VICTIM, future, files=2).resume()
            kill_self()
        return attempt(future.result)


def _save_in_competition(rank, path, rounds):
    """Each rank is a job of its own, and all save to one path."""
    with TensorizerStorageWriter(path) as writer:
        for number in range(rounds):
            value = rank.index * rounds + number
            dcp.async_save({key: torch.full((999,), value) for key in "abc"}, storage_writer=writer).result()


@pytest.fixture(scope="module")
def killed_writers(tmp_path_factory):
    """The folder, and by rank: the writers' pids, how a save failed and what it left, and warnings of others."""
    folder = tmp_path_factory.mktemp("writers")
    return folder, run_ranks(WORLD, _kill_writers, folder)


@pytest.fixture(scope="module")
def killed_trainers(tmp_path_factory):
    """By point: what the trainer left that was killed there, once its writer process has gone."""
    folder = tmp_path_factory.mktemp("trainers")
    for point in POINTS:
        (folder / point).mkdir()
    try:
        run_ranks(len(POINTS), _die, folder, distributed=False, killed=range(len(POINTS) - 1))
    finally:
        writers = [_process(path) for path in sorted(folder.glob("*/writer"))]
        for process in filter(None, writers):
            process.resume()
        _, alive = psutil.wait_procs(filter(None, writers), timeout=600)
        for process in filter(None, [_process(path) for path in folder.glob("*/child")]):
            process.kill()
    return folder, alive


def _process(path):
    try:
        return psutil.Process(int(path.read_text()))
    except psutil.NoSuchProcess:
        return None


SAVES = {"signalled": (2, 100), "idle": (3, 100), "writing": (4, BIG), "undisturbed": (6, 100)}


@pytest.mark.promise("writer-process-dies")
@pytest.mark.parametrize("name", SAVES)
def test_a_save_succeeds_whatever_happens_to_the_writer_process_once(killed_writers, name):
    """Signals, a death while idle, a death in mid-write, and two in the save before: the save is whole."""
    folder, _ = killed_writers
    seed, size = SAVES[name]
    for index in range(WORLD):
        assert_same(_loaded(folder / name, index, size), _state(index, seed, size))


@pytest.mark.parametrize("name", SAVES)
def test_a_checkpoint_consists_of_one_save_and_nothing_else(killed_writers, name):
    """Neither dead writer processes nor other ranks of failed saves leave files that the next save would not remove."""
    folder, _ = killed_writers
    names = sorted(path.name for path in (folder / name).iterdir())
    assert names[0] == ".metadata"
    assert [data_file_rank(name) for name in names[1:]] == list(range(WORLD))


def test_a_writer_process_outlives_signals_but_not_a_kill(killed_writers):
    """The terminal's signals and forked children leave the writer process alone; a killed one is replaced."""
    _, outcomes = killed_writers
    undisturbed, signalled, idle, writing = outcomes[VICTIM][0]
    assert undisturbed == signalled
    assert len({signalled, idle, writing}) == 3
    assert len(set(outcomes[0][0])) == 1


@pytest.mark.promise("killed-while-idle")
def test_a_writer_process_that_is_killed_while_idle_is_replaced(killed_writers):
    """The next save starts another one: it succeeds at the first attempt, without a warning."""
    folder, outcomes = killed_writers
    pids, _, _, told = outcomes[VICTIM]
    assert told["idle"] == (1, [])
    assert pids[2] != pids[1]
    assert_same(_loaded(folder / "idle", VICTIM), _state(VICTIM, 3))


@pytest.mark.promise("killed-in-a-write")
def test_a_writer_process_that_is_killed_in_mid_write_is_a_warning(killed_writers):
    """Of its rank alone, which has written twice; the checkpoint is whole, and the next save is as any other."""
    folder, outcomes = killed_writers
    attempts, (warning,) = outcomes[VICTIM][3]["writing"]
    assert attempts == 2
    for words in (f"rank {VICTIM}: ", "SIGKILL", "writing once more with a fresh process"):
        assert words in warning
    assert outcomes[0][3]["writing"] == (1, [])
    assert_same(_loaded(folder / "writing", VICTIM, BIG), _state(VICTIM, 4, BIG))


@pytest.mark.promise("killed-twice")
def test_a_writer_process_killed_twice_fails_the_save_on_every_rank(killed_writers):
    """The error names rank, path and signal, every rank has it, and the checkpoint before it loads."""
    folder, outcomes = killed_writers
    for index, (_, failure, kept, _) in enumerate(outcomes):
        assert_same(kept, _state(index, 1))
        assert failure.causes.keys() == {VICTIM}
        assert failure.seconds < SECONDS
        cause = failure.causes[VICTIM]
        assert type(cause) is WriterProcessDied
        for word in (f"rank {VICTIM}", str(folder / "undisturbed"), "SIGKILL"):
            assert word in str(cause)


@pytest.mark.promise("trainer-dies")
def test_no_writer_process_outlives_its_trainer(killed_trainers):
    """Writer processes end with their trainer, even if a child of it lives on, and commit nothing afterwards."""
    folder, alive = killed_trainers
    assert not alive
    assert_same(_loaded(folder / "writing" / "checkpoint", 0), _state(0, 1))


@pytest.mark.promise("job-killed")
@pytest.mark.parametrize(
    ("point", "seed"),
    [
        ("writing", 1),
        ("writing, with its writer", 1),
        ("before the commit", 1),
        ("right after the commit", 2),
        ("idle", 2),
        ("never, and nothing is closed", 2),
    ],
)
def test_a_trainer_that_dies_while_overwriting_leaves_one_whole_checkpoint(killed_trainers, point, seed):
    """Up to the commit the old checkpoint loads, from then on the new one; a job that just ends is drained."""
    folder, _ = killed_trainers
    assert_same(_loaded(folder / point / "checkpoint", 0), _state(0, seed))


def test_a_writer_process_without_a_trainer_removes_what_it_has_written(killed_trainers):
    """Of a save that nobody is left to commit, no data stays."""
    folder, _ = killed_trainers
    assert len(list((folder / "writing" / "checkpoint").glob("*.tensors"))) == 1


@pytest.mark.promise("job-killed", reason="the save of the next job")
def test_what_a_killed_job_left_is_removed_by_the_next_save(killed_trainers):
    """When trainer and writer process are killed at once, nobody removes what they wrote; the next job does."""
    folder, _ = killed_trainers
    path = folder / "writing, with its writer" / "checkpoint"
    assert len(list(path.glob("*.tensors"))) == 2
    with TensorizerStorageWriter(path) as writer:
        dcp.save(_state(0, 3), storage_writer=writer)
    assert sorted(name.name.rpartition("_")[0] or name.name for name in path.iterdir()) == [".metadata", "__0_0"]
    assert_same(_loaded(path, 0), _state(0, 3))


@pytest.mark.promise("rank-killed")
def test_a_rank_that_dies_fails_the_save_of_the_others(tmp_path):
    """The other's future fails within seconds, the old checkpoint loads, and a new job removes what is left."""
    failure, _ = run_ranks(WORLD, _die_among_others, tmp_path, killed={VICTIM})
    assert failure.causes
    assert failure.seconds < SECONDS
    for index in range(WORLD):
        assert_same(_loaded(tmp_path / "checkpoint", index), _state(index, 1))
    with TensorizerStorageWriter(tmp_path / "checkpoint") as writer:
        dcp.save(_state(0, 3), storage_writer=writer, no_dist=True)
    assert len(list((tmp_path / "checkpoint").iterdir())) == 2


@pytest.mark.promise("two-jobs")
def test_of_jobs_that_save_to_one_path_one_wins(tmp_path):
    """Each save of two jobs to one path succeeds; what is there in the end is one of the last ones, whole."""
    run_ranks(2, _save_in_competition, tmp_path, 10, distributed=False)
    loaded = {key: torch.zeros(999, dtype=torch.int64) for key in "abc"}
    dcp.load(loaded, storage_reader=TensorizerStorageReader(tmp_path))
    (value,) = torch.cat(list(loaded.values())).unique().tolist()
    assert value in (9, 19)
