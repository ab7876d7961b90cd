"""Bad input: every rank gets a named error within seconds, also when only one of them has it."""

import re
import resource
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_tensorizer import (
    NotCommitted,
    ReadError,
    SaveLimits,
    StagingError,
    TensorizerStorageReader,
    TensorizerStorageWriter,
    UnsupportedFormat,
    UntrustedObject,
    WriteError,
)

from ..lab.processes import workers
from ..lab.ranks import attempt, eventually, run_ranks
from ..lab.states import assert_same
from .training import random_tensor

WORLD = 2
SECONDS = 30
HUGE = 64 << 20  # elements of four bytes


class Unpicklable(Exception):
    """An error that cannot be handed to another rank."""

    def __init__(self):
        super().__init__("the value is broken")
        self.lock = threading.Lock()


class Uncopiable:
    """A value that staging cannot copy."""

    def __deepcopy__(self, memo):
        raise Unpicklable


class Unwritable:
    """A value that can be copied, and not be written."""

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        raise Unpicklable


class Unplanned(DefaultSavePlanner):
    """A planner that fails on the last rank."""

    def create_local_plan(self):
        if dist.get_rank() == WORLD - 1:
            raise ValueError("no plan")
        return super().create_local_plan()


KINDS = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.empty(3, device="meta"),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "lock": threading.Lock,
    "uncopiable": Uncopiable,
    "unwritable": Unwritable,
}


@contextmanager
def _memory_limit(nbytes):
    """This process may have so many bytes of address space more than it has."""
    (used,) = [int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmSize" in line]
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, ((used << 10) + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class Unknown:
    """A type that could run code."""


class Job:
    """What the cases share: a writer, a good checkpoint, and the state that is in it."""

    def __init__(self, rank, folder, writer):
        self.rank = rank
        self.folder = folder
        self.writer = writer
        self.mesh = init_device_mesh("cpu", (WORLD,))
        self.save("good")
        dist.barrier()

    def state(self, seed=0):
        return {
            "weight": distribute_tensor(random_tensor(torch.float32, (5, 3), seed), self.mesh, [Shard(0)]),
            "bias": random_tensor(torch.float32, (3,), seed + 1),
            "step": 7,
        }

    def save(self, name, state=None, writer=None, planner=None):
        """Saves below the job's folder, if there is a name, and waits."""
        dcp.async_save(
            self.state() if state is None else state,
            checkpoint_id=self.folder / name if name else None,
            storage_writer=writer or self.writer,
            planner=planner,
            process_group=self.rank.saves,
        ).result()

    def save_synchronously(self, name):
        dcp.save(
            self.state(),
            checkpoint_id=self.folder / name,
            storage_writer=self.writer,
            process_group=self.rank.saves,
        )

    def load(self, name, state=None):
        """Loads from below the job's folder."""
        reader = TensorizerStorageReader(self.folder / name)
        dcp.load(self.state(9) if state is None else state, storage_reader=reader, process_group=self.rank.saves)

    def with_odd(self, value):
        """A state with one more value on the last rank."""
        return self.state() | ({"odd": value} if self.rank.index == WORLD - 1 else {})


def _loads(rank, folder):
    with TensorizerStorageWriter() as writer:
        job = Job(rank, folder, writer)
        job.save("object", {f"rank{rank.index}": Unknown(), "bias": torch.ones(3)})
    dcp.save(job.state(), checkpoint_id=folder / "of_torch", process_group=rank.saves)
    if rank.index == 0:
        shutil.copytree(folder / "good", folder / "uncommitted", ignore=shutil.ignore_patterns(".metadata"))
        (folder / "file").write_text("")
        shutil.copytree(folder / "good", folder / "incomplete")
        next((folder / "incomplete").glob("__1_0_*")).unlink()
        shutil.copytree(folder / "good", folder / "short")
        next((folder / "short").glob("__1_0_*")).write_bytes(b"")
    dist.barrier()
    failures = {
        name: attempt(lambda name=name: job.load(name))
        for name in ("nowhere", "uncommitted", "file", "of_torch", "incomplete", "short")
    }
    expanded = torch.zeros(1).expand(3)
    failures["expanded"] = attempt(lambda: job.load("good", job.state(9) | {"bias": expanded}))
    untouched = torch.zeros(3)
    failures["object"] = attempt(lambda: job.load("object", {f"rank{rank.index}": None, "bias": untouched}))
    loaded = job.state(9)
    job.load("good", loaded)
    return failures, loaded["bias"], untouched


def _fail_on_one_rank(job):
    """Saves over a checkpoint while the last rank fails in each step, then well; returns what was there each time."""
    path, told = job.folder / "one rank", {}
    fails = {"staging": Uncopiable, "planning": None, "writing": Unwritable}
    job.save("one rank", job.state(1))
    for step, make in fails.items():
        planner = None if make else Unplanned()
        state = job.with_odd(make()) if make else None
        failure = attempt(lambda state=state, planner=planner: job.save("one rank", state, planner=planner))
        left = job.state(9)
        job.load("one rank", left)
        told[step] = failure, left["bias"]
    dist.barrier()
    job.save("one rank", job.state(7))
    left = job.state(9)
    job.load("one rank", left)
    return told, left["bias"], sorted(file.name[:4] for file in path.iterdir())


def _saves(rank, folder):
    failures = {}
    with TensorizerStorageWriter(limits=SaveLimits(max_consecutive_failures=None)) as writer:
        job = Job(rank, folder, writer)
        for kind, make in KINDS.items():
            failures[kind] = attempt(lambda kind=kind, make=make: job.save(kind, job.with_odd(make())))
        failures["planning"] = attempt(lambda: job.save("planning", planner=Unplanned()))
        huge = job.with_odd(torch.zeros(HUGE))
        with _memory_limit(HUGE):
            failures["memory"] = attempt(lambda: job.save("good", huge))
        if rank.index == 0:
            (folder / "file").write_text("")
        dist.barrier()
        failures["no directory"] = attempt(lambda: job.save("file/below/checkpoint"))
        (process,) = workers()
        if rank.index == WORLD - 1:
            process.rlimit(psutil.RLIMIT_FSIZE, (1 << 20, psutil.RLIM_INFINITY))
        large = {f"large{rank.index}": torch.zeros(1 << 20)}
        failures["too large"] = attempt(lambda: job.save("good", large))
        process.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
        job.save("recovered", job.state(5))
        failures["one rank"] = _fail_on_one_rank(job)
    writer.close()
    failures["closed"] = attempt(lambda: job.save("closed"))
    failures["closed, dcp.save"] = attempt(lambda: job.save_synchronously("closed"))
    with TensorizerStorageWriter(overwrite=False) as other:
        failures["overwrite"] = attempt(lambda: job.save("good", job.state(3), other))
        failures["no path"] = attempt(lambda: job.save(None, None, other))
    recovered, good = job.state(9), job.state(9)
    job.load("recovered", recovered)
    job.load("good", good)
    return failures, recovered["bias"], good["bias"]


@pytest.fixture(scope="module")
def loads(tmp_path_factory):
    """By rank: how each load failed, and what a good one gave afterwards."""
    return run_ranks(WORLD, _loads, tmp_path_factory.mktemp("loads"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder and, by rank, how each save failed, and what good ones had saved."""
    folder = tmp_path_factory.mktemp("saves")
    return folder, run_ranks(WORLD, _saves, folder)


def _causes(outcomes, case):
    """The causes that every rank got; all ranks get the same."""
    failures = [failures[case] for failures, *_ in outcomes]
    assert all(failure.causes for failure in failures), f"{case} did not fail"
    assert max(failure.seconds for failure in failures) < SECONDS
    texts = [{rank: repr(cause) for rank, cause in failure.causes.items()} for failure in failures]
    assert texts[0] == texts[1]
    return failures[0].causes


@pytest.mark.parametrize(
    ("case", "error", "words"),
    [
        ("nowhere", NotCommitted, "/nowhere holds no committed checkpoint"),
        ("uncommitted", NotCommitted, "/uncommitted holds no committed checkpoint"),
        ("file", NotCommitted, "/file holds no committed checkpoint"),
        ("of_torch", UnsupportedFormat, "open_reader"),
    ],
)
def test_loading_what_is_no_checkpoint(loads, case, error, words):
    """A path without a committed checkpoint of ours is an error that names it, on every rank."""
    causes = _causes(loads, case)
    assert causes.keys() == set(range(WORLD))
    for cause in causes.values():
        assert type(cause) is error
        assert words in str(cause)


@pytest.mark.parametrize(("case", "words"), [("incomplete", "is missing"), ("short", "has 0 bytes instead of")])
def test_loading_a_checkpoint_without_one_of_its_files(loads, case, words):
    """A missing or truncated data file is named to all ranks."""
    causes = _causes(loads, case)
    assert all(
        type(cause) is ReadError and "/__1_0_" in str(cause) and words in str(cause) for cause in causes.values()
    )


def test_loading_into_a_target_whose_elements_share_memory(loads):
    """An expanded target cannot be loaded into: the error is ours and names the key."""
    for cause in _causes(loads, "expanded").values():
        assert isinstance(cause, ReadError)
        assert "'bias'" in str(cause)


@pytest.mark.promise("object-runs-code")
def test_loading_an_object_that_could_run_code(loads):
    """An object that could run code is refused, named, before any tensor has changed."""
    for rank, cause in _causes(loads, "object").items():
        assert type(cause) is UntrustedObject
        assert f"'rank{rank}'" in str(cause)
        for words in ("test_bad_input.Unknown", "add_safe_globals", "allow_pickle=True"):
            assert words in str(cause)
    for _, _, untouched in loads:
        assert_same(untouched, torch.zeros(3))


def test_loads_work_after_failures(loads):
    """A job whose loads failed can load."""
    for _, bias, _ in loads:
        assert_same(bias, random_tensor(torch.float32, (3,), 1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_cannot_be_saved_is_named_to_every_rank(saved, kind):
    """What only the last rank cannot stage or write fails the save on every rank, and names the key.

    Also where the cause, an error of the value's own, could not be handed to another rank.
    """
    folder, outcomes = saved
    causes = _causes(outcomes, kind)
    assert causes.keys() == {WORLD - 1}
    assert type(causes[WORLD - 1]) is (WriteError if kind == "unwritable" else StagingError)
    assert "'odd'" in str(causes[WORLD - 1])
    left = {path.name[:4] for path in folder.glob(f"{kind}/*") if path.suffix != ".saving"}
    assert left <= ({"__0_"} if kind == "unwritable" else set())  # another rank's, which the next save removes


@pytest.mark.promise("rank-fails")
def test_a_planner_that_fails_on_one_rank(saved):
    """Every rank gets the planner's own error, and nothing is left of the save."""
    folder, outcomes = saved
    causes = _causes(outcomes, "planning")
    assert {rank: repr(cause) for rank, cause in causes.items()} == {WORLD - 1: "ValueError('no plan')"}
    assert not list(folder.glob("planning/*"))


@pytest.mark.promise("one-rank-fails")
def test_a_save_that_one_rank_fails_leaves_the_old_checkpoint(saved):
    """In staging, planning or writing: every rank has that rank's error, and the next save removes what is left."""
    _, outcomes = saved
    for failures, *_ in outcomes:
        told, bias, names = failures["one rank"]
        assert told.keys() == {"staging", "planning", "writing"}
        for failure, left in told.values():
            assert failure.causes.keys() == {WORLD - 1}
            assert failure.seconds < SECONDS
            assert_same(left, random_tensor(torch.float32, (3,), 2))
        assert_same(bias, random_tensor(torch.float32, (3,), 8))
        assert names == [".met", "__0_", "__1_"]


@pytest.mark.promise("staging-memory")
def test_memory_that_is_short_on_one_rank(saved):
    """The error says how much the rank's staging buffer would have taken, and the checkpoint before it stays."""
    _, outcomes = saved
    causes = _causes(outcomes, "memory")
    assert causes.keys() == {WORLD - 1}
    assert type(causes[WORLD - 1]) is StagingError
    assert re.search(r"cannot allocate 268,[\d,]+ bytes for the staging buffer", str(causes[WORLD - 1]))


def test_a_directory_that_cannot_be_made_is_named_to_every_rank(saved):
    """A path below a regular file is an error of every rank, with the path in it."""
    folder, outcomes = saved
    causes = _causes(outcomes, "no directory")
    assert causes.keys() == set(range(WORLD))
    assert all(type(cause) is WriteError and str(folder / "file" / "below") in str(cause) for cause in causes.values())


def test_a_file_system_that_refuses_the_data_of_one_rank(saved):
    """The system's error is named with rank and file to every rank, and none of that rank's data is left."""
    folder, outcomes = saved
    causes = _causes(outcomes, "too large")
    assert causes.keys() == {WORLD - 1}
    assert type(causes[WORLD - 1]) is WriteError
    for word in (f"rank {WORLD - 1}", str(folder / "good" / f"__{WORLD - 1}_0_"), "File too large"):
        assert word in str(causes[WORLD - 1])
    assert len(list((folder / "good").glob(f"__{WORLD - 1}_*"))) == 1


@pytest.mark.parametrize(("case", "error"), [("closed", StagingError), ("closed, dcp.save", WriteError)])
def test_saving_after_close(saved, case, error):
    """A closed writer refuses to save, on every rank, and closing it again does nothing."""
    folder, outcomes = saved
    for cause in _causes(outcomes, case).values():
        assert type(cause) is error
        assert "the writer is closed" in str(cause)
    assert not (folder / "closed").exists()


def test_overwriting_can_be_forbidden(saved):
    """With overwrite=False an existing checkpoint is an error, and stays as it is."""
    folder, outcomes = saved
    causes = _causes(outcomes, "overwrite")
    assert all(type(cause) is WriteError and str(folder / "good") in str(cause) for cause in causes.values())
    for _, _, good in outcomes:
        assert_same(good, random_tensor(torch.float32, (3,), 1))


def test_a_save_without_a_path(saved):
    """A writer without a path and a save without a checkpoint_id say what is missing."""
    _, outcomes = saved
    assert all("checkpoint_id" in str(cause) for cause in _causes(outcomes, "no path").values())


def test_a_writer_saves_after_failures(saved):
    """The writer whose saves failed saves the next state."""
    _, outcomes = saved
    for _, recovered, _ in outcomes:
        assert_same(recovered, random_tensor(torch.float32, (3,), 6))


def test_failures_in_a_row_are_raised_though_futures_are_dropped(tmp_path):
    """After three saves that nobody looked at, the fourth async_save raises and names cause and last checkpoint."""
    (tmp_path / "file").write_text("")
    before = set(threading.enumerate())
    with TensorizerStorageWriter() as writer:
        dcp.async_save({"a": torch.ones(1)}, checkpoint_id=tmp_path / "good", storage_writer=writer)
        for _ in range(3):
            dcp.async_save({"a": torch.ones(1)}, checkpoint_id=tmp_path / "file" / "below", storage_writer=writer)
        with pytest.raises(WriteError, match=r"3 saves in a row.*file/below.*was committed: .*good"):
            dcp.async_save({"a": torch.ones(1)}, checkpoint_id=tmp_path / "file" / "below", storage_writer=writer)
        dcp.async_save({"a": torch.ones(1)}, checkpoint_id=tmp_path / "good", storage_writer=writer).result()
    assert eventually(lambda: set(threading.enumerate()) <= before)


def _save_to_disks_of_their_own(rank, folder):
    """Saves where only rank 0 has a checkpoint already, then to a path that all share; rank 1 also to its own."""
    own = folder / f"machine{rank.index}"
    mesh = init_device_mesh("cpu", (WORLD,))
    state = {"w": distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])}
    with TensorizerStorageWriter(own / "checkpoint") as writer:
        if rank.index == 0:
            dcp.save({"old": torch.ones(3)}, storage_writer=writer, no_dist=True)
        failure = attempt(
            lambda: dcp.async_save(state, storage_writer=writer, process_group=rank.saves).result(timeout=SECONDS)
        )
        shared = folder / "shared"
        dcp.async_save(state, storage_writer=writer, process_group=rank.saves, checkpoint_id=shared).result()
        if rank.index:
            dcp.save({"new": torch.ones(3)}, storage_writer=writer, no_dist=True)
    return {number: (type(cause).__name__, str(cause)) for number, cause in failure.causes.items()}


@pytest.mark.promise("path-not-shared")
def test_ranks_that_do_not_share_the_path_are_told(tmp_path):
    """The error of all names the rank whose data is elsewhere, the old checkpoint stays alone, the next saves work."""
    for causes in run_ranks(WORLD, _save_to_disks_of_their_own, tmp_path):
        ((kind, text),) = causes.values()
        assert kind == "WriteError"
        assert re.search(r"that rank 1 just wrote .*the ranks do not share this path", text)
    old = {"old": torch.zeros(3)}
    dcp.load(old, storage_reader=TensorizerStorageReader(tmp_path / "machine0" / "checkpoint"), no_dist=True)
    assert_same(old, {"old": torch.ones(3)})
    assert len(list((tmp_path / "shared").iterdir())) == 1 + WORLD
    assert [len(list((tmp_path / f"machine{index}" / "checkpoint").iterdir())) for index in range(WORLD)] == [2, 2]
