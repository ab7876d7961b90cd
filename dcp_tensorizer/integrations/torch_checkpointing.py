"""Checkpoints of Meta's ``torch_checkpointing``, saved and loaded by this package: `TensorizerCheckpointManager`.

The program makes this manager instead of torch_checkpointing's::

    from dcp_tensorizer.integrations.torch_checkpointing import TensorizerCheckpointManager

    manager = TensorizerCheckpointManager.Config(items=...).build()
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save, save
from torch.utils import _pytree as pytree

from .._job.ranks import OwnGroup
from .._runtime.ranks import is_distributed, rank_of_job
from .._runtime.torch_compat import load_state_dict_from_keys
from .._storage.base import TIMEOUT
from .._tensor_file.names import metadata_file_name
from .._tiers.tiered_storage import nearest
from ..errors import CheckpointError, NotCommitted, unwrap
from ..planner import LoadPlanner, SavePlanner
from ..reader import ReaderOptions, open_reader
from ..writer import TensorizerStorageWriter, WriterOptions
from ._needed import needed

with needed(__name__, "torch_checkpointing"):
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.checkpoint_base import CheckpointBase, CheckpointItem
    from torch_checkpointing.checkpoint_loader import CheckpointLoader
    from torch_checkpointing.checkpoint_saver import CheckpointSaver
    from torch_checkpointing.checkpoint_writer import CallbackArgs, CheckpointWriterConfig
    from torch_checkpointing.checkpointable import CheckpointableTensor
    from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.logging_utils import EventLogger

__all__ = ["TensorizerCheckpointManager"]


class TensorizerCheckpointManager(CheckpointManager):
    """torch_checkpointing's ``CheckpointManager`` with files, commits and loads of this package.

    ``save``, ``load``, ``lock``, ``prewarm_staging`` and ``close`` are called as in torch_checkpointing. Differences:

    - A ``checkpoint_id`` may be a URL of any storage. A checkpoint is a directory of this package: complete or absent,
      with digests that loads verify. A save replaces a checkpoint at the same path.
    - An item with a ``DefaultResharder`` is saved once for all ranks: its DTensors as shards. Its other values must be
      the same on all ranks. An item without a resharder is separate for each rank, and only the rank with the same
      number loads it.
    - A save waits for the previous one without a timeout.
    - The configuration needs no barrier, because the ranks agree over a gloo group that the manager makes. So all ranks
      must make the manager, and close it before ``destroy_process_group``.
    - torch_checkpointing itself loads its own checkpoints, from local disks.

    Raises:
        TypeError: an option of the writer or the reader has the wrong type.
        ValueError: an option has an invalid value, or the configuration has a hook that runs in torch_checkpointing's
            own process. If an item has a layout, a resharder other than ``DefaultResharder``, or shards that are not
            DTensors, the first save or load raises the error.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """torch_checkpointing's configuration.

        Of ``save.staging_config``, only ``use_async_staging`` has an effect: it sets the writer's ``overlap_staging``,
        unless ``writer_options`` has this option.
        ``save.writer_config`` and ``save.process_config`` have no effect. ``load`` affects only loads of
        torch_checkpointing's own checkpoints.

        Attributes:
            root: The folder that ``writer_options["local"]`` mirrors. If given, all ids must be below it.
            writer_options: Options of `TensorizerStorageWriter`, such as ``local``.
            reader_options: Options of `open_reader`.
        """

        root: str | None = None
        writer_options: WriterOptions = field(default_factory=WriterOptions)
        reader_options: ReaderOptions = field(default_factory=ReaderOptions)

        def build(self) -> TensorizerCheckpointManager:
            return TensorizerCheckpointManager(self)

    def __init__(self, config: Config | None = None) -> None:
        config = config or TensorizerCheckpointManager.Config()
        for name in ("pre_finalize_callback", "subprocess_init_fn"):
            if getattr(config, name) is not None:
                raise ValueError(
                    f"{name} runs in torch_checkpointing's own process, which does not exist here. Leave it out."
                )
        open_reader(config.root or "checkpoint", **config.reader_options)  # checks the options
        wanted, config.save = config.save, _NO_PROCESS
        try:
            super().__init__(config)
        finally:
            config.save = wanted
        unused: CheckpointSaver = self._saver
        unused.close()
        callback, storage = config.finalize_callback, self._storage_config

        def finalize(path: str) -> None:
            if callback is not None:
                callback(CallbackArgs(path, storage.create_storage(), EventLogger()))

        self._saver: _Saver = _Saver(finalize, config)
        own: CheckpointLoader = self._loader
        self._loader: CheckpointLoader = _Loader(own, config, self._rank)

    def lock(self) -> AbstractContextManager[None]:
        """Returns a lock that waits until the state is copied. Enter it around in-place updates of the state."""
        return self._saver.writer.lock()

    def prewarm_staging(self, checkpoint: Mapping[str, Any]) -> None:
        """Starts the writer process, and allocates the staging buffer in the background."""
        if self._closed:
            raise RuntimeError("Cannot prewarm staging with a closed CheckpointManager")
        self._saver.writer.prewarm(_state_of(self._schema.build_items(checkpoint, rank=self._rank), self._rank))


_NO_PROCESS = SyncCheckpointSaverConfig(
    writer_config=CheckpointWriterConfig(barrier_config=None, write_to_temp_dir=False)
)
"""Configuration of the unused saver that torch_checkpointing's manager always makes."""


class _Saver(CheckpointSaver):
    """Saver with DCP and this package's writer. ``finalize`` gets the path of each committed checkpoint."""

    def __init__(self, finalize: Callable[[str], object], config: TensorizerCheckpointManager.Config) -> None:
        how = config.save
        self._is_async = isinstance(how, AsyncCheckpointSaverConfig)
        overlaps = self._is_async and how.staging_config.use_async_staging
        options: WriterOptions = {"overlap_staging": overlaps, **config.writer_options}
        self.writer = TensorizerStorageWriter(config.root, **options)
        self._finalize = finalize
        self._rank = rank_of_job()
        self._group = OwnGroup() if is_distributed() else None

    def save(self, path: str, checkpoint: CheckpointBase) -> tuple[Future[Any], Future[Any]] | None:
        """Saves the items of a checkpoint. An asynchronous save returns the futures of the copy and of the commit."""
        where: dict[str, Any] = {"checkpoint_id": path, "storage_writer": self.writer, "planner": SavePlanner()}
        where["process_group"] = None if self._group is None else self._group.group
        state = _state_of(checkpoint.get_items(), self._rank)
        if not self._is_async:
            save(state, **where)
            self._finalize(path)
            return None
        response = async_save(state, **where)
        if isinstance(response, AsyncSaveResponse):
            return response.staging_completion, _then(response.upload_completion, lambda: self._finalize(path))
        staged: Future[None] = Future()
        staged.set_result(None)
        return staged, _then(response, lambda: self._finalize(path))

    def close(self) -> None:
        self.writer.close()
        if self._group is not None:
            self._group.destroy()

    @property
    def stager(self) -> AsyncStager:
        return self.writer


class _Loader(CheckpointLoader):
    """Loader with DCP and `open_reader`. ``own`` is torch_checkpointing's loader, for its own checkpoints."""

    def __init__(self, own: CheckpointLoader, config: TensorizerCheckpointManager.Config, rank: int) -> None:
        self._own = own
        self._root = config.root
        self._options = config.reader_options
        self._rank = rank

    def load(
        self,
        path: str | os.PathLike[str],
        checkpoint: CheckpointBase,
        default_map_location: Any = None,
        strict: bool = False,
        *,
        metadata_format: Any = None,
    ) -> None:
        """Loads the items of a checkpoint, tensors in place.

        Raises:
            FileNotFoundError: the path has no checkpoint, or the checkpoint lacks an item.
            RuntimeError: with ``strict``, a part of an item is missing.
            CheckpointError: the checkpoint is damaged, or cannot be read.
        """
        if metadata_format is not None or not self._is_ours(path):
            self._own.load(path, checkpoint, default_map_location, strict, metadata_format=metadata_format)
            return
        try:
            self._load(path, checkpoint, default_map_location, strict)
        except (CheckpointException, NotCommitted) as error:
            cause = unwrap(error)
            raise (FileNotFoundError(str(cause)) if isinstance(cause, NotCommitted) else cause) from None

    def _load(self, path: str | os.PathLike[str], checkpoint: CheckpointBase, location: Any, strict: bool) -> None:
        items = checkpoint.get_items()
        reader, there = self._reader(path), set[str]()
        reader.reset(path)
        with suppress(CheckpointError):  # the load raises it on all ranks
            there = {key.partition(".")[0] for key in reader.read_metadata().state_dict_metadata}
        names = {key: _found(key, item, self._rank, there) for key, item in items.items()}
        for key, item in items.items():
            _check(key, item)
        state = {names[key]: item.value for key, item in items.items() if item.value is not None}
        whole = {names[key] for key, item in items.items() if item.value is None}
        if state:
            planner = _Planner(str(path), allow_partial_load=not strict)
            load(state, checkpoint_id=path, storage_reader=self._reader(path), planner=planner)
        if whole:
            state |= load_state_dict_from_keys(whole, checkpoint_id=path, storage_reader=self._reader(path))
            if missing := sorted(whole - state.keys()):
                raise FileNotFoundError(_missing(str(path), missing))
        if location is not None:
            if not isinstance(location, str | torch.device):
                raise ValueError(f"map_location must be a device, got {type(location).__name__}.")
            moved = {name: state[name] for name in whole}
            state |= pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(location), moved)
        checkpoint.load_state_dict({key: state[name] for key, name in names.items()})

    def _reader(self, path: str | os.PathLike[str]) -> Any:
        return open_reader(self._root or path, **self._options)

    def _is_ours(self, path: str | os.PathLike[str]) -> bool:
        """Returns whether to load with this package: URLs, and paths at which there is a ``.metadata``."""
        if "://" in str(path):
            return True
        options = self._options
        opener = nearest(
            self._root or path, options.get("storage_options"), options.get("timeout", TIMEOUT), options.get("local")
        )
        return opener(path).head(metadata_file_name()) is not None

    def close(self) -> None:
        self._own.close()


class _Planner(LoadPlanner):
    """Load planner that requires each item, even if parts of items may be missing."""

    def __init__(self, path: str, **options: bool) -> None:
        super().__init__(**options)
        self._path = path

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Receives from DCP the state to load into. Raises `FileNotFoundError` if an item is missing."""
        assert metadata is not None
        there = {key.partition(".")[0] for key in metadata.state_dict_metadata}
        wanted = {key for key, value in state_dict.items() if pytree.tree_leaves(value)}  # {} has no stored entry
        if missing := sorted(wanted - there):
            raise FileNotFoundError(_missing(self._path, missing))
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _missing(path: str, names: list[str]) -> str:
    own = [f"{name} of rank {rank}" if rank else name for name, _, rank in (name.partition("@") for name in names)]
    return f"{path} has no {', '.join(own)}"


def _state_of(items: Mapping[str, CheckpointItem], rank: int) -> dict[str, Any]:
    for key, item in items.items():
        _check(key, item)
    return {_name(key, item, rank): item.value for key, item in items.items()}


def _name(key: str, item: CheckpointItem, rank: int) -> str:
    """Returns the name of an item in the state dict: without a resharder, one for each rank. Keys have no ``@``."""
    return f"{key}@{rank}" if item.resharder is None else key


def _found(key: str, item: CheckpointItem, rank: int, there: set[str]) -> str:
    """Returns the name of an item in a checkpoint.

    The item may have been saved with a resharder and be loaded without one, or vice versa.
    """
    name, others = _name(key, item, rank), {key, f"{key}@{rank}"} & there
    return name if name in others or not others else others.pop()


def _check(key: str, item: CheckpointItem) -> None:
    if item.layout is not None:
        raise ValueError(
            f"item {key!r} has a layout, but files of this package have their own. Remove the item's layout."
        )
    if item.resharder is None:
        return
    if type(item.resharder) is not DefaultResharder:
        raise ValueError(f"item {key!r} must have a DefaultResharder or none, got {type(item.resharder).__name__}.")
    if any(isinstance(value, CheckpointableTensor) for value in pytree.tree_leaves(item.value)):
        raise ValueError(f"item {key!r} has shards that are not DTensors. Make them DTensors.")


def _then(future: Future[Any], function: Callable[[], object]) -> Future[None]:
    """Calls ``function`` when ``future`` succeeds. Returns a future of both, with the error of the one that fails."""
    result: Future[None] = Future()

    def follow(done: Future[Any]) -> None:
        try:
            done.result()
            function()
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(None)

    future.add_done_callback(follow)
    return result
