"""What all ranks of a group want is read from the storage once, and exchanged by collectives.

votes    --all_gather--> every rank knows whether it can be done, and whether one has failed
wants    --broadcast, all_reduce--> what every rank wants
windows  --fetch, in the background--> buffer --all_gather, piece by piece--> the targets of every rank

A rank that fails takes part in the next collective nevertheless, to tell the others. So none waits for it in vain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import NamedTuple

import torch
import torch.distributed as dist
import xxhash

from .._memory.device import CUDA
from .._memory.shared_buffer import aligned
from .._memory.tensor_bytes import host_bytes
from .._threads import in_background
from ..errors import ReadError
from .exchange_group import ExchangeGroup, Told, Vote
from .exchange_plan import Want, Window, spans_of, total_bytes, wants_of
from .read_planner import ReadLimits, Segment
from .read_target import ReadTarget, overlapping
from .scatter import scatter

__all__ = ["Exchange", "ExchangeMemory"]

logger = logging.getLogger("dcp_tensorizer")

_HEADER = 64  # of each piece: whether its rank has failed, and the digest of its bytes
_DIGEST = slice(8, 16)
_MIN_READ = 1 << 20
_READS_OF_WINDOW = 16
_MIN_WINDOW = 8 << 20
_WINDOWS = 8  # or more: while one is exchanged, the next one is read
Progress = Callable[[int, int], object]


class ExchangeMemory(NamedTuple):
    """How much memory an exchange takes.

    Attributes:
        window_bytes: What a rank reads at once. There are two windows.
        round_bytes: What all ranks exchange at once.
    """

    window_bytes: int = 64 << 20
    round_bytes: int = 64 << 20


class Exchange:
    """The exchange of one load: first of objects, then of tensors. To be entered before anything can fail.

    Args:
        group: The ranks.
        path: Of the checkpoint, for messages.
        fetch: Reads targets from the storage as `executor.fetch` does.
        limits: How reads are joined.
        verify: What is read is compared with its digests, and what arrives with those of its sender.
        in_memory: Files that need not be read.
        reason: Why this rank exchanges no tensors; empty if it does.
        memory: How much of it may be used.

    Attributes:
        received_bytes: What this rank got from others.
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
        memory: ExchangeMemory = ExchangeMemory(),  # noqa: B008 - it is frozen
    ) -> None:
        self._group, self._path = ExchangeGroup(group, path), path
        self._fetch, self._limits, self._verify = fetch, limits, verify
        self._in_memory, self._reason, self._memory = in_memory, reason, memory
        self._turns = 2  # votes that the other ranks wait for
        self.received_bytes = 0

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Tells the other ranks of an error, if they wait for this one."""
        if error is not None and self._turns:
            try:
                self._group.votes(Vote(), error)
            except Told as told:
                if told.error is not error:
                    logger.warning("%s: the other ranks could not be told of an error: %s", self._path, told.error)

    def read(self, targets: Sequence[ReadTarget], *, progress: Progress = lambda done, total: None) -> int:
        """Reads targets; what all ranks want is read by one of them.

        To be called once for objects. Then once for tensors, unless `exchanges_tensors` is false.

        Args:
            targets: What to read, and where it goes.
            progress: Called with the bytes that are done and the bytes in all.

        Returns:
            How many bytes this rank has read.

        Raises:
            CheckpointError: what `fetch` raises, on any rank; the same on all of them.
            ReadError: a rank is gone.
        """
        self._turns -= 1
        try:
            return self._read(targets, progress, of_tensors=not self._turns)
        except Told as told:
            self._turns = 0
            raise told.error from told.error.__cause__

    @property
    def exchanges_tensors(self) -> bool:
        """Whether all ranks can, when objects have been read."""
        return bool(self._turns)

    def _read(self, targets: Sequence[ReadTarget], progress: Progress, *, of_tensors: bool) -> int:
        wants: dict[bytes, Want] = {}
        error: BaseException | None = None
        try:
            alone = overlapping(targets)  # these are read in the order of the plan, or they would mix
            in_files = [t for t in targets if t.item.file not in self._in_memory and t not in alone]
            wants = wants_of(in_files, self._limits, verify=self._verify)
        except Exception as failure:
            error = failure
        on_gpu = bool(targets) and all(target.tensor.is_cuda for target in targets)
        setting = self._verify, *self._limits
        votes = self._group.votes(Vote(None, self._reason, setting, len(wants), on_gpu), error)
        reason = next((vote.reason for vote in votes if vote.reason), "")
        if reason:
            self._turns = 0  # objects are exchanged in any case: planners get them when all have been read
        odd = [rank for rank, vote in enumerate(votes) if vote.setting != votes[0].setting]
        if odd:
            common, reason = [], f"rank {odd[0]} reads with other options than rank 0"
        else:
            common = [wants[name] for name in self._group.common(list(wants), votes[0].wants)]
        if of_tensors or reason:
            self._log(common, wants, reason)
        exchanged = {target for want in common for target in want.targets}
        left = [target for target in targets if target not in exchanged]
        shared = total_bytes(common)
        total = shared + sum(target.tensor.nbytes for target in left)
        nbytes = 0
        if common:
            device = self._group.device(prefers_gpu=all(vote.is_on_gpu for vote in votes))
            nbytes = self._exchange(common, device, lambda done: progress(done, total))
            # What a GPU's collectives have brought is copied by its streams, which other streams do not wait for.
            CUDA.side_streams.settle(target.tensor for target in exchanged)
        return nbytes + self._fetch(left, progress=lambda done, rest: progress(shared + done, shared + rest))

    def _log(self, common: Sequence[Want], wants: Mapping[bytes, Want], reason: str) -> None:
        """Says, on the first rank, what is exchanged, and why no more."""
        if self._group.rank:
            return
        shared, wanted = total_bytes(common), total_bytes(wants.values())
        if not reason and shared < wanted:
            reason = "of the rest, ranks want different parts"
        what = f"{shared / 1e6:,.1f} of {wanted / 1e6:,.1f} MB"
        logger.info("%s: %d ranks exchange %s%s", self._path, self._group.size, what, reason and f": {reason}")

    def _exchange(self, common: Sequence[Want], device: torch.device, progress: Callable[[int], object]) -> int:
        """Has each rank read its span, and all ranks get all of it; returns how many bytes this one has read."""
        spans: list[list[Window]] = []
        error: BaseException | None = None
        try:
            share = total_bytes(common) // self._group.size
            window_bytes = min(self._memory.window_bytes, max(_MIN_WINDOW, share // _WINDOWS))
            spans = spans_of(common, self._group.size, window_bytes)
            windows = _Windows(spans[self._group.rank], common, self._fetch, self._limits, device)
            piece = self._memory.round_bytes // self._group.size // _HEADER * _HEADER
            largest = max(window.nbytes for span in spans for window in span)
            rounds = _Rounds(self._group, min(aligned(largest), max(_HEADER, piece)), device, verify=self._verify)
        except Exception as failure:  # as when memory is short
            error = failure
        self._group.votes(Vote(), error)
        try:
            done = self._run(spans, windows, rounds, common, progress)
        finally:
            windows.close()
        self.received_bytes += done - windows.own_bytes
        return windows.nbytes

    def _run(
        self,
        spans: Sequence[Sequence[Window]],
        windows: _Windows,
        rounds: _Rounds,
        common: Sequence[Want],
        progress: Callable[[int], object],
    ) -> int:
        """Exchanges one window of each rank after the other, in pieces; returns how many bytes that were."""
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
                    self._group.fail(failed)
                try:
                    rounds.check()
                    done += _deliver(now, common, start, rounds)
                    progress(done)
                except BaseException as error:
                    failed = error
        if failed is not None:
            raise failed
        return done


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class _Windows:
    """The windows of this rank: one is exchanged while the next one is read.

    Attributes:
        nbytes: What has been read.
        own_bytes: What is in them.
    """

    def __init__(
        self,
        windows: Sequence[Window],
        wants: Sequence[Want],
        fetch: Callable[..., int],
        limits: ReadLimits,
        device: torch.device,
    ) -> None:
        self._windows, self._wants, self._fetch = windows, wants, fetch
        largest = max((window.nbytes for window in windows), default=0)
        self._buffers = [_host_memory(largest, device) for _ in windows[:2]]
        at_once = max(_MIN_READ, largest // _READS_OF_WINDOW)  # or else a few threads would read all of a window
        self._limits = limits._replace(max_coalesced_bytes=min(limits.max_coalesced_bytes, at_once))
        self._reading: Future[int] | None = None
        self.nbytes = 0
        self.own_bytes = sum(part.stop - part.start for window in windows for part in window.parts)

    def take(self, number: int) -> torch.Tensor:
        """A window's bytes, which are valid until the next call; nothing, if there are no more windows.

        It is called with one number after the other.
        """
        if self._reading is None:
            self._begin(number)
        if number >= len(self._windows):
            return _NOTHING
        assert self._reading is not None
        self.nbytes += self._reading.result()
        self._begin(number + 1)
        return self._buffers[number % 2][: self._windows[number].nbytes]

    def close(self) -> None:
        """Waits until nothing is read any more."""
        if self._reading is not None:
            wait([self._reading])

    def _begin(self, number: int) -> None:
        if number < len(self._windows):
            self._reading = in_background(lambda: self._read(number), name="dcp-exchange")

    def _read(self, number: int) -> int:
        buffer = self._buffers[number % 2]
        targets = []
        for part in self._windows[number].parts:
            want = self._wants[part.want]
            tensor = buffer[part.position : part.end]
            targets.append(ReadTarget.of_bytes(want.targets[0].key, want.item, part.start, tensor))
        return self._fetch(targets, limits=self._limits)


class _Rounds:
    """Exchanges one piece of each rank after the other.

    Attributes:
        piece: Bytes of each rank.
        received: The pieces of all ranks.
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
        """Sends up to a piece, and receives one of each rank; returns whether a rank has failed."""
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
        """Raises `ReadError` if something else has arrived than was sent."""
        if not self._hashes:
            return
        for rank, (header, piece) in enumerate(zip(self._headers, self.received, strict=True)):
            if rank != self._group.rank and not torch.equal(header[_DIGEST], _digest(piece)):
                raise ReadError(f"what rank {rank} of the exchange has sent is not what arrived: load it again")


def _deliver(windows: Sequence[Window], wants: Sequence[Want], start: int, rounds: _Rounds) -> int:
    """Copies what has arrived to the targets; returns how many bytes that were."""
    nbytes = 0
    for window, received in zip(windows, rounds.received, strict=True):
        for part in window.between(start, start + rounds.piece):
            want = wants[part.want]
            begin, length = part.position - start, part.stop - part.start
            segment = Segment(want.item, part.start, part.stop, want.targets, None)
            scatter(segment, received[begin : begin + length])
            nbytes += length
    return nbytes


def _host_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory that is copied to a device, if that is not the host itself."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=device.type != "cpu")


def _digest(data: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(xxhash.xxh3_64_digest(host_bytes(data))), dtype=torch.uint8)
