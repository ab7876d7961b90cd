"""Objects as ``torch.save`` stores them: which of their types could run code, and how they are loaded without that.

torch's own weights-only loader does not do for this. It knows few types of the standard library and none of NumPy. A
class that is added to its list is added for the whole process, and takes any arguments and any state: a dtype that is
made so reads foreign memory. And it calls what it trusts before it meets what it does not trust.
"""

from __future__ import annotations

import gc
import io
from collections.abc import Mapping, Sequence
from typing import IO, Any

import numpy as np
import torch

from .._runtime.torch_compat import pickle_of, trusted_globals
from ..errors import UntrustedObject
from .check import Malformed, refused_globals


def unsafe_globals(content: bytes | IO[bytes], max_opcodes: int | None = None) -> tuple[str, ...]:
    """The ``module.name`` of everything in a saved object that could run code; none of it is run or imported.

    Data of the standard library's, NumPy's and torch's types is safe, and so is what the user passed to
    ``torch.serialization.add_safe_globals``.

    Args:
        content: What ``torch.save`` wrote; of a file, its pickle is read.
        max_opcodes: Looks at no more of its pickle than this.

    Raises:
        UntrustedObject: ``torch.save`` writes nothing like that.
    """
    file = io.BytesIO(content) if isinstance(content, bytes) else content
    try:
        return refused_globals(pickle_of(file), _allowed(), trusted_globals(), max_opcodes)
    except (Malformed, ValueError) as error:
        raise UntrustedObject(f"torch.save does not write such an object: {error}") from None


def load_object(content: bytes) -> Any:
    """Loads a saved object.

    Raises:
        UntrustedObject: it could run code.
    """
    if names := unsafe_globals(content):
        raise UntrustedObject(f"it needs {', '.join(names)}")
    return torch.load(io.BytesIO(content), weights_only=False)


def is_small(value: Any) -> bool:
    """Returns whether it takes little time to show or compare a value. A list may hold another one twice, and so on."""
    pending, left = [value], 100_000
    while pending and left > 0:
        member = pending.pop()
        left -= 1
        if isinstance(member, np.ndarray):
            pending += member.ravel().tolist() if member.dtype.hasobject else []
        elif not isinstance(member, type):
            pending += (found for found in gc.get_referents(member) if not isinstance(found, type))
    return not pending


def advice(names: Sequence[str]) -> str:
    """Advice for objects that need these."""
    return (
        f"If you trust these types, import their modules and call "
        f"torch.serialization.add_safe_globals([{', '.join(names)}]) before the load. If you trust the whole "
        f"checkpoint as you trust a program, pass allow_pickle=True to the reader."
    )


def _allowed() -> Mapping[str, Any]:
    """The types that the user trusts, by name."""
    named = [item if isinstance(item, tuple) else (item, "") for item in torch.serialization.get_safe_globals()]
    return {name or f"{value.__module__}.{value.__qualname__}": value for value, name in named}
