"""`ProcessContext`: what a save takes from its process, and how another process applies it."""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcp_tensorizer._runtime.process_context import ProcessContext, current_umask, environment


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restores the umask, the working directory and the environment."""
    mask, directory = os.umask(0o022), os.getcwd()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", os.environ.copy())
        yield
    os.umask(mask)
    os.chdir(directory)


@pytest.mark.usefixtures("restored")
def test_another_process_applies_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`apply` sets, changes and removes variables, except the excluded ones, and applies umask and directory."""
    for name in ("KEY", "GONE", "KEPT"):
        monkeypatch.setitem(os.environ, name, "of the writer")  # type: ignore[arg-type]
    given = {"KEY": "new", "MORE": "also new", "KEPT": "of the trainer"}
    context = dataclasses.replace(ProcessContext.here(), pid=0, environment=given, umask=0o027, directory=str(tmp_path))
    pickle.loads(pickle.dumps(context)).apply({"KEPT", "PATH"})
    assert {**os.environ} == {"KEY": "new", "MORE": "also new", "KEPT": "of the writer", "PATH": os.environ["PATH"]}
    assert current_umask() == 0o027
    assert os.getcwd() == str(tmp_path)


@pytest.mark.usefixtures("restored")
def test_the_context_does_not_change_its_own_process() -> None:
    """`apply` does nothing in the process of the context, whose settings may have changed since."""
    context = ProcessContext.here()
    os.umask(0o077)
    context.apply()
    assert current_umask() == 0o077


@pytest.mark.usefixtures("restored")
def test_a_removed_working_directory(tmp_path: Path) -> None:
    """If the directory is unknown or was removed, `apply` changes to the root directory."""
    for directory in (None, str(tmp_path / "gone")):
        os.chdir(tmp_path)
        dataclasses.replace(ProcessContext.here(), pid=0, directory=directory).apply()
        assert os.getcwd() == "/"


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(
    ("mask", "expected"), [(0o022, 0o022), (0o077, 0o077), (0o002, 0o002), (0, 0), (0o666, None), (0o777, None)]
)
def test_the_umask_is_read_and_stays(mask: int, expected: int | None) -> None:
    """`current_umask` does not set the umask, and ignores one with which the owner could not open new files."""
    os.umask(mask)
    assert current_umask() == expected
    assert os.umask(mask) == mask


def test_variables_that_another_thread_removes() -> None:
    """`environment` omits a variable that disappears while it reads."""

    class Going(dict[str, str]):
        def get(self, name: str, default: object = None) -> str | None:  # type: ignore[override]
            return None if name == "GONE" else self[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", Going(GONE="1", KEY="2"))
        assert environment() == {"KEY": "2"}


def test_the_representation_hides_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`repr` and `str` of a context show no variable, because messages may contain them."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-nobody-else")
    context = ProcessContext.here()
    assert context.environment["AWS_SECRET_ACCESS_KEY"] == "of-nobody-else"
    assert "of-nobody-else" not in f"{context!r} {context}"
