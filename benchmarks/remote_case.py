"""The cases of the remote benchmark: one contender, or resharded loads."""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import boto3
import psutil
import s3fs
import torch
import torch.distributed.checkpoint as dcp

from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter
from dcp_tensorizer._runtime.torch_compat import FsspecReader, FsspecWriter

from .case import Case, in_ranks
from .savers import State
from .workloads import WORKLOADS, nbytes, sharded

_RANGE = 8 << 20
_RANGES_AT_ONCE = 16
# Over http, botocore hashes all bytes that it sends, to sign them. This package switches that off, and so do the other
# contenders here.
_UNSIGNED = {"payload_signing_enabled": False}


class Contender(Protocol):
    def save(self, state: State, prefix: str) -> None: ...
    def load(self, state: State, prefix: str) -> None: ...
    def close(self) -> None: ...


class _Dcp:
    def __init__(self, server: dict[str, str]) -> None:
        self.server = server
        self.options = {
            "key": server["key"],
            "secret": server["secret"],
            "client_kwargs": {"endpoint_url": server["endpoint"]},
            "config_kwargs": {"s3": _UNSIGNED},
        }

    def url(self, prefix: str) -> str:
        return f"s3://{self.server['bucket']}/{prefix}"

    def close(self) -> None:
        """Does nothing: there is nothing to free."""


class Ours(_Dcp):
    def __init__(self, server: dict[str, str]) -> None:
        super().__init__(server)
        self._writer = TensorizerStorageWriter(storage_options=self.options)

    def save(self, state: State, prefix: str) -> None:
        dcp.async_save(state, storage_writer=self._writer, checkpoint_id=self.url(prefix), no_dist=True).result()

    def load(self, state: State, prefix: str) -> None:
        dcp.load(state, storage_reader=TensorizerStorageReader(self.url(prefix), storage_options=self.options))

    def close(self) -> None:
        self._writer.close()


class Fsspec(_Dcp):
    def save(self, state: State, prefix: str) -> None:
        dcp.save(state, storage_writer=FsspecWriter(self.url(prefix), sync_files=False, **self.options))

    def load(self, state: State, prefix: str) -> None:
        dcp.load(state, storage_reader=FsspecReader(self.url(prefix), **self.options))


class Connector(_Dcp):
    def __init__(self, server: dict[str, str]) -> None:
        super().__init__(server)
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client

        os.environ |= {"AWS_ACCESS_KEY_ID": server["key"], "AWS_SECRET_ACCESS_KEY": server["secret"]}
        config = S3ClientConfig(force_path_style=True)
        self._client = S3Client("us-east-1", endpoint=server["endpoint"], s3client_config=config)

    def save(self, state: State, prefix: str) -> None:
        from s3torchconnector.dcp import S3StorageWriter

        writer = S3StorageWriter("us-east-1", self.url(prefix) + "/")
        writer.fs._client = self._client
        dcp.save(state, storage_writer=writer)

    def load(self, state: State, prefix: str) -> None:
        from s3torchconnector.dcp import S3StorageReader

        reader = S3StorageReader("us-east-1", self.url(prefix) + "/")
        reader.fs._client = self._client
        dcp.load(state, storage_reader=reader)


class _Raw(_Dcp):
    """A transfer of the same bytes as one object, from and to memory, without a checkpoint or hashes.

    If a library takes only ``bytes`` or a file, it is made of the bytes once, in the first, unmeasured round.
    """

    def __init__(self, server: dict[str, str]) -> None:
        super().__init__(server)
        self._made: dict[str, Any] = {}
        self.boto = boto3.client(
            "s3",
            region_name="us-east-1",
            endpoint_url=server["endpoint"],
            aws_access_key_id=server["key"],
            aws_secret_access_key=server["secret"],
            config=boto3.session.Config(max_pool_connections=_RANGES_AT_ONCE, s3=_UNSIGNED),
        )
        self.s3fs = s3fs.S3FileSystem(**self.options)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Returns the result of the first call of ``make``."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def content(self, state: State) -> memoryview:
        return self.once(
            "content", lambda: torch.cat([t.reshape(-1) for t in state.values()]).view(torch.uint8).numpy().data
        )


class _Kept(io.BytesIO):
    """A file in memory that stays open when boto3 closes it."""

    def close(self) -> None:
        """Does nothing, so that the file can be used again."""


class Boto3(_Raw):
    def save(self, state: State, prefix: str) -> None:
        source = self.once("source", lambda: _Kept(self.content(state)))
        source.seek(0)
        self.boto.upload_fileobj(source, self.server["bucket"], f"{prefix}/raw")

    def load(self, state: State, prefix: str) -> None:
        target = self.once("target", lambda: _Kept(self.content(state)))
        target.seek(0)
        self.boto.download_fileobj(self.server["bucket"], f"{prefix}/raw", target)


class S3fs(_Raw):
    def save(self, state: State, prefix: str) -> None:
        content = self.once("bytes", lambda: bytes(self.content(state)))
        self.s3fs.pipe_file(f"{self.server['bucket']}/{prefix}/raw", content)

    def load(self, state: State, prefix: str) -> None:
        self.s3fs.cat_file(f"{self.server['bucket']}/{prefix}/raw")


class S3fsFiles(_Raw):
    """A transfer by s3fs's put and get of a file in memory."""

    _file = Path("/dev/shm") / f"dcp_tensorizer-benchmark-{os.getpid()}"

    def save(self, state: State, prefix: str) -> None:
        if not self._file.exists():
            self._file.write_bytes(self.content(state))
        self.s3fs.put_file(str(self._file), f"{self.server['bucket']}/{prefix}/raw")

    def load(self, state: State, prefix: str) -> None:
        self.s3fs.get_file(f"{self.server['bucket']}/{prefix}/raw", str(self._file))

    def close(self) -> None:
        self._file.unlink(missing_ok=True)


class Ranges(Boto3):
    """A transfer by boto3, with range reads by 16 threads into one buffer."""

    def load(self, state: State, prefix: str) -> None:
        target = self.content(state)

        def read(start: int) -> None:
            stop = min(start + _RANGE, target.nbytes)
            answer = self.boto.get_object(
                Bucket=self.server["bucket"], Key=f"{prefix}/raw", Range=f"bytes={start}-{stop - 1}"
            )
            target[start:stop] = answer["Body"].read()

        with ThreadPoolExecutor(_RANGES_AT_ONCE) as pool:
            list(pool.map(read, range(0, target.nbytes, _RANGE)))


CONTENDERS: dict[str, Callable[[dict[str, str]], Contender]] = {
    "dcp_tensorizer": Ours,
    "torch Fsspec": Fsspec,
    "s3torchconnector": Connector,
    "raw: boto3 transfer": Boto3,
    "raw: s3fs pipe, cat": S3fs,
    "raw: s3fs put, get": S3fsFiles,
    "raw: boto3, 16 ranges": Ranges,
}


def _alone(case: Case) -> dict[str, Any]:
    """Saves and loads several times, after one unmeasured time; checks the loaded values."""
    torch.set_num_threads(1)
    state = WORKLOADS[case["workload"]](case["scale"])
    contender = CONTENDERS[case["contender"]](case["server"])
    target = {key: torch.ones_like(tensor) for key, tensor in state.items()}
    result: dict[str, Any] = {"bytes": nbytes(state), "save": [], "load": []}
    prefix = f"{case['contender'].replace(' ', '-').replace(',', '').replace(':', '')}-{os.getpid()}"
    try:
        for number in range(case["times"] + 1):
            result["save"].append(_timed(lambda number=number: contender.save(state, f"{prefix}/{number}")))
        for _ in range(case["times"] + 1):
            result["load"].append(_timed(lambda: contender.load(target, f"{prefix}/0")))
        if not isinstance(contender, _Raw):
            result["intact"] = all(torch.equal(target[k].view(torch.int32), state[k].view(torch.int32)) for k in state)
        if isinstance(contender, Ours):
            result["extra_bytes"] = _extra_memory(contender, state, prefix)
    finally:
        contender.close()
    result["save"], result["load"] = result["save"][1:], result["load"][1:]
    return result


def _timed(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _extra_memory(contender: Ours, state: State, prefix: str) -> int:
    """Returns the writer process's memory for a save, beyond that after a tiny save."""
    fresh = Ours(contender.server)
    try:
        fresh.save({"tiny": torch.zeros(1)}, f"{prefix}/tiny")
        child = max(psutil.Process().children(), key=lambda child: child.create_time())
        before, peak, done = child.memory_full_info().uss, 0, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.wait(0.05):
                peak = max(peak, child.memory_full_info().uss)

        watcher = threading.Thread(target=watch)
        watcher.start()
        fresh.save(state, f"{prefix}/memory")
        done.set()
        watcher.join()
        return int(peak - before)
    finally:
        fresh.close()


def _save_shards(case: Case, folder: Path) -> None:
    ours, state = _Dcp(case["server"]), sharded(WORKLOADS[case["workload"]](case["scale"]))
    with TensorizerStorageWriter(ours.url(_resharded(folder)), storage_options=ours.options) as writer:
        dcp.save(state, storage_writer=writer)


def _load_shards(case: Case, folder: Path) -> dict[str, int]:
    ours, state = _Dcp(case["server"]), sharded(WORKLOADS[case["workload"]](case["scale"]), blank=True)
    moved = 0

    def progress(done: int, total: int) -> None:
        nonlocal moved
        moved = total

    url = ours.url(_resharded(folder))
    dcp.load(state, storage_reader=TensorizerStorageReader(url, storage_options=ours.options, on_progress=progress))
    return {"moved": moved, "needed": sum(tensor.to_local().nbytes for tensor in state.values())}


def _resharded(folder: Path) -> str:
    return f"resharded-{folder.name}"


def measure(case: Case, folder: Path) -> list[Any]:
    if "saved" not in case:
        return [_alone(case)]
    in_ranks(_save_shards, case["saved"], case, folder)
    return in_ranks(_load_shards, case["loaded"], case, folder)
