"""The lease of a folder of checkpoints: a file that names the run that may change the folder."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from datetime import datetime, timezone

import msgspec

from ..errors import CheckpointError, WriteError
from .base import Refused, Storage

logger = logging.getLogger("dcp_tensorizer")

_TRIES = 10  # attempts to take a lease, in case other runs take it at the same time


class LeaseRecord(msgspec.Struct, frozen=True):
    """A lease, stored in the folder as JSON. Later releases may add fields."""

    epoch: int  # the number of the run: one more than that of the previous run
    id: str
    host: str  # the host of the run's rank 0, to which the process id belongs
    process: int
    claimed_at: str  # in UTC


def lease_file_name(names: str) -> str:
    """Returns the name of the lease file. ``names`` is the pattern of the step directories' names, such as ``step-N``.

    Jobs with different patterns can share a folder.
    """
    return f".{names}.claim"


def read_lease(folder: Storage, name: str) -> LeaseRecord | None:
    """Reads the lease of a folder. If there is no valid lease, returns None. Raises `ReadError`."""
    return _decoded(folder.read(name))


def _decoded(data: bytes | None) -> LeaseRecord | None:
    try:
        return None if data is None else msgspec.json.decode(data, type=LeaseRecord)
    except (msgspec.MsgspecError, ValueError, RecursionError):  # not a lease
        return None


class Lease:
    """A run's lease of a folder. Thread-safe.

    ``lost`` is the reason why this run has lost the lease, and empty until the run finds out. ``own`` is the run's
    `LeaseRecord`, which may come from another process. It is None until the run has taken the lease.
    """

    def __init__(self, folder: Storage, name: str, own: LeaseRecord | None = None) -> None:
        self.id = uuid.uuid4().hex if own is None else own.id
        self.name = name
        self.lost = ""
        self._folder = folder
        self.own = own

    def take(self) -> None:
        """Takes the lease. If that fails, logs a warning, and the next `check` tries again.

        If another run has since taken the lease from this run, does nothing; the next `check` raises.
        """
        try:
            self.check()
        except CheckpointError as error:
            if not self.lost:
                logger.warning("%s; retrying before the first commit", str(error))

    def check(self) -> None:
        """Checks that no other run has taken the lease from this run. If this run has not taken it yet, takes it.

        Raises `Refused` if another run has taken the lease from this run, or if the lease cannot be read or written.
        """
        if self.lost:
            raise Refused(self.lost)
        own = self.own
        try:
            if own is None:
                self.own = self._taken()
                return
            found = read_lease(self._folder, self.name)
        except CheckpointError as error:
            what = "checked" if own else "taken"
            raise Refused(f"the lease of {self._folder.path} cannot be {what}: {error}") from error
        if found is not None and found.id != self.id:
            self.lost = (
                f"{self._folder.path} now belongs to another run: process {found.process} on host {found.host} took "
                f"the lease at {found.claimed_at}, as run {found.epoch}; this is run {own.epoch}, which took it at "
                f"{own.claimed_at}. This run no longer commits or deletes anything there. End this run, or, if the "
                f"other run is a mistake, end that one and restart this one. Use one folder per job"
            )
            raise Refused(self.lost)

    def _taken(self) -> LeaseRecord:
        """Replaces the lease of the previous run, if any. Two threads may call this at the same time."""
        self._folder.make_directory()
        for _ in range(_TRIES):
            data = self._folder.read(self.name)
            before = _decoded(data)
            if before is not None and before.id == self.id:  # written by an earlier attempt whose response was lost
                return before
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            own = LeaseRecord((before.epoch if before else 0) + 1, self.id, socket.gethostname(), os.getpid(), now)
            if self._folder.put_if(self.name, data, msgspec.json.encode(own) + b"\n"):
                logger.info("%s: run %d has taken the lease", self._folder.path, own.epoch)
                return own
        raise WriteError(f"other runs took it during each of {_TRIES} attempts. Use one folder per job")
