"""The directory of the keepers' sockets, which belongs to the user alone."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from dcp_tensorizer import WriteError
from dcp_tensorizer._memory.runtime_directory import (
    connect,
    is_own_peer,
    job_name,
    listen,
    remove,
    runtime_directory,
    socket_path,
    sockets_of,
)


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is in the session's runtime directory, or in that of temporary files, with the user's number."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_directory() == tmp_path / "dcp_tensorizer"
    for odd in ("", "relative", str(tmp_path / "missing")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", odd)
        assert runtime_directory().name == f"dcp_tensorizer-keepers-{os.getuid()}"


def test_jobs_have_names_of_their_own() -> None:
    """Jobs in other folders have other names."""
    assert job_name("/a/run") == job_name("/a/run") != job_name("/b/run")
    assert len(job_name("s3://bucket/" + "x" * 1000)) == 16


def test_a_socket_is_found_by_its_job(tmp_path: Path) -> None:
    """A socket is found below a path of any length, and both ends see that the other is of this user."""
    directory = tmp_path / ("d" * 150)
    path = socket_path(directory, "job")
    listener = listen(path)
    with listener:
        assert (directory.stat().st_mode & 0o777, path.parent) == (0o700, directory)
        assert (sockets_of(directory, "job"), sockets_of(directory, "other")) == ([path], [])
        connection = connect(path)
        assert connection is not None
        with connection:
            accepted, _ = listener.accept()
            with accepted:
                assert is_own_peer(accepted)
                assert is_own_peer(connection)


def test_a_socket_of_a_keeper_that_was_killed_goes(tmp_path: Path) -> None:
    """The socket of a killed keeper is removed when a connection is refused."""
    path = socket_path(tmp_path / "d", "job")
    listener = listen(path)
    listener.close()
    assert connect(path) is None
    assert not path.exists()
    assert connect(path) is None


def test_a_keeper_that_takes_no_more_connections(tmp_path: Path) -> None:
    """A stopped keeper counts as alive, and its socket stays."""
    path = socket_path(tmp_path / "d", "job")
    with listen(path), ExitStack() as taken, pytest.raises(TimeoutError, match="takes no more connections"):
        _connect_often(path, taken)
    assert path.exists()


def _connect_often(path: Path, taken: ExitStack) -> None:
    for _ in range(1000):
        connection = connect(path)
        assert connection is not None
        taken.enter_context(connection)


def test_a_directory_that_others_can_write_to(tmp_path: Path) -> None:
    """Such a directory is refused, both to listen and to find keepers."""
    listener = listen(socket_path(tmp_path / "d", "job"))
    listener.close()
    (tmp_path / "d").chmod(0o770)
    with pytest.raises(WriteError, match="not a directory that belongs to this user alone"):
        listen(socket_path(tmp_path / "d", "job"))
    assert sockets_of(tmp_path / "d", "job") == []
    (tmp_path / "link").symlink_to(tmp_path / "d")
    with pytest.raises(WriteError, match="not a directory that belongs to this user alone"):
        listen(socket_path(tmp_path / "link", "job"))


def test_no_directory(tmp_path: Path) -> None:
    """Without a directory no keepers are found."""
    assert sockets_of(tmp_path / "missing", "job") == []
    with pytest.raises(WriteError, match=r"cannot be made: .* Set XDG_RUNTIME_DIR to a directory"):
        listen(socket_path(tmp_path / "missing" / "deeper", "job"))


def test_the_last_socket_takes_the_directory_with_it(tmp_path: Path) -> None:
    """The directory goes with the last socket, also if the trainer removes that of a killed keeper."""
    paths = [socket_path(tmp_path / "d", "job") for _ in range(2)]
    for path in paths:
        listen(path).close()
    remove(paths[0])
    assert paths[1].exists()
    remove(paths[1])
    remove(paths[1])
    assert not (tmp_path / "d").exists()
