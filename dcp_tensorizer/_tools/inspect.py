"""What is in a checkpoint, in plain values: where its tensors are, and what its objects are."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .._format.layout import StoredItem, data_file_rank
from .._format.objects import load_trusted, unsafe_globals
from .._memory.tensor_bytes import dtype_name
from ..errors import DecryptionError
from .checkpoint_view import CheckpointView, Path, StoredObject, StoredTensor

__all__ = ["inspect_checkpoint", "shown_value"]

_MAX_SHOWN = 80  # characters of a value
_MAX_READ = 1 << 20  # bytes: larger objects are not read to be shown
_THREADS = 16


def inspect_checkpoint(view: CheckpointView, files: Mapping[str, int], pattern: str = "*") -> dict[str, Any]:
    """Everything about the keys that match a pattern; builtin types only.

    Args:
        view: A dcp_tensorizer checkpoint.
        files: Bytes by name of its data files.
        pattern: As in a shell; ``*`` also matches dots.
    """
    tensors = [t for t in view.tensors.values() if fnmatch.fnmatchcase(t.key, pattern)]
    objects = [o for o in view.objects.values() if fnmatch.fnmatchcase(o.key, pattern)]
    with ThreadPoolExecutor(_THREADS) as pool:
        described = list(pool.map(_object, objects))
    return {
        "path": view.path,
        "ranks": len({data_file_rank(name) for name in files}),
        "files": [{"file": name, "rank": data_file_rank(name), "bytes": size} for name, size in sorted(files.items())],
        "tensors": [_tensor(tensor) for tensor in tensors],
        "objects": described,
        "by_dtype": _totals((dtype_name(t.dtype), t) for t in tensors),
        "by_key": _totals(zip(_groups([t.path for t in tensors]), tensors, strict=True)),
    }


def shown_value(content: bytes) -> tuple[str, str]:
    """Type and value, in short, of what ``torch.save`` made of an object; nothing of it is run."""
    try:
        value = load_trusted(content)
    except Exception:
        return "?", f"needs {', '.join(unsafe_globals(content))} to load"
    text = repr(value)
    return type(value).__qualname__, text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def _tensor(tensor: StoredTensor) -> dict[str, Any]:
    return {
        "key": tensor.key,
        "shape": list(tensor.shape),
        "dtype": dtype_name(tensor.dtype),
        "bytes": tensor.nbytes,
        "chunks": [
            {"offset": list(chunk.region.start), "shape": list(chunk.region.size), "bytes": chunk.item.length}
            | _place(chunk.item)
            for chunk in tensor.chunks
        ],
    }


def _object(stored: StoredObject) -> dict[str, Any]:
    assert stored.item is not None
    kind = "?"
    try:
        if stored.nbytes > _MAX_READ:
            value = "too large to be shown"
        else:
            kind, value = shown_value(stored.read())
    except DecryptionError:
        value = "encrypted"
    return {"key": stored.key, "type": kind, "value": value, "bytes": stored.nbytes, **_place(stored.item)}


def _place(item: StoredItem) -> dict[str, Any]:
    if not item.file:
        return {"rank": None, "file": None, "file_offset": None}
    return {"rank": data_file_rank(item.file), "file": item.file, "file_offset": item.offset}


def _totals(named: Iterable[tuple[str, StoredTensor]]) -> dict[str, dict[str, int]]:
    totals: dict[str, dict[str, int]] = defaultdict(lambda: {"tensors": 0, "elements": 0, "bytes": 0})
    for name, tensor in named:
        totals[name]["tensors"] += 1
        totals[name]["elements"] += tensor.nbytes // tensor.dtype.itemsize
        totals[name]["bytes"] += tensor.nbytes
    return dict(totals)


def _groups(paths: list[Path]) -> list[str]:
    """The top-level key of each path; where all have the same, down to the first that differs."""
    depth = 1
    while len({path[:depth] for path in paths}) == 1 and all(len(path) > depth + 1 for path in paths):
        depth += 1
    return [".".join(map(str, path[:depth])) for path in paths]
