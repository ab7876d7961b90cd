"""The tests of destinations, counted by the server that they run against: `make clouds` installs what they need.

    python -m benchmarks.servers

Azure's and Google's servers are emulators. What these cannot show is listed in the guide to object stores.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from .harness import machine, rewrite, store, stored, table
from .pages import opening

ROOT = Path(__file__).resolve().parent.parent
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


def counted(report: Path) -> dict[str, Any]:
    """What a report of pytest's says, by server and kind: passed, skipped and failed tests, and which ones failed."""
    counts: dict[Place, Counter[str]] = {Place(server, kind): Counter() for server in SERVERS for kind in KINDS}
    failed = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        parts = (case.get("classname") or "").split(".")
        cls = parts.pop() if parts[-1].startswith("Test") else ""
        place = place_of(parts[-1], cls, case.get("name") or "")
        if place is None:
            continue
        is_bad = any(case.find(tag) is not None for tag in ("failure", "error"))
        outcome = "failed" if is_bad else "skipped" if case.find("skipped") is not None else "passed"
        counts[place][outcome] += 1
        if is_bad:
            failed.append(f"{parts[-1]}.{case.get('name')}")
    return {
        "counts": [[*place, *map(count.__getitem__, _OUTCOMES)] for place, count in counts.items()],
        "failed": failed,
    }


def page(content: dict[str, Any]) -> str:
    """The results, as a page."""
    rows = [
        [server, SERVERS[server], kind, *map(str, counts)] for server, kind, *counts in content["counts"] if sum(counts)
    ]
    which = [f"Failed: {', '.join(content['failed'])}."] if content["failed"] else []
    return "\n\n".join(
        [
            opening("Servers", content["machine"], _WHAT, "1 run", "servers", spreads=False),
            table(("destination", "server", "tests of", *_OUTCOMES), rows),
            *which,
        ]
    )


def main() -> int:
    """Runs the tests and stores the page; 1 if a test failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.servers", description=__doc__)
    parser.add_argument("--redraw", action="store_true", help="make the page from the stored results")
    if parser.parse_args().redraw:
        rewrite("servers", page(stored("servers")))
        return 0
    with tempfile.TemporaryDirectory(prefix="servers-") as folder:
        report = Path(folder, "report.xml")
        pytest = [sys.executable, "-m", "pytest", *SUITES, "--quiet", "--show-capture=no", f"--junitxml={report}"]
        subprocess.run(pytest, cwd=ROOT, check=False)
        content = {"machine": machine(), **counted(report)}
    store("servers", content, page(content))
    return int(bool(content["failed"]))


if __name__ == "__main__":
    sys.exit(main())
