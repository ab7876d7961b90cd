"""A run's claim to its folder of checkpoints: the folder belongs to the run that claimed it last.

A run claims its folder with its first save. From then on it checks the claim right before it commits or deletes
anything there. A run may be cut off from the network, or stopped, while another run takes its place. When it comes
back, it changes nothing, and its next save raises an error.
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

_TRIES = 10  # against runs that claim the same folder at the same moment


class Claim(msgspec.Struct, frozen=True):
    """A run's claim, stored in the folder as JSON. Later releases may add fields."""

    epoch: int  # the number of the run: one more than that of the run before
    id: str
    host: str  # the host of the run's first rank, to which the process id belongs, too
    process: int
    claimed_at: str  # in UTC


def claim_file_name(names: str) -> str:
    """The name of the claim's file. Jobs with other ``names`` of step directories (with ``N``) may share a folder."""
    return f".{names}.claim"


def read_claim(folder: Storage, name: str) -> Claim | None:
    """The claim in a folder; None if there is none. Raises `ReadError`."""
    return _decoded(folder.read(name))


def _decoded(data: bytes | None) -> Claim | None:
    try:
        return None if data is None else msgspec.json.decode(data, type=Claim)
    except (msgspec.MsgspecError, ValueError, RecursionError):  # not a claim
        return None


class Ownership:
    """A run's ownership of a folder. Several threads may use it.

    ``lost`` says why the folder is no longer this run's; it is empty as long as no reason is known. ``own`` is the
    run's claim, which may come from another process; None before the run has one.
    """

    def __init__(self, folder: Storage, name: str, own: Claim | None = None) -> None:
        self.id = uuid.uuid4().hex if own is None else own.id
        self.name = name
        self.lost = ""
        self._folder = folder
        self.own = own

    def claim(self) -> None:
        """Claims the folder. If that fails now, it is logged, and the first `check` tries again."""
        try:
            self.check()
        except CheckpointError as error:
            if not self.lost:
                logger.warning("%s; this is tried again before anything is committed", str(error))

    def check(self) -> None:
        """Checks that the folder is still this run's; claims it if there is no claim yet.

        Raises `Refused` if another run has claimed it since, or that cannot be found out.
        """
        if self.lost:
            raise Refused(self.lost)
        own = self.own
        try:
            if own is None:
                self.own = self._claimed()
                return
            found = read_claim(self._folder, self.name)
        except CheckpointError as error:
            what = "looked at" if own else "claimed"
            raise Refused(f"the folder {self._folder.path} cannot be {what}: {error}") from error
        if found is not None and found.id != self.id:
            self.lost = self._words(own, found)
            raise Refused(self.lost)

    def _claimed(self) -> Claim:
        """Replaces the earlier run's claim. Two threads may do so at once."""
        self._folder.make_directory()
        for _ in range(_TRIES):
            data = self._folder.read(self.name)
            before = _decoded(data)
            if before is not None and before.id == self.id:  # an earlier try has written it, and its answer was lost
                return before
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            own = Claim((before.epoch if before else 0) + 1, self.id, socket.gethostname(), os.getpid(), now)
            if self._folder.put_if(self.name, data, msgspec.json.encode(own) + b"\n"):
                logger.info("%s: run %d of this folder begins to save", self._folder.path, own.epoch)
                return own
        raise WriteError(f"other runs have claimed the folder {_TRIES} times meanwhile")

    def _words(self, own: Claim, found: Claim) -> str:
        return (
            f"{self._folder.path} now belongs to another run: process {found.process} on host {found.host} has claimed "
            f"it at {found.claimed_at}, as run {found.epoch}; this is run {own.epoch}, and claimed it at "
            f"{own.claimed_at}. This run no longer commits or deletes anything there: end it. If the other run is the "
            f"wrong one, end that, and start this one again. Two jobs need two folders"
        )
