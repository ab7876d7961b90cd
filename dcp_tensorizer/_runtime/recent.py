"""A bounded cache of results by the digests of their inputs, so that repeated saves compute them once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .forks import free_in_child

_T = TypeVar("_T")


def _one(result: object) -> int:
    return 1


class Recent(Generic[_T]):
    """A thread-safe cache of the results that were added last. Keys are digests of contents, so no entry is ever stale.

    It holds at most ``most`` results; with ``size``, results whose sizes add up to at most ``most``. A copy or an
    unpickled cache is empty.
    """

    def __init__(self, most: int, size: Callable[[_T], int] = _one) -> None:
        self._most = self._left = most
        self._size = size
        self._results: OrderedDict[Any, _T] = OrderedDict()
        # Reentrant, because a signal handler that saves may interrupt the lock's holder.
        self._changing = free_in_child(threading.RLock())

    def __reduce__(self) -> tuple[Any, ...]:
        return Recent, (self._most, self._size)

    def find(self, key: object) -> _T | None:
        return self._results.get(key)

    def add(self, key: object, result: _T) -> None:
        with self._changing:
            if key in self._results:
                self._left += self._size(self._results.pop(key))
            self._results[key] = result
            self._left -= self._size(result)
            while self._left < 0:
                self._left += self._size(self._results.popitem(last=False)[1])
