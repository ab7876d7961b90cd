"""Helpers of the tests of loading: data files of known tensors, and targets for them."""

from __future__ import annotations

import torch

from dcp_tensorizer._loading.plan import ReadTarget
from dcp_tensorizer._storage.base import Storage
from dcp_tensorizer._tensor_file.dtypes import host_bytes
from dcp_tensorizer._tensor_file.encode import encode
from dcp_tensorizer._tensor_file.layout import lay_out
from dcp_tensorizer._tensor_file.names import StoredItem
from dcp_tensorizer._tensor_file.regions import Region

from ...lab.seams import sources

Tensors = dict[str, torch.Tensor]
Items = dict[str, StoredItem]


def write_file(storage: Storage, name: str, tensors: Tensors) -> Items:
    """Writes a data file; returns the location of each tensor."""
    layout = lay_out(sources(tensors.items()))
    sink = storage.create(name, layout.nbytes, sync=False)
    items = encode(layout, lambda source: host_bytes(tensors[source.name]), sink, threads=1, file=name)
    return {item.name: item for item in items}


def whole(tensor: torch.Tensor) -> Region:
    return Region((0,) * tensor.ndim, tuple(tensor.shape))


def target_for(
    key: str, item: StoredItem, stored: torch.Tensor, tensor: torch.Tensor, region: Region | None = None
) -> ReadTarget:
    """Returns a target for a region of a stored tensor, or for all of it."""
    return ReadTarget.of(key, item, tuple(stored.shape), region or whole(stored), tensor)


def part(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    return tensor[tuple(slice(a, a + n) for a, n in zip(region.start, region.size, strict=True))]


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns one-byte elements as uint8, because torch cannot copy some of their dtypes from strided memory."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
