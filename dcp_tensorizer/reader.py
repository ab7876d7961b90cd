"""Loading: `TensorizerStorageReader`, the storage reader for ``torch.distributed.checkpoint``, and `open_reader`."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ._formats.catalog import Catalog, check_coverage
from ._formats.hugging_face import ModelCatalog
from ._formats.own import check_world_size, read_index, read_metadata
from ._formats.recognise import contents, format_of, has_data, not_committed, nothing_committed
from ._formats.rename import Renaming, Rules
from ._formats.torch_dcp import TorchCatalog
from ._loading.deliver import Load, LoadOptions, check_one_save, warn_of_empty_dicts
from ._loading.exchange import ReadFrom, identity_of, members_of, reads_alone
from ._loading.report import LoadClock, LoadReport, publish
from ._loading.run import check_files
from ._planning.read_items import RetainedPlan
from ._runtime.interpreter import collector_paused
from ._runtime.progress import TransferProgress
from ._runtime.ranks import rank_of_job, world_size_of_job
from ._runtime.validation import (
    check_callable,
    check_count,
    check_path,
    check_storage_options,
    check_timeout,
)
from ._storage.base import TIMEOUT, Storage
from ._storage.open import absolute_path, check_location, is_location
from ._storage.redact import redact, shown
from ._tensor_file.encryption import Cipher, check_decryption, unlock
from ._tensor_file.names import metadata_file_name
from ._tiers.tiered_storage import nearest
from .errors import CheckpointError, DecryptionError, MetadataError, NotCommitted, ReadError, UntrustedObject

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._tensor_file.encryption import DecryptionParams

__all__ = ["AnyFormatReader", "LoadReport", "ReaderOptions", "TensorizerStorageReader", "open_reader"]


class ReaderOptions(TypedDict, total=False):
    """The options of `TensorizerStorageReader`, for type checks of functions that pass them on."""

    storage_options: Mapping[str, Any] | None
    verify: bool
    allow_pickle: bool
    thread_count: int | None
    page_cache: bool | None
    timeout: float
    encryption: DecryptionParams | None
    exchange: dist.ProcessGroup | None
    on_progress: Callable[[int, int], object] | None
    on_report: Callable[[LoadReport], object] | None
    local: str | os.PathLike[str] | None


class TensorizerStorageReader(StorageReader):
    """A storage reader for checkpoints of `TensorizerStorageWriter`, for any number of ranks and any sharding.

    Each rank reads only the bytes that it needs, in parallel, and directly into its tensors if their dtype and memory
    layout allow that.

    Args:
        path: The checkpoint: a local path, or any URL that fsspec opens. The ``checkpoint_id`` of ``dcp.load``
            overrides it.
        storage_options: Options of a URL's storage, such as credentials.
        verify: Compare everything that is read with its stored digests. Lengths, coverage and the metadata's own digest
            are always checked.
        allow_pickle: Load objects of any type. Loading them can run any code: set ``allow_pickle`` only for checkpoints
            that you trust as you trust a program. Without it, only common data types of the standard library, NumPy and
            torch can be loaded, and types passed to ``torch.serialization.add_safe_globals``.
        thread_count: The number of parallel reads; None: the storage's default.
        page_cache: Leave the data of local disks in the page cache, for the next load. None: only if free memory can
            hold twice the bytes that the ranks of this machine read.
        timeout: Seconds until a wait for a remote storage times out; 600 by default. If an S3 or SFTP server does not
            respond for a tenth of this time, the reader repeats the request.
        encryption: The key, or the passphrase, of an encrypted checkpoint (`tensorizer.DecryptionParams`). If it is
            given, loading an unencrypted checkpoint is an error.
        on_progress: Called with the bytes that this rank has loaded and the bytes that it loads in all, before the
            first tensor is read and often after that. Several threads call it, one at a time. `ProgressLine` shows the
            bytes on a terminal.
        exchange: A process group whose ranks read shared data only once: for data that all of them need, each rank
            reads a part, and the ranks exchange the parts. Use it if ranks hold the same state (DDP; for HSDP, pass the
            group of the replicas), and the network between ranks is faster than the storage. An exchange takes up to
            240 MB of memory. All ranks of the group must load together.
        on_report: Called with the `LoadReport` of each load, on the thread that loads. Errors of the callback are
            logged, and do not fail the load.
        local: The writer's ``local`` folder. Files that are complete in this folder are read from it. With ``local``,
            ``path`` must be the writer's path: pass the checkpoint below that path as the ``checkpoint_id`` of
            ``dcp.load``.

    Attributes:
        load_id: The id of the load, in its report and in ``storage_meta`` of the metadata. `reset` makes a new one.
        around_read: Returns the context manager in which this rank reads its data; for `CheckpointManager`.

    Raises:
        ValueError, TypeError: an argument is invalid.
        DecryptionError: a key was given, but libsodium is missing.
        WriteError: the path is relative, but there is no working directory; the protocol of the URL is unknown; or a
            library that the protocol needs is missing.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        verify: bool = True,
        allow_pickle: bool = False,
        thread_count: int | None = None,
        page_cache: bool | None = None,
        timeout: float = TIMEOUT,
        encryption: DecryptionParams | None = None,
        exchange: dist.ProcessGroup | None = None,
        on_progress: Callable[[int, int], object] | None = None,
        on_report: Callable[[LoadReport], object] | None = None,
        local: str | os.PathLike[str] | None = None,
    ) -> None:
        self._options = check_storage_options(storage_options)
        self._path: str | os.PathLike[str] = check_location(path, self._options)
        thread_count = check_count("thread_count", thread_count, optional=True)
        timeout = check_timeout(timeout)
        check_callable("on_progress", on_progress)
        check_callable("on_report", on_report)
        if encryption is not None:
            check_decryption(encryption)
        self._load_options = LoadOptions(verify, allow_pickle, thread_count, page_cache)
        self._open = nearest(path, self._options, timeout, local)
        self._timeout = timeout
        self._encryption = encryption
        self._exchange = members_of(exchange)
        self._on_progress = on_progress
        self._on_report = on_report
        self._last_report: LoadReport | None = None
        self._cipher: Cipher | None = None
        self._storage: Storage | None = None
        self._catalog: Catalog | None = None
        self._plan: RetainedPlan | None = None
        self._load: Load | None = None
        self._metadata: Metadata | None = None
        self._error: CheckpointError | None = None
        self._is_own_save = False
        self.load_id = uuid.uuid4().hex
        self._clock = LoadClock()
        self.around_read: Callable[[], AbstractContextManager[object]] = nullcontext

    def __repr__(self) -> str:
        arguments = {
            "verify": self._load_options.verify,
            "allow_pickle": self._load_options.allow_pickle,
            "thread_count": self._load_options.threads,
            "page_cache": self._load_options.page_cache,
            "timeout": self._timeout,
            "encryption": self._encryption is not None,
        }
        return shown(self, self._path, self._options, arguments)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The path or URL of the checkpoint."""
        return self._path

    @property
    def last_report(self) -> LoadReport | None:
        """The report of the last load; None before the end of the first."""
        return self._last_report

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Starts a new load, of ``checkpoint_id`` if that is given. DCP calls it before a load."""
        if checkpoint_id:
            check_path(checkpoint_id)
            self._path = absolute_path(checkpoint_id)
        self.load_id = uuid.uuid4().hex
        self._storage = self._catalog = self._plan = self._load = self._metadata = self._error = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads the checkpoint's metadata; with ``rank=``, that rank's own.

        Describes a tensor as one chunk if its stored chunks cover it. Otherwise, for example because each rank saved
        by itself, describes the stored chunks, as `stored_metadata` does.

        DCP swallows errors of this method. So without ``rank=`` the method raises only `NotCommitted`, and with
        ``rank=`` it raises nothing. `set_up_storage_reader` raises the recorded error, or the returned metadata raises
        it when a planner reads the metadata earlier.

        Raises:
            NotCommitted: there is no metadata of all ranks, and ``rank`` was not given.
        """
        rank = kwargs.get("rank")
        self._error = None
        self._is_own_save = rank is not None
        if rank is None:  # DCP's first call
            self._clock = LoadClock()
        try:
            self._storage, self._catalog = self._find(rank)
            metadata = self._catalog.metadata()
            metadata.storage_meta = metadata.storage_meta or StorageMeta()
            metadata.storage_meta.load_id = self.load_id
        except NotCommitted as error:
            if rank is None:
                raise
            self._error = error
        except CheckpointError as error:
            self._error = error
        except Exception as error:
            self._error = MetadataError(f"{redact(str(self._path))} cannot be read: {type(error).__name__}: {error}")
        else:
            self._metadata = metadata
            self._clock.has_metadata()
            return metadata
        return Metadata(_Unreadable(self._error), planner_data={}, storage_meta=StorageMeta(load_id=self.load_id))

    def stored_metadata(self, *, rank: int | None = None) -> Metadata:
        """Returns the checkpoint's metadata with each chunk as it is stored; with ``rank``, that rank's own.

        The ``storage_data`` is a dict: ``files`` has the size of each data file by name, and ``items`` the location of
        each chunk and each object.

        Raises:
            NotCommitted: no checkpoint is committed at the path, or, with ``rank``, that rank has no metadata there.
            MetadataError: the metadata is damaged, or of another format.
            ReadError: the metadata cannot be read.
        """
        storage = self._open(self._path)
        metadata = read_metadata(storage, rank)
        if metadata is None:
            raise nothing_committed(storage)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Sets the metadata, and checks the key. If `read_metadata` has recorded an error, raises that error.

        Raises:
            DecryptionError: the key is missing, wrong, or given for an unencrypted checkpoint; or the metadata was
                changed without the key.
        """
        if self._error is not None:
            raise self._error
        storage, catalog = self._opened()
        self._metadata = metadata
        self._cipher = unlock(self._encryption, catalog.encryption, storage.path, self._cipher)
        self._rank = kwargs.get("rank", 0)
        self._per_rank = self._reads_alone = not kwargs.get("use_collectives", True)

    def read_objects(self, keys: Collection[str]) -> dict[str, Any]:
        """Reads objects of the checkpoint whose metadata was read, before its load is planned; for `CheckpointManager`.

        Raises the same errors as `set_up_storage_reader`, `prepare_local_plan` and `read_data`.
        """
        storage, catalog = self._opened()
        assert self._metadata is not None
        self._cipher = unlock(self._encryption, catalog.encryption, storage.path, self._cipher)
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(dict.fromkeys(keys), self._metadata)
        plan = planner.create_local_plan()
        options, metadata, cipher = self._load_options, self._metadata, self._cipher
        load = Load(storage, catalog, options, metadata, plan.items, cipher, is_own=False, note=lambda span: None)
        check_files(storage, catalog.files, load.files & catalog.files.keys())
        load.run(plan, planner, None, lambda done, total: None)
        return planner.state_dict

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Checks, before any target changes, that everything in the plan is stored.

        Raises:
            MetadataError: something in the plan is not stored, or the stored chunks of a tensor do not cover it; names
                the key.
            ReadError: a file is missing, or does not have the recorded size; or the metadata cannot be read.
        """
        storage, catalog = self._opened()
        with collector_paused():
            if not self._per_rank:
                check_coverage(storage.path, catalog, (read_item.storage_index.fqn for read_item in plan.items))
            self._load = self._begin(plan)
        check_files(storage, catalog.files, self._load.files & catalog.files.keys())
        # If each rank saved by itself, each reads its own save, and the save ids differ.
        read_from = ReadFrom("" if self._is_own_save else self._save_id, *identity_of(self._group))
        self._plan = RetainedPlan.keep(plan, self._rank, read_from)
        return self._plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Checks that all ranks have read metadata with the same save id: another job may have replaced the checkpoint.

        Raises:
            MetadataError: the ranks have read different metadata, or the planner has dropped ``storage_data`` from a
                plan; no target has changed.
            ReadError: some ranks of the ``exchange`` group do not load, or do not pass the group.
        """
        path, carried = self._opened()[0].path, [plan.storage_data for plan in plans]
        check_one_save(path, carried)
        self._reads_alone |= reads_alone(path, self._group, carried)
        for rank, plan in enumerate(plans):
            if isinstance(plan, RetainedPlan):
                plan.send_to(rank)
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads everything in the plan into the planner's targets.

        Raises:
            MetadataError: each rank saved by itself, and the parts of a tensor that this rank saved are not the parts
                that the target holds; names the key.
            ReadError: stored bytes cannot be read, or do not fit their target; names the key and, where known, the
                file.
            ChecksumMismatch: stored bytes are not the ones that were saved; names key, file and offset.
            UntrustedObject: objects could run code; names the first key and, where known, all types; no target has
                changed.
        """
        with self.around_read():
            self._clock.begin_reading()
            storage, _ = self._opened()
            warn_of_empty_dicts(storage.path, planner)
            load = self._load or self._begin(plan)
            self._load = self._plan = None  # no longer needed
            progress = TransferProgress("loading", storage.path, self._on_progress)
            nbytes, received = load.run(plan, planner, None if self._reads_alone else self._group, progress)
            self._last_report = self._clock.report(
                path=storage.path,
                save_id=self._save_id,
                load_id=self.load_id,
                rank=self._rank,
                items=len(plan.items),
                nbytes=nbytes,
                received_bytes=received,
            )
            publish(self._last_report, self._on_report)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether ``checkpoint_id`` is a local path or a URL of a known protocol. Does not open it."""
        return is_location(checkpoint_id)

    @property
    def _save_id(self) -> str:
        """The id of the save whose metadata was read; empty if the metadata does not record it."""
        assert self._metadata is not None
        meta = self._metadata.storage_meta
        return "" if meta is None else meta.save_id or ""

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return self._exchange if self._opened()[1].has_digests else None

    def _opened(self) -> tuple[Storage, Catalog]:
        assert self._storage is not None and self._catalog is not None, "read_metadata comes first"
        return self._storage, self._catalog

    def _begin(self, plan: LoadPlan) -> Load:
        storage, catalog = self._opened()
        assert self._metadata is not None
        note = self._clock.reads.append
        return Load(
            storage, catalog, self._load_options, self._metadata, plan.items, self._cipher, self._per_rank, note
        )

    def _find(self, rank: int | None) -> tuple[Storage, Catalog]:
        """Opens the checkpoint at the path; with ``rank``, that rank's own.

        Raises `CheckpointError` if there is none.
        """
        storage = self._open(self._path)
        index = read_index(storage, rank)
        if rank is not None:
            check_world_size(storage, index is not None, world_size_of_job())
        if index is None:  # DCP then calls `read_metadata` again, with `rank=`
            raise not_committed(storage.path) if rank is None else nothing_committed(storage)
        return storage, index


class _Unreadable(dict[str, Any]):
    """The entries of an unreadable checkpoint: any access raises the error of the read.

    DCP passes the metadata to the planner before it calls `set_up_storage_reader`, which raises the error.
    """

    def __init__(self, error: CheckpointError) -> None:
        super().__init__()
        self._error = error

    def _raise(self, *arguments: object) -> NoReturn:
        raise self._error

    def __repr__(self) -> str:
        return repr(self._error)

    __contains__ = __getitem__ = __iter__ = __len__ = get = items = keys = values = _raise


def open_reader(
    path: str | os.PathLike[str],
    *,
    rename: Rules | None = None,
    **options: Unpack[ReaderOptions],
) -> AnyFormatReader:
    """Returns a reader for ``dcp.load`` that recognises the format of the checkpoint at a path.

    The reader loads checkpoints of this package, of torch's ``FileSystemWriter`` and ``FsspecWriter``, and directories
    of safetensors files in Hugging Face's layout. If such a directory has no index, the reader reads all safetensors
    files. Otherwise it reads ``model.safetensors``, or, if that file does not exist, the files that the index names.
    The files may hold parts of tensors, as torch's ``HuggingFaceStorageWriter`` writes them without consolidation. The
    reader multiplies FP8 weights by the scales of their blocks (``weight_scale_inv``), unless the target has the same
    FP8 dtype. Each load recognises the format again, so that a job may switch to another storage writer between two
    saves.

    By default, loading a checkpoint of any format runs no code from it.

    Args:
        path: A local path, or any URL that fsspec opens. The ``checkpoint_id`` of ``dcp.load`` overrides it.
        rename: The rules by which a model was, or would be, saved (see `SafetensorsStorageWriter`), applied in reverse:
            tensors get the names and shapes that they have in the state dict. Only for safetensors.
        options: Options of `TensorizerStorageReader`. ``verify`` and ``exchange`` apply only to checkpoints of this
            package, ``allow_pickle`` also to torch's own. If ``encryption`` is given, the reader refuses checkpoints of
            other packages.

    Raises:
        ValueError, TypeError: an argument is invalid.
        DecryptionError, WriteError: see `TensorizerStorageReader`.

    ``dcp.load`` then raises, on each rank, besides the errors of `TensorizerStorageReader`'s methods:
        NotCommitted: there is nothing at the path, only a file, or only data of a save that is not committed.
        MetadataError: the path holds no checkpoint in any of these formats; names what was found.
        UnsupportedFormat: the path holds the delta of a published version, or a version of this package's format that
            this release does not read.
        ReadError: ``rename`` does not fit the model, or was given for a checkpoint that is not in the safetensors
            format.
    """
    return AnyFormatReader(path, rename=rename, **options)


class AnyFormatReader(TensorizerStorageReader):
    """A reader that recognises the checkpoint's format at the start of each load.

    The arguments are those of `open_reader`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rename: Rules | None = None,
        **options: Unpack[ReaderOptions],
    ) -> None:
        super().__init__(path, **options)
        Renaming(rename or {}).inverse()
        self._rename = rename
        self._extensions: Any = None  # decoders of streams that torch's own writer has encoded; set by `install`

    def _find(self, rank: int | None) -> tuple[Storage, Catalog]:
        storage = self._open(self._path)
        is_file = storage.file_in_place() is not None
        found = None if is_file else format_of(storage, rank_of_job())
        if found is None:
            if is_file or has_data(storage):
                raise nothing_committed(storage)
            raise MetadataError(
                f"{storage.path} is not a checkpoint that can be loaded: {contents(storage)}. Load a directory with "
                f"a .metadata, or with safetensors files. `dcp-tensorizer convert` reads more formats."
            )
        if self._rename is not None and found != "safetensors":
            raise ReadError(f"{storage.path} is in the format {found}. Omit rename=, which is for safetensors only.")
        if found == "dcp_tensorizer":
            return super()._find(rank)
        if self._encryption is not None:
            raise DecryptionError(f"{storage.path} is in the format {found}, which is not encrypted. Omit encryption=.")
        if found == "safetensors":
            # Models have no per-rank metadata: this model appeared after DCP's first call, which found nothing.
            if rank is not None:
                raise nothing_committed(storage)
            return storage, ModelCatalog(storage, self._rename)
        name = metadata_file_name(rank)
        pickled = storage.read(name)
        if pickled is None:
            raise not_committed(storage.path) if rank is None else nothing_committed(storage)
        trusts, extensions = self._load_options.allow_pickle, self._extensions
        try:
            return storage, TorchCatalog(storage, name, pickled, allow_pickle=trusts, extensions=extensions)
        except UntrustedObject as error:
            advice = "If you trust the checkpoint as you trust a program, pass allow_pickle=True to the reader."
            raise UntrustedObject(f"{error}. {advice}") from None
