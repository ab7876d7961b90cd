"""The job of one request: its files are written completely with digests, or removed."""

from __future__ import annotations

import errno
import io
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorizer import TensorDeserializer

from dcp_tensorizer import WriteError
from dcp_tensorizer._runtime.direct_memory import direct_memory
from dcp_tensorizer._storage.base import Storage
from dcp_tensorizer._storage.local import LocalStorage
from dcp_tensorizer._storage.local_io import LocalSink
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._tensor_file import encode as encoder
from dcp_tensorizer._tensor_file.dtypes import host_bytes
from dcp_tensorizer._tensor_file.encode import PartMemory
from dcp_tensorizer._tensor_file.names import data_file_name
from dcp_tensorizer._writer_process import jobs
from dcp_tensorizer._writer_process.jobs import FileJob
from dcp_tensorizer._writer_process.options import SaveLimits, SaveOptions
from dcp_tensorizer._writer_process.protocol import EarlierFile, FileRequest, FileResult, TensorSource

from ...lab.processes import file_size_limit
from ...lab.seams import block_digests, sources
from ...lab.states import dtype_name, filled, raw, same

NAMES = [data_file_name(0, number, "a" * 32) for number in range(3)]


class Foreign:
    """A class that could run code."""


def saved(value: object) -> torch.Tensor:
    stream = io.BytesIO()
    torch.save(value, stream)
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)


def job(
    storage: Storage,
    files: dict[str, dict[str, torch.Tensor]],
    *,
    kind: str = "tensor",
    memory: PartMemory | None = None,
    **options: Any,
) -> FileJob:
    """Returns a job for the given tensors, by file."""
    tensors = {name: tensor for file in files.values() for name, tensor in file.items()}
    requests = [FileRequest(file, sources(content.items(), kind)) for file, content in files.items()]
    given = SaveOptions(**{"thread_count": 2} | options)
    return FileJob(storage, requests, lambda source: host_bytes(tensors[source.name]), given, memory)


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    storage = open_storage(tmp_path if request.param == "local" else f"memory://{tmp_path.name}")
    storage.make_directory()
    yield storage
    for name in NAMES:
        storage.remove(name)


def test_jobs_may_share_what_they_keep_of_the_memory_for_parts(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second job reuses the memory for parts, also after a failure. Without a limit, no memory is cached."""
    tensor = filled(torch.uint8, (100_000,))
    made: list[int] = []

    def noted(nbytes: int) -> Any:
        made.append(nbytes)
        return direct_memory(nbytes)

    def made_for_a_job(memory: PartMemory) -> int:
        made.clear()
        work = job(storage, {NAMES[0]: {"a": tensor}}, memory=memory)
        work.run()
        work.remove()
        return len(made)

    monkeypatch.setattr(encoder, "direct_memory", noted)
    memory, unkept = PartMemory(kept_bytes=64 << 20), PartMemory()
    assert (made_for_a_job(memory), made_for_a_job(memory)) == (1, 0)
    files, options = [FileRequest(NAMES[0], sources([("a", tensor)]))], SaveOptions(thread_count=2)
    with pytest.raises(WriteError):
        FileJob(storage, files, _gone, options, memory).run()
    assert made_for_a_job(memory) == 0
    assert (made_for_a_job(unkept), made_for_a_job(unkept)) == (1, 1)


def _gone(source: TensorSource) -> memoryview:
    raise OSError(errno.EIO, f"{source.name} is gone")


def test_a_slow_disk_holds_few_files_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of files that wait for the disk is limited, because each holds a descriptor."""
    names = [data_file_name(0, number, "a" * 32) for number in range(40)]
    storage, begun, ended, most = LocalStorage(tmp_path), 0, 0, 0
    has_begun = threading.Condition()
    create, complete = LocalStorage.create, LocalSink.complete

    def counted(self: LocalStorage, name: str, *args: Any, **options: Any) -> LocalSink:
        nonlocal begun, most
        with has_begun:
            begun += 1
            most = max(most, begun - ended)
            has_begun.notify()
        return create(self, name, *args, **options)

    def slow(self: LocalSink) -> None:
        nonlocal ended
        with has_begun:  # until three more have begun: those that may
            assert has_begun.wait_for(lambda: begun >= min(ended + 4, len(names)), timeout=60)
        complete(self)
        ended += 1

    monkeypatch.setattr(LocalStorage, "create", counted)
    monkeypatch.setattr(LocalSink, "complete", slow)
    done = job(storage, {name: {name: torch.ones(2)} for name in names}).run()
    assert [result.name for result in done.files] == names
    assert most == 4


@pytest.mark.parametrize("sync", [True, False])
def test_all_files_are_written_and_described(storage: Storage, tmp_path: Path, sync: bool) -> None:
    """Sizes, locations and digests match the files, and stock tensorizer opens each file."""
    files = {
        NAMES[0]: {"a": filled(torch.float32, (300, 7)), "b": filled(torch.bfloat16, (1,))},
        NAMES[1]: {"c": filled(torch.uint8, (200_000,), seed=1)},
    }
    work = job(storage, files, sync_files=sync)
    done = work.run()
    assert [file.name for file in done.files] == NAMES[:2]
    assert done.seconds >= done.hash_seconds > 0
    assert done.write_seconds > 0
    for file, content in zip(done.files, files.values(), strict=True):
        stored = storage.read(file.name)
        assert stored is not None
        assert (len(stored), storage.head(file.name)) == (file.nbytes, file.nbytes)
        assert [(item.file, item.name) for item in file.tensors] == [(file.name, name) for name in content]
        for item in file.tensors:
            tensor = content[item.name]
            assert stored[item.offset : item.offset + item.length] == raw(tensor)
            assert (item.dtype, item.kind) == (dtype_name(tensor.dtype), "tensor")
            assert item.digests == block_digests(tensor)
        with TensorDeserializer(io.BytesIO(stored), device="cpu", verify_hash=True) as loaded:
            assert all(same(loaded[name], tensor) for name, tensor in content.items())
    assert work.bytes_written == sum(file.nbytes for file in done.files)


def test_a_failure_in_a_later_file_removes_the_earlier_ones(tmp_path: Path) -> None:
    """If a later file fails, all files are removed, and the error names the file and the cause."""
    files = {NAMES[0]: {"a": torch.zeros(10)}, NAMES[1]: {"b": torch.zeros(1_000_000)}}
    with file_size_limit(1 << 20), pytest.raises(WriteError, match="File too large") as caught:
        job(open_storage(tmp_path), files).run()
    assert f"{tmp_path}/{NAMES[1]}" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("point", ["put_part", "complete", "sync_directory"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EDQUOT])
def test_a_disks_error_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, number: int) -> None:
    """After an I/O error or a full quota in any step, the error names the file, and no file is left."""

    def fail(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(LocalStorage if point == "sync_directory" else LocalSink, point, fail)
    with pytest.raises(WriteError, match=re.escape(f"{tmp_path}/{NAMES[0]}: OSError: [Errno {number}]")):
        job(open_storage(tmp_path), {NAMES[0]: {"a": torch.zeros(3_000_000)}}).run()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_tensor_fails_the_job(tmp_path: Path) -> None:
    """An error before the first write also names the file."""
    source = TensorSource("gone", "float32", (1,), 4)

    def gone(source: TensorSource) -> memoryview:
        raise KeyError(source.name)

    work = FileJob(open_storage(tmp_path), [FileRequest(NAMES[0], (source,))], gone, SaveOptions(thread_count=1))
    with pytest.raises(WriteError, match="KeyError: 'gone'"):
        work.run()
    assert list(tmp_path.iterdir()) == []


def test_no_directory_is_an_error(tmp_path: Path) -> None:
    """If the directory does not exist, the error names the path."""
    with pytest.raises(WriteError, match="nowhere") as caught:
        job(open_storage(tmp_path / "nowhere"), {NAMES[0]: {"a": torch.zeros(1)}}).run()
    assert "No such file" in str(caught.value)


def test_no_files_is_no_work(storage: Storage) -> None:
    """A job without files succeeds."""
    done = job(storage, {}).run()
    assert done.files == ()


def test_secrets_do_not_get_into_the_error(tmp_path: Path) -> None:
    """The values of storage options are removed from a backend's message."""
    storage = open_storage(f"memory://{tmp_path.name}", {"key": "correct-horse"})

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("403 for correct-horse at https://user:hunter2@host")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "create", fail)
        with pytest.raises(WriteError, match="403") as caught:
            job(storage, {NAMES[0]: {"a": torch.zeros(1)}}).run()
    assert "correct-horse" not in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_the_next_file_is_begun_while_one_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next file is begun while the previous one waits for its completion."""
    storage = open_storage(tmp_path)
    begun, complete, create = threading.Event(), LocalSink.complete, LocalStorage.create

    def wait_then_complete(sink: LocalSink) -> None:
        assert begun.wait(30)
        complete(sink)

    def begin(own: LocalStorage, name: str, nbytes: int, *, sync: bool) -> Any:
        if name == NAMES[1]:
            begun.set()
        return create(own, name, nbytes, sync=sync)

    monkeypatch.setattr(LocalSink, "complete", wait_then_complete)
    monkeypatch.setattr(LocalStorage, "create", begin)
    done = job(storage, {name: {name: filled(torch.float32, (5,))} for name in NAMES[:2]}).run()
    assert [file.name for file in done.files] == NAMES[:2]


def test_a_file_that_cannot_be_completed_fails_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a file cannot be completed, the error names it, and no file is left."""
    storage = open_storage(tmp_path)
    complete = LocalSink.complete
    completed: list[LocalSink] = []

    def fail_first(sink: LocalSink) -> None:
        completed.append(sink)
        if len(completed) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        complete(sink)

    monkeypatch.setattr(LocalSink, "complete", fail_first)
    with pytest.raises(WriteError, match=rf"cannot write .*/{re.escape(NAMES[0])}: .*Input/output error"):
        job(storage, {name: {name: filled(torch.float32, (5,))} for name in NAMES}).run()
    assert os.listdir(tmp_path) == []


def at_once(operation: Callable[..., None], *arguments: object) -> Future[None]:
    """A replacement of `Workers` that runs each call at once."""
    future = Future[None]()
    try:
        future.set_result(operation(*arguments))
    except Exception as error:
        future.set_exception(error)
    return future


def test_nothing_is_written_behind_a_file_that_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed completion, no further file is written."""
    begun, create = [], LocalStorage.create

    def fail(sink: LocalSink) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def begin(own: LocalStorage, name: str, nbytes: int, *, sync: bool) -> Any:
        begun.append(name)
        return create(own, name, nbytes, sync=sync)

    monkeypatch.setattr(LocalSink, "complete", fail)
    monkeypatch.setattr(LocalStorage, "create", begin)
    failing = job(open_storage(tmp_path), {name: {name: filled(torch.float32, (5,))} for name in NAMES})
    monkeypatch.setattr(jobs, "Workers", lambda *_, **__: nullcontext(SimpleNamespace(submit=at_once)))
    with pytest.raises(WriteError, match=rf"cannot write .*/{re.escape(NAMES[0])}: .*Input/output error"):
        failing.run()
    assert begun == NAMES[:1]


def test_a_failure_is_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job reports progress before each step of the clean-up, so that a slow one is not taken for a hang."""
    content = filled(torch.float32, (5,))
    failing = job(open_storage(tmp_path), {name: {name: content} for name in NAMES[:2]})
    done: list[int] = []

    def fail(sink: LocalSink) -> None:
        done.append(failing.bytes_written)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(LocalSink, "_complete", fail)
    monkeypatch.setattr(LocalSink, "_abort", lambda sink: done.append(failing.bytes_written))
    monkeypatch.setattr(LocalStorage, "discard", lambda storage, *names: done.append(failing.bytes_written))
    monkeypatch.setattr(jobs, "Workers", lambda *_, **__: nullcontext(SimpleNamespace(submit=at_once)))
    with pytest.raises(WriteError, match="Input/output error"):
        failing.run()
    assert done == [done[0] + steps for steps in range(4)]  # the failure, `abort`, and the removal of two files


def test_no_file_is_completed_once_the_job_is_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`abandon` waits for the file that is being completed and removes it. Later completions are refused."""
    work = job(open_storage(tmp_path), {name: {name: filled(torch.float32, (5,))} for name in NAMES[:2]})
    removing = threading.Thread(target=work.abandon)
    complete = LocalSink.complete
    completed: list[LocalSink] = []

    def complete_late(sink: LocalSink) -> None:
        removing.start()
        while not work.is_abandoned:
            assert removing.is_alive()
        complete(sink)
        completed.append(sink)

    monkeypatch.setattr(LocalSink, "complete", complete_late)
    with pytest.raises(WriteError, match="this file is no longer needed"):
        work.run()
    removing.join(30)
    assert not removing.is_alive()
    assert len(completed) == 1
    assert os.listdir(tmp_path) == []


def _saved_before(folder: Path, content: dict[str, torch.Tensor]) -> FileResult:
    """Returns the location of a file that an earlier save has written."""
    folder.mkdir()
    (result,) = job(open_storage(folder), {NAMES[2]: content}, reuse_unchanged=True).run().files
    assert result.identity is not None
    return result


def _adopting(folder: Path, content: dict[str, torch.Tensor], earlier: tuple[EarlierFile, ...]) -> FileJob:
    request = FileRequest(NAMES[0], sources(content.items()), earlier, 4711)
    return FileJob(
        open_storage(folder), [request], lambda source: host_bytes(content[source.name]), SaveOptions(thread_count=1)
    )


def test_a_file_is_adopted_from_the_first_place_where_that_is_possible(tmp_path: Path) -> None:
    """A file is adopted from the first possible location. If there is none, the same bytes are written."""
    content = {"a": filled(torch.float32, (1000,))}
    before = _saved_before(tmp_path / "old", content)
    right = EarlierFile(str(tmp_path / "old"), before.name, before.identity or ())
    wrong = right._replace(identity=(1, 2, 3)), right._replace(location="unknown://nowhere")
    for name, earlier, adopted in (("new", (*wrong, right), True), ("written", wrong, False)):
        (tmp_path / name).mkdir()
        (result,) = _adopting(tmp_path / name, content, earlier).run().files
        assert (result.name, result.adopted, len(result.tensors)) == (NAMES[0], adopted, int(not adopted))
        assert os.path.samefile(tmp_path / "old" / before.name, tmp_path / name / NAMES[0]) == adopted
        assert (tmp_path / name / NAMES[0]).read_bytes() == (tmp_path / "old" / before.name).read_bytes()


def test_what_cannot_be_adopted_in_time_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not respond is asked for one copy only, and then all files are written."""
    content = {name: filled(torch.float32, (5,)) for name in NAMES}
    moments, asked = [0.0], []

    def wait_in_vain(own: LocalStorage, source: Storage, source_name: str, *others: Any, **options: Any) -> None:
        asked.append(source_name)
        moments[0] += 11.0

    monkeypatch.setattr(LocalStorage, "adopt", wait_in_vain)
    monkeypatch.setattr("dcp_tensorizer._writer_process.jobs.in_threads", lambda work, files: [*map(work, files)])
    earlier = tuple(EarlierFile(str(tmp_path / "old"), name, (1,)) for name in ("newest", "older"))
    requests = [FileRequest(name, tuple(sources([(name, content[name])])), earlier, 4711) for name in NAMES]
    work = FileJob(
        open_storage(tmp_path),
        requests,
        lambda source: host_bytes(content[source.name]),
        SaveOptions(thread_count=1, limits=SaveLimits(timeout=100.0)),  # of which a copy gets a tenth
        clock=lambda: moments[0],
    )
    assert [result.adopted for result in work.run().files] == [False] * len(NAMES)
    assert asked == ["newest"]


def test_an_abandoned_job_adopts_nothing(tmp_path: Path) -> None:
    """An abandoned job adopts no file and leaves none, and the earlier file stays."""
    content = {"a": filled(torch.float32, (1000,))}
    before = _saved_before(tmp_path / "old", content)
    (tmp_path / "new").mkdir()
    work = _adopting(
        tmp_path / "new", content, (EarlierFile(str(tmp_path / "old"), before.name, before.identity or ()),)
    )
    work.abandon()
    with pytest.raises(WriteError, match="this file is no longer needed"):
        work.run()
    assert (os.listdir(tmp_path / "new"), os.listdir(tmp_path / "old")) == ([], [before.name])


def test_an_interrupted_job_leaves_nothing(tmp_path: Path) -> None:
    """A KeyboardInterrupt in a synchronous save propagates, and no file is left."""
    tensors = {"a": torch.zeros(3_000_000), "b": torch.zeros(3_000_000)}

    def interrupted(source: TensorSource) -> memoryview:
        if source.name == "b":
            raise KeyboardInterrupt
        return host_bytes(tensors[source.name])

    files = [FileRequest(name, sources({key: tensors[key]}.items())) for name, key in zip(NAMES, tensors, strict=False)]
    with pytest.raises(KeyboardInterrupt):
        FileJob(open_storage(tmp_path), files, interrupted, SaveOptions(thread_count=1)).run()
    assert list(tmp_path.iterdir()) == []
