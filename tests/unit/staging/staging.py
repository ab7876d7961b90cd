"""Helpers of the tests of staging."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dcp_tensorizer._staging.staged_save import StagedStateDict
from dcp_tensorizer._staging.stager import Stager


def staged(stager: Stager, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a plain copy of the staged state dict. Raises the error of staging."""
    result = stager.stage(state)
    if result.staged_save.error is not None:
        raise result.staged_save.error
    return dict(result)


def inode(staged: StagedStateDict) -> int:
    """Identifies the memory of a staged state dict."""
    assert staged.staged_save.buffer is not None
    return os.fstat(staged.staged_save.buffer.fd).st_ino
