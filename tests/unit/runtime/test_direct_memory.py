"""`direct_memory`: memory for reads and writes with O_DIRECT."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from dcp_tensorizer._runtime.direct_memory import direct_memory

HUGE_PAGE = 2 << 20


def address_of(memory: memoryview) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


def flags_of(address: int) -> set[str]:
    """What the kernel says of the mapping that an address is in."""
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        field, *values = line.split()
        if "-" in field and not field.endswith(":"):
            start, _, stop = field.partition("-")
            is_there = int(start, 16) <= address < int(stop, 16)
        elif is_there and field == "VmFlags:":
            return set(values)
    raise LookupError(hex(address))


@pytest.mark.parametrize("nbytes", [1, 4096, HUGE_PAGE - 1, HUGE_PAGE, 4 * HUGE_PAGE + 5])
def test_it_is_fresh_and_begins_on_a_page(nbytes: int) -> None:
    """The memory is zero, has its size, and begins on a page, or on a huge page if it fills one."""
    memory = direct_memory(nbytes)
    assert (memory.nbytes, memory.readonly, bytes(memory[:1]), bytes(memory[-1:])) == (nbytes, False, b"\0", b"\0")
    assert address_of(memory) % (HUGE_PAGE if nbytes >= HUGE_PAGE else mmap.PAGESIZE) == 0
    memory[-1] = 7
    assert memory[-1] == 7


def test_huge_pages_are_asked_for() -> None:
    """The memory is private and advised to use huge pages, if the system has them."""
    memory = direct_memory(2 * HUGE_PAGE)
    flags = flags_of(address_of(memory))
    assert ("hg" in flags, "sh" in flags) == (Path("/sys/kernel/mm/transparent_hugepage").exists(), False)
