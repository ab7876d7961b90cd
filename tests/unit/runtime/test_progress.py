"""`TransferProgress`: reports of loads and saves to callbacks and to the log."""

from __future__ import annotations

import logging

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from dcp_tensorizer._runtime.progress import TransferProgress


def test_a_long_load_is_logged_while_it_runs(caplog: pytest.LogCaptureFixture) -> None:
    """The callback gets every report; the log gets one per interval."""
    calls: list[tuple[int, int]] = []
    with caplog.at_level(logging.INFO, "dcp_tensorizer"):
        often = TransferProgress("loading", "/ckpt", lambda done, total: calls.append((done, total)), log_seconds=0.0)
        seldom = TransferProgress("loading", "/ckpt", None, log_seconds=3600.0)
        for done in (1_000_000_000, 4_000_000_000):
            often(done, 4_000_000_000)
            seldom(done, 4_000_000_000)
    assert calls == [(1_000_000_000, 4_000_000_000), (4_000_000_000, 4_000_000_000)]
    assert [record.message.rpartition(",")[0] for record in caplog.records] == [
        "loading /ckpt: 1.0 of 4.0 GB",
        "loading /ckpt: 4.0 of 4.0 GB",
    ]


@pytest.mark.parametrize("error", [RuntimeError("no terminal"), CheckpointException("a load in it failed", {})])
def test_a_callback_that_fails_is_not_called_again(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """Its error is logged once, also one of DCP, and the transfer continues."""
    calls: list[int] = []

    def fail(done: int, total: int) -> None:
        calls.append(done)
        raise error

    transfer = TransferProgress("saving", "/ckpt", fail)
    for done in (1, 2, 3):
        transfer(done, 3)
    assert calls == [1]
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert (
        record.message
        == "on_progress raised an exception while saving /ckpt. It is not called again for this operation."
    )
