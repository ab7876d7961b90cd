"""`install` replaces torch's storage in a process, and `uninstall` reverts that."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from dcp_tensorizer import (
    LoadPlanner,
    SavePlanner,
    TensorizerStorageReader,
    TensorizerStorageWriter,
    install,
    installed,
    uninstall,
)
from dcp_tensorizer._index.container import is_index
from dcp_tensorizer._runtime.torch_compat import FsspecWriter
from dcp_tensorizer.integrations.install import run
from dcp_tensorizer.reader import LoadReport

from ..lab.processes import run_python
from ..lab.waiting import WAIT, Gate, HeldPlanner, in_thread, wait_until_inside

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

async_save = dcp.async_save  # bound before anything is installed, as frameworks bind it


class OfAFramework(DefaultLoadPlanner):
    """A subclass of torch's planner."""


def options_of(writer: object) -> set[str]:
    """Returns the options in a writer's representation, such as ``sha256=True``."""
    return set(repr(writer).rstrip(")").split(", "))


@pytest.fixture
def ours() -> Iterator[None]:
    with installed():
        yield


def state(value: float = 0.0) -> dict[str, object]:
    return {"w": torch.full((100,), value), "step": int(value)}


def is_ours(path: Path) -> bool:
    return is_index((path / ".metadata").read_bytes())


def loaded(path: Path, **options: object) -> object:
    target = state()
    dcp.load(target, **(options or {"checkpoint_id": path}))  # type: ignore[arg-type]
    assert target["w"].unique().tolist() == [float(target["step"])]  # type: ignore[attr-defined,arg-type]
    return target["step"]


@pytest.mark.usefixtures("ours")
def test_saves_without_a_storage(tmp_path: Path) -> None:
    """Saves and loads with only a checkpoint_id use this package, also by functions imported before."""
    dcp.save(state(1), checkpoint_id=tmp_path / "a")
    dcp.async_save(state(2), checkpoint_id=tmp_path / "b").result()
    async_save(state(3), checkpoint_id=str(tmp_path / "c")).result()
    assert [loaded(tmp_path / name) for name in "abc"] == [1, 2, 3]
    assert all(is_ours(tmp_path / name) for name in "abc")


@pytest.mark.usefixtures("ours")
def test_saves_by_a_writer_that_a_framework_makes(tmp_path: Path) -> None:
    """A FileSystemWriter with torch's arguments saves with this package, and passes for torch's."""
    for value in (1, 2):
        writer = FileSystemWriter(tmp_path, single_file_per_rank=True, sync_files=False, thread_count=2)
        dcp.async_save(state(value), storage_writer=writer).result()
    assert isinstance(writer, FileSystemWriter)
    assert isinstance(writer, TensorizerStorageWriter)
    assert writer.path == tmp_path
    assert options_of(writer) >= {"sync_files=False", "thread_count=2"}
    reader = FileSystemReader(tmp_path)
    assert isinstance(reader, FileSystemReader)
    assert reader.path == tmp_path
    assert is_ours(tmp_path)
    assert loaded(tmp_path, storage_reader=reader) == 2
    assert "w" in reader.read_metadata().state_dict_metadata


@pytest.mark.usefixtures("ours")
def test_saves_and_loads_without_a_planner_are_planned_by_ours(tmp_path: Path) -> None:
    """Saves and loads without a planner use this package's, and other planners stay."""
    dcp.save({"w": torch.ones(2), "by number": {1: 0.5}}, checkpoint_id=tmp_path)
    found: dict[str, Any] = {"w": torch.zeros(2), "by number": {1: 0.0}}
    dcp.load(found, checkpoint_id=tmp_path)
    assert found["by number"] == {1: 0.5}
    given = {"w": torch.zeros(2), "by number": {1: 0.0}}
    dcp.load(given, checkpoint_id=tmp_path, planner=OfAFramework())
    assert given["by number"] == {1: 0.0, "1": 0.5}


def test_planners_that_frameworks_make() -> None:
    """DefaultSavePlanner and DefaultLoadPlanner make this package's planners until `uninstall`."""
    with installed():
        saves, loads = DefaultSavePlanner(False, dedup_save_to_lowest_rank=True), DefaultLoadPlanner(False)
        copied = copy.deepcopy(saves)
    assert (type(saves), type(loads), type(copied)) == (SavePlanner, LoadPlanner, SavePlanner)
    assert [planner.flatten_state_dict for planner in (saves, loads, copied)] == [False] * 3
    assert copied.dedup_save_to_lowest_rank
    assert (type(DefaultSavePlanner()), type(DefaultLoadPlanner(True))) == (DefaultSavePlanner, DefaultLoadPlanner)


@pytest.mark.usefixtures("ours")
def test_object_stores_and_other_urls(tmp_path: Path) -> None:
    """A checkpoint_id may be a URL, for which torch would use its FsspecWriter."""
    dcp.save(state(5), checkpoint_id="memory://install/checkpoint")
    assert loaded(tmp_path, checkpoint_id="memory://install/checkpoint") == 5
    assert loaded(tmp_path, storage_reader=TensorizerStorageReader("memory://install/checkpoint")) == 5


def test_a_job_changes_its_storage_and_goes_back(tmp_path: Path) -> None:
    """Checkpoints of torch load while installed, and `uninstall` brings torch's storage back."""
    dcp.save(state(1), checkpoint_id=tmp_path / "before")
    with installed():
        assert loaded(tmp_path / "before") == 1
        dcp.save(state(2), checkpoint_id=tmp_path / "during")
    dcp.save(state(3), checkpoint_id=tmp_path / "after")
    assert [is_ours(tmp_path / name) for name in ("before", "during", "after")] == [False, True, False]
    assert type(FileSystemWriter(tmp_path)) is FileSystemWriter
    assert type(FileSystemReader(tmp_path)) is FileSystemReader
    assert loaded(tmp_path / "after") == 3
    uninstall()


@pytest.mark.usefixtures("ours")
def test_subclasses_of_torchs_stay_what_they_are(tmp_path: Path) -> None:
    """Subclasses of torch's storage are not replaced."""
    writers = [FsspecWriter(str(tmp_path)), HuggingFaceStorageWriter(str(tmp_path))]
    assert [type(writer) for writer in writers] == [FsspecWriter, HuggingFaceStorageWriter]
    dcp.async_save(state(6), storage_writer=FsspecWriter(str(tmp_path))).result()
    assert not is_ours(tmp_path)
    assert loaded(tmp_path) == 6


def attributes_of(made: object) -> dict[str, Any]:
    """Returns the public attributes of an object, without ids, which differ by save."""
    found = {name: getattr(made, name) for name in vars(made) if not name.startswith("_") and not name.endswith("_id")}
    plain = (str, int, Path, type(None))
    return {name: value if isinstance(value, plain) else type(value) for name, value in found.items()}


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_what_is_made_instead_has_the_attributes_of_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replacements have the attributes and values of torch's own objects."""

    def attributes(folder: str) -> list[dict[str, Any]]:
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        writer = FileSystemWriter("a", False, sync_files=False, thread_count=2, per_thread_copy_ahead=5, overwrite=True)
        reader = FileSystemReader("a")
        found = [attributes_of(each) for each in (writer, reader, DefaultSavePlanner(), DefaultLoadPlanner())]
        for checkpoint_id in (None, "b"):
            dcp.save(state(), storage_writer=writer, checkpoint_id=checkpoint_id)
            dcp.load(state(), storage_reader=reader, checkpoint_id=checkpoint_id)
            found += [attributes_of(writer), attributes_of(reader)]
        return found

    theirs = attributes("theirs")
    with installed():
        ours = attributes("ours")
    assert theirs[0]["thread_count"] == 2
    assert [{name: found.get(name) for name in names} for names, found in zip(theirs, ours, strict=True)] == theirs


@pytest.mark.parametrize("checkpoint_id", ["abc://a/b", "", None])
def test_an_id_that_no_storage_knows(checkpoint_id: str | None) -> None:
    """An unknown checkpoint_id raises torch's own error, which is an Exception."""

    def errors() -> list[tuple[type, str]]:
        found = []
        for call in (dcp.save, dcp.load, lambda *given, **named: dcp.async_save(*given, **named).result(WAIT)):
            with pytest.raises(RuntimeError) as caught:
                call(state(), checkpoint_id=checkpoint_id)
            found.append((type(caught.value), str(caught.value)))
        return found

    theirs = errors()
    with installed():
        assert errors() == theirs


@pytest.mark.usefixtures("ours")
def test_torchs_own_tools_read_it(tmp_path: Path) -> None:
    """`dcp_to_torch_save`, which makes a FileSystemReader, reads checkpoints of this package."""
    dcp.save(state(7), checkpoint_id=tmp_path / "checkpoint")
    dcp_to_torch_save(tmp_path / "checkpoint", tmp_path / "file.pt")
    content = torch.load(tmp_path / "file.pt")
    assert content["w"].unique().tolist() == [7.0]
    assert content["step"] == 7


def test_options_reach_all_writers_and_readers(tmp_path: Path) -> None:
    """Options apply to all writers and readers, and another `install` changes them."""
    reports: list[LoadReport] = []
    with installed(writer_options={"sync_files": False, "sha256": True}, reader_options={"on_report": reports.append}):
        writer = FileSystemWriter(tmp_path)
        assert options_of(writer) >= {"sync_files=False", "sha256=True"}
        dcp.save(state(1), checkpoint_id=tmp_path / "checkpoint")
        assert loaded(tmp_path / "checkpoint") == len(reports) == 1
        install(writer_options={"overwrite": False})
        assert "overwrite=False" in options_of(FileSystemWriter(tmp_path))
        with pytest.raises(TypeError, match="no_such"):
            install(reader_options={"no_such": 1})
        with pytest.raises(ValueError, match=r"'local'.*save with CheckpointManager\(local=\.\.\.\)"):
            install(writer_options={"path": tmp_path, "local": tmp_path / "local"})
        assert "overwrite=False" in options_of(FileSystemWriter(tmp_path))


def test_what_a_framework_says_goes_before_the_options(tmp_path: Path) -> None:
    """Arguments of a FileSystemWriter override the options, even torch's defaults."""
    with installed(writer_options={"sync_files": False, "overwrite": False, "thread_count": 3}):
        options = options_of(FileSystemWriter(tmp_path, sync_files=True, overwrite=True, thread_count=1))
        others = options_of(FileSystemWriter(tmp_path, True))
    assert options >= {"sync_files=True", "overwrite=True", "thread_count=1"}
    assert others >= {"sync_files=False", "overwrite=False", "thread_count=3"}


class Inverted(StreamTransformExtension):
    """An encoding of torch's streams that inverts every bit."""

    @staticmethod
    def registry_name() -> str:
        return "stream.inverted"

    @staticmethod
    def from_descriptor(version: str) -> Inverted:
        return Inverted()

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return InvertedOutput(output)  # type: ignore[return-value]

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002  (torch's name)
        return io.BytesIO(bytes(byte ^ 0xFF for byte in input.read()))


class InvertedOutput(io.RawIOBase):
    def __init__(self, output: IO[bytes]) -> None:
        self.output = output

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self.output.write(bytes(byte ^ 0xFF for byte in bytes(data)))


def test_what_torch_has_encoded_is_decoded(tmp_path: Path) -> None:
    """The extensions of a FileSystemReader decode what torch's writer encoded."""
    dcp.save(state(9), storage_writer=FileSystemWriter(tmp_path, _extensions=[Inverted()]))
    registry = ExtensionRegistry()
    registry.register(Inverted)
    with installed():
        assert loaded(tmp_path, storage_reader=FileSystemReader(tmp_path, _extension_registry=registry)) == 9
        assert loaded(tmp_path, storage_reader=FileSystemReader(tmp_path, registry)) == 9


@pytest.mark.usefixtures("ours")
def test_it_may_be_installed_for_a_while_where_it_is_installed(tmp_path: Path) -> None:
    """After a nested `installed` block, the previous options are back."""
    install(writer_options={"sha256": True})
    with installed(writer_options={"sync_files": False}):
        assert "sha256=False" in options_of(FileSystemWriter(tmp_path))
    assert options_of(FileSystemWriter(tmp_path)) >= {"sync_files=True", "sha256=True"}


@pytest.mark.usefixtures("ours")
def test_arguments_without_a_meaning_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Arguments that have no effect and would change the content are logged once."""
    for _ in range(2):
        FileSystemWriter(tmp_path, per_thread_copy_ahead=1, _extensions=[])
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "FileSystemWriter(_extensions=...) has no effect in dcp_tensorizer, and is ignored"
    ]


@pytest.mark.usefixtures("ours")
def test_a_pickled_writer_is_one_of_ours(tmp_path: Path) -> None:
    """A pickled writer is unpickled as this package's, also where nothing is installed."""
    sent = pickle.dumps(FileSystemWriter(tmp_path))
    uninstall()
    writer = pickle.loads(sent)
    dcp.save(state(8), storage_writer=writer)
    assert is_ours(tmp_path)


def test_what_torch_has_made_is_copied_as_it_is(tmp_path: Path) -> None:
    """Writers and readers from before `install`, and their copies, stay torch's."""
    writer, reader = FileSystemWriter(tmp_path), FileSystemReader(tmp_path)
    with installed():
        copies = [copy.copy(writer), copy.deepcopy(reader), pickle.loads(pickle.dumps(reader))]
    assert [type(each) for each in copies] == [FileSystemWriter, FileSystemReader, FileSystemReader]


def test_training_waits_for_what_another_writer_saves(tmp_path: Path) -> None:
    """Training waits for the state's copy also if another writer saves it."""
    gate = Gate()
    shared = {"w": torch.full((100,), 1.0).share_memory_(), "step": 1}
    with installed(writer_options={"staging": "shared"}):
        saving = in_thread(lambda: dcp.async_save(shared, checkpoint_id=tmp_path, planner=HeldPlanner(gate)))
        gate.wait_reached()
        wait_until_inside(saving, TensorizerStorageWriter.synchronize_staging)
        gate.open()
        saving.join(WAIT)
        shared["w"].fill_(2.0)  # type: ignore[attr-defined]
    assert loaded(tmp_path, storage_reader=TensorizerStorageReader(tmp_path)) == 1


def test_uninstall_waits_for_saves_without_a_writer(tmp_path: Path) -> None:
    """`uninstall` waits for saves without a writer that are in progress."""
    gate = Gate()
    with installed():
        future = dcp.async_save(state(4), checkpoint_id=tmp_path, planner=HeldPlanner(gate))
        gate.wait_reached()
        ending = in_thread(uninstall)
        wait_until_inside(ending, TensorizerStorageWriter.close)
        gate.open()
        ending.join(WAIT)
        assert future.done()
    assert is_ours(tmp_path)


SCRIPT = """
import sys
import torch, torch.multiprocessing as mp
import torch.distributed.checkpoint as dcp

class Local: pass  # the script's own names are in its main module

def work(number, path):
    dcp.save({"w": torch.ones(3), "n": 1}, checkpoint_id=f"{path}/{number}")

if __name__ == "__main__":
    assert sys.argv[1:] == [sys.argv[1], "--flag"] and Local.__module__ == "__main__", sys.argv
    assert "run" not in globals()
    work("main", sys.argv[1])
    mp.spawn(work, (sys.argv[1],), nprocs=1)
"""


@pytest.mark.parametrize("how", ["script", "module", "package"])
def test_running_a_script_unchanged(tmp_path: Path, how: str) -> None:
    """`python -m dcp_tensorizer.run` runs scripts, modules, packages and the processes that they spawn."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "__init__.py").write_text("")
    (tmp_path / "job" / "__main__.py").write_text(SCRIPT)
    what = {"script": "job/__main__.py", "module": "-m job.__main__", "package": "-m job"}[how]
    launch = f"""
import os, subprocess, sys
os.chdir({str(tmp_path)!r})
command = [sys.executable, "-m", "dcp_tensorizer.run", *{what.split()!r}, {str(tmp_path)!r}, "--flag"]
sys.exit(subprocess.run(command).returncode)
"""
    done = run_python(launch, fresh=True)
    assert done.returncode == 0, done.stderr
    assert is_ours(tmp_path / "main")
    assert is_ours(tmp_path / "0")


def run_by_arguments(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["dcp_tensorizer.run", *arguments])
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # as the interpreter begins
    monkeypatch.setenv("DCP_TENSORIZER_RUN_MODULE", "")
    monkeypatch.setenv("DCP_TENSORIZER_RUN_SCRIPT", "")
    run({"__name__": "__main__"})


def test_running_a_package_that_cannot_be_imported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that cannot be imported is an error with the reason."""
    (tmp_path / "broken_job").mkdir()
    (tmp_path / "broken_job" / "__init__.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit, match=r"cannot run a module named broken_job.*No module named 'no_such_dependency'"):
        run_by_arguments(["-m", "broken_job"], monkeypatch)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "usage"),
        (["--flag"], "usage"),
        (["nowhere.py"], "cannot be read"),
        (["-m", "no.such"], "cannot run a module named no.such"),
    ],
)
def test_running_nothing_says_how(arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing or wrong argument is one line of usage, without importing torch."""
    with pytest.raises(SystemExit, match=words):
        run_by_arguments(arguments, monkeypatch)
