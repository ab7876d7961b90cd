"""Turns a rank's items into durable files: through the writer process, or in this process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from .._runtime.child import END_SECONDS
from .._runtime.forks import free_in_child
from .._runtime.interpreter import collector_paused
from .._runtime.process_context import ProcessContext
from .._runtime.threads import NEVER, Deadline, in_background
from .._staging.device import CUDA, Device
from .._staging.shared_mappings import SharedTensors
from .._staging.shared_memory import SharedBuffer, aligned
from .._staging.staged_save import StagedSave
from .._tensor_file.dtypes import host_bytes
from .._writer_process.client import NotStarted, Unsendable, WriterProcess, WriterProcessHung
from .._writer_process.jobs import take_digests
from .._writer_process.protocol import DigestRequest, TensorSource, WriteDone
from ..errors import WriteError, WriterProcessDied
from .reuse import FilesOfSave
from .write_plan import Item

if TYPE_CHECKING:
    from .._models.pieces import SharedFiles
    from .._publish.publisher import Publication, PublishedVersion
    from .._storage.lease import LeaseRecord

logger = logging.getLogger("dcp_tensorizer")

_PROGRESS_SECONDS = 1.0


class WriterClient:
    """The owner of the writer process that the writers of an engine share. Writes one rank's items through it.

    With ``devices`` the writer process sees the trainer's GPUs. ``device`` is the accelerator of unstaged tensors.

    Attributes:
        copies_from_gpus: Whether to request copies from GPUs: False once the writer process has refused such a copy, or
            has died too often during such copies.
        deaths: Number of times that the writer process has died while it copied from GPUs.
    """

    copies_from_gpus = True
    deaths = 0

    def __init__(
        self, *, devices: bool = False, start: Callable[..., WriterProcess] = WriterProcess, device: Device = CUDA
    ) -> None:
        self._devices = devices
        self._start = start
        self._device = device
        self._process: WriterProcess | None = None
        self._extra: SharedBuffer | None = None  # for tensors that the planner has made
        self._ends = 0  # number of calls to `end_process`
        # Not taken by `end_process`. Reentrant, because a signal handler that closes the writer may flush.
        self._starting = free_in_child(threading.RLock())

    def ensure_process(self) -> WriterProcess:
        """Returns the writer process. Starts a process if none runs.

        Raises `WriterProcessDied` if the process cannot be started, or if `end_process` was called during the start.
        """
        if self._process is not None and self._process.alive:
            return self._process  # without the lock, whose holder a signal handler may have interrupted
        with self._starting:
            if self._process is not None:
                if self._process.alive:
                    return self._process
                self._process.close()
            ends = self._ends
            self._process = self._start(devices=self._devices)
            if self._ends != ends:  # `end_process` was called by a signal handler or another thread
                self._process.close()
                raise WriterProcessDied("the writer is closed, and its process has ended")
            return self._process

    def write(
        self,
        files: FilesOfSave | SharedFiles,
        items: Sequence[Item],
        staged_save: StagedSave | None,
        is_closed: Callable[[], bool] = lambda: False,
        progress: Callable[[int], object] = lambda nbytes: None,
    ) -> WriteDone:
        """Writes the items, in the writer process if they were staged and the process can reach the storage.

        Otherwise this process writes them: if nothing was staged, if the storage is this process's memory, or if the
        writer process cannot be started. If the writer process dies, a fresh one writes everything once more from
        the staging buffer, unless ``is_closed`` returns true, or the process was killed because it made no progress.
        ``progress`` is called with the bytes written so far, about once a second.

        On failure, removes the files, except shared ones, and raises `WriteError`.
        """
        if staged_save is None or staged_save.buffer is None or files.storage.in_process:
            return self._write_here(files, items, progress)
        context, timeout = staged_save.context, files.options.limits.timeout
        staged, sources, buffers = staged_save.buffer, list[TensorSource](), list[SharedBuffer]()
        extra: SharedBuffer | None = None

        def digest(sources: Sequence[TensorSource]) -> Sequence[bytes]:
            request = DigestRequest(tuple(sources), files.options.thread_count)
            digests: tuple[bytes, ...] = self.ensure_process().ask(request, buffers, timeout)
            return digests

        try:
            for attempt in (1, 2):
                try:
                    self.ensure_process()  # before anything is copied to another buffer
                    if not buffers:
                        with collector_paused():
                            sources, extra = self._locate(items, staged, staged_save.shared)
                        buffers = [staged] if extra is None else [staged, extra]
                    request = files.request(sources, digest)
                    done = self.ensure_process().ask(request, buffers, timeout, context, progress)
                    return replace(files.finish(done, digest), attempts=attempt)
                except WriterProcessDied as error:
                    self._check_again(error, files, attempt, is_closed)
                    if isinstance(error, NotStarted):
                        return replace(self._write_here(files, items, progress), attempts=attempt)
                except Unsendable as error:
                    storage = files.storage
                    raise WriteError(storage.scrub(f"{storage.path}: {error}")) from storage.cause(error)
                except Exception:
                    raise
                except BaseException:  # a KeyboardInterrupt, which has ended the process
                    files.remove()
                    raise
            raise AssertionError("unreachable")
        finally:
            self.free()
            self._extra = extra

    def _check_again(
        self, error: WriterProcessDied, files: FilesOfSave | SharedFiles, attempt: int, is_closed: Callable[[], bool]
    ) -> None:
        """Cleans up after a writer process that has died. If the save must not be retried, raises `WriteError`."""
        if isinstance(error, WriterProcessHung):  # a new writer process would also hang, and so would this process
            hung = self._process

            def clean() -> None:
                if hung is not None:
                    hung.wait_dead()
                files.remove()

            error.cleaning = in_background(clean, name="clean-up", daemon=True)
            raise error
        files.remove()
        path = files.storage.path
        if is_closed():
            raise WriteError(f"the writer was closed during the save to {path}, which is not committed") from error
        if isinstance(error, NotStarted):
            logger.warning("rank %d: the trainer writes this save itself, because %s", files.rank, str(error))
            return
        if attempt == 2:
            raise WriterProcessDied(f"the save to {path} failed twice: {error}") from error
        logger.warning("rank %d: %s; writing once more with a fresh process", files.rank, str(error))

    def publish(
        self,
        request: Publication,
        timeout: float,
        context: ProcessContext | None = None,
        is_closed: Callable[[], bool] = lambda: False,
    ) -> tuple[PublishedVersion, LeaseRecord, tuple[str, ...]]:
        """Publishes a version in the writer process. If that process dies, retries once with a fresh one.

        Raises `WriteError` if the version cannot be published, and `WriterProcessDied` if the second process has also
        died, if a process was killed because it made no progress, or if the first process has died and ``is_closed``
        returns true.
        """
        done: tuple[PublishedVersion, LeaseRecord, tuple[str, ...]]
        try:
            done = self.ensure_process().ask(request, None, timeout, context)
        except WriterProcessHung:
            raise
        except WriterProcessDied as error:
            if is_closed():
                raise WriterProcessDied("the writer was closed before the model was published") from error
            logger.warning("%s; publishing once more with a fresh process", str(error))
            done = self.ensure_process().ask(request, None, timeout, context)
        return done

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.alive

    def end_process(self, deadline: Deadline = NEVER) -> None:
        """Ends the writer process after its current request, but at the latest at the deadline or after `END_SECONDS`.

        Later work, for a writer that is still open, starts a fresh process.
        """
        self._ends += 1
        process = self._process
        if process is not None:
            process.close(deadline.within(END_SECONDS))

    def free(self) -> None:
        """Frees the buffer for tensors that the planner has made."""
        extra, self._extra = self._extra, None
        if extra is not None:
            extra.close()

    def _write_here(
        self, files: FilesOfSave | SharedFiles, items: Sequence[Item], progress: Callable[[int], object]
    ) -> WriteDone:
        tensors = {item.name: item.tensor for item in items}
        # Several threads read the tensors, each with its own current stream.
        self._device.side_streams.synchronize(tensors.values())

        def contents(source: TensorSource) -> memoryview:
            return host_bytes(tensors[source.name])

        def digest(sources: Sequence[TensorSource]) -> Sequence[bytes]:
            return take_digests(sources, contents, files.options.thread_count)

        job = files.job(items, contents, digest)
        with _each_second(lambda: progress(job.bytes_written)):
            done = job.run()
        return files.finish(done, digest)

    def _locate(
        self, items: Sequence[Item], buffer: SharedBuffer, shared: SharedTensors | None
    ) -> tuple[list[TensorSource], SharedBuffer | None]:
        """Finds each item's bytes in shared memory. If the planner has made a tensor, copies it to an extra buffer."""
        sources: list[TensorSource] = []
        made: dict[int, Item] = {}  # by the numbers of their sources
        for item in items:
            if not item.has_bytes:
                sources.append(item.source(buffer.id))
            elif (offset := buffer.locate(item.tensor)) is not None:
                sources.append(item.source(buffer.id, offset))
            elif shared is not None and (location := shared.locate(item.tensor)) is not None:
                sources.append(item.source(*location))
            else:
                made[len(sources)] = item
                sources.append(item.source())
        extra, self._extra = self._extra, None
        nbytes = sum(aligned(item.tensor.nbytes) for item in made.values())
        if extra is not None and (not made or not extra.fits(nbytes)):
            extra.close()
            extra = None
        if not made:
            return sources, None
        extra = extra or SharedBuffer(nbytes)
        extra.reset()
        for number, item in made.items():
            copied = extra.allocate(item.tensor.dtype, item.tensor.shape)
            copied.copy_(item.tensor)
            sources[number] = item.source(extra.id, extra.locate(copied) or 0)
        return sources, extra


@contextmanager
def _each_second(do: Callable[[], object]) -> Iterator[None]:
    """Calls a function about once a second while a block runs, in a new thread if one can be started."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(_PROGRESS_SECONDS):
            do()

    thread = threading.Thread(target=run, name="progress", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is exiting, or the thread limit is reached: run the block without calls
        yield
        return
    try:
        yield
    finally:
        is_over.set()
        thread.join()
