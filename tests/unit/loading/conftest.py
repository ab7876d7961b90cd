"""Fixtures of the tests of loading."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_tensorizer._storage.base import Storage
from dcp_tensorizer._storage.open import open_storage


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path)


@pytest.fixture(params=[True, False], ids=["verify", "trust"])
def verify(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)
