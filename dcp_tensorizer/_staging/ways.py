"""The staging strategies: which tensors are copied to the staging buffer, and by which process.

`SharedWay` is in `shared_mappings`, and `DeviceWay` in `_writer_process.gpu_ipc`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .shared_mappings import SharedTensors
    from .shared_memory import SharedBuffer
    from .tensor_copy import Copies


class BufferWay:
    """The strategy of ``staging="buffer"``: this process copies everything. The others override methods of this one.

    Attributes:
        copies_from_devices: Whether this process copies from devices. If it does, it pins the buffer, and may
            convert the tensors to another dtype while it copies them (`Stager.dtype_of`).
        holds_training: Whether training waits for the save, because the save reads the live state.
    """

    copies_from_devices = True
    holds_training = False

    def shared(self, tensors: Sequence[torch.Tensor], omitted: set[int]) -> tuple[set[int], SharedTensors | None]:
        """Returns the numbers of the tensors that are written without a copy, and an object that locates these tensors.

        Leaves out the tensors whose numbers are in ``omitted``.
        """
        return set(), None

    def copy_elsewhere(self, buffer: SharedBuffer, copies: Copies) -> bool:
        """Makes the copies from devices in another process. Returns whether that succeeded.

        Not called if `copies_from_devices` is true.
        """
        raise NotImplementedError


BUFFER = BufferWay()
