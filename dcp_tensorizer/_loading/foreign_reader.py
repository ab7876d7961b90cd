"""The common part of the readers of other packages' checkpoints."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from .._storage.base import Storage
from ..errors import CheckpointError, NotCommitted
from .validate import unreadable


class ForeignReader(StorageReader):
    """Reads one checkpoint of another package, for one load. Errors reach DCP as those of `TensorizerStorageReader`."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._metadata = Metadata({})
        self._error: CheckpointError | None = None

    def reset(self, checkpoint_id: object = None) -> None:
        """Does nothing: each load has its own reader."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads the checkpoint's metadata, or with ``rank=`` that rank's own.

        Errors are kept for `set_up_storage_reader`. Raises `NotCommitted` if there is nothing of all ranks, and
        ``rank`` was not given.
        """
        rank = kwargs.get("rank")
        self._error = None
        meta = StorageMeta(load_id=str(uuid.uuid4()))
        try:
            metadata = self._read_metadata(rank)
        except CheckpointError as error:
            if isinstance(error, NotCommitted) and rank is None:
                raise
            self._error = error
            return unreadable(error, meta)
        metadata.storage_meta = metadata.storage_meta or meta
        metadata.storage_meta.load_id = meta.load_id
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises the error of `read_metadata`, if there was one, and keeps the metadata."""
        if self._error is not None:
            raise self._error
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Does nothing: reading the metadata has shown that all is there."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Does nothing: there is nothing to agree on."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads everything in the plan into the planner's targets.

        Raises `ReadError`, naming the key, if something does not fit or cannot be read.
        """
        self._load(plan, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Returns False: the storage is given at construction."""
        return False

    @abstractmethod
    def _read_metadata(self, rank: int | None) -> Metadata:
        """Reads the metadata of all ranks, or one rank's own; raises `CheckpointError`."""

    @abstractmethod
    def _load(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Reads everything in the plan into the planner's targets."""
