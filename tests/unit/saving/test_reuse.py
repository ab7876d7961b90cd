"""The files that a save adopts from earlier saves, and the separation of unchanging tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, cast

from dcp_tensorizer._saving.reuse import FilesOfSave, KnownFiles
from dcp_tensorizer._storage.base import Storage
from dcp_tensorizer._tensor_file.names import StoredItem, data_file_name
from dcp_tensorizer._writer_process.options import SaveLimits, SaveOptions
from dcp_tensorizer._writer_process.protocol import FileRequest, FileResult, TensorSource, WriteDone

MIB = 1 << 20


def save_id(number: int) -> str:
    return f"{number:032x}"


class Saved(NamedTuple):
    """The result of a save: the tensors of each file, and of each adopted file."""

    files: list[list[str]]
    adopted: list[list[str]]
    done: WriteDone
    requests: tuple[FileRequest, ...]


@dataclass(frozen=True)
class Place:
    """A storage that adopts files."""

    max_adopted_bytes: int
    max_file_bytes: int = 1 << 40
    location: str = "/job"
    adopts: bool = True


def digests_of(values: Mapping[str, int], sources: Sequence[TensorSource]) -> list[bytes]:
    return [values[source.name].to_bytes(16, "big") for source in sources]


class Job:
    """Saves of one rank, whose tensors have the values that are passed to `save`."""

    def __init__(self, max_reuses: int = 100, sha256: bool = False) -> None:
        self.known = KnownFiles()
        self.max_reuses = max_reuses
        self.sha256 = sha256
        self.number = 0

    def save(
        self,
        values: Mapping[str, int],
        *,
        nbytes: int = MIB,
        refuse: Collection[str] = (),
        fails: bool = False,
        attempts: int = 1,
        dtype: str = "uint8",
        max_adopted_bytes: int = 1 << 40,
        afterwards: Mapping[str, int] = MappingProxyType({}),
        identify: Callable[[str], tuple[str, ...] | None] = lambda name: (name,),
    ) -> Saved:
        """Saves once. Files in ``refuse`` cannot be adopted. ``afterwards`` are the tensors' values after the write."""
        self.number += 1
        limits = SaveLimits(max_reuses=self.max_reuses)
        options = SaveOptions(thread_count=1, limits=limits, sha256=self.sha256, reuse_unchanged=True)
        save = FilesOfSave(cast(Storage, Place(max_adopted_bytes)), 0, save_id(self.number), options, self.known)
        sources = [TensorSource(name, dtype, (nbytes,), nbytes) for name in values]
        for _ in range(attempts):
            requests = save.request(sources, lambda sources: digests_of(values, sources)).files
        results = []
        for request in requests:
            is_adopted = bool(request.earlier) and not {file.name for file in request.earlier} <= set(refuse)
            items = [] if is_adopted else [stored(request.name, source) for source in request.tensors]
            identity = identify(request.name)
            size = 1000 + sum(source.nbytes for source in request.tensors)
            results.append(FileResult(request.name, size, tuple(items), identity, adopted=is_adopted))
        done = WriteDone(tuple(results), 0.0, 0.0, 0.0)
        if not fails:
            done = save.finish(done, lambda sources: digests_of({**values, **afterwards}, sources))
        names = [[source.name for source in request.tensors] for request in requests]
        adopted = [of for of, result in zip(names, done.files, strict=True) if result.adopted]
        return Saved(names, adopted, done, requests)


def names_until(number: int) -> set[str]:
    """Returns the names of the first files of the first saves."""
    return {data_file_name(0, 0, save_id(n)) for n in range(number)}


def stored(file: str, source: TensorSource) -> StoredItem:
    return StoredItem(file, source.name, 64, source.nbytes, source.dtype, source.kind, b"digests!")


def test_the_third_save_adopts_what_does_not_change() -> None:
    """The second save writes unchanged tensors to a separate file, which the third save adopts."""
    job = Job()
    saves = [job.save({"base": 1, "lora": step, "head": 2}) for step in range(4)]
    assert [save.files for save in saves] == [
        [["base", "lora", "head"]],
        [["base", "head"], ["lora"]],
        [["base", "head"], ["lora"]],
        [["base", "head"], ["lora"]],
    ]
    assert [save.adopted for save in saves] == [[], [], [["base", "head"]], [["base", "head"]]]


def test_an_adopted_file_has_a_name_of_its_own() -> None:
    """An adopted file has a new name, the locations of its tensors, and its earlier names, newest first."""
    job = Job()
    saves = [job.save({"base": 1, "lora": step}) for step in range(8)]
    name = data_file_name(0, 0, save_id(8))
    adopted = saves[-1].done.files[0]
    assert (adopted.name, adopted.nbytes) == (name, 1000 + MIB)
    assert adopted.tensors == (stored(name, TensorSource("base", "uint8", (MIB,), MIB)),)
    earlier = saves[-1].requests[0].earlier
    assert [(file.location, file.name) for file in earlier] == [
        ("/job", data_file_name(0, 0, save_id(number))) for number in (7, 6, 5, 4)
    ]


def test_a_state_that_has_not_changed_at_all_is_adopted_at_once() -> None:
    """If no tensor has changed, the second save adopts the only file."""
    job = Job()
    assert [job.save({"a": 1, "b": 2}).adopted for _ in range(3)] == [[], [["a", "b"]], [["a", "b"]]]


def test_a_file_of_which_one_tensor_has_changed_is_not_adopted() -> None:
    """If one tensor of a file changes, the others are written once more without it, and adopted from then on."""
    job = Job()
    for step in range(3):
        job.save({"a": 1, "b": 2, "lora": step})
    saves = [job.save({"a": 1, "b": 3, "lora": step}) for step in range(3, 7)]
    assert [save.files for save in saves] == [[["a"], ["b", "lora"]]] * 2 + [[["a"], ["b"], ["lora"]]] * 2
    assert [save.adopted for save in saves] == [[], [["a"]], [["a"]], [["a"], ["b"]]]


def test_a_tensor_that_changed_has_to_stay_the_same_for_longer_each_time() -> None:
    """A tensor that changes occasionally does not cause repeated writes of the others."""
    job = Job()
    for step in range(3):
        job.save({"a": 1, "b": 0, "lora": step})
    apart = []
    for step in range(3, 9):
        files = job.save({"a": 1, "b": 1, "lora": step}).files
        apart.append(not any({"b", "lora"} <= set(file) for file in files))
    assert apart == [False, False, True, True, True, True]
    job.save({"a": 1, "b": 2, "lora": 9})
    waits = [any({"b", "lora"} <= set(f) for f in job.save({"a": 1, "b": 2, "lora": s}).files) for s in range(10, 15)]
    assert waits == [True, True, True, False, False]


def test_what_cannot_be_adopted_is_written_and_adopted_next_time() -> None:
    """A file is requested under all earlier names, even after it was written again: they may be on other storages."""
    job = Job()
    for step in range(3):
        job.save({"base": 1, "lora": step})
    refused = job.save({"base": 1, "lora": 3}, refuse=names_until(4))
    assert (refused.files, refused.adopted) == ([["base"], ["lora"]], [])
    after = job.save({"base": 1, "lora": 4})
    assert after.adopted == [["base"]]
    assert [file.name for file in after.requests[0].earlier] == [data_file_name(0, 0, save_id(n)) for n in (4, 3, 2)]


def test_a_file_is_written_anew_after_so_many_reuses() -> None:
    """After ``max_reuses`` adoptions a file is written again, so a damaged file spoils no more checkpoints."""
    job = Job(max_reuses=2)
    adopted = [bool(job.save({"base": 1, "lora": step}).adopted) for step in range(9)]
    assert adopted == [False, False, True, True, False, True, True, False, True]
    job.save({"base": 1, "lora": 9})
    assert job.save({"base": 1, "lora": 10}).requests[0].earlier == ()
    assert job.save({"base": 1, "lora": 11}).adopted
    assert not job.save({"base": 1, "lora": 12}, refuse=names_until(13)).adopted
    assert [bool(job.save({"base": 1, "lora": step}).adopted) for step in (13, 14)] == [True, False]


def test_a_save_that_failed_changes_nothing() -> None:
    """After a failed save, the next save adopts the same file."""
    job = Job()
    for step in range(3):
        job.save({"base": 1, "lora": step})
    job.save({"base": 1, "lora": 3}, fails=True)
    after = job.save({"base": 1, "lora": 4})
    assert after.adopted == [["base"]]
    assert after.requests[0].earlier[0].name == data_file_name(0, 0, save_id(3))


def test_a_file_whose_tensor_changed_while_it_was_written_is_not_adopted() -> None:
    """A file whose tensor changed during the write is not adopted later; an adopted file still is."""
    job = Job()
    job.save({"a": 1, "b": 2}, afterwards={"a": 1, "b": 7})
    assert job.save({"a": 1, "b": 2}, afterwards={"a": 1, "b": 2}).adopted == []
    assert job.save({"a": 1, "b": 2}, afterwards={"b": 7}).adopted == [["a", "b"]]
    assert job.save({"a": 1, "b": 2}).adopted == [["a", "b"]]


def test_another_attempt_has_files_of_its_own() -> None:
    """A second attempt uses other file names, and adopts the same files."""
    job = Job()
    for step in range(2):
        job.save({"base": 1, "lora": step})
    again = job.save({"base": 1, "lora": 2}, attempts=2)
    assert [request.name for request in again.requests] == [data_file_name(0, n, save_id(3)) for n in (2, 3)]
    assert again.adopted == [["base"]]


def test_states_that_are_saved_in_turn_are_all_known() -> None:
    """A job may save a model and an optimizer in turn, each to a separate checkpoint."""
    job = Job()
    for step in range(3):
        saved = [job.save({"model": 1, "step": step}), job.save({"optimizer": 2, "count": step})]
    assert [save.adopted for save in saved] == [[["model"]], [["optimizer"]]]


def test_a_tensor_of_another_dtype_or_shape_is_another_tensor() -> None:
    """A tensor with the same bytes and another dtype or shape is not adopted."""
    job = Job()
    job.save({"a": 1})
    assert job.save({"a": 1}, dtype="int8").adopted == []
    assert job.save({"a": 1}, nbytes=2 * MIB).adopted == []
    assert job.save({"a": 1}, nbytes=2 * MIB).adopted == [["a"]]


def test_files_with_and_without_sha256_are_not_taken_for_each_other() -> None:
    """Files with and without SHA-256 differ, so a save adopts only files of its kind."""
    job = Job()
    adopted = []
    for job.sha256 in (False, True, True, False, False):
        adopted.append(job.save({"a": 1}).adopted)
    assert adopted == [[], [], [["a"]], [["a"]], [["a"]]]


def test_small_tensors_get_no_file_of_their_own() -> None:
    """Unchanging tensors smaller than a file's header, 256 KiB, stay with the others."""
    job = Job()
    saves = [job.save({"norm": 1, "lora": step}, nbytes=100_000) for step in range(4)]
    assert [save.files for save in saves] == [[["norm", "lora"]]] * 4


def test_what_does_not_change_is_cut_into_files_of_a_gibibyte() -> None:
    """Unchanging tensors go to files of at most 1 GiB, so that one change rewrites one file."""
    job = Job()
    for step in range(2):
        saved = job.save({**{f"base.{n}": n for n in range(5)}, "lora": step}, nbytes=400 * MIB)
    assert saved.files == [["base.0", "base.1"], ["base.2", "base.3"], ["base.4"], ["lora"]]


def test_a_file_that_is_too_large_to_be_adopted_is_cut() -> None:
    """A file above the storage's limit, such as 5 GiB for a copy on S3, is split by the next save."""
    job = Job()
    state = {f"base.{n}": n for n in range(16)}
    saves = [job.save(state, nbytes=400 * MIB, max_adopted_bytes=5 << 30) for _ in range(3)]
    assert [len(save.files) for save in saves] == [1, 8, 8]
    assert [len(save.adopted) for save in saves] == [0, 0, 8]


def test_files_without_identity_are_not_adopted() -> None:
    """If a storage cannot identify a file, the file is not adopted."""
    job = Job()
    assert [job.save({"a": 1}, identify=lambda name: None).adopted for _ in range(3)] == [[]] * 3


def test_what_is_not_saved_any_more_is_forgotten() -> None:
    """Files are forgotten after four saves of other states."""
    job = Job()
    job.save({"a": 1})
    for step in range(4):
        job.save({"b": step})
    assert job.save({"a": 1}).adopted == []
    assert replace(job.save({"a": 1}).done.files[0], tensors=()).adopted
