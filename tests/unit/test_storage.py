"""What is particular to one backend, and what messages may not show. The rest: test_storage_contract.py."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from hypothesis import given
from hypothesis import strategies as st

from dcp_tensorizer import ReadError, WriteError
from dcp_tensorizer._storage import retry as retry_module
from dcp_tensorizer._storage.base import Refused, rest_of
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._storage.redact import Scrubber, redact

from .support import open_descriptors, run_python

NAME = f"__0_0_{'a' * 32}.tensors"


# --- paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["a*b", "[1]", "a b", "\N{SNOWMAN}", "%41", "~", "#x?y", "a:b", "memory:", "-"])
def test_local_paths_are_literal(tmp_path: Path, path: str) -> None:
    """As string, as path and as file URL, the same directory of exactly that name."""
    for given_path in (f"{tmp_path}/{path}", tmp_path / path, f"file://{tmp_path}/{path}"):
        storage = open_storage(given_path)
        assert storage.path == storage.location == f"{tmp_path}/{path}"
        storage.make_directory()
        storage.put("f", b"x", sync=False)
    assert os.listdir(tmp_path) == [path]


def test_a_path_like_with_a_colon_pair_is_local(tmp_path: Path) -> None:
    """A string with ``::`` is a chain of URLs; a path never is."""
    assert open_storage(tmp_path / "a::b").path == f"{tmp_path}/a::b"


def test_relative_paths_are_those_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer process, and a later change of directory, see the same place."""
    monkeypatch.chdir(tmp_path)
    storage = open_storage("checkpoints/last")
    assert storage.location == f"{tmp_path}/checkpoints/last"
    assert not storage.in_process


def test_remote_locations_are_opened_by_another_process_as_they_were_given() -> None:
    """The location keeps what the path for messages leaves out."""
    storage = open_storage("memory://user:hunter2@bucket/checkpoint")
    assert storage.location == "memory://user:hunter2@bucket/checkpoint"
    assert storage.path == "memory://bucket/checkpoint"


# --- secrets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("s3://key:secret@bucket/a", "s3://bucket/a"),
        ("ftp://user@host/a", "ftp://host/a"),
        ("ftp://user:p@ss@host/a", "ftp://host/a"),
        ("ftp://user:p%40ss@host", "ftp://host"),
        ("sftp://user:my pass@host/a", "sftp://host/a"),
        ("simplecache::ftp://u:p@h/a and s3://k:s@b", "simplecache::ftp://h/a and s3://b"),
        ("https://host/a@b", "https://host/a@b"),
        ("/local/a@b and user@host", "/local/a@b and user@host"),
        ("(s3+http://u:p@h/x)", "(s3+http://h/x)"),
        ("", ""),
    ],
)
def test_credentials_in_urls_are_removed(text: str, clean: str) -> None:
    """All of the user and the password, also one that holds an ``@``; nothing else."""
    assert redact(text) == clean


secret = st.text("abcdefghijklmnopqrstuvwxyz0123456789!@:+=-_.", min_size=1, max_size=20)


@given(secret, secret)
def test_no_password_survives_in_a_url(user: str, password: str) -> None:
    """Whatever it is made of, as long as the URL can be parsed."""
    assert redact(f"error at ftp://{user}:{password}@host.name/path/x: 403") == "error at ftp://host.name/path/x: 403"


OPTIONS = {
    "key": "AKIA-123456",
    "client_kwargs": {
        "endpoint_url": "http://minio.local:9000",
        "region_name": "eu-central-1",
        "headers": [{"x": "Bearer t0ken-region"}],
    },
    "secret": "sup3r-s3cret",
    "anon": False,
    "short": "abc",
}


def test_options_are_scrubbed_from_messages() -> None:
    """Every longer string among them, however deep; endpoints and regions stay, for they help."""
    storage = open_storage("memory://bucket", OPTIONS)
    text = "key AKIA-123456 at http://minio.local:9000 in eu-central-1: Bearer t0ken-region sup3r-s3cret abc"
    assert storage.scrub(text) == "key *** at http://minio.local:9000 in eu-central-1: *** *** abc"


@pytest.mark.parametrize(
    ("options", "text", "clean"),
    [
        ({"account_url": "https://a.example/c?sv=2022-11-02&sig=s1gn%2Fature"}, "sig s1gn%2Fature", "sig ***"),
        ({"account_url": "https://a.example/c?sv=2022-11-02&sig=s1gn%2Fature"}, "sig s1gn/ature", "sig ***"),
        ({"connection_string": "AccountName=x;AccountKey=azure+k3y==;E=y"}, "with azure+k3y==", "with ***"),
        ({"password": 12345678, "port": 2222, "anon": True}, "12345678 at port 2222: True", "*** at port 2222: True"),
        ({"proxies": {"http": "http://user:pr0xy@host"}}, "by http://user:pr0xy@host", "by http://host"),
    ],
)
def test_parts_of_options_are_scrubbed(options: dict[str, Any], text: str, clean: str) -> None:
    """Signed URLs and connection strings: by themselves, and each part of them."""
    storage = open_storage("memory://bucket", options)
    for secret in options.values():
        assert not isinstance(secret, str) or storage.scrub(f"at {secret}") == "at ***"
    assert storage.scrub(text) == clean


def test_a_secret_within_another_is_scrubbed_whole() -> None:
    """The longer one first, so that no rest of it is left."""
    storage = open_storage("memory://bucket", {"a": "abcdef", "b": "abcdef-ghijkl"})
    assert storage.scrub("abcdef-ghijkl abcdef") == "*** ***"


@pytest.mark.parametrize("url", ["nonsense://u:hunter2@h/x", "simplecache::nonsense://u:hunter2@h/x"])
def test_an_error_while_opening_shows_no_secret(url: str) -> None:
    """Neither in its text nor in the exceptions behind it."""
    with pytest.raises(WriteError) as caught:
        open_storage(url, {"password": "correct-horse"})
    error: BaseException | None = caught.value
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert "hunter2" not in str(error)
    assert "correct-horse" not in str(error)


@contextmanager
def failing(storage: Any, method: str) -> Iterator[None]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError("403 Forbidden: token correct-horse for s3://k:hunter2@bucket")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage._filesystem, method, fail)
        yield


@pytest.mark.parametrize(
    ("method", "call", "error"),
    [
        ("makedirs", lambda s: s.make_directory(), WriteError),
        ("pipe_file", lambda s: s.put("f", b"x", sync=True), WriteError),
        ("cat_file", lambda s: s.read("f"), ReadError),
        ("info", lambda s: s.head("f"), ReadError),
    ],
    ids=["makedirs", "put", "read", "size"],
)
def test_errors_of_a_backend_are_translated(method: str, call: Any, error: type[Exception]) -> None:
    """Ours, with the path and the backend's text, without what is secret in it."""
    storage = open_storage("memory://translated", {"token": "correct-horse"})
    with failing(storage, method), pytest.raises(error, match=r"memory://translated.*PermissionError: 403") as caught:
        call(storage)
    assert "correct-horse" not in str(caught.value)
    assert "hunter2" not in str(caught.value)


# --- local files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_umask_is_respected(tmp_path: Path, mask: int, mode: int) -> None:
    """Data files, published files and directories have the modes that any program's would have."""
    before = os.umask(mask)
    try:
        storage = open_storage(tmp_path / "new" / "checkpoint")
        storage.make_directory()
        storage.create(NAME, 0, sync=False).complete()
        storage.put(".metadata", b"x", sync=False)
    finally:
        os.umask(before)
    folder = tmp_path / "new" / "checkpoint"
    assert [(folder / name).stat().st_mode & 0o777 for name in (NAME, ".metadata")] == [mode, mode]
    assert folder.stat().st_mode & 0o777 == 0o777 & ~mask


def test_publishing_replaces_the_file_not_its_contents(tmp_path: Path) -> None:
    """Whoever has the old one open reads the old one to its end."""
    storage = open_storage(tmp_path)
    storage.put("f", b"old" * 1000, sync=True)
    with open(tmp_path / "f", "rb") as file:
        assert file.read(3) == b"old"
        storage.put("f", b"new", sync=True)
        assert file.read() == (b"old" * 1000)[3:]
    assert storage.read("f") == b"new"
    assert os.listdir(tmp_path) == ["f"]


def test_a_file_in_the_place_of_a_directory(tmp_path: Path) -> None:
    """There is nothing below it to read, and nothing can be written there."""
    (tmp_path / "file").write_bytes(b"x")
    storage = open_storage(tmp_path / "file")
    assert storage.read(".metadata") is None
    assert storage.head(".metadata") is None
    with pytest.raises(WriteError, match="file"):
        storage.make_directory()
    with pytest.raises(WriteError, match="file"):
        storage.put(".metadata", b"x", sync=True)


def test_a_directory_in_the_place_of_a_file(tmp_path: Path) -> None:
    """What cannot be read is an error, not a missing file."""
    (tmp_path / ".metadata").mkdir()
    with pytest.raises(ReadError, match="metadata"):
        open_storage(tmp_path).read(".metadata")


def test_opening_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    """And leaves no descriptor open."""
    before = open_descriptors()
    with pytest.raises(FileNotFoundError):
        open_storage(tmp_path).open(NAME)
    assert open_descriptors() == before


# --- streams ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def memory() -> Iterator[Any]:
    storage = open_storage("memory://streamed")
    storage.make_directory()
    yield storage
    fsspec.filesystem("memory").rm("/streamed", recursive=True)


def test_a_stream_is_closed_once(memory: Any) -> None:
    """Closing completes it; whatever is called afterwards does nothing."""
    sink = memory.create(NAME, 3, sync=True)
    sink.put_part(0, memoryview(b"abc"))
    assert sink.bytes_written == 3
    sink.complete()
    sink.complete()
    sink.abort()
    assert memory.read(NAME) == b"abc"


def test_an_aborted_stream_is_not_completed_when_it_is_collected(tmp_path: Path) -> None:
    """fsspec's streams complete themselves when they are collected; what was aborted must not appear after all."""
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
    """A file on its way is nowhere on local disk."""
    before = open_descriptors()
    sink = memory.create(NAME, 3, sync=True)
    sink.put_part(0, memoryview(b"abc"))
    assert list(temporary_directory.glob("*dcp_tensorizer*")) == []
    assert open_descriptors() == before
    sink.complete()


# --- retries ---------------------------------------------------------------------------------------------------------


class Status(Exception):
    """An error as those of libraries for HTTP."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the server says {status}")
        self.status = status


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_module, "_FIRST_WAIT", 0.0)


TRANSIENT = [Status(503), Status(429), Status(500), Status(401), ConnectionResetError(), TimeoutError(), EOFError()]
LASTING = [Status(403), Status(404), Status(400), PermissionError("403"), FileNotFoundError("x"), ValueError("x")]


@pytest.mark.parametrize("error", TRANSIENT, ids=repr)
def test_what_may_pass_is_tried_again_with_a_fresh_filesystem(memory: Any, no_waiting: None, error: Exception) -> None:
    """Overload, resets, timeouts, and tokens that have expired: each try has a new filesystem."""
    memory.put("f", b"x", sync=True)
    used: list[Any] = []

    class Failing(type(memory._filesystem)):  # type: ignore[misc]
        def cat_file(self, *args: Any, **kwargs: Any) -> Any:
            used.append(self)
            if len(used) < 3:
                raise error
            return super().cat_file(*args, **kwargs)

    memory._filesystem = Failing(skip_instance_cache=True)
    assert memory.read("f") == b"x"
    assert len({id(filesystem) for filesystem in used}) == 3


@pytest.mark.parametrize("error", LASTING, ids=repr)
def test_what_will_not_pass_is_not_tried_again(memory: Any, no_waiting: None, error: Exception) -> None:
    """Permissions, missing objects, wrong arguments: one request, and its error."""
    tries = []

    def fail(*args: Any, **kwargs: Any) -> Any:
        tries.append(args)
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory._filesystem, "pipe_file", fail)
        with pytest.raises(WriteError, match=type(error).__name__):
            memory.put("f", b"x", sync=True)
    assert len(tries) == 1


def test_tries_are_bounded(memory: Any, no_waiting: None) -> None:
    """What never passes is an error in the end, after six tries."""
    tries = []

    class Failing(type(memory._filesystem)):  # type: ignore[misc]
        def info(self, *args: Any, **kwargs: Any) -> Any:
            tries.append(args)
            raise ConnectionResetError("reset by peer")

    memory._filesystem = Failing(skip_instance_cache=True)
    with pytest.raises(ReadError, match=r"memory://streamed/f: ConnectionResetError: reset by peer"):
        memory.head("f")
    assert len(tries) == 6


def test_a_check_that_fails_is_not_an_answer(memory: Any) -> None:
    """With overwrite=False nothing is put where nobody knows whether there is something."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError("403")

    memory.put("f", b"first", sync=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory._filesystem, "info", fail)
        with pytest.raises(WriteError, match="403"):
            memory.put("f", b"second", sync=True, replace=False)
    assert memory.read("f") == b"first"


def test_what_another_job_has_put_there_meanwhile_is_not_replaced(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The filesystem is told, besides the check before: those of object stores decide it at the put."""
    memory.put("f", b"theirs", sync=True)
    monkeypatch.setattr(memory, "head", lambda name: None)
    with pytest.raises(WriteError, match="must not be replaced"):
        memory.put("f", b"ours", sync=True, replace=False)
    assert memory.read("f") == b"theirs"


@pytest.mark.parametrize(
    ("errors", "refused"),
    [([PermissionError()], True), ([ValueError()], False), ([ConnectionResetError(), PermissionError()], False)],
    ids=["denied", "who knows", "denied after a reset"],
)
def test_whether_a_file_may_be_there_after_all(
    memory: Any, no_waiting: None, errors: list[Exception], refused: bool
) -> None:
    """Not if the first request was denied; otherwise nobody knows."""
    left = iter(errors)

    class Failing(type(memory._filesystem)):  # type: ignore[misc]
        def pipe_file(self, *args: Any, **kwargs: Any) -> Any:
            raise next(left)

    memory._filesystem = Failing(skip_instance_cache=True)
    with pytest.raises(WriteError, match="cannot write memory://streamed/f: ") as caught:
        memory.put("f", b"x", sync=True)
    assert isinstance(caught.value, Refused) == refused
    assert next(left, None) is None


def test_a_put_whose_answer_is_lost(memory: Any, no_waiting: None) -> None:
    """The second one meets the object of the first, and knows it."""
    tries = []

    class Failing(type(memory._filesystem)):  # type: ignore[misc]
        def pipe_file(self, *args: Any, **kwargs: Any) -> Any:
            super().pipe_file(*args, **kwargs)
            tries.append(args)
            raise ConnectionResetError("reset by peer")

    memory._filesystem = Failing(skip_instance_cache=True)
    memory.put("f", b"ours", sync=True, replace=False)
    assert (len(tries), memory.read("f")) == (1, b"ours")


@pytest.mark.parametrize(
    ("protocol", "defaults"),
    [("gs", {"requests_timeout": 30.0}), ("abfs", {"connection_timeout": 6, "read_timeout": 6}), ("memory", {})],
)
def test_filesystems_that_connect_by_themselves_get_timeouts(
    monkeypatch: pytest.MonkeyPatch, protocol: str, defaults: dict[str, float]
) -> None:
    """By the names of their own options, unless the user gives some."""
    given: list[dict[str, Any]] = []

    class Recording(fsspec.get_filesystem_class("memory")):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            given.append({key: options[key] for key in options if key.endswith("timeout")})
            super().__init__()

    monkeypatch.setitem(_registry, protocol, Recording)
    open_storage(f"{protocol}://bucket/x", {}, 60.0)
    open_storage(f"{protocol}://bucket/x", {"read_timeout": 1}, 60.0)
    assert given == [defaults, defaults | {"read_timeout": 1}]


@pytest.mark.parametrize(
    ("url", "path"),
    [("s3://b/run/", "s3://b/run"), ("s3://b/", "s3://b"), ("memory://", "memory://"), ("memory://x//", "memory://x")],
)
def test_trailing_slashes_are_dropped(url: str, path: str) -> None:
    """What is below has one slash before its name; the root of a filesystem stays as it is."""
    storage = open_storage(url)
    assert (storage.path, storage.location) == (path, path)
    assert open_storage(url).child("step-1").path == f"{path}/step-1"
    assert open_storage("file:///").path == "/"


def test_waits_grow_and_are_bounded() -> None:
    """From a fraction of a second to ten, less some chance."""
    found = list(retry_module.waits(600.0))
    assert len(found) == 5
    for number, wait in enumerate(found):
        assert 0.1 * 2**number <= wait <= min(0.2 * 2**number, 10.0)


def test_tries_end_in_time() -> None:
    """No try begins that could be over too late."""
    tries = []

    def fail() -> None:
        tries.append(time.monotonic())
        raise TimeoutError

    started = time.monotonic()
    with pytest.raises(TimeoutError):
        retry_module.retry(fail, retry_module.is_transient, 1.0)
    assert 2 <= len(tries) <= 4
    assert tries[-1] - started <= 0.95
    assert list(retry_module.waits(0.1)) == []


def test_passwords_of_digits_are_removed() -> None:
    """The command line reads them as numbers."""
    scrub = Scrubber({"password": 12345678, "port": 2222, "nested": {"pin": [987654321]}, "anon": True})
    assert (
        scrub("bad password 12345678 or 987654321 at port 2222: True") == "bad password *** or *** at port 2222: True"
    )


@given(st.lists(st.integers(0, 20), max_size=6), st.integers(0, 130))
def test_the_rest_of_buffers_is_what_follows(sizes: list[int], count: int) -> None:
    """Views of the same memory, none of them empty."""
    content = bytearray(range(sum(sizes)))
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    buffers = [memoryview(content)[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    rest = rest_of(buffers, count)
    assert b"".join(rest) == bytes(content[count:])
    assert all(buffer.nbytes and buffer.obj is content for buffer in rest)


# --- requests beside other work --------------------------------------------------------------------------------------


_AT_THE_END = """
import threading
from concurrent.futures import ThreadPoolExecutor
from dcp_tensorizer._threads import in_background

def save():
    while True:
        try:
            ThreadPoolExecutor(1).submit(int).result()
        except RuntimeError:  # no more threads are started
            break
    print(in_background(lambda: 7).result(), type(in_background(lambda: 1 // 0).exception()).__name__)

threading.Thread(target=save).start()
"""


def test_a_save_that_is_under_way_when_the_job_ends_can_still_ask() -> None:
    """The interpreter waits for the save's thread but starts no others: the request is made at once."""
    assert run_python(_AT_THE_END).stdout.split() == ["7", "ZeroDivisionError"]


def test_azures_filesystems_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for the same options, however many saves there are, since adlfs never frees it; what it knew is forgotten."""
    made: list[Azure] = []

    class Azure(MemoryFileSystem):
        protocol = "az"

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.forgotten = 0
            made.append(self)

        def invalidate_cache(self, path: str | None = None) -> None:
            self.forgotten += 1

    monkeypatch.setitem(_registry, "az", Azure)
    opened = [open_storage(f"az://container/step{step}", {"account_name": "a"}) for step in range(3)]
    assert [storage.path for storage in opened] == [f"az://container/step{step}" for step in range(3)]
    open_storage("az://container/step1", {"account_name": "b"})
    assert [(azure.storage_options["account_name"], azure.forgotten) for azure in made] == [("a", 3), ("b", 1)]
    assert opened[0].head("nothing") is None
