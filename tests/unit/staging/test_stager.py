"""`Stager`: failures, prewarming, and copies from simulated devices."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from dcp_tensorizer import StagingError
from dcp_tensorizer._runtime.threads import Deadline
from dcp_tensorizer._staging.saves import StagedSaves
from dcp_tensorizer._staging.shared_mappings import SharedWay
from dcp_tensorizer._staging.shared_memory import SharedBuffer
from dcp_tensorizer._staging.staged_save import StagedSave, StagedStateDict
from dcp_tensorizer._staging.stager import Stager
from dcp_tensorizer._staging.tensor_copy import Copies, GatherLimits
from dcp_tensorizer._staging.ways import BufferWay

from ...lab.processes import memory_files
from ...lab.simulated import SimulatedDevice
from ...lab.states import same
from ...lab.waiting import WAIT, Gate, HeldTensor, hold_memory, in_thread, wait_until_inside
from .staging import inode, staged


def test_a_failed_staging_keeps_nothing_alive(stager: Stager) -> None:
    """The recorded error refers neither to training's tensors nor to the staging buffer."""
    gc.collect()
    before = memory_files()

    def fail() -> weakref.ref[torch.Tensor]:
        tensor = torch.ones(1000)
        result = stager.stage({"a": tensor, "lock": threading.Lock()})
        assert result.staged_save.error is not None
        return weakref.ref(tensor)

    tensor = fail()
    stager.saves.close()
    gc.collect()
    assert tensor() is None
    assert memory_files() == before


def test_a_copy_that_fails_leaves_an_empty_state_dict(stager: Stager) -> None:
    """A partial copy is not returned, and the next staging works."""

    def fail() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    result = stager.stage({"a": HeldTensor(torch.ones(10), fail), "b": torch.ones(3)})
    assert "illegal memory access" in str(result.staged_save.error)
    assert dict(result) == {}
    assert staged(stager, {"b": torch.ones(3)})["b"].tolist() == [1.0] * 3


def test_an_interrupted_staging_leaves_nothing_behind(stager: Stager) -> None:
    """A KeyboardInterrupt is raised, and later calls do not wait for the staging."""

    class Interrupting(dict[str, Any]):
        def items(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stager.stage({"a": Interrupting(b=1)})
    assert stager.saves.drain(stager, Deadline(0.0))
    assert stager.saves.begin(stager) is None


@pytest.mark.parametrize("moment", ["begun", "thread", "refused"])
def test_no_moment_of_an_interruption_keeps_others_waiting(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Interrupted after the save is added, while its thread starts, or when it is refused, staging leaves no save."""
    stager = Stager(overlap_staging=True)
    seen = []

    def interrupt(*arguments: object, **options: object) -> None:
        seen.extend(stager.saves.of(stager))
        raise KeyboardInterrupt

    places = {"begun": (torch.distributed, "is_available"), "thread": (threading.Thread, "start")}
    with monkeypatch.context() as patch:
        patch.setattr(*places.get(moment, (StagedSave, "finish")), interrupt)
        with pytest.raises(KeyboardInterrupt):
            stager.refuse(StagingError("no")) if moment == "refused" else stager.stage({"a": torch.ones(1)})
    assert len(seen) == (0 if moment == "refused" else 1)
    assert stager.saves.of(stager) == []
    assert all(staged_save.wait_built(0.0) for staged_save in seen)
    stager.saves.close()


def test_a_staging_continues_after_the_interrupt_of_an_earlier_one(stager: Stager) -> None:
    """Another thread's staging waits until the interrupted one has ended."""
    gate = Gate()

    class Interrupting(dict[str, Any]):
        def items(self) -> Any:
            gate.pass_through()
            raise KeyboardInterrupt

    def interrupted() -> None:
        with pytest.raises(KeyboardInterrupt):
            stager.stage({"a": Interrupting(b=1)})

    first = in_thread(interrupted)
    gate.wait_reached()
    results: list[dict[str, Any]] = []
    second = in_thread(lambda: results.append(dict(stager.stage({"a": torch.ones(1)}))))
    wait_until_inside(second, StagedSave.wait_built)
    gate.open()
    first.join(WAIT)
    second.join(WAIT)
    assert [result["a"].tolist() for result in results] == [[1.0]]


def test_a_refused_staging_is_a_save_that_fails(stager: Stager) -> None:
    """The save finds the error in its `StagedSave`; a writer of another package raises the error when it pickles."""
    refused = stager.refuse(StagingError("the writer is closed"))
    with pytest.raises(StagingError, match="the writer is closed"):
        pickle.dumps(dict(refused.items()))
    staged_save = stager.saves.begin(stager)
    assert staged_save is refused.staged_save
    assert str(staged_save.error) == "the writer is closed"


def test_a_shortage_of_memory_is_an_error_of_the_save(stager: Stager) -> None:
    """No memory is allocated, the error has the needed bytes, and the next save works."""
    before = memory_files()
    result = stager.stage({"a": torch.empty(1).expand(1 << 44)})
    assert "70,368,744,177,664 bytes" in str(result.staged_save.error)
    assert memory_files() == before
    assert staged(stager, {"a": torch.ones(2)})["a"].tolist() == [1.0, 1.0]


def test_draining_times_out(stager: Stager) -> None:
    """`drain` returns false until the save has ended."""
    result = stager.stage({"a": torch.ones(1)})
    taken, release = threading.Event(), threading.Event()

    def save() -> None:
        result.items()
        taken.set()
        assert release.wait(WAIT)

    thread = in_thread(save)
    assert taken.wait(WAIT)
    assert not stager.saves.drain(stager, Deadline(0.1))
    release.set()
    assert stager.saves.drain(stager, Deadline(WAIT))
    thread.join(WAIT)


def test_draining_waits_for_a_save_that_has_no_memory_yet(overlapping: Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout for taking the staged state dict begins when the dict exists."""
    gate = Gate()
    hold_memory(monkeypatch, gate.pass_through)
    result = overlapping.stage({"a": torch.ones(1)})
    gate.wait_reached()
    assert not overlapping.saves.drain(overlapping, Deadline(0.01))
    overlapping.saves.take_seconds = 0.0
    drained: list[bool] = []
    draining = in_thread(lambda: drained.append(overlapping.saves.drain(overlapping, Deadline(None))))
    wait_until_inside(draining, StagedSave.wait_built)
    gate.open()
    draining.join(WAIT)
    assert drained == [True]
    result.staged_save.wait_copied()
    assert dict(result)["a"].tolist() == [1.0]


def test_prewarming_makes_the_buffer_of_the_first_save(stager: Stager) -> None:
    """The first staging of that size allocates no memory."""
    state = {"a": torch.ones(5000), "b": [torch.ones(3)]}
    stager.prewarm(state)
    stager.saves.wait_prewarmed()
    before = memory_files()
    result = stager.stage(state)
    assert memory_files() == before
    assert dict(result)["b"][0].tolist() == [1.0] * 3


def test_staging_waits_for_a_buffer_that_is_being_prewarmed(stager: Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    """`prewarm` returns at once. The first staging takes its buffer, and makes no other."""
    gate, requests = Gate(), []
    hold_memory(monkeypatch, lambda: (requests.append(1), gate.pass_through()))
    stager.prewarm({"a": torch.ones(5000)})
    gate.wait_reached()
    results: list[StagedStateDict] = []
    staging = in_thread(lambda: results.append(stager.stage({"a": torch.ones(5000)})))
    wait_until_inside(staging, StagedSaves.wait_prewarmed)
    gate.open()
    staging.join(WAIT)
    assert dict(results[0])["a"].tolist() == [1.0] * 5000
    assert requests == [1]


def test_prewarming_without_a_thread(stager: Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no thread can be started, the caller makes the buffer."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = memory_files()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        stager.prewarm({"a": torch.ones(1000)})
    (made,) = memory_files() - before
    assert inode(stager.stage({"a": torch.ones(1000)})) == made


def test_closing_does_not_wait_for_memory(stager: Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline includes the wait for a buffer that `prewarm` is making, which is freed later."""
    gc.collect()
    gate, before = Gate(), memory_files()
    hold_memory(monkeypatch, gate.pass_through)
    stager.prewarm({"a": torch.ones(1000)})
    gate.wait_reached()
    stager.saves.close(Deadline(0.01))
    gate.open()
    for thread in threading.enumerate():
        if thread.name == "prewarm":
            thread.join(WAIT)
    assert memory_files() == before


def test_memory_that_is_short_fails_prewarming_at_once(stager: Stager) -> None:
    """`prewarm` itself raises the error."""
    with pytest.raises(StagingError, match="bytes of memory are available"):
        stager.prewarm({"a": torch.empty(1).expand(1 << 44)})


def test_prewarming_names_a_value_that_cannot_be_saved(stager: Stager) -> None:
    """`prewarm` raises the error before training starts."""
    with pytest.raises(StagingError, match=r"'a\.b'.*meta"):
        stager.prewarm({"a": {"b": torch.empty(2, device="meta")}})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float4_e2m1fn_x2])
@pytest.mark.parametrize("first", [True, False])
def test_a_state_is_staged_inside_and_outside_of_inference_mode(
    one_torch_thread: None, dtype: torch.dtype, first: bool
) -> None:
    """(Simulated device.) Several threads stage in either mode, in either order, into the same memory."""
    device = SimulatedDevice()
    stager = Stager(thread_count=3, device=device)
    for inference in (first, not first):
        with torch.inference_mode(inference):
            large = torch.arange(10 << 20, dtype=torch.uint8).view(dtype)
            small = device.declare(torch.arange(100, dtype=torch.uint8).view(dtype))
            copies = staged(stager, {"large": large, "small": small})
        assert [same(copies["large"], large), same(copies["small"], small)] == [True, True]
        assert not copies["large"].is_inference()
        del copies
    assert len(device.buffers) == 1
    stager.saves.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_state_on_a_device_is_staged_through_pinned_memory(overlap: bool) -> None:
    """(Simulated device.) The buffer is registered, has all queued changes, and training's next step waits."""
    device = SimulatedDevice()
    stager = Stager(overlap_staging=overlap, device=device)
    weight, cpu = device.declare(torch.zeros(100_000)), torch.arange(3)
    device.queue(lambda: weight.fill_(1.0))
    result = stager.stage({"w": weight, "cpu": cpu})
    stager.hold_training()
    device.queue(lambda: weight.fill_(2.0))
    device.run()
    result.staged_save.wait_copied()
    assert set(dict(result)["w"].tolist()) == {1.0}
    assert set(weight.tolist()) == {2.0}
    assert dict(result)["cpu"].tolist() == [0, 1, 2]
    assert result.staged_save.buffer is not None
    assert [nbytes for _, nbytes in device.pinned] == [result.staged_save.buffer.nbytes]
    del result
    stager.saves.close()
    assert device.pinned == []


def test_copies_include_what_training_has_queued_before() -> None:
    """(Simulated device.) The device may run the stream of the copies first."""
    device = SimulatedDevice(free_running=False)
    stager = Stager(overlap_staging=True, device=device)
    weight = device.declare(torch.zeros(100_000))
    device.queue(lambda: weight.fill_(1.0))
    result = stager.stage({"w": weight})
    stager.hold_training()
    device.queue(lambda: weight.fill_(2.0))
    device.run(training_first=False)
    result.staged_save.wait_copied()
    assert set(dict(result)["w"].tolist()) == {1.0}
    del result
    stager.saves.close()


def test_shared_tensors_hold_training_beyond_the_copies_from_a_device() -> None:
    """(Simulated device.) Training waits until the save has written the shared tensors, not only for the copies."""
    device = SimulatedDevice(free_running=False)
    stager = Stager(overlap_staging=True, way=SharedWay(), device=device)
    result = stager.stage({"w": device.declare(torch.ones(1000)), "shared": torch.ones(10).share_memory_()})
    training = in_thread(stager.hold_training)
    wait_until_inside(training, StagedSave.wait_released)
    device.run()
    result.staged_save.wait_copied()
    assert training.is_alive()
    result.staged_save.release()
    training.join(WAIT)
    assert not training.is_alive()
    del result
    stager.saves.close()


@pytest.mark.parametrize("change", ["values", "strides", "memory", "shape", "dtype"])
def test_a_state_in_the_same_memory_is_copied_before_it_has_staged_tensors(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies repeat the addresses of the previous save, unless anything else has changed."""
    device = SimulatedDevice(has_batches=True)
    stager = Stager(device=device, limits=GatherLimits(batch_bytes=64))
    base = device.declare(torch.arange(4000, dtype=torch.float32))
    state = {"a": base[:1600].view(40, 40), "b": base[2000:3600].view(40, 40), "small": base[3900:3901]}
    first = staged(stager, state)
    del first
    batched: list[int] = []  # the calls with batches by the time that the staged tensors are made
    allocate_all = SharedBuffer.allocate_all

    def noted(buffer: SharedBuffer, *layout: Any) -> list[torch.Tensor]:
        batched.append(len(device.batched))
        return allocate_all(buffer, *layout)

    monkeypatch.setattr(SharedBuffer, "allocate_all", noted)
    device.batched.clear()
    base += 1
    match change:
        case "strides":
            state["a"] = state["a"].t()
        case "memory":
            state["a"] = base[100:1700].view(40, 40)
        case "shape":
            state["a"] = state["a"].view(1600)
        case "dtype":
            state["a"] = state["a"].view(torch.int32)
    second = staged(stager, state)
    assert [key for key, tensor in state.items() if not same(second[key], tensor)] == []
    assert batched == [1 if change == "values" else 0]
    assert len(device.batched) == 1
    live = weakref.ref(state["b"])
    del second, state
    assert live() is None
    stager.saves.close()


def test_an_interruption_waits_for_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that are queued end before another save can get the buffer."""
    device = SimulatedDevice(has_batches=True)
    stager = Stager(device=device)
    state = {"a": device.declare(torch.zeros(10_000))}
    staged(stager, state)
    queues = [stream.queue for stream in device.streams]
    with monkeypatch.context() as patch:
        patch.setattr(SharedBuffer, "allocate_all", lambda *of: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            stager.stage(state)
    assert len(device.batched) == 2
    assert queues == [[]] * len(queues)
    stager.saves.close()


def test_training_is_not_held_by_a_graph() -> None:
    """`hold_training` raises during a capture, whose replays would not wait, and does nothing without overlap."""
    device = SimulatedDevice()
    state = {"a": device.declare(torch.zeros(10))}
    for stager in (Stager(device=device, overlap_staging=True), Stager(device=device)):
        staged(stager, state)
        device.is_capturing = True
        if stager._overlap_staging:
            with pytest.raises(StagingError, match=r"CUDA graph.*around graph.replay\(\)"):
                stager.hold_training()
        else:
            stager.hold_training()
        device.is_capturing = False
        stager.hold_training()
        stager.saves.close()


def test_all_saves_use_one_stream() -> None:
    """(Simulated device.) The buffer on the device is allocated once for all saves."""
    device = SimulatedDevice()
    state = {"w": device.declare(torch.ones(1000))}
    for stager in (Stager(device=device), Stager(device=device)):  # as of two writers
        for _ in range(2):
            stager.stage(state).staged_save.wait_copied()
        stager.saves.close()
    assert len(device.streams) == 1
    assert device.buffers == [GatherLimits().buffer_bytes]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_staging_inside_another_one_leaves_its_values_alone(overlap: bool) -> None:
    """(Simulated device.) A second staging, by another thread, runs after each copy of the first one."""
    device, saves = SimulatedDevice(), [StagedSaves() for _ in range(2)]
    limits = GatherLimits(buffer_bytes=8 << 10, small_bytes=4 << 10)
    first, second = (Stager(p, device=device, limits=limits, overlap_staging=overlap) for p in saves)
    base = device.declare(torch.arange(2 * 64 * 640, dtype=torch.float32).view(2, 64, 640))
    states = [{**{f"small {n}": rows[n, :500] for n in range(40)}, "strided": rows.t()} for rows in base]
    inner: list[StagedStateDict] = []

    def stage_second() -> None:
        device.on_copy = lambda: None
        inner.append(second.stage(states[1]))
        inner[-1].staged_save.wait_copied()
        device.on_copy = interrupt

    def interrupt() -> None:
        in_thread(stage_second).join(WAIT)

    device.on_copy = interrupt
    outer = first.stage(states[0])
    outer.staged_save.wait_copied()
    assert len(inner) >= 10
    for result, state in [(outer, states[0]), *((one, states[1]) for one in inner)]:
        assert [key for key, value in dict(result).items() if not torch.equal(value, state[key])] == []
    assert len(device.buffers) == 2  # one for each staging at a time, reused
    inner.clear()
    del outer, result
    for stager in (first, second):
        stager.saves.close()


def test_a_buffer_is_unregistered_before_it_regrows() -> None:
    """(Simulated device.) At any time one buffer is registered, at its exact size."""
    device = SimulatedDevice()
    stager = Stager(device=device)
    sizes = []
    for count in (1000, 100_000, 10):
        result = stager.stage({"w": device.declare(torch.ones(count))})
        sizes.append([nbytes for _, nbytes in device.pinned])
        del result
    assert sizes == [[4096], [401_408], [401_408]]
    stager.saves.close()
    assert device.pinned == []


def test_prewarming_registers_for_the_device_of_the_state() -> None:
    """(Simulated device.) The first save finds a pinned buffer."""
    device = SimulatedDevice()
    stager = Stager(device=device)
    state = {"w": device.declare(torch.ones(1000))}
    stager.prewarm(state)
    stager.saves.wait_prewarmed()
    assert [nbytes for _, nbytes in device.pinned] == [4096]
    stager.stage(state)
    assert len(device.pinned) == 1
    stager.saves.close()


def test_staging_host_memory_starts_no_cuda(stager: Stager) -> None:
    """Without tensors on a device nothing is registered."""
    device = SimulatedDevice()
    other = Stager(device=device)
    assert staged(other, {"a": torch.ones(3)})["a"].tolist() == [1.0] * 3
    assert (device.pinned, device.streams) == ([], [])
    other.saves.close()


@pytest.mark.parametrize("able", [True, False])
def test_training_waits_for_copies_that_another_process_makes(able: bool) -> None:
    """(Simulated device.) If that process cannot make them, this process does."""
    device = SimulatedDevice()
    asked, made = threading.Event(), threading.Event()

    class OtherProcess(BufferWay):
        copies_from_devices = False

        def copy_elsewhere(self, buffer: SharedBuffer, copies: Copies) -> bool:
            asked.set()
            assert made.wait(WAIT)
            if able:
                device.run()
                for copied, source in copies.on_device:
                    assert buffer.locate(copied) is not None
                    copied.copy_(source)
            return able

    stager = Stager(overlap_staging=True, way=OtherProcess(), device=device)
    weight, host = device.declare(torch.ones(1000)), torch.ones(10)
    result = stager.stage({"w": weight, "host": host})
    changed = threading.Event()

    def train() -> None:
        stager.hold_training()
        device.queue(weight.zero_)
        host.zero_()
        changed.set()

    training = in_thread(train)
    assert asked.wait(WAIT)
    wait_until_inside(training, Stager.hold_training)
    assert not changed.is_set()
    made.set()
    assert changed.wait(WAIT)
    device.run()
    result.staged_save.wait_copied()
    assert (set(dict(result)["w"].tolist()), set(dict(result)["host"].tolist())) == ({1.0}, {1.0})
    assert len(device.pinned) == (0 if able else 1)  # else the copies from here would be several times slower
    assert bool(device.crossings) is not able
    training.join(WAIT)
    del result
    stager.saves.close()


def test_tensors_that_other_ranks_write_take_no_memory() -> None:
    """They have shape and dtype for planning. The other tensors are copied."""
    stager = Stager()
    state = {
        "mine": torch.ones(100),
        "nested": {"theirs": [torch.ones(1000, 3).half()]},
        "pair": TwoTensor(*[torch.ones(2)] * 2),
    }
    result = stager.stage(state, frozenset({"nested.theirs.0", "pair"}))
    theirs = result["nested"]["theirs"][0]
    assert (theirs.device.type, theirs.shape, theirs.dtype) == ("meta", (1000, 3), torch.float16)
    assert result["pair"].a.is_meta and result["pair"].b.is_meta
    assert torch.equal(result["mine"], state["mine"])
    buffer = result.staged_save.buffer
    assert buffer is not None
    assert buffer.nbytes < 6000
    del result, theirs
    stager.saves.close()


def test_only_tensors_of_a_device_are_cast() -> None:
    """Casts on the device save bus transfers. In host memory they would cost time, and would break other classes."""
    device = SimulatedDevice()
    stager = Stager(device=device)
    stager.dtype_of = lambda dtype: torch.float16 if dtype.is_floating_point else dtype
    on_device = device.declare(torch.rand(50, 40))
    state = {"w": on_device, "n": device.declare(torch.arange(9)), "host": torch.rand(3)}
    state["wrapped"] = TwoTensor(on_device[:2].clone(), device.declare(torch.rand(2, 40)))
    found = staged(stager, state)
    assert torch.equal(found["w"], on_device.half())
    assert found["w"].dtype == torch.float16
    assert [found[key].dtype for key in ("n", "host")] == [torch.int64, torch.float32]
    assert torch.equal(found["wrapped"].b, state["wrapped"].b)
    assert found["wrapped"].b.dtype == torch.float32
    del found
    stager.saves.close()
