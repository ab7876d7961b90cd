"""Files behind fsspec's filesystems are written as streams, and failed requests are repeated."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from dcp_tensorizer import ReadError, WriteError
from dcp_tensorizer._storage import fsspec as fsspec_module
from dcp_tensorizer._storage.base import Refused
from dcp_tensorizer._storage.open import open_storage

from ...lab.processes import open_descriptors

NAME = f"__0_0_{'a' * 32}.tensors"


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Returns the environment that the storage sees, because pytest changes the real one all the time."""
    variables = {"KEY": "old"}
    monkeypatch.setattr(fsspec_module, "environment", variables.copy)
    return variables


@pytest.fixture
def memory(variables: dict[str, str]) -> Iterator[Any]:
    storage: Any = open_storage("memory://streamed")
    storage.retries = dataclasses.replace(storage.retries, first_wait=0.0)
    storage.make_directory()
    yield storage
    fsspec.filesystem("memory").rm("/streamed", recursive=True)


def script(storage: Any, method: str, *errors: Exception, works_before: bool = False) -> list[Any]:
    """Makes a method of the storage's filesystems raise these errors, one a call, before it works again.

    Args:
        storage: Whose filesystem is replaced.
        method: Of the filesystem.
        errors: What it raises.
        works_before: It does its work and then raises, as if its answer was lost.

    Returns:
        The filesystems that the method was called on.
    """
    kind = type(storage.filesystem)
    left = iter(errors)
    filesystems: list[Any] = []

    def scripted(self: Any, *args: Any, **kwargs: Any) -> Any:
        filesystems.append(self)
        error = next(left, None)
        if error is None or works_before:
            result = getattr(kind, method)(self, *args, **kwargs)
        if error is not None:
            raise error
        return result

    storage.filesystem = type("Scripted", (kind,), {method: scripted})(skip_instance_cache=True)
    return filesystems


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "call", "error"),
    [
        ("makedirs", lambda s: s.make_directory(), WriteError),
        ("pipe_file", lambda s: s.put("f", b"x", sync=True), WriteError),
        ("cat_file", lambda s: s.read("f"), ReadError),
        ("info", lambda s: s.head("f"), ReadError),
        ("ls", lambda s: s.listing(), ReadError),
    ],
    ids=["make_directory", "put", "read", "head", "listing"],
)
def test_errors_of_a_backend_are_translated(method: str, call: Callable[[Any], object], error: type[Exception]) -> None:
    """Errors of a filesystem become those of this package, with path and text, and without secrets."""
    storage: Any = open_storage("memory://translated", {"token": "correct-horse"})
    script(storage, method, PermissionError("403 Forbidden: token correct-horse for s3://k:hunter2@bucket"))
    with pytest.raises(error, match=r"memory://translated.*PermissionError: 403") as caught:
        call(storage)
    assert "correct-horse" not in str(caught.value)
    assert "hunter2" not in str(caught.value)


# --- streams ---------------------------------------------------------------------------------------------------------


def test_a_completed_stream_stays(memory: Any) -> None:
    """After `complete`, further calls do nothing."""
    sink = memory.create(NAME, 3, sync=True)
    sink.put_part(0, memoryview(b"abc"))
    assert sink.bytes_written == 3
    sink.complete()
    sink.complete()
    sink.abort()
    assert memory.read(NAME) == b"abc"


def test_an_aborted_stream_is_not_completed_when_it_is_collected(tmp_path: Path) -> None:
    """An aborted file does not appear when fsspec's stream is garbage-collected."""
    storage = open_storage(f"simplecache::memory://{tmp_path.name}", {"simplecache": {"cache_storage": str(tmp_path)}})
    sink = storage.create(NAME, 0, sync=True)
    sink.put_part(0, memoryview(b"abc"))
    sink.abort()
    sink.abort()
    sink.complete()
    del sink
    gc.collect()
    assert storage.head(NAME) is None
    assert not fsspec.filesystem("memory").exists(f"/{tmp_path.name}/{NAME}")


def test_nothing_is_spooled(memory: Any, temporary_directory: Path) -> None:
    """An upload takes no space on the local disk."""
    before = open_descriptors()
    sink = memory.create(NAME, 3, sync=True)
    sink.put_part(0, memoryview(b"abc"))
    assert list(temporary_directory.glob("*dcp_tensorizer*")) == []
    assert open_descriptors() == before
    sink.complete()


# --- failed requests -------------------------------------------------------------------------------------------------


def test_each_attempt_has_a_new_filesystem(memory: Any) -> None:
    """A retry uses a new filesystem, with new connections and the current credentials."""
    memory.put("f", b"x", sync=True)
    filesystems = script(memory, "cat_file", ConnectionResetError(), ConnectionResetError())
    assert memory.read("f") == b"x"
    assert len({id(filesystem) for filesystem in filesystems}) == 3


def test_what_will_not_pass_is_not_repeated(memory: Any) -> None:
    """A permanent error is raised after one request."""
    filesystems = script(memory, "pipe_file", ValueError("wrong"))
    with pytest.raises(WriteError, match="ValueError: wrong"):
        memory.put("f", b"x", sync=True)
    assert len(filesystems) == 1


def test_attempts_are_bounded(memory: Any) -> None:
    """After six attempts the failure is raised with the name of the file."""
    filesystems = script(memory, "info", *[ConnectionResetError("reset by peer")] * 10)
    with pytest.raises(ReadError, match=r"memory://streamed/f: ConnectionResetError: reset by peer"):
        memory.head("f")
    assert len(filesystems) == 6


# --- small files put in place ----------------------------------------------------------------------------------------


def test_a_check_that_fails_is_not_an_answer(memory: Any) -> None:
    """With replace=False nothing is written if the check for an existing file fails."""
    memory.put("f", b"first", sync=True)
    script(memory, "info", PermissionError("403"))
    with pytest.raises(Refused, match="403"):
        memory.put("f", b"second", sync=True, replace=False)
    assert memory.read("f") == b"first"


def test_a_file_that_another_job_has_just_written_is_not_replaced(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With replace=False the filesystem is called in the mode that does not replace a file."""
    memory.put("f", b"theirs", sync=True)
    monkeypatch.setattr(memory, "head", lambda name: None)
    with pytest.raises(Refused, match="must not be replaced"):
        memory.put("f", b"ours", sync=True, replace=False)
    assert memory.read("f") == b"theirs"


@pytest.mark.parametrize(
    "errors",
    [[PermissionError()], [ValueError()], [ConnectionResetError(), PermissionError()]],
    ids=["denied", "unknown", "denied after a reset"],
)
def test_a_file_may_appear_after_all(memory: Any, errors: list[Exception]) -> None:
    """The outcome is unknown even after a denial, because filesystems retry requests themselves."""
    filesystems = script(memory, "pipe_file", *errors)
    with pytest.raises(WriteError, match="cannot write memory://streamed/f: ") as caught:
        memory.put("f", b"x", sync=True)
    assert not isinstance(caught.value, Refused)
    assert len(filesystems) == len(errors)


def test_a_put_whose_answer_is_lost(memory: Any) -> None:
    """After a lost answer the second attempt recognises the file of the first."""
    filesystems = script(memory, "pipe_file", ConnectionResetError("reset by peer"), works_before=True)
    memory.put("f", b"ours", sync=True, replace=False)
    assert (len(filesystems), memory.read("f")) == (2, b"ours")


# --- keys in the environment -----------------------------------------------------------------------------------------


def test_a_denial_after_the_environment_has_changed(memory: Any, variables: dict[str, str]) -> None:
    """A denial is retried once if the environment has changed since the filesystem was created."""
    memory.put("f", b"x", sync=True)
    variables["KEY"] = "new"
    filesystems = script(memory, "cat_file", PermissionError())
    assert memory.read("f") == b"x"
    assert filesystems[0] is not filesystems[1]
    script(memory, "cat_file", PermissionError())
    with pytest.raises(ReadError, match="PermissionError"):
        memory.read("f")
