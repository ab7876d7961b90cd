"""Tests of the checks before a load changes any target: errors name what is wrong, and whole checkpoints pass."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan

from dcp_tensorizer import MetadataError, NotCommitted, ReadError
from dcp_tensorizer._formats.catalog import check_chunks, check_coverage, check_length
from dcp_tensorizer._formats.own import check_world_size
from dcp_tensorizer._formats.recognise import not_committed
from dcp_tensorizer._index.layouts import ChunkLayout
from dcp_tensorizer._loading.deliver import check_own_parts
from dcp_tensorizer._loading.run import check_files
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._tensor_file.regions import Region

from ...lab.seams import stored_item as make_item


def entry(size: tuple[int, ...], *chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> TensorStorageMetadata:
    """Returns the entry of a tensor in chunks, given as pairs of offsets and sizes."""
    made = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks]
    return TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(size), made)


def metadata_of(items: Iterable[Any] = (), files: Iterable[Any] = (), **entries: Any) -> Metadata:
    return Metadata(entries, storage_data={"items": dict(items), "files": dict(files)})


def plan_of(**lengths: tuple[int, ...]) -> LoadPlan:
    """Returns a plan that reads a region of the given size for each key."""
    items = [
        SimpleNamespace(dest_index=MetadataIndex(key), dest_offsets=torch.Size((0,) * len(size)), lengths=size)
        for key, size in lengths.items()
    ]
    return LoadPlan(items)  # type: ignore[arg-type]


def test_no_checkpoint_is_said_with_its_path_and_what_may_be_the_cause() -> None:
    """The error names the path and the likely causes; it is also a `FileNotFoundError`."""
    error = not_committed("/ckpt/step5")
    assert isinstance(error, NotCommitted)
    assert str(error) == (
        "/ckpt/step5 holds no committed checkpoint: there is no .metadata. The path is wrong, or the save that wrote "
        "there never finished."
    )


def test_coverage_is_checked_of_the_tensors_that_are_loaded() -> None:
    """Only tensors that are loaded are checked; the error has the number of their elements."""
    layouts = {"gap": ChunkLayout.of((4000, 2), [((0, 0), (3000, 2))])}
    index: Any = SimpleNamespace(incomplete_layouts=lambda: layouts)
    check_coverage("/ckpt", index, {"whole", "object"})
    with pytest.raises(MetadataError) as caught:
        check_coverage("/ckpt", index, {"whole", "gap"})
    assert str(caught.value) == (
        "/ckpt: the stored chunks of 'gap' do not make up its 8,000 elements: they hold 6,000 in total, so a rank's "
        "part is missing or stored twice"
    )


def test_chunks_that_overlap_do_not_make_up_a_tensor() -> None:
    """Chunks that overlap are an error, even if they have as many elements as the tensor."""
    with pytest.raises(MetadataError, match="'x' do not make up its 4 elements: they hold 4"):
        check_chunks("/ckpt", "x", (4,), [Region((0,), (2,)), Region((1,), (2,))])


@pytest.mark.parametrize("nbytes", [39, 41, 0])
def test_a_tensor_has_as_many_bytes_as_its_shape_says(nbytes: int) -> None:
    """The size of a stored tensor must match its shape and dtype; the error names key, shape and bytes."""
    check_length("/ckpt", "x", make_item(40, dtype="float32"), (2, 5))
    check_length("/ckpt", "x", make_item(2, dtype="bfloat16"), ())
    with pytest.raises(MetadataError, match=rf"/ckpt: 'x' of shape \(2, 5\) has {nbytes} bytes stored"):
        check_length("/ckpt", "x", make_item(nbytes, dtype="float32"), (2, 5))


@pytest.mark.parametrize("saved", [1, 2, 4])
def test_ranks_that_saved_each_for_itself_are_as_many_as_load(tmp_path: Path, saved: int) -> None:
    """All ranks check the same files, even ranks without metadata, so all get the same result."""
    for rank in range(saved):
        (tmp_path / f"__{rank}.metadata").touch()
    storage = open_storage(tmp_path)
    check_world_size(storage, True, saved)
    for own in (True, False):
        with pytest.raises(MetadataError, match="a number of ranks that differs from the 3 that load it"):
            check_world_size(storage, own, 3)


def test_a_path_without_any_ranks_metadata_is_not_committed(tmp_path: Path) -> None:
    """A path without any rank's metadata is not committed, rather than saved by another number of ranks."""
    with pytest.raises(NotCommitted, match="holds no committed checkpoint"):
        check_world_size(open_storage(tmp_path), False, 2)


def test_a_rank_that_saved_for_itself_must_have_saved_all_that_it_loads() -> None:
    """The elements in the plan must be all elements of the target, because a rank cannot see other ranks' saves."""
    metadata = metadata_of(x=entry((4, 5), ((0, 0), (2, 5))), object=BytesStorageMetadata())
    check_own_parts("/ckpt", metadata, plan_of(x=(2, 5)), {"x": torch.zeros(2, 5), "object": 5, "new": torch.ones(3)})
    twice = LoadPlan(plan_of(x=(2, 5)).items * 2)  # a planner may read a part more than once
    check_own_parts("/ckpt", metadata, twice, {"x": torch.zeros(2, 5)})
    for size, held in (((1, 5), 5), ((4, 5), 20)):
        with pytest.raises(MetadataError, match=f"/ckpt holds {held} of the 10 elements of 'x'.*another sharding"):
            check_own_parts("/ckpt", metadata, plan_of(x=size), {"x": torch.zeros(2, 5)})
    with pytest.raises(MetadataError, match="holds 0 of the 10 elements of 'x'"):
        check_own_parts("/ckpt", metadata, plan_of(), {"x": torch.zeros(2, 5)})


def test_files_are_there_and_have_their_sizes(tmp_path: Path) -> None:
    """Only the given files are checked; the error names the first one that is missing or has another size."""
    storage = open_storage(tmp_path)
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(bytes(1000))
    sizes = {"a": 1000, "b": 1000, "c": 999_999, "d": 1}
    check_files(storage, sizes, {"a", "b"})
    check_files(storage, sizes, set())
    with pytest.raises(ReadError, match=r"/c has 1,000 bytes instead of 999,999\. The checkpoint is damaged"):
        check_files(storage, sizes, {"a", "c", "d"})
    with pytest.raises(ReadError, match=r"/d is missing\. The checkpoint is damaged"):
        check_files(storage, sizes, {"d", "b"})
