"""The tests of destinations, counted by the server that they run against: `make clouds` installs what they need.

    python -m benchmarks.servers

Azure's and Google's servers are emulators. What these cannot show is listed in the guide to object stores.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from .harness import Content, run, table
from .junit import Outcome, run_tests
from .pages import page

SUITES = ("tests/integration/storage", "tests/e2e/test_remote.py", "tests/clouds")
SERVERS = {
    "S3": "SeaweedFS",
    "Azure": "Azurite",
    "Google Cloud Storage": "fake-gcs-server",
    "SFTP": "asyncssh",
}
KINDS = ("contract", "faults", "whole checkpoints")
_OUTCOMES = ("passed", "skipped", "failed")
_WHAT = (
    "how many tests pass against a server of each kind that is really started: the contract of storages, with jobs "
    "that commit at the same moment; requests that fail in each step; and checkpoints that are saved and loaded. "
    "Warnings are errors."
)


class Place(NamedTuple):
    """Where a test is counted."""

    server: str
    kind: str


def place_of(module: str, cls: str, name: str) -> Place | None:
    """Where a test is counted; None if it needs no server.

    Args:
        module: Of the test, without its package.
        cls: Its class; empty if it has none.
        name: Its own, with its parameters.
    """
    cloud = {"azure": "Azure", "google": "Google Cloud Storage"}.get(name.partition("[")[2].strip("]").split("-")[0])
    if module == "test_contract":
        server = {"TestS3": "S3", "TestS3Stream": "S3", "TestSftp": "SFTP"}.get(cls)
        server = server or {"TestAzure": "Azure", "TestGoogle": "Google Cloud Storage"}.get(cls)
        return Place(server, "contract") if server else None
    if module == "test_checkpoints" and cloud:
        return Place(cloud, "whole checkpoints")
    if module == "test_faults":
        return Place(cloud or "Azure", "faults")  # wrong credentials: no emulator of Google's looks at them
    kinds = {
        "test_s3": Place("S3", "contract"),
        "test_s3_faults": Place("S3", "faults"),
        "test_remote": Place("S3", "whole checkpoints"),
        "test_sftp": Place("SFTP", "faults"),
        "test_sftp_silence": Place("SFTP", "faults"),
        "test_sftp_checkpoints": Place("SFTP", "whole checkpoints"),
    }
    return kinds.get(module)


def counted(found: Iterable[Outcome]) -> dict[str, Any]:
    """What came of tests, by server and kind: passed, skipped and failed tests, and which ones failed."""
    counts: dict[Place, Counter[str]] = {Place(server, kind): Counter() for server in SERVERS for kind in KINDS}
    failed = []
    for one in found:
        parts = one.where.split(".")
        cls = parts.pop() if parts[-1].startswith("Test") else ""
        place = place_of(parts[-1], cls, one.name)
        if place is not None:
            counts[place]["failed" if one.is_bad else one.outcome] += 1
            failed += [f"{parts[-1]}.{one.name}"] if one.is_bad else []
    return {
        "counts": [[*place, *map(count.__getitem__, _OUTCOMES)] for place, count in counts.items()],
        "failed": failed,
    }


def render(content: Content) -> str:
    """The page of results."""
    rows = [
        [server, SERVERS[server], kind, *map(str, counts)] for server, kind, *counts in content["counts"] if sum(counts)
    ]
    which = f"Failed: {', '.join(content['failed'])}." if content["failed"] else ""
    tests = table(("destination", "server", "tests of", *_OUTCOMES), rows)
    return page(content, "Servers", _WHAT, "1 run", "servers", tests, which, spreads=False)


def measure(options: argparse.Namespace, folder: Path) -> Content:
    """Runs the tests."""
    return counted(run_tests(sys.executable, folder, *SUITES) or [])


if __name__ == "__main__":
    run("servers", measure, render, about=__doc__, bad=lambda content: ", ".join(content["failed"]))
