"""Checkpoints in S3, from real ranks: what they cost, what is left when something dies, and what nobody may see."""

import itertools
import logging
import os
import signal
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_tensorizer import (
    NotCommitted,
    ReadError,
    SaveLimits,
    TensorizerStorageReader,
    TensorizerStorageWriter,
    WriteError,
)

from ..lab.faults import Fault
from ..lab.processes import workers
from ..lab.ranks import attempt, eventually, kill_self, run_ranks
from ..lab.servers import KEY, OTHER_KEY, SECRET
from ..lab.states import assert_same
from .training import random_tensor

MIB = 1 << 20
LARGE = 30 * MIB  # four parts
SMALL = 100_000


def _state(seed, size=LARGE):
    return {
        "large": random_tensor(torch.bfloat16, (size // 2,), seed),
        "small": torch.tensor([seed, -0.0]),
        "step": seed,
    }


def _load(url, options, size=LARGE):
    state = _state(0, size)
    dcp.load(state, storage_reader=TensorizerStorageReader(url, storage_options=options), no_dist=True)
    return state


def _fast(s3, proxy):
    """Options by which requests are given up after two tries."""
    return s3.options(proxy.endpoint, config_kwargs={"retries": {"total_max_attempts": 2}})


# --- what it costs ---------------------------------------------------------------------------------------------------


def test_requests_of_a_save_and_of_a_load(s3, proxy, prefix):
    """Each is counted, the look for the data file before the commit as well. Nothing is listed."""
    url, options = f"s3://{s3.bucket}/{prefix}", s3.options(proxy.endpoint)
    write = {"CreateMultipartUpload": 1, "UploadPart": 4, "CompleteMultipartUpload": 1, "GetObject": 1, "PutObject": 1}
    write |= {"HeadObject": 1}
    with TensorizerStorageWriter(url, storage_options=options) as writer:
        dcp.async_save(_state(1), storage_writer=writer).result()
        assert proxy.counts() == write
        proxy.forget()
        dcp.async_save(_state(2), storage_writer=writer).result()
        assert proxy.counts() == write | {"DeleteObject": 1}
    proxy.forget()
    assert_same(_load(url, options), _state(2))
    # The metadata, with the object "step" and the small tensor in it, and the large tensor.
    assert proxy.counts() == {"HeadObject": 1, "GetObject": 1 + 2}
    assert len(s3.objects(prefix)) == 2


def test_saves_after_the_first_one_do_not_connect_again(s3, proxy, prefix):
    """The trainer and its writer process keep a connection each; a load by the same trainer uses its one, too."""
    url, options = f"s3://{s3.bucket}/{prefix}", s3.options(proxy.endpoint)
    with TensorizerStorageWriter(url, storage_options=options) as writer:
        for seed in range(3):
            dcp.async_save(_state(seed, SMALL), storage_writer=writer).result()
        loaded = _state(7, SMALL)
        reader = TensorizerStorageReader(url, storage_options=options, thread_count=1)
        dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert_same(loaded, _state(2, SMALL))
    assert proxy.connections == 2


def test_reads_at_once_are_bounded(s3, proxy, prefix):
    """As many as there are threads, and no more."""
    url = f"s3://{s3.bucket}/{prefix}"
    state = {str(n): random_tensor(torch.uint8, (2 * MIB,), n) for n in range(40)}
    with TensorizerStorageWriter(url, storage_options=s3.options()) as writer:
        dcp.save(state, storage_writer=writer)
    proxy.rule = lambda request: Fault(delay=0.02)
    target = {key: torch.zeros_like(value) for key, value in state.items()}
    reader = TensorizerStorageReader(url, storage_options=s3.options(proxy.endpoint), thread_count=5)
    dcp.load(target, storage_reader=reader)
    assert_same(target, state)
    assert 1 < proxy.most_at_once <= 5


def _save_on_ranks(rank, url, options):
    state = {f"rank{rank.index}": random_tensor(torch.uint8, (SMALL,), rank.index), "all": torch.arange(5)}
    with TensorizerStorageWriter(url, storage_options=options) as writer:
        dcp.async_save(state, storage_writer=writer, process_group=rank.saves).result()


def test_each_rank_writes_its_own_object_and_one_commits(s3, proxy, prefix):
    """Three ranks: three objects, a look for each, then the metadata, which is read once before; not a request more."""
    url, options = f"s3://{s3.bucket}/{prefix}", s3.options(proxy.endpoint)
    run_ranks(3, _save_on_ranks, url, options)
    assert proxy.counts() == {"PutObject": 3 + 1, "HeadObject": 3, "GetObject": 1}
    assert proxy.requests[-1].key == f"{prefix}/.metadata"
    assert sorted(name[:4] for name in s3.objects(prefix)) == [".met", "__0_", "__1_", "__2_"]
    loaded = {f"rank{n}": torch.zeros(SMALL, dtype=torch.uint8) for n in range(3)}
    dcp.load(loaded, storage_reader=TensorizerStorageReader(url, storage_options=options), no_dist=True)
    for n in range(3):
        assert_same(loaded[f"rank{n}"], random_tensor(torch.uint8, (SMALL,), n))


def test_the_extra_memory_is_bounded(s3, proxy, prefix):
    """However slow the destination is, the writer process holds no more parts than it may, and little else."""
    url = f"s3://{s3.bucket}/{prefix}"
    bound = 64 * MIB
    size = 200 * MIB
    with TensorizerStorageWriter(
        url, storage_options=s3.options(proxy.endpoint), limits=SaveLimits(buffer_bytes=bound), thread_count=1
    ) as writer:
        dcp.async_save(_state(1, SMALL), storage_writer=writer).result()  # imports and connections
        (worker,) = workers()
        before = worker.memory_full_info().uss
        proxy.rule = lambda request: Fault(delay=0.2) if request.operation == "UploadPart" else None
        future = dcp.async_save(_state(2, size), storage_writer=writer)
        most = 0
        while not future.done():
            most = max(most, worker.memory_full_info().uss)
        future.result()
    assert most - before < bound + 32 * MIB  # for what the allocator keeps, and the last requests
    assert proxy.most_at_once > 1


# --- faults ----------------------------------------------------------------------------------------------------------


def test_conditional_commits(s3, proxy, prefix):
    """With overwrite=False a commit fails that another job has come before, even in the middle of the save."""
    url, options = f"s3://{s3.bucket}/{prefix}", s3.options(proxy.endpoint)
    with (
        TensorizerStorageWriter(url, storage_options=options, overwrite=False) as slow,
        TensorizerStorageWriter(url, storage_options=s3.options(), overwrite=False) as fast,
    ):

        def rule(request):
            if request.method == "PUT" and request.key.endswith(".metadata"):
                proxy.rule = lambda request: None
                dcp.save(_state(2, SMALL), storage_writer=fast)

        proxy.rule = rule
        failure = attempt(lambda: dcp.save(_state(1, SMALL), storage_writer=slow))
    assert "must not be replaced" in str(failure.causes[0])
    assert_same(_load(url, options, SMALL), _state(2, SMALL))
    assert len(s3.objects(prefix)) == 2


@pytest.mark.promise("destination-fails")
@pytest.mark.parametrize(
    ("operation", "fault", "said"),
    [
        ("UploadPart", Fault(503, "SlowDown"), "SlowDown"),
        ("UploadPart", Fault(403, "AccessDenied"), "AccessDenied"),
        ("UploadPart", Fault(cut=MIB), "Connection"),
        ("CompleteMultipartUpload", Fault(500, "InternalError"), "InternalError"),
        ("PutObject", Fault(403, "AccessDenied"), "AccessDenied"),
    ],
    ids=["slow down", "denied", "cut", "at the end", "commit"],
)
def test_a_save_that_fails_leaves_the_old_checkpoint(s3, proxy, prefix, operation, fault, said, caplog, capfd):
    """Path and cause are named, no secret is shown anywhere, no object or upload is left, and the next save works."""
    url = f"s3://{s3.bucket}/{prefix}"
    with TensorizerStorageWriter(url, storage_options=_fast(s3, proxy)) as writer:
        dcp.async_save(_state(1), storage_writer=writer).result()
        before = s3.objects(prefix)
        proxy.rule = lambda request: fault if request.operation == operation else None
        with caplog.at_level(logging.DEBUG, "dcp_tensorizer"):
            failure = attempt(dcp.async_save(_state(2), storage_writer=writer).result)
        assert type(failure.causes[0]) is WriteError
        for word in (url, said):
            assert word in str(failure.causes[0])
        assert ("rank 0" in str(failure.causes[0])) == (operation != "PutObject")  # the commit is of all ranks
        assert _everything_said(failure.causes[0], caplog, capfd).count(SECRET) == 0
        assert s3.objects(prefix) == before
        assert s3.uploads(prefix) == []
        proxy.rule = lambda request: None
        assert_same(_load(url, s3.options()), _state(1))
        dcp.async_save(_state(3), storage_writer=writer).result()
    assert_same(_load(url, s3.options()), _state(3))


def test_a_save_to_a_server_that_refuses_connections(s3, prefix):
    """Also with a short timeout, the error names the address that could not be reached."""
    nowhere = "http://127.0.0.1:9"
    limits = SaveLimits(timeout=10.0)
    with TensorizerStorageWriter(
        f"s3://{s3.bucket}/{prefix}", storage_options=s3.options(nowhere), limits=limits
    ) as writer:
        failure = attempt(dcp.async_save(_state(1, SMALL), storage_writer=writer).result)
    assert type(failure.causes[0]) is WriteError
    assert f'Could not connect to the endpoint URL: "{nowhere}' in str(failure.causes[0])


@pytest.mark.promise("destination-overloaded")
@pytest.mark.parametrize(
    "fault", [Fault(503, "SlowDown"), Fault(cut=0), Fault(hang=True)], ids=["overloaded", "reset", "no answer"]
)
def test_a_save_outlasts_what_passes(s3, proxy, prefix, fault, caplog):
    """The first request of each kind fails: it is repeated, and the trainer sees nothing of it."""
    url = f"s3://{s3.bucket}/{prefix}"
    failed = set()

    def rule(request):
        if request.operation in failed:
            return None
        failed.add(request.operation)
        return fault

    limits = SaveLimits(timeout=15.0)  # requests are repeated after 1.5 s
    with TensorizerStorageWriter(url, storage_options=s3.options(proxy.endpoint), limits=limits) as writer:
        proxy.rule = rule
        dcp.async_save(_state(1), storage_writer=writer).result()
        assert writer.last_report.attempts == 1
    assert failed >= {"CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload", "HeadObject", "PutObject"}
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert len(s3.objects(prefix)) == 2
    assert s3.uploads(prefix) == []
    assert_same(_load(url, s3.options()), _state(1))


@pytest.mark.promise("commit-unanswered")
@pytest.mark.parametrize("overwrite", [True, False])
def test_a_commit_without_an_answer(s3, proxy, prefix, overwrite):
    """An error, unless nothing may be replaced and the commit is found in place; both saves' files stay, and load."""
    url = f"s3://{s3.bucket}/{prefix}"
    with TensorizerStorageWriter(url, storage_options=_fast(s3, proxy), overwrite=overwrite) as writer:
        if overwrite:
            dcp.save(_state(1, SMALL), storage_writer=writer)
        before = s3.objects(prefix)
        left = itertools.count(2 if overwrite else 1, -1)  # where the metadata is new, the second request finds it

        def rule(request):
            is_commit = request.method == "PUT" and request.key.endswith(".metadata")
            return Fault(lose_answer=True) if is_commit and next(left) > 0 else None

        proxy.rule = rule
        failure = attempt(lambda: dcp.save(_state(2, SMALL), storage_writer=writer))
        assert [type(cause) for cause in failure.causes.values()] == ([WriteError] if overwrite else [])
        assert set(before) <= set(s3.objects(prefix))
        assert len(s3.objects(prefix)) == 2 + overwrite
        assert_same(_load(url, s3.options(), SMALL), _state(2, SMALL))
        proxy.rule = lambda request: None
        if overwrite:
            dcp.save(_state(3, SMALL), storage_writer=writer)
            assert_same(_load(url, s3.options(), SMALL), _state(3, SMALL))


def _in_environment(monkeypatch, proxy, key):
    """Keys are in the environment alone, and only the newest is good."""
    names = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL": proxy.endpoint}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    proxy.rule = lambda request: None if f"={key}/" in request.authorization else Fault(400, "ExpiredToken")


@pytest.mark.promise("token-expires")
def test_keys_that_are_rotated_between_saves(s3, proxy, prefix, monkeypatch):
    """The writer process has those of the save, and so have the trainer's own requests."""
    url = f"s3://{s3.bucket}/{prefix}"
    with TensorizerStorageWriter(url) as writer:
        for seed, key in enumerate([KEY, OTHER_KEY]):
            _in_environment(monkeypatch, proxy, key)
            dcp.async_save(_state(seed, SMALL), storage_writer=writer).result()
        dcp.save(_state(2, SMALL), storage_writer=writer)
    assert_same(_load(url, {}, SMALL), _state(2, SMALL))


def test_a_flush_has_keys_that_were_rotated_since_its_save(s3, proxy, prefix, monkeypatch, tmp_path):
    """No save asks for it again: the flush of the last one is refused, and goes on with the keys of now."""
    url = f"s3://{s3.bucket}/{prefix}"
    _in_environment(monkeypatch, proxy, OTHER_KEY)
    with TensorizerStorageWriter(url, local=tmp_path) as writer:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
        dcp.async_save(_state(1, SMALL), storage_writer=writer).result()
        assert eventually(lambda: any(noted.read_text() for noted in tmp_path.rglob("*.trouble")))
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", OTHER_KEY)
        assert writer.wait_remote(60)
    assert_same(_load(url, {}, SMALL), _state(1, SMALL))


def _everything_said(error, caplog, capfd):
    """All that a user can see of an error: its chain, the log, the terminal."""
    texts = [caplog.text, *capfd.readouterr()]
    while error is not None:
        texts += [str(error), repr(error)]
        error = error.__cause__ or error.__context__
    return "\n".join(texts)


def test_no_process_shows_a_secret(s3, prefix):
    """Neither the command line nor the environment of the writer process holds what storage_options held."""
    with TensorizerStorageWriter(f"s3://{s3.bucket}/{prefix}", storage_options=s3.options()) as writer:
        dcp.async_save(_state(1, SMALL), storage_writer=writer).result()
        (worker,) = workers()
        seen = Path(f"/proc/{worker.pid}/cmdline").read_bytes() + Path(f"/proc/{worker.pid}/environ").read_bytes()
    assert SECRET.encode() not in seen
    data = s3.client().get_object(Bucket=s3.bucket, Key=f"{prefix}/.metadata")["Body"].read()
    assert SECRET.encode() not in data


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_damaged_checkpoint_is_refused_before_anything_changes(s3, prefix, damage):
    """An object that is missing or short is an error that names it."""
    url = f"s3://{s3.bucket}/{prefix}"
    with TensorizerStorageWriter(url, storage_options=s3.options()) as writer:
        dcp.save(_state(1, SMALL), storage_writer=writer)
    (name,) = [name for name in s3.objects(prefix) if name != ".metadata"]
    key = {"Bucket": s3.bucket, "Key": f"{prefix}/{name}"}
    if damage == "missing":
        s3.client().delete_object(**key)
    else:
        s3.client().put_object(**key, Body=b"short")
    state = _state(0, SMALL)
    failure = attempt(
        lambda: dcp.load(state, storage_reader=TensorizerStorageReader(url, storage_options=s3.options()))
    )
    assert type(failure.causes[0]) is ReadError
    assert name in str(failure.causes[0])
    assert_same(state, _state(0, SMALL))


def test_nothing_there(s3, prefix):
    """A path without a checkpoint is NotCommitted."""
    failure = attempt(lambda: _load(f"s3://{s3.bucket}/{prefix}", s3.options(), SMALL))
    assert type(failure.causes[0]) is NotCommitted


# --- deaths ----------------------------------------------------------------------------------------------------------


def test_a_writer_process_killed_in_mid_upload(s3, proxy, prefix):
    """A fresh one writes the file once more; the upload of the first is aborted."""
    url = f"s3://{s3.bucket}/{prefix}"
    reports = []
    with TensorizerStorageWriter(url, storage_options=s3.options(proxy.endpoint), on_report=reports.append) as writer:
        writer.prewarm(_state(1))  # which starts the process
        (first,) = workers()
        proxy.rule = lambda request: Fault(stall=0) if request.operation == "UploadPart" else None
        future = dcp.async_save(_state(1), storage_writer=writer)
        assert eventually(lambda: proxy.counts().get("UploadPart", 0) > 1)
        assert len(s3.uploads(prefix)) == 1
        proxy.rule = lambda request: None
        first.kill()
        future.result()
    assert [report.attempts for report in reports] == [2]
    assert_same(_load(url, s3.options()), _state(1))
    assert len(s3.objects(prefix)) == 2
    assert proxy.counts()["AbortMultipartUpload"] == 1


def _die_in_mid_upload(rank, url, options, with_writer):
    """A trainer that is killed while its writer process uploads."""
    limits = SaveLimits(timeout=50.0)  # requests are repeated after 5 s
    writer = TensorizerStorageWriter(url, storage_options=options, limits=limits)
    dcp.async_save(_state(2), storage_writer=writer)
    (worker,) = workers()
    assert eventually(lambda: Path(os.environ["UPLOADING"]).exists())
    if with_writer:
        os.kill(worker.pid, signal.SIGKILL)
    kill_self()


@pytest.mark.parametrize("with_writer", [False, True], ids=["trainer", "trainer and writer process"])
def test_a_job_killed_in_mid_upload(s3, proxy, prefix, tmp_path, monkeypatch, with_writer):
    """The old checkpoint stays. A writer process left alone aborts its upload; killed too, it leaves it open."""
    url = f"s3://{s3.bucket}/{prefix}"
    with TensorizerStorageWriter(url, storage_options=s3.options()) as writer:
        dcp.save(_state(1), storage_writer=writer)
    uploading = tmp_path / "uploading"
    monkeypatch.setenv("UPLOADING", str(uploading))

    def rule(request):
        if request.operation == "UploadPart":
            uploading.touch()
            return Fault(stall=0)
        return None

    proxy.rule = rule
    run_ranks(1, _die_in_mid_upload, url, s3.options(proxy.endpoint), with_writer, distributed=False, killed={0})
    assert eventually(lambda: not [p for p in psutil.process_iter() if _is_worker_of(p, uploading)])
    left = s3.uploads(prefix)
    assert len(left) == (1 if with_writer else 0)
    assert len(s3.objects(prefix)) == 2
    assert_same(_load(url, s3.options()), _state(1))
    for upload in s3.client().list_multipart_uploads(Bucket=s3.bucket).get("Uploads", []):
        s3.client().abort_multipart_upload(Bucket=s3.bucket, Key=upload["Key"], UploadId=upload["UploadId"])


def _is_worker_of(process, mark):
    try:
        is_worker = "dcp_tensorizer._writer_process.worker" in process.cmdline()
        return is_worker and process.environ().get("UPLOADING") == str(mark)
    except psutil.Error:
        return False
