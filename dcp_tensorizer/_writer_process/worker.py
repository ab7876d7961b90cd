"""The writer process: answers its trainer's requests, such as to write files or to publish a model."""

from __future__ import annotations

import functools
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .._runtime.channel import Channel, Done, Progress, Ready
from .._runtime.child import OWN_VARIABLES, at_end_of, begin
from .._runtime.forks import free_in_child
from .._staging.shared_mappings import MappedFile, map_shared
from .._storage.open import open_storage
from .._tensor_file.encode import PartMemory
from .._tiers.target import FlushTarget
from .jobs import FileJob, take_digests
from .protocol import (
    Call,
    DigestRequest,
    SharedWriteRequest,
    SnapshotRequest,
    TensorSource,
    WriteDone,
    WriteRequest,
)
from .shared_job import Fill, SharedWriteJob

if TYPE_CHECKING:
    from .._publish.publisher import Publication
    from .._tiers.flush import FlushThread
    from .gpu_ipc import Snapshots

_T = TypeVar("_T")

# If all cores are busy, a save takes the same CPU time at any priority, and the priority decides how long the save
# takes. Two and four ranks on two cores, each with a training loop: with a niceness of 7, data was durable after 1.0
# and 1.4 s, at 76% and 65% of the loop's speed; with 10, after 1.6 and 2.0 s, at 79% and 76%. If cores are idle, a save
# needs no busy core: beside a training loop on one of two cores, a niceness of 10 cost the loop 7% of its speed, and 19
# cost 1-5%, at the same throughput.
NICENESS_BUSY = 7  # also lowers the I/O priority, which follows the niceness unless set separately
_NICENESS_SPARE = 19
MIN_SPARE_CORES = 0.75  # idle, or used by this process: if all cores are busy, four threads get less
_SAMPLE_SECONDS = 0.1
_MIN_SAMPLES = 3  # in a row: with two trainers on two cores, one sample in a few hundred shows an idle core
_PROGRESS_SECONDS = 1.0
# Memory for parts that is cached between saves, enough for two threads and a local disk. Saves get 3-15% faster.
_CACHED_BYTES = 64 << 20
_ABANDON_SECONDS = 20.0  # to remove the files of a dead trainer's save; meanwhile the staged state stays in memory


class SpareCores:
    """The average number of cores that were idle, or busy with this process, between two samples.

    ``machine`` returns the text of ``/proc/stat``, whose first line has the ticks by state, summed over cores. ``own``
    returns the CPU time of this process in seconds.
    """

    def __init__(self, machine: Callable[[], str], own: Callable[[], float]) -> None:
        self._machine = machine
        self._own = own
        self._before = self._sample()

    def since_last(self) -> float:
        """Returns the average since the last call, or since construction. If no time has passed, returns 0."""
        before, self._before = self._before, self._sample()
        total, idle, own = (now - earlier for now, earlier in zip(self._before, before, strict=True))
        seconds = total / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)
        return (idle / os.sysconf("SC_CLK_TCK") + own) / seconds if seconds > 0 else 0.0

    def _sample(self) -> tuple[float, float, float]:
        ticks = [int(field) for field in self._machine().split(maxsplit=9)[1:9]]
        return sum(ticks), sum(ticks[3:5]), self._own()  # idle, and idle with I/O in progress


def _thread_ids() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


class Worker:
    def __init__(self, channel: Channel, snapshots: Snapshots | None) -> None:
        self._channel = channel
        self._snapshots = snapshots
        self._buffers: dict[int, mmap.mmap] = {}
        self._shared: dict[MappedFile, mmap.mmap] = {}
        self._mapping = free_in_child(threading.Lock())
        self._part_memory = PartMemory(_CACHED_BYTES)
        self._progress: Callable[[], int] | None = None
        self._job: FileJob | None = None
        self._connection: object = None
        self._flushes: FlushThread | None = None

    def serve(self) -> None:
        threading.Thread(target=self._report_progress, name="progress", daemon=True).start()
        self._send(Ready())
        self._channel.serve(self._answer)

    def abandon(self) -> None:
        """Removes the files of an unfinished request after the trainer's death: no process can commit them."""
        job = self._job
        if job is not None:
            job.abandon()

    def _answer(self, call: Call, fds: list[int]) -> tuple[object, Sequence[int]]:
        self._attach(call, fds)
        if call.context is not None:
            call.context.apply(OWN_VARIABLES)
        result: object = Done()
        match call.request:
            case WriteRequest() as request:
                result = self.write(request)
            case SharedWriteRequest() as request:
                result = self._write_shared(request)
            case DigestRequest() as request:
                result = self._digest(request)
            case SnapshotRequest() as request:
                assert self._snapshots is not None, "this process was started without GPUs"
                self._snapshots.take(request, self._buffers[request.buffer])
            case FlushTarget() as target:
                if self._flushes is None:
                    from .._tiers.flush import FlushThread  # at the top, this import would make every start 20% longer

                    self._flushes = FlushThread(lambda: self._progress is not None)
                self._flushes.add(target)
            case None:
                pass  # the call only releases buffers
            case publication:  # its class is not imported above, because that would make every start longer
                result = self._publish(publication)
        return result, ()

    def _attach(self, call: Call, fds: list[int]) -> None:
        if self._snapshots is not None:
            self._snapshots.retain(set(call.retained))
        access = mmap.PROT_READ | (0 if self._snapshots is None else mmap.PROT_WRITE)
        self._buffers = {number: self._buffers[number] for number in call.retained}
        left = deque(fds)
        try:
            for number, nbytes in call.new:
                self._buffers[number] = mmap.mmap(left[0], nbytes, mmap.MAP_SHARED, access)
                os.close(left.popleft())
        finally:
            for fd in left:
                os.close(fd)

    def _digest(self, request: DigestRequest) -> tuple[bytes, ...]:
        done: list[int] = []
        return self._run(
            lambda: take_digests(request.tensors, self._bytes, request.thread_count, done), lambda: sum(done)
        )

    def _publish(self, publication: Publication) -> tuple[Any, ...]:
        with suppress(OSError):  # for this thread and those that it starts, and their I/O: no save waits for them
            os.setpriority(os.PRIO_PROCESS, 0, _NICENESS_SPARE)
        done = [0]

        def progress(nbytes: int, total: int) -> None:
            done[0] = nbytes

        return self._run(lambda: publication.publish(progress), lambda: done[0])

    def write(self, request: WriteRequest) -> WriteDone:
        options = request.options
        storage = open_storage(request.path, options.storage_options, options.limits.timeout)
        self._connection = storage.connection
        memory, self._part_memory = self._part_memory, PartMemory(_CACHED_BYTES)
        job = self._job = FileJob(storage, request.files, self._bytes, options, memory)
        try:
            done = self._run(job.run, lambda: job.bytes_written)
        finally:
            self._job = None
        self._part_memory = memory  # only after success: a failed job may not have returned all of it
        return done

    def _write_shared(self, request: SharedWriteRequest) -> WriteDone:
        options = request.options
        storage = open_storage(request.path, options.storage_options, options.limits.timeout)
        self._connection = storage.connection
        fill: Fill = functools.partial(self._fill, request.tensors)
        if any(source.dtype != dtype for source, dtype in zip(request.tensors, request.dtypes, strict=True)):
            from .casts import filling  # imports torch (2 s and 200 MB), so only if a tensor is cast

            fill = filling(request.tensors, request.dtypes, self._bytes)
        job = SharedWriteJob(storage, request.files, request.pieces, fill, options)
        return self._run(job.run, lambda: job.bytes_written)

    def _fill(self, sources: Sequence[TensorSource], number: int, start: int, memory: np.ndarray) -> None:
        memory[:] = np.frombuffer(self._bytes(sources[number])[start : start + memory.nbytes], dtype=np.uint8)

    def _run(self, work: Callable[[], _T], progress: Callable[[], int]) -> _T:
        """Runs the work of a request. The result of ``progress`` grows while the work makes progress."""
        self._progress = progress
        with suppress(OSError, RuntimeError):  # without /proc, or if no thread can start, the priority stays
            arguments = progress, _thread_ids(), SpareCores(Path("/proc/stat").read_text, time.process_time)
            threading.Thread(target=self._use_spare_cores, args=arguments, name="priority", daemon=True).start()
        try:
            return work()
        finally:
            self._progress = None
            self._shared.clear()

    def _bytes(self, source: TensorSource) -> memoryview:
        match source.memory:
            case MappedFile() as file:
                with self._mapping:  # mapped at the first tensor in the file, until the request ends
                    if file not in self._shared:
                        self._shared[file] = map_shared(file)
                    memory = self._shared[file]
            case int(buffer):
                memory = self._buffers[buffer]
            case None:
                raise ValueError(f"{source.name!r} is not in shared memory")
        return memoryview(memory)[source.offset : source.offset + source.nbytes]

    def _send(self, message: object) -> None:
        with suppress(EOFError):
            self._channel.send(message)

    def _use_spare_cores(self, progress: Callable[[], int], others: set[int], spare: SpareCores) -> None:
        """Lowers the priority of a request's threads further, as soon as idle cores can run them.

        Changes only threads that end with the request: without privileges a priority cannot be raised again.
        """
        samples = 0
        while self._progress is progress:
            time.sleep(_SAMPLE_SECONDS)
            samples = samples + 1 if spare.since_last() >= MIN_SPARE_CORES else 0
            if samples == _MIN_SAMPLES:
                for thread in _thread_ids() - others:
                    with suppress(OSError):  # the thread has ended
                        os.setpriority(os.PRIO_PROCESS, thread, _NICENESS_SPARE)
                return

    def _report_progress(self) -> None:
        while True:
            time.sleep(_PROGRESS_SECONDS)
            progress = self._progress
            if progress is not None:
                self._send(Progress(progress()))


def _exit(abandon: Callable[[], None]) -> None:
    abandoning = threading.Thread(target=abandon, name="abandon", daemon=True)
    abandoning.start()
    abandoning.join(_ABANDON_SECONDS)
    os._exit(1)


def main(arguments: Sequence[str]) -> None:
    """Runs the writer process. ``arguments`` are those of `begin`, then 1 to use GPUs, or 0."""
    channel, trainer, (devices,) = begin(arguments, NICENESS_BUSY)
    snapshots = None
    if int(devices):
        import torch  # takes 2 s and 200 MB, so only with GPUs

        from .gpu_ipc import Snapshots

        torch.set_num_threads(1)
        snapshots = Snapshots()
    worker = Worker(channel, snapshots)
    at_end_of(trainer, functools.partial(_exit, worker.abandon))
    worker.serve()
