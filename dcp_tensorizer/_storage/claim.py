"""The run that a folder of checkpoints belongs to: the last one that has claimed it.

A run claims a folder with its first save. From then on it looks whether the claim is still its own, right before it
commits or deletes anything there. So a run that a network or a stopped process has cut off, and that comes back when
another one has taken its place, changes nothing any more, and is told.
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
    """A run's claim, as it stands in the folder, in JSON. Later releases may add fields.

    Attributes:
        epoch: Counts the runs: each has one more than the run before.
        id: Of the run.
        host, process: Where its first rank runs.
        claimed_at: When, in UTC.
    """

    epoch: int
    id: str
    host: str
    process: int
    claimed_at: str


def claim_file_name(names: str) -> str:
    """The name of the file that a claim is in.

    Args:
        names: The name of a step's directory, with ``N`` for the number. Jobs with other names may share a folder.
    """
    return f".{names}.claim"


def read_claim(folder: Storage, name: str) -> Claim | None:
    """The claim in a folder; None if there is none. Raises `ReadError`."""
    return _decoded(folder.read(name))


def _decoded(data: bytes | None) -> Claim | None:
    try:
        return None if data is None else msgspec.json.decode(data, type=Claim)
    except msgspec.MsgspecError:  # nobody's
        return None


class Ownership:
    """A run's knowledge of its claim to a folder. Several threads may ask.

    Attributes:
        id: Of the run.
        name: Of the file that claims are in.
        lost: Why the folder is not this run's any more; empty if that is not known.
    """

    def __init__(self, folder: Storage, name: str) -> None:
        self.id = uuid.uuid4().hex
        self.name = name
        self.lost = ""
        self._folder = folder
        self._own: Claim | None = None

    def claim(self) -> None:
        """Claims the folder, if it can be done now. Otherwise the log says so, and the first `check` does it."""
        try:
            self.check()
        except CheckpointError as error:
            if not self.lost:
                logger.warning("%s; this is tried again before anything is committed", str(error))

    def check(self) -> None:
        """Looks whether the folder is still this run's; claims it if that has not been done.

        Raises:
            Refused: another run has claimed it since, or nobody can tell.
        """
        if self.lost:
            raise Refused(self.lost)
        own = self._own
        try:
            if own is None:
                self._own = self._claimed()
                return
            found = read_claim(self._folder, self.name)
        except CheckpointError as error:
            what = "looked at" if own else "claimed"
            raise Refused(f"the folder {self._folder.path} cannot be {what}: {error}") from error
        if found is not None and found.id != self.id:
            self.lost = self._words(own, found)
            raise Refused(self.lost)

    def _claimed(self) -> Claim:
        """Puts this run's claim in the place of the one before. Two threads may do so at once."""
        self._folder.make_directory()
        for _ in range(_TRIES):
            data = self._folder.read(self.name)
            before = _decoded(data)
            if before is not None and before.id == self.id:  # it is there, and the answer was lost
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
