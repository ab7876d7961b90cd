"""Cases of ranks that load the same checkpoint from a local S3 server."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter
from dcp_tensorizer._runtime.torch_compat import FsspecReader, FsspecWriter
from tests.lab.faults import s3_proxy
from tests.lab.servers import s3_server

from ..case import Case, in_ranks
from .summary import EXCHANGED, TORCH

_TENSORS, _SHAPE = 64, (1024, 512)
"""128 MB (134,217,728 bytes) of float32."""


def _state(value: float) -> dict[str, torch.Tensor]:
    return {f"layers.{number}.weight": torch.full(_SHAPE, value + number) for number in range(_TENSORS)}


def _seconds(case: Case, folder: Path) -> float:
    url, options = case["url"], case["options"]
    group = dist.new_group(backend="gloo")
    dist.barrier()
    started = time.perf_counter()
    reader: Any
    if case["contender"] == TORCH:
        reader = FsspecReader(url, **options)
    else:
        exchange = group if case["contender"] == EXCHANGED else None
        reader = TensorizerStorageReader(url, storage_options=options, exchange=exchange)
    state = _state(0.0)
    dcp.load(state, storage_reader=reader)
    seconds = time.perf_counter() - started
    assert all(torch.equal(state[key], value) for key, value in _state(1.0).items())
    return seconds


def measure(case: Case, folder: Path) -> list[Any]:
    """Returns each rank's seconds, and how many times all ranks together have read the state."""
    with s3_server(folder) as server, s3_proxy(server.endpoint) as proxy:
        url, options = f"s3://{server.bucket}/checkpoint", server.options(proxy.endpoint)
        if case["contender"] == TORCH:
            dcp.save(_state(1.0), storage_writer=FsspecWriter(url, **options))
        else:
            with TensorizerStorageWriter(url, storage_options=options) as writer:
                dcp.save(_state(1.0), storage_writer=writer)
        proxy.sent_bytes = 0
        seconds = in_ranks(_seconds, case["size"], case | {"url": url, "options": options}, folder)
        times = proxy.sent_bytes / sum(tensor.nbytes for tensor in _state(0.0).values())
    return [{"load": value, "read": times} for value in seconds]
