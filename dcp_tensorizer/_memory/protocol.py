"""The requests of trainers and their successors to a keeper, and its answers: pickles between processes of one user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from .._index.schema import SaveRecord
from .._runtime.channel import Done, Failed
from .wire import Address


class Extent(NamedTuple):
    """Location of the bytes of a tensor or object."""

    is_inline: bool  # in `StatePart.inline`; otherwise in the staging buffer
    offset: int
    nbytes: int


class StateHead(NamedTuple):
    """Facts about a rank's part of a state in memory, which are needed before the state is loaded.

    Attributes:
        id: 32 hexadecimal digits; the same on all ranks.
        number: A later state of a run has a larger number.
        job: The run of the job that made the state. Each restart begins another run.
        record: The `SaveRecord` of the manager, which an index stores; None without a manager.
        parent_step: The step of the last checkpoint before the state; None without a checkpoint.
        left: If the job has gone back to an earlier step and has not saved since, the id of the checkpoint that was the
            newest then; otherwise None.
        folder: The device and the inode of the job's folder, as ``host`` sees them. None if the folder is not local, or
            did not exist yet.
        host: The host that held the state first (see `this_host`); empty if unknown.
        line: The ids of the checkpoint that the run resumed from, and of those that it has saved since, the newest
            first.
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
    host: str = ""
    line: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        assert self.record is not None, "a manager's states have records"
        return self.record.step


@dataclass(frozen=True, slots=True)
class StatePart:
    """A rank's part of a state in memory.

    The trainer sends the part to its keeper with the descriptor of the staging buffer, and without digests. The keeper
    sends the part with the digests: to a successor on this host together with that descriptor; to other hosts, as the
    record that `replicas` describes.
    """

    head: StateHead
    nbytes: int  # the size of the buffer
    extents: tuple[Extent, ...]  # all tensors and objects, in the order of their digests
    description: bytes  # an index of this part alone, for a load; a keeper does not decode it
    inline: bytes  # the bytes that are not in the buffer
    digests_follow: bool = False  # a save writes the state, and then the trainer sends the digests
    digests: tuple[bytes, ...] = ()  # of each extent, as in `StoredItem`


@dataclass(frozen=True, slots=True)
class WrittenDigests:
    """Message from the trainer with the digests of a state that a save has written."""

    id: str
    known: Mapping[tuple[int, int], bytes]  # by offset and size in the buffer; of the unencrypted items of this rank


@dataclass(frozen=True, slots=True)
class Forget:
    """Request to forget states. The answer has the ids of states whose buffers the trainer may write to again."""

    ids: tuple[str, ...]
    but_copied: bool = False  # the state whose copy is in progress, or was made last, stays


@dataclass(frozen=True, slots=True, repr=False)  # it holds a secret
class OpenToPeers:
    """The trainer's request that its keeper exchange replicas with keepers on other hosts.

    The answer is an `Address`.
    """

    host: str  # the address of this host to listen on
    secret: bytes  # of this keeper: whoever knows it may connect
    anew: bool = False  # stop listening at the previous address, and close its connections


@dataclass(frozen=True, slots=True)
class Copy:
    """The trainer's request that its keeper copy a state in memory to a keeper on another host."""

    id: str
    to: Address
    rate: float  # bytes a second; 0: no limit
    confirmed: str = ""  # the newest state that is copied from all ranks; empty without such a state


@dataclass(frozen=True, slots=True)
class CopyStatus:
    id: str = ""  # the id of the state; empty before the first copy
    is_running: bool = False
    problem: str = ""  # why the copy has failed; empty otherwise
    is_claimed: bool = False  # a later run of the job has claimed the partner's keeper
    is_full: bool = False  # the partner host has too little memory
    is_given_up: bool = False  # the memory of the state was needed


@dataclass(frozen=True, slots=True)
class Found:
    """States that a keeper holds, and its trainer."""

    job: str  # the run of the job
    trainer: int  # the process id of the trainer
    heads: tuple[StateHead, ...]  # the trainer's own parts of states, and replicas; the oldest first
    address: Address | None = None  # the keeper's address for other hosts; None if it is not open to them


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """A successor's request that the keeper serve only the successor's run while this connection is open.

    Refused while the trainer lives, and while another run has claimed the keeper.
    """

    job: str


@dataclass(frozen=True, slots=True)
class GetPart:
    id: str
    rank: int


class Plain(Enum):
    LIST = auto()  # list the states: from any process
    COPY_STATUS = auto()  # return the status of the last copy: from the trainer
    DROP_COPIES = auto()  # make the partner's keeper forget its copies of this rank's states: from the trainer
    END = auto()  # end, because the states are no longer needed: from the trainer or a successor


Request = StatePart | WrittenDigests | Forget | OpenToPeers | Copy | ClaimRequest | GetPart | Plain
Answer = Done | Failed | Found | StatePart | CopyStatus | Address | tuple[str, ...]
