"""What a save takes from its process, and how another process takes it on."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcp_tensorizer._runtime import process_context
from dcp_tensorizer._runtime.process_context import ProcessContext, current_umask, environment


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The umask, the working directory and the environment are as before in the end."""
    mask, directory = os.umask(0o022), os.getcwd()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", os.environ.copy())
        yield
    os.umask(mask)
    os.chdir(directory)


@pytest.mark.usefixtures("restored")
def test_another_process_takes_all_of_it_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables are set, changed and removed, but for those that the other process keeps."""
    for name in ("KEY", "GONE", "KEPT"):
        monkeypatch.setitem(os.environ, name, "of the writer")  # type: ignore[arg-type]
    given = {"KEY": "new", "MORE": "also new", "KEPT": "of the trainer"}
    context = dataclasses.replace(ProcessContext.here(), pid=0, environment=given, umask=0o027, directory=str(tmp_path))
    pickle.loads(pickle.dumps(context)).take_on({"KEPT", "PATH"})
    assert {**os.environ} == {"KEY": "new", "MORE": "also new", "KEPT": "of the writer", "PATH": os.environ["PATH"]}
    assert current_umask() == 0o027
    assert os.getcwd() == str(tmp_path)


@pytest.mark.usefixtures("restored")
def test_the_process_itself_takes_nothing_on() -> None:
    """What a copy of a writer remembers of an earlier moment must not come back."""
    context = ProcessContext.here()
    os.umask(0o077)
    context.take_on()
    assert current_umask() == 0o077


@pytest.mark.usefixtures("restored")
def test_a_directory_that_is_gone_is_left(tmp_path: Path) -> None:
    """A process that stayed there would be in the directory of another save."""
    for directory in (None, str(tmp_path / "gone")):
        os.chdir(tmp_path)
        dataclasses.replace(ProcessContext.here(), pid=0, directory=directory).take_on()
        assert os.getcwd() == "/"


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002, 0])
def test_the_umask_is_read_and_stays(mask: int) -> None:
    """Other threads make files meanwhile."""
    os.umask(mask)
    assert current_umask() == mask
    assert os.umask(mask) == mask


@pytest.mark.parametrize(
    ("readings", "expected"),
    [
        ([0o022, 0o666, *[0o022] * 7], 0o022),
        ([0o666, 0o666, *[0o022, 0o666] * 3, 0o666], 0o022),
        ([0, 0o022, 0, *[0o022] * 6], 0o022),
        ([0o777] * 9, 0o777),
        ([None, None], None),
    ],
)
def test_a_umask_that_is_set_for_a_moment_is_not_taken(
    readings: list[int | None], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread reads the umask by setting another one: files of that would have the mode 0000."""
    monkeypatch.setattr(process_context, "_read_umask", iter(readings).__next__)
    assert current_umask() == expected


def test_variables_that_another_thread_removes() -> None:
    """One that goes between two readings is left out, and is no error."""

    class Going(dict[str, str]):
        def get(self, name: str, default: object = None) -> str | None:  # type: ignore[override]
            return None if name == "GONE" else self[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", Going(GONE="1", KEY="2"))
        assert environment() == {"KEY": "2"}


def test_nobody_sees_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds keys, and a record's text may come into a message."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-nobody-else")
    context = ProcessContext.here()
    assert context.environment["AWS_SECRET_ACCESS_KEY"] == "of-nobody-else"
    assert "of-nobody-else" not in f"{context!r} {context}"


def test_a_thread_that_reads_the_umask_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As packages do: by setting 0666, and back. Each reading shows the umask of the process."""
    phases, read, mask = (
        itertools.cycle([0o666, 0o666, 0o022, 0o022, 0o022]),
        process_context._read_umask,
        os.umask(0o022),
    )

    def read_meanwhile() -> int | None:
        os.umask(next(phases))
        return read()

    monkeypatch.setattr(process_context, "_read_umask", read_meanwhile)
    try:
        assert {current_umask() for _ in range(20)} == {0o022}
    finally:
        os.umask(mask)
