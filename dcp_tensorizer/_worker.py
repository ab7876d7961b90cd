"""The writer process: takes requests from its trainer and writes the files (``python -m dcp_tensorizer._worker``).

It shares no interpreter with the trainer, so hashing and writing never hold the trainer's interpreter lock; it runs
at low priority, ignores the terminal's signals (the trainer decides when to stop), and ends with its trainer.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

from ._arena import attach
from ._layout import INDEX_CAPACITY
from ._protocol import (
    Channel,
    FileRequest,
    FileResult,
    Progress,
    Ready,
    TensorResult,
    TensorSource,
    WriteDone,
    WriteFailed,
    WriteRequest,
)
from ._storage import Sink, Storage, open_storage
from ._tensorfile import block_digests, encode, host_bytes, unsafe_globals
from .errors import CheckpointError, WriteError

__all__ = ["FileJob"]

_NICENESS = 10  # also lowers the I/O priority, which follows it unless set apart
_PROGRESS_SECONDS = 1.0


class FileJob:
    """Writes the files of one request, all of them or none.

    Args:
        storage: The checkpoint's directory.
        files: What to write.
        tensors: Gives the tensor that a source describes.
        sync: Make files and directory durable.
        threads: Upper bound on hashing threads.
    """

    def __init__(
        self,
        storage: Storage,
        files: Sequence[FileRequest],
        tensors: Callable[[TensorSource], torch.Tensor],
        *,
        sync: bool,
        threads: int,
    ) -> None:
        self._storage = storage
        self._files = files
        self._tensors = tensors
        self._sync = sync
        self._threads = threads
        self._sinks: list[Sink] = []

    @property
    def bytes_written(self) -> int:
        """Grows as long as there is progress; may be read from another thread."""
        return sum(sink.bytes_written for sink in self._sinks)

    def run(self) -> WriteDone:
        """Writes everything.

        Raises:
            WriteError: naming file and cause; what had been written is removed.
        """
        name = ""
        try:
            results = []
            unsafe: dict[str, tuple[str, ...]] = {}
            started = time.perf_counter()
            for file in self._files:
                name = file.name
                results.append(self._write(file, unsafe))
            if self._sync:
                self._storage.sync_directory()
            writing = sum(sink.write_seconds for sink in self._sinks)
            closing = sum(sink.close_seconds for sink in self._sinks)
            seconds = time.perf_counter() - started
            return WriteDone(tuple(results), seconds, seconds - closing, writing + closing, unsafe)
        except Exception as error:
            self.remove()
            cause = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            raise WriteError(self._storage.scrub(f"cannot write {self._storage.path}/{name}: {cause}")) from error

    def remove(self) -> None:
        """Removes the files of this job, as far as there are any."""
        for file in self._files:
            with suppress(Exception):
                self._storage.remove(file.name)

    def _write(self, file: FileRequest, unsafe: dict[str, tuple[str, ...]]) -> FileResult:
        tensors = [self._tensors(source) for source in file.tensors]
        nbytes = sum(source.nbytes for source in file.tensors)
        sink = self._storage.create(file.name, nbytes + INDEX_CAPACITY, sync=self._sync)
        self._sinks.append(sink)
        # The digests (3% of the hashing that tensorizer does) on a thread of their own, beside it.
        with ThreadPoolExecutor(1, thread_name_prefix="digests") as pool:
            digests = pool.submit(lambda: [block_digests(host_bytes(tensor)) for tensor in tensors])
            index = encode([(s.name, t) for s, t in zip(file.tensors, tensors, strict=True)], sink, self._threads)
            results = tuple(
                TensorResult(entry.offset, entry.length, digest)
                for entry, digest in zip(index, digests.result(), strict=True)
            )
        for source, tensor in zip(file.tensors, tensors, strict=True):
            if source.kind == "object" and (refused := unsafe_globals(bytes(host_bytes(tensor)))):
                unsafe[source.name] = refused
        return FileResult(file.name, sink.nbytes, results)


class _Worker:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        self._arenas: dict[int, mmap.mmap] = {}
        self._job: FileJob | None = None

    def serve(self) -> None:
        """Answers requests until the trainer closes the channel."""
        self._send(Ready())
        threading.Thread(target=self._report_progress, name="progress", daemon=True).start()
        while True:
            try:
                request, fds = self._channel.receive()
                answer: WriteDone | WriteFailed = self._fulfil(request, fds)
            except EOFError:
                return
            except Exception as error:
                message = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
                answer = WriteFailed(message, traceback.format_exc())
            self._send(answer)

    def abandon(self) -> None:
        """Removes the files of an unfinished request: nobody is left who could commit them."""
        job = self._job
        if job is not None:
            job.remove()

    def _fulfil(self, request: WriteRequest, fds: list[int]) -> WriteDone:
        self._arenas = {info.id: self._arenas[info.id] for info in request.arenas if info.attached} | {
            info.id: attach(fd, info.nbytes)
            for info, fd in zip((i for i in request.arenas if not i.attached), fds, strict=True)
        }
        storage = open_storage(request.path, request.storage_options)
        job = FileJob(storage, request.files, self._tensor, sync=request.sync, threads=request.threads)
        self._job = job
        try:
            return job.run()
        finally:
            self._job = None

    def _tensor(self, source: TensorSource) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mapping is read-only on purpose, and nobody writes to the tensor
            flat = torch.frombuffer(
                self._arenas[source.arena], dtype=torch.uint8, count=source.nbytes, offset=source.offset
            )
        return flat.view(getattr(torch, source.dtype)).view(source.shape)

    def _send(self, message: object) -> None:
        with self._sending, suppress(EOFError):
            self._channel.send(message)

    def _report_progress(self) -> None:
        while True:
            time.sleep(_PROGRESS_SECONDS)
            job = self._job
            if job is not None:
                self._send(Progress(job.bytes_written))


def _end_with(trainer: int, abandon: Callable[[], None]) -> None:
    """Ends this process as soon as the trainer is gone, whatever it is doing.

    A pidfd rather than the socket alone: a forked DataLoader worker can hold the socket open after the trainer's
    death; and rather than PR_SET_PDEATHSIG, which follows the thread that started us.
    """
    poll = select.poll()
    poll.register(trainer, select.POLLIN)
    poll.poll()
    abandon()
    os._exit(1)


def main(arguments: Sequence[str]) -> None:
    """Arguments: descriptor of the channel, descriptor of a pidfd of the trainer or -1 where there are none."""
    channel_fd, trainer = map(int, arguments)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(_NICENESS)
    torch.set_num_threads(1)
    worker = _Worker(Channel(socket.socket(fileno=channel_fd)))
    if trainer >= 0:
        threading.Thread(target=_end_with, args=(trainer, worker.abandon), name="trainer", daemon=True).start()
    worker.serve()


if __name__ == "__main__":
    main(sys.argv[1:])
