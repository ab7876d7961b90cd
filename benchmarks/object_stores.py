"""Today's code for object stores and SFTP beside libraries that could take its place: obstore, and fsspec's SFTP.

``python -m benchmarks.object_stores``. Real servers run on this machine: SeaweedFS, Azurite, asyncssh. Speeds are of
plain files, without a checkpoint around them. Then each step of an upload to S3 is made to fail once.
"""

from __future__ import annotations

import argparse
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import obstore
from fsspec.implementations.sftp import SFTPFileSystem
from obstore.store import AzureStore, S3Store

from dcp_tensorizer._storage.base import Storage
from dcp_tensorizer._storage.open import open_storage
from tests.clouds.servers import ACCOUNT, ACCOUNT_KEY, CONTAINER, azure_server
from tests.proxy import Fault, once, s3_proxy
from tests.servers import KEY, SECRET, S3Server, s3_server, sftp_server

from .harness import Content, cell, run, spread, table
from .pages import glossary, page

_PART = 8 << 20
_THREADS = 16
_OURS, _OBSTORE, _FSSPEC = "dcp_tensorizer", "obstore", "fsspec's SFTP"
_WHAT = (
    "what libraries would do in the place of this package's own code. One file is written in parts of 8 MiB and read "
    "in ranges of 8 MiB by 16 threads; SFTP by 4. The servers run on the same machine and use the same cores."
)
_WHO = {
    _OURS: "this package's storage: botocore for S3, adlfs for Azure, paramiko for SFTP.",
    _OBSTORE: "`open_writer` with 8 parts in flight, and `get` as a stream that is copied to its place.",
    _FSSPEC: "a temporary file that is renamed, and `cat_file` with ranges. It has one channel, which only one thread "
    "may use. So each thread has a connection of its own.",
}


class Library:
    """Writes a file from memory, and reads it back into other memory."""

    def __init__(self, put: Callable[[memoryview], None], get: Callable[[memoryview, int], None], threads: int) -> None:
        self.put = put
        self.get = get
        """Fills memory from an offset on."""
        self.threads = threads


def ours(storage: Storage, threads: int = _THREADS) -> Library:
    def put(data: memoryview) -> None:
        sink = storage.create("file", data.nbytes, sync=False)
        parts = list(enumerate(range(0, data.nbytes, sink.part_bytes)))
        try:
            with ThreadPoolExecutor(1 if sink.in_order else sink.concurrency) as pool:
                list(pool.map(lambda part: sink.put_part(part[0], data[part[1] : part[1] + sink.part_bytes]), parts))
            sink.complete()
        finally:
            sink.abort()  # does nothing to a file that is complete

    return Library(put, lambda target, offset: storage.open("file").read_into([target], offset), threads)


def by_obstore(shop: Any) -> Library:
    def put(data: memoryview) -> None:
        with obstore.open_writer(shop, "file", buffer_size=_PART, max_concurrency=8) as writer:
            for start in range(0, data.nbytes, _PART):
                writer.write(np.frombuffer(data[start : start + _PART], np.uint8))

    def get(target: memoryview, offset: int) -> None:
        position = 0
        found = obstore.get(shop, "file", options={"range": (offset, offset + target.nbytes)})
        for piece in found.stream(min_chunk_size=1 << 20):
            target[position : position + len(piece)] = memoryview(piece)
            position += len(piece)

    return Library(put, get, _THREADS)


def by_fsspec(connect: Callable[[], Any], folder: str, threads: int) -> Library:
    free = [connect() for _ in range(threads)]

    def put(data: memoryview) -> None:
        with free[0].open(f"{folder}/file.tmp", "wb") as file:
            for start in range(0, data.nbytes, _PART):
                file.write(data[start : start + _PART])
        free[0].ftp.posix_rename(f"{folder}/file.tmp", f"{folder}/file")

    def get(target: memoryview, offset: int) -> None:
        filesystem = free.pop()
        target[:] = filesystem.cat_file(f"{folder}/file", start=offset, end=offset + target.nbytes)
        free.append(filesystem)

    return Library(put, get, threads)


def s3_shop(server: S3Server, endpoint: str, prefix: str) -> S3Store:
    config = {"access_key_id": KEY, "secret_access_key": SECRET, "endpoint": endpoint, "region": "us-east-1"}
    wait = {"allow_http": True, "read_timeout": "3s", "connect_timeout": "3s"}
    retry = {"max_retries": 5, "retry_timeout": timedelta(seconds=60)}
    # Our own code does not sign bodies over http either.
    config["unsigned_payload"] = True  # type: ignore[assignment]
    return S3Store(server.bucket, prefix=prefix, config=config, client_options=wait, retry_config=retry)  # type: ignore[arg-type]


def libraries(stack: ExitStack, folder: Path) -> Iterator[tuple[str, str, Library]]:
    """Kind of server, name, and library."""
    for name in ("s3", "azure", "sftp"):
        (folder / name).mkdir()
    s3 = stack.enter_context(s3_server(folder / "s3"))
    yield "S3", _OURS, ours(open_storage(f"s3://{s3.bucket}/ours", s3.options()))
    yield "S3", _OBSTORE, by_obstore(s3_shop(s3, s3.endpoint, "obstore"))
    azure = stack.enter_context(azure_server(folder / "azure"))
    config = {"account_name": ACCOUNT, "account_key": ACCOUNT_KEY, "endpoint": f"{azure.endpoint}/{ACCOUNT}"}
    options: Any = {"client_options": {"allow_http": True}}
    yield "Azure", _OURS, ours(open_storage(azure.url("ours"), azure.options()))
    yield "Azure", _OBSTORE, by_obstore(AzureStore(CONTAINER, prefix="obstore", config=config, **options))  # type: ignore[arg-type]
    sftp = stack.enter_context(sftp_server(folder / "sftp"))
    storage = open_storage("sftp://127.0.0.1/ours", sftp.options())
    storage.make_directory()
    yield "SFTP", _OURS, ours(storage, 4)
    yield (
        "SFTP",
        _FSSPEC,
        by_fsspec(lambda: SFTPFileSystem("127.0.0.1", skip_instance_cache=True, **sftp.options()), "/ours", 4),
    )


def speeds(folder: Path, parts: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """GB/s and CPU seconds a GB of this process, for each server, library and direction; after one unmeasured round."""
    rng = np.random.default_rng(0)
    results: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        found = list(libraries(stack, folder))
        for number in range(rounds + 1):
            for kind, name, library in found if number % 2 else reversed(found):
                count = max(1, parts // 16) if kind == "SFTP" else parts
                source = rng.integers(0, 256, count * _PART, dtype=np.uint8)
                target = np.zeros_like(source)
                for what, act in (("save", _put), ("load", _get)):
                    cpu, started = time.process_time(), time.perf_counter()
                    act(library, source, target)
                    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
                    if number:
                        entry = results.setdefault(f"{kind} | {name}", {})
                        entry.setdefault(what, []).append(source.nbytes / 1e9 / seconds)
                        entry.setdefault(f"{what}, CPU", []).append(cpu / (source.nbytes / 1e9))
                if not np.array_equal(source, target):
                    raise AssertionError(f"{name} read other bytes from {kind} than it wrote")
    return results


def _put(library: Library, source: np.ndarray, target: np.ndarray) -> None:
    library.put(memoryview(source))


def _get(library: Library, source: np.ndarray, target: np.ndarray) -> None:
    view = memoryview(target)
    with ThreadPoolExecutor(library.threads) as pool:
        list(pool.map(lambda start: library.get(view[start : start + _PART], start), range(0, target.nbytes, _PART)))


_STEPS = ("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload", "GetObject")
_FAULTS = {
    "503": Fault(503, "SlowDown"),
    "400 ExpiredToken": Fault(400, "ExpiredToken"),
    "reset": Fault(cut=0),
    "lost answer": Fault(lose_answer=True),
    "hang": Fault(hang=True),
}


def faults(folder: Path) -> dict[str, dict[str, str]]:
    """What becomes of a file of three parts when one request of a kind fails, for each library."""
    results: dict[str, dict[str, str]] = {}
    content = np.random.default_rng(1).integers(0, 256, 20 << 20, dtype=np.uint8)
    with s3_server(folder) as server, s3_proxy(server.endpoint) as proxy:
        for step in _STEPS:
            for label, fault in _FAULTS.items():
                for name in (_OURS, _OBSTORE):
                    prefix, target = uuid.uuid4().hex, np.zeros_like(content)
                    url = f"s3://{server.bucket}/{prefix}"
                    library = (
                        ours(open_storage(url, server.options(proxy.endpoint), 30.0))
                        if name == _OURS
                        else by_obstore(s3_shop(server, proxy.endpoint, prefix))
                    )
                    proxy.rule = once(step, fault)
                    outcome = "whole"
                    try:
                        library.put(memoryview(content))
                        _get(library, content, target)
                    except Exception as error:
                        outcome = f"fails ({type(error).__name__})"
                    else:
                        outcome = outcome if np.array_equal(content, target) else "WRONG BYTES"
                    proxy.rule = lambda request: None
                    left = len(server.uploads(prefix))
                    outcome += f", {left} upload left open" if left else ""
                    results.setdefault(f"{step}: {label}", {})[name] = outcome
    return results


def render(content: dict[str, Any]) -> str:
    """The page of results."""
    header = ("server", "library", "save (GB/s)", "load (GB/s)", "save, CPU-s/GB", "load, CPU-s/GB")
    columns = ("save", "load", "save, CPU", "load, CPU")
    rows = [
        (*name.split(" | "), *(cell(spread(entry[column]), "{:.3f}".format) for column in columns))
        for name, entry in content["speeds"].items()
    ]
    steps = [(step, found[_OURS], found[_OBSTORE]) for step, found in content["faults"].items()]
    again = f"object_stores --rounds {content['rounds']} --parts {content['parts']}"
    how = f"{content['rounds']} rounds of {content['parts']} parts, a sixteenth of that for SFTP, after one unmeasured."
    return page(
        content,
        "Object stores by libraries",
        _WHAT,
        how,
        again,
        glossary("What was measured", _WHO),
        "## Speed",
        table(header, rows),
        "## One request of an upload to S3, or of a read, fails once",
        table(("which request, and how", _OURS, _OBSTORE), steps),
    )


def measure(options: argparse.Namespace, folder: Path) -> Content:
    for name in ("speeds", "faults"):
        (folder / name).mkdir()
    found = speeds(folder / "speeds", options.parts, options.rounds)
    return {"rounds": options.rounds, "parts": options.parts, "speeds": found, "faults": faults(folder / "faults")}


OPTIONS = {
    "rounds": {"type": int, "default": 5},
    "parts": {"type": int, "default": 32, "help": "of 8 MiB each"},
}

if __name__ == "__main__":
    run("object_stores", measure, render, about=__doc__, options=OPTIONS)
