"""Stagers for the tests of staging, closed after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dcp_tensorizer._staging.stager import Stager


@pytest.fixture
def stager() -> Iterator[Stager]:
    stager = Stager()
    yield stager
    stager.saves.close()


@pytest.fixture
def overlapping() -> Iterator[Stager]:
    """Makes a stager whose `stage` returns before it has copied."""
    stager = Stager(overlap_staging=True)
    yield stager
    stager.saves.close()


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Limits torch's own copies to one thread, as ``torchrun`` does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
