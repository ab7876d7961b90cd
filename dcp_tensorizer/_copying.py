"""Copying a state dict's tensors into their twins, in few calls, with the cores and the streams that are free."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

__all__ = ["Pair", "copy_all"]

Pair = tuple[torch.Tensor, torch.Tensor]
"""A twin, and the tensor whose elements it gets."""

_COPY_PIECE = 32 << 20
_SHARED_COPY = 8 << 20  # below it, starting a thread costs more than it saves


def copy_all(pairs: list[Pair], threads: int) -> None:
    """Copies all tensors, in few calls."""
    pairs = [(twin, source) for twin, source in pairs if source.numel()]
    if pairs:
        with _staging_stream():
            _copy_pairs(pairs, threads)


def _copy_pairs(pairs: list[Pair], threads: int) -> None:
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


def _copy_some(pairs: list[Pair]) -> None:
    with torch.no_grad():  # of its own in each thread
        torch._foreach_copy_([twin for twin, _ in pairs], [source for _, source in pairs], non_blocking=True)


def _pieces(pair: Pair) -> list[Pair]:
    """A large tensor in pieces that several threads can share."""
    twin, source = pair
    count = -(-twin.nbytes // _COPY_PIECE)
    if count < 2 or not source.is_contiguous():
        return [pair]
    return list(zip(twin.view(-1).tensor_split(count), source.view(-1).tensor_split(count), strict=True))


def _shares(pairs: list[Pair], total: int, count: int) -> list[list[Pair]]:
    """Divides pairs among threads: about as many bytes for each."""
    shares: list[list[Pair]] = [[] for _ in range(count)]
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
