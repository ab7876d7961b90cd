"""Publishing in the writer process, with one retry after its death."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dcp_tensorizer import Publish, WriteError
from dcp_tensorizer._publish.publisher import Publication
from dcp_tensorizer._runtime.process_context import ProcessContext
from dcp_tensorizer._saving.writer_client import WriterClient
from dcp_tensorizer.tools import list_versions, verify_versions

from ...lab.models import write_model
from ...lab.waiting import WAIT


@pytest.fixture
def client() -> Iterator[WriterClient]:
    client = WriterClient()
    yield client
    client.end_process()


def test_the_writer_process_publishes(tmp_path: Path, client: WriterClient) -> None:
    """The process publishes successive versions with one lease at the lowest priority, and raises its own errors."""
    state = {"w": np.zeros(1000, np.float32)}
    write_model(tmp_path / "one", state)
    write_model(tmp_path / "two", {"w": np.ones(1000, np.float32)})
    published = Publish(tmp_path / "published")
    first = client.publish(Publication(str(tmp_path / "one"), published, step=1), 60)
    second = client.publish(Publication(str(tmp_path / "two"), published, own=first[1]), 60)
    assert (first[0].version, second[0].version, second[0].is_delta) == (1, 2, True)
    assert first[1] == second[1]
    assert os.getpriority(os.PRIO_PROCESS, client.ensure_process().pid) == 19
    with pytest.raises(WriteError, match="there is no model in"):
        client.publish(Publication(str(tmp_path), published, own=first[1]), 60)


def test_a_fresh_process_publishes_what_a_dead_one_could_not(
    tmp_path: Path, client: WriterClient, caplog: pytest.LogCaptureFixture
) -> None:
    """If the process is killed when the version's directory exists, a fresh process publishes the version."""
    write_model(tmp_path / "model", {"w": np.arange(20_000_000, dtype=np.float32)})
    published = tmp_path / "published"
    process = client.ensure_process()

    def kill() -> None:
        deadline = time.monotonic() + WAIT
        while not (published / "weight_v000001").exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        os.kill(process.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    request = Publication(str(tmp_path / "model"), Publish(published))
    with caplog.at_level(logging.WARNING, "dcp_tensorizer"):
        version = client.publish(request, 60, ProcessContext.here())[0]
    killer.join()
    assert "publishing once more with a fresh process" in caplog.text
    assert (version.version, version.is_delta) == (1, False)
    assert len(list_versions(published)) == 1
    assert verify_versions(published).damages == ()
