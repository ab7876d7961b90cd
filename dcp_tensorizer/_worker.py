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
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from ._arena import attach
from ._destination import open_storage
from ._job import FileJob
from ._protocol import Channel, Progress, Ready, TensorSource, WriteDone, WriteFailed, WriteRequest
from .errors import CheckpointError

__all__: list[str] = []

# Beside a training loop on two cores: 10 costs the loop 7% of its speed, 19 costs 1-5%, and the save is as fast. It
# also lowers the I/O priority, which follows it unless set apart.
_NICENESS = 19
_PROGRESS_SECONDS = 1.0


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
        job = FileJob(storage, request.files, self._bytes, sync=request.sync, threads=request.threads)
        self._job = job
        try:
            return job.run()
        finally:
            self._job = None

    def _bytes(self, source: TensorSource) -> memoryview:
        return memoryview(self._arenas[source.arena])[source.offset : source.offset + source.nbytes]

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
