"""Tensors on a GPU for another process: handles to their memory, and the copies that the other process makes.

Handles are torch's own, which count the receivers of each storage. Exporting a storage changes the storage, so this
module exports an alias, which lives until the copies are made.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from .._runtime.torch_compat import negated_view, release_ipc_counter
from .._staging.device import CUDA, Device, SideStream
from .._staging.shared_memory import SharedBuffer
from .._staging.tensor_copy import Copies, Pair
from .._staging.ways import BufferWay
from .._tensor_file.dtypes import dtype_name, named_dtype
from ..errors import StagingError, WriteError, WriterProcessDied
from .protocol import DeviceTensor, SnapshotRequest

if TYPE_CHECKING:
    from .._saving.writer_client import WriterClient

logger = logging.getLogger("dcp_tensorizer")

_MAX_DEATHS = 2  # of writer processes while copying from GPUs: each death costs the start of a process


class DeviceWay(BufferWay):
    """The strategy of ``staging="device"``: the writer process copies from GPUs; if it cannot, this process does.

    If the writer process makes no progress for ``timeout`` seconds, it is killed.
    """

    copies_from_devices = False

    def __init__(self, client: WriterClient, timeout: float) -> None:
        self._client = client
        self._timeout = timeout

    def copy_elsewhere(self, buffer: SharedBuffer, copies: Copies) -> bool:
        client = self._client
        if not client.copies_from_gpus:
            return False
        pairs = copies.on_device
        try:
            offsets = [buffer.locate(copy) or 0 for copy, _ in pairs]
            request, _aliases = export(pairs, offsets, buffer.id, copies.streams)
            try:
                client.ensure_process().ask(request, [buffer], self._timeout)
            except BaseException:
                withdraw(request.storages)
                raise
        except WriteError as error:
            # A refusal would be repeated, so no later copy is requested. A single death might not happen again, so the
            # next copy is requested.
            client.deaths += isinstance(error, WriterProcessDied)
            client.copies_from_gpus = isinstance(error, WriterProcessDied) and client.deaths < _MAX_DEATHS
            logger.warning("the trainer copies, because the writer process could not copy from the GPU: %s", str(error))
            if client.deaths == _MAX_DEATHS:
                logger.error(
                    "staging='device': the writer process died %d times while it copied from the GPU. From now on the "
                    "trainer copies. Use staging='buffer'.",
                    client.deaths,
                )
            return False
        return True


def export(
    pairs: Sequence[Pair], offsets: Sequence[int], buffer: int, streams: Mapping[int, SideStream]
) -> tuple[SnapshotRequest, list[torch.Tensor]]:
    """Makes handles to tensors on GPUs.

    ``offsets`` are those of the copies in the buffer with the number ``buffer``. ``streams`` has, for each GPU, a
    stream that is ordered after all pending work on the tensors; the function synchronizes with it. Returns the request
    for the other process, and tensors to hold until that process has responded. Raises `WriteError` if another process
    cannot open memory of this kind.
    """
    for stream in streams.values():
        stream.mark().synchronize()  # so that storages need no events, of which torch holds only 1000
    # by address and size, because storages of different sizes may begin at the same address
    numbers: dict[tuple[int, int], int] = {}
    aliases: list[torch.Tensor] = []
    storages: list[tuple[Any, ...]] = []
    tensors: list[DeviceTensor] = []
    for (_, source), offset in zip(pairs, offsets, strict=True):
        storage = source.untyped_storage()
        allocation = storage.data_ptr(), storage.nbytes()
        if allocation not in numbers:
            numbers[allocation] = len(storages)
            try:
                alias, arguments = _export_storage(storage, streams[source.device.index])
            except WriteError:
                withdraw(storages)
                raise
            aliases.append(alias)
            storages.append(arguments)
        tensors.append(
            DeviceTensor(
                storage=numbers[allocation],
                dtype=dtype_name(source.dtype),
                shape=tuple(source.shape),
                stride=tuple(source.stride()),
                storage_offset=int(source.storage_offset()),
                is_conj=source.is_conj(),
                is_neg=source.is_neg(),
                offset=offset,
            )
        )
    return SnapshotRequest(buffer, min(streams), tuple(storages), tuple(tensors)), aliases


def withdraw(storages: Sequence[tuple[Any, ...]]) -> None:
    """Releases handles that no process will open. Otherwise torch would never free their memory."""
    for arguments in storages:
        release_ipc_counter(arguments)


class Snapshots:
    """Copier of tensors on GPUs, or on a simulated device, in the writer process."""

    def __init__(self, device: Device = CUDA) -> None:
        self._streams = device.side_streams
        self._unpin: dict[int, Callable[[], None]] = {}

    def take(self, request: SnapshotRequest, memory: mmap.mmap) -> None:
        """Copies the tensors of a request to their offsets in a shared buffer, and closes the handles."""
        if request.buffer not in self._unpin:
            address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
            self._unpin[request.buffer] = lambda: None
            with suppress(StagingError):  # copies to unpinned memory are slower
                self._unpin[request.buffer] = self._streams.device.pin(address, len(memory), request.device)
        storages = [rebuild_cuda_tensor(*arguments).untyped_storage() for arguments in request.storages]
        staged = []
        for tensor in request.tensors:
            dtype, count = named_dtype(tensor.dtype), torch.Size(tensor.shape).numel()
            copy = torch.frombuffer(memory, dtype=dtype, count=count, offset=tensor.offset)
            staged.append(copy.view(tensor.shape))
        sources = [_open(tensor, storages[tensor.storage]) for tensor in request.tensors]
        self._streams.follow(sources)
        with torch.no_grad():
            copies = Copies(self._streams, sources)
            try:
                copies.add(staged)
                copies.start()
            finally:
                copies.wait()  # no copy may run after the trainer has resumed

    def retain(self, buffers: Set[int]) -> None:
        """Unregisters the buffers that are about to be unmapped: all except ``buffers``."""
        for number in self._unpin.keys() - buffers:
            self._unpin.pop(number)()


def _export_storage(storage: torch.UntypedStorage, stream: SideStream) -> tuple[torch.Tensor, tuple[Any, ...]]:
    try:
        with stream.current():
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            alias = from_dlpack(to_dlpack(whole))
            _, (*arguments, _has_to_wait) = reduce_tensor(alias)
    except RuntimeError as error:
        raise WriteError(
            f"a tensor on {storage.device} cannot be shared with the writer process: {error}. Only memory from "
            f"torch's allocator can be shared, and on some systems only without "
            f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True. Use staging='buffer'."
        ) from error
    return alias, (*arguments, False)


def _open(tensor: DeviceTensor, storage: torch.UntypedStorage) -> torch.Tensor:
    opened = torch.empty(0, dtype=named_dtype(tensor.dtype), device=storage.device)
    opened.set_(storage, tensor.storage_offset, tensor.shape, tensor.stride)
    if tensor.is_conj:
        opened = opened.conj()
    return negated_view(opened) if tensor.is_neg else opened
