"""The report of a save, its log record, and its callback."""

import logging
import pickle
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_tensorizer import TensorizerStorageWriter
from dcp_tensorizer._saving.report import warn_of_other_process

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE = {"weight": torch.arange(1000, dtype=torch.float32), "step": torch.tensor(3)}
NBYTES = 4000 + 8


def test_each_save_is_reported_once(tmp_path, caplog):
    """Each save's report has its bytes, files and seconds, and reaches callback, log and `last_report` once."""
    reports = []
    before = time.time()
    with (
        caplog.at_level(logging.INFO, "dcp_tensorizer"),
        TensorizerStorageWriter(tmp_path, on_report=reports.append) as writer,
    ):
        dcp.async_save(STATE, storage_writer=writer).result()
        assert reports == [writer.last_report]
    report = reports[0]
    assert (report.path, report.rank, report.nbytes, report.files, report.attempts) == (str(tmp_path), 0, NBYTES, 1, 1)
    assert report.save_id in next(path.name for path in tmp_path.glob("*.tensors"))
    assert min(report.stage_seconds, report.plan_seconds, report.hash_seconds, report.write_seconds) > 0
    assert report.commit_seconds is not None
    assert (tmp_path / ".metadata").stat().st_mtime <= report.durable_at + 1
    assert before <= report.started_at <= report.durable_at <= time.time()
    assert report.seconds == report.durable_at - report.started_at >= report.stage_seconds
    assert report.gigabytes_per_second == NBYTES / 1e9 / report.seconds
    assert [r.getMessage() for r in caplog.records if "rank 0 wrote" in r.getMessage()] == [str(report)]


def test_callbacks_in_process_mode_are_warned_of_once(tmp_path, caplog):
    """Another process saves then, and does not call them, so the first save logs a warning; without them, none does."""
    warn_of_other_process.cache_clear()
    for options, expected in (({}, 0), ({"on_report": print}, 1), ({"on_progress": print}, 1)):
        with TensorizerStorageWriter(tmp_path, **options) as writer:
            pickle.dumps(writer)  # for another process, without a save
            pickle.dumps(writer.stage(STATE))
            pickle.dumps(writer)  # as DCP sends the writer with a save
        warned = [record for record in caplog.records if "AsyncCheckpointerType.PROCESS" in record.getMessage()]
        assert len(warned) == expected


def test_a_synchronous_save_has_no_staging(tmp_path):
    """`dcp.save` writes from the tensors themselves, so its report has no time of staging."""
    with TensorizerStorageWriter(tmp_path) as writer:
        before = time.time()
        dcp.save(STATE, storage_writer=writer)
        assert writer.last_report is not None
        assert before <= writer.last_report.started_at <= time.time()
        assert writer.last_report.stage_seconds == 0
        assert writer.last_report.seconds >= writer.last_report.write_seconds
        assert writer.last_report.nbytes == NBYTES


@pytest.mark.parametrize("kind", [RuntimeError, CheckpointException])
def test_a_callback_that_fails_does_not_fail_the_save(tmp_path, caplog, kind):
    """An exception from `on_report`, or from a load in it, is logged, and the checkpoint is committed."""

    def fail(report):
        raise kind("metrics are down", {})

    with TensorizerStorageWriter(tmp_path, on_report=fail) as writer:
        dcp.async_save(STATE, storage_writer=writer).result()
    assert (tmp_path / ".metadata").exists()
    assert "on_report failed; the save did not" in caplog.text
    caplog.clear()  # its traceback holds the staged state dict


def test_a_callback_sees_what_will_stay(tmp_path):
    """When `on_report` is called, the files of the replaced checkpoint are removed."""
    seen = []

    def look(report):
        seen.append([report.save_id in path.name for path in tmp_path.glob("*.tensors")])

    with TensorizerStorageWriter(tmp_path, on_report=look) as writer:
        for _ in range(2):
            dcp.async_save(STATE, storage_writer=writer).result()
    assert seen == [[True], [True]]
