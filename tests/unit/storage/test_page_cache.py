"""What the page cache holds of a file is known, and a question does not change it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcp_tensorizer._storage.local_io import Residency

from ...lab.processes import forget
from ...lab.seams import cached

MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(3 * MIB + 100))
    return path


@pytest.fixture
def descriptor(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def holds(descriptor: int, offset: int) -> bool:
    residency = Residency(descriptor)
    is_held = residency.holds(offset)
    residency.close()
    return is_held


@pytest.mark.parametrize("offset", [0, 1, 4095, 2 * MIB + 5, 3 * MIB + 99])
def test_what_has_been_read_is_held_and_what_was_dropped_is_not(path: Path, descriptor: int, offset: int) -> None:
    """A page that was read is cached, a dropped one is not, and the query does not change that."""
    path.read_bytes()
    assert [holds(descriptor, offset) for _ in range(2)] == [True, True]
    assert cached(path, offset)
    forget(path)
    assert [holds(descriptor, offset) for _ in range(2)] == [False, False]
    assert not cached(path, offset)


@pytest.mark.parametrize(("nbytes", "held"), [(100, False), (MIB, False), (2 * MIB, True)])
def test_the_larger_part_counts(path: Path, descriptor: int, nbytes: int, held: bool) -> None:
    """The larger part of a run decides for all of its bytes."""
    forget(path)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read ahead
    os.pread(descriptor, nbytes, MIB)
    assert [holds(descriptor, offset) for offset in (0, MIB, 3 * MIB)] == [held] * 3
    assert [cached(path, offset) for offset in (0, MIB, 3 * MIB)] == [False, True, False]


def test_a_few_missing_pages_do_not_count(path: Path, descriptor: int) -> None:
    """A file whose pages cannot be queried is read through the page cache."""
    forget(path)
    path.read_bytes()
    os.posix_fadvise(descriptor, MIB, MIB, os.POSIX_FADV_DONTNEED)
    assert holds(descriptor, MIB + MIB // 2)
    assert not cached(path, MIB + MIB // 2)


def test_an_answer_is_kept(path: Path, descriptor: int) -> None:
    """Each run of a file is queried once."""
    path.read_bytes()
    residency = Residency(descriptor)
    assert residency.holds(0)
    forget(path)
    assert residency.holds(MIB)
    residency.close()
    assert not holds(descriptor, MIB)


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    """An empty file has no cached pages."""
    (tmp_path / "empty").touch()
    with open(tmp_path / "empty", "rb") as file, pytest.raises(ValueError, match="empty"):
        Residency(file.fileno())


def test_closing_unmaps_the_file(path: Path, descriptor: int) -> None:
    """`close` unmaps the file."""
    residency = Residency(descriptor)
    assert str(path) in Path("/proc/self/maps").read_text()
    residency.close()
    assert str(path) not in Path("/proc/self/maps").read_text()
