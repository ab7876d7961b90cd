"""Checkpoints on Azure and Google Cloud, through the writer process, on emulators that check what they are sent."""

import logging
import uuid
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter, WriteError
from dcp_tensorizer._storage.open import open_storage

from ..e2e.training import random_tensor
from ..lab.faults import Fault, s3_proxy
from ..lab.processes import workers
from ..lab.ranks import attempt
from ..lab.states import assert_same
from .servers import ACCOUNT_KEY


def _state(seed):
    large = random_tensor(torch.bfloat16, (10 << 20,), seed)  # two requests of an upload
    return {"large": large, "small": torch.tensor([seed, -0.0]), "step": seed}


@pytest.mark.parametrize("cloud", ["azure", "google"])
def test_save_replace_fail_and_load(request, cloud, caplog, capfd):
    """A save replaces another, one that fails leaves it as it is, and nowhere is a secret shown."""
    server = request.getfixturevalue(cloud)
    url, options = server.url(uuid.uuid4().hex), server.options()
    seen = b""
    with s3_proxy(server.endpoint) as proxy:
        proxied = server.options(proxy.endpoint)
        with TensorizerStorageWriter(url, storage_options=proxied) as writer:
            for seed in (1, 2):
                dcp.async_save(_state(seed), storage_writer=writer).result()
            names = {file.name for file in open_storage(url, options).listing()[0]}
            assert len(names) == 2
            for worker in workers():
                seen += (
                    Path(f"/proc/{worker.pid}/cmdline").read_bytes() + Path(f"/proc/{worker.pid}/environ").read_bytes()
                )
            proxy.rule = lambda request: Fault(403, "denied") if request.nbytes > 1 << 20 else None
            with caplog.at_level(logging.DEBUG, "dcp_tensorizer"):
                failure = attempt(dcp.async_save(_state(3), storage_writer=writer).result)
    assert type(failure.causes[0]) is WriteError
    assert url in str(failure.causes[0])
    storage = open_storage(url, options)
    assert {file.name for file in storage.listing()[0]} == names
    told = "".join([str(failure), caplog.text, *capfd.readouterr()]).encode() + storage.read(".metadata")
    assert ACCOUNT_KEY.encode() not in seen + told
    loaded = _state(0)
    dcp.load(loaded, storage_reader=TensorizerStorageReader(url, storage_options=options), no_dist=True)
    assert_same(loaded, _state(2))
