"""Loading: `TensorizerStorageReader`, the storage reader for ``torch.distributed.checkpoint``.

.metadata --DCP planner--> LoadPlan --_plan--> byte ranges, sorted and coalesced
          --_fetch--> parallel reads into the targets' memory --> block digests --> planner.commit_tensor
"""

from __future__ import annotations

import io
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ._format.chunks import Region, covers
from ._format.encryption import Cipher, check_decryption, unlock
from ._format.layout import StoredItem, metadata_file_name
from ._format.metadata import item_key
from ._format.objects import unsafe_globals
from ._loading.executor import ReadTarget, can_read_in_place, fetch
from ._loading.metadata_reader import read_metadata
from ._loading.read_planner import ReadRequest
from ._memory.garbage import collector_paused
from ._memory.tensor_bytes import named_dtype
from ._storage.base import TIMEOUT, Storage
from ._storage.open import open_storage
from ._storage.redact import redact
from ._threads import in_threads
from ._torch_compat import local_elements
from .errors import CheckpointError, MetadataError, NotCommitted, ReadError, UntrustedObject

if TYPE_CHECKING:
    from ._format.encryption import DecryptionParams

__all__ = ["TensorizerStorageReader"]

logger = logging.getLogger("dcp_tensorizer")
_LOG_SECONDS = 10.0


class TensorizerStorageReader(StorageReader):
    """Loads what `TensorizerStorageWriter` saved, onto any number of ranks and any sharding.

    Each rank reads the bytes it needs and no others, in parallel, straight into its tensors where their dtype and
    memory layout allow.

    Args:
        path: The checkpoint: a local path, or any URL that fsspec opens. The ``checkpoint_id`` of ``dcp.load``
            overrides it.
        storage_options: Passed to the fsspec filesystem.
        verify: Compare everything that is read with the digests that were stored with it. Without it, lengths,
            coverage and the metadata's own digest are still checked.
        allow_pickle: Load objects that the weights-only rules of ``torch.load`` refuse. They can run any code:
            only for checkpoints that you trust as you trust a program.
        thread_count: Parallel reads; None for a number that suits the storage.
        timeout: Seconds after which a wait for a remote storage is given up. Requests to S3 and SFTP servers that stay
            silent for a tenth of that are tried again.
        on_progress: Called while tensors are read, with the bytes that are done and the bytes in all; by several
            threads, one at a time.
        encryption: The key, or the passphrase, of an encrypted checkpoint (`tensorizer.DecryptionParams`). With one, a
            checkpoint that is not encrypted is refused.

    Raises:
        DecryptionError: there is a key, and no libsodium.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        verify: bool = True,
        allow_pickle: bool = False,
        thread_count: int | None = None,
        timeout: float = TIMEOUT,
        on_progress: Callable[[int, int], object] | None = None,
        encryption: DecryptionParams | None = None,
    ) -> None:
        super().__init__()
        if encryption is not None:
            check_decryption(encryption)
        self._path = path
        self._options = dict(storage_options or {})
        self._verify = verify
        self._allow_pickle = allow_pickle
        self._threads = thread_count
        self._timeout = timeout
        self._on_progress = on_progress
        self._encryption = encryption
        self._cipher: Cipher | None = None
        self._storage: Storage | None = None
        self._metadata: Metadata | None = None
        self._error: CheckpointError | None = None

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The checkpoint that is loaded."""
        return self._path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Called by DCP before a load that is given a ``checkpoint_id``."""
        if checkpoint_id:
            self._path = checkpoint_id
        self._storage = self._metadata = self._error = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads the checkpoint's metadata, or with ``rank=`` that rank's own.

        DCP swallows what is raised here and asks again for the rank's own; on the rank that answers it skips the
        collectives that the other ranks wait in. So a checkpoint of all ranks never answers that, and an error is
        kept for `set_up_storage_reader`, where DCP hands it to every rank.

        Raises:
            NotCommitted: there is no metadata of all ranks, and ``rank`` was not given.
        """
        rank = kwargs.get("rank")
        self._error = None
        try:
            self._storage = open_storage(self._path, self._options, self._timeout)
            metadata = read_metadata(self._storage, rank)
            if metadata is None and rank is None:
                raise NotCommitted(f"{self._storage.path} has no {metadata_file_name()}")
            if rank is not None:
                self._check_world(metadata)
        except NotCommitted as error:
            if rank is None:
                raise
            self._error = error
        except CheckpointError as error:
            self._error = error
        except Exception as error:
            self._error = MetadataError(f"{redact(str(self._path))} cannot be read: {type(error).__name__}: {error}")
        else:
            assert metadata is not None
            self._metadata = metadata
            return metadata
        return Metadata({}, planner_data={}, storage_meta=StorageMeta())

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises what `read_metadata` could not; keeps what it found, and looks whether the key is its key.

        Raises:
            DecryptionError: the checkpoint is encrypted with another key, or is encrypted and there is none, or is not.
        """
        if self._error is not None:
            raise self._error
        self._metadata = metadata
        self._cipher = self._unlock()
        self._ranks = _ranks()
        self._per_rank = not kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Checks, before any target changes, that everything the plan asks for is there.

        Raises:
            MetadataError: the stored chunks of a tensor do not cover it; names the key.
            ReadError: a file is missing or has another size than when it was saved.
        """
        with collector_paused():
            if not self._per_rank:
                for key in {read_item.storage_index.fqn for read_item in plan.items}:
                    self._check_coverage(key)
            files = {self._stored(read_item.storage_index).file for read_item in plan.items}
        self._check_files(files - {""})
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Every rank reads for itself; nothing to arrange."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads everything in the plan into the targets that the planner gives.

        Raises:
            MetadataError: this rank saved other parts of a tensor for itself than its target holds; names the key.
            ReadError: stored bytes cannot be read, or do not fit their target; names key and file.
            ChecksumMismatch: stored bytes are not the ones that were saved; names key, file and offset.
            UntrustedObject: an object would need code to run; names key and type.
        """
        started = time.monotonic()
        if self._per_rank:
            self._check_own(plan, getattr(planner, "state_dict", {}))
        with collector_paused():
            stored = [self._stored(read_item.storage_index) for read_item in plan.items]
            blobs = [(i, item) for i, item in zip(plan.items, stored, strict=True) if item.kind != "tensor"]
            tensors = [(i, item) for i, item in zip(plan.items, stored, strict=True) if item.kind == "tensor"]
            targets = [planner.resolve_tensor(i).detach() for i, _ in tensors]
            wanted = [self._wanted(i, item, target) for (i, item), target in zip(tensors, targets, strict=True)]
        contents, moved = self._read_blobs(blobs)
        moved += self._fetch([w for w in wanted if w is not None], self._progress(started))
        for (read_item, _), target in zip(tensors, targets, strict=True):
            planner.commit_tensor(read_item, target)
        for (read_item, _), content in zip(blobs, contents, strict=True):
            self._deliver(read_item, content, planner)
        seconds = time.monotonic() - started
        logger.info(
            "loaded %s: %d items, %.1f MB in %.2f s (%.2f GB/s)",
            self._opened.path,
            len(plan.items),
            moved / 1e6,
            seconds,
            moved / 1e9 / max(seconds, 1e-9),
        )
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path or URL may be a checkpoint; whether it is shows when it is read."""
        return isinstance(checkpoint_id, str | os.PathLike)

    @property
    def _opened(self) -> Storage:
        assert self._storage is not None, "read_metadata comes first"
        return self._storage

    @property
    def _content(self) -> dict[str, Any]:
        assert self._metadata is not None, "read_metadata comes first"
        return self._metadata.storage_data  # type: ignore[no-any-return]

    def _unlock(self) -> Cipher | None:
        """The checkpoint's key, before any target changes."""
        record = self._content.get("encryption")
        if self._cipher is not None and record is not None and self._cipher.opens(record["check"]):
            return self._cipher  # deriving it from a passphrase takes long
        return unlock(self._encryption, record, self._opened.path)

    def _check_world(self, metadata: Metadata | None) -> None:
        """Every rank of a checkpoint saved without collectives must be there, seen alike by all ranks."""
        world, storage = _ranks(), self._opened
        if storage.head(metadata_file_name(0)) is None:
            raise NotCommitted(
                f"{storage.path} holds no committed checkpoint: there is no {metadata_file_name()}. The path is wrong, "
                f"or the save that wrote there never finished."
            )
        alike = storage.head(metadata_file_name(world - 1)) is not None
        if metadata is None or not alike or storage.head(metadata_file_name(world)) is not None:
            raise MetadataError(
                f"{storage.path} was saved with use_collectives=False, each rank for itself, by another number of "
                f"ranks than the {world} that load it: load it with as many"
            )

    def _stored(self, index: MetadataIndex) -> StoredItem:
        stored = self._content["items"].get(item_key(index))
        if stored is None:
            raise MetadataError(f"{self._opened.path} has no data for {index.fqn!r} at offset {index.offset}")
        return StoredItem(*stored)

    def _check_coverage(self, key: str) -> None:
        assert self._metadata is not None
        entry = self._metadata.state_dict_metadata[key]
        if isinstance(entry, TensorStorageMetadata):
            chunks = [Region(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
            if not covers(entry.size, chunks):
                held = sum(math.prod(chunk.size) for chunk in chunks)
                raise MetadataError(
                    f"{self._opened.path}: the stored chunks of {key!r}, {held:,} elements in all, do not make up its "
                    f"{math.prod(entry.size):,}: a rank's part is missing, or there twice"
                )

    def _check_own(self, plan: LoadPlan, targets: Mapping[str, Any]) -> None:
        """Of what was saved without collectives a rank sees only its own: that must be all that its targets hold."""
        assert self._metadata is not None
        found: Counter[str] = Counter()
        for read_item in plan.items:
            found[read_item.dest_index.fqn] += math.prod(read_item.lengths)
        for key, target in targets.items():
            if not isinstance(self._metadata.state_dict_metadata.get(key), TensorStorageMetadata):
                continue
            wanted = local_elements(target)
            if found[key] != wanted:
                raise MetadataError(
                    f"{self._opened.path} holds {found[key]:,} of the {wanted:,} elements of {key!r} that this rank "
                    f"loads: it was saved with use_collectives=False, each rank for itself, with another sharding, or "
                    f"with the ranks in another order; load it as it was saved"
                )

    def _check_files(self, names: set[str]) -> None:
        ordered = sorted(names)
        for name, found in zip(ordered, in_threads(self._opened.head, ordered), strict=True):
            expected = self._content["files"][name]
            if found != expected:
                state = "is missing" if found is None else f"has {found:,} bytes instead of {expected:,}"
                raise ReadError(
                    f"{self._opened.path}/{name} {state}. The checkpoint is damaged, or is being overwritten: "
                    f"load another one."
                )

    def _wanted(self, read_item: ReadItem, stored: StoredItem, target: torch.Tensor) -> ReadTarget | None:
        """What to fetch for a tensor; None where there is nothing to."""
        key = read_item.dest_index.fqn
        dtype = named_dtype(stored.dtype)
        region = Region(tuple(read_item.storage_offsets), tuple(read_item.lengths))
        if target.shape != region.size:
            raise ReadError(f"{key!r}: stored {region.size} do not fit a target of {tuple(target.shape)}")
        if _is_expanded(target):
            raise ReadError(
                f"{key!r}: the elements of its target share memory (it is expanded): load into a clone of it"
            )
        if target.dtype != dtype:
            if not torch.can_cast(dtype, target.dtype):
                raise ReadError(
                    f"{key!r} is stored as {dtype}, which does not convert to the {target.dtype} of its target: "
                    f"load it into a tensor of {dtype}"
                )
            logger.warning("%r is stored as %s and is converted to the %s of its target", key, dtype, target.dtype)
        if not math.prod(region.size):
            return None
        shape = self._chunk_shape(read_item.storage_index)
        if math.prod(shape) * dtype.itemsize != stored.length:
            raise MetadataError(f"{self._opened.path}: {key!r} of shape {shape} has {stored.length:,} bytes stored")
        request = ReadRequest(stored, shape, dtype.itemsize, region, can_read_in_place(target, dtype))
        return ReadTarget(key, request, target, shared=self._ranks > 1 and self._is_shared(request, read_item))

    def _is_shared(self, request: ReadRequest, read_item: ReadItem) -> bool:
        """Whether other ranks most likely read the same bytes: of a replicated tensor, or for other columns."""
        return request.region.size == self._entry(read_item.storage_index).size or request.run is None

    def _entry(self, index: MetadataIndex) -> TensorStorageMetadata:
        assert self._metadata is not None
        entry = self._metadata.state_dict_metadata[index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        return entry

    def _chunk_shape(self, index: MetadataIndex) -> tuple[int, ...]:
        entry = self._entry(index)
        hint = entry.chunks[index.index : index.index + 1] if index.index is not None else []
        for chunk in (*hint, *entry.chunks):
            if chunk.offsets == index.offset:
                return tuple(chunk.sizes)
        raise MetadataError(f"{self._opened.path} has no chunk of {index.fqn!r} at offset {index.offset}")

    def _fetch(self, wanted: list[ReadTarget], progress: Callable[[int, int], object]) -> int:
        return fetch(
            self._opened, wanted, threads=self._threads, verify=self._verify, progress=progress, cipher=self._cipher
        )

    def _progress(self, started: float) -> Callable[[int, int], None]:
        """Tells the user's callback, and the log of a load that takes long."""
        said = started

        def progress(done: int, total: int) -> None:
            nonlocal said
            if self._on_progress is not None:
                self._on_progress(done, total)
            now = time.monotonic()
            if now - said >= _LOG_SECONDS:
                said = now
                rate = done / 1e9 / (now - started)
                logger.info("loading %s: %.1f of %.1f GB, %.2f GB/s", self._opened.path, done / 1e9, total / 1e9, rate)

        return progress

    def _read_blobs(self, blobs: list[tuple[ReadItem, StoredItem]]) -> tuple[list[bytes], int]:
        """The contents of what `torch.save` made, all of them checked before any is unpickled."""
        wanted = []
        for read_item, stored in blobs:
            region = Region((0,), (stored.length,))
            request = ReadRequest(stored, (stored.length,), 1, region, in_place=True)
            target = torch.empty(stored.length, dtype=torch.uint8)
            wanted.append(ReadTarget(read_item.dest_index.fqn, request, target))
        moved = self._fetch([w for w in wanted if w.request.item.length], lambda done, total: None)
        contents = [bytes(w.target.numpy().data) for w in wanted]
        if not self._allow_pickle:
            checked: set[bytes] = set()
            for w, content in zip(wanted, contents, strict=True):
                if content not in checked:
                    self._check_trust(w.key, content)
                    checked.add(content)
        return contents, moved

    def _check_trust(self, key: str, content: bytes) -> None:
        try:
            torch.load(io.BytesIO(content), weights_only=True)
        except Exception as error:
            refused = ", ".join(unsafe_globals(content)) or f"{type(error).__name__}: {error}"
            raise UntrustedObject(
                f"{key!r} in {self._opened.path} is an object that could run code when it is loaded ({refused}). If "
                f"you trust it, pass those types to torch.serialization.add_safe_globals, or allow_pickle=True to "
                f"TensorizerStorageReader."
            ) from None

    def _deliver(self, read_item: ReadItem, content: bytes, planner: LoadPlanner) -> None:
        if read_item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(read_item, io.BytesIO(content))
            return
        tensor = torch.load(io.BytesIO(content), weights_only=not self._allow_pickle)
        for dim, (start, length) in enumerate(zip(read_item.storage_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        target = planner.resolve_tensor(read_item).detach()
        target.copy_(tensor)
        planner.commit_tensor(read_item, target)


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor share memory."""
    if tensor.is_contiguous():
        return False
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
