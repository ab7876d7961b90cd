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
    """A stager that returns before it has copied."""
    stager = Stager(overlap_staging=True)
    yield stager
    stager.saves.close()


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """As ``torchrun`` sets it: torch itself copies with one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
