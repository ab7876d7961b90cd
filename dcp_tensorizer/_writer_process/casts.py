"""Casts tensors for shared files, with torch, so that NaNs and rounding are the same as with ``tensor.to(dtype)``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch

from .._tensor_file.dtypes import named_dtype
from .protocol import TensorSource
from .shared_job import Fill

# The trainer's memory is mapped read-only, and this module only reads it.
warnings.filterwarnings("ignore", message="The given buffer is not writable")
torch.set_num_threads(1)


def filling(
    sources: Sequence[TensorSource], dtypes: Sequence[str], contents: Callable[[TensorSource], memoryview]
) -> Fill:
    """Returns a function that fills memory with bytes of tensors, converted to ``dtypes``.

    ``contents`` returns a tensor's unconverted bytes.
    """

    def fill(number: int, start: int, memory: np.ndarray) -> None:
        source = sources[number]
        before, after = named_dtype(source.dtype), named_dtype(dtypes[number])
        count, first = memory.nbytes // after.itemsize, start // after.itemsize
        data = contents(source)[first * before.itemsize : (first + count) * before.itemsize]
        elements = torch.frombuffer(data, dtype=before)
        cast = elements if before == after else elements.to(after)
        memory[:] = cast.view(torch.uint8).numpy()

    return fill
