"""Tests of the entries of an index: made of rules, and reused if neither the rules nor the locations change."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_tensorizer._index import entries
from dcp_tensorizer._index.entries import StateRules, entries_section, values_of
from dcp_tensorizer._index.locations import RankLocations
from dcp_tensorizer._index.schema import (
    Entries,
    Layout,
    ObjectEntry,
    Properties,
    Run,
    Section,
    TensorEntry,
    decode_entries,
)
from dcp_tensorizer._runtime.recent import Recent
from dcp_tensorizer._tensor_file.names import StoredItem
from dcp_tensorizer.errors import WriteError

RANKS, KEYS = 16, 5


def entry(rows: int = 2, dtype: torch.dtype = torch.float32, sizes: int = 3) -> TensorStorageMetadata:
    """Describes a tensor that is sharded over all ranks, with its own list of chunks."""
    chunks = [ChunkStorageMetadata(torch.Size([rows * r, 0]), torch.Size([rows, sizes])) for r in range(RANKS)]
    return TensorStorageMetadata(TensorProperties(dtype), torch.Size([rows * RANKS, sizes]), chunks)


def described() -> dict[str, object]:
    """Describes tensors of one shape, and an object."""
    return {**{f"w{n}": entry() for n in range(KEYS)}, "o": BytesStorageMetadata()}


def parts(save: str = "a", digest: bytes = b"12345678", last: int = RANKS) -> list[RankLocations]:
    """Returns the ranks' reports of what they wrote."""
    written = []
    for rank in range(last):
        file = f"__{rank}_0_{save * 32}.tensors"
        stored = StoredItem(file, "w", 0, 24, "float32", "tensor", digest)
        items = {(f"w{n}", (2 * rank, 0)): stored._replace(name=f"w{n}") for n in range(KEYS)}
        written.append(RankLocations.of(rank, items, {file: 1 << 20}))
    return written


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Returns the number of chunks in each call of `hashes_of`."""
    counts: list[int] = []
    original = entries.hashes_of

    def counting(key: bytes, offsets: list[bytes]) -> list[int]:
        found = original(key, offsets)
        counts.append(len(found))
        return found

    monkeypatch.setattr(entries, "hashes_of", counting)
    return counts


def test_a_repeat_looks_for_no_chunk(hashed: list[int]) -> None:
    """New digests and file names leave the entries equal, and the cached section is returned."""
    recent: Recent[bytes] = Recent(4)
    rules = StateRules.of(described())
    section = entries_section(rules, parts(), recent)
    assert sum(hashed) == KEYS * RANKS + 1
    assert entries_section(StateRules.of(described()), parts("b", b"87654321"), recent) is section
    assert sum(hashed) == KEYS * RANKS + 1


@pytest.mark.parametrize("change", ["properties", "layout", "keys", "order", "places"])
def test_what_changed_is_made_anew(change: str) -> None:
    """The section equals that of a writer without a cache."""
    recent: Recent[bytes] = Recent(4)
    before = entries_section(StateRules.of(described()), parts(), recent)
    changed, written = described(), parts()
    if change == "properties":
        changed["w1"] = entry(dtype=torch.int32)
    elif change == "layout":
        changed["w1"] = entry(rows=4)
    elif change == "keys":
        changed["more"] = entry()
    elif change == "order":
        changed = dict(reversed(changed.items()))
    else:
        written = parts(last=RANKS - 1)
    after = entries_section(StateRules.of(changed), written, recent)
    assert after != before
    assert after == entries_section(StateRules.of(changed), written)


def test_several_state_dicts_are_remembered(hashed: list[int]) -> None:
    """A job may save its model and its optimizer alternately."""
    recent: Recent[bytes] = Recent(4)
    states = [{"w0": entry()}, {"w1": entry()}, {"w2": entry()}]
    first = [entries_section(StateRules.of(state), parts(), recent) for state in states]
    count = len(hashed)
    assert [entries_section(StateRules.of(state), parts("b"), recent) for state in states] == first
    assert len(hashed) == count


def test_tensors_of_one_shape_share_a_layout() -> None:
    """Tensors with separate but equal chunk lists share a layout, and equal properties too."""
    rules = StateRules.of(described())
    assert (len(rules.layouts), len(rules.properties)) == (1, 1)
    assert rules.rows.tolist() == [[0, 0]] * KEYS + [[-1, -1]]
    assert len(decode_entries(entries_section(rules, parts())).layouts) == 1


def test_entries_come_back_from_rules() -> None:
    """Each call returns new entries, with lists and properties that are not shared."""
    state = {**described(), "none": TensorStorageMetadata(TensorProperties(torch.int8), torch.Size([3]), [])}
    rules = StateRules.of(state)
    first = rules.described()
    assert first == state
    assert list(first) == list(state)
    first["w0"].chunks.clear()
    first["w0"].properties.requires_grad = True
    assert rules.described() == state


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (entry(sizes=-1), "chunk offsets and sizes must not be negative"),
        (
            TensorStorageMetadata(TensorProperties(torch.int8), torch.Size([3]), entry().chunks[:1]),
            "does not have as many dimensions as its tensor",
        ),
        ("a string", "the planner's metadata has a builtins.str for it"),
    ],
)
def test_what_makes_no_sense_is_named(wrong: object, problem: str) -> None:
    """The error names the key."""
    with pytest.raises(WriteError, match=f"'key' cannot be described in a checkpoint's metadata: .*{problem}"):
        StateRules.of({"key": wrong})


def section_of(nbytes: int) -> Section:
    """Returns a section of locations with this many bytes."""
    return Section("places", 0, 0, nbytes, b"", None, [])


def chunked(count: int, tensors: int, *, layouts: int = 1, dims: int = 1, owner: int = 0) -> Entries:
    """Returns the entries of tensors that share layouts of ``count`` chunks, in a few runs."""
    offsets: list[list[Run]] = [[(0, 1, count)]] * dims
    rows = [Layout((count,) * dims, count, offsets, [[(1, 0, count)]] * dims)] * layouts
    properties = Properties("float32", "strided", False, "contiguous_format", False)
    keys = [TensorEntry(f"k{n}", 0, 0, 0, False) for n in range(tensors)]
    return Entries([properties], rows, [[(owner, 0, count)]], [*keys, ObjectEntry("o", -1)])


@pytest.mark.parametrize(
    "rows",
    [
        chunked(8_000_000, 1),
        chunked(100_000, 300),
        chunked(300_000, 1, owner=-1),
        chunked(300_000, 0, layouts=2),
        chunked(2_100, 1, dims=255),
        chunked(600_000, 1, dims=0),
    ],
    ids=["one tensor", "many tensors", "not stored", "no tensor", "many dimensions", "no dimensions"],
)
def test_a_few_bytes_do_not_describe_millions_of_chunks(rows: Entries, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries with more chunks than locations are refused before a run is expanded, whatever they share."""
    monkeypatch.setattr(entries, "expand", lambda runs: pytest.fail("a run was expanded"))
    monkeypatch.setattr(entries.ChunkLayout, "from_row", lambda row: pytest.fail("a layout was expanded"))
    with pytest.raises(ValueError, match=r"takes [\d,]+ numbers, and 100 bytes of locations allow 1,048,676"):
        values_of(rows, [section_of(60), section_of(40)])


def test_chunks_with_locations_are_read_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The locations of chunks with up to 16 dimensions have as many bytes as the chunks have numbers."""
    monkeypatch.setattr(entries, "SPARE_NUMBERS", 0)
    for dims in (0, 1, 16):
        grid = [*itertools.product(range(2), repeat=min(dims, 5))]
        chunks = [tuple(corner) + (0,) * (dims - len(corner)) for corner in grid]
        size = torch.Size([2] * min(dims, 5) + [1] * (dims - min(dims, 5)))
        one = torch.Size([1] * dims)
        described = TensorStorageMetadata(
            TensorProperties(torch.int8), size, [ChunkStorageMetadata(torch.Size(at), one) for at in chunks]
        )
        stored = StoredItem("", "", 0, 0, "int8", "tensor", b"")
        written = [RankLocations.of(rank, {("w", at): stored}, {}) for rank, at in enumerate(chunks)]
        section = decode_entries(entries_section(StateRules.of({"w": described}), written))
        value = values_of(section, [section_of(len(part.section)) for part in written])["w"]
        assert isinstance(value, entries.TensorValue)
        assert [(region.start, region.size) for region in value.layout.regions] == [(at, (1,) * dims) for at in chunks]
        assert value.owners.tolist() == list(range(len(chunks)))


def test_what_no_reader_would_read_is_not_written() -> None:
    """A planner that describes a few hundred thousand chunks more than the ranks save gets an error."""
    offsets = torch.arange(300_000).tolist()
    chunks = [ChunkStorageMetadata(torch.Size([offset]), torch.Size([1])) for offset in offsets]
    state = {"w": TensorStorageMetadata(TensorProperties(torch.int8), torch.Size([len(chunks)]), chunks)}
    with pytest.raises(
        WriteError, match=r"no reader would load this checkpoint: .* describing the chunks takes 1,200,000 numbers,"
    ):
        entries_section(StateRules.of(state), parts())
