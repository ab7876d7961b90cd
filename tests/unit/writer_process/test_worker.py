"""The measurement of spare cores, and the memory that the writer process caches."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from dcp_tensorizer import WriteError
from dcp_tensorizer._runtime.channel import Channel
from dcp_tensorizer._runtime.direct_memory import direct_memory
from dcp_tensorizer._tensor_file import encode as encoder
from dcp_tensorizer._tensor_file.names import data_file_name
from dcp_tensorizer._writer_process.options import SaveOptions
from dcp_tensorizer._writer_process.protocol import Call, FileRequest, WriteRequest
from dcp_tensorizer._writer_process.worker import MIN_SPARE_CORES, NICENESS_BUSY, SpareCores, Worker

from ...lab.processes import open_descriptors

SECOND = os.sysconf("SC_CLK_TCK") * (os.cpu_count() or 1)
"""Ticks in a second, summed over all cores."""


def stat(busy: float, idle: float) -> str:
    return f"cpu {int(busy)} 0 0 {int(idle)} 0 0 0 0 0 0"


def test_spare_cores_are_those_that_no_other_process_uses() -> None:
    """Spare cores are the idle ones and those that this process has used since the last call."""
    cores = os.cpu_count() or 1
    lines = [stat(0, 7 * SECOND), stat(SECOND / 2, 7.5 * SECOND), stat(1.5 * SECOND, 7.5 * SECOND)]
    own = [5.0, 5.25, 5.5]
    spare = SpareCores(iter(lines).__next__, iter(own).__next__)
    assert abs(spare.since_last() - (cores / 2 + 0.25)) < 0.05
    assert abs(spare.since_last() - 0.25) < 0.05


def test_busy_cores_are_not_taken_for_spare_ones() -> None:
    """If all cores are busy, four threads get less than ``MIN_SPARE_CORES``.

    A thread's share beside one of training follows from the kernel's weights, which differ by 1.25 for each niceness.
    """
    weight = 1.25**-NICENESS_BUSY
    assert 4 * weight / (1 + weight) < MIN_SPARE_CORES


def test_the_memory_of_a_save_that_failed_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory for parts is cached after a successful request, and dropped after a failed one."""
    made: list[int] = []

    def noted(nbytes: int) -> object:
        made.append(nbytes)
        return direct_memory(nbytes)

    monkeypatch.setattr(encoder, "direct_memory", noted)
    options = SaveOptions(sync_files=False, thread_count=1)
    files = (FileRequest(data_file_name(0, 0, "a" * 32), ()),)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        served = Worker(Channel(ours), None)

        def made_for(name: str) -> int:
            (tmp_path / name).mkdir()
            made.clear()
            served.write(WriteRequest(str(tmp_path / name), options, files))
            return len(made)

        assert (made_for("a"), made_for("b")) == (1, 0)
        with pytest.raises(WriteError, match="No such file"):
            served.write(WriteRequest(str(tmp_path / "nowhere"), options, files))
        assert (made_for("c"), made_for("d")) == (1, 0)


def test_a_buffer_that_cannot_be_mapped_leaves_no_descriptor_open(tmp_path: Path) -> None:
    """If the mapping of one buffer fails, the process closes the descriptors of all buffers that came with it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        served, before = Worker(Channel(ours), None), open_descriptors()
        fds = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in "ab"]
        with pytest.raises(ValueError, match="greater than file size"):
            served._attach(Call(None, (), ((1, 4096), (2, 4096))), fds)
        assert open_descriptors().items() <= before.items()  # a thread of another test may have closed its own


def test_no_time_has_passed() -> None:
    """Two samples in one tick count as no spare core."""
    assert SpareCores(lambda: stat(1, 2), lambda: 0.0).since_last() == 0.0
