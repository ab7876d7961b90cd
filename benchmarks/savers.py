"""The contenders of the save benchmark, with one interface: save, and wait until it is durable."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tensorizer import EncryptionParams, TensorSerializer
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from dcp_tensorizer import SavePlanner, TensorizerStorageWriter

State = dict[str, torch.Tensor]


class Saver(Protocol):
    def save(self, state: State, folder: Path) -> Future[Any]: ...
    def close(self) -> None: ...


class DcpSaver:
    def __init__(self, group: dist.ProcessGroup | None, **options: Any) -> None:
        self._options = options | ({"process_group": group} if group is not None else {"no_dist": True})
        self._staged: Future[None] | None = None

    def save(self, state: State, folder: Path) -> Future[Any]:
        response = dcp.async_save(
            {"model": state}, checkpoint_id=str(folder), storage_writer=self._writer(folder), **self._options
        )
        if isinstance(response, Future):
            return response
        self._staged = response.staging_completion
        return response.upload_completion

    def _writer(self, folder: Path) -> Any:
        return FileSystemWriter(folder)

    def guard(self) -> AbstractContextManager[None]:
        """Waits until the state is staged. Returns a context for the optimizer's step."""
        if self._staged is not None:
            self._staged.result()
        return nullcontext()

    def close(self) -> None:
        """Does nothing: there is nothing to free."""


class Ours(DcpSaver):
    def __init__(
        self,
        group: dist.ProcessGroup | None,
        state: State,
        *,
        prewarm: bool,
        planner: Callable[[], SavePlanner] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(group)
        self._planner = planner
        self._shared = TensorizerStorageWriter(**options)
        if prewarm:
            self._shared.prewarm({"model": state})
            self._shared._saver.engine.saves.wait_prewarmed()  # as after some time of training

    def save(self, state: State, folder: Path) -> Future[Any]:
        if self._planner is not None:
            self._options["planner"] = self._planner()
        return super().save(state, folder)

    def _writer(self, folder: Path) -> Any:
        return self._shared

    def guard(self) -> AbstractContextManager[None]:
        return self._shared.lock()

    def close(self) -> None:
        self._shared.close()


class TorchProcess(DcpSaver):
    """torch's writer in PROCESS mode, with torch's shared-memory stager."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
            )
        )
        super().__init__(
            group or dist.group.WORLD, async_checkpointer_type=AsyncCheckpointerType.PROCESS, async_stager=self._stager
        )

    def close(self) -> None:
        self._stager.close()


class TorchSync:
    """torch's writer without a thread: training waits for the whole save."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._options: dict[str, Any] = {"process_group": group} if group is not None else {"no_dist": True}

    def save(self, state: State, folder: Path) -> Future[Any]:
        dcp.save({"model": state}, storage_writer=FileSystemWriter(folder), **self._options)
        return _done()

    def close(self) -> None:
        """Does nothing: there is nothing to free."""


def torch_checkpointing(*, background: bool | None = None, pinned: bool = False) -> Any:
    """Makes a manager of torch_checkpointing. With ``background=None``, it saves synchronously."""
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
    from torch_checkpointing.staging import CheckpointStagerConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    # Its direct I/O fails with EINVAL on ext4 and XFS: the sizes it writes are not aligned.
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    if background is None:
        return CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=storage).build()
    staging = CheckpointStagerConfig(
        use_pinned_memory=pinned,
        use_shared_memory=True,
        use_async_staging=background,
        use_non_blocking_copy=pinned,
    )
    save = AsyncCheckpointSaverConfig(staging_config=staging)
    return CheckpointManager.Config(default=ItemSpec(requires_copy=True), save=save, storage_config=storage).build()


class TorchCheckpointing:
    """Meta's torch_checkpointing, staging while training waits, or in the background."""

    def __init__(self, *, background: bool, pinned: bool = False) -> None:
        self._manager = torch_checkpointing(background=background, pinned=pinned)

    def save(self, state: State, folder: Path) -> Future[Any]:
        future = self._manager.save(str(folder), {"state": state})
        assert future is not None
        return future

    def guard(self) -> AbstractContextManager[None]:
        return self._manager.lock()  # type: ignore[no-any-return]

    def close(self) -> None:
        self._manager.close()


class StockTensorizer:
    """tensorizer alone, in the training thread, with an fsync."""

    def save(self, state: State, folder: Path) -> Future[Any]:
        folder.mkdir(parents=True)
        with open(folder / "state.tensors", "wb+") as file:
            keep = os.dup(file.fileno())  # the serializer closes the file
            serializer = TensorSerializer(file)
            serializer.write_state_dict(dict(state))
            serializer.close()
        os.fsync(keep)
        os.close(keep)
        return _done()

    def close(self) -> None:
        """Does nothing: there is nothing to free."""


OURS = "dcp_tensorizer, prewarmed"
PLANNED = "dcp_tensorizer, SavePlanner"
THREAD = "torch FileSystemWriter, THREAD"
PROCESS = "torch FileSystemWriter, PROCESS"
CHECKPOINTING = "torch_checkpointing"
BACKGROUND = "torch_checkpointing, background"
ENCRYPTED = "dcp_tensorizer, encrypted"
OVERLAPPED = "dcp_tensorizer, overlap_staging"
UNPREPARED = "dcp_tensorizer, overlap_staging, not prewarmed"

SAVERS: dict[str, Callable[[dist.ProcessGroup | None, State], Saver]] = {
    "dcp_tensorizer": lambda group, state: Ours(group, state, prewarm=False),
    OURS: lambda group, state: Ours(group, state, prewarm=True),
    PLANNED: lambda group, state: Ours(group, state, prewarm=True, planner=SavePlanner),
    ENCRYPTED: lambda group, state: Ours(group, state, prewarm=True, encryption=EncryptionParams(bytes(32))),
    OVERLAPPED: lambda group, state: Ours(group, state, prewarm=True, overlap_staging=True),
    UNPREPARED: lambda group, state: Ours(group, state, prewarm=False, overlap_staging=True),
    THREAD: lambda group, state: DcpSaver(group),
    PROCESS: lambda group, state: TorchProcess(group),
    CHECKPOINTING: lambda group, state: TorchCheckpointing(background=False),
    BACKGROUND: lambda group, state: TorchCheckpointing(background=True),
    "torch FileSystemWriter, dcp.save": lambda group, state: TorchSync(group),
    "tensorizer alone": lambda group, state: StockTensorizer(),
}


def discard(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _done() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(None)
    return future
