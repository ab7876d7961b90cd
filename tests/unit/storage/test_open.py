"""Which storage a path or a URL names."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemWriter

from dcp_tensorizer import (
    CheckpointError,
    Export,
    Publish,
    SafetensorsStorageWriter,
    TensorizerStorageReader,
    TensorizerStorageWriter,
    WriteError,
    open_reader,
)
from dcp_tensorizer._runtime.torch_compat import FsspecWriter
from dcp_tensorizer._storage.local import LocalStorage
from dcp_tensorizer._storage.open import absolute_path, is_location, open_storage
from dcp_tensorizer._tiers.target import FlushTarget


@pytest.mark.parametrize("path", ["a*b", "[1]", "a b", "\N{SNOWMAN}", "%41", "~", "#x?y", "a:b", "memory:", "-"])
def test_local_paths_are_literal(tmp_path: Path, path: str) -> None:
    """A string, a path and a file URL open the same directory, of exactly that name."""
    for given_path in (f"{tmp_path}/{path}", tmp_path / path, f"file://{tmp_path}/{path}"):
        storage = open_storage(given_path)
        assert storage.path == storage.location == f"{tmp_path}/{path}"
        storage.make_directory()
        storage.put("f", b"x", sync=False)
    assert os.listdir(tmp_path) == [path]


def test_a_path_like_with_a_colon_pair_is_local(tmp_path: Path) -> None:
    """A string with ``::`` is a chain of URLs, and a path object never is."""
    assert open_storage(tmp_path / "a::b").path == f"{tmp_path}/a::b"


def test_relative_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path names the same directory in the writer process, and after a change of the working directory."""
    monkeypatch.chdir(tmp_path)
    storage = open_storage("checkpoints/last")
    assert storage.location == f"{tmp_path}/checkpoints/last"
    assert not storage.in_process


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("a/../b", Path("/there/b")),
        (Path("s3://a"), Path("/there/s3:/a")),
        ("~/a", Path("/home/me/a")),
        (Path("~/a"), Path("/home/me/a")),
        ("~", Path("/home/me")),
        ("a/~", Path("/there/a/~")),
        ("~no-such-user/a", Path("/there/~no-such-user/a")),
        ("/a", Path("/a")),
        ("file://a", Path("/there/a")),
        ("file:///a", Path("/a")),
        ("s3://bucket/a", "s3://bucket/a"),
    ],
)
def test_paths_are_relative_to_a_directory_that_is_given(
    given: str | Path, path: str | Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path is relative to the directory in which the save was staged, ``~`` is the home. Other URLs are unchanged."""
    monkeypatch.setenv("HOME", "/home/me")
    assert absolute_path(given, "/there") == path


@pytest.mark.parametrize(
    "taker", [TensorizerStorageWriter, SafetensorsStorageWriter, Export, Publish, TensorizerStorageReader, open_reader]
)
def test_a_url_is_checked_where_it_is_given(taker: Callable[..., object], register: Callable[..., None]) -> None:
    """A URL's protocol and library are checked without a connection."""
    is_model = taker in (SafetensorsStorageWriter, Export)
    refused = "several processes cannot write one file there" if is_model else "ValueError: Protocol not known: abc"
    for url in ("abc://x", "simplecache::abc://x"):
        with pytest.raises(WriteError, match=f"{url}: {refused}"):
            taker(url)
    for url in ("gs://b/x", "memory://x", "simplecache::s3://b/x") if is_model else ():
        with pytest.raises(WriteError, match=f"^{url}: {refused}"):
            taker(url)
    register("shelves", shelf=f"{__name__}:fails", rack=f"{__name__}:is_not_there")
    taker("shelf://a")
    with pytest.raises(WriteError, match=r"cannot open rack://a with .*:is_not_there: AttributeError: "):
        taker("rack://a")


@pytest.mark.parametrize("url", ["s3://bucket/x", "sftp://127.0.0.1/x"])
def test_an_option_that_the_library_does_not_know(url: str) -> None:
    """The error of an unknown option names the option and shows no value."""
    with pytest.raises(CheckpointError, match=r"unexpected keyword argument 'pasword'") as caught:
        open_storage(url, {"pasword": "hunter2-hunter2"}).read(".metadata")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("path", ["a\0b", "/\ud800"])
def test_what_cannot_be_a_files_name(path: str) -> None:
    """An empty path and one with a NUL byte are errors that show the path."""
    with pytest.raises(WriteError, match="is not a valid path: "):
        open_storage(path)


def test_a_relative_path_without_a_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a working directory, a relative path is an error and an absolute path is not."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(WriteError, match="'a' is a relative path, and there is no working directory"):
        open_storage("a")
    assert open_storage(str(tmp_path)).path == str(tmp_path)


def test_a_location_has_the_credentials_that_a_path_leaves_out() -> None:
    """Another process can open the location, and the path shows no credentials."""
    storage = open_storage("memory://user:hunter2@bucket/checkpoint")
    assert storage.location == "memory://user:hunter2@bucket/checkpoint"
    assert storage.path == "memory://bucket/checkpoint"


@pytest.mark.parametrize(
    ("url", "path"),
    [("s3://b/run/", "s3://b/run"), ("s3://b/", "s3://b"), ("memory://", "memory://"), ("memory://x//", "memory://x")],
)
def test_trailing_slashes_are_dropped(url: str, path: str) -> None:
    """Trailing slashes are removed, except for the root of a filesystem."""
    storage = open_storage(url)
    assert (storage.path, storage.location) == (path, path)
    assert open_storage(url).child("step-1").path == f"{path}/step-1"
    assert open_storage("file:///").path == "/"


@pytest.mark.parametrize(
    ("path", "valid"),
    [
        *((path, True) for path in ("x", "/tmp/x", "~/x", "with space/x", "c:\\x", "C:/x", "x://", "a::b", "file:/x")),
        *((path, True) for path in (Path("x"), Path("abc://x"), "file:///x", "local:///x", "memory://x", "s3://b/x")),
        *((path, True) for path in ("gs://b/x", "az://c/x", "sftp://h/x", "simplecache::memory://x")),
        *((path, False) for path in ("abc://x", "ABC://x", "S3://b/x", "simplecache::abc://x", "abc::memory://x")),
        *((path, False) for path in ("", None, 3, b"x", ["x"])),
    ],
)
def test_what_a_checkpoint_may_be_called(path: Any, valid: bool) -> None:
    """Paths and URLs of known protocols are locations. The check connects to nothing and needs no library."""
    for kind in (TensorizerStorageWriter, TensorizerStorageReader):
        assert kind.validate_checkpoint_id(path) is valid
    if not isinstance(path, str) or path.startswith(("gs:", "az:", "sftp:", "simplecache:")):
        return  # these torch opens: a library may be missing, a server not answer, and a cache leaves a directory
    theirs = [FileSystemWriter.validate_checkpoint_id(path)]
    if path:  # for an empty one, its two writers do not agree
        theirs.append(FsspecWriter.validate_checkpoint_id(path))
    assert valid is any(theirs)


def test_the_parent_of_what_a_link_leads_to(tmp_path: Path) -> None:
    """``link/..`` is the parent of the link's target. Other paths stay as they are."""
    (tmp_path / "run" / "sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "run" / "sub")
    assert open_storage(f"{tmp_path}/link/../step").path == os.path.realpath(tmp_path / "run" / "step")
    assert open_storage(f"{tmp_path}/run/../step").path == f"{tmp_path}/step"
    assert open_storage(f"{tmp_path}/link/step").path == f"{tmp_path}/link/step"


# Storages of other packages. Their openers are in this module, by the names that their entry points have.


class Shelf(LocalStorage):
    """A storage that records the arguments of its opener."""

    in_process = True

    def __init__(self, *given: Any) -> None:
        super().__init__(Path("/shelf"))
        self.given = given


def fails(url: str, options: Mapping[str, Any], timeout: float) -> Shelf:
    raise ConnectionError(f"no shelf for {options['password']}")


def forgets(url: str, options: Mapping[str, Any], timeout: float) -> None:
    pass


@pytest.fixture
def register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs a package that registers openers for protocols."""

    def register(package: str, **openers: str) -> None:
        info = tmp_path / package / f"{package}-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
        entries = "".join(f"{protocol} = {opener}\n" for protocol, opener in openers.items())
        (info / "entry_points.txt").write_text(f"[dcp_tensorizer.storages]\n{entries}")
        monkeypatch.setattr(sys, "path", [*sys.path, str(info.parent)])

    return register


@pytest.mark.parametrize("protocol", ["shelf", "s3", "memory"])
def test_a_registered_storage_goes_before_all_others(protocol: str, register: Callable[..., None]) -> None:
    """The opener gets the URL without trailing slashes, the options and the timeout."""
    assert is_location(f"{protocol}://a/b") is (protocol != "shelf")
    register("shelves", **{protocol: f"{__name__}:Shelf"})
    storage = open_storage(f"{protocol}://a/b//", {"key": 1}, 7.0)
    assert isinstance(storage, Shelf)
    assert storage.given == (f"{protocol}://a/b", {"key": 1}, 7.0)
    assert is_location(f"{protocol}://a/b")
    assert not is_location(f"{protocol}ish://a/b")


def test_files_and_chains_are_not_for_other_packages(tmp_path: Path, register: Callable[..., None]) -> None:
    """A package cannot register an opener for local paths or for chains of URLs."""
    register("shelves", file=f"{__name__}:Shelf", local=f"{__name__}:Shelf", simplecache=f"{__name__}:Shelf")
    assert open_storage(f"file://{tmp_path}").path == open_storage(f"local://{tmp_path}").path == str(tmp_path)
    assert not isinstance(open_storage("simplecache::memory://x"), Shelf)


@pytest.mark.parametrize(
    ("opener", "message"),
    [
        ("fails", r"cannot open shelf://a with .*:fails: ConnectionError: no shelf for \*\*\*$"),
        ("forgets", r"cannot open shelf://a: .*:forgets must return a Storage, got NoneType$"),
        ("is_not_there", r"cannot open shelf://a with .*:is_not_there: AttributeError: "),
    ],
)
def test_a_registered_storage_that_cannot_be_opened(opener: str, message: str, register: Callable[..., None]) -> None:
    """The error of an opener names the URL and the opener, and shows no option."""
    register("shelves", shelf=f"{__name__}:{opener}")
    with pytest.raises(WriteError, match=message):
        open_storage("shelf://a", {"password": "swordfish"})


def test_two_packages_for_one_protocol(register: Callable[..., None]) -> None:
    """Two packages that register one protocol are an error that names both. One package installed twice is not."""
    register("shelves", shelf=f"{__name__}:Shelf")
    register("same", shelf=f"{__name__}:Shelf")
    assert isinstance(open_storage("shelf://a"), Shelf)
    register("racks", shelf=f"{__name__}:fails")
    with pytest.raises(WriteError, match=r"registered by .*:Shelf of shelves and .*:fails of racks. Uninstall all but"):
        open_storage("shelf://a")
    assert is_location("shelf://a")


def test_a_folder_is_not_flushed_to_the_memory_of_one_process(register: Callable[..., None]) -> None:
    """A flush to this process's memory is refused, because the writer process cannot reach that memory."""
    register("shelves", shelf=f"{__name__}:Shelf")
    with pytest.raises(WriteError, match="shelf://a is in the memory of one process, but another process flushes"):
        FlushTarget("/local", "shelf://a", {}).open("step-1")
