"""Compares two checkpoints by key and by value, block by block, across shardings and formats."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .._tensor_file.dtypes import dtype_name, host_bytes
from .._tensor_file.regions import Region
from .._trust.objects import load_object
from ._formats.registry import open_all
from ._inspect import shown_value
from ._view import CheckpointView, StoredObject, StoredTensor, blocks_of

if TYPE_CHECKING:
    from .._tensor_file.encryption import DecryptionParams

_Pair = tuple[StoredTensor, StoredTensor]

_BLOCK = 8 << 20
_THREADS = 4
_ELEMENTS = 1 << 17  # elements per comparison: 1 MiB as float64


@dataclass(frozen=True, slots=True)
class Change:
    """A key whose value differs.

    Attributes:
        key: The key in the flattened state dict.
        what: ``shape``, ``dtype``, ``kind`` (one value is a tensor, and the other an object), or ``value``.
        before, after: Short descriptions of the two shapes, dtypes, kinds or objects; empty for a tensor whose elements
            differ.
        elements: The number of elements. This and the following are None unless elements of a tensor differ.
        differing: The number of elements that differ in at least one bit.
        largest: The largest absolute difference between two elements with the same index; NaN if only one element of
            such a pair is NaN. None if the dtype has no arithmetic.
        relative: The largest relative difference between two elements with the same index: their absolute difference,
            divided by the larger magnitude of the two. NaN or None if ``largest`` is.
    """

    key: str
    what: str
    before: str = ""
    after: str = ""
    elements: int | None = None
    differing: int | None = None
    largest: float | None = None
    relative: float | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """The differences between two checkpoints. False in a condition if there are none.

    Attributes:
        added: Keys that only the second checkpoint has.
        removed: Keys that only the first checkpoint has.
        changed: Differences of keys that both have.
        same: Number of keys with equal values.
        nbytes: Bytes of tensors read from both checkpoints.
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[Change, ...]
    same: int
    nbytes: int

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)


@dataclass(slots=True)
class _Stats:
    differing: int = 0
    largest: float | None = 0.0
    relative: float | None = 0.0

    def add(self, other: _Stats) -> None:
        self.differing += other.differing
        self.largest = _max(self.largest, other.largest)
        self.relative = _max(self.relative, other.relative)


def diff(
    before: str | os.PathLike[str],
    after: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    encryption: DecryptionParams | None = None,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> Difference:
    """Compares two checkpoints of any formats that `convert` reads, with any sharding.

    Values with the same chunks and the same stored digests are taken as equal, and are not read. So `diff` may miss
    damage; `verify` finds it. The 64-bit digests of two different blocks are equal with a probability of 2^-64.

    Args:
        before: The first checkpoint.
        after: The second checkpoint.
        storage_options: Options of the storages of URLs, such as credentials.
        encryption: The key, if a checkpoint is encrypted.
        on_progress: Called with the bytes compared so far and the total.

    Raises:
        NotCommitted: there is no checkpoint at one of the paths.
        DecryptionError: the key is missing, wrong, or given although neither checkpoint is encrypted.
        CheckpointError: a checkpoint is damaged or cannot be read.
    """
    old, new = open_all((before, after), storage_options or {}, encryption, look_at_files=True)
    return diff_views(old, new, on_progress)


def diff_views(
    before: CheckpointView,
    after: CheckpointView,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
    *,
    block_bytes: int = _BLOCK,
    elements_at_once: int = _ELEMENTS,
) -> Difference:
    old, new = before.paths, after.paths
    changes: dict[str, Change] = {}
    to_read: list[_Pair] = []
    for key in (key for key in old if key in new):
        a, b = before.tensors.get(key), after.tensors.get(key)
        change = None
        if a is not None and b is not None:
            if a.shape != b.shape:
                shapes = [" x ".join(map(str, tensor.shape)) or "scalar" for tensor in (a, b)]
                change = Change(key, "shape", shapes[0], shapes[1])
            elif a.dtype != b.dtype:
                change = Change(key, "dtype", dtype_name(a.dtype), dtype_name(b.dtype))
            elif not proved_same(a, b):
                to_read.append((a, b))
        elif a is None and b is None:
            change = _object_change(before.objects[key], after.objects[key])
        else:
            change = Change(key, "kind", "tensor" if a else "object", "tensor" if b else "object")
        if change is not None:
            changes[key] = change
    compared = _compare_tensors(to_read, on_progress, block_bytes, elements_at_once)
    for (a, _), stats in zip(to_read, compared, strict=True):
        if stats.differing:
            count = a.nbytes // a.dtype.itemsize
            changes[a.key] = Change(a.key, "value", "", "", count, stats.differing, stats.largest, stats.relative)
    return Difference(
        tuple(key for key in new if key not in old),
        tuple(key for key in old if key not in new),
        tuple(changes[key] for key in old if key in changes),
        len(old.keys() & new.keys()) - len(changes),
        2 * sum(a.nbytes for a, _ in to_read),
    )


def proved_same(a: StoredTensor, b: StoredTensor) -> bool:
    """Returns whether two tensors were saved in the same chunks with the same digests."""
    known = _digests(a)
    return bool(known) and known == _digests(b)


def _digests(tensor: StoredTensor) -> dict[tuple[int, ...], tuple[tuple[int, ...], str, bytes]] | None:
    if any(chunk.item.length and not chunk.item.digests for chunk in tensor.chunks):
        return None
    return {chunk.part.start: (chunk.part.size, chunk.item.dtype, chunk.item.digests) for chunk in tensor.chunks}


def _object_digests(stored: StoredObject) -> bytes:
    item = stored.item
    return item.digests if item is not None and item.length == stored.nbytes else b""


def _object_change(a: StoredObject, b: StoredObject) -> Change | None:
    if (known := _object_digests(a)) and known == _object_digests(b):
        return None
    contents = a.read(), b.read()
    if contents[0] == contents[1]:
        return None
    # Pickles of equal values differ if one value contains the same string object twice, and the other contains two
    # equal string objects.
    with suppress(Exception):
        x, y = map(load_object, contents)
        if (x == y) is True and repr(x) == repr(y):  # 1 == 1.0 == True
            return None
    (old_type, old, _), (new_type, new, _) = map(shown_value, contents)
    if (old, old_type) == (new, new_type):  # for example because the descriptions are truncated
        old, new = f"{old} ({a.nbytes:,} bytes)", f"{new} ({b.nbytes:,} bytes)"
    return Change(a.key, "value", old, new)


def _compare_tensors(
    pairs: list[_Pair], on_progress: Callable[[int, int], object], block_bytes: int, elements_at_once: int
) -> list[_Stats]:
    def compare_block(block: tuple[int, Region]) -> _Stats:
        number, region = block
        a, b = (tensor.read(region).reshape(-1) for tensor in pairs[number])
        stats = _Stats()
        if not np.array_equal(host_bytes(a), host_bytes(b)):
            for start in range(0, a.numel(), elements_at_once):
                stats.add(_compare(a[start : start + elements_at_once], b[start : start + elements_at_once]))
        return stats

    compared = [_Stats() for _ in pairs]
    blocks = [(number, region) for number, (a, _) in enumerate(pairs) for region in blocks_of(a, block_bytes)]
    done, total = 0, 2 * sum(a.nbytes for a, _ in pairs)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="diff") as pool:
        for (number, region), stats in zip(blocks, pool.map(compare_block, blocks), strict=True):
            compared[number].add(stats)
            done += 2 * math.prod(region.size) * pairs[number][0].dtype.itemsize
            on_progress(done, total)
    return compared


def _compare(a: torch.Tensor, b: torch.Tensor) -> _Stats:
    bits = np.frombuffer(host_bytes(a), np.uint8) != np.frombuffer(host_bytes(b), np.uint8)
    differing = int(bits.reshape(-1, a.itemsize).any(axis=1).sum())
    if not differing:
        return _Stats()
    try:
        distance, scale = _distances(a, b)
    except (RuntimeError, NotImplementedError, TypeError):
        return _Stats(differing, None, None)
    with np.errstate(all="ignore"):
        relative = np.where(distance == 0, 0.0, np.where(np.isinf(distance), np.inf, distance / scale))
    return _Stats(differing, float(distance.max()), float(relative.max()))


def _distances(a: torch.Tensor, b: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Returns each pair's distance (0 for two NaNs or equal infinities), and the larger magnitude of its elements."""
    with np.errstate(all="ignore"):
        if a.dtype.is_floating_point or a.dtype.is_complex:
            wide = torch.complex128 if a.dtype.is_complex else torch.float64
            x, y = a.to(wide).numpy(), b.to(wide).numpy()
            alike = (x == y) | (np.isnan(x) & np.isnan(y))
            return np.where(alike, 0.0, np.abs(x - y)), np.maximum(np.abs(x), np.abs(y))
        x, y = (t.view(torch.uint8).numpy() if t.dtype is torch.bool else t.numpy() for t in (a, b))
        unsigned = np.dtype(f"u{x.itemsize}")
        distance = np.maximum(x, y).view(unsigned) - np.minimum(x, y).view(
            unsigned
        )  # unsigned, because the difference may overflow the signed type
        return distance.astype(np.float64), np.maximum(np.abs(x.astype(np.float64)), np.abs(y.astype(np.float64)))


def _max(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else float(np.maximum(a, b))  # NaN if either is
