"""Staging: a copy of a rank's state dict in shared memory, safe from everything training does next.

`ArenaStager.stage` walks the state dict twice: once for the sizes, and once to build a twin whose tensors live in an
arena. Nothing in the twin aliases live memory. A buffer is written to again when the save that uses it is over:
see `Lease`.
"""

from __future__ import annotations

import collections
import copy
import threading
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

# Private, and the only way to a ShardedTensor: FSDP1 still makes them.
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.remote_device import _remote_device

from ._arena import Arena, aligned, check_headroom
from ._tensors import check_supported, is_wrapper
from .errors import StagingError

__all__ = ["ArenaStager", "Lease", "StagedStateDict"]

_ATOMIC = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_Pair = tuple[torch.Tensor, torch.Tensor]
_COPY_PIECE = 32 << 20
_SHARED_COPY = 8 << 20  # below it, starting a thread costs more than it saves
# The save's thread starts when `async_save` returns and takes its staged state dict first of all: a second is a
# thousand times what that takes, and bounds what a staged state dict that nobody saves can cost.
_CLAIM_SECONDS = 1.0
# In PROCESS mode the save before may not have been taken because torch is still starting its process. Only a save's
# own thread waits so long for it, and only once.
_START_SECONDS = 60.0


class Lease:
    """One staged state dict: the buffer it is in, and the save it belongs to.

    A save has its lease when it takes the staged state dict (`StagedStateDict`), which DCP does first of all on the
    save's own thread, or in PROCESS mode when it pickles it there. The save is over when that thread has ended, or
    when nothing refers to the staged state dict and its tensors any more, whichever is first.
    """

    def __init__(self) -> None:
        self.arena: Arena | None = None
        self.error: StagingError | None = None
        self.thread: threading.Thread | None = None
        self.begun = False
        self.abandoned = False
        self.distributed = False
        self.stage_seconds = 0.0
        self._changed = threading.Condition()
        self._alive = True

    def attach(self, staged: StagedStateDict) -> None:
        """Ties the lease to the life of the staged state dict."""
        weakref.finalize(staged, self._drop).atexit = False

    def claim(self) -> None:
        """Called when a save takes the staged state dict, on the save's thread."""
        with self._changed:
            if self.thread is None:
                self.thread = threading.current_thread()
                self._changed.notify_all()

    def over(self) -> bool:
        """Whether no save can use the staged state dict any more."""
        thread = self.thread
        if thread is not None and not thread.is_alive():
            return True
        # No save has a thread of its own here: nobody took the staged state dict, or the thread that asks did, or
        # one that lives on. Then it is over when nothing is left of it.
        return not self._alive and (self.arena is None or not self.arena.in_use)

    def wait_claimed(self, timeout: float = _CLAIM_SECONDS) -> bool:
        """Waits until a save has taken it, or none can any more; False if neither happened in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self.thread is not None or not self._alive, timeout)

    def wait_over(self, timeout: float | None = None) -> bool:
        """Waits until the save is over; False if it is not after ``timeout`` seconds."""
        step = 0.02
        while not self.over():
            thread = self.thread
            if thread is threading.current_thread():
                return True  # a save that ran on the thread that asks has returned
            if timeout is not None and timeout <= 0:
                return False
            if thread is not None:
                thread.join(step)
            else:
                self.wait_claimed(step)
            timeout = None if timeout is None else timeout - step
        return True

    def _drop(self) -> None:
        with self._changed:
            self._alive = False
            self._changed.notify_all()


class StagedStateDict(dict[str, Any]):
    """A staged state dict that knows which thread takes it to save it.

    ``dcp.save`` goes through ``items()`` before anything else, in particular before any collective, and PROCESS mode
    pickles it; there the save waits until the ones staged before are over. So saves run one at a time, in the order
    in which they were staged, on every rank the same.
    """

    def __init__(self, content: Mapping[str, Any], lease: Lease, stager: ArenaStager) -> None:
        super().__init__(content)
        self.lease = lease
        self._stager = stager
        lease.attach(self)

    def items(self) -> Any:
        self._take()
        return super().items()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        self._take()
        return dict, (list(super().items()),)

    def _take(self) -> None:
        if self.lease.thread is None:
            self.lease.claim()
            self._stager.wait_turn(before=self.lease)


class ArenaStager:
    """Copies state dicts into shared memory that is kept between saves.

    Args:
        cache: Keep the buffer after a save. Without it, memory is given back between saves, and each save allocates.
        threads: That copy on the host, where torch itself has only one (as ``torchrun`` sets it).
    """

    def __init__(self, *, cache: bool = True, threads: int = 1) -> None:
        self._cache = cache
        self._threads = threads
        self._leases: list[Lease] = []
        self._idle: Arena | None = None
        self._warming: Future[Arena] | None = None

    def prewarm(self, state_dict: Mapping[str, Any]) -> None:
        """Allocates the buffer for state dicts of this size ahead of the first save, in the background.

        Raises:
            StagingError: memory is short, or a tensor is of a kind that cannot be saved; names the key.
        """
        self._reclaim()
        nbytes = _nbytes(list(_dense_tensors(state_dict, "")))
        self._settle_warming()
        if self._leases or (self._idle is not None and self._idle.fits(nbytes)):
            return
        self._give_back_idle()
        check_headroom(nbytes)
        self._warming = Future()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
        threading.Thread(target=_warm, args=(nbytes, device, self._warming), name="prewarm", daemon=True).start()

    def wait_turn(self, before: Lease | None = None) -> None:
        """Waits until the saves that were staged earlier, all or those before a given one, are over.

        A staged state dict that no save takes is not waited for: its buffer is left alone, and the next one is new.
        """
        earlier = list(self._leases)
        for lease in earlier[: earlier.index(before)] if before in earlier else earlier:
            if lease.abandoned:
                continue
            if not lease.wait_claimed(_CLAIM_SECONDS if before is None else _START_SECONDS):
                lease.abandoned = before is not None
            elif lease.thread is not None:
                lease.wait_over()

    def drain(self, timeout: float | None) -> bool:
        """Waits for the saves that have been started; False if one is not over after ``timeout`` seconds."""
        return all(lease.wait_over(timeout) for lease in list(self._leases) if lease.wait_claimed() and lease.thread)

    def stage(self, state_dict: Mapping[str, Any]) -> StagedStateDict:
        """Copies everything into a buffer that no save uses.

        Never fails for what the state dict holds: one rank that raised here would leave the others waiting in a
        collective. The error is kept in the lease of the (then empty) result, and the save raises it where DCP hands
        errors round.

        Returns:
            The twin of the state dict, with its ``lease``.
        """
        self._reclaim()
        lease = Lease()
        distributed = torch.distributed
        lease.distributed = (
            distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
        )
        self._leases.append(lease)
        try:
            content = self._copy(state_dict, lease)
        except StagingError as error:
            lease.error = StagingError(str(error))  # without the traceback, whose frames hold the live tensors
            content = {}
        except BaseException:  # a KeyboardInterrupt: there will be no save
            self._leases.remove(lease)
            raise
        return StagedStateDict(content, lease, self)

    def refuse(self, error: StagingError) -> StagedStateDict:
        """The result of a staging that was not even tried: its save fails with ``error``."""
        lease = Lease()
        lease.error = error
        self._leases.append(lease)
        return StagedStateDict({}, lease, self)

    def begin_save(self) -> Lease | None:
        """The lease that the calling thread has taken and not begun to save; None: it saves something unstaged."""
        for lease in list(self._leases):
            if lease.thread is threading.current_thread() and not lease.begun:
                lease.begun = True
                return lease
        return None

    def _copy(self, state_dict: Mapping[str, Any], lease: Lease) -> dict[str, Any]:
        try:
            with torch.no_grad():
                sources = list(_dense_tensors(state_dict, ""))
                lease.arena, self._idle = self._arena_for(_nbytes(sources)), None
                twins = [lease.arena.allocate(tensor.dtype, tensor.shape) for _, tensor in sources]
                _copy(sources, twins, self._threads)
                remaining = iter(twins)
                return {key: _rebuild(value, key, remaining) for key, value in state_dict.items()}
        except StagingError:
            raise
        except Exception as error:
            raise StagingError(f"the state dict could not be copied: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Gives the buffers back; those that a save still uses follow when it lets go of its state dict."""
        self._settle_warming()
        for arena in (self._idle, *(lease.arena for lease in self._leases)):
            if arena is not None:
                arena.close()
        self._idle = None
        self._leases.clear()

    def _settle_warming(self) -> None:
        """Waits for the buffer that `prewarm` has begun."""
        warming, self._warming = self._warming, None
        if warming is not None:
            with suppress(StagingError):  # memory has become short since; staging says so, if it still is
                self._idle = warming.result()

    def _arena_for(self, nbytes: int) -> Arena:
        self._settle_warming()
        arena = self._idle
        if arena is not None and arena.fits(nbytes):
            arena.reset()
            return arena
        self._give_back_idle()
        return Arena(nbytes, pin=True)

    def _give_back_idle(self) -> None:
        """Frees the buffer that no save uses: a larger one takes its place."""
        if self._idle is not None:
            self._idle.close()
            self._idle = None

    def _reclaim(self) -> None:
        """Takes back the buffers of saves that are over, and keeps the largest."""
        for lease in [lease for lease in self._leases if lease.over()]:
            self._leases.remove(lease)
            spare, lease.arena = lease.arena, None
            if spare is not None and self._cache and (self._idle is None or spare.nbytes > self._idle.nbytes):
                spare, self._idle = self._idle, spare
            if spare is not None:
                spare.close()


def _warm(nbytes: int, device: int, future: Future[Arena]) -> None:
    try:
        with torch.cuda.device(device):  # what is pinned is pinned for a device; -1 for none
            future.set_result(Arena(nbytes, pin=True))
    except Exception as error:
        future.set_exception(error)


def _nbytes(sources: list[tuple[str, torch.Tensor]]) -> int:
    return sum(aligned(tensor.nbytes) for _, tensor in sources)


def _dense_tensors(value: Any, key: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors inside a value, in the order in which `_rebuild` asks for their twins."""
    if isinstance(value, torch.Tensor):
        yield from _inner_tensors(value, key)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _dense_tensors(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _dense_tensors(item, f"{key}.{number}")


def _inner_tensors(tensor: torch.Tensor, key: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tensor, ShardedTensor):
        for shard in tensor.local_shards():
            yield from _inner_tensors(shard.tensor, key)
    elif is_wrapper(tensor) and not tensor.is_nested:
        if hasattr(tensor, "trigger_wait"):  # a collective's result that may still be on its way
            tensor.trigger_wait()
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for name in names:
            inner = getattr(tensor, name)
            if isinstance(inner, torch.Tensor):
                yield from _inner_tensors(inner, key)
    else:
        check_supported(key, tensor)
        yield key, tensor.detach()


def _copy(sources: list[tuple[str, torch.Tensor]], twins: list[torch.Tensor], threads: int) -> None:
    """Copies all tensors, in few calls."""
    pairs = [(twin, source) for (_, source), twin in zip(sources, twins, strict=True) if source.numel()]
    if pairs:
        with _staging_stream():
            _copy_pairs(pairs, threads)


def _copy_pairs(pairs: list[_Pair], threads: int) -> None:
    """Training waits for this, so its cores are free: torch's threads copy, or where it has only one, ours."""
    total = sum(twin.nbytes for twin, _ in pairs)
    on_host = all(source.device.type == "cpu" for _, source in pairs)
    if threads == 1 or torch.get_num_threads() > 1 or total < _SHARED_COPY or not on_host:
        _copy_some(pairs)
        return
    with ThreadPoolExecutor(threads - 1, thread_name_prefix="stage") as pool:
        first, *others = _shares([piece for pair in pairs for piece in _pieces(pair)], total, threads)
        copies = [pool.submit(_copy_some, share) for share in others]
        _copy_some(first)
        for copied in copies:
            copied.result()


def _copy_some(pairs: list[_Pair]) -> None:
    with torch.no_grad():  # of its own in each thread
        torch._foreach_copy_([twin for twin, _ in pairs], [source for _, source in pairs], non_blocking=True)


def _pieces(pair: _Pair) -> list[_Pair]:
    """A large tensor in pieces that several threads can share."""
    twin, source = pair
    count = -(-twin.nbytes // _COPY_PIECE)
    if count < 2 or not source.is_contiguous():
        return [pair]
    return list(zip(twin.view(-1).tensor_split(count), source.view(-1).tensor_split(count), strict=True))


def _shares(pairs: list[_Pair], total: int, count: int) -> list[list[_Pair]]:
    """Divides pairs among threads: about as many bytes for each."""
    shares: list[list[_Pair]] = [[] for _ in range(count)]
    done = 0
    for pair in pairs:
        shares[min(count - 1, done * count // total)].append(pair)
        done += pair[0].nbytes
    return [share for share in shares if share]


class _staging_stream:  # noqa: N801
    """Copies inside go to a stream that waits for what training has queued so far; leaving waits for the copies."""

    def __enter__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        if torch.cuda.is_initialized():
            queued = torch.cuda.Event()
            queued.record()
            self._stream = torch.cuda.Stream()
            self._stream.wait_event(queued)
            self._context = torch.cuda.stream(self._stream)
            self._context.__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        if self._stream is not None:
            self._context.__exit__(*exc_info)
            self._stream.synchronize()


def _rebuild(value: Any, key: str, twins: Iterator[torch.Tensor]) -> Any:
    """A copy of a value, with the given twins in place of its tensors."""
    if isinstance(value, torch.Tensor):
        return _rebuild_tensor(value, twins)
    if isinstance(value, _ATOMIC):
        return value
    if isinstance(value, Mapping):
        items = [(name, _rebuild(item, f"{key}.{name}", twins)) for name, item in value.items()]
        if type(value) in (dict, collections.OrderedDict):
            return type(value)(items)  # type: ignore[call-arg]
        # A shallow copy of a mapping that is not a dict may share its contents: to refill it would change the live one.
        return _refill(copy.copy(value), items) if isinstance(value, dict) else dict(items)
    if isinstance(value, list | tuple):
        members = [_rebuild(item, f"{key}.{number}", twins) for number, item in enumerate(value)]
        return type(value)(*members) if hasattr(value, "_fields") else type(value)(members)
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise StagingError(
            f"{key!r}: an object of type {type(value).__module__}.{type(value).__qualname__} cannot be copied "
            f"({type(error).__name__}: {error}). Leave it out of the state dict, or give it a __deepcopy__."
        ) from error


def _refill(mapping: Any, items: list[tuple[Any, Any]]) -> Any:
    for name, item in items:
        mapping[name] = item
    return mapping


def _rebuild_tensor(tensor: torch.Tensor, twins: Iterator[torch.Tensor]) -> torch.Tensor:
    if isinstance(tensor, ShardedTensor):
        return _rebuild_sharded(tensor, twins)
    if not is_wrapper(tensor):
        return next(twins)
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: getattr(tensor, name) for name in names}
    staged = {k: _rebuild_tensor(v, twins) if isinstance(v, torch.Tensor) else v for k, v in inner.items()}
    rebuild = type(tensor).__tensor_unflatten__  # type: ignore[attr-defined]
    return rebuild(staged, context, tensor.size(), tensor.stride())  # type: ignore[no-any-return]


def _rebuild_sharded(tensor: ShardedTensor, twins: Iterator[torch.Tensor]) -> ShardedTensor:
    metadata = copy.deepcopy(tensor.metadata())
    for shard_metadata in metadata.shards_metadata:
        shard_metadata.placement = _on_cpu(shard_metadata)
    shards = []
    for shard in tensor.local_shards():
        where = ShardMetadata(shard.metadata.shard_offsets, shard.metadata.shard_sizes, _on_cpu(shard.metadata))
        shards.append(Shard(_rebuild_tensor(shard.tensor, twins), where))
    metadata.tensor_properties.requires_grad = False
    metadata.tensor_properties.pin_memory = bool(shards) and shards[0].tensor.is_pinned()
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=tensor._process_group, init_rrefs=False
    )


def _on_cpu(metadata: ShardMetadata) -> _remote_device:
    assert metadata.placement is not None
    return _remote_device(f"rank:{metadata.placement.rank()}/cpu")
