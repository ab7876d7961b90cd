"""GPUs without one: how host memory is registered and cut, and what is said; the driver is a stand-in."""

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
    """Registers and forgets memory; refuses it at some addresses."""

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
    """A call for all of it would fail, or hold up other processes."""
    undo = Device().pin(4096, 5 * GIB // 2, 0)
    assert driver.registered == {4096: GIB, 4096 + GIB: GIB, 4096 + 2 * GIB: GIB // 2}
    undo()
    undo()
    assert driver.registered == {}


def test_what_is_refused_is_undone_and_says_the_drivers_own_words(driver: Driver) -> None:
    """The code, its name and the byte; nothing of a limit that the driver does not look at."""
    driver.refused = {4096 + 2 * GIB}
    with pytest.raises(StagingError, match=r"GPU 3: .* returned 2 \(out of memory\) at byte 2,147,483,648") as info:
        Device().pin(4096, 3 * GIB, 3)
    assert driver.registered == {}
    assert "ulimit" not in str(info.value)


def test_the_borders_are_those_of_what_is_registered_now(driver: Driver) -> None:
    """Of all buffers, in order, until each is given back."""
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
def test_expandable_segments_are_seen(variable: str, value: str, found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the variables that torch reads, wherever they stand in them."""
    monkeypatch.setattr(device_module, "allocator_settings", str)  # torch reads the variables once in a process
    monkeypatch.setenv(variable, value)
    assert expandable_segments() == (f"{variable}={value}" if found else None)


@pytest.mark.skipif(not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="this torch has no getter")
def test_expandable_segments_are_seen_when_they_are_set_at_run_time() -> None:
    """By the function that torch names for it."""
    before, seen = torch._C._accelerator_getAllocatorSettings(), expandable_segments()  # torch keeps what it read first
    try:
        torch._C._accelerator_setAllocatorSettings("max_split_size_mb:512,expandable_segments:True")
        assert expandable_segments() == "max_split_size_mb:512,expandable_segments:True, set at run time"
    finally:
        torch._C._accelerator_setAllocatorSettings(before or "expandable_segments:False")
    assert expandable_segments() == seen


def test_other_accelerators_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tensors are copied by threads with streams of their own: what the caller has queued comes first."""
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
    """Its events, and those that it waits for, in order."""

    def __init__(self, device: int = 0) -> None:
        self.calls: list[tuple[str, object]] = []

    def wait_event(self, event: FakeEvent) -> None:
        self.calls.append(("waits for", event.stream))


class FakeEvent:
    """Knows the stream that it was recorded in."""

    stream: FakeStream

    def __init__(self, **options: object) -> None:
        pass

    def record(self, stream: FakeStream) -> None:
        self.stream = stream


class FakeCuda:
    """Streams and events of `torch.cuda`, with one current stream."""

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
    """Also if an interrupt comes between the streams, while copies are in progress. Loads use only the first one."""
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
    """Of the driver's making, which no pool hands to others; of torch's, if it makes none."""
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
    """The log has the driver's status, once."""
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
        "GPU 0: the driver refuses batches of copies (801). Copies are slower now."
    ]


def test_memory_comes_from_what_training_has_freed_if_there_is_no_other(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch keeps it for the stream of training. The copies wait for what is queued there; training for them."""
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
