"""Copies in host memory: their contents, and the threads that make them."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Sequence

import pytest
import torch

from dcp_tensorizer._staging import tensor_copy
from dcp_tensorizer._staging.device import SideStreams
from dcp_tensorizer._staging.tensor_copy import Copies

from ...lab.simulated import SimulatedDevice
from ...lab.states import filled, same

_MEGABYTE = 1 << 18  # elements of float32

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def host_copies(staged: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], threads: int) -> Copies:
    """Copies without devices."""
    copies = Copies(SideStreams(SimulatedDevice()), sources, threads=threads)
    copies.add(staged)
    return copies


def copied(sources: Sequence[torch.Tensor], threads: int) -> list[torch.Tensor]:
    """Copies of tensors."""
    staged = [torch.zeros(source.shape, dtype=source.dtype) for source in sources]
    host_copies(staged, sources, threads).copy_from_host()
    return staged


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_tensors_are_copied_by_any_number_of_threads(threads: int) -> None:
    """Large and small tensors, contiguous or not, are copied."""
    sources = [torch.arange(10_000_000, dtype=torch.int32), torch.arange(12).view(3, 4).t(), torch.tensor(5)]
    sources += [torch.full((n, 1000), float(n)) for n in range(1, 200)]
    assert [same(a, b) for a, b in zip(copied(sources, threads), sources, strict=True)] == [True] * len(sources)


def test_copies_while_the_interpreter_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no thread can be started, the calling thread copies everything, so that the save in progress is finished."""
    sources = [filled(torch.float32, (1000, 1500), seed) for seed in range(3)]
    started = []

    def start(thread: threading.Thread) -> None:
        started.append(thread)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert [same(a, b) for a, b in zip(copied(sources, 3), sources, strict=True)] == [True] * 3
    assert len(started) == 2


def at_once(operation: Callable[[], None]) -> concurrent.futures.Future[None]:
    """In place of a thread: what would run beside this one is done when it is begun."""
    done = concurrent.futures.Future[None]()
    try:
        done.set_result(operation())
    except Exception as error:
        done.set_exception(error)
    return done


def test_all_shares_but_the_last_are_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calling thread makes the last share in `copy_from_host`."""
    monkeypatch.setattr(tensor_copy, "in_background", at_once)
    sources = [torch.ones(3 * _MEGABYTE) for _ in range(8)]
    staged = [torch.zeros(3 * _MEGABYTE) for _ in sources]
    copies = host_copies(staged, sources, 4)
    assert [int(tensor[0]) for tensor in staged] == [1] * 6 + [0] * 2
    copies.copy_from_host()
    assert [tensor.mean().item() for tensor in staged] == [1.0] * 8


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_shares_have_about_the_same_size(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """Tensors that are larger than a share are cut."""
    taken: list[int] = []
    monkeypatch.setattr(tensor_copy, "in_background", at_once)
    monkeypatch.setattr(tensor_copy, "copy_all", lambda staged, _: taken.append(sum(t.nbytes for t in staged)))
    sources = [torch.empty(100 * _MEGABYTE), torch.empty(5 * _MEGABYTE), torch.empty(0), torch.empty(1)]
    host_copies(sources, sources, threads).copy_from_host()
    assert sum(taken) == sum(source.nbytes for source in sources)
    assert max(taken) <= sum(taken) / threads + 28e6


@pytest.mark.parametrize(("nbytes", "threads", "of_torch"), [(24 << 20, 1, 1), (1 << 20, 4, 1), (24 << 20, 4, 2)])
def test_one_thread_copies(monkeypatch: pytest.MonkeyPatch, nbytes: int, threads: int, of_torch: int) -> None:
    """With one thread, with little to copy, and if torch itself copies with several threads."""
    torch.set_num_threads(of_torch)
    monkeypatch.setattr(tensor_copy, "in_background", None)
    source = filled(torch.uint8, (nbytes,))
    assert same(copied([source], threads)[0], source)


def test_an_error_of_another_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """`copy_from_host` raises the error of any share."""
    monkeypatch.setattr(tensor_copy, "in_background", at_once)
    staged = [torch.zeros(4 * _MEGABYTE), torch.zeros(2 * _MEGABYTE)]
    copies = host_copies(staged, [torch.zeros(3 * _MEGABYTE), torch.zeros(2 * _MEGABYTE)], 2)  # the first: another size
    with pytest.raises(RuntimeError, match="size"):
        copies.copy_from_host()


def test_copies_that_have_begun_end_before_an_interrupt_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another save may use the buffer afterwards."""
    begun: list[concurrent.futures.Future[None]] = []
    begin = tensor_copy.in_background

    def interrupted(operation: Callable[[], None]) -> concurrent.futures.Future[None]:
        if begun:
            raise KeyboardInterrupt
        begun.append(begin(operation))
        return begun[0]

    monkeypatch.setattr(tensor_copy, "in_background", interrupted)
    sources = [torch.ones(8 * _MEGABYTE) for _ in range(3)]
    staged = [torch.zeros(8 * _MEGABYTE) for _ in range(3)]
    with pytest.raises(KeyboardInterrupt):
        host_copies(staged, sources, 3)
    assert [future.done() for future in begun] == [True]
    assert staged[0].mean().item() == 1.0
