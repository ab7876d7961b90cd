"""The free memory of the machine and of its cgroups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dcp_tensorizer import StagingError
from dcp_tensorizer._runtime import memory_limit
from dcp_tensorizer._runtime.memory_limit import check_free_memory

PAGE = 4096


def test_a_shortage_is_an_error_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the needed and the available bytes, and advice. Exactly the available bytes are no error."""
    monkeypatch.setattr(memory_limit, "available_memory", lambda: 10_000)
    with pytest.raises(StagingError, match=r"needs 10,001 bytes, but only 10,000 bytes.*Free memory.*more ranks"):
        check_free_memory(10_001)
    check_free_memory(10_000)


def test_unknown_free_memory_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the system does not show its free memory, `check_free_memory` accepts every size."""
    monkeypatch.setattr(memory_limit, "available_memory", lambda: None)
    check_free_memory(1 << 60)


def test_this_machine_shows_its_free_memory() -> None:
    """`available_memory` reads the values of this kernel."""
    available = memory_limit.available_memory()
    assert available is not None
    assert PAGE < available <= os.sysconf("SC_PHYS_PAGES") * PAGE


def cgroup(folder: Path, limit: str, used: int = 0, active: int = 0, inactive: int = 0, *, v1: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(f"{limit}\n")
    (folder / ("memory.usage_in_bytes" if v1 else "memory.current")).write_text(f"{used}\n")
    total = "total_" if v1 else ""
    stat = f"anon 5\nfile 6\n{total}inactive_file {inactive}\n{total}active_file {active}\n"
    (folder / "memory.stat").write_text(stat)


V1 = "9:cpu,cpuacct:/elsewhere\n5:memory:/job/rank:0\n0::/unified\n"


V2 = "0::/job/rank:0\n"


@pytest.mark.parametrize(("version", "top"), [(V2, ""), (V1, "memory")])
def test_the_tightest_cgroup_counts(tmp_path: Path, version: str, top: str) -> None:
    """The limit may be the group's own or an ancestor's, of version 1 or 2. Page cache counts as free."""
    membership = tmp_path / "membership"
    membership.write_text(version)
    root, v1 = tmp_path / "cgroup", version == V1
    own = root / top / "job" / "rank:0"
    assert memory_limit.free_in_cgroup(membership, root) is None
    cgroup(own.parent, str(1 << 40) if v1 else "max", v1=v1)
    assert memory_limit.free_in_cgroup(membership, root) == (1 << 40 if v1 else None)
    cgroup(own, "9000", used=3000, active=100, inactive=20, v1=v1)
    assert memory_limit.free_in_cgroup(membership, root) == 6120
    cgroup(root / top, "4000", used=3500, v1=v1)
    assert memory_limit.free_in_cgroup(membership, root) == 500
    cgroup(root / top, "1000", used=5000, v1=v1)
    assert memory_limit.free_in_cgroup(membership, root) == 0


@pytest.mark.parametrize("content", ["", "much", "12x"])
def test_a_cgroup_that_cannot_be_read_is_no_limit(tmp_path: Path, content: str) -> None:
    """Missing files and unexpected contents are ignored."""
    assert memory_limit.free_in_cgroup(tmp_path / "missing", tmp_path) is None
    membership = tmp_path / "membership"
    membership.write_text(V2)
    own = tmp_path / "job" / "rank:0"
    cgroup(own, "1000")
    (own / "memory.current").write_text(content)
    assert memory_limit.free_in_cgroup(membership, tmp_path) is None
