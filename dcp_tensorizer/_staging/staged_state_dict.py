"""What a save gets of a staged state dict: all of it, or its error.

DCP may give what was staged here to any storage writer. A writer of this package knows the `StagedSave`, and raises its
error in DCP's first hook. Others know nothing of it. So a save is given nothing before everything is copied, and where
that has failed, a value that raises when it is planned or pickled. Either way DCP hands the error to every rank.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import StagingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from .staged_save import StagedSave

__all__ = ["StagedStateDict", "StagingFuture"]


class StagedStateDict(dict[str, Any]):
    """A staged state dict that knows which thread takes it to save it.

    ``storage_meta()`` gets no arguments: it could not tell the save of a staged state dict from a ``dcp.save`` of
    another one that runs on another thread with the same writer. ``items()`` is what DCP calls first on the very dict
    that it saves, on the save's thread and before any collective (PROCESS mode pickles the dict there instead), so it
    ties save and dict together, and waits until the ones staged before are over, and this one is copied.

    So saves run one at a time, in the order in which they were staged, on every rank the same.
    """

    def __init__(
        self, content: Mapping[str, Any], staged_save: StagedSave, wait_turn: Callable[[StagedSave], None]
    ) -> None:
        super().__init__(content)
        self.staged_save = staged_save
        self._wait_turn = wait_turn
        staged_save.attach(self)

    def items(self) -> Any:
        error = self._take()
        return super().items() if error is None else _failed(error).items()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        error = self._take()
        return (dict, (list(super().items()),)) if error is None else (_failed, (error,))

    def _take(self) -> str | None:
        """Waits until everything is copied; returns why it is not."""
        if self.staged_save.thread is None:
            self.staged_save.take()
            self._wait_turn(self.staged_save)
        try:
            self.staged_save.wait_copied()
        except StagingError as error:  # raised here, it would leave other ranks waiting in a collective
            return str(error)
        return None


class _Failed:
    """A value of a state dict that could not be staged."""

    def __init__(self, error: str) -> None:
        self._error = error

    def __create_write_items__(self, name: str, value: object) -> NoReturn:
        """DCP's planners ask a value first of all how it is written."""
        raise StagingError(self._error)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Other planners do not ask, and have it pickled."""
        raise StagingError(self._error)


def _failed(error: str) -> dict[str, Any]:
    """What a save gets of a state dict that could not be staged."""
    return {"staging": _Failed(error)}


class StagingFuture(concurrent.futures.Future[dict[str, Any]]):
    """What `stage` returns when it does not wait: done when training may change the state.

    Its result is there before that: the save takes it, and then waits itself until it is copied. So what training waits
    for may even be a part of the save.
    """

    def __init__(self, staged: StagedStateDict) -> None:
        super().__init__()
        self._staged: StagedStateDict | None = staged
        staged.staged_save.watch(self)

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """The staged state dict, until a save takes it; complete when `StagedSave.wait_copied` returns."""
        staged = self._staged
        if staged is None:
            return {}
        if not staged.staged_save.wait_built(timeout):
            raise concurrent.futures.TimeoutError
        return staged

    def let_go(self) -> None:
        """Called when a save has taken the staged state dict."""
        self._staged = None

    def complete(self) -> None:
        """Training may change the state."""
        with suppress(concurrent.futures.InvalidStateError):  # cancelled, or done
            self.set_result({})
