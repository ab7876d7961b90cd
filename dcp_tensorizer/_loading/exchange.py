"""Exchanges data that all ranks of a group need, by collectives: only one rank reads each byte from the storage.

votes     --all_gather-->                whether all ranks can exchange, and whether one has failed
requests  --broadcast, all_reduce-->     the bytes that every rank requests
windows   --fetch, in the background-->  buffer --all_gather, piece by piece--> the targets of every rank
"""

from __future__ import annotations

import bisect
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import xxhash

from .._runtime.threads import in_background
from .._runtime.torch_compat import group_devices
from .._staging.device import CUDA
from .._staging.shared_memory import aligned
from .._tensor_file.dtypes import host_bytes
from .._tensor_file.names import StoredItem
from ..errors import CheckpointError, ReadError, describe
from .plan import ReadLimits, ReadTarget, Segment, by_tensor, overlapping, wanted_bytes
from .run import scatter

logger = logging.getLogger("dcp_tensorizer")

_HEADER = 64  # bytes before each piece: whether its rank has failed, and the digest of the piece
_DIGEST = slice(8, 16)
_MIN_READ = 1 << 20
_READS_OF_WINDOW = 16
_MIN_WINDOW = 8 << 20
# The minimum number of windows per rank, unless windows would be smaller than `_MIN_WINDOW`. A rank reads one window
# while the ranks exchange another.
_WINDOWS = 8
Progress = Callable[[int, int], object]


class Exchange:
    """The exchange of one load: first objects, then tensors.

    Use it as a context manager around the whole load: its exit reports a failure to the other ranks.

    ``fetch`` reads targets from the storage, like `run.fetch`. ``verify`` compares data with its digests, and data
    received in host memory with the sender's digests. ``in_memory`` has the contents of files that need not be read.
    ``reason`` is the reason why this rank exchanges no tensors; empty if it does. ``window_bytes`` is the maximum size
    of a window. A rank holds two windows in memory. ``round_bytes`` is the maximum total size of all ranks' pieces in
    one collective. ``received_bytes`` counts the bytes from other ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        path: str,
        fetch: Callable[..., int],
        limits: ReadLimits,
        *,
        verify: bool,
        in_memory: Mapping[str, bytes],
        reason: str = "",
        window_bytes: int = 64 << 20,
        round_bytes: int = 64 << 20,
    ) -> None:
        self._group, self._path = ExchangeGroup(group, path), path
        self._fetch, self._limits, self._verify = fetch, limits, verify
        self._in_memory, self._reason = in_memory, reason
        self._window_bytes, self._round_bytes = window_bytes, round_bytes
        self._votes_left = 2  # votes in which the other ranks still wait for this one
        self.received_bytes = 0

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and self._votes_left:
            try:
                self._group.votes(ExchangeVote(), error)
            except SharedFailure as failure:
                if failure.error is not error:
                    logger.warning(
                        "%s: an error could not be reported to the other ranks: %s", self._path, failure.error
                    )

    def read(self, targets: Sequence[ReadTarget], *, progress: Progress = lambda done, total: None) -> int:
        """Reads targets. Of the data that all ranks need, reads only this rank's share, and receives the rest.

        Returns the number of bytes that this rank has read from the storage.

        Call it once for objects, then once for tensors, unless `exchanges_tensors` is false. Raises the
        `CheckpointError` of ``fetch``, on all ranks if the data is exchanged, and `ReadError` if a rank is gone.
        """
        self._votes_left -= 1
        try:
            return self._read(targets, progress, of_tensors=not self._votes_left)
        except SharedFailure as failure:
            self._votes_left = 0
            raise failure.error from failure.error.__cause__

    @property
    def exchanges_tensors(self) -> bool:
        """Returns whether all ranks can exchange tensors. Known after objects have been read."""
        return bool(self._votes_left)

    def _read(self, targets: Sequence[ReadTarget], progress: Progress, *, of_tensors: bool) -> int:
        requests: dict[bytes, ExchangeRequest] = {}
        error: BaseException | None = None
        try:
            alone = overlapping(targets)  # these must be read in the order of the plan
            in_files = [t for t in targets if t.item.file not in self._in_memory and t not in alone]
            requests = requests_of(in_files, self._limits, verify=self._verify)
        except Exception as failure:
            error = failure
        on_gpu = bool(targets) and all(target.tensor.is_cuda for target in targets)
        setting = self._verify, *self._limits
        votes = self._group.votes(ExchangeVote(None, self._reason, setting, len(requests), on_gpu), error)
        reason = next((vote.reason for vote in votes if vote.reason), "")
        if reason:
            self._votes_left = 0  # objects are exchanged even so: planners get them only after all are read
        odd = [rank for rank, vote in enumerate(votes) if vote.setting != votes[0].setting]
        if odd:
            common, reason = [], f"the options of rank {odd[0]} differ from those of rank 0"
        else:
            common = [requests[name] for name in self._group.common(list(requests), votes[0].requests)]
        shared, wanted = total_bytes(common), total_bytes(requests.values())
        if self._group.rank == 0 and (of_tensors or reason):
            if shared < wanted:
                reason = reason or "the ranks need different parts of the rest"
            what = f"{shared / 1e6:,.1f} of {wanted / 1e6:,.1f} MB"
            if not of_tensors:
                what += " of objects" if self._votes_left else " of objects, but no tensors"
            logger.info("%s: %d ranks exchange %s%s", self._path, self._group.size, what, reason and f": {reason}")
        exchanged = {target for request in common for target in request.targets}
        left = [target for target in targets if target not in exchanged]
        total = shared + sum(target.tensor.nbytes for target in left)
        nbytes = 0
        if common:
            device = self._group.device(prefers_gpu=all(vote.is_on_gpu for vote in votes))
            nbytes = self._exchange(common, device, lambda done: progress(done, total))
            # GPU streams copy received data, and other streams do not wait for these streams.
            CUDA.side_streams.synchronize(target.tensor for target in exchanged)
        return nbytes + self._fetch(left, progress=lambda done, rest: progress(shared + done, shared + rest))

    def _exchange(
        self, common: Sequence[ExchangeRequest], device: torch.device, progress: Callable[[int], object]
    ) -> int:
        """Reads this rank's span, and exchanges all spans. Returns the number of bytes that this rank has read."""
        spans: list[list[Window]] = []
        error: BaseException | None = None
        try:
            share = total_bytes(common) // self._group.size
            window_bytes = min(self._window_bytes, max(_MIN_WINDOW, share // _WINDOWS))
            spans = spans_of(common, self._group.size, window_bytes)
            windows = _Windows(spans[self._group.rank], self._fetch, self._limits, device)
            piece = self._round_bytes // self._group.size // _HEADER * _HEADER
            largest = max(window.nbytes for span in spans for window in span)
            rounds = _Rounds(self._group, min(aligned(largest), max(_HEADER, piece)), device, verify=self._verify)
        except Exception as failure:  # such as a memory shortage
            error = failure
        self._group.votes(ExchangeVote(), error)
        try:
            done = self._run(spans, windows, rounds, progress)
        finally:
            windows.close()
        self.received_bytes += done - windows.own_bytes
        return windows.nbytes

    def _run(
        self,
        spans: Sequence[Sequence[Window]],
        windows: _Windows,
        rounds: _Rounds,
        progress: Callable[[int], object],
    ) -> int:
        """Exchanges the windows in order, one of each rank at a time, in pieces. Returns the number of bytes."""
        done = 0
        failed: BaseException | None = None
        for number in range(max(map(len, spans))):
            now = [span[number] if number < len(span) else Window([]) for span in spans]
            content = _NOTHING
            try:
                content = windows.take(number)
            except BaseException as error:
                failed = failed or error
            for start in range(0, max(window.nbytes for window in now), rounds.piece):
                if rounds.exchange(content[start : start + rounds.piece], has_failed=failed is not None):
                    self._group.votes(ExchangeVote(), failed)  # raises, on every rank, the error of the one that failed
                    raise AssertionError("a rank has failed without a message")
                try:
                    rounds.check()
                    done += _deliver(now, start, rounds)
                    progress(done)
                except BaseException as error:
                    failed = error
        if failed is not None:
            raise failed
        return done


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class _Windows:
    """The windows of this rank. While one is exchanged, the next one is read.

    ``nbytes`` counts the bytes read, ``own_bytes`` the bytes that the windows hold.
    """

    def __init__(
        self, windows: Sequence[Window], fetch: Callable[..., int], limits: ReadLimits, device: torch.device
    ) -> None:
        self._windows, self._fetch = windows, fetch
        largest = max((window.nbytes for window in windows), default=0)
        self._buffers = [_host_memory(largest, device) for _ in windows[:2]]
        at_once = max(_MIN_READ, largest // _READS_OF_WINDOW)  # small enough that all threads share a window
        self._limits = limits._replace(max_coalesced_bytes=min(limits.max_coalesced_bytes, at_once))
        self._reading: Future[int] | None = None
        self.nbytes = 0
        self.own_bytes = sum(part.stop - part.start for window in windows for part in window.parts)

    def take(self, number: int) -> torch.Tensor:
        """Returns the bytes of the next window, valid until the next call; empty if there are no more windows."""
        if self._reading is None:
            self._begin(number)
        if number >= len(self._windows):
            return _NOTHING
        assert self._reading is not None
        self.nbytes += self._reading.result()
        self._begin(number + 1)
        return self._buffers[number % 2][: self._windows[number].nbytes]

    def close(self) -> None:
        if self._reading is not None:
            wait([self._reading])

    def _begin(self, number: int) -> None:
        if number < len(self._windows):
            self._reading = in_background(lambda: self._read(number), name="dcp-exchange")

    def _read(self, number: int) -> int:
        buffer = self._buffers[number % 2]
        targets = []
        for part in self._windows[number].parts:
            tensor = buffer[part.position : part.end]
            targets.append(ReadTarget.of_bytes(part.request.targets[0].key, part.request.item, part.start, tensor))
        return self._fetch(targets, limits=self._limits)


class _Rounds:
    """The rounds of an exchange, each of one piece per rank.

    ``piece`` is the size of a piece in bytes, and ``received`` has the ranks' pieces.
    """

    def __init__(self, group: ExchangeGroup, piece: int, device: torch.device, *, verify: bool) -> None:
        self._group, self.piece = group, piece
        self._hashes = verify and device.type == "cpu"
        self._content = _host_memory(_HEADER + piece, device)
        self._sent = self._content if device.type == "cpu" else torch.empty_like(self._content, device=device)
        self._all = torch.empty((group.size, _HEADER + piece), dtype=torch.uint8, device=device)
        self._headers = torch.empty(0)
        self.received = self._all[:, _HEADER:]

    def exchange(self, content: torch.Tensor, *, has_failed: bool) -> bool:
        """Sends at most one piece, and receives one from each rank. Returns whether a rank has failed."""
        self._content[:_HEADER] = 0
        self._content[0] = has_failed
        self._content[_HEADER : _HEADER + content.numel()] = content
        if self._hashes:
            self._content[_DIGEST] = _digest(self._content[_HEADER:])
        if self._sent is not self._content:
            self._sent.copy_(self._content)
        self._group.all_gather(self._all.view(-1), self._sent)
        self._headers = self._all[:, :_HEADER].cpu()
        return bool(self._headers[:, 0].any())

    def check(self) -> None:
        """Raises `ReadError` if received bytes do not match their sender's digest.

        Without verification, or on a GPU, they have no digest.
        """
        if not self._hashes:
            return
        for rank, (header, piece) in enumerate(zip(self._headers, self.received, strict=True)):
            if rank != self._group.rank and not torch.equal(header[_DIGEST], _digest(piece)):
                raise ReadError(
                    f"data from rank {rank} of the exchange was damaged in transit. Load the checkpoint again."
                )


@torch.inference_mode()  # the targets may have been made in this mode
def _deliver(windows: Sequence[Window], start: int, rounds: _Rounds) -> int:
    nbytes = 0
    for window, received in zip(windows, rounds.received, strict=True):
        for part in window.between(start, start + rounds.piece):
            begin, length = part.position - start, part.stop - part.start
            segment = Segment(part.request.item, part.start, part.stop, part.request.targets, None)
            scatter(segment, received[begin : begin + length])
            nbytes += length
    return nbytes


def _host_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=device.type != "cpu")


def _digest(data: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(xxhash.xxh3_64_digest(host_bytes(data))), dtype=torch.uint8)


# --- the group of an exchange, its collectives and its errors ---------------------------------------------------------

_T = TypeVar("_T")
_ID_BYTES = 16


class ReadFrom(NamedTuple):
    """The part of a rank's load plan that names the save that the rank reads, and the rank's ``exchange`` group."""

    save_id: str
    group: str = ""  # identity of the ``exchange`` group (`identity_of`); empty without a group
    group_size: int = 0


def members_of(group: object) -> dist.ProcessGroup | None:
    """Returns ``group`` if it is a process group of this rank and at least one other, and otherwise None.

    Raises `TypeError` unless ``group`` is a process group or None.
    """
    if group is None or group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"exchange must be a process group or None, got {type(group).__name__}")
    return group if group.size() > 1 else None


def identity_of(group: dist.ProcessGroup | None) -> tuple[str, int]:
    """Returns a group's identity, which is equal on its ranks and on no others, and its size."""
    if group is None:
        return "", 0
    ranks = dist.get_process_group_ranks(group)
    return xxhash.xxh3_128_hexdigest(f"{group.group_name} {ranks}".encode()), len(ranks)


def reads_alone(path: str, group: dist.ProcessGroup | None, carried: Sequence[object]) -> bool:
    """Returns whether each rank loads by itself, and exchanges nothing although it has a ``group``.

    ``carried`` is the ``storage_data`` of the plans of all ranks that load together. Raises `ReadError` if some ranks
    of a group do not load, or do not pass the group: the others would wait for them.
    """
    if len(carried) == 1:
        if group is not None:
            logger.info("%s: the %d ranks exchange nothing, as each of them loads by itself", path, group.size())
        return group is not None
    plans = [data for data in carried if isinstance(data, ReadFrom)]
    loading = Counter(plan.group for plan in plans)
    for rank, plan in enumerate(plans):
        if plan.group and loading[plan.group] != plan.group_size:
            raise ReadError(
                f"{path}: the exchange group of rank {rank} has {plan.group_size} ranks, but only "
                f"{loading[plan.group]} took part in this load and passed the group. Pass exchange= on all of its "
                f"ranks, and call dcp.load with a process_group that has all of them."
            )
    return False


@dataclass(frozen=True)
class ExchangeVote:
    error: CheckpointError | None = None  # the reason why the rank cannot continue
    reason: str = ""  # the reason why the rank exchanges no tensors, although it can load
    setting: tuple[Any, ...] = ()  # must be the same on all ranks
    requests: int = 0
    is_on_gpu: bool = False  # all targets of the rank are on a GPU


class SharedFailure(Exception):
    """An error that all ranks have received, or the `ReadError` for the loss of another rank."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class ExchangeGroup:
    """A process group whose ranks all call the same methods in the same order.

    ``rank`` is this rank's number in the group. If a rank is gone, methods raise `SharedFailure` with a `ReadError`.
    """

    def __init__(self, group: dist.ProcessGroup, path: str) -> None:
        self._group, self._path = group, path
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._devices = group_devices(group)

    def device(self, *, prefers_gpu: bool = False) -> torch.device:
        others = sorted(self._devices - {"cpu"})
        if "cpu" in self._devices and not (prefers_gpu and others):
            return torch.device("cpu")
        return torch.device(others[0], torch.accelerator.current_device_index())

    def votes(self, vote: ExchangeVote, error: BaseException | None = None) -> list[ExchangeVote]:
        """Gathers the votes of all ranks. ``error`` is the reason why this rank cannot continue.

        Raises `SharedFailure` with this rank's own error, with the error of the first rank that cannot continue, or, if
        a rank is gone, with a `ReadError`.
        """
        own = vote
        if error is not None:
            # Sends an error of this package's classes, because errors of other packages may not be picklable.
            kinds = (kind for kind in type(error).__mro__ if kind.__module__ == CheckpointError.__module__)
            portable: type[CheckpointError] = next(kinds, CheckpointError)
            own = ExchangeVote(error=portable(describe(error)))
        votes: list[Any] = [None] * self.size
        self._call(lambda: dist.all_gather_object(votes, own, group=self._group))
        if error is not None:
            raise SharedFailure(error)
        for rank, other in enumerate(votes):
            if other.error is not None:
                raise SharedFailure(type(other.error)(f"rank {rank} of the exchange: {other.error}"))
        return votes

    def common(self, ids: Sequence[bytes], count: int) -> list[bytes]:
        """Returns the ids (16 bytes each) that all ranks have, in the first rank's order.

        ``count`` is the number of the first rank's ids.
        """
        if not count:
            return []
        own = set(ids)
        content = bytearray(b"".join(ids) if self.rank == 0 else count * _ID_BYTES)
        listed = torch.frombuffer(content, dtype=torch.uint8).to(self.device())
        first = dist.get_global_rank(self._group, 0)
        self._call(lambda: dist.broadcast(listed, src=first, group=self._group))
        data = listed.cpu().numpy().tobytes()
        names = [data[start : start + _ID_BYTES] for start in range(0, len(data), _ID_BYTES)]
        mask = torch.tensor([name in own for name in names], dtype=torch.uint8, device=self.device())
        self._call(lambda: dist.all_reduce(mask, op=dist.ReduceOp.MIN, group=self._group))
        return [name for name, is_common in zip(names, mask.tolist(), strict=True) if is_common]

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        self._call(lambda: dist.all_gather_into_tensor(received, sent, group=self._group))

    def _call(self, collective: Callable[[], _T]) -> _T:
        try:
            return collective()
        except RuntimeError as error:
            gone = ReadError(
                f"{self._path}: rank {self.rank} of {self.size} could not exchange data. Perhaps another "
                f"rank has ended, or loads another checkpoint: {error}"
            )
            gone.__cause__ = error
            raise SharedFailure(gone) from error


# --- planning an exchange: each rank makes the same plan, without communication ---------------------------------------
#
# Requests:  the bytes of stored tensors that every rank needs, in the order of files and offsets
# Spans:     a consecutive part of the requests for each rank to read, of about equal size
# Windows:   the parts of a span, each of which its rank reads into one buffer

_UNITS_PER_RANK = 16  # units are the pieces of requests that make up spans: fewer units make spans less even
_MAX_UNIT = 4 << 20


class ExchangeRequest(NamedTuple):
    """The bytes of one stored tensor that a rank needs."""

    id: bytes  # the same on all ranks that need the same bytes
    item: StoredItem
    # relative to the tensor's first byte; whole blocks if the data is verified or encrypted
    intervals: list[tuple[int, int]]
    targets: tuple[ReadTarget, ...]


def requests_of(targets: Iterable[ReadTarget], limits: ReadLimits, *, verify: bool) -> dict[bytes, ExchangeRequest]:
    """Returns the requests of targets by id, in the order of files and offsets."""
    requests = {}
    for file, of_tensor in by_tensor(targets):
        item = of_tensor[0].item
        intervals = wanted_bytes(of_tensor, limits, verify=verify)
        contents = f"{file}\0{item.offset}\0{item.length}\0{intervals}"
        request = ExchangeRequest(xxhash.xxh3_128_digest(contents.encode()), item, intervals, tuple(of_tensor))
        requests[request.id] = request
    return requests


def total_bytes(requests: Iterable[ExchangeRequest]) -> int:
    return sum(stop - start for request in requests for start, stop in request.intervals)


class WindowPart(NamedTuple):
    """Consecutive bytes of one stored tensor in a window.

    ``start`` and ``stop`` are relative to the tensor's first byte.
    """

    request: ExchangeRequest
    start: int
    stop: int
    position: int  # offset in the window, a multiple of 64

    @property
    def end(self) -> int:
        return self.position + self.stop - self.start


class Window(NamedTuple):
    parts: list[WindowPart]

    @property
    def nbytes(self) -> int:
        return self.parts[-1].end if self.parts else 0

    def between(self, start: int, stop: int) -> Iterator[WindowPart]:
        """Yields the parts in a range of the window, cut to the range. ``start`` and ``stop`` are multiples of 64."""
        first = bisect.bisect_right(self.parts, start, key=lambda part: part.end)
        for part in self.parts[first:]:
            if part.position >= stop:
                return
            begin, end = max(part.position, start), min(part.end, stop)
            origin = part.start - part.position
            yield WindowPart(part.request, origin + begin, origin + end, begin)


def spans_of(requests: Sequence[ExchangeRequest], ranks: int, window_bytes: int) -> list[list[Window]]:
    """Returns the windows of each rank, for the requests that all ranks share.

    A window is larger than ``window_bytes`` only if it is a single block.
    """
    total = total_bytes(requests)
    unit = min(_MAX_UNIT, window_bytes, max(1, total // (ranks * _UNITS_PER_RANK)))
    spans: list[list[Window]] = [[] for _ in range(ranks)]
    done = 0
    for request, start, stop in _units(requests, unit):
        middle = done + (stop - start) // 2
        _add(spans[min(ranks - 1, middle * ranks // total)], request, start, stop, window_bytes)
        done += stop - start
    return spans


def _units(requests: Sequence[ExchangeRequest], nbytes: int) -> Iterator[tuple[ExchangeRequest, int, int]]:
    """Cuts the requests into pieces of whole blocks, of about ``nbytes`` bytes."""
    for request in requests:
        block = request.item.block
        step = max(1, nbytes // block) * block
        for first, last in request.intervals:
            start = first
            while start < last:
                stop = min(last, start // block * block + step)
                yield request, start, stop
                start = stop


def _add(windows: list[Window], request: ExchangeRequest, start: int, stop: int, window_bytes: int) -> None:
    parts = windows[-1].parts if windows else []
    last = parts[-1] if parts else None
    follows = last is not None and last.request is request and last.stop == start
    if last is not None and follows and last.end + stop - start <= window_bytes:
        parts[-1] = last._replace(stop=stop)
        return
    position = aligned(last.end) if last is not None else 0
    if last is None or position + stop - start > window_bytes:
        windows.append(Window([WindowPart(request, start, stop, 0)]))
    else:
        parts.append(WindowPart(request, start, stop, position))
