"""Messages of a trainer and a successor to a keeper, and its answers: pickles between processes of one user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .._index.schema import SaveRecord
from .._runtime.channel import Done, Failed
from .wire import Address


class Extent(NamedTuple):
    """The location of the bytes of a tensor or object.

    Attributes:
        is_inline: In what came with the message; otherwise in the staging buffer.
        offset: Of the first one.
        nbytes: How many.
    """

    is_inline: bool
    offset: int
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

    @property
    def step(self) -> int:
        """The step of a manager's state."""
        assert self.record is not None, "a manager's states have records"
        return self.record.step


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep this state: from the trainer, with the descriptor of a staging buffer.

    Attributes:
        head: What it is.
        nbytes: Of the buffer.
        extents: Of all that is in it, for their digests.
        description: The layout, for a load. A keeper does not decode it.
        inline: The bytes of what is not in the buffer.
        seconds: How long it is kept when the trainer is gone.
        digests_follow: A save writes it, and takes its digests: they come when it is written.
    """

    head: KeptHead
    nbytes: int
    extents: tuple[Extent, ...]
    description: bytes
    inline: bytes
    seconds: float
    digests_follow: bool = False


@dataclass(frozen=True, slots=True)
class WrittenDigests:
    """A state has been written, with these digests: from the trainer.

    Attributes:
        id: Of the state.
        known: As in `StoredItem`, by offset and size in the buffer. Other ranks may have written the rest.
    """

    id: str
    known: Mapping[tuple[int, int], bytes]


@dataclass(frozen=True, slots=True)
class Forget:
    """Keep these states no more. The trainer writes to their buffers when this is answered.

    Attributes:
        ids: Of the states.
        but_copied: One that is being copied stays.
    """

    ids: tuple[str, ...]
    but_copied: bool = False


@dataclass(frozen=True, slots=True)
class Forgotten:
    """These of them are not kept any more, or never were."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)  # it holds a secret
class OpenToPeers:
    """Take replicas from keepers on other hosts, and give them: from the trainer.

    Attributes:
        host: The address of this host to listen on.
        secret: Of the run.
    """

    host: str
    secret: bytes


@dataclass(frozen=True, slots=True)
class Opened:
    """Where the keeper is reached from other hosts."""

    address: Address


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy a state, which is kept, to a keeper on another host: from the trainer.

    Attributes:
        id: Of the state.
        to: That keeper.
        rate: Bytes a second; 0: any number.
        keep: The id of the newest state that all hosts have confirmed; empty if there is none.
    """

    id: str
    to: Address
    rate: float
    keep: str = ""


@dataclass(frozen=True, slots=True)
class LookAtCopy:
    """Say what has become of the last copy: from the trainer."""


@dataclass(frozen=True, slots=True)
class DropCopies:
    """Let the keeper on the other host forget all that it has of this rank: from the trainer."""


@dataclass(frozen=True, slots=True)
class CopyStatus:
    """What has become of the last copy.

    Attributes:
        id: Of the state; empty if none was copied.
        is_running: It is under way.
        problem: Why it has failed; empty if it has not.
        is_claimed: A later run of the job has the partner now.
        is_full: The partner has no memory for it.
        is_given_up: The memory of the state was needed.
    """

    id: str = ""
    is_running: bool = False
    problem: str = ""
    is_claimed: bool = False
    is_full: bool = False
    is_given_up: bool = False


@dataclass(frozen=True, slots=True)
class Look:
    """Say which states are there: from any process."""


@dataclass(frozen=True, slots=True)
class Found:
    """The states that are there.

    Attributes:
        job: The run of the job.
        trainer: The process id of the trainer.
        is_orphaned: The trainer is gone.
        heads: Of the parts of states that are there, the trainer's own and replicas, the oldest first.
        address: Where it is reached from other hosts; None if it is not.
    """

    job: str
    trainer: int
    is_orphaned: bool
    heads: tuple[KeptHead, ...]
    address: Address | None = None


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """Refuse all others as long as this connection is open: from a successor."""

    job: str


@dataclass(frozen=True, slots=True)
class Claimed:
    """The answer to a claim: whether it holds; not if the trainer lives, or another job has claimed the keeper."""

    holds: bool


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


@dataclass(frozen=True, slots=True)
class End:
    """End, because the states are no longer needed: from the trainer or a successor."""


Request = (
    Keep | WrittenDigests | Forget | OpenToPeers | Copy | LookAtCopy | DropCopies | Look | ClaimRequest | Take | End
)
Answer = Done | Forgotten | Opened | CopyStatus | Found | Claimed | KeptContent | Failed
