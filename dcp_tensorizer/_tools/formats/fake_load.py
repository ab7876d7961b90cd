"""What ``torch.save`` wrote, loaded without the elements of its tensors: fake ones say where in the file those lie."""

from __future__ import annotations

import bisect
import io
import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import IO, Any

import torch

from ..._format.objects import unsafe_globals
from ..._format.torch_archive import check_saved
from ..._torch_compat import NEVER_FAKE, FakeTensor, FakeTensorMode, checkpoint_offset
from ...errors import ConversionError, UntrustedObject
from .common import FileRange

__all__ = ["is_located", "load_fake", "tensors_in"]


def load_fake(file: FileRange, nbytes: int, path: str) -> Any:
    """Loads what ``torch.save`` wrote, with a fake tensor for each tensor; `is_located` says which have their place.

    Args:
        file: What was written, from its first byte.
        nbytes: How much that is.
        path: For messages.

    Raises:
        UntrustedObject: it would need code to run.
        ConversionError: it cannot be read.
    """
    buffered = io.BufferedReader(file)
    try:
        records = check_saved(buffered, nbytes)
    except ValueError as error:
        raise ConversionError(f"{path} cannot be read: {error}") from error
    try:
        return _checked(_load(buffered, weights_only=True), records)
    except OSError:
        raise
    except Exception as error:
        refused = error
    try:
        needed = unsafe_globals(buffered)
    except UntrustedObject:  # not what torch.save writes
        raise ConversionError(f"{path} cannot be read: {type(refused).__name__}: {refused}") from refused
    if needed:
        raise UntrustedObject(
            f"{path} could run code when it is loaded ({', '.join(needed)}), and was not loaded: if you trust it, "
            f"load it with torch.load(weights_only=False), and save its state dict"
        )
    try:
        return _checked(_load(buffered, weights_only=False), records)
    except OSError:
        raise
    except Exception as error:
        raise ConversionError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _load(file: IO[bytes], *, weights_only: bool) -> Any:
    file.seek(0)
    with FakeTensorMode():
        pickling = None if weights_only else SimpleNamespace(__name__="pickle", Unpickler=_Unpickler)
        return torch.load(file, weights_only=weights_only, pickle_module=pickling)


class _Unpickler(pickle.Unpickler):
    """Puts a tensor on the meta device in the place of each that torch cannot make as a fake one: a sparse one, say."""

    def find_class(self, module: str, name: str) -> Any:
        return _stand_in if f"{module}.{name}" in NEVER_FAKE else super().find_class(module, name)


def _stand_in(*arguments: Any) -> torch.Tensor:
    return torch.empty(0, device="meta")


def _checked(value: Any, records: Sequence[tuple[int, int]]) -> Any:
    _check_storages(value, records)
    return value


def _check_storages(value: Any, records: Sequence[tuple[int, int]]) -> None:
    """Checks that the bytes of all tensors lie within records of their file.

    Raises:
        ValueError: some do not.
    """
    for tensor in tensors_in(value):
        if not is_located(tensor) or not tensor.numel():
            continue
        storage = tensor.untyped_storage()
        start = checkpoint_offset(tensor)
        number = bisect.bisect_right(records, (start, 0)) - 1
        if number < 0 or storage.nbytes() > records[number][1]:
            raise ValueError(f"a tensor claims to have {storage.nbytes():,} bytes, more than are stored")


def is_located(value: Any) -> bool:
    """Whether a value of `load_fake` is a tensor whose elements lie in the file, as plain bytes."""
    is_strided = isinstance(value, FakeTensor) and value.layout is torch.strided
    return is_strided and not value.is_quantized and not value.is_meta


class _TensorFinder(pickle.Pickler):
    """Looks for tensors wherever a pickle would."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.tensors: list[Any] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor | torch.UntypedStorage | torch.storage.TypedStorage):
            return None
        self.tensors.append(value)
        return 0


def tensors_in(value: Any) -> Sequence[Any]:
    """The tensors anywhere in a value, in the order in which they are pickled."""
    finder = _TensorFinder()
    finder.dump(value)
    return finder.tensors
