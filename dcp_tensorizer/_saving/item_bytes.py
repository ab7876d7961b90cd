"""The bytes of a rank's tensors as they are written, in another dtype if that is asked for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch

from .._runtime.forks import free_in_child
from .._tensor_file.dtypes import host_bytes

_CONVERTED = 4  # tensors to keep: threads go through them in the order of the files


class ItemBytes:
    """Returns the bytes of tensors by their numbers, converted to ``dtypes``. Several threads may ask.

    Converted tensors, and copies from a GPU, are only kept for a moment, so that they are never all in memory.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> None:
        self._tensors = tensors
        self._dtypes = dtypes
        self._converted: OrderedDict[int, memoryview] = OrderedDict()
        self._converting = free_in_child(threading.Lock())

    def fill(self, number: int, start: int, memory: np.ndarray) -> None:
        """Fills memory with a tensor's bytes from ``start`` on."""
        data = self._bytes(number)[start : start + memory.nbytes]
        memory[:] = np.frombuffer(data, dtype=np.uint8)

    def _bytes(self, number: int) -> memoryview:
        tensor, dtype = self._tensors[number], self._dtypes[number]
        if tensor.dtype == dtype and tensor.is_cpu and tensor.is_contiguous():
            return host_bytes(tensor)
        with self._converting:
            if number not in self._converted:
                self._converted[number] = host_bytes(tensor.detach().to(dtype))
                if len(self._converted) > _CONVERTED:
                    self._converted.popitem(last=False)
            self._converted.move_to_end(number)
            return self._converted[number]
