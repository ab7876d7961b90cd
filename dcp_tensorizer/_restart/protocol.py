"""Messages of a trainer and a successor to a keeper, and its answers: pickles between processes of one user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from .._index.schema import SaveRecord
from .._runtime.channel import Done, Failed
from .wire import Address


class Extent(NamedTuple):
    """The location of the bytes of a tensor or object."""

    is_inline: bool  # in the bytes that came with the message; otherwise in the staging buffer
    offset: int  # of the first one
    nbytes: int


class KeptHead(NamedTuple):
    """The facts about a kept state that are needed before it is loaded.

    Attributes:
        id: The same on all ranks; 32 hexadecimal digits. That of the save, if there is one.
        number: Of two states of one run, the later one has the larger number.
        job: The run of a job that kept it: another one after each restart.
        rank: Whose state it is.
        world_size: How many ranks the job had.
        record: The manager's record for the index; None without a manager.
        parent_step: The step of the checkpoint that it goes on from; None if there is none.
        left: The id of the checkpoint that was the newest when the job went back to before it; None if it did not.
        folder: The device and the inode of the job's folder; None where it has none, or had not been made yet.
        path: Where it was being saved; empty if that is for a manager to say.
        replaces: The id of the checkpoint that was at the path; None if there was none.
        host: That kept it (see `this_host`), whose name for the folder that is; empty if it is not known.
        line: The ids of the checkpoints that it goes on from, the newest first; only those that its run saved or
            restored.
    """

    id: str
    number: int
    job: str
    rank: int
    world_size: int
    record: SaveRecord | None
    parent_step: int | None = None
    left: str | None = None
    folder: tuple[int, int] | None = None
    path: str = ""
    replaces: str | None = None
    host: str = ""
    line: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """The step of a manager's state."""
        assert self.record is not None, "a manager's states have records"
        return self.record.step


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep this state: from the trainer, with the descriptor of a staging buffer."""

    head: KeptHead
    nbytes: int  # of the buffer
    extents: tuple[Extent, ...]  # of everything in it, for the digests
    description: bytes  # the layout, for a load; a keeper does not decode it
    inline: bytes  # the bytes that are not in the buffer
    seconds: float  # how long it is kept when the trainer is gone
    digests_follow: bool = False  # a save writes it and takes its digests, which come when it is written


@dataclass(frozen=True, slots=True)
class WrittenDigests:
    """A state has been written, with these digests: from the trainer."""

    id: str
    known: Mapping[tuple[int, int], bytes]  # by offset and size in the buffer; other ranks may have written the rest


@dataclass(frozen=True, slots=True)
class Forget:
    """Forget these states. The answer has the ids of those whose buffers the trainer may write to again."""

    ids: tuple[str, ...]
    but_copied: bool = False  # the state that was copied last stays, whole or under way


@dataclass(frozen=True, slots=True, repr=False)  # it holds a secret
class OpenToPeers:
    """Take replicas from keepers on other hosts, and give them: from the trainer. The answer is where it is reached."""

    host: str  # the address of this host to listen on
    secret: bytes  # of the run


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy a state, which is kept, to a keeper on another host: from the trainer."""

    id: str
    to: Address
    rate: float  # bytes a second; 0: any number
    keep: str = ""  # the newest state that all hosts have confirmed; empty if there is none


@dataclass(frozen=True, slots=True)
class CopyStatus:
    """The status of the last copy."""

    id: str = ""  # of the state; empty if none was copied
    is_running: bool = False
    problem: str = ""  # why it has failed; empty if it has not
    is_claimed: bool = False  # a later run of the job has the partner now
    is_full: bool = False  # the partner has no memory for it
    is_given_up: bool = False  # the memory of the state was needed


@dataclass(frozen=True, slots=True)
class Found:
    """The states that are there, and whose they are."""

    job: str  # the run of the job
    trainer: int  # its process id
    is_orphaned: bool
    heads: tuple[KeptHead, ...]  # of the trainer's own parts of states and of replicas, the oldest first
    address: Address | None = None  # where it is reached from other hosts; None if it is not


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """Refuse all others as long as this connection is open: from a successor. Refused while the trainer lives."""

    job: str


@dataclass(frozen=True, slots=True)
class Take:
    """Give me a rank's part of a state: from a successor."""

    id: str
    rank: int


@dataclass(frozen=True, slots=True)
class KeptContent:
    """A part of a state, with the descriptor of its buffer; ``digests`` are as in `StoredItem`, one an extent."""

    state: Keep
    digests: tuple[bytes, ...]


class Plain(Enum):
    """Requests that need no more than a name."""

    LOOK = auto()  # list the states that are there: from any process
    LOOK_AT_COPY = auto()  # give the status of the last copy: from the trainer
    DROP_COPIES = auto()  # let the keeper on the other host forget all that it has of this rank: from the trainer
    END = auto()  # because the states are no longer needed: from the trainer or a successor


Request = Keep | WrittenDigests | Forget | OpenToPeers | Copy | ClaimRequest | Take | Plain
Answer = Done | Failed | Found | KeptContent | CopyStatus | Address | tuple[str, ...]
