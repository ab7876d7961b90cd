"""Measures the free memory of this machine, within the limits of this process's cgroups."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ..errors import StagingError


def check_free_memory(nbytes: int, *, allocated: int = 0) -> None:
    """Raises `StagingError` if fewer bytes are free than are still to be allocated: ``nbytes - allocated``.

    Beyond a cgroup's limit the kernel kills the process.
    """
    available = available_memory()
    if available is not None and nbytes - allocated > available:
        so_far = f", of which {allocated:,} are allocated" if allocated else ""
        raise StagingError(
            f"the staging buffer needs {nbytes:,} bytes{so_far}, but only {available:,} bytes of memory are available. "
            f"Free memory, raise the memory limit, or shard the state dict over more ranks."
        )


def available_memory() -> int | None:
    """Returns the free bytes of this machine or of this process's cgroups, whichever are fewer; None if unknown.

    Page cache counts as free.
    """
    bounds = [] if (in_cgroup := free_in_cgroup()) is None else [in_cgroup]
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        bounds += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min(bounds, default=None)


def free_in_cgroup(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Returns the fewest bytes that are free below a memory limit of this process's cgroups and their ancestors.

    Returns None if no limit is known. Page cache counts as free.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    bounds = []
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        is_v1 = "memory" in controllers.split(",")
        if controllers and not is_v1:
            continue
        top = root / "memory" if is_v1 else root
        group = top / path.lstrip("/")
        # In a container, cgroups of version 1 show the host's path, but the container's group is mounted at the root.
        for folder in (group, *group.parents):
            if folder.is_relative_to(top) and (free := _free_in(folder, *(_V1 if is_v1 else _V2))) is not None:
                bounds.append(free)
    return min(bounds, default=None)


# The files of the limit and the usage of a cgroup, and the prefix in memory.stat of totals that include descendants.
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_V2 = ("memory.max", "memory.current", "")


def _free_in(group: Path, limit: str, used: str, prefix: str) -> int | None:
    try:
        allowed = int((group / limit).read_text())  # no limit is "max" in version 2, nearly 2**63 in version 1
        taken = int((group / used).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = int(stat.get(f"{prefix}inactive_file", 0)) + int(stat.get(f"{prefix}active_file", 0))
    except (OSError, ValueError):
        return None
    return max(0, allowed - taken + cached)
