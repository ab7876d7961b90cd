"""Copies a file from a local folder to the remote, so that it appears there when all of it is there."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from .._direct_memory import direct_memory
from .._storage.base import RangeReader, Sink, Storage, temporary_file_name
from .._storage.local import LocalStorage
from ..errors import WriteError

__all__ = ["Unreadable", "copy_file", "discard"]

_AT_ONCE = 4  # parts on their way: more than that takes memory from training, and is for those who wait


class Unreadable(WriteError):
    """The local copy cannot be read: that is no fault of the remote."""


def copy_file(source: Storage, target: Storage, name: str, nbytes: int, gate: Callable[[], None]) -> None:
    """Copies a file of so many bytes, and makes it durable.

    On a file system it has another name until it is whole: its size alone would not tell, because the space is
    reserved first. Elsewhere a file appears when it is complete.

    Args:
        source: Where it is.
        target: Where it goes.
        name: Of the file.
        nbytes: Of the file.
        gate: Called before each part; returns when it may go on.

    Raises:
        Unreadable: nor will it be, if the disk is damaged.
        CheckpointError, OSError: it cannot be copied; nothing of it is left.
    """
    begun = _begun_name(name) if isinstance(target, LocalStorage) else name
    try:
        reader = source.open_uncached(name)
    except OSError as error:
        raise Unreadable(f"cannot open {source.path}/{name}: {error}") from error
    try:
        sink = target.create(begun, nbytes, sync=True)
        try:
            _copy_parts(_Source(reader, f"{source.path}/{name}"), sink, nbytes, gate)
            sink.complete()
        except BaseException:
            sink.abort()
            raise
    finally:
        reader.close()
    if isinstance(target, LocalStorage):
        target.rename(begun, name)


def discard(target: Storage, *names: str) -> None:
    """Removes what a flush has copied, or has begun to; raises `OSError`."""
    begun = [_begun_name(name) for name in names] if isinstance(target, LocalStorage) else []
    target.discard(*names, *begun)


def _begun_name(name: str) -> str:
    return temporary_file_name(name, "flush")


class _Source:
    """Tells errors of the local disk from those of the remote."""

    def __init__(self, reader: RangeReader, path: str) -> None:
        self._reader = reader
        self._path = path

    def read_into(self, part: memoryview, start: int) -> None:
        try:
            self._reader.read_into([part], start)
        except (OSError, EOFError) as error:
            raise Unreadable(f"cannot read {self._path}: {error}") from error


def _copy_parts(reader: _Source, sink: Sink, nbytes: int, gate: Callable[[], None]) -> None:
    """Copies the parts of a file by several threads, each with one buffer."""
    starts = list(range(0, nbytes, sink.part_bytes))
    threads = 1 if sink.in_order else min(_AT_ONCE, sink.concurrency, len(starts))
    numbers = iter(enumerate(starts))
    stopped = False

    def work() -> None:
        nonlocal stopped
        memory = direct_memory(min(sink.part_bytes, nbytes))
        try:
            for number, start in iter(lambda: next(numbers, None), None):
                gate()
                if stopped:
                    return
                part = memory[: min(sink.part_bytes, nbytes - start)]
                reader.read_into(part, start)
                sink.put_part(number, part)
        except BaseException:
            stopped = True
            raise

    if threads == 1:
        work()
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="flush") as pool:
        for done in [pool.submit(work) for _ in itertools.repeat(None, threads)]:
            done.result()
