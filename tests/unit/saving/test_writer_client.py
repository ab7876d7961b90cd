"""The start of the writer process, its replacement after a death, and retries."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorizer import TensorDeserializer

from dcp_tensorizer import WriteError, WriterProcessDied
from dcp_tensorizer._saving import writer_client
from dcp_tensorizer._saving.reuse import FilesOfSave, KnownFiles
from dcp_tensorizer._saving.write_plan import Item
from dcp_tensorizer._saving.writer_client import WriterClient, _each_second
from dcp_tensorizer._staging.device import SideStreams
from dcp_tensorizer._staging.shared_mappings import MappedFile, SharedWay
from dcp_tensorizer._staging.shared_memory import SharedBuffer
from dcp_tensorizer._staging.stager import Stager
from dcp_tensorizer._staging.tensor_copy import Copies
from dcp_tensorizer._storage.local import LocalStorage
from dcp_tensorizer._tensor_file.names import data_file_name
from dcp_tensorizer._writer_process import gpu_ipc
from dcp_tensorizer._writer_process.client import WriterProcessHung
from dcp_tensorizer._writer_process.gpu_ipc import DeviceWay
from dcp_tensorizer._writer_process.options import SaveOptions
from dcp_tensorizer._writer_process.protocol import SnapshotRequest, TensorSource, WriteRequest

from ...lab.simulated import SimulatedDevice
from ...lab.waiting import WAIT


class Refusing:
    """A writer process that answers successive requests with the given errors."""

    alive = True
    closed = False

    def __init__(self, errors: list[WriteError]) -> None:
        self.errors = errors
        self.sources: dict[str, TensorSource] = {}

    def ask(self, request: Any, *arguments: Any) -> None:
        files = request.files if isinstance(request, WriteRequest) else ()
        self.sources = {source.name: source for file in files for source in file.tensors}
        raise self.errors.pop(0)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def buffer() -> Iterator[SharedBuffer]:
    buffer = SharedBuffer(4096)
    yield buffer
    buffer.close()


def files_in(folder: Path) -> FilesOfSave:
    options = SaveOptions(sync_files=False, thread_count=1)
    return FilesOfSave(LocalStorage(folder), 0, "save", options, KnownFiles())


def client_of(start: Callable[..., Any]) -> WriterClient:
    """Returns a client whose process is the result of ``start``."""
    return WriterClient(devices=True, start=start)


def test_a_snapshot_that_was_refused_is_not_tried_again(
    buffer: SharedBuffer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A refused copy is not requested again; after one death it is. Each time the handles are released."""
    withdrawn: list[Any] = []
    monkeypatch.setattr(gpu_ipc, "export", lambda *arguments: (SnapshotRequest(0, 0, (("a handle",),), ()), []))
    monkeypatch.setattr(gpu_ipc, "withdraw", withdrawn.extend)
    process = Refusing([WriterProcessDied("died"), WriteError("no GPU memory"), WriteError("never asked for")])
    copies = Copies(SideStreams(SimulatedDevice()), [])
    client = client_of(lambda **options: process)
    ways = [DeviceWay(client, 10.0) for _ in range(2)]  # as of two writers
    assert [way.copy_elsewhere(buffer, copies) for way in ways * 2] == [False] * 4
    assert [str(error) for error in process.errors] == ["never asked for"]
    assert withdrawn == [("a handle",)] * 2
    assert len(caplog.records) == 2


def test_after_two_deaths_no_snapshot_is_asked_for(
    buffer: SharedBuffer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After two deaths the trainer copies, and an error names the option to pass instead."""
    monkeypatch.setattr(gpu_ipc, "export", lambda *arguments: (SnapshotRequest(0, 0, (), ()), []))
    process = Refusing([WriterProcessDied("died")] * 3)
    client = client_of(lambda **options: process)
    copies = Copies(SideStreams(SimulatedDevice()), [])
    ways = [DeviceWay(client, 10.0) for _ in range(2)]  # as of two writers
    assert [way.copy_elsewhere(buffer, copies) for way in ways * 2] == [False] * 4
    assert len(process.errors) == 1
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1 and "died 2 times" in errors[0] and "staging='buffer'" in errors[0]


def test_a_process_that_starts_while_it_is_ended_is_ended() -> None:
    """If `end_process` is called during a start, as by a signal handler, the new process is closed."""
    process = Refusing([])

    def start(**options: Any) -> Refusing:
        client.end_process()
        return process

    client = client_of(start)
    with pytest.raises(WriterProcessDied, match="closed"):
        client.ensure_process()
    assert process.closed


def test_a_process_that_died_is_replaced() -> None:
    """A living process is used again; a dead one is closed, and replaced by one with the same arguments."""
    started: list[Refusing] = []

    def start(**options: Any) -> Refusing:
        assert options == {"devices": True}
        started.append(Refusing([]))
        return started[-1]

    client = client_of(start)
    assert [client.ensure_process() for _ in range(3)] == [started[0]] * 3
    started[0].alive = False
    assert client.ensure_process() is started[1]
    assert [process.closed for process in started] == [True, False]


class Dying(Refusing):
    """A writer process that fails after it has begun the files of a request."""

    def __init__(self, folder: Path, errors: list[WriteError]) -> None:
        super().__init__(errors)
        self.folder = folder
        self.names: list[str] = []

    def ask(self, request: Any, *arguments: Any) -> None:
        self.names += [file.name for file in request.files]
        (self.folder / self.names[-1]).write_bytes(b"begun")
        super().ask(request)

    def wait_dead(self) -> None:
        """Ends the process: until then its file must not be removed, because the process may still write it."""
        assert (self.folder / self.names[-1]).exists()


@pytest.mark.parametrize(
    ("first", "second", "closed", "words", "asked"),
    [
        (WriterProcessDied, WriteError, False, "second", 2),
        (WriterProcessDied, WriterProcessDied, False, "failed twice: second", 2),
        (WriterProcessDied, WriteError, True, "the writer was closed", 1),
        (WriterProcessHung, WriteError, False, "first", 1),
    ],
)
def test_after_one_death_the_files_are_written_again(
    tmp_path: Path, first: type[WriteError], second: type[WriteError], closed: bool, words: str, asked: int
) -> None:
    """A process that died is asked once more, with other names, unless it hung or the writer is closed."""
    stager = Stager()
    result = stager.stage({"w": torch.ones(3)})
    process = Dying(tmp_path, [first("first"), second("second")])
    client = client_of(lambda **options: process)
    client.ensure_process()
    items = [Item(("w", None), "w", "tensor", result["w"])]
    with pytest.raises(WriteError, match=words) as caught:
        client.write(files_in(tmp_path), items, result.staged_save, lambda: closed)
    if isinstance(caught.value, WriterProcessHung):
        assert caught.value.cleaning is not None
        caught.value.cleaning.result(WAIT)
    assert type(caught.value) is (second if asked == 2 else WriteError if closed else first)
    assert process.names == [data_file_name(0, number, "save") for number in range(asked)]
    left = process.names[1:] if second is WriteError else []  # a process removes the files of a write that failed
    assert [path.name for path in tmp_path.iterdir()] == left
    del caught, items, result
    stager.saves.close()


def test_only_what_was_staged_in_place_is_written_from_where_it_is(tmp_path: Path) -> None:
    """A tensor that the planner made is copied, even if it is in shared memory like a staged tensor."""
    stager = Stager(way=SharedWay())
    staged, made = torch.ones(3).share_memory_(), torch.ones(3).share_memory_()
    result = stager.stage({"staged": staged})
    process = Refusing([WriteError("seen enough")])
    client = client_of(lambda **options: process)
    client.ensure_process()
    items = [Item((name, None), name, "tensor", t) for name, t in {"staged": staged, "made": made}.items()]
    with pytest.raises(WriteError, match="seen enough"):
        client.write(files_in(tmp_path), items, result.staged_save)
    assert [type(process.sources[name].memory) for name in ("staged", "made")] == [MappedFile, int]
    client.free()
    del result
    stager.saves.close()


def test_unstaged_tensors_of_a_device_are_written_when_its_kernels_have_run(tmp_path: Path) -> None:
    """Before several threads read unstaged tensors, the caller's stream is synchronized."""
    device = SimulatedDevice()
    weights = device.declare(torch.zeros(1000))
    device.queue(lambda: weights.fill_(7.0))
    client = WriterClient(device=device)
    items = [Item(("w", None), "w", "tensor", weights)]
    client.write(files_in(tmp_path), items, None)
    with TensorDeserializer(tmp_path / data_file_name(0, 0, "save"), device="cpu") as stored:
        assert set(stored["w"].tolist()) == {7.0}


def test_progress_is_reported_while_a_block_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`_each_second` calls its function again and again, and its thread ends with the block."""
    monkeypatch.setattr(writer_client, "_PROGRESS_SECONDS", 0.001)
    told, threads = threading.Semaphore(0), set[threading.Thread]()

    def tell() -> None:
        threads.add(threading.current_thread())
        told.release()

    with _each_second(tell):
        assert all(told.acquire(timeout=WAIT) for _ in range(3))
    (thread,) = threads
    assert not thread.is_alive()


def test_a_block_runs_without_reports_if_no_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the interpreter no thread starts. The errors of the block are raised."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(ValueError, match="full"), _each_second(lambda: pytest.fail("told")):
        raise ValueError("full")
