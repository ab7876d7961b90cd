"""What the corpus' checkpoints hold: values that follow from their names, and digests of what a load gives back."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

KEY = bytes(range(32))
# The checkpoints below a release's folder that `dcp.load` reads, each by its path.
CHECKPOINTS = [
    "plain",
    "sha256",
    "encrypted",
    "sharded-2",
    "sharded-3",
    "sharded-4",
    "planned-2",
    "per-rank",
    "reused/step-1",
    "reused/step-2",
    "tiered/step-1",
    "manager/step-1",
    "manager/step-2",
    "manager/step-3",
    "manager/step-4",
]
MODELS = ["model", "model-sharded"]
DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
)


def filled(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor whose bytes follow from its name, in every release of torch."""
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.tensor([(n + len(name)) % 3 == 0 for n in range(count)]).reshape(shape)
    data = hashlib.shake_128(name.encode()).digest(count * dtype.itemsize) if count else b""
    return torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)].view(dtype).reshape(shape)


def plain_state() -> dict[str, Any]:
    """Every kind of value that one rank saves: dtypes, shapes and layouts, keys that are unusual, objects."""
    model = {str(dtype).removeprefix("torch."): filled(str(dtype), 7, 5, dtype=dtype) for dtype in DTYPES}
    return {
        "model": model,
        "scalar": filled("scalar"),
        "empty": torch.empty(0, 4),
        "transposed": filled("transposed", 6, 3).t(),
        "a.dotted/key with spaces \N{SNOWMAN}": filled("odd", 3),
        "large": filled("large", 97, 41),
        "optimizer": {"lr": 0.125, "betas": (0.9, 0.999), "names": ["a", "b"], "step": 7, "none": None},
        "stream": io.BytesIO(b"bytes of a stream"),
    }


def digest(value: Any) -> str:
    """A value in words that differ if one bit of it does."""
    if isinstance(value, torch.Tensor):
        raw = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return f"{value.dtype} {list(value.shape)} {hashlib.sha256(raw).hexdigest()}"
    if isinstance(value, io.BytesIO):
        return f"BytesIO {value.getvalue()!r}"
    return f"{type(value).__name__} {value!r}"


def digests_of(reader: dcp.StorageReader) -> dict[str, str]:
    """Loads all of a checkpoint onto one rank, each tensor whole; the digest of each key."""
    entries = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        key: torch.zeros(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in entries.items()
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return {key: digest(value) for key, value in sorted(state.items())}
