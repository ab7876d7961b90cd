"""A run with a local folder, and what lies in it and on the remote."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_tensorizer import SaveLimits, TensorizerStorageReader, TensorizerStorageWriter
from dcp_tensorizer._saving.save import Save
from dcp_tensorizer._saving.write_plan import Item
from dcp_tensorizer._storage.base import Refused
from dcp_tensorizer._storage.local import LocalStorage
from dcp_tensorizer._tiers.queue import Queue
from dcp_tensorizer._tiers.target import FlushTarget
from dcp_tensorizer._writer_process.protocol import WriteDone

NUMBERS = 300_000
ID = "a" * 32


def state_of(value: int) -> dict[str, Any]:
    return {"w": torch.full((NUMBERS,), float(value)), "step": value}


@dataclass(frozen=True)
class Run:
    """A job's folders."""

    folder: Path

    @property
    def local(self) -> Path:
        return self.folder / "local"

    @property
    def remote(self) -> Path:
        return self.folder / "remote"

    @property
    def target(self) -> FlushTarget:
        return FlushTarget(str(self.local), str(self.remote), {}, 600.0)

    @property
    def queue(self) -> Queue:
        return Queue(self.local)

    def states(self) -> list[str]:
        """Returns the states of the saves, in order."""
        return [entry.state for entry in self.queue.entries()]

    def writer(self, **options: Any) -> TensorizerStorageWriter:
        return TensorizerStorageWriter(self.remote, local=self.local, **options)

    def cut(self) -> None:
        """Makes the remote unreachable."""
        self.remote.write_bytes(b"")

    def mend(self) -> None:
        self.remote.unlink()

    def save_unflushed(self, *values: int, place: str = "step-{}", **options: Any) -> None:
        """Saves, and closes the writer before the remote has anything."""
        self.cut()
        limits = SaveLimits(max_consecutive_failures=None)
        writer = self.writer(limits=limits, max_unflushed=len(values) + 1, **options)
        for value in values:
            path = self.remote / place.format(value)
            dcp.async_save(state_of(value), storage_writer=writer, checkpoint_id=path).result()
        writer.close(0.5)  # time for the save's thread to end
        self.mend()

    def load(self, place: str, *, local: Path | None = None) -> int:
        """Loads a checkpoint, and returns its step, which all of its values must have."""
        state = state_of(0)
        reader = TensorizerStorageReader(self.remote, local=local)
        dcp.load(state, storage_reader=reader, checkpoint_id=self.remote / place)
        assert state["w"].unique().tolist() == [float(state["step"])]
        step: int = state["step"]
        return step


def begun(run: Run, writer: TensorizerStorageWriter, rank: int = 0) -> tuple[Save, WriteDone]:
    """Begins a save to "a" on a rank that does not commit, and writes one small file."""
    save = writer.saver.kind(writer.saver, ID, run.remote / "a", None)
    save.set_up(rank=rank, is_coordinator=False, use_collectives=True)
    return save, save.write_items([Item(MetadataIndex("w"), "w", "tensor", torch.ones(4))])


def files_below(folder: Path) -> set[str]:
    """Returns the files in a folder and below, without their numbers and ids."""
    return {
        f"{path.parent.relative_to(folder)}/{path.suffix or path.name}" for path in folder.rglob("*") if path.is_file()
    }


def read_only(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Makes a folder read-only for this process."""

    def refusing(function: Any, *which: int) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if any(Path(os.fspath(args[n])).is_relative_to(folder) for n in which):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return function(*args, **kwargs)

        return call

    for owner, name in ((os, "utime"), (os, "rename"), (os, "replace"), (Path, "unlink"), (Path, "write_bytes")):
        monkeypatch.setattr(owner, name, refusing(getattr(owner, name), 0))
    access, put, create = os.access, LocalStorage.put, LocalStorage.create
    monkeypatch.setattr(
        os,
        "access",
        lambda path, mode: access(path, mode) and (mode != os.W_OK or not Path(path).is_relative_to(folder)),
    )

    def refuse(storage: LocalStorage) -> None:
        if Path(storage.location).is_relative_to(folder):
            error = OSError(errno.EROFS, os.strerror(errno.EROFS))
            raise Refused(f"cannot write to {storage.location}: {error}") from error

    monkeypatch.setattr(LocalStorage, "put", lambda self, *args, **rest: (refuse(self), put(self, *args, **rest))[1])
    monkeypatch.setattr(
        LocalStorage, "create", lambda self, *args, **rest: (refuse(self), create(self, *args, **rest))[1]
    )


def unlistable(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """Makes the local disk raise an error when its records are listed."""
    listdir = os.listdir

    def fails(folder: Any = ".") -> list[str]:
        if os.fspath(folder) == str(run.queue.folder):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return listdir(folder)

    monkeypatch.setattr(os, "listdir", fails)
