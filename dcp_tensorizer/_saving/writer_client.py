"""Handing a rank's items over to its writer process, which reads them where they were staged; or writing them here."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._format.encryption import Cipher
from .._memory.garbage import collector_paused
from .._memory.shared_buffer import SharedBuffer, aligned
from .._memory.shared_mappings import SharedFile, SharedMappings
from .._memory.tensor_bytes import host_bytes
from .._staging.staged_save import StagedSave
from .._staging.tensor_copy import Copies
from .._storage.base import Storage
from .._writer_process.gpu_ipc import export, withdraw
from .._writer_process.messages import FileRequest, WriteDone, WriteRequest
from .._writer_process.process import WriterProcess
from .._writer_process.write_job import FileJob
from ..errors import WriteError, WriterProcessDied
from .file_planner import plan_files
from .write_items import Item, sources

__all__ = ["WriterClient", "Options", "Written"]

logger = logging.getLogger("dcp_tensorizer")


@dataclass(frozen=True, slots=True, repr=False)  # it holds secrets
class Options:
    """How files are written: see `TensorizerStorageWriter`."""

    storage_options: Mapping[str, Any]
    sync: bool
    threads: int
    buffer_bytes: int
    timeout: float
    cipher: Cipher | None


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a rank's items."""

    files: tuple[FileRequest, ...]
    done: WriteDone
    attempts: int = 1


class WriterClient:
    """One rank's way from staged items to durable files, and the writer process at the end of it."""

    def __init__(self, options: Options, *, devices: bool = False) -> None:
        self._options = options
        self._devices = devices
        self._spill: SharedBuffer | None = None
        self._by_handles = True
        self._closed = False
        self.process: WriterProcess | None = None

    def living_process(self) -> WriterProcess:
        """The writer process, started if there is none or it has died.

        Raises:
            WriterProcessDied: it was ended with `close`.
        """
        if self._closed:
            raise WriterProcessDied("the writer is closed, and its process has ended")
        if self.process is None or not self.process.alive:
            if self.process is not None:
                self.process.close()
            self.process = WriterProcess(devices=self._devices)
        return self.process

    def write(
        self, storage: Storage, rank: int, save_id: str, items: Sequence[Item], staged_save: StagedSave | None
    ) -> Written:
        """Writes the items: what was staged, in the writer process; what was not, or cannot be seen there, here.

        If the process dies, a fresh one writes everything once more, for the staged buffer is still there.

        Raises:
            WriteError: nothing of it is left behind.
        """
        buffer = staged_save.buffer if staged_save is not None else None
        if buffer is None or self.process is None or storage.in_process:
            return self._write_here(storage, rank, save_id, items)
        with collector_paused():
            places, shared = self._place(items, buffer, staged_save.shared if staged_save is not None else None)
            located = sources(items, lambda item: places[item.name])
        buffers = [buffer] if self._spill is None else [buffer, self._spill]
        for attempt in (1, 2):
            # Another try has files of its own: what the process that died had sent may arrive later.
            files = plan_files(located, rank, save_id if attempt == 1 else uuid.uuid4().hex, storage.max_file_bytes)
            try:
                done = self.living_process().write(
                    self._request(storage, files, shared), buffers, self._options.timeout
                )
                return Written(files, done, attempt)
            except WriterProcessDied as error:
                _remove(storage, files)
                if self._closed:
                    raise WriteError(f"the writer was closed before the save to {storage.path} was over") from error
                if attempt == 2:
                    raise WriterProcessDied(f"the save to {storage.path} failed twice: {error}") from error
                logger.warning("rank %d: %s; writing once more with a fresh process", rank, str(error))
        raise AssertionError("unreachable")

    def snapshot(self, buffer: SharedBuffer, copies: Copies) -> bool:
        """Has the writer process copy what is on GPUs to their twins in a shared buffer; False if it could not."""
        if not self._by_handles:
            return False
        pairs = copies.on_device
        try:
            request, _kept = export(pairs, [buffer.locate(twin) or 0 for twin, _ in pairs], buffer.id, copies.streams)
            try:
                self.living_process().snapshot(request, [buffer], self._options.timeout)
            except BaseException:
                withdraw(request.storages)
                raise
        except WriteError as error:
            # What has been refused will be again, to no purpose; a process may die only once.
            self._by_handles = isinstance(error, WriterProcessDied)
            logger.warning("the writer process could not copy from the GPU, the trainer does: %s", str(error))
            return False
        return True

    def close(self) -> None:
        """Ends the writer process and gives the memory back. Idempotent."""
        self._closed = True
        if self.process is not None:
            self.process.close()

    def free(self) -> None:
        """Gives the memory back, when no save uses it any more."""
        spill, self._spill = self._spill, None
        if spill is not None:
            spill.close()

    def _write_here(self, storage: Storage, rank: int, save_id: str, items: Sequence[Item]) -> Written:
        tensors = {item.name: item.tensor for item in items}
        files = plan_files(sources(items, lambda item: (-1, 0)), rank, save_id, storage.max_file_bytes)
        job = FileJob(
            storage,
            files,
            lambda s: host_bytes(tensors[s.name]),
            sync=self._options.sync,
            threads=self._options.threads,
            buffer_bytes=self._options.buffer_bytes,
            cipher=self._options.cipher,
        )
        return Written(files, job.run())

    def _place(
        self, items: Sequence[Item], buffer: SharedBuffer, shared: SharedMappings | None
    ) -> tuple[dict[str, tuple[int, int]], tuple[SharedFile, ...]]:
        """Where each item's bytes are in shared memory; those that the planner made anew are copied there."""
        places: dict[str, tuple[int, int]] = {}
        files: dict[SharedFile, int] = {}
        made = []
        for item in items:
            offset = buffer.locate(item.tensor)
            if offset is not None:
                places[item.name] = buffer.id, offset
            elif shared is not None and (found := shared.locate(item.tensor)) is not None:
                file, offset = found
                places[item.name] = -1 - files.setdefault(file, len(files)), offset
            else:
                made.append(item)
        needed = sum(aligned(item.tensor.nbytes) for item in made)
        if self._spill is not None and (not needed or not self._spill.fits(needed)):
            self._spill.close()
            self._spill = None
        if needed:
            self._spill = self._spill or SharedBuffer(needed)
            self._spill.reset()
        for item in made:
            if item.tensor.numel():
                assert self._spill is not None
                copied = self._spill.allocate(item.tensor.dtype, item.tensor.shape)
                copied.copy_(item.tensor)
                places[item.name] = self._spill.id, self._spill.locate(copied) or 0
        return places, tuple(files)

    def _request(
        self, storage: Storage, files: tuple[FileRequest, ...], shared: tuple[SharedFile, ...]
    ) -> WriteRequest:
        return WriteRequest(
            path=storage.location,
            storage_options=self._options.storage_options,
            files=files,
            buffers=(),
            sync=self._options.sync,
            threads=self._options.threads,
            buffer_bytes=self._options.buffer_bytes,
            timeout=self._options.timeout,
            cipher=self._options.cipher,
            shared=shared,
        )


def _remove(storage: Storage, files: Sequence[FileRequest]) -> None:
    for file in files:
        try:
            storage.discard(file.name)
        except Exception as error:
            shown = storage.scrub(str(error))
            logger.warning("%s/%s is left over from a failed save: %s", storage.path, file.name, shown)
