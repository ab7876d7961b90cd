"""Ranks that load the same from a local S3 server: prints the seconds of each, and what was read, as a line of JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter
from dcp_tensorizer._runtime.torch_compat import FsspecReader, FsspecWriter
from tests.proxy import s3_proxy
from tests.servers import s3_server

from ..ranks import leave_results, left_results
from .summary import EXCHANGED, TORCH

_TENSORS, _SHAPE = 64, (1024, 512)
"""128 MB (134,217,728 bytes) of float32."""


def _state(value: float) -> dict[str, torch.Tensor]:
    return {f"layers.{number}.weight": torch.full(_SHAPE, value + number) for number in range(_TENSORS)}


def _rank(rank: int, case: dict[str, Any], url: str, options: dict[str, Any], folder: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=case["size"])
    torch.set_num_threads(1)
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
    leave_results(folder, seconds)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    case = json.loads(sys.argv[1])
    os.environ["OMP_NUM_THREADS"] = "1"
    with (
        tempfile.TemporaryDirectory(dir=case["folder"]) as folder,
        s3_server(Path(folder)) as server,
        s3_proxy(server.endpoint) as proxy,
    ):
        url, options = f"s3://{server.bucket}/checkpoint", server.options(proxy.endpoint)
        if case["contender"] == TORCH:
            dcp.save(_state(1.0), storage_writer=FsspecWriter(url, **options))
        else:
            with TensorizerStorageWriter(url, storage_options=options) as writer:
                dcp.save(_state(1.0), storage_writer=writer)
        proxy.sent_bytes = 0
        mp.spawn(_rank, args=(case, url, options, folder), nprocs=case["size"])
        times = proxy.sent_bytes / sum(tensor.nbytes for tensor in _state(0.0).values())
        seconds = json.loads(left_results(folder))
        print(json.dumps([{"load": value, "read": times} for value in seconds]))


if __name__ == "__main__":
    main()
