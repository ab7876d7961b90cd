"""Loading checkpoints of any format that DCP reads: `open_reader`."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ._formats.rename import Renaming, Rules
from ._formats.safetensors import SHARDING, saved_offsets
from ._loading.deliver import LoadOptions
from ._loading.model_reader import ModelReader
from ._loading.torch_reader import TorchReader
from ._loading.validate import ReadFrom, contents, format_of, has_data, nothing_committed, unreadable
from ._publish.model import WeightFile, read_weight_files
from ._runtime.ranks import rank_of_job
from ._runtime.validation import check_path
from ._storage.base import TIMEOUT, Storage
from ._storage.open import absolute_path, is_location
from ._storage.redact import redact
from ._tiers.tiered_storage import nearest
from .errors import CheckpointError, DecryptionError, MetadataError, ReadError
from .reader import ReaderOptions, TensorizerStorageReader

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["AnyFormatReader", "open_reader"]

logger = logging.getLogger("dcp_tensorizer")


def open_reader(
    path: str | os.PathLike[str],
    *,
    rename: Rules | None = None,
    **options: Unpack[ReaderOptions],
) -> StorageReader:
    """A reader for ``dcp.load`` that recognises the format of the checkpoint at a path.

    It reads checkpoints of this package, of torch's ``FileSystemWriter`` and ``FsspecWriter``, and directories of
    safetensors files as Hugging Face has them: those that the index names. Parts of tensors, which torch's
    ``HuggingFaceStorageWriter`` leaves without consolidation, are read by torch's own reader, from local directories.
    FP8 weights with a scale for each block (``weight_scale_inv``) are multiplied, unless the target is of the same FP8
    dtype. The format is recognised anew in each load, so that a job may switch its storage between two
    saves.

    No code of a checkpoint runs, whatever its format. torch's ``.metadata`` is a pickle, of which only DCP's own
    records are built. Objects load under the same rules as those of this package. ``allow_pickle=True`` lifts the rules
    for both.

    Args:
        path: A local path, or any URL that fsspec opens. The ``checkpoint_id`` of ``dcp.load`` overrides it.
        rename: The rules by which a model was, or would be, saved (see `SafetensorsStorageWriter`), used the other way
            round: its tensors get the names, and the shapes, that they have in the state dict. Only for safetensors.
        options: Options of `TensorizerStorageReader`. For torch's own format only ``storage_options``, ``timeout`` and
            ``allow_pickle`` apply; for safetensors ``storage_options``, ``timeout``, ``thread_count``, ``page_cache``
            and ``on_progress``. ``encryption`` is refused for both.

    Raises:
        ValueError, TypeError: an argument is invalid.

    ``dcp.load`` then raises, on each rank:
        NotCommitted: there is nothing at the path.
        MetadataError: it is of none of these formats; the message says what was found.
        ReadError: ``rename`` does not fit the model, or something else than a model is there.
    """
    return AnyFormatReader(path, rename=rename, **options)


class AnyFormatReader(StorageReader):
    """Recognises the format at the beginning of each load, and passes DCP's calls to the reader of that format.

    The arguments are those of `open_reader`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rename: Rules | None = None,
        **options: Unpack[ReaderOptions],
    ) -> None:
        TensorizerStorageReader(path, **options)  # checks the arguments
        Renaming(rename or {}).inverse()
        self._rename = rename
        self._path: str | os.PathLike[str] = absolute_path(path)
        self._root = path
        self._options = options
        self._storage = nearest(
            path, options.get("storage_options"), options.get("timeout", TIMEOUT), options.get("local")
        )
        self._extensions: Any = None  # set by `install`: decoders of streams that torch's own writer has encoded
        self._reader: StorageReader | None = None
        self._error: CheckpointError | None = None

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The checkpoint that is loaded."""
        return self._path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Called by DCP before a load, with the ``checkpoint_id`` if there is one."""
        if checkpoint_id:
            check_path(checkpoint_id)
            self._path = absolute_path(checkpoint_id)
        self._reader = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Recognises the format, and reads the metadata; with ``rank=`` that rank's own.

        DCP swallows an error here, and asks again for the rank's own. Then the error is kept for
        `set_up_storage_reader`, where DCP sends it to every rank.

        Raises:
            CheckpointError: there is nothing, or nothing that can be loaded; only without ``rank``.
        """
        if kwargs.get("rank") is None:
            self._reader = self._error = None
        if self._reader is None and self._error is None:
            try:
                self._reader = self._open()
            except CheckpointError as error:
                self._error = error
                raise
        if self._reader is None:
            assert self._error is not None
            return unreadable(self._error)
        return self._reader.read_metadata(*args, **kwargs)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises the error of `read_metadata`, if there was one; otherwise calls the format's reader."""
        if self._error is not None:
            raise self._error
        self._chosen.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Calls the format's reader."""
        return self._chosen.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Calls the format's reader.

        Raises:
            MetadataError: ranks have found several formats, because another job replaces the checkpoint; no target has
                changed.
        """
        if not isinstance(self._chosen, TensorizerStorageReader):  # which checks this itself
            others = [rank for rank, plan in enumerate(plans) if isinstance(plan.storage_data, ReadFrom)]
            if others:
                raise MetadataError(
                    f"{redact(str(self._path))} was overwritten while its metadata was read: rank {others[0]} found a "
                    f"checkpoint of another format there than the coordinator. No target has changed. Load it again, "
                    f"or load another checkpoint."
                )
        return self._chosen.prepare_global_plan(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Calls the format's reader."""
        return self._chosen.read_data(plan, planner)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether it is a local path, or a URL of a known protocol. It is not opened."""
        return is_location(checkpoint_id)

    @property
    def _chosen(self) -> StorageReader:
        assert self._reader is not None, "read_metadata comes first"
        return self._reader

    def _open(self) -> StorageReader:
        """The reader for the checkpoint at the path; raises `CheckpointError` if there is none that can be loaded."""
        storage = self._storage(self._path)
        found = format_of(storage, rank_of_job()) if storage.file_in_place() is None else None
        if found is None:
            raise _unknown(storage)
        if self._rename is not None and found != "safetensors":
            raise ReadError(f"{storage.path} is of the format {found}, and rename= is for models of safetensors")
        if found == "dcp_tensorizer":
            reader = TensorizerStorageReader(self._root, **self._options)
            reader.reset(self._path)
            return reader
        if self._options.get("encryption") is not None:
            raise DecryptionError(f"{storage.path} is of the format {found}, which is not encrypted: leave the key out")
        if found == "dcp":
            trusts = bool(self._options.get("allow_pickle"))
            return TorchReader(storage, allow_pickle=trusts, extensions=self._extensions)
        threads = self._options.get("thread_count")
        files = read_weight_files(storage)
        has_parts = any(SHARDING in file.notes for file in files)
        if has_parts and self._rename is None and isinstance(self._path, os.PathLike):  # torch puts them together
            for file in files:
                _check_parts(f"{storage.path}/{file.name}", file)
            return HuggingFaceStorageReader(os.fspath(self._path), threads or 1)
        options = LoadOptions(False, False, threads, self._options.get("page_cache"))
        progress = self._options.get("on_progress") or (lambda done, total: None)
        return ModelReader(storage, files, self._rename or {}, options, progress)


def _check_parts(path: str, file: WeightFile) -> None:
    """Raises `MetadataError` unless torch can find where each tensor of a file belongs in the whole one."""
    try:
        offsets = saved_offsets(file.notes)
    except ValueError as error:
        raise MetadataError(f"{path}: the note {SHARDING} is damaged: {error}") from None
    for tensor in file.tensors if file.notes.get(SHARDING) else ():
        offset = offsets.get(tensor.key, ())
        ends = [start + size for start, size in zip(offset, tensor.shape, strict=False)]
        if len(offset) != len(tensor.shape) or max(ends, default=0) > 2**63 - 1:
            raise MetadataError(f"{path}: the note {SHARDING} does not have the offset of {tensor.key!r}")


def _unknown(storage: Storage) -> CheckpointError:
    if storage.file_in_place() is not None or has_data(storage):
        return nothing_committed(storage)
    found = contents(storage)
    return MetadataError(
        f"{storage.path} holds no checkpoint that can be loaded: {found}. Checkpoints are directories with a .metadata "
        f"in them, or with files of safetensors. `dcp-tensorizer convert` reads more formats."
    )
