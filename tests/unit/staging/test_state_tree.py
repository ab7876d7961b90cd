"""Copies of state dicts: nothing is shared with the live state, or the error has the key."""

from __future__ import annotations

import collections
import enum
import io
import pickle
import threading
import types
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

from dcp_tensorizer import StagingError
from dcp_tensorizer._staging.stager import Stager
from dcp_tensorizer._staging.state_tree import TensorList, copy_structure, fill_tensors

from ...lab.states import ALL_DTYPES, dtype_name, filled, raw, same
from .staging import staged


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
def test_every_dtype_in_every_memory_layout_is_copied(stager: Stager, dtype: torch.dtype) -> None:
    """The copy has the bits and the shape, shares no memory, and does not change with the live tensor."""
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
    copied = staged(stager, state)
    base.view(torch.uint8).bitwise_xor_(1)
    pixels.bitwise_xor_(1)
    assert {key: (value.dtype, value.shape, raw(value)) for key, value in copied.items()} == expected
    assert all(value.is_contiguous() for value in copied.values())
    assert not {v.data_ptr() for v in copied.values() if v.numel()} & {v.data_ptr() for v in state.values()}


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=dtype_name)
def test_lazy_conjugation_and_negation_are_resolved(stager: Stager, dtype: torch.dtype) -> None:
    """The values of a lazily conjugated or negated view are stored, not its memory."""
    base = torch.arange(12, dtype=torch.float32).view(6, 2)
    values = torch.view_as_complex(base).to(dtype)
    conjugate, negative = values.conj(), values.conj().imag
    assert conjugate.is_conj()
    assert negative.is_neg()
    copied = staged(stager, {"conj": conjugate, "neg": negative, "both": conjugate[::2]})
    assert not any(value.is_conj() or value.is_neg() for value in copied.values())
    assert torch.view_as_real(copied["conj"].to(torch.complex64)).tolist() == [[a, -b] for a, b in base.tolist()]
    assert copied["neg"].tolist() == [-b for _, b in base.tolist()]
    assert copied["both"].tolist() == [complex(a, -b) for a, b in base.tolist()][::2]


def test_only_the_elements_of_a_view_are_copied(stager: Stager) -> None:
    """Two elements of a large storage take one page."""
    large = torch.arange(1 << 20)
    result = stager.stage({"view": large[1000:1002]})
    assert result.staged_save.buffer is not None
    assert result.staged_save.buffer.nbytes == 4096
    assert dict(result)["view"].tolist() == [1000, 1001]


def test_each_staged_tensor_has_a_storage_of_its_own(stager: Stager) -> None:
    """Pickling one tensor moves only its own bytes."""
    copied = staged(stager, {"a": torch.ones(3), "b": torch.ones(1000), "c": torch.ones(())})
    assert [copied[key].untyped_storage().nbytes() for key in "abc"] == [12, 4000, 4]
    assert [copied[key].storage_offset() for key in "abc"] == [0, 0, 0]


def test_parameters_and_results_of_training_become_plain_tensors(stager: Stager) -> None:
    """Staging copies nothing of autograd, and does not change the originals."""
    parameter = torch.nn.Parameter(torch.arange(3.0))
    result = parameter * 2
    copied = staged(stager, {"parameter": parameter, "result": result, "buffer": torch.nn.Buffer(torch.ones(2))})
    assert {key: type(value) for key, value in copied.items()} == dict.fromkeys(copied, torch.Tensor)
    assert not any(value.requires_grad for value in copied.values())
    assert copied["result"].tolist() == [0.0, 2.0, 4.0]
    assert parameter.requires_grad
    assert result.grad_fn is not None


def test_shared_tensors_and_tied_weights_are_copied(stager: Stager) -> None:
    """Tensors in shared memory are copied like others. Tied weights become two equal copies."""
    shared = torch.arange(4.0).share_memory_()
    copied = staged(stager, {"shared": shared, "tied": shared})
    shared.zero_()
    assert copied["shared"].tolist() == copied["tied"].tolist() == [0.0, 1.0, 2.0, 3.0]


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
    """Dicts, lists, tuples and their subclasses are rebuilt around the copies."""
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
    copied = staged(stager, state)
    tensor.zero_()
    members.append("later")
    stream.write(b"ZZZ")
    plain.value.append("later")
    expected = [0.0, 1.0, 2.0]
    assert copied["dict"]["inner"]["t"].tolist() == expected
    assert [copied["list"][0].tolist(), copied["list"][1][0].tolist(), len(copied["list"])] == [expected, expected, 2]
    assert (copied["tuple"][0].tolist(), copied["tuple"][1], type(copied["tuple"])) == (expected, 1, tuple)
    assert isinstance(copied["namedtuple"], Pair)
    assert (copied["namedtuple"].first.tolist(), copied["namedtuple"].second[0].tolist()) == (expected, expected)
    assert (type(copied["ordered"]), list(copied["ordered"])) == (collections.OrderedDict, ["z", "a"])
    assert (type(copied["default"]), copied["default"].default_factory) == (collections.defaultdict, list)
    assert copied["default"]["t"].tolist() == expected
    assert copied["counter"] == collections.Counter({"a": 2, "b": 1})
    assert copied["user"]["t"].tolist() == expected
    assert copied["proxy"]["t"].tolist() == expected
    assert copied["stream"].getvalue() == b"abc"
    assert (len(copied["plain"].value), copied["plain"].value[0].tolist()) == (1, expected)
    assert copied["enum"] is Colour.RED
    assert copied["level"] is Level.HIGH
    assert copied["set"] == {1, 2}
    assert copied["set"] is not state["set"]
    assert copied["empty"] == [{}, [], ()]
    assert copied["atoms"] == state["atoms"]
    assert copied["integer keys"][0].tolist() == expected
    assert list(copied) == list(state)


class Attributes(MutableMapping[str, Any]):
    """A mapping like those of configuration libraries: not a dict, with its contents in an attribute."""

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


def test_staging_does_not_change_the_live_state(stager: Stager) -> None:
    """A mapping that is not a dict keeps its own tensors, and its copy has others."""
    tensor = torch.arange(3.0)
    live = Attributes({"t": tensor, "n": {"t": tensor}})
    copied = staged(stager, {"mapping": live})
    assert live["t"] is tensor
    assert live["n"]["t"] is tensor
    tensor.zero_()
    assert copied["mapping"]["t"].tolist() == [0.0, 1.0, 2.0]
    assert copied["mapping"]["n"]["t"].tolist() == [0.0, 1.0, 2.0]
    assert type(copied["mapping"]) is Attributes


def test_mappings_other_than_dicts_keep_their_types(stager: Stager) -> None:
    """A mapping that cannot be pickled does not become a dict that can."""
    tensor = torch.arange(3.0)
    user = collections.UserDict({"t": tensor, "n": [collections.UserDict(x=1)]})
    copied = staged(stager, {"pair": (user, types.MappingProxyType({"t": tensor}))})
    tensor.zero_()
    kept, proxy = copied["pair"]
    assert (type(kept), type(kept["n"][0])) == (collections.UserDict, collections.UserDict)
    assert kept["t"].tolist() == proxy["t"].tolist() == [0.0, 1.0, 2.0]
    assert kept["n"][0] == {"x": 1}
    assert kept["n"][0] is not user["n"][0]
    with pytest.raises(TypeError, match="mappingproxy"):
        pickle.dumps(proxy)


def test_an_empty_state_dict_is_staged(stager: Stager) -> None:
    """A state dict without values is not an error."""
    assert staged(stager, {}) == {}


def test_staging_is_bit_exact_for_many_small_tensors(stager: Stager) -> None:
    """2,000 tensors of all dtypes lie in one buffer without overlap."""
    state = {f"layer.{n}": filled(ALL_DTYPES[n % len(ALL_DTYPES)], (n % 7, 3), seed=n) for n in range(2000)}
    copied = staged(stager, state)
    assert [key for key in state if not same(state[key], copied[key])] == []


class Unflattened(torch.Tensor):
    """A wrapper subclass that cannot be flattened."""

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
def test_a_value_that_cannot_be_copied_is_an_error(stager: Stager, make: Callable[[], Any], kind: str) -> None:
    """The error has the key and the kind, and the next staging works."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, on the making of some of these
        state = {"model": {"layers": [torch.ones(2), make()]}, "good": torch.ones(2)}
        result = stager.stage(state)
    assert dict(result) == {}
    assert isinstance(result.staged_save.error, StagingError)
    assert "'model.layers.1'" in str(result.staged_save.error)
    assert kind in str(result.staged_save.error)
    assert staged(stager, {"good": torch.ones(2)})["good"].tolist() == [1.0, 1.0]


def test_a_wrapper_subclass_is_rebuilt_around_copies(stager: Stager) -> None:
    """A subclass that can be flattened keeps its class, with copies of its inner tensors."""
    a, b = torch.arange(4.0), -torch.arange(4.0)
    copied = staged(stager, {"two": TwoTensor(a, b)})["two"]
    a.zero_()
    b.zero_()
    assert type(copied) is TwoTensor
    assert copied.a.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert copied.b.tolist() == [0.0, -1.0, -2.0, -3.0]


def test_wrappers_within_wrappers_are_copied(stager: Stager) -> None:
    """Flattening is recursive."""
    inner = torch.arange(2.0)
    copied = staged(stager, {"n": TwoTensor(TwoTensor(inner, inner), TwoTensor(inner, inner))})["n"]
    inner.zero_()
    assert [t.tolist() for t in (copied.a.a, copied.a.b, copied.b.a, copied.b.b)] == [[0.0, 1.0]] * 4


def test_an_inner_tensor_that_cannot_be_copied_is_an_error(stager: Stager) -> None:
    """The error has the key of the wrapper."""
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
    """Sharded, replicated and 0-dim DTensors and parameters keep mesh and placements, and get new local tensors."""
    mesh = init_device_mesh("cpu", (1,))
    locals_ = {"sharded": torch.arange(6.0).view(3, 2), "replicated": torch.arange(3.0), "scalar": torch.tensor(7.0)}
    state: dict[str, Any] = {
        "sharded": DTensor.from_local(locals_["sharded"], mesh, [Shard(0)]),
        "replicated": DTensor.from_local(locals_["replicated"], mesh, [Replicate()]),
        "scalar": DTensor.from_local(locals_["scalar"], mesh, [Replicate()]),
    }
    state["parameter"] = torch.nn.Parameter(state["sharded"])
    copied = staged(stager, state)
    for local in locals_.values():
        local.fill_(-1)
    assert all(isinstance(value, DTensor) for value in copied.values())
    assert copied["sharded"].placements == (Shard(0),)
    assert copied["sharded"].device_mesh is mesh
    assert {key: value.to_local().tolist() for key, value in copied.items()} == {
        "sharded": [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]],
        "replicated": [0.0, 1.0, 2.0],
        "scalar": 7.0,
        "parameter": [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]],
    }


@pytest.mark.usefixtures("group")
def test_a_dtensor_is_what_torch_would_rebuild(stager: Stager) -> None:
    """Layout, strides and the gradient flag equal those of torch's own rebuilding."""
    local = torch.arange(6.0).view(2, 3).t().requires_grad_()
    tensor = DTensor.from_local(local, init_device_mesh("cpu", (1,)), [Shard(1)])
    copied = staged(stager, {"w": tensor})["w"]
    names, context = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}
    rebuilt = DTensor.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    assert (copied._spec, copied.stride()) == (rebuilt._spec, rebuilt.stride())
    assert (copied.requires_grad, copied.dtype) == (rebuilt.requires_grad, rebuilt.dtype)
    assert copied.to_local().tolist() == tensor.to_local().tolist()


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_sharded_tensors_are_copied(stager: Stager) -> None:
    """ShardedTensors of FSDP1 keep their class, with new shards on the CPU."""
    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu"])  # type: ignore[list-item]
    tensor = sharded_tensor.full(spec, (4, 2), 3.0)
    copied = staged(stager, {"sharded": tensor})["sharded"]
    tensor.local_shards()[0].tensor.zero_()
    assert type(copied) is sharded_tensor.ShardedTensor
    assert [shard.tensor.tolist() for shard in copied.local_shards()] == [[[3.0, 3.0]] * 4]
    assert copied.local_shards()[0].metadata.shard_offsets == [0, 0]
    assert copied.size() == torch.Size([4, 2])


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_sharded_tensors_that_other_ranks_write_are_copied(stager: Stager) -> None:
    """torch cannot build a ShardedTensor from shards without memory."""
    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu"])  # type: ignore[list-item]
    result = stager.stage({"sharded": sharded_tensor.full(spec, (4, 2), 3.0)}, frozenset({"sharded"}))
    assert result.staged_save.error is None
    assert [shard.tensor.tolist() for shard in result["sharded"].local_shards()] == [[[3.0, 3.0]] * 4]


def test_a_tensor_in_an_object_is_staged(stager: Stager) -> None:
    """Members of a tuple have no keys of their own, so no other rank writes them."""
    state = {"a": (torch.ones(2), 1), "a.0": torch.ones(3), "b": torch.ones(4)}
    for reordered in (state, dict(reversed(state.items()))):
        result = stager.stage(reordered, frozenset({"a.0", "b"}))
        assert result["a"][0].tolist() == [1.0, 1.0]
        assert result["b"].is_meta


def test_tensors_that_change_during_staging_are_an_error() -> None:
    """Fewer tensors, more tensors, and other shapes or dtypes are refused."""
    a, b = torch.zeros(2, 3), torch.zeros(4)
    for tensors in ([a], [a, b, b], [b, a], [a, b.double()]):
        with pytest.raises(StagingError, match="different tensors"):
            fill_tensors({"a": a, "b": [b]}, tensors, tensors)
    copies = [a.clone(), b.clone()]
    for listed in ([a, b], [a.clone(), b.clone()]):
        assert fill_tensors({"a": a, "b": [b]}, listed, copies)["b"][0] is copies[1]


def test_tensors_are_listed_in_the_order_in_which_they_are_filled_in() -> None:
    """The order includes tensors inside wrappers and containers."""
    a, b, c = torch.zeros(1), torch.ones(2), torch.ones(2)
    listed = TensorList()
    structure = copy_structure({"a": [a], "w": (TwoTensor(b, c), 3)}, "key", listed)
    assert [t.data_ptr() for t in listed] == [a.data_ptr(), b.data_ptr(), c.data_ptr()]
    filled_in = fill_tensors(structure, listed, [t.clone() + 5 for t in listed])
    assert filled_in["a"][0].tolist() == [5.0]
    assert (filled_in["w"][0].a.tolist(), filled_in["w"][1]) == ([6.0, 6.0], 3)


class Named(list):
    """A list whose constructor takes a name instead of members."""

    def __init__(self, name: str, notes: list[str]) -> None:
        super().__init__()
        self.name, self.notes = name, notes


class Pinned(tuple):
    """A tuple with a constructor of its own."""

    def __new__(cls, *, first: object, second: object) -> Pinned:
        return super().__new__(cls, (first, second))


class WrittenOnce(dict):
    """A dict that accepts each key once."""

    def __setitem__(self, key: object, value: object) -> None:
        raise RuntimeError("it is written once")


class Doubling(list):
    """A list that changes its new members."""

    def __setitem__(self, where: object, members: object) -> None:
        super().__setitem__(where, [*members, *members])  # type: ignore[index, misc]


def test_containers_are_copied_by_their_own_protocol(stager: Stager) -> None:
    """Members and attributes are copied without a call of the constructor."""
    listed, pinned = Named("weights", ["a"]), Pinned(first=torch.ones(2), second=[3])
    listed += [torch.zeros(2), 7]
    pinned.note = ["b"]  # type: ignore[attr-defined]
    copied = dict(stager.stage({"listed": listed, "pinned": pinned}))
    listed[0] += 5
    listed.append(8)
    listed.notes.append("later")
    pinned[0].add_(5)
    pinned[1].append(4)
    pinned.note.append("later")  # type: ignore[attr-defined]
    assert (type(copied["listed"]), type(copied["pinned"])) == (Named, Pinned)
    assert (copied["listed"][0].tolist(), copied["listed"][1:]) == ([0.0, 0.0], [7])
    assert (copied["listed"].name, copied["listed"].notes) == ("weights", ["a"])
    assert (copied["pinned"][0].tolist(), copied["pinned"][1], copied["pinned"].note) == ([1.0, 1.0], [3], ["b"])


@pytest.mark.parametrize("kind", [WrittenOnce, Doubling])
def test_containers_that_do_not_take_their_members_are_an_error(stager: Stager, kind: type) -> None:
    """The error has the key."""
    container = kind({"x": 1}) if issubclass(kind, dict) else kind([1, 2])
    staged = stager.stage({"model": {"odd": container}})
    assert staged.staged_save.error is not None
    assert "'model.odd'" in str(staged.staged_save.error)
    assert kind.__name__ in str(staged.staged_save.error)


def test_a_container_that_contains_itself_is_an_error() -> None:
    """The error shows the beginning of its key, which has as many parts as the interpreter allows calls."""
    value: list[Any] = [1]
    value.append((value,))
    with pytest.raises(
        StagingError, match=r"^'optimizer\.rates\.1\.0\.1[.01]{0,50}'\.\.\. contains itself, or is nested too deeply"
    ):
        copy_structure(value, "optimizer.rates", TensorList())


def test_the_result_of_a_collective_is_a_plain_tensor(stager: Stager) -> None:
    """Staging waits for the result, as torch's stager does."""
    copied = staged(stager, {"sum": AsyncCollectiveTensor(torch.arange(6.0))})
    assert type(copied["sum"]) is torch.Tensor
    assert copied["sum"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
