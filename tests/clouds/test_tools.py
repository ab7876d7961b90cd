"""The tools say the same of a folder of checkpoints on Azure and Google Cloud as elsewhere."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dcp_tensorizer import ConversionError, NotCommitted
from dcp_tensorizer.tools import convert, diff, inspect, report, verify

from ..lab.checkpoints import make_checkpoint
from .servers import AzureServer, GoogleServer


@pytest.mark.filterwarnings("ignore:Sending a large body directly")  # aiohttp of a part, in a thread of its own
@pytest.mark.parametrize("kind", ["azure", "google"])
def test_a_folder_of_checkpoints(tmp_path: Path, request: pytest.FixtureRequest, kind: str) -> None:
    """`verify` verifies all checkpoints in a folder. The other tools name them, and write nothing."""
    server: AzureServer | GoogleServer = request.getfixturevalue(kind)
    url, options = server.url(uuid.uuid4().hex), server.options()
    for step in (1, 2):
        make_checkpoint(f"{url}/step-{step}", {"w": torch.ones(3)}, options=options)
    assert verify(url, storage_options=options).checkpoints == 2
    refused: list[Callable[[], object]] = [
        lambda: inspect(url, storage_options=options),
        lambda: diff(url, f"{url}/step-1", storage_options=options),
        lambda: convert(url, tmp_path / "out", "torch", storage_options=options),
        lambda: report([url], tmp_path / "out", storage_options=options),
    ]
    for call in refused:
        with pytest.raises(NotCommitted, match=r"There are checkpoints below it: step-2, step-1\.$"):
            call()
    with pytest.raises(ConversionError, match="exists"):
        convert(f"{url}/step-1", url, "torch", storage_options=options)
    assert list(tmp_path.iterdir()) == []
