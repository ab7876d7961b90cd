"""The command line: its output, for people and for scripts, and its exit codes."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from datetime import datetime
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors.torch import load_file
from tensorizer import EncryptionParams

from dcp_tensorizer import CheckpointManager, TensorizerStorageWriter
from dcp_tensorizer._cli import app
from dcp_tensorizer._storage.base import Storage
from dcp_tensorizer._storage.local import LocalStorage
from dcp_tensorizer._tensor_file import encryption
from dcp_tensorizer._tensor_file.encryption import encryption_cipher
from dcp_tensorizer._tensor_file.names import data_file_name
from dcp_tensorizer._version import environment
from dcp_tensorizer.tools import Collected, _find, _gc
from dcp_tensorizer.tools._gc import Removal
from dcp_tensorizer.tools._view import read_parts
from dcp_tensorizer.trace import TraceFile

from ... import warm
from ...lab.checkpoints import ODD, make_checkpoint
from ...lab.processes import run_python
from ...lab.states import filled, raw


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tensors = {
        "model.half": filled(torch.bfloat16, (5, 4)),
        "model.columns": filled(torch.float32, (5, 4), 1),
        "optim.step": torch.tensor(3.0),
    }
    chunks = {f"model.{key}": regions for key, regions in ODD.items()}
    return make_checkpoint(tmp_path / "run" / "step-7", tensors, {"optim.lr": 0.5, "note": "a\x1b[31mb"}, chunks)


def run(*arguments: str | Path) -> tuple[int, str, str]:
    """Runs a command; returns the exit code, stdout and stderr."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = app.run([str(argument) for argument in arguments])
    return code, out.getvalue(), err.getvalue()


def told(*arguments: str | Path, code: int = 0) -> object:
    """Returns the JSON document of a command."""
    exit_code, out, _ = run(*arguments, "--json")
    assert exit_code == code
    return json.loads(out)


def test_ls(checkpoint: Path) -> None:
    """`ls` shows a line per checkpoint, with its name, state and numbers."""
    code, out, _ = run("ls", checkpoint.parent)
    assert code == 0
    assert out.splitlines()[1].split()[:2] == ["step-7", "committed"]
    assert out.splitlines()[1].split()[-2:] == ["2", "3"]
    (found,) = told("ls", checkpoint.parent)  # type: ignore[misc]
    assert (found["step"], found["state"], found["objects"]) == (7, "committed", 2)


def test_metrics(tmp_path: Path) -> None:
    """`ls` and `inspect` show a manager's metrics, and mark the checkpoint that ``keep_best`` retains."""
    recorded: list[dict[str, float]] = [{"loss": 0.5, "accuracy": 0.875}, {"loss": 0.75}, {}]
    with CheckpointManager(tmp_path, stop_signals=(), keep_best="loss", keep_latest=2) as manager:
        for step, metrics in enumerate(recorded, 1):
            manager.save(step, {"w": torch.ones(4)}, metrics=metrics, wait=True)
    _, out, _ = run("ls", tmp_path)
    head, *rows = out.splitlines()
    assert head.split()[-1] == "metrics"
    assert [row[head.index("metrics") :] for row in rows] == ["", "loss 0.75", "accuracy 0.875, loss 0.5 (best)"]
    assert [row["best"] for row in told("ls", tmp_path)] == [None, None, "loss"]  # type: ignore[attr-defined, index]
    assert "step 1: accuracy 0.875, loss 0.5 (best)\n" in run("inspect", tmp_path / "step-1")[1]
    assert "step 3\n" in run("inspect", tmp_path / "step-3")[1]
    found = told("inspect", tmp_path / "step-2")
    assert (found["step"], found["metrics"], found["best"]) == (2, {"loss": 0.75}, None)  # type: ignore[call-overload, index]


@pytest.fixture
def in_tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sets the time zone to one that is ahead of UTC."""
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("written", "told_as"),
    [(300_000_000_000, None), (253_402_300_799, "9999-12-31T23:59:59.000+00:00")],
    ids=["in 11476", "at the end of 9999"],
)
def test_times_beyond_the_year_9999(in_tokyo: None, written: int, told_as: str | None) -> None:
    """A file's time beyond the year 9999, in UTC or in local time, does not stop `ls` and `gc`."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # disks have no such times
        file = Path(folder, "step-1", data_file_name(0, 0, "a" * 32))
        file.parent.mkdir()
        file.touch()
        os.utime(file, (written, written))
        code, out, _ = run("ls", folder)
        assert (code, out.splitlines()[1].split()[:3]) == (0, ["step-1", "unfinished", "-"])
        assert told("ls", folder)[0]["saved"] == told_as  # type: ignore[index]
        assert run("gc", folder, "--older-than", "0s")[0] == 0
        assert not file.exists()


def test_an_int_that_python_does_not_write_is_not_shown(tmp_path: Path) -> None:
    """An int of more digits than Python converts to a string has no value in the output, and is compared."""
    for name, number in (("a", 1 << 20_000), ("b", 3 << 20_000)):
        make_checkpoint(tmp_path / name, {}, {"huge": number, "small": 7})
    (huge, small) = told("inspect", tmp_path / "a")["objects"]  # type: ignore[index]
    assert (huge["type"], huge["text"], huge["value"]) == ("int", "cannot be shown: ValueError", None)
    assert small["value"] == 7
    assert "cannot be shown" in run("inspect", tmp_path / "a")[1]
    assert [change["key"] for change in told("diff", tmp_path / "a", tmp_path / "b", code=1)["changed"]] == ["huge"]  # type: ignore[index]


def test_inspect(checkpoint: Path) -> None:
    """`inspect` shows every tensor in full in a pipe, and escapes control sequences of a terminal."""
    code, out, _ = run("inspect", checkpoint)
    assert code == 0
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}
    assert rows["model.half"] == ["5", "x", "4", "bfloat16", "40", "B", "2", "0-1"]
    assert rows["optim.step"][:2] == ["scalar", "float32"]
    assert rows["optim.lr"][:2] == ["float", "0.5"]
    assert "\x1b" not in out and "x1b[31mb" in out
    assert rows["model"][:2] == ["2", "40"]
    found = told("inspect", checkpoint, "model.*")
    assert [tensor["key"] for tensor in found["tensors"]] == ["model.half", "model.columns"]  # type: ignore[index]
    assert [chunk["offset"] for chunk in found["tensors"][1]["chunks"]] == [[0, 0], [0, 1]]  # type: ignore[index]
    code, out, _ = run("inspect", checkpoint, "model.half", "--chunks")
    assert out.count(".tensors") == 4


def test_verify(checkpoint: Path) -> None:
    """`verify` has exit code 0 and shows ok, or 1 and shows the damage."""
    code, out, _ = run("verify", checkpoint, "--full")
    assert (code, out.startswith("ok: 2 files, 7 items")) == (0, True)
    path = sorted(checkpoint.glob("*.tensors"))[0]
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 2000)
    code, out, _ = run("verify", checkpoint)
    assert (code, "DAMAGED" in out, path.name in out, "optim.lr" in out) == (1, True, True, True)
    found = told("verify", checkpoint, code=1)
    assert found["damages"][0]["file"] == path.name  # type: ignore[index]


def test_verify_of_a_checkpoint_that_is_replaced(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify` of a checkpoint that is replaced meanwhile has exit code 2."""

    def saved_again(storage: Storage) -> object:
        parts = read_parts(storage)
        monkeypatch.undo()
        for path in checkpoint.glob("*.tensors"):
            path.unlink()
        make_checkpoint(checkpoint, {"w": torch.ones(2)})
        return parts

    monkeypatch.setattr(_find, "read_parts", saved_again)
    code, _, err = run("verify", checkpoint)
    assert (code, "Verify it again" in err) == (2, True)
    assert run("verify", checkpoint)[0] == 0


def test_diff(checkpoint: Path, tmp_path: Path) -> None:
    """`diff` has exit code 0 for equal checkpoints in any chunks, and 1 for different ones."""
    same = {"model.half": filled(torch.bfloat16, (5, 4)), "model.columns": filled(torch.float32, (5, 4), 1)}
    make_checkpoint(tmp_path / "b", same | {"optim.step": torch.tensor(3.0)}, {"optim.lr": 0.5, "note": "a\x1b[31mb"})
    assert told("diff", checkpoint, tmp_path / "b")["same"] == 5  # type: ignore[call-overload, index]
    make_checkpoint(tmp_path / "c", same | {"optim.step": torch.tensor(4.0)}, {"optim.lr": 0.25})
    code, out, _ = run("diff", checkpoint, tmp_path / "c")
    assert code == 1
    assert "0.5 -> 0.25" in out
    assert "different: 2 keys the same, 2 changed, 1 only in A, 0 only in B" in out


def test_convert_and_back(checkpoint: Path, tmp_path: Path) -> None:
    """`convert` passes its options on, and its result converts back."""
    model = ["--include", "model.*", "--strip-prefix", "model."]
    code, out, _ = run("convert", checkpoint, tmp_path / "m.safetensors", "--to", "safetensors", *model)
    assert (code, "2 tensors" in out) == (0, True)
    assert told("convert", tmp_path / "m.safetensors", tmp_path / "back", "--to", "dcp_tensorizer")["tensors"] == 2  # type: ignore[call-overload, index]
    code, out, _ = run("diff", tmp_path / "back", tmp_path / "m.safetensors")
    assert code == 0
    code, _, err = run("convert", checkpoint, tmp_path / "m.safetensors", "--to", "safetensors", *model)
    assert (code, "exists" in err) == (2, True)


def test_gc(checkpoint: Path) -> None:
    """`gc --dry-run` removes nothing, and shows how many bytes would be freed."""
    shutil.copytree(checkpoint, checkpoint.parent / "step-8")
    found = told("gc", checkpoint.parent, "--keep-latest", "1", "--dry-run")
    expected = sum(path.stat().st_size for path in checkpoint.iterdir())
    assert found["bytes"] == expected  # type: ignore[call-overload, index]
    assert checkpoint.exists()
    code, out, _ = run("gc", checkpoint.parent, "--keep-latest", "1")
    assert (code, "1 checkpoint removed: " in out, checkpoint.exists()) == (0, True, False)
    assert run("gc", checkpoint.parent, "--keep-latest", "1") == (0, "nothing removed\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["verify", "nowhere"], "no committed checkpoint"),
        (["ls", "nowhere"], "nowhere does not exist, or is not a directory"),
        (["ls", "nonsense://x"], "nonsense"),
        (["convert", "nowhere", "x", "--to", "torch"], "does not exist"),
        (["convert", "{checkpoint}", "x", "--to", "zip"], "the format must be one of"),
        (["convert", "{checkpoint}", "x", "--to", "safetensors"], "'optim.lr'"),
        (["convert", "{checkpoint}", "x", "--to", "torch", "--from", "dcp"], "format dcp, got dcp_tensorizer"),
        (["convert", "{checkpoint}", "x", "--to", "torch", "--include", "modle.*"], "modle.*"),
        (["convert", "{checkpoint}", "x", "--to", "torch", "--dtype", "int8"], "int8"),
        (["convert", "{checkpoint}", "x", "--to", "torch", "--shard-size", "many"], "many"),
        (["convert", "{checkpoint}", "x", "--to", "safetensors", "--shard-size", "9" * 400], "must be a size like 5GB"),
        (["gc", "{checkpoint}", "--older-than", "9" * 400 + "d"], "must be an age like 12h"),
        (["convert", "{checkpoint}", "x", "--to", "tensorizer", "--split", "nowhere.json"], "--tensor-parallel N"),
        (
            ["convert", "{checkpoint}", "x", "--to", "tensorizer", "--split", "nowhere.json", "--tensor-parallel", "2"],
            "nowhere.json",
        ),
        (["convert", "{checkpoint}", "x", "--to", "safetensors", "--tensor-parallel", "4"], "--tensor-parallel"),
        (["convert", "{checkpoint}", "x", "--to", "dcp", "--shard-size", "1GB"], "--shard-size"),
        (["convert", "{checkpoint}", "x", "--to", "torch", "--buffer", "*.cos"], "--buffer"),
        (["convert", "{checkpoint}", "memory://x", "--to", "torch"], "names no file in a directory"),
        (["convert", "{checkpoint}", "s3://bucket", "--to", "torch"], "names no file in a directory"),
        (["convert", "{checkpoint}", "memory://x/", "--to", "torch"], "names no file in a directory"),
        (["gc", "{checkpoint}", "--older-than", "long"], "long"),
        (["gc", "{checkpoint}", "--keep-latest", "0"], "--keep-latest"),
        (["ls", "memory://x", "--storage-option", "novalue"], "KEY=VALUE"),
        (["ls", "{checkpoint}", "--storage-option", "anon=true"], "--storage-option: has no effect on local paths"),
        (["diff", "{checkpoint}", "{checkpoint}", "--storage-option", "anon=true"], "has no effect on local paths"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(
    checkpoint: Path, arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake has exit code 2 and one line on stderr, and writes nothing."""
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*(argument.format(checkpoint=checkpoint) for argument in arguments))
    assert (code, words in err, "Traceback" in err, out) == (2, True, False, "")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_files_that_are_not_checkpoints(checkpoint: Path, tmp_path: Path) -> None:
    """A file of an unknown kind is refused by name, and a pickled module with advice."""
    (tmp_path / "notes").write_text("of a person")
    torch.save(torch.nn.Linear(1, 1), tmp_path / "module.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for command, *more in (["inspect"], ["verify"], ["report", "-o", tmp_path / "report.html"]):
        code, _, err = run(command, tmp_path / "notes", *more)
        assert (code, "notes" in err) == (2, True)
        code, _, err = run(command, tmp_path / "module.pt", *more)
        assert (code, "save its state dict" in err) == (2, True)
    for command, *more in (["inspect"], ["verify"], ["convert", tmp_path / "new", "--to", "dcp"]):
        code, _, err = run(command, tmp_path / "old.pt", *more)
        assert (code, "load it with torch.load, save it again with torch.save, and convert" in err) == (2, True), err


def test_files_and_folders_of_other_formats(checkpoint: Path, tmp_path: Path) -> None:
    """`verify` and `inspect` read other formats, and `verify` a folder of checkpoints."""
    run("convert", checkpoint, tmp_path / "model.pt", "--to", "torch")
    code, out, _ = run("verify", tmp_path / "model.pt")
    assert (code, out.startswith("ok: 1 file, ")) == (0, True)
    assert out.endswith(
        ". Where the format has no digests, verify checked only the sizes, and that all values can be read\n"
    )
    code, out, _ = run("inspect", tmp_path / "model.pt")
    assert (code, re.search(r"^model\.pt +- ", out, re.MULTILINE) is not None, "saved by" in out) == (0, True, False)
    shutil.copytree(checkpoint, checkpoint.parent / "step-8")
    found = told("verify", checkpoint.parent)
    assert (found["ok"], found["checkpoints"], found["digests"]) == (True, 2, True)
    assert run("verify", checkpoint.parent)[1].startswith("ok: 2 checkpoints, 4 files, ")


def test_damage_is_1_for_every_target(checkpoint: Path, tmp_path: Path) -> None:
    """Damage has exit code 1 for every target, also if DCP wraps the error."""
    max(checkpoint.glob("*.tensors"), key=lambda path: path.stat().st_size).unlink()
    for name in ("dcp", "dcp_tensorizer"):
        code, _, err = run("convert", checkpoint, tmp_path / name, "--to", name)
        assert (code, "is damaged, or was overwritten or removed" in err) == (1, True)


def test_a_copy_that_lacks_a_file_is_not_the_same(checkpoint: Path, tmp_path: Path) -> None:
    """`diff` fails if a data file is missing or truncated, even if all digests are equal."""
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    assert run("diff", checkpoint, copy)[0] == 0
    path = max(copy.glob("*.tensors"), key=lambda path: path.stat().st_size)
    os.truncate(path, 1000)
    code, _, err = run("diff", checkpoint, copy)
    assert (code, f"{path.name} has 1,000 bytes instead of" in err) == (2, True)
    path.unlink()
    code, _, err = run("diff", checkpoint, copy)
    assert (code, f"{path.name} is missing" in err) == (2, True)


def test_missing_permissions(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """A lack of permission is not damage: `verify` has exit code 2, and `ls` logs the directory."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "there")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "open_uncached", refuse)
        code, out, err = run("verify", checkpoint)
        assert (code, out, "Permission denied" in err) == (2, "", True)
    shutil.copytree(checkpoint, checkpoint.parent / "step-8")
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: refuse() if str(path).endswith("step-8") else scan(path))
    assert [found["step"] for found in told("ls", checkpoint.parent)] == [7]  # type: ignore[attr-defined]
    assert "step-8: [Errno 13] Permission denied" in caplog.text


def test_damage_has_exit_code_1(checkpoint: Path, tmp_path: Path) -> None:
    """A command that meets damage has exit code 1, and writes nothing."""
    path = max(checkpoint.glob("*.tensors"), key=lambda path: path.stat().st_size)
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 2000)
    code, _, err = run("convert", checkpoint, tmp_path / "x", "--to", "torch")
    assert (code, path.name in err, (tmp_path / "x").exists()) == (1, True, False)


@pytest.mark.parametrize("to", ["torch", "tensorizer", "safetensors"])
def test_a_damaged_file_of_another_format(checkpoint: Path, tmp_path: Path, to: str) -> None:
    """Each command that reads a truncated file, or one with a damaged index, reports damage."""
    whole, path = tmp_path / "whole.safetensors", tmp_path / "damaged"
    run("convert", checkpoint, whole, "--to", to, "--include", "model.*")
    content = whole.read_bytes()
    name = content.index(b"half")  # in torch's pickle, tensorizer's index or safetensors' header
    for damaged in (
        content[:20],
        content[: len(content) // 2],
        content[:-9],
        content[:name] + b"\xff" + content[name + 1 :],
    ):
        path.write_bytes(damaged)
        for command, *more in (
            ["verify"],
            ["inspect"],
            ["convert", tmp_path / "x", "--to", "safetensors"],
            ["report", "-o", tmp_path / "report.html"],
        ):
            code, _, err = run(command, path, *more)
            assert (code, str(path) in err) == (1, True), (len(damaged), command, err)
    assert run("diff", whole, path)[0] == 2


def test_undamaged_files_that_cannot_be_read(checkpoint: Path, tmp_path: Path) -> None:
    """A compressed torch file, and an encrypted tensorizer file, have exit code 2; one of a newer version has 3."""
    run("convert", checkpoint, tmp_path / "a.pt", "--to", "torch")
    run("convert", checkpoint, tmp_path / "a.tensors", "--to", "tensorizer", "--include", "model.*")
    with zipfile.ZipFile(tmp_path / "a.pt") as a, zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as b:
        for name in a.namelist():
            b.writestr(name, a.read(name))
    content = (tmp_path / "a.tensors").read_bytes()
    (tmp_path / "encrypted.tensors").write_bytes(content[:5] + struct.pack("<IB", 4, 1) + content[10:])
    (tmp_path / "newer.tensors").write_bytes(content[:5] + struct.pack("<I", 99) + content[9:])
    for name, expected in (("b.pt", 2), ("encrypted.tensors", 2), ("newer.tensors", 3)):
        for command in ("verify", "inspect"):
            code, _, err = run(command, tmp_path / name)
            assert (code, name in err) == (expected, True), err


def test_secrets_of_storage_options_are_not_shown() -> None:
    """Messages do not show the values of storage options."""
    code, _, err = run("ls", "memory://nowhere", "--storage-option", "password=hunter22-hunter22")
    assert (code, "hunter22" in err) == (2, False)


def test_as_a_command_as_a_module_and_without_its_libraries(checkpoint: Path, tmp_path: Path) -> None:
    """Without typer, the command line names the extra to install, and ``--version`` works."""
    installed, module = [Path(sys.executable).with_name("dcp-tensorizer")], [sys.executable, "-m", "dcp_tensorizer"]
    for command, words in (([*installed, "verify", checkpoint], "ok: 2 files"), ([*module, "--help"], "convert")):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
        assert words in done.stdout
    (tmp_path / "typer.py").write_text("raise ImportError('no typer', name='typer')")
    missing = "dcp-tensorizer needs typer: pip install 'dcp_tensorizer[cli]'\n"
    for arguments, expected in ((["ls", "."], (2, "", missing)), (["--version"], (0, f"{environment()}\n", ""))):
        env = os.environ | {"PYTHONPATH": str(tmp_path)}
        done = subprocess.run([*module, *arguments], capture_output=True, text=True, timeout=600, env=env, check=False)
        assert (done.returncode, done.stdout, done.stderr) == expected


KEY = bytes(range(32))


@pytest.fixture
def encrypted(tmp_path: Path) -> Path:
    made = EncryptionParams.from_string("open sesame", opslimit=1, memlimit=8192, salt=b"sixteen of salt.")
    (tmp_path / "key").write_bytes(made.key)
    (tmp_path / "wrong").write_bytes(KEY)
    (tmp_path / "passphrase").write_text("open sesame\n")
    tensors = {"w": filled(torch.float32, (5, 4))}
    return make_checkpoint(tmp_path / "run" / "secret-1", tensors, {"lr": 0.5}, None, encryption_cipher(made))


def test_encrypted_checkpoints_without_their_key(encrypted: Path) -> None:
    """Without the key, names and locations are shown and files verified, but values are not shown."""
    (listed,) = told("ls", encrypted.parent)  # type: ignore[misc]
    assert (listed["state"], listed["tensors"]) == ("committed", 1)
    found = told("inspect", encrypted)
    assert [tensor["key"] for tensor in found["tensors"]] == ["w"]  # type: ignore[index]
    assert [(o["key"], o["text"], o["value"]) for o in found["objects"]] == [("lr", "encrypted", None)]  # type: ignore[index]
    assert run("verify", "--full", encrypted)[0] == 0
    for command in (["diff", encrypted, encrypted], ["convert", encrypted, encrypted.parent / "x", "--to", "torch"]):
        code, _, error = run(*command)
        assert code == 2
        assert "is encrypted. Give its key" in " ".join(error.split())


@pytest.mark.parametrize("option", ["key", "passphrase"])
def test_encrypted_checkpoints_with_their_key(encrypted: Path, tmp_path: Path, option: str) -> None:
    """The key is read from a file, or derived from a passphrase in a file."""
    key = (f"--{option}-file", tmp_path / option)
    found = told("inspect", encrypted, *key)
    assert [(o["key"], o["value"]) for o in found["objects"]] == [("lr", 0.5)]  # type: ignore[index]
    assert run("convert", encrypted, tmp_path / "plain.pt", "--to", "torch", *key)[0] == 0
    assert torch.equal(torch.load(tmp_path / "plain.pt")["w"], filled(torch.float32, (5, 4)))
    assert told("diff", encrypted, encrypted, *key)["changed"] == []  # type: ignore[index]


def test_keys_that_do_not_fit(encrypted: Path, checkpoint: Path, tmp_path: Path) -> None:
    """A wrong, unnecessary, short or missing key is an error, and nothing is written."""
    (tmp_path / "short").write_bytes(b"short")
    for path, key, words in (
        (encrypted, "wrong", "another key"),
        (checkpoint, "key", "is not encrypted"),
        (encrypted, "short", "cannot read a key from"),
        (encrypted, "missing", "cannot read a key from"),
    ):
        code, _, error = run("convert", path, tmp_path / "out", "--to", "torch", "--key-file", tmp_path / key)
        assert code == 2
        assert words in " ".join(error.split())
        assert not (tmp_path / "out").exists()


def test_passwords_in_urls_are_not_shown(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither messages nor metadata show the password of a URL."""
    monkeypatch.chdir(tmp_path)
    memory = fsspec.filesystem("memory")
    url = "memory://user:hunter22@host"
    (tmp_path / "key").write_bytes(KEY)
    try:
        memory.pipe_file("/user:hunter22@host/empty/notes", b"x")
        for code, command in (
            (0, ["ls", f"{url}/empty"]),
            (0, ["convert", checkpoint, f"{url}/a.pt", "--to", "torch"]),
            (0, ["convert", checkpoint, f"{url}/dcp", "--to", "dcp"]),
            (0, ["convert", checkpoint, f"{url}/ours", "--to", "dcp_tensorizer"]),
            (2, ["convert", f"{url}/a.pt", "b", "--to", "torch", "--from", "dcp"]),
            (2, ["convert", f"{url}/a.pt", "b", "--to", "torch", "--key-file", "key"]),
        ):
            found, out, err = run(*command)
            assert (found, "hunter22" in out + err, "memory://host" in out + err) == (code, False, True)
        for name in ("dcp", "ours"):
            metadata = memory.cat(f"/user:hunter22@host/{name}/.metadata")
            assert b"hunter22" not in metadata
            assert f"memory://host/{name}".encode() in metadata
        for to in ("dcp", "dcp_tensorizer"):
            assert run("convert", checkpoint, tmp_path / to, "--to", to)[0] == 0
            metadata = (tmp_path / to / ".metadata").read_bytes()
            assert (os.fsencode(tmp_path / to) in metadata, b".tmp" in metadata) == (True, False)
    finally:
        memory.rm("/user:hunter22@host", recursive=True)


def test_without_libsodium_a_key_is_an_error(encrypted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without libsodium, a key is an error that names libsodium."""

    def missing() -> None:
        raise OSError("no libsodium")

    monkeypatch.setattr(encryption, "_secretbox", missing)
    for option in ("key", "passphrase"):
        code, _, err = run("inspect", encrypted, f"--{option}-file", tmp_path / option)
        assert (code, "needs libsodium" in err) == (2, True)


def test_names_that_are_not_utf_8(checkpoint: Path) -> None:
    """A directory name that is not UTF-8 is shown on any terminal, and in JSON."""
    os.rename(checkpoint, os.fsencode(checkpoint.parent) + b"/step-\xff1")
    arguments = ["-m", "dcp_tensorizer", "ls", str(checkpoint.parent)]
    done = subprocess.run([warm.python(), *arguments, "--json"], capture_output=True, timeout=600, check=True)
    (found,) = json.loads(done.stdout)
    assert os.fsencode(found["path"]).endswith(b"step-\xff1")
    done = subprocess.run([sys.executable, *arguments], capture_output=True, timeout=600, check=True)
    assert rb"step-\udcff1" in done.stdout


def test_diff_of_an_encrypted_checkpoint_with_a_plain_one(encrypted: Path, tmp_path: Path) -> None:
    """`diff` takes a key if one checkpoint is encrypted, and refuses it if neither is."""
    make_checkpoint(tmp_path / "plain", {"w": filled(torch.float32, (5, 4))}, {"lr": 0.5})
    key = ("--key-file", tmp_path / "key")
    for pair in ((encrypted, tmp_path / "plain"), (tmp_path / "plain", encrypted)):
        assert told("diff", *pair, *key)["same"] == 2  # type: ignore[index]
    code, _, err = run("diff", tmp_path / "plain", tmp_path / "plain", *key)
    assert (code, "nothing is encrypted" in err) == (2, True)


@pytest.mark.parametrize(
    ("damage", "commands"),
    [
        ("data", {"convert": 1, "diff": 2, "verify": 1}),
        ("short", {"convert": 1, "diff": 2, "verify": 1}),
        ("missing", {"convert": 1, "diff": 2, "verify": 1}),
        ("metadata", {"convert": 1, "diff": 2, "verify": 1, "inspect": 1}),
        ("untrusted", {"convert": 2}),
        ("unreadable", {"convert": 2, "diff": 2, "inspect": 2}),
    ],
)
def test_exit_codes(checkpoint: Path, tmp_path: Path, damage: str, commands: dict[str, int]) -> None:
    """Damage has exit code 1, except for `diff`; what cannot be read or is not allowed has exit code 2."""
    make_checkpoint(tmp_path / "other", {"model.half": torch.ones(5, 4).bfloat16()})
    path = max(checkpoint.glob("__0*.tensors"), key=lambda path: path.stat().st_size)
    if damage == "data":
        content = path.read_bytes()
        start = content.index(raw(filled(torch.bfloat16, (5, 4))[:3]))
        path.write_bytes(content[:start] + b"xx" + content[start + 2 :])
    elif damage == "short":
        os.truncate(path, 1000)
    elif damage == "missing":
        path.unlink()
    elif damage == "metadata":
        os.truncate(checkpoint / ".metadata", 100)
    elif damage == "untrusted":
        make_checkpoint(checkpoint, {}, {"o": subprocess.Popen})
    else:
        (checkpoint / ".metadata").unlink()
        (checkpoint / ".metadata").mkdir()
    arguments = {"convert": [tmp_path / "out", "--to", "torch"], "diff": [tmp_path / "other"]}
    assert {name: run(name, checkpoint, *arguments.get(name, []))[0] for name in commands} == commands


def test_help_and_version_take_no_torch() -> None:
    """Help, the version and mistakes in a command do not import torch or numpy."""
    script = """
import sys
from dcp_tensorizer._cli.app import run
for arguments in (["--version"], ["--help"], ["convert", "--help"], ["convert", "a"]):
    run(arguments)
    print("torch" in sys.modules, "numpy" in sys.modules)
"""
    lines = run_python(script, fresh=True).stdout.splitlines()
    assert [line for line in lines if line.startswith(("True ", "False "))] == ["False False"] * 4
    assert run("--version")[:2] == (0, f"{environment()}\n")


def test_shells_complete_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell completes the names of commands, options and formats."""
    monkeypatch.setenv("_DCP_TENSORIZER_COMPLETE", "complete_bash")
    for line, expected in (
        ("dcp-tensorizer ver", {"verify"}),
        ("dcp-tensorizer convert a b --to tens", {"tensorizer"}),
        ("dcp-tensorizer gc --old", {"--older-than"}),
    ):
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
        with redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit):
            app.run([])
        assert set(out.getvalue().split()) == expected


def test_json_before_or_after_the_verb(checkpoint: Path) -> None:
    """``--json`` before or after the command gives the same document."""
    after, before = (json.loads(run(*line)[1]) for line in (("ls", checkpoint, "--json"), ("--json", "ls", checkpoint)))
    assert after == before
    (found,) = after
    assert list(found)[:4] == ["path", "step", "saved", "state"]
    assert (found["step"], found["bytes"]) == (7, sum(path.stat().st_size for path in checkpoint.iterdir()))
    assert abs(datetime.fromisoformat(found["saved"]).timestamp() - time.time()) < 600
    inspected = told("inspect", checkpoint)
    values = {o["key"]: (o["type"], o["value"], o["text"]) for o in inspected["objects"]}  # type: ignore[index]
    assert values == {"optim.lr": ("float", 0.5, "0.5"), "note": ("str", "a\x1b[31mb", "'a\\x1b[31mb'")}


def test_nan_and_infinity_in_json(tmp_path: Path) -> None:
    """NaN and infinities are null in JSON."""
    for name, value in (("a", 1.0), ("b", float("inf"))):
        make_checkpoint(tmp_path / name, {"x": torch.tensor([value])})
    found = told("diff", tmp_path / "a", tmp_path / "b", code=1)
    assert [(c["differing"], c["largest"], c["relative"]) for c in found["changed"]] == [(1, None, None)]  # type: ignore[index]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["verify", "nowhere"], "NotCommitted", "no committed checkpoint"),
        (["lss", "x"], "UsageError", "ls"),
        (["gc", "x", "--older-than", "long"], "BadParameter", "long"),
        (["convert", "x", "y"], "MissingParameter", "--to"),
    ],
)
def test_errors_as_json(tmp_path: Path, arguments: list[str], error: str, words: str) -> None:
    """With ``--json``, an error is a document on stdout."""
    for line in (["--json", *arguments], [*arguments, "--json"]):
        code, out, err = run(*line)
        found = json.loads(out)
        assert (code, err, found["exit_code"], words in found["message"]) == (2, "", 2, True)
        assert found["error"] == error


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["convert", "{checkpoint}", "x", "--to", "safetensor"], "'safetensors'"),
        (["convert", "{checkpoint}", "x", "--to", "torch", "--from", "dcp-tensorizer"], "'dcp_tensorizer'"),
        (["convert", "{checkpoint}", "x", "--to", "torch", "--dtype", "bf16"], "'bfloat16'"),
        (["convert", "{checkpoint}", "x", "--to", "torch", "--dtype", "fp32"], "'float32'"),
        (["verfy", "x"], "'verify'"),
        (["ls", "x", "--jsn"], "--json"),
        (["inspect", "{run}"], "step-7"),
        (["convert", "{run}", "x", "--to", "torch"], "step-7"),
        (["inspect", "{checkpoint}", "modle.*"], "'model', 'optim', 'note'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_suggestions(checkpoint: Path, arguments: list[str], meant: str) -> None:
    """An error suggests the name that was probably meant."""
    code, out, err = run(*(a.format(checkpoint=checkpoint, run=checkpoint.parent) for a in arguments))
    assert (code, out, err.startswith("error: "), meant in err) == (2, "", True, True)


def test_a_missing_file_is_one_line(checkpoint: Path) -> None:
    """A missing file is one line with the keys in it, and exit code 1."""
    path = max(checkpoint.glob("*.tensors"), key=lambda path: path.stat().st_size)
    path.unlink()
    code, out, _ = run("verify", checkpoint)
    first, last = out.splitlines()
    assert (code, first.startswith(f"{path.name}: is missing; lost: 'model.half', ")) == (1, True)
    assert last.startswith("DAMAGED: 2 files, ")


def test_torchs_own_checkpoints_are_listed(checkpoint: Path) -> None:
    """`ls` lists torch's own checkpoints as such."""
    run("convert", checkpoint, checkpoint.parent / "step-9", "--to", "dcp")
    assert [(c["step"], c["state"]) for c in told("ls", checkpoint.parent)] == [(9, "torch"), (7, "committed")]  # type: ignore[attr-defined]
    assert "torch's own FileSystemWriter" in run("ls", checkpoint.parent)[1]


def test_newer_versions_are_not_damaged(checkpoint: Path) -> None:
    """A checkpoint of a newer version has exit code 3, also in a folder."""
    content = bytearray((checkpoint / ".metadata").read_bytes())
    content[8] = 99  # the version, under the digest
    digest = xxhash.xxh3_128()
    head_end = 80 + int.from_bytes(content[16:24], "little")
    for piece in (content[:32], content[48:80], content[80:head_end]):
        digest.update(bytes(piece))
    content[32:48] = digest.digest()
    (checkpoint / ".metadata").write_bytes(content)
    for command, path in (("verify", checkpoint), ("inspect", checkpoint), ("verify", checkpoint.parent)):
        assert run(command, path)[0] == 3


def test_steps_are_sorted_by_number(checkpoint: Path) -> None:
    """`ls` sorts by directory and by step, the highest first, and names without numbers last."""
    for name in ("step-10", "step-9", "best", "more/step-2"):
        shutil.copytree(checkpoint, checkpoint.parent / name)
    rows = [line.split()[0] for line in run("ls", checkpoint.parent)[1].splitlines()[1:]]
    assert rows == ["step-10", "step-9", "step-7", "best", "more/step-2"]


def test_convert_with_other_keys(checkpoint: Path, tmp_path: Path) -> None:
    """``--exclude``, ``--rename`` and ``--add-prefix`` reach the conversion."""
    (tmp_path / "names.json").write_text('{"model.*": "net.*.weight"}')
    options = ["--exclude", "optim.*", "--exclude", "note", "--rename", tmp_path / "names.json", "--add-prefix", "a."]
    assert run("convert", checkpoint, tmp_path / "x.safetensors", "--to", "safetensors", *options)[0] == 0
    assert set(load_file(tmp_path / "x.safetensors")) == {"a.net.half.weight", "a.net.columns.weight"}
    (tmp_path / "names.json").write_text('{"model.*": 3}')
    code, _, err = run("convert", checkpoint, tmp_path / "y", "--to", "torch", *options)
    assert (code, "is not a JSON object of patterns and new keys" in err) == (2, True)


def test_gc_lists_removed_and_retained_checkpoints(checkpoint: Path) -> None:
    """The JSON document of `gc` has removed and retained checkpoints in separate lists."""
    shutil.copytree(checkpoint, checkpoint.parent / "step-8")
    (checkpoint.parent / "latest").symlink_to(checkpoint)
    found: Any = told("gc", checkpoint.parent, "--keep-latest", "1", "--dry-run")
    assert [Path(kept["path"]) for kept in found["kept"]] == [checkpoint]
    assert found["removals"] == []


def test_a_copy_without_hidden_files_is_told_from_other_directories(checkpoint: Path, tmp_path: Path) -> None:
    """A copy without `.metadata`, as `cp step/* ...` makes it, is refused with advice."""
    (tmp_path / "copy").mkdir()
    for path in checkpoint.glob("*.tensors"):
        shutil.copy(path, tmp_path / "copy")
    for command in (["verify", tmp_path / "copy"], ["convert", tmp_path / "copy", tmp_path / "m", "--to", "torch"]):
        code, _, err = run(*command)
        assert (code, "copy the directory itself, with `cp -r`" in " ".join(err.split())) == (2, True), err


def test_paths_in_records_are_absolute(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command shows the absolute path of a checkpoint."""
    monkeypatch.chdir(checkpoint.parent)
    commands = [["inspect", checkpoint.name], ["verify", checkpoint.name]]
    assert {told(*command)["path"] for command in commands} == {str(checkpoint)}  # type: ignore[call-overload, index]
    made: Any = told("convert", checkpoint.name, "m", "--to", "torch")
    assert made["path"] == str(checkpoint.parent / "m")


def test_the_url_of_a_local_folder(checkpoint: Path) -> None:
    """`ls` and `gc` show the same for a local path and for its URL: names relative to it, or itself."""
    shutil.copytree(checkpoint, checkpoint.parent / "step-8")
    gc = ["gc", "--keep-latest", "1", "--dry-run"]
    for path, command, name in (
        (checkpoint.parent, ["ls"], "step-8"),
        (checkpoint.parent, gc, "step-7"),
        (checkpoint, ["ls"], str(checkpoint)),
    ):
        shown = run(*command, path)
        assert shown[1].splitlines()[1].split()[0] == name
        assert run(*command, f"file://{path}") == run(*command, f"local://{path}/") == shown


def test_gc_of_data_alone(checkpoint: Path) -> None:
    """``gc --only-data`` leaves other files in a checkpoint's directory."""
    shutil.copytree(checkpoint, checkpoint.parent / "step-8")
    (checkpoint / "tokenizer.json").write_text("{}")
    assert run("gc", checkpoint.parent, "--keep-latest", "1", "--only-data")[0] == 0
    assert [path.name for path in checkpoint.iterdir()] == ["tokenizer.json"]


def test_report(checkpoint: Path, tmp_path: Path) -> None:
    """`report` writes a page, and shows its path."""
    code, out, _ = run("report", checkpoint, "-o", tmp_path / "page.html")
    assert (code, out.startswith(f"{tmp_path}/page.html (")) == (0, True)
    assert "): 3 tensors of 1 checkpoint, in " in out
    assert told("report", checkpoint, "-o", tmp_path / "page.html")["checkpoints"] == [str(checkpoint)]  # type: ignore[call-overload, index]


@pytest.mark.parametrize("name", ["ckpt/.metadata", "ckpt/report.html", "m.safetensors", "link"])
def test_a_report_replaces_nothing_that_it_reads(checkpoint: Path, tmp_path: Path, name: str) -> None:
    """An output that is a checkpoint or inside one, also behind a link, is refused, and the checkpoint stays whole."""
    shutil.copytree(checkpoint, tmp_path / "ckpt")
    run("convert", checkpoint, tmp_path / "m.safetensors", "--to", "safetensors", "--include", "model.*")
    (tmp_path / "link").symlink_to("ckpt/.metadata")
    before = [run("diff", tmp_path / source, tmp_path / source)[0] for source in ("ckpt", "m.safetensors")]
    code, _, err = run("report", tmp_path / "ckpt", tmp_path / "m.safetensors", "-o", f"file://{tmp_path / name}")
    assert (code, "which is an input. Choose another output." in err) == (2, True), err
    assert before == [run("verify", tmp_path / source)[0] for source in ("ckpt", "m.safetensors")] == [0, 0]
    assert not (tmp_path / "ckpt" / "report.html").exists()


def test_trace(tmp_path: Path) -> None:
    """`trace` writes a trace, and shows its contents; a folder without trace files has exit code 2."""
    record = TraceFile(tmp_path / "spans")
    with TensorizerStorageWriter(tmp_path / "ckpt", on_report=record) as writer:
        dcp.save({"weight": torch.ones(4)}, storage_writer=writer)
    code, out, _ = run("trace", tmp_path / "spans", "-o", tmp_path / "trace.json")
    assert (code, out.startswith(f"{tmp_path}/trace.json: 1 save of 1 rank on 1 host, ")) == (0, True)
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) > 5
    assert told("trace", tmp_path / "spans", "-o", tmp_path / "trace.json")["loads"] == 0
    code, _, said = run("trace", tmp_path, "-o", tmp_path / "none.json")
    assert (code, f"{tmp_path} is neither a trace file nor a folder with one. Pass TraceFile(" in said) == (2, True)


@pytest.mark.parametrize(
    ("to", "name", "code", "said"),
    [
        ("dcp_tensorizer", "SIGINT", 130, "error: interrupted\n"),
        ("dcp", "SIGINT", 130, "error: interrupted\n"),
        ("dcp", "SIGTERM", 143, ""),
        ("torch", "SIGTERM", 143, ""),
        ("safetensors", "SIGHUP", 129, ""),
    ],
)
def test_a_signal_leaves_a_clean_line(tmp_path: Path, to: str, name: str, code: int, said: str) -> None:
    """A signal ends a conversion with its exit code, without a traceback or a partial result."""
    tensors = 64
    described = {
        f"t{n}": {"dtype": "F32", "shape": [4 << 20], "data_offsets": [n << 24, (n + 1) << 24]} for n in range(tensors)
    }
    head = json.dumps(described).encode()
    with open(tmp_path / "a.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(8 + len(head) + (tensors << 24))
    script = """
import os, signal, sys
from dcp_tensorizer import tools
from dcp_tensorizer.__main__ import main
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests by nohup has it ignored
whole = tools.convert
def interrupted(*args, on_progress, **kwargs):
    seen = []
    def progress(done, total):
        seen.append(done)
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGNAME)
        assert len(seen) < 20, "it goes on"
        on_progress(done, total)
    return whole(*args, on_progress=progress, **kwargs)
tools.convert = interrupted
main()
""".replace("SIGNAME", name)
    command = ["convert", str(tmp_path / "a.safetensors"), str(tmp_path / "out"), "--to", to]
    done = subprocess.run(
        [warm.python(), "-c", script, *command], capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", said)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_gc_that_cannot_remove_something(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a checkpoint cannot be removed, `gc` removes the others, and has exit code 2."""
    for step in (8, 9):
        shutil.copytree(checkpoint, checkpoint.parent / f"step-{step}")
    remove = _gc.remove

    def fail(removal: Removal) -> Collected:
        if removal[0].name == "step-7":
            return dataclasses.replace(removal[1], files=(), kept="removing its files failed: not yours", failed=True)
        return remove(removal)

    monkeypatch.setattr(_gc, "remove", fail)
    code, out, _ = run("gc", checkpoint.parent, "--keep-latest", "1", "--dry-run")
    assert (code, out.count("checkpoint ")) == (0, 2)
    code, out, _ = run("gc", checkpoint.parent, "--keep-latest", "1")
    assert (code, "kept: removing its files failed: not yours" in out, "1 checkpoint removed" in out) == (2, True, True)
    assert {path.name for path in checkpoint.parent.iterdir()} == {"step-7", "step-9"}


@pytest.mark.parametrize("command", [["ls"], ["--json", "verify"]], ids=" ".join)
@pytest.mark.parametrize("kind", ["full", "closed"])
def test_output_that_cannot_be_written(checkpoint: Path, command: list[str], kind: str) -> None:
    """A full disk has exit code 2, and a closed pipe 141."""
    python = sys.executable if command == ["ls"] else warm.python()  # one end is that of a whole interpreter
    program = [python, "-m", "dcp_tensorizer", *command, str(checkpoint)]
    reading, writing = os.pipe()
    os.close(reading)
    with open("/dev/full", "wb") as full, open(writing, "wb", buffering=0) as closed:
        out = full if kind == "full" else closed
        done = subprocess.run(program, stdout=out, stderr=subprocess.PIPE, text=True, timeout=600, check=False)
    wanted = (
        (2, "error: reading a file or writing the output failed: [Errno 28] No space left on device\n")
        if kind == "full"
        else (141, "")
    )
    assert (done.returncode, done.stderr) == wanted


def test_an_empty_path() -> None:
    """An empty path, as of an unset variable, is an error."""
    for command in (["gc", "", "--keep-latest", "1"], ["ls", ""], ["verify", ""]):
        code, out, err = run(*command)
        assert (code, out) == (2, "")
        assert err == "error: '' is not a valid path: it is empty\n"


def test_a_key_and_a_passphrase(checkpoint: Path, tmp_path: Path) -> None:
    """A key and a passphrase together are an error that names both options."""
    for name in ("key", "words"):
        (tmp_path / name).write_bytes(bytes(32))
    code, _, err = run("inspect", checkpoint, "--key-file", tmp_path / "key", "--passphrase-file", tmp_path / "words")
    assert code == 2
    assert "cannot be combined with --passphrase-file. Give one of them." in " ".join(err.split())
