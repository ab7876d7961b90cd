"""Checkpoints on an SFTP server, through the writer process."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_tensorizer import SaveLimits, TensorizerStorageReader, TensorizerStorageWriter, WriteError
from dcp_tensorizer._storage.open import open_storage

from ...lab.faults import tcp_proxy
from ...lab.servers import PASSWORD, SftpServer

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled",
    # The loss is also an error in a thread of paramiko's, which nobody can catch.
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",
)


def state(seed: int) -> dict[str, Any]:
    """Two parts of a file, a small tensor, and an object."""
    large = torch.arange(10 << 20, dtype=torch.int16) + seed
    return {"large": large, "small": torch.tensor([seed, -0.0]), "step": seed}


def test_save_replace_fail_and_load(sftp: SftpServer) -> None:
    """A save replaces another, one whose server is gone leaves it as it is, and its error shows no secret."""
    url = f"sftp://127.0.0.1/{uuid.uuid4().hex}"
    with tcp_proxy(sftp.port) as proxy:
        through_proxy = sftp.options(port=proxy.port)
        with TensorizerStorageWriter(url, storage_options=through_proxy, limits=SaveLimits(timeout=5.0)) as writer:
            for seed in (1, 2):
                dcp.async_save(state(seed), storage_writer=writer).result()
            names = {file.name for file in open_storage(url, sftp.options()).listing()[0]}
            assert len(names) == 2
            proxy.close()
            with pytest.raises(CheckpointException) as caught:
                dcp.async_save(state(3), storage_writer=writer).result()
    cause = caught.value.failures[0][0]
    assert isinstance(cause, WriteError)
    assert url.rpartition("/")[2] in str(cause)
    assert PASSWORD not in str(caught.value)
    assert {file.name for file in open_storage(url, sftp.options()).listing()[0]} == names
    loaded = state(0)
    dcp.load(loaded, storage_reader=TensorizerStorageReader(url, storage_options=sftp.options()))
    assert torch.equal(loaded["large"], state(2)["large"])
    assert (loaded["small"].tolist(), loaded["step"]) == ([2.0, 0.0], 2)
