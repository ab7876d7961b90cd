"""Emulators of Azure and Google Cloud, each started by the first test that needs it; and nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..lab.leak_check import nothing_left_behind
from .servers import AzureServer, GoogleServer, azure_server, google_server

__all__ = ["nothing_left_behind"]


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    with azure_server(tmp_path_factory.mktemp("azure")) as server:
        yield server


@pytest.fixture(scope="session")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GoogleServer]:
    with google_server(tmp_path_factory.mktemp("google")) as server:
        yield server
