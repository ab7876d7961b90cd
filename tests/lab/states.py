"""Tensors of every dtype, and comparisons of states."""

from __future__ import annotations

import io
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for name in ("complex32", "bcomplex32"):  # torch warns of each, once a process, that it is experimental
        if isinstance(getattr(torch, name, None), torch.dtype):
            torch.empty(0, dtype=getattr(torch, name))


def _plain_dtypes() -> list[torch.dtype]:
    """Every dtype that can be saved: not torch's quantised ones, opaque bits, and integers below a byte."""
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    plain = {dtype for dtype in dtypes if not re.match(r"torch\.(q|bits|u?int[1-7]$)", str(dtype))}
    return sorted(plain, key=str)


ALL_DTYPES = _plain_dtypes()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def filled(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor of arbitrary but repeatable bytes; NaNs and infinities occur."""
    count = 1
    for extent in shape:
        count *= extent
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def raw(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor in C order, after conjugation and negation."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    if not plain.numel():
        return b""
    if plain.numel() == 1:  # contiguous whatever its strides are
        plain = plain.as_strided((1,), (1,))
    if not plain.is_contiguous():
        plain = plain.view(torch.uint8).contiguous() if plain.itemsize == 1 else plain.contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether two tensors have the same dtype, shape and bits (NaNs are equal to themselves)."""
    return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)


def assert_same(actual: Any, expected: Any, key: str = "state") -> None:
    """Fails unless two states are equal in structure, dtype, shape and every bit."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), key
        for name, item in expected.items():
            assert_same(actual[name], item, f"{key}.{name}")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), key
        for number, item in enumerate(expected):
            assert_same(actual[number], item, f"{key}.{number}")
    elif isinstance(expected, torch.Tensor):
        assert same(actual, expected), key
    elif isinstance(expected, io.BytesIO):
        assert actual.getvalue() == expected.getvalue(), key
    elif isinstance(expected, np.ndarray):
        assert np.array_equal(actual, expected), key
    else:
        assert actual == expected, key


def directories_in(folder: Path) -> list[str]:
    """The names of the directories in a folder, sorted: those of a manager's checkpoints."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir())
