"""The modules that the writer process finds: the trainer's, but never instead of the standard library's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dcp_tensorizer._runtime.channel import Ready
from dcp_tensorizer._runtime.child import environment, interpreter
from dcp_tensorizer._runtime.threads import ProgressTimeout
from dcp_tensorizer._writer_process.client import WriterProcess

from ...lab.processes import PACKAGE, ROOT
from ...lab.waiting import WAIT

# Where modules were found; and those that the trainer's directories have taken the place of.
PROBE = """
import json, os, sys
def main(arguments):
    import fsspec, queue, random, types, xxhash
    import dcp_tensorizer
    modules = {name: os.path.dirname(sys.modules[name].__file__) for name in arguments}
    print(json.dumps([modules, sys.path]))
"""
SHADOWS = ["queue", "random", "types", "runpy", "sitecustomize", "usercustomize", "xxhash"]


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """Returns a directory with modules named like others, which leave a mark when they run."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    for name in SHADOWS:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})")
    (folder / "fsspec").mkdir()
    (folder / "fsspec" / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('fsspec')")
    (folder / "probe.py").write_text(PROBE)
    return folder


def found(*names: str, module: str = "probe") -> dict[str, str]:
    done = subprocess.run(
        [*interpreter(), module, *names], env=environment(devices=False), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    modules: dict[str, str] = json.loads(done.stdout)[0]
    return modules


@pytest.mark.parametrize("way", ["behind", "in front", "PYTHONPATH", "working directory"])
def test_the_trainers_modules_take_nobodys_place(
    tmp_path: Path, scripts: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The standard library is the interpreter's, and the trainer's modules are found where the trainer found them."""
    if way == "working directory":
        monkeypatch.chdir(scripts)
    if way == "PYTHONPATH":
        monkeypatch.setenv("PYTHONPATH", str(scripts))
    entry = "" if way == "working directory" else str(scripts)
    monkeypatch.setattr(sys, "path", [*sys.path, entry] if way == "behind" else [entry, *sys.path])
    library = os.path.dirname(os.__file__)
    places = found("queue", "random", "fsspec", "dcp_tensorizer", "probe")
    assert places == {
        "queue": library,
        "random": library,
        "fsspec": os.path.dirname(str(sys.modules["fsspec"].__file__)),
        "dcp_tensorizer": str(PACKAGE),
        "probe": str(scripts),
    }
    assert not (tmp_path / "ran").exists()


def test_modules_in_an_archive_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules in a zip file on the trainer's path are found."""
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("zipped_probe.py", PROBE)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "archive.zip")])
    assert found("zipped_probe", module="zipped_probe") == {"zipped_probe": str(tmp_path / "archive.zip")}


PLUGIN_PROBE = """
def main(arguments):
    import dcp_tensorizer
    from fsspec.registry import known_implementations
    from dcp_tensorizer._storage.open import open_storage
    print(dcp_tensorizer.__file__, known_implementations["mine"]["class"], open_storage("ours://a/b").root)
"""
PLUGIN = """
from dcp_tensorizer.storage import Storage
class Ours(Storage):
    child = listing = create = put = read = head = open = remove = None
    def __init__(self, url, options, timeout):
        self.root = url
"""
TRAINER = """
import subprocess
from dcp_tensorizer._runtime.child import environment, interpreter
subprocess.run([*interpreter(), "plugin_probe"], env=environment(False), check=True)
"""


def test_several_installations_and_a_plugin(tmp_path: Path) -> None:
    """The package is the one that the trainer found by PYTHONPATH, and entry points beside it are found."""
    other = tmp_path / "other"
    shutil.copytree(PACKAGE, other / "dcp_tensorizer")
    (other / "plugin_probe.py").write_text(PLUGIN_PROBE)
    plugin = other / "a_plugin-1.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: a_plugin\nVersion: 1\n")
    entries = "[fsspec.specs]\nmine = a_plugin:Mine\n[dcp_tensorizer.storages]\nours = a_plugin:Ours\n"
    (plugin / "entry_points.txt").write_text(entries)
    (other / "a_plugin.py").write_text(PLUGIN)
    done = subprocess.run(
        [sys.executable, "-c", TRAINER],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(other), str(ROOT)])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [str(other / "dcp_tensorizer" / "__init__.py"), "a_plugin.Mine", "ours://a/b"], (
        done.stderr
    )


def test_a_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process starts without its working directory, and ignores relative entries of the path."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    monkeypatch.setattr(sys, "path", ["", "relative", *sys.path])
    process = WriterProcess()
    try:
        process._channel.wait_readable(ProgressTimeout(WAIT, 1.0))
        assert process._channel.receive() == (Ready(), [])
    finally:
        process.close()
