"""The distribution of tensors over files, and their names in the files."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from tensorizer import TensorDeserializer

from dcp_tensorizer._saving.write_plan import plan_files, stored_names
from dcp_tensorizer._tensor_file.dtypes import host_bytes
from dcp_tensorizer._tensor_file.encode import encode
from dcp_tensorizer._tensor_file.layout import lay_out
from dcp_tensorizer._tensor_file.names import INDEX_CAPACITY, index_entry_size, is_data_file_name
from dcp_tensorizer._writer_process.protocol import TensorSource

from ...lab.seams import BufferSink
from ...lab.states import filled, same

SAVE = "0" * 32

any_text = st.text(st.characters(codec=None), max_size=8)


@given(st.lists(any_text | st.sampled_from(["", "\0", "\x1ea", "__item_0__", "__item_1__", "__item_1___", "a"])))
def test_stored_names_are_unique_and_storable(keys: list[str]) -> None:
    """For any keys, each item has a unique name that tensorizer can store."""
    names = stored_names(keys)
    assert len(names) == len(keys)
    assert len(set(names)) == len(names)
    assert all(0 < len(name.encode()) <= 1100 and not name.startswith("\x1e") for name in names)


def test_ordinary_keys_are_stored_under_their_own_names() -> None:
    """Ordinary keys are the names, so stock tensorizer finds a model's tensors by the keys of its state dict."""
    keys = ["model.layers.0.weight", "a/b", "\N{SNOWMAN}", "nul\0", "x" * 1024]
    assert stored_names(keys) == keys


def test_keys_that_tensorizer_cannot_hold_get_short_names() -> None:
    """Keys that are empty, too long, not encodable, repeated or marked as JSON paths are stored under a number."""
    keys = ["", "x" * 1025, "\ud800", "\x1epath", "a", "a"]
    assert stored_names(keys) == ["__item_0__", "__item_1__", "__item_2__", "__item_3__", "a", "__item_5__"]


def source(name: str, *, ndim: int = 1, dtype: str = "uint8") -> TensorSource:
    return TensorSource(name, dtype, (1,) * ndim, getattr(torch, dtype).itemsize)


@given(st.lists(st.tuples(st.integers(1, 1024), st.integers(0, 60)), max_size=80), st.integers(0, 99_999))
def test_files_hold_all_sources_in_order_and_no_index_overflows(sizes: list[tuple[int, int]], rank: int) -> None:
    """Files hold all sources in order, and another file begins exactly when the index of a file is full."""
    sources = [source("n" * length, ndim=ndim) for length, ndim in sizes]
    files = plan_files(sources, rank, SAVE, index_capacity=4096)
    assert [s for file in files for s in file.tensors] == sources
    assert [file.name for file in files] == [f"__{rank}_{n}_{SAVE}.tensors" for n in range(len(files))]
    used = [[index_entry_size(s.name, len(s.shape)) for s in file.tensors] for file in files]
    assert all(sum(entries) <= 4096 for entries in used)
    assert all(sum(a) + b[0] > 4096 for a, b in itertools.pairwise(used))


def test_3000_tensors_with_long_names_fit_their_files(tmp_path: Path) -> None:
    """Stock tensorizer opens each of the files."""
    dtypes = ["uint8", "float8_e4m3fnuz", "bfloat16", "complex64"]
    sources = [source(f"{n:0180}", ndim=n % 4, dtype=dtypes[n % 4]) for n in range(3000)]
    files = plan_files(sources, 0, SAVE)
    assert len(files) == 4
    assert all(is_data_file_name(file.name) for file in files)
    file = max(files, key=lambda file: len(file.tensors))
    tensors = [(s.name, filled(getattr(torch, s.dtype), s.shape, seed=n)) for n, s in enumerate(file.tensors)]
    layout = lay_out(file.tensors)
    sink = BufferSink()
    by_name = dict(tensors)
    encode(layout, lambda source: host_bytes(by_name[source.name]), sink, threads=1)
    path = tmp_path / "full.tensors"
    path.write_bytes(sink.content)
    with TensorDeserializer(path, device="cpu", verify_hash=True) as loaded:
        assert all(same(loaded[name], tensor) for name, tensor in tensors)
        assert len(loaded) == len(tensors)


def test_a_file_holds_no_more_bytes_than_it_should() -> None:
    """A tensor that would exceed the limit begins another file, and a tensor above the limit has a separate file."""
    sizes = [4, 4, 2, 100, 1, 9, 1]
    sources = [TensorSource(str(n), "uint8", (size,), size) for n, size in enumerate(sizes)]
    files = plan_files(sources, 0, SAVE, 10)
    assert [[source.nbytes for source in file.tensors] for file in files] == [[4, 4, 2], [100], [1, 9], [1]]


def test_nothing_to_write_is_no_file() -> None:
    """A rank without data plans no file."""
    assert plan_files([], 0, SAVE) == ()
    assert INDEX_CAPACITY == 256 * 1024
