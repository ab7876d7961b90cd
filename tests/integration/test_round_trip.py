"""State dicts of every kind survive a save and a load bit for bit, or fail with an error that names the key."""

import io
from collections import OrderedDict, namedtuple
from contextlib import suppress

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from dcp_tensorizer import SaveLimits, TensorizerStorageReader, TensorizerStorageWriter

from ..lab.saved_objects import STANDARD
from ..lab.saved_objects import same as same_object
from ..lab.states import ALL_DTYPES, assert_same, dtype_name, filled

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
Pair = namedtuple("Pair", "first second")


def numbers(*shape, dtype=torch.float32, seed=1):
    return filled(dtype, shape, seed)


def complexes():
    return torch.randn(4, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))


def tied():
    weight = numbers(3, 2)
    return {"one": weight, "other": weight, "part": weight[1:]}


ZOO = {
    **{dtype_name(dtype): lambda dtype=dtype: numbers(3, 5, dtype=dtype) for dtype in ALL_DTYPES},
    **{f"{dtype_name(dtype)}, no elements": lambda dtype=dtype: torch.empty(0, 3, dtype=dtype) for dtype in ALL_DTYPES},
    **{f"{dtype_name(dtype)}, 0-dim": lambda dtype=dtype: numbers(1, dtype=dtype)[0] for dtype in ALL_DTYPES},
    "conj": lambda: complexes().conj(),
    "imaginary part of a conj": lambda: complexes().conj().imag,
    "transposed": lambda: numbers(4, 6).t(),
    "expanded": lambda: numbers(1, 3).expand(5, 3),
    "channels last": lambda: numbers(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "a view of a huge storage": lambda: numbers(1 << 20)[7:9],
    "packed int4": lambda: numbers(8, 4, dtype=torch.int32),
    "tied": tied,
    "requires grad": lambda: torch.nn.Parameter(numbers(3, 3)),
    "in shared memory": lambda: numbers(5).share_memory_(),
    "tuple of tensors": lambda: (numbers(2), numbers(3, seed=2)),
    "namedtuple of tensors": lambda: Pair(numbers(2), numbers(3, seed=2)),
    "list in a tuple": lambda: ([numbers(2), 5], "x"),
    "BytesIO": lambda: io.BytesIO(b"bytes"),
    "plain values": lambda: {"none": None, "int": 3, "float": 0.1, "str": "é", "bool": True, "bytes": b"\0"},
    "ordered": lambda: OrderedDict(b=numbers(2), a=numbers(3)),
    "empty name": lambda: {"": numbers(2), "x": numbers(3)},
    "NUL in a name": lambda: {"a\0b": numbers(2)},
    "slashes": lambda: {"a/b": numbers(2), "/": numbers(3), "../c": numbers(4)},
    "emoji": lambda: {"\N{GRINNING FACE}": numbers(2)},
    "70,000 characters": lambda: {"n" * 70_000: numbers(2), "n" * 70_001: numbers(3)},
    "a surrogate": lambda: {"\ud800": numbers(2)},
    "names that differ in their form": lambda: {"\xe9": numbers(2), "e\u0301": numbers(3)},
}


@pytest.fixture(scope="module")
def writer():
    with TensorizerStorageWriter(limits=SaveLimits(max_consecutive_failures=None)) as writer:
        yield writer


def round_trip(state, writer, folder):
    """Saves a state, loads it into a blank one, and returns that."""
    dcp.async_save(state, checkpoint_id=folder, storage_writer=writer).result()
    loaded = blank(state)
    with torch.serialization.safe_globals([Pair]):
        dcp.load(loaded, storage_reader=TensorizerStorageReader(folder))
    return loaded


def blank(value):
    """The same structure, with zeros for elements."""
    if isinstance(value, torch.Tensor):
        return filled(value.dtype, tuple(value.shape), seed=1000)
    if isinstance(value, dict):
        return type(value)((name, blank(item)) for name, item in value.items())
    if isinstance(value, list | tuple):
        members = [blank(item) for item in value]
        return type(value)(*members) if hasattr(value, "_fields") else type(value)(members)
    return None if value is None else type(value)()


@pytest.mark.parametrize("kind", ZOO)
def test_everything_survives(writer, tmp_path, kind):
    """Bit for bit, under its own name, beside another tensor."""
    state = {"odd": ZOO[kind](), "plain": numbers(7)}
    assert_same(round_trip(state, writer, tmp_path), state)


def stock(folder, **options):
    """The shapes and dtypes of what tensorizer itself finds in the data files of a checkpoint."""
    found = {}
    for path in folder.glob("*.tensors"):
        with TensorDeserializer(path, device="cpu", **options) as file:
            found |= {str(key): (tuple(file[key].shape), file[key].dtype) for key in file}
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"sha256": True}, {"reuse_unchanged": True}, {"encryption": EncryptionParams.random()}],
    ids=lambda options: next(iter(options), "plain"),
)
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_tensors_without_elements_are_in_the_files(tmp_path, options, is_async):
    """As tensorizer writes them: not where it is encrypted, or cannot read the file then. A load needs none of them."""
    empty = {dtype_name(dtype): torch.empty(0, 3, dtype=dtype) for dtype in ALL_DTYPES}
    state = empty | {"of no rows": torch.empty(4, 0), "first": numbers(70_000), "scalar": numbers(1)[0]}
    alone = dict(list(empty.items())[:3])
    with TensorizerStorageWriter(**options) as writer:
        for name, content in ("a", state), ("b", state), ("alone", alone):
            if is_async:
                dcp.async_save(content, checkpoint_id=tmp_path / name, storage_writer=writer).result()
            else:
                dcp.save(content, checkpoint_id=tmp_path / name, storage_writer=writer)
    key = options.get("encryption")
    decryption = {} if key is None else {"encryption": DecryptionParams.from_key(key.key)}
    readable = {}
    if key is None:
        for name, tensor in empty.items():
            with suppress(TypeError):
                tensor.numpy()
                readable[name] = tensor
        assert {"float32", "uint64", "bool", "complex128"} <= readable.keys()
    expected = readable | {key: tensor for key, tensor in state.items() if tensor.numel() or "rows" in key}
    if key is not None:
        del expected["of no rows"]
    for name in "ab":
        for how in {"verify_hash": True}, {"lazy_load": True, "verify_hash": True}, {"num_readers": 2}:
            found = stock(tmp_path / name, **decryption, **how)
            assert found == {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in expected.items()}
        loaded = blank(state)
        reader = TensorizerStorageReader(
            tmp_path / name, **({} if key is None else {"encryption": decryption["encryption"]})
        )
        dcp.load(loaded, storage_reader=reader)
        assert_same(loaded, state)
    assert [path.name for path in (tmp_path / "alone").iterdir()] == [".metadata"]


def test_names_that_dcp_makes_one_of(writer, tmp_path):
    """`"a.b"` beside `{"a": {"b"}}` have one name in DCP: an error that gives it, and no checkpoint."""
    with pytest.raises(CheckpointException, match=r"a\.b"):
        round_trip({"a.b": numbers(2), "a": {"b": numbers(3)}}, writer, tmp_path)
    assert not (tmp_path / ".metadata").exists()


def test_what_dcp_loses(writer, tmp_path):
    """As the README says: empty containers vanish, and scalars under integer keys come back under strings."""
    state = {"empty": {}, "nothing": [], "numbered": {1: 5, 2: numbers(2)}, "w": numbers(3)}
    dcp.async_save(state, checkpoint_id=tmp_path, storage_writer=writer).result()
    loaded = {"numbered": {1: 0, 2: torch.zeros(2)}, "w": torch.zeros(3)}
    dcp.load(loaded, storage_reader=TensorizerStorageReader(tmp_path))
    assert_same(loaded["w"], state["w"])
    assert_same(loaded["numbered"][2], state["numbered"][2])
    assert {loaded["numbered"].get(1), loaded["numbered"].get("1")} >= {5}


# --- generated states ------------------------------------------------------------------------------------------------

names = st.text(st.characters(codec="utf-8", exclude_characters="."), min_size=1, max_size=8)
shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@st.composite
def tensors(draw):
    """A tensor of any dtype and shape, as it is or as a view of another."""
    tensor = filled(draw(st.sampled_from(ALL_DTYPES)), draw(shapes), draw(st.integers(0, 99)))
    view = draw(st.sampled_from(["whole", "transposed", "stepped", "expanded"]))
    if tensor.ndim and view == "transposed":
        tensor = tensor.transpose(0, -1)
    elif tensor.ndim and tensor.shape[0] and view == "stepped":
        tensor = tensor[::2]
    elif view == "expanded":
        tensor = tensor.expand(2, *tensor.shape)
    return tensor


leaves = tensors() | st.none() | st.integers() | st.text(max_size=5) | st.booleans() | st.floats(allow_nan=False)
states = st.recursive(
    leaves,
    lambda inner: st.dictionaries(names, inner, min_size=1, max_size=4) | st.lists(inner, min_size=1, max_size=3),
    max_leaves=12,
)


@settings(max_examples=40)
@given(state=st.dictionaries(names, states, min_size=1, max_size=4))
def test_generated_states_survive(writer, tmp_path_factory, state):
    """Any nesting, dtypes, shapes and strides, one after the other through one writer and its buffer."""
    assert_same(round_trip(state, writer, tmp_path_factory.mktemp("generated")), state)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_default_device_of_the_trainer_does_not_matter(tmp_path, device):
    """Staging, scratch memory and objects are in host memory, whatever ``torch.set_default_device`` says."""
    state = {"w": torch.arange(6.0).view(2, 3), "empty": torch.zeros(0, 4), "step": torch.tensor(7), "text": "a"}
    loaded = {"w": torch.zeros(3, 2).t(), "empty": torch.zeros(0, 4), "step": torch.tensor(0), "text": ""}
    with torch.device(device), TensorizerStorageWriter(tmp_path) as writer:
        dcp.async_save(state, storage_writer=writer).result()
        dcp.load(loaded, storage_reader=TensorizerStorageReader(tmp_path))
    assert torch.equal(loaded["w"], state["w"])
    assert (loaded["empty"].shape, loaded["step"].item(), loaded["text"]) == ((0, 4), 7, "a")


@pytest.mark.parametrize(
    "save", [dcp.save, lambda *args, **kw: dcp.async_save(*args, **kw).result()], ids=["sync", "async"]
)
def test_data_of_standard_types_loads_as_torch_loads_it(writer, tmp_path, save):
    """Streams, arrays, dates, paths, random states: nothing needs to be allowed, and each value is torch's own."""
    state = {name: (value,) for name, value in STANDARD.items() if name != "with_tensors"}
    save(state, checkpoint_id=tmp_path / "ours", storage_writer=writer)
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "torch"))
    loaded, expected = dict.fromkeys(state), dict.fromkeys(state)
    dcp.load(loaded, storage_reader=TensorizerStorageReader(tmp_path / "ours"))
    dcp.load(expected, storage_reader=FileSystemReader(tmp_path / "torch"))
    assert [name for name in state if not same_object(loaded[name], expected[name])] == []


class TrainState:
    """As torchtitan's: a Stateful whose lists are streams, which `torch.load` reads."""

    def __init__(self):
        self.step, self.losses = 0, []

    def state_dict(self):
        losses = io.BytesIO()
        torch.save(self.losses, losses)
        return {"step": torch.tensor(self.step), "losses": losses}

    def load_state_dict(self, state):
        self.step = int(state["step"])
        state["losses"].seek(0)
        self.losses = torch.load(state["losses"])


def test_a_stateful_that_gives_streams(writer, tmp_path):
    """Its streams come back where they were, and it reads them."""
    trained, resumed = TrainState(), TrainState()
    trained.step, trained.losses = 7, [0.5, 0.25]
    dcp.async_save({"train": trained}, checkpoint_id=tmp_path, storage_writer=writer).result()
    dcp.load({"train": resumed}, storage_reader=TensorizerStorageReader(tmp_path))
    assert (resumed.step, resumed.losses) == (7, [0.5, 0.25])


def test_a_tensor_that_dcp_takes_apart(writer, tmp_path):
    """By `async_save` as by `dcp.save`, every shard comes back as it was then."""

    def wrapped(*values):
        shards = [torch.full((2, 3), value) for value in values]
        return {"w": LocalShardsWrapper(shards, [(0, 3 * number) for number in range(len(shards))])}

    state = wrapped(1.0, 2.0)
    dcp.save(state, checkpoint_id=tmp_path / "sync", storage_writer=writer)
    future = dcp.async_save(state, checkpoint_id=tmp_path / "async", storage_writer=writer)
    for shard in state["w"].local_shards():
        shard.zero_()
    future.result()
    for name in ("sync", "async"):
        loaded = wrapped(0.0, 0.0)
        dcp.load(loaded, storage_reader=TensorizerStorageReader(tmp_path / name))
        assert [shard.unique().tolist() for shard in loaded["w"].local_shards()] == [[1.0], [2.0]]
