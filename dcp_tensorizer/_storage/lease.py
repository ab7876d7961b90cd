"""The lease of a folder of checkpoints: a file that says which run may change the folder.

A run takes the lease with its first save. From then on it checks the lease right before it commits or deletes anything
there. A run may be cut off from the network, or stopped, while another run takes its place. When it comes back, it
changes nothing, and its next save raises an error.
"""

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

_TRIES = 10  # against runs that take the same lease at the same moment


class LeaseRecord(msgspec.Struct, frozen=True):
    """A lease, stored in the folder as JSON. Later releases may add fields."""

    epoch: int  # the number of the run: one more than that of the run before
    id: str
    host: str  # the host of the run's first rank, to which the process id belongs
    process: int
    claimed_at: str  # in UTC


def lease_file_name(names: str) -> str:
    """The name of the lease's file. Jobs with other ``names`` of step directories (with ``N``) may share a folder."""
    return f".{names}.claim"


def read_lease(folder: Storage, name: str) -> LeaseRecord | None:
    """The lease of a folder; None if it has none. Raises `ReadError`."""
    return _decoded(folder.read(name))


def _decoded(data: bytes | None) -> LeaseRecord | None:
    try:
        return None if data is None else msgspec.json.decode(data, type=LeaseRecord)
    except (msgspec.MsgspecError, ValueError, RecursionError):  # not a lease
        return None


class Lease:
    """A run's lease of a folder. Several threads may use it.

    ``lost`` is the reason why the folder is no longer this run's; it is empty as long as no reason is known. ``own`` is
    the run's record, which may come from another process; None before the run has taken the lease.
    """

    def __init__(self, folder: Storage, name: str, own: LeaseRecord | None = None) -> None:
        self.id = uuid.uuid4().hex if own is None else own.id
        self.name = name
        self.lost = ""
        self._folder = folder
        self.own = own

    def take(self) -> None:
        """Takes the lease. If that fails now, it is logged, and the first `check` tries again."""
        try:
            self.check()
        except CheckpointError as error:
            if not self.lost:
                logger.warning("%s; this is tried again before anything is committed", str(error))

    def check(self) -> None:
        """Checks that the lease is still this run's; takes it if the run has none yet.

        Raises `Refused` if another run has taken it since, or that cannot be found out.
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
                f"its lease at {found.claimed_at}, as run {found.epoch}; this is run {own.epoch}, and took it at "
                f"{own.claimed_at}. This run no longer commits or deletes anything there. End it; if the other run is "
                f"the wrong one, end that, and start this one again. Two jobs need two folders"
            )
            raise Refused(self.lost)

    def _taken(self) -> LeaseRecord:
        """Replaces the earlier run's lease. Two threads may do so at once."""
        self._folder.make_directory()
        for _ in range(_TRIES):
            data = self._folder.read(self.name)
            before = _decoded(data)
            if before is not None and before.id == self.id:  # an earlier try has written it, and its answer was lost
                return before
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            own = LeaseRecord((before.epoch if before else 0) + 1, self.id, socket.gethostname(), os.getpid(), now)
            if self._folder.put_if(self.name, data, msgspec.json.encode(own) + b"\n"):
                logger.info("%s: run %d of this folder begins to save", self._folder.path, own.epoch)
                return own
        raise WriteError(f"other runs have taken the lease {_TRIES} times meanwhile")
