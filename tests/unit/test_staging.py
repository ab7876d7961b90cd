"""Staging copies everything, or names the key it cannot copy; a buffer is used again when it is free, and only then."""

from __future__ import annotations

import collections
import enum
import gc
import io
import os
import pickle
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

from dcp_tensorizer import StagingError
from dcp_tensorizer._memory.shared_buffer import SharedBuffer
from dcp_tensorizer._staging import stager as stager_module
from dcp_tensorizer._staging import tensor_copy
from dcp_tensorizer._staging.stager import StagedSave, StagedStateDict, Stager, StagingFuture
from dcp_tensorizer._staging.tensor_copy import GATHER_BYTES, copy_on_host

from .simulated import SimulatedDevice
from .support import ALL_DTYPES, dtype_name, filled, memory_files, raw, same

WAIT = 10.0
"""Seconds after which something that should have happened has not."""
SOON = 0.2
"""Seconds for which something that must not happen is watched."""


@pytest.fixture
def stager() -> Iterator[Stager]:
    stager = Stager()
    yield stager
    stager.close()


def staged(stager: Stager, state: Mapping[str, Any]) -> dict[str, Any]:
    """A plain copy of the staged twin, not claimed by any save."""
    result = stager.stage(state)
    if result.staged_save.error is not None:
        raise result.staged_save.error
    return dict(result)


def inode(staged: StagedStateDict) -> int:
    """Identifies the memory that a staged state dict is in."""
    assert staged.staged_save.buffer is not None
    return os.fstat(staged.staged_save.buffer.fd).st_ino


def in_thread(target: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


# --- what a twin holds -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
def test_every_dtype_in_every_memory_layout_is_copied(stager: Stager, dtype: torch.dtype) -> None:
    """Bits and shape survive, no memory is shared, and what training writes afterwards does not show."""
    base = filled(dtype, (6, 8))
    images = filled(dtype, (2, 3, 4, 5)).view(torch.uint8).view(2, 3, 4, 5, dtype.itemsize)
    pixels = images.permute(0, 2, 3, 1, 4).contiguous()
    channels_last = pixels.view(dtype).squeeze(-1).permute(0, 3, 1, 2)
    state = {
        "contiguous": base,
        "transposed": base.t(),
        "expanded": base[:1].expand(6, 8),
        "strided": base[::2, 1::3],
        "offset": base[3:],
        "channels_last": channels_last,
        "scalar": base[2, 3],
        "empty": filled(dtype, (3, 0, 2)),
        "one": base[:1, :1],
    }
    expected = {key: (value.dtype, value.shape, raw(value)) for key, value in state.items()}
    twin = staged(stager, state)
    base.view(torch.uint8).bitwise_xor_(1)
    pixels.bitwise_xor_(1)
    assert {key: (value.dtype, value.shape, raw(value)) for key, value in twin.items()} == expected
    assert all(value.is_contiguous() for value in twin.values())
    assert not {v.data_ptr() for v in twin.values() if v.numel()} & {v.data_ptr() for v in state.values()}


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=dtype_name)
def test_conjugate_and_negative_bits_are_carried_out(stager: Stager, dtype: torch.dtype) -> None:
    """What a lazily conjugated or negated view stands for is stored, not the memory it looks at."""
    base = torch.arange(12, dtype=torch.float32).view(6, 2)
    values = torch.view_as_complex(base).to(dtype)
    conjugate, negative = values.conj(), values.conj().imag
    assert conjugate.is_conj()
    assert negative.is_neg()
    twin = staged(stager, {"conj": conjugate, "neg": negative, "both": conjugate[::2]})
    assert not any(value.is_conj() or value.is_neg() for value in twin.values())
    assert torch.view_as_real(twin["conj"].to(torch.complex64)).tolist() == [[a, -b] for a, b in base.tolist()]
    assert twin["neg"].tolist() == [-b for _, b in base.tolist()]
    assert twin["both"].tolist() == [complex(a, -b) for a, b in base.tolist()][::2]


def test_only_the_elements_of_a_view_are_copied(stager: Stager) -> None:
    """Two elements of a large storage take one page."""
    large = torch.arange(1 << 20)
    result = stager.stage({"view": large[1000:1002]})
    assert result.staged_save.buffer is not None
    assert result.staged_save.buffer.nbytes == 4096
    assert dict(result)["view"].tolist() == [1000, 1001]


def test_each_twin_has_a_storage_of_its_own(stager: Stager) -> None:
    """Whoever pickles a twin moves its own bytes, not the whole buffer."""
    twin = staged(stager, {"a": torch.ones(3), "b": torch.ones(1000), "c": torch.ones(())})
    assert [twin[key].untyped_storage().nbytes() for key in "abc"] == [12, 4000, 4]
    assert [twin[key].storage_offset() for key in "abc"] == [0, 0, 0]


def test_parameters_and_results_of_training_become_plain_tensors(stager: Stager) -> None:
    """Nothing of autograd is in the twin, and staging leaves the originals as they were."""
    parameter = torch.nn.Parameter(torch.arange(3.0))
    result = parameter * 2
    twin = staged(stager, {"parameter": parameter, "result": result, "buffer": torch.nn.Buffer(torch.ones(2))})
    assert {key: type(value) for key, value in twin.items()} == dict.fromkeys(twin, torch.Tensor)
    assert not any(value.requires_grad for value in twin.values())
    assert twin["result"].tolist() == [0.0, 2.0, 4.0]
    assert parameter.requires_grad
    assert result.grad_fn is not None


def test_shared_tensors_and_tied_weights_are_copied(stager: Stager) -> None:
    """Tensors in shared memory are not taken for staged ones; tied weights become two equal copies."""
    shared = torch.arange(4.0).share_memory_()
    twin = staged(stager, {"shared": shared, "tied": shared})
    shared.zero_()
    assert twin["shared"].tolist() == twin["tied"].tolist() == [0.0, 1.0, 2.0, 3.0]


class Pair(NamedTuple):
    first: Any
    second: Any


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


def test_containers_keep_their_types_and_share_nothing(stager: Stager) -> None:
    """Dicts, lists, tuples and what else is made of them are built anew around the twins."""
    tensor = torch.arange(3.0)
    members: list[Any] = [tensor, [tensor]]
    stream = io.BytesIO(b"abc")
    plain = Plain([tensor])
    state = {
        "dict": {"inner": {"t": tensor}},
        "list": members,
        "tuple": (tensor, 1),
        "namedtuple": Pair(tensor, (tensor,)),
        "ordered": collections.OrderedDict([("z", tensor), ("a", 2)]),
        "default": collections.defaultdict(list, {"t": tensor}),
        "counter": collections.Counter("aab"),
        "user": collections.UserDict({"t": tensor}),
        "proxy": types.MappingProxyType({"t": tensor}),
        "stream": stream,
        "plain": plain,
        "enum": Colour.RED,
        "level": Level.HIGH,
        "set": {1, 2},
        "empty": [{}, [], ()],
        "atoms": [None, True, 3, 1.5, 2j, "s", b"b", torch.float16, torch.device("cpu"), torch.Size([2])],
        "integer keys": {0: tensor, 7: "seven"},
    }
    twin = staged(stager, state)
    tensor.zero_()
    members.append("later")
    stream.write(b"ZZZ")
    plain.value.append("later")
    expected = [0.0, 1.0, 2.0]
    assert twin["dict"]["inner"]["t"].tolist() == expected
    assert [twin["list"][0].tolist(), twin["list"][1][0].tolist(), len(twin["list"])] == [expected, expected, 2]
    assert (twin["tuple"][0].tolist(), twin["tuple"][1], type(twin["tuple"])) == (expected, 1, tuple)
    assert isinstance(twin["namedtuple"], Pair)
    assert (twin["namedtuple"].first.tolist(), twin["namedtuple"].second[0].tolist()) == (expected, expected)
    assert (type(twin["ordered"]), list(twin["ordered"])) == (collections.OrderedDict, ["z", "a"])
    assert (type(twin["default"]), twin["default"].default_factory) == (collections.defaultdict, list)
    assert twin["default"]["t"].tolist() == expected
    assert twin["counter"] == collections.Counter({"a": 2, "b": 1})
    assert twin["user"]["t"].tolist() == expected
    assert twin["proxy"]["t"].tolist() == expected
    assert twin["stream"].getvalue() == b"abc"
    assert (len(twin["plain"].value), twin["plain"].value[0].tolist()) == (1, expected)
    assert twin["enum"] is Colour.RED
    assert twin["level"] is Level.HIGH
    assert twin["set"] == {1, 2}
    assert twin["set"] is not state["set"]
    assert twin["empty"] == [{}, [], ()]
    assert twin["atoms"] == state["atoms"]
    assert twin["integer keys"][0].tolist() == expected
    assert list(twin) == list(state)


class Attributes(MutableMapping[str, Any]):
    """A mapping of the kind that configuration libraries have: not a dict, its contents in an attribute."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def __getitem__(self, key: str) -> Any:
        return self.content[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.content[key] = value

    def __delitem__(self, key: str) -> None:
        del self.content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)


def test_staging_never_changes_what_it_copies(stager: Stager) -> None:
    """A mapping that is not a dict keeps its own tensors, and its twin others."""
    tensor = torch.arange(3.0)
    live = Attributes({"t": tensor, "n": {"t": tensor}})
    twin = staged(stager, {"mapping": live})
    assert live["t"] is tensor
    assert live["n"]["t"] is tensor
    tensor.zero_()
    assert twin["mapping"]["t"].tolist() == [0.0, 1.0, 2.0]
    assert twin["mapping"]["n"]["t"].tolist() == [0.0, 1.0, 2.0]


def test_an_empty_state_dict_is_staged(stager: Stager) -> None:
    """Nothing to copy is no error."""
    assert staged(stager, {}) == {}


# --- what cannot be copied -------------------------------------------------------------------------------------------


class Unflattened(torch.Tensor):
    """A wrapper subclass that does not say what it is made of."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Unflattened:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[return-value]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError("this subclass does nothing")


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(3)


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr"),
        (quantised, "qint8"),
        (lambda: torch.empty(3, dtype=torch.uint4), "uint4"),
        (lambda: torch.empty(3, device="meta"), "meta"),
        (nested, "nested"),
        (jagged, "jagged"),
        (lambda: masked_tensor(torch.ones(2), torch.tensor([True, False])), "MaskedTensor"),
        (lambda: Unflattened(torch.ones(2)), "Unflattened"),
        (fake, "FakeTensor"),
        (threading.Lock, "lock"),
        (lambda: (n for n in range(3)), "generator"),
        (lambda: Plain(torch.ones(2, requires_grad=True) * 2), "Plain"),
    ],
    ids=lambda value: value if isinstance(value, str) else "a",
)
def test_what_cannot_be_copied_is_an_error_that_names_it(stager: Stager, make: Callable[[], Any], kind: str) -> None:
    """Never zeros, never silence: the error has the key and the kind, and the next staging works."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, on the making of some of these
        state = {"model": {"layers": [torch.ones(2), make()]}, "good": torch.ones(2)}
        result = stager.stage(state)
    assert dict(result) == {}
    assert isinstance(result.staged_save.error, StagingError)
    assert "'model.layers.1'" in str(result.staged_save.error)
    assert kind in str(result.staged_save.error)
    assert staged(stager, {"good": torch.ones(2)})["good"].tolist() == [1.0, 1.0]


def test_a_failed_staging_keeps_nothing_alive(stager: Stager) -> None:
    """The error that waits for its save holds neither the training's tensors nor the staging buffer."""
    gc.collect()
    before = memory_files()

    def fail() -> weakref.ref[torch.Tensor]:
        tensor = torch.ones(1000)
        result = stager.stage({"a": tensor, "lock": threading.Lock()})
        assert result.staged_save.error is not None
        return weakref.ref(tensor)

    tensor = fail()
    stager.close()
    gc.collect()
    assert tensor() is None
    assert memory_files() == before


def test_an_interrupted_staging_leaves_nothing_behind(stager: Stager) -> None:
    """Ctrl-C passes through, and no save is waited for afterwards."""

    class Interrupting(dict[str, Any]):
        def items(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stager.stage({"a": Interrupting(b=1)})
    assert stager.drain(0.0)
    assert stager.begin_save() is None


def test_a_refused_staging_is_a_save_that_fails(stager: Stager) -> None:
    """The save that takes it finds the error in its staged_save."""
    refused = stager.refuse(StagingError("the writer is closed"))
    assert list(refused.items()) == []
    staged_save = stager.begin_save()
    assert staged_save is refused.staged_save
    assert str(staged_save.error) == "the writer is closed"


# --- tensors made of tensors -----------------------------------------------------------------------------------------


def test_a_wrapper_subclass_is_rebuilt_around_copies(stager: Stager) -> None:
    """A subclass that can be flattened comes back as itself, its inner tensors copied."""
    a, b = torch.arange(4.0), -torch.arange(4.0)
    twin = staged(stager, {"two": TwoTensor(a, b)})["two"]
    a.zero_()
    b.zero_()
    assert type(twin) is TwoTensor
    assert twin.a.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert twin.b.tolist() == [0.0, -1.0, -2.0, -3.0]


def test_wrappers_within_wrappers_are_copied(stager: Stager) -> None:
    """Flattening goes down to the plain tensors."""
    inner = torch.arange(2.0)
    twin = staged(stager, {"n": TwoTensor(TwoTensor(inner, inner), TwoTensor(inner, inner))})["n"]
    inner.zero_()
    assert [t.tolist() for t in (twin.a.a, twin.a.b, twin.b.a, twin.b.b)] == [[0.0, 1.0]] * 4


def test_what_cannot_be_copied_inside_a_wrapper_is_an_error(stager: Stager) -> None:
    """The key of the wrapper is named."""
    with pytest.raises(StagingError, match=r"'w'.*meta"):
        staged(stager, {"w": TwoTensor(torch.empty(2, device="meta"), torch.empty(2, device="meta"))})


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_dtensors_are_copied(stager: Stager) -> None:
    """Sharded, replicated, 0-dim, and as parameters: mesh and placements stay, local tensors are new."""
    mesh = init_device_mesh("cpu", (1,))
    locals_ = {"sharded": torch.arange(6.0).view(3, 2), "replicated": torch.arange(3.0), "scalar": torch.tensor(7.0)}
    state: dict[str, Any] = {
        "sharded": DTensor.from_local(locals_["sharded"], mesh, [Shard(0)]),
        "replicated": DTensor.from_local(locals_["replicated"], mesh, [Replicate()]),
        "scalar": DTensor.from_local(locals_["scalar"], mesh, [Replicate()]),
    }
    state["parameter"] = torch.nn.Parameter(state["sharded"])
    twin = staged(stager, state)
    for local in locals_.values():
        local.fill_(-1)
    assert all(isinstance(value, DTensor) for value in twin.values())
    assert twin["sharded"].placements == (Shard(0),)
    assert twin["sharded"].device_mesh is mesh
    assert {key: value.to_local().tolist() for key, value in twin.items()} == {
        "sharded": [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]],
        "replicated": [0.0, 1.0, 2.0],
        "scalar": 7.0,
        "parameter": [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]],
    }


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_sharded_tensors_are_copied(stager: Stager) -> None:
    """FSDP1's tensors come back as themselves, their shards on the CPU and new."""
    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu"])  # type: ignore[list-item]
    tensor = sharded_tensor.full(spec, (4, 2), 3.0)
    twin = staged(stager, {"sharded": tensor})["sharded"]
    tensor.local_shards()[0].tensor.zero_()
    assert type(twin) is sharded_tensor.ShardedTensor
    assert [shard.tensor.tolist() for shard in twin.local_shards()] == [[[3.0, 3.0]] * 4]
    assert twin.local_shards()[0].metadata.shard_offsets == [0, 0]
    assert twin.size() == torch.Size([4, 2])


# --- saves: when a buffer is free -----------------------------------------------------------------------------------


def test_a_save_under_way_is_waited_for(stager: Stager) -> None:
    """The next turn begins when the thread that took the staged state dict has ended, not before."""
    first = stager.stage({"a": torch.ones(2)})
    taken, release, turn = threading.Event(), threading.Event(), threading.Event()

    def save() -> None:
        first.items()
        taken.set()
        assert release.wait(WAIT)

    def wait() -> None:
        stager.wait_turn()
        turn.set()

    saving = in_thread(save)
    assert taken.wait(WAIT)
    waiting = in_thread(wait)
    assert not turn.wait(SOON)
    release.set()
    assert turn.wait(WAIT)
    saving.join(WAIT)
    waiting.join(WAIT)


def test_a_buffer_is_used_again_once_its_save_is_over(stager: Stager) -> None:
    """Saves of one size, or less, share one memory file, even while the ended thread's state dict still exists."""
    first = stager.stage({"a": torch.ones(5000)})
    in_thread(first.items).join(WAIT)
    second = stager.stage({"a": torch.zeros(5000)})
    assert inode(second) == inode_of_first(first, second)
    in_thread(second.items).join(WAIT)
    third = stager.stage({"b": torch.full((10,), 3.0)})
    assert inode(third) == inode_of_first(second, third)
    assert dict(third)["b"].tolist() == [3.0] * 10


def inode_of_first(first: StagedStateDict, second: StagedStateDict) -> int:
    """The memory of a save that is over: its staged save has given the buffer up, its tensors still lie in it."""
    assert first.staged_save.buffer is None
    buffer = second.staged_save.buffer
    assert buffer is not None
    assert buffer.locate(dict(first)["a"]) == 0
    return os.fstat(buffer.fd).st_ino


def test_a_buffer_grows_with_the_state_dict(stager: Stager) -> None:
    """A larger state dict gets a larger buffer, and the smaller one is given back."""
    first = stager.stage({"a": torch.ones(10)})
    assert first.staged_save.buffer is not None
    assert first.staged_save.buffer.nbytes == 4096
    small = inode(first)
    del first
    before = len(memory_files())
    second = stager.stage({"a": torch.ones(5120), "b": torch.ones(1, dtype=torch.uint8)})
    assert second.staged_save.buffer is not None
    assert second.staged_save.buffer.nbytes == 24576  # 20,480 and 64 bytes, in whole pages
    assert inode(second) != small
    assert len(memory_files()) == before


def test_without_a_cache_memory_is_given_back_between_saves() -> None:
    """Each save allocates, and nothing is kept."""
    stager, before = Stager(cache=False), len(memory_files())
    first = stager.stage({"a": torch.ones(10)})
    number = inode(first)
    in_thread(first.items).join(WAIT)
    del first
    second = stager.stage({"a": torch.ones(10)})
    assert inode(second) != number
    assert len(memory_files()) == before + 1
    del second
    stager.close()
    assert len(memory_files()) == before


def test_an_unclaimed_staged_state_dict_is_neither_overwritten_nor_waited_for(stager: Stager) -> None:
    """Its buffer is left alone; the next turn comes after the claim time at most, with a new buffer."""
    first = stager.stage({"a": torch.ones(4)})
    started = time.monotonic()
    stager.wait_turn()
    waited = time.monotonic() - started
    second = stager.stage({"a": torch.zeros(4)})
    assert waited < 5.0
    assert inode(second) != inode(first)
    assert dict(first)["a"].tolist() == [1.0] * 4
    assert dict(second)["a"].tolist() == [0.0] * 4


def test_a_dropped_staged_state_dict_gives_its_buffer_back_at_once(stager: Stager) -> None:
    """Nobody waits for a save that cannot come any more."""
    first = stager.stage({"a": torch.ones(4)})
    number = inode(first)
    del first
    started = time.monotonic()
    stager.wait_turn()
    assert time.monotonic() - started < 0.5
    assert inode(stager.stage({"a": torch.zeros(4)})) == number


def test_a_tensor_kept_from_a_dropped_staged_state_dict_keeps_the_buffer(stager: Stager) -> None:
    """A custom save that took the tensors out of the dict still owns their memory."""
    first = stager.stage({"a": torch.ones(4)})
    number, tensor = inode(first), dict(first)["a"]
    del first
    second = stager.stage({"a": torch.zeros(4)})
    assert inode(second) != number
    assert tensor.tolist() == [1.0] * 4
    del tensor, second
    assert inode(stager.stage({"a": torch.zeros(4)})) == number


def test_saves_run_in_the_order_in_which_they_were_staged(stager: Stager) -> None:
    """A save whose thread starts first waits for the one that was staged before it."""
    first, second = stager.stage({"a": torch.ones(1)}), stager.stage({"a": torch.zeros(1)})
    order: list[str] = []
    second_starts, release = threading.Event(), threading.Event()

    def save_second() -> None:
        second_starts.set()
        second.items()
        order.append("second begins")

    def save_first() -> None:
        first.items()
        order.append("first begins")
        assert release.wait(WAIT)
        order.append("first ends")

    threads = [in_thread(save_second)]
    assert second_starts.wait(WAIT)
    threads.append(in_thread(save_first))
    threads[0].join(SOON)
    release.set()
    for thread in threads:
        thread.join(WAIT)
    assert order == ["first begins", "first ends", "second begins"]


def test_many_saves_from_threads_that_start_in_any_order_keep_theirs(stager: Stager) -> None:
    """Six staged saves, started last to first: each sees its own values, in order, one at a time."""
    saves = [stager.stage({"a": torch.full((100,), float(n))}) for n in range(6)]
    seen: list[float] = []
    running = threading.Lock()

    def save(staged_state: StagedStateDict) -> None:
        ((_, tensor),) = staged_state.items()
        assert running.acquire(blocking=False)
        seen.append(tensor.sum().item() / 100)
        running.release()

    threads = [in_thread(lambda s=s: save(s)) for s in reversed(saves)]  # type: ignore[misc]
    for thread in threads:
        thread.join(WAIT)
    assert seen == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_save_that_never_starts_does_not_hold_up_the_next(stager: Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save after it waits for it once, for as long as a process takes to start, and no later one does."""
    monkeypatch.setattr(stager_module, "_START_SECONDS", 0.05)
    lost = stager.stage({"a": torch.ones(1)})
    later = [stager.stage({"a": torch.full((1,), float(n))}) for n in range(3)]
    seen: list[float] = []

    def save(state: StagedStateDict) -> None:
        ((_, tensor),) = state.items()
        seen.append(tensor.item())

    for state in later:
        in_thread(lambda state=state: save(state)).join(WAIT)  # type: ignore[misc]
        monkeypatch.setattr(stager_module, "_START_SECONDS", 2 * WAIT)
    assert seen == [0.0, 1.0, 2.0]
    assert lost.staged_save.abandoned
    assert dict(lost)["a"].tolist() == [1.0]


def test_a_save_on_the_asking_thread_is_not_waited_for(stager: Stager) -> None:
    """Whoever stages and saves on one thread has finished the save when staging again."""
    first = stager.stage({"a": torch.ones(1)})
    first.items()
    stager.wait_turn()
    assert stager.drain(0.0)
    second = stager.stage({"a": torch.zeros(1)})
    assert dict(first)["a"].tolist() == [1.0]
    assert inode(second) != inode(first)


def test_a_lease_is_begun_once_by_the_thread_that_took_it(stager: Stager) -> None:
    """Other threads, and the same thread a second time, save something unstaged."""
    result = stager.stage({"a": torch.ones(1)})
    assert stager.begin_save() is None
    result.items()
    found: list[StagedSave | None] = []
    in_thread(lambda: found.append(stager.begin_save())).join(WAIT)
    assert found == [None]
    assert stager.begin_save() is result.staged_save
    assert stager.begin_save() is None


def test_pickling_takes_the_staged_state_dict(stager: Stager) -> None:
    """In PROCESS mode DCP pickles it on the save's thread: it arrives as a plain dict, and the save has begun."""
    result = stager.stage({"a": torch.arange(3), "b": {"c": 1}})
    copy = pickle.loads(pickle.dumps(result))
    assert type(copy) is dict
    assert (copy["a"].tolist(), copy["b"]) == ([0, 1, 2], {"c": 1})
    assert result.staged_save.thread is threading.current_thread()


def test_draining_gives_up_after_its_time(stager: Stager) -> None:
    """A save that does not end is reported, and then is over when it ends."""
    result = stager.stage({"a": torch.ones(1)})
    taken, release = threading.Event(), threading.Event()

    def save() -> None:
        result.items()
        taken.set()
        assert release.wait(WAIT)

    thread = in_thread(save)
    assert taken.wait(WAIT)
    assert not stager.drain(0.1)
    release.set()
    assert stager.drain(WAIT)
    thread.join(WAIT)


def test_prewarming_makes_the_buffer_of_the_first_save(stager: Stager) -> None:
    """The first staging of that size allocates nothing."""
    state = {"a": torch.ones(5000), "b": [torch.ones(3)]}
    stager.prewarm(state)
    stager._settle_warming()
    before = memory_files()
    result = stager.stage(state)
    assert memory_files() == before
    assert dict(result)["b"][0].tolist() == [1.0] * 3


def test_staging_waits_for_a_buffer_that_is_being_prewarmed(stager: Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    """`prewarm` returns at once; the first staging gets the buffer it began, and not a second one."""
    began, release = threading.Event(), threading.Event()
    made: list[SharedBuffer] = []

    class Slow(SharedBuffer):
        def __init__(self, nbytes: int) -> None:
            began.set()
            assert release.wait(WAIT)
            super().__init__(nbytes)
            made.append(self)

    monkeypatch.setattr(stager_module, "SharedBuffer", Slow)
    stager.prewarm({"a": torch.ones(5000)})
    assert began.wait(WAIT)
    releasing = in_thread(release.set)
    result = stager.stage({"a": torch.ones(5000)})
    assert [result.staged_save.buffer] == made
    releasing.join(WAIT)


def test_memory_that_is_short_fails_prewarming_at_once(stager: Stager) -> None:
    """The error comes from `prewarm`, not from a thread that nobody looks at."""
    with pytest.raises(StagingError, match="bytes of memory are available"):
        stager.prewarm({"a": torch.empty(1).expand(1 << 44)})


def test_prewarming_names_what_cannot_be_saved(stager: Stager) -> None:
    """Ahead of training, the error is raised at once."""
    with pytest.raises(StagingError, match=r"'a\.b'.*meta"):
        stager.prewarm({"a": {"b": torch.empty(2, device="meta")}})


def test_closing_gives_the_memory_back_when_the_last_twin_is_gone() -> None:
    """A save that still runs keeps its memory valid; afterwards nothing of it is left."""
    stager, before = Stager(), len(memory_files())
    result = stager.stage({"a": torch.ones(100)})
    stager.close()
    assert dict(result)["a"].tolist() == [1.0] * 100
    del result
    assert len(memory_files()) == before


def test_a_shortage_of_memory_is_an_error_of_the_save(stager: Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is allocated, the error says how much was needed, and the next save works."""
    monkeypatch.setattr("dcp_tensorizer._memory.memory_limit._available_memory", lambda: 1 << 20)
    result = stager.stage({"a": torch.ones(1 << 20)})
    assert "4,194,304 bytes" in str(result.staged_save.error)
    assert "1,048,576 bytes" in str(result.staged_save.error)
    assert staged(stager, {"a": torch.ones(2)})["a"].tolist() == [1.0, 1.0]


def test_staging_is_bit_exact_for_many_small_tensors(stager: Stager) -> None:
    """2,000 tensors of all dtypes in one buffer, none overlapping another."""
    state = {f"layer.{n}": filled(ALL_DTYPES[n % len(ALL_DTYPES)], (n % 7, 3), seed=n) for n in range(2000)}
    twin = staged(stager, state)
    assert [key for key in state if not same(state[key], twin[key])] == []


# --- overlap: what training may do meanwhile -------------------------------------------------------------------------


class Gate:
    """Holds the copying of host tensors back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        monkeypatch.setattr(tensor_copy, "copy_on_host", self._copy)

    def _copy(self, pairs: Any, threads: int) -> None:
        self.reached.set()
        assert self.opened.wait(WAIT)
        copy_on_host(pairs, threads)


@pytest.fixture
def overlapping() -> Iterator[Stager]:
    stager = Stager(overlap=True)
    yield stager
    stager.close()


def test_overlapped_staging_returns_before_it_has_copied(overlapping: Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin is there at once, its values later; then training may change the state, and not before."""
    gate = Gate(monkeypatch)
    live = torch.ones(1000)
    result = overlapping.stage({"a": live, "n": 3})
    staging = StagingFuture(result)
    assert staging.result() is result
    assert dict(result)["n"] == 3
    assert gate.reached.wait(WAIT)
    changed = threading.Event()

    def train() -> None:
        overlapping.hold_training()
        live.zero_()
        changed.set()

    training = in_thread(train)
    assert not changed.wait(SOON)
    assert not staging.done()
    gate.opened.set()
    assert changed.wait(WAIT)
    result.staged_save.wait_copied()
    assert dict(result)["a"].tolist() == [1.0] * 1000
    assert staging.done()
    training.join(WAIT)


def test_objects_are_copied_before_overlapped_staging_returns(
    overlapping: Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only tensors have to stay as they are: what a dict or a list held is kept at once."""
    gate = Gate(monkeypatch)
    state = {"trainer": {"step": 1, "seen": [1, 2], "t": torch.ones(2)}}
    result = overlapping.stage(state)
    state["trainer"]["step"] = 2
    state["trainer"]["seen"].append(3)  # type: ignore[union-attr]
    del state["trainer"]["t"]
    gate.opened.set()
    result.staged_save.wait_copied()
    twin = dict(result)["trainer"]
    assert (twin["step"], twin["seen"], twin["t"].tolist()) == (1, [1, 2], [1.0, 1.0])


def test_a_future_is_done_even_if_its_callback_comes_late(overlapping: Stager) -> None:
    """Whoever asks after the copies are complete is told so."""
    result = overlapping.stage({"a": torch.ones(2)})
    overlapping.wait_released()
    staging = StagingFuture(result)
    told: list[bool] = []
    staging.add_done_callback(lambda future: told.append(future.done()))
    assert staging.done()
    assert told == [True]


def test_a_buffer_is_not_free_while_it_is_copied_to(overlapping: Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that fails early, or that nobody begins, does not free a buffer that copies still go to."""
    gate = Gate(monkeypatch)
    result = overlapping.stage({"a": torch.ones(10)})
    in_thread(result.items).join(WAIT)
    assert gate.reached.wait(WAIT)
    assert not result.staged_save.over()
    assert not overlapping.drain(0.05)
    gate.opened.set()
    assert overlapping.drain(WAIT)


def test_an_error_of_overlapped_copying_is_the_saves(overlapping: Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on, the future is done, and the save raises what happened."""

    def fail(pairs: Any, threads: int) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(tensor_copy, "copy_on_host", fail)
    result = overlapping.stage({"a": torch.ones(10)})
    staging = StagingFuture(result)
    overlapping.wait_released()
    with pytest.raises(StagingError, match="illegal memory access"):
        result.staged_save.wait_copied()
    assert staging.done()


def test_an_error_of_overlapped_staging_releases_training(overlapping: Stager) -> None:
    """What cannot be copied is known at once, and nobody waits."""
    result = overlapping.stage({"lock": threading.Lock(), "a": torch.ones(3)})
    overlapping.hold_training()
    assert isinstance(result.staged_save.error, StagingError)
    assert StagingFuture(result).done()


def test_pickling_waits_for_the_copies(overlapping: Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    """In PROCESS mode the values leave with the pickle."""
    gate = Gate(monkeypatch)
    result = overlapping.stage({"a": torch.arange(3)})
    opening = in_thread(lambda: (gate.reached.wait(WAIT), gate.opened.set()))
    assert pickle.loads(pickle.dumps(result))["a"].tolist() == [0, 1, 2]
    opening.join(WAIT)


def test_dropping_the_future_frees_everything(overlapping: Stager) -> None:
    """A save that never starts costs its buffer only until the copies are complete."""
    before = len(memory_files())
    staging = StagingFuture(overlapping.stage({"a": torch.ones(10)}))
    overlapping.wait_released()
    del staging
    overlapping.wait_turn()
    overlapping._reclaim()
    overlapping.close()
    gc.collect()
    assert len(memory_files()) == before


@pytest.mark.parametrize("overlap", [False, True])
def test_a_state_on_a_device_is_staged_through_pinned_memory(overlap: bool) -> None:
    """(Simulated device.) The buffer is registered, holds what was queued before, and training's next step waits."""
    device = SimulatedDevice()
    stager = Stager(overlap=overlap, device=device)
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
    stager.close()
    assert device.pinned == []


def test_all_saves_use_one_stream() -> None:
    """(Simulated device.) What a stream has used on the device is used again by that stream only."""
    device = SimulatedDevice()
    stager = Stager(device=device)
    state = {"w": device.declare(torch.ones(1000))}
    for _ in range(3):
        stager.stage(state).staged_save.wait_copied()
    assert len(device.streams) == 1
    assert device.buffers == [GATHER_BYTES] * 3
    stager.close()


def test_a_buffer_is_unregistered_before_it_regrows() -> None:
    """(Simulated device.) One buffer is registered at any time, at its exact size."""
    device = SimulatedDevice()
    stager = Stager(device=device)
    sizes = []
    for count in (1000, 100_000, 10):
        result = stager.stage({"w": device.declare(torch.ones(count))})
        sizes.append([nbytes for _, nbytes in device.pinned])
        del result
    assert sizes == [[4096], [401_408], [401_408]]
    stager.close()
    assert device.pinned == []


def test_prewarming_registers_for_the_device_of_the_state() -> None:
    """(Simulated device.) The first save finds the buffer pinned."""
    device = SimulatedDevice()
    stager = Stager(device=device)
    state = {"w": device.declare(torch.ones(1000))}
    stager.prewarm(state)
    stager._settle_warming()
    assert [nbytes for _, nbytes in device.pinned] == [4096]
    stager.stage(state)
    assert len(device.pinned) == 1
    stager.close()


def test_staging_host_memory_starts_no_cuda(stager: Stager) -> None:
    """Nothing is registered for a state dict without tensors on a device."""
    device = SimulatedDevice()
    other = Stager(device=device)
    assert staged(other, {"a": torch.ones(3)})["a"].tolist() == [1.0] * 3
    assert (device.pinned, device.streams) == ([], [])
    other.close()


@pytest.mark.parametrize("able", [True, False])
def test_copies_that_another_process_makes_are_waited_for(able: bool) -> None:
    """(Simulated device.) Training is held until they are made, or are made here because they could not be."""
    device = SimulatedDevice()
    asked, made = threading.Event(), threading.Event()

    def elsewhere(buffer: SharedBuffer, copies: tensor_copy.Copies) -> bool:
        asked.set()
        assert made.wait(WAIT)
        if able:
            device.run()
            for twin, source in copies.on_device:
                assert buffer.locate(twin) is not None
                twin.copy_(source)
        return able

    stager = Stager(overlap=True, elsewhere=elsewhere, device=device)
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
    assert not changed.wait(SOON)
    made.set()
    assert changed.wait(WAIT)
    device.run()
    result.staged_save.wait_copied()
    assert (set(dict(result)["w"].tolist()), set(dict(result)["host"].tolist())) == ({1.0}, {1.0})
    assert device.pinned == []
    training.join(WAIT)
    del result
    stager.close()


def test_a_save_that_ends_without_writing_releases_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its future is done when its thread has ended, though nobody but the staged save refers to it any more."""
    stager = Stager(in_place=True, overlap=True)
    shared = torch.ones(10).share_memory_()
    told = threading.Event()
    staging = StagingFuture(stager.stage({"a": shared}))
    staging.add_done_callback(lambda future: told.set())
    end = threading.Event()

    def save(taken: Mapping[str, Any]) -> None:
        taken.items()
        assert end.wait(WAIT)

    taken = staging.result()
    saving = in_thread(lambda state=taken: save(state))  # type: ignore[misc]
    del staging, taken
    assert not told.wait(SOON)
    end.set()
    assert told.wait(WAIT)
    saving.join(WAIT)
    stager.close()


def test_tensors_that_are_others_than_a_moment_ago_are_an_error() -> None:
    """Too few, too many, or of other shapes and dtypes: never in the wrong places."""
    a, b = torch.zeros(2, 3), torch.zeros(4)
    for twins in ([a], [a, b, b], [b, a], [a, b.double()]):
        with pytest.raises(StagingError, match="other tensors"):
            stager_module._Snapshot({"a": a, "b": [b]}, twins, None, set()).twin(twins)
    assert stager_module._Snapshot({"a": a, "b": [b]}, [a, b], None, set()).twin([a, b])["b"][0] is b
