"""Tests that need a GPU: ``make gpu`` runs them. Without one they fail; they are never skipped."""

from __future__ import annotations

import pytest
import torch


def pytest_sessionstart(session: pytest.Session) -> None:
    if not torch.cuda.is_available() and not session.config.option.collectonly:
        pytest.exit("tests/gpu needs a CUDA GPU and a CUDA build of torch", returncode=1)
