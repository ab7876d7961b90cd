"""The module of GPUs, with a stand-in for the driver: registration of host memory, streams, batches, settings."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dcp_tensorizer import StagingError
from dcp_tensorizer._staging import device as device_module
from dcp_tensorizer._staging.device import PIN_BYTES, Device, expandable_segments, synchronize_other_devices

GIB = 1 << 30


class Driver:
    """A CUDA runtime that registers memory, and refuses some addresses."""

    def __init__(self, refused: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.refused = refused
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        if address in self.refused:
            return 2
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, status: int) -> str:  # noqa: N802
        return {2: "out of memory"}[status]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(device_module, "_clear_error", lambda index: None)
    return driver


def test_memory_is_registered_in_chunks(driver: Driver) -> None:
    """One call for all memory would fail, or block other processes."""
    undo = Device().pin(4096, 5 * GIB // 2, 0)
    assert driver.registered == {4096: GIB, 4096 + GIB: GIB, 4096 + 2 * GIB: GIB // 2}
    undo()
    undo()
    assert driver.registered == {}


def test_a_refused_registration_is_undone(driver: Driver) -> None:
    """The error has the driver's code and its name, and the byte."""
    driver.refused = {4096 + 2 * GIB}
    with pytest.raises(StagingError, match=r"GPU 3: .* returned 2 \(out of memory\) at byte 2,147,483,648") as info:
        Device().pin(4096, 3 * GIB, 3)
    assert driver.registered == {}
    assert "ulimit" not in str(info.value)


def test_the_borders_are_those_of_the_current_registrations(driver: Driver) -> None:
    """They are the sorted start addresses of all buffers, until a buffer is unregistered."""
    cuda = Device()
    high, low = cuda.pin(1 << 40, GIB + 1, 0), cuda.pin(4096, 10, 0)
    assert cuda._borders == (4096, 1 << 40, (1 << 40) + PIN_BYTES)
    high()
    assert cuda._borders == (4096,)
    low()
    assert cuda._borders == ()


@pytest.mark.parametrize(
    ("variable", "value", "found"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", True),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:512, expandable_segments: true", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", False),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512", False),
    ],
)
def test_expandable_segments_in_variables(
    variable: str, value: str, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`expandable_segments` finds the setting at any position of the variables that torch reads."""
    monkeypatch.setattr(device_module, "allocator_settings", str)  # torch reads the variables once in a process
    monkeypatch.setenv(variable, value)
    assert expandable_segments() == (f"{variable}={value}" if found else None)


@pytest.mark.skipif(not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="this torch has no getter")
def test_expandable_segments_are_found_when_they_are_set_at_run_time() -> None:
    """torch's own function sets them."""
    before, seen = torch._C._accelerator_getAllocatorSettings(), expandable_segments()  # torch keeps what it read first
    try:
        torch._C._accelerator_setAllocatorSettings("max_split_size_mb:512,expandable_segments:True")
        assert expandable_segments() == "max_split_size_mb:512,expandable_segments:True, set at run time"
    finally:
        torch._C._accelerator_setAllocatorSettings(before or "expandable_segments:False")
    assert expandable_segments() == seen


def test_staging_synchronizes_other_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads with other streams copy their tensors, so the work that the caller has queued must end first."""
    waited: list[str] = []
    modules: dict[str, Any] = {
        "xpu": types.SimpleNamespace(
            current_stream=lambda device: types.SimpleNamespace(synchronize=lambda: waited.append(f"{device} stream"))
        ),
        "mps": types.SimpleNamespace(synchronize=lambda: waited.append("mps")),
    }
    monkeypatch.setattr(device_module, "_has_other_accelerator", lambda: True)
    monkeypatch.setattr(torch, "get_device_module", lambda device: modules[device.type])
    tensors: list[Any] = [types.SimpleNamespace(device=torch.device(name)) for name in ("xpu:1", "mps", "cpu", "xpu:1")]
    synchronize_other_devices(tensors)
    assert sorted(waited) == ["mps", "xpu:1 stream"]


# --- streams, of a torch.cuda that writes down what is asked of it ----------------------------------------------------


class FakeStream:
    """A stream with its events, and those that it waits for, in order."""

    def __init__(self, device: int = 0) -> None:
        self.calls: list[tuple[str, object]] = []

    def wait_event(self, event: FakeEvent) -> None:
        self.calls.append(("waits for", event.stream))


class FakeEvent:
    """An event that records its stream."""

    stream: FakeStream

    def __init__(self, **options: object) -> None:
        pass

    def record(self, stream: FakeStream) -> None:
        self.stream = stream


class FakeCuda:
    """The streams and events of `torch.cuda`, with one current stream."""

    Stream, Event = FakeStream, FakeEvent

    def __init__(self) -> None:
        self.now = self.training = FakeStream()

    def current_stream(self, index: int) -> FakeStream:
        return self.now

    def device(self, index: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    return fake


def test_a_mark_is_after_all_that_was_spread(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event follows the copies on all lanes, also after an interrupt between two lanes. Loads use only the first
    lane.
    """
    stream: Any = Device().new_stream(0)
    first, *others = stream._lanes
    assert stream.mark()._event.stream is first
    assert first.calls == []

    def interrupted(targets: object, sources: object) -> None:
        if cuda.now is others[-1]:
            raise KeyboardInterrupt

    monkeypatch.setattr(device_module, "_queue", interrupted)
    tensors = [torch.zeros(1) for _ in range(8)]
    with pytest.raises(KeyboardInterrupt):
        stream.spread(tensors, tensors)
    stream.mark()
    assert first.calls == [("waits for", lane) for lane in others]


def test_lanes_are_streams_of_their_own(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver makes the lanes outside torch's pool. If it makes none, torch does."""
    cuda.ExternalStream = lambda handle, device: f"{handle} on {device}"  # type: ignore[attr-defined]
    handles = iter([11, 12, 13, 14, None, 16, 17, 18])
    monkeypatch.setattr(device_module, "new_stream", lambda: next(handles))
    monkeypatch.setattr(device_module, "copier", lambda: None)
    stream: Any = Device().new_stream(3)
    assert stream._lanes == ["11 on 3", "12 on 3", "13 on 3", "14 on 3"]
    stream = Device().new_stream(3)
    assert isinstance(stream._lanes[0], FakeStream) and stream._lanes[1:] == ["16 on 3", "17 on 3", "18 on 3"]


def test_batches_go_through_one_stream_until_one_is_refused(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a refusal copies go one by one, and the log has the driver's status once."""
    cuda.ExternalStream = lambda handle, device: types.SimpleNamespace(cuda_stream=handle)  # type: ignore[attr-defined]
    given: list[tuple[object, int]] = []
    statuses = iter([0, 801])

    def copy(batch: object, stream: int) -> int:
        given.append((batch, stream))
        return next(statuses)

    monkeypatch.setattr(device_module, "new_stream", lambda: 11)
    monkeypatch.setattr(device_module, "copier", lambda: copy)
    stream: Any = Device().new_stream(0)
    batch = stream.batch([64], [128], [32])
    assert len(stream._lanes) == 1
    assert [stream.copy_batch(batch) for _ in range(3)] == [True, False, False]
    assert given == [(batch, 11)] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "GPU 0: the driver refuses batches of copies (error 801). Copies are slower now."
    ]


def test_memory_that_training_has_freed_is_used_if_no_other_is_left(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch reserves it for training's stream. The copies wait for that stream, and training waits for the copies."""
    stream: Any = Device().new_stream(0)
    (first, *_) = stream._lanes
    stream.follow()
    first.calls.clear()
    users: list[object] = []

    def empty(nbytes: int, **options: object) -> object:
        if cuda.now is not cuda.training:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return types.SimpleNamespace(nbytes=nbytes, record_stream=users.append)

    monkeypatch.setattr(torch, "empty", empty)
    assert stream.allocate(100).nbytes == 100
    assert first.calls == [("waits for", cuda.training)]
    assert users == [first]
