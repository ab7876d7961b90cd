"""The tests of destinations are counted by server, and none is counted twice or left out unseen."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.junit import outcomes
from benchmarks.servers import Place, counted, place_of, render

REPORT = """<testsuites><testsuite>
<testcase classname="tests.integration.storage.test_contract.TestS3" name="test_a"/>
<testcase classname="tests.integration.storage.test_contract.TestLocal" name="test_a"/>
<testcase classname="tests.clouds.test_faults" name="test_b[azure-1-cut]"><failure/></testcase>
<testcase classname="tests.clouds.test_faults" name="test_b[google]"><skipped/></testcase>
<testcase classname="tests.integration.storage.test_sftp" name="test_c"><error/></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize(
    ("module", "cls", "name", "place"),
    [
        ("test_contract", "TestS3Stream", "test_a", Place("S3", "contract")),
        ("test_contract", "TestGoogle", "test_a", Place("Google Cloud Storage", "contract")),
        ("test_contract", "TestMemory", "test_a", None),
        ("test_faults", "", "test_a[google-0-busy]", Place("Google Cloud Storage", "faults")),
        ("test_faults", "", "test_wrong_credentials", Place("Azure", "faults")),
        ("test_checkpoints", "", "test_a[azure]", Place("Azure", "whole checkpoints")),
        ("test_remote", "", "test_a[denied]", Place("S3", "whole checkpoints")),
        ("test_local", "", "test_a", None),
    ],
)
def test_where_a_test_counts(module: str, cls: str, name: str, place: Place | None) -> None:
    """By its module, its class, and the server among its parameters."""
    assert place_of(module, cls, name) == place


def test_what_a_report_says(tmp_path: Path) -> None:
    """Failures and errors are both failures, and are named."""
    (tmp_path / "report.xml").write_text(REPORT)
    found = counted(outcomes(tmp_path / "report.xml"))
    counts = {(server, kind): tuple(numbers) for server, kind, *numbers in found["counts"] if sum(numbers)}
    assert counts == {
        ("S3", "contract"): (1, 0, 0),
        ("Azure", "faults"): (0, 0, 1),
        ("Google Cloud Storage", "faults"): (0, 1, 0),
        ("SFTP", "faults"): (0, 0, 1),
    }
    assert found["failed"] == ["test_faults.test_b[azure-1-cut]", "test_sftp.test_c"]
    machine = {"cores": 2, "memory_gib": 24, "kernel": "6.1", "python": "3.11", "packages": {"torch": "2.13.0"}}
    text = render({"machine": machine, **found})
    assert "| SFTP | asyncssh | faults | 0 | 0 | 1 |" in text
    assert "Failed: test_faults.test_b[azure-1-cut], test_sftp.test_c." in text
