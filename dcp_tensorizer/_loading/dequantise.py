"""Weights that are quantised by blocks, as Hugging Face stores them: FP8 elements, and another tensor with a scale for
each block.

A weight is read as it is stored, and multiplied on its way to a target of another dtype. A target of the same FP8 dtype
gets the stored elements, and one of another FP8 dtype is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from .._index.layouts import Region
from .._storage.base import Storage
from .._tensor_file.dtypes import named_dtype
from .._tensor_file.names import StoredItem
from ..errors import ReadError
from .targets import ReadTarget

_SCALE = "_scale_inv"
_BLOCK = (128, 128)  # of DeepSeek's models, and torch's default
_FP8 = ("float8_e4m3fn", "float8_e5m2")
_CONFIG = "config.json"

Stored = Mapping[str, tuple[StoredItem, tuple[int, ...]]]
"""The stored tensors of a model, with their shapes."""


class Quantised(NamedTuple):
    """A quantised weight: its name, where it is stored, and the scales of its blocks."""

    name: str
    weight: StoredItem
    shape: tuple[int, ...]
    scales: StoredItem
    scales_shape: tuple[int, ...]


def quantised(stored: Stored) -> dict[str, Quantised]:
    """The quantised weights among the stored tensors, by name."""
    return {
        name: Quantised(name, item, shape, *stored[name + _SCALE])
        for name, (item, shape) in stored.items()
        if item.dtype in _FP8 and name + _SCALE in stored
    }


def block_size(storage: Storage) -> tuple[int, int]:
    """The size of a block, by the model's configuration; 128 x 128 if it does not say."""
    with suppress(ValueError, TypeError, LookupError, RecursionError):
        content = json.loads(storage.read(_CONFIG) or b"{}")
        rows, columns = content["quantization_config"]["weight_block_size"]
        if type(rows) is int and type(columns) is int and rows > 0 and columns > 0:
            return rows, columns
    return _BLOCK


class DequantisingPlanner:
    """Gives memory of the stored dtype for quantised weights, and multiplies what was read into the planner's targets.

    Weights come one after the other, so that memory is needed for only one of them. ``weight_of`` says which weight an
    item is of; ``read`` reads targets, as `executor.fetch` does.
    """

    def __init__(
        self,
        storage: Storage,
        planner: LoadPlanner,
        weight_of: Callable[[ReadItem], Quantised],
        read: Callable[[list[ReadTarget]], object],
    ) -> None:
        self._path = storage.path
        self._planner = planner
        self._weight_of = weight_of
        self._read = read
        self._block = block_size(storage)
        self._target: torch.Tensor | None = None  # of the weight that is being read
        self._scales: tuple[str, torch.Tensor] | None = None  # of the last weight

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        """The target itself if it is of the stored dtype, or else memory for the stored elements.

        Raises `ReadError`, naming the key, if the scales do not fit the weight, or the target is of another FP8 dtype.
        """
        target, weight = self._planner.resolve_tensor(item), self._weight_of(item)
        if target.dtype.is_floating_point and target.dtype.itemsize == 1:
            if target.dtype != named_dtype(weight.weight.dtype):
                raise ReadError(
                    f"{self._path}: {weight.name!r} is stored as {weight.weight.dtype}, whose scales do not fit a "
                    f"target of {target.dtype}: give it one of the same dtype, or of one with more bits"
                )
            self._target = None
            return target
        self._check(weight)
        self._target = target.detach()
        return torch.empty(target.shape, dtype=named_dtype(weight.weight.dtype), device="cpu")

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """Multiplies what was read into the target."""
        target, self._target = self._target, None
        if target is not None:
            start = item.storage_offsets[0], item.storage_offsets[1]
            dequantise(tensor, self._scales_of(self._weight_of(item)), self._block, start, target)
        self._planner.commit_tensor(item, tensor if target is None else target)

    def _check(self, weight: Quantised) -> None:
        shape = weight.shape
        if len(shape) == 2 and weight.scales_shape == tuple(
            -(-extent // size) for extent, size in zip(shape, self._block, strict=True)
        ):
            return
        raise ReadError(
            f"{self._path}: {weight.name!r} is {shape} and its scales are {weight.scales_shape}, which are not blocks "
            f"of {self._block[0]} x {self._block[1]}: weight_block_size in {_CONFIG} has to say otherwise, or the "
            f"weight is quantised in another way. A target of {weight.weight.dtype} gets it as it is stored"
        )

    def _scales_of(self, weight: Quantised) -> torch.Tensor:
        if self._scales is None or self._scales[0] != weight.name:
            shape = weight.scales_shape
            scales = torch.empty(shape, dtype=named_dtype(weight.scales.dtype), device="cpu")
            whole = Region((0,) * len(shape), shape)
            self._read([ReadTarget.of(weight.name + _SCALE, weight.scales, shape, whole, scales)])
            self._scales = weight.name, scales.float()
        return self._scales[1]


def dequantise(
    part: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], start: tuple[int, int], target: torch.Tensor
) -> None:
    """Multiplies a part of a weight, which begins at ``start``, by the scales of its blocks, in float32."""
    rows, columns = block
    of_columns = torch.arange(start[1], start[1] + part.shape[1]) // columns
    at = 0
    while at < part.shape[0]:
        number = (start[0] + at) // rows
        end = min(part.shape[0], (number + 1) * rows - start[0])
        target[at:end].copy_(part[at:end].float() * scales[number, of_columns])
        at = end
