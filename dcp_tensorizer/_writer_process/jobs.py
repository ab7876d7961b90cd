"""The job that writes one rank's files of one save, all or none, in the writer process or in the trainer."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace

import xxhash

from .._runtime.forks import free_in_child
from .._runtime.spans import Span
from .._runtime.threads import Workers, in_threads
from .._storage.base import Sink, Storage
from .._storage.open import open_storage
from .._storage.remote import silence_timeout
from .._tensor_file.encode import FileParts, PartMemory, encode_ahead
from .._tensor_file.layout import lay_out
from ..errors import CheckpointError, WriteError, describe
from .options import SaveOptions
from .protocol import FileRequest, FileResult, TensorSource, WriteDone

_UNFINISHED = 4  # files that may be open at once; each holds a descriptor until it is on the disk


class FileJob:
    """A job that writes the files of one request.

    ``contents`` returns the bytes that a source describes. ``memory`` is the pool of memory for parts. At the end
    the job frees the pool's memory, except what the pool caches. ``is_abandoned`` is set when the files are no longer
    needed.
    """

    def __init__(
        self,
        storage: Storage,
        files: Sequence[FileRequest],
        contents: Callable[[TensorSource], memoryview],
        options: SaveOptions,
        memory: PartMemory | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._storage = storage
        self._files = files
        self._contents = contents
        self._options = options
        self._clock = clock
        # If no file has been adopted for this many seconds, the job writes all other files.
        self._adopt_timeout = silence_timeout(options.limits.timeout)
        self._adopts_until = clock() + self._adopt_timeout
        self._adopted_bytes = 0
        self._events = 0  # progress other than bytes written
        self._sinks: list[Sink] = []
        self._memory = memory or PartMemory()
        self.is_abandoned = False
        self._completing = free_in_child(threading.Lock())
        self._open_folder = functools.cache(
            lambda location: open_storage(location, options.storage_options, options.limits.timeout)
        )

    @property
    def bytes_written(self) -> int:
        """A number that grows while the job makes progress. May be read from another thread."""
        # A failure is also progress: the clean-up after it has a timeout of its own.
        written = sum(sink.bytes_written + sink.is_aborted for sink in self._sinks)
        return self._adopted_bytes + self._events + written

    def run(self) -> WriteDone:
        """Adopts or writes all files. On failure, removes them and raises `WriteError`, naming file and cause."""
        started = time.perf_counter()
        name = ""
        try:
            with self._completing:  # as for a completion: a file that is adopted during `remove` would stay
                adopted = in_threads(self._adopt, self._files)
            results = {result.name: result for result in adopted if result is not None}
            written = [file for file in self._files if file.name not in results]
            # Completing a file waits for the disk or the server. The next file is encoded in parallel.
            with Workers(1, thread_name_prefix="complete") as pool:
                completions: list[Future[Span]] = []
                encoded: list[Span] = []
                for file in written:
                    if len(completions) >= _UNFINISHED:
                        wait([completions[-_UNFINISHED]])
                    if any(completion.done() and completion.exception() for completion in completions):
                        break  # the job has failed: no other file is needed
                    name = file.name
                    began = time.perf_counter()
                    results[name], parts = self._write(file)
                    encoded.append(Span("encode", began, time.perf_counter(), name, results[name].nbytes))
                    completions.append(pool.submit(self._complete, self._sinks[-1], parts, name))
                hash_seconds = time.perf_counter() - started
                spans: list[Span] = []
                for file, of_file, completion in zip(written, encoded, completions, strict=False):
                    name = file.name
                    finished = completion.result()
                    spans += [of_file._replace(name="file", ended=finished.ended), of_file, finished]
                    if self._options.reuse_unchanged:
                        results[name] = replace(results[name], identity=self._storage.identity(name))
            if self._options.sync_files:
                self._storage.sync_directory()
            writing = sum(sink.write_seconds + sink.complete_seconds for sink in self._sinks)
            ended = time.perf_counter()
            spans.insert(0, Span("files", started, ended, nbytes=sum(span.nbytes for span in encoded)))
            files = tuple(results[file.name] for file in self._files)
            return WriteDone(files, ended - started, hash_seconds, writing, tuple(spans))
        except BaseException as error:
            self.remove()
            if not isinstance(error, Exception):  # a Ctrl-C in the trainer
                raise
            message = f"cannot write {self._storage.path}/{name}: {describe(error)}"
            raise WriteError(self._storage.scrub(message)) from self._storage.cause(error)
        finally:
            self._memory.clear()  # now, because an error or a progress report may keep the job alive for a while

    def remove(self) -> None:
        for file in self._files:
            self._events += 1
            with suppress(Exception):
                self._storage.discard(file.name)

    def _adopt(self, file: FileRequest) -> FileResult | None:
        """Adopts an earlier file with the same bytes. Returns None if that is impossible or takes too long.

        Gives up when no file has been adopted for a while: a server may be too slow to copy files, and each attempt
        would end only at its timeout.
        """
        for earlier in file.earlier:
            if self.is_abandoned or self._clock() > self._adopts_until:
                break
            if _protocol(earlier.location) != _protocol(self._storage.location):
                continue  # opening another storage may take a second
            with suppress(CheckpointError):  # a file that cannot be adopted is written
                source = self._open_folder(earlier.location)
                identity = self._storage.adopt(
                    source, earlier.name, earlier.identity, file.name, sync=self._options.sync_files
                )
                if identity is not None:
                    self._adopted_bytes += file.nbytes
                    self._adopts_until = self._clock() + self._adopt_timeout
                    return FileResult(file.name, file.nbytes, (), identity, adopted=True)
            self._events += 1  # a refusal is also progress
        return None

    def abandon(self) -> None:
        """Removes the files while another thread may still be writing them, and prevents later completions.

        Waits for a file that is being completed: if the removal came before the completion, the file would stay.
        """
        self.is_abandoned = True
        with self._completing:
            self.remove()

    def _write(self, file: FileRequest) -> tuple[FileResult, FileParts]:
        """Encodes a file. On return, its last parts may still be in transfer."""
        options = self._options
        layout = lay_out(file.tensors, options.cipher, sha256=options.sha256)
        sink = self._storage.create(file.name, layout.nbytes, sync=options.sync_files)
        self._sinks.append(sink)
        items, parts = encode_ahead(
            layout,
            self._contents,
            sink,
            options.thread_count,
            options.limits.buffer_bytes,
            self._memory,
            file=file.name,
        )
        return FileResult(file.name, layout.nbytes, tuple(items)), parts

    def _complete(self, sink: Sink, parts: FileParts, name: str) -> Span:
        began = time.perf_counter()
        try:
            parts.finish()
            with self._completing:
                if self.is_abandoned:
                    raise WriteError("this file is no longer needed")
                sink.complete()
        except BaseException:
            sink.abort()
            raise
        return Span("finish", began, time.perf_counter(), name)


def _protocol(location: str) -> str:
    return location.partition("://")[0] if "://" in location else ""


# --- digests of tensors -----------------------------------------------------------------------------------------------
#
# Computing digests takes a tenth of the time of a write, and happens in the process that writes.

_PIECE = 16 << 20  # bytes between two reports of progress


def take_digests(
    tensors: Sequence[TensorSource],
    contents: Callable[[TensorSource], memoryview],
    thread_count: int,
    done: list[int] | None = None,
) -> tuple[bytes, ...]:
    """Computes the XXH3-128 of tensors. 128 bits are enough to treat tensors with equal digests as equal.

    ``done`` receives the number of bytes read from each tensor, for a thread that reports progress.
    """
    counts = [] if done is None else done
    counts[:] = [0] * len(tensors)

    def digest(number: int) -> bytes:
        data = contents(tensors[number])
        state = xxhash.xxh3_128()
        for start in range(0, data.nbytes, _PIECE):
            piece = data[start : start + _PIECE]
            state.update(piece)
            counts[number] += piece.nbytes
        return state.digest()

    with Workers(thread_count, "digest") as pool:
        # The largest tensors first, so that the threads end together.
        order = sorted(range(len(tensors)), key=lambda number: -tensors[number].nbytes)
        digests = dict(zip(order, pool.map(digest, order), strict=True))
    return tuple(digests[number] for number in range(len(tensors)))
