"""The parts of a file: filled in memory by several threads, written by others as soon as they are complete."""

from __future__ import annotations

import threading
from typing import Protocol

import numpy as np

from .._direct_memory import direct_memory
from .._forks import free_in_child
from .._threads import Workers

__all__ = ["PartMemory", "PartSink", "Parts"]


class PartSink(Protocol):
    """What takes a file's parts; storages have sinks that know more (``_storage.base.Sink``)."""

    @property
    def part_bytes(self) -> int:
        """Size of every part but the last."""

    @property
    def concurrency(self) -> int:
        """Parts that are worth writing at once."""

    @property
    def in_order(self) -> bool:
        """It takes the parts in their order only, one at a time."""

    def put_part(self, number: int, data: memoryview) -> None:
        """Takes a part; ``data`` begins on a page. Raises `OSError`."""

    def complete(self) -> None:
        """Completes the file; raises `OSError`, and then there is no file."""

    def abort(self) -> None:
        """Drops the file."""


class PartMemory:
    """Memory for the parts of one file after the other: what a part leaves when it is written, another one gets.

    Fresh memory costs as much as a copy of its size, and several times that where a hypervisor must provide it.

    Args:
        kept_bytes: How much of it `clear` keeps, for the next file.

    Attributes:
        changed: Held to take memory, and told when some comes back.
    """

    def __init__(self, kept_bytes: int = 0) -> None:
        self._kept_bytes = kept_bytes
        self.changed = free_in_child(threading.Condition())
        self._free: list[np.ndarray] = []
        self._part_bytes = 0
        self._allowed = 0
        self._made = 0

    def allow(self, part_bytes: int, count: int) -> None:
        """Has ``take`` give parts of this size, so many at once; what is left of another size is dropped."""
        with self.changed:
            self._part_bytes, self._allowed = part_bytes, part_bytes * count
            free, self._free = self._free, []
            for buffer in free:
                self._keep(buffer)

    def clear(self) -> None:
        """Drops what nobody has, and later what is given back, but for what is kept."""
        self.allow(self._part_bytes, self._kept_bytes // max(1, self._part_bytes))

    def take(self) -> np.ndarray | None:
        """Memory of a part, for who holds ``changed``; None while others have all of it."""
        if self._free:
            return self._free.pop()
        if self._made + self._part_bytes > self._allowed:
            return None
        buffer = np.frombuffer(direct_memory(self._part_bytes), dtype=np.uint8)
        self._made += buffer.nbytes
        return buffer

    def give_back(self, buffer: np.ndarray) -> None:
        """Lets others have it."""
        with self.changed:
            self._keep(buffer)
            self.changed.notify_all()

    def _keep(self, buffer: np.ndarray) -> None:
        if buffer.nbytes == self._part_bytes and self._made <= self._allowed:
            self._free.append(buffer)
        else:
            self._made -= buffer.nbytes


class Parts:
    """The parts of a file that are being filled, by several threads and in any order.

    The memory is bounded, and filling waits for it. It cannot wait for ever as long as tensors are begun in file
    order: a part that is incomplete is one that a tensor in hand begins, ends or has got to, or the last one begun.

    Args:
        nbytes: Of the file.
        sink: Takes the parts.
        filling: How many are filled at once, at most.
        writing: How many are written at once, at most.
        memory: Theirs, which other files may share.
    """

    def __init__(
        self, nbytes: int, sink: PartSink, *, filling: int, writing: int, memory: PartMemory | None = None
    ) -> None:
        self._nbytes = nbytes
        self._sink = sink
        self._io = Workers(writing, thread_name_prefix="parts")
        self._memory = memory or PartMemory()
        self._memory.allow(sink.part_bytes, filling + writing)
        self._filling: dict[int, np.ndarray] = {}
        self._missing: dict[int, int] = {}
        self._left = -(-nbytes // sink.part_bytes)
        self._error: BaseException | None = None
        self._changed = self._memory.changed

    def fill(self, offset: int, data: np.ndarray) -> None:
        """Copies bytes to their place in the file; whatever part they complete leaves for the sink."""
        size = self._sink.part_bytes
        while data.nbytes:
            number, begin = divmod(offset, size)
            count = min(data.nbytes, size - begin)
            self._part(number)[begin : begin + count] = data[:count]
            self._filled(number, count)
            offset += count
            data = data[count:]

    def fill_both(self, offset: int, head: np.ndarray, data: np.ndarray) -> None:
        """The same for two runs of bytes, one behind the other: small ones share a part, and cost little more."""
        middle = offset + head.nbytes
        number, begin = divmod(offset, self._sink.part_bytes)
        end = begin + head.nbytes + data.nbytes
        if end > self._sink.part_bytes:
            self.fill(offset, head)
            self.fill(middle, data)
            return
        part = self._part(number)
        part[begin : begin + head.nbytes] = head
        part[begin + head.nbytes : end] = data
        self._filled(number, end - begin)

    def _filled(self, number: int, count: int) -> None:
        with self._changed:
            self._missing[number] -= count
            if self._missing[number]:
                return
            del self._missing[number]
        # Without the lock: what a signal's handler raises here comes out when the part is written. That takes the lock.
        self._io.submit(self._put, number)
        with self._changed:
            self._left -= 1
            if not self._left:
                self._io.shutdown(wait=False)  # its threads end with the last part, whenever it is finished

    def finish(self) -> None:
        """Waits until the sink has every part; raises what kept it from getting one."""
        self._io.shutdown()
        if self._error is not None:
            raise self._error
        assert not self._filling, "a part was never completed"

    def abandon(self, error: BaseException) -> None:
        """Returns when the sink gets no more parts, for who fills no more either: the file is lost."""
        self.fail(error)
        self._io.shutdown()
        while self._filling:
            self._memory.give_back(self._filling.popitem()[1])

    def fail(self, error: BaseException) -> None:
        """Stops every thread that fills: the file is lost."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _part(self, number: int) -> np.ndarray:
        """The memory of a part, which may be another thread's to begin. It stays there until all of it is filled."""
        part = self._filling.get(number)
        if part is not None and self._error is None:
            return part
        with self._changed:
            while number not in self._filling:
                if self._error is not None:
                    raise self._error
                buffer = self._memory.take()
                if buffer is None:
                    self._changed.wait()
                else:
                    self._filling[number] = buffer
                    start = number * self._sink.part_bytes
                    self._missing[number] = min(self._sink.part_bytes, self._nbytes - start)
            return self._filling[number]

    def _put(self, number: int) -> None:
        buffer = self._filling.pop(number)
        try:
            if self._error is None:
                count = min(self._sink.part_bytes, self._nbytes - number * self._sink.part_bytes)
                self._sink.put_part(number, buffer[:count].data)
        except BaseException as error:
            self.fail(error)
        finally:
            self._memory.give_back(buffer)  # also after a failure: the next file may wait for it
