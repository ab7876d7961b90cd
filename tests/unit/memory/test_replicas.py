"""Replicas of states on other keepers: real keepers, connected by TCP."""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import xxhash

from dcp_tensorizer import ReadError, WriteError
from dcp_tensorizer._index.schema import SaveRecord
from dcp_tensorizer._memory import keeper as keeper_module
from dcp_tensorizer._memory import replicas as replicas_module
from dcp_tensorizer._memory.client import KeeperConnection, KeeperProcess, connect_to_keepers
from dcp_tensorizer._memory.keeper import Keeper
from dcp_tensorizer._memory.protocol import (
    ClaimRequest,
    Copy,
    CopyStatus,
    Extent,
    GetPart,
    OpenToPeers,
    Plain,
    StateHead,
    StatePart,
)
from dcp_tensorizer._memory.replicas import (
    BLOCK,
    Block,
    NotCopied,
    Record,
    RemotePart,
    ReplicaAnswer,
    ReplicaOffer,
    Throttle,
    copy_part,
    decoded,
    drop_copies,
)
from dcp_tensorizer._memory.wire import Address, Wire, WireError
from dcp_tensorizer._runtime.channel import Done
from dcp_tensorizer._staging.shared_memory import SharedBuffer
from dcp_tensorizer._tensor_file.digests import digests_of

from ...lab.processes import open_descriptors
from ...lab.ranks import eventually
from .test_keeper import ask, connected

SECRET = bytes(range(32))
NBYTES = 3 * BLOCK + 4096


def part(number: str, rank: int = 0, nbytes: int = NBYTES) -> StatePart:
    head = StateHead(number, 1, "run", rank, 2, SaveRecord(1, None, (("b", 0),), {"loss": 0.5}), folder=(1, 2))
    extents = (Extent(is_inline=False, offset=64, nbytes=nbytes - 64), Extent(is_inline=True, offset=0, nbytes=3))
    return StatePart(head, nbytes, extents, b"what is where", b"abc")


def with_digests(part: StatePart, data: bytes) -> StatePart:
    return replace(part, digests=(digests_of(data[64:]), digests_of(b"abc")))


def opened(keeper: Keeper) -> Address:
    with connected(keeper) as trainer:
        address = ask(trainer, OpenToPeers("127.0.0.1", SECRET))
    assert isinstance(address, Address)
    return address


@pytest.fixture
def buffer() -> Iterator[SharedBuffer]:
    shared = SharedBuffer(NBYTES)
    os.pwrite(shared.fd, os.urandom(NBYTES), 0)
    yield shared
    shared.close()


@pytest.fixture
def source() -> Iterator[KeeperProcess]:
    keeper = KeeperProcess("test-source", "run", 60.0)
    yield keeper
    keeper.end()


@pytest.fixture
def partner() -> Iterator[KeeperProcess]:
    keeper = KeeperProcess("test-partner", "run", 60.0)
    yield keeper
    keeper.end()


def copied(source: KeeperProcess) -> CopyStatus:
    """Returns the status of a copy that is over."""

    def over() -> CopyStatus | None:
        status = status_of_copy(source)
        return None if status.is_running else status

    return eventually(over)


def status_of_copy(source: KeeperProcess) -> CopyStatus:
    return source.ask(Plain.COPY_STATUS, CopyStatus)


def found(job: str) -> KeeperConnection:
    (keeper,), _ = connect_to_keepers(job, 5.0)
    return keeper


def test_a_state_is_copied_and_read_from_afar(
    source: KeeperProcess, partner: KeeperProcess, buffer: SharedBuffer
) -> None:
    """The partner sends the whole part to a process of its host, and ranges of it to other hosts."""
    address = partner.ask(OpenToPeers("127.0.0.1", SECRET), Address)
    state, data = part("a"), os.pread(buffer.fd, NBYTES, 0)
    source.hold(state, buffer)
    source.ask(Copy("a", address, 0.0), Done)
    assert copied(source) == CopyStatus("a")
    with closing(found("test-partner")) as keeper:
        assert keeper.found.heads == (state.head,)
        assert keeper.found.address == address
        content, fd = keeper.part("a", 0)
        assert content == with_digests(state, data)
        assert os.pread(fd.number, NBYTES, 0) == data
        fd.close()
    remote = RemotePart(address, "a", 0)
    assert remote.record() == content
    pieces = [memoryview(bytearray(n)) for n in (1, 0, BLOCK, 4096)]
    remote.read_into(pieces, 100)
    assert b"".join(pieces) == data[100 : 100 + BLOCK + 4097]
    with pytest.raises(OSError, match="the range extends beyond the part"):
        remote.read_into(pieces, 2 * BLOCK)
    remote.release()
    with pytest.raises(ReadError, match="the keeper does not hold this part of the state"):
        RemotePart(address, "a", 1).record()


def test_ranges_are_read_over_one_connection(buffer: SharedBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next read of a part uses the connection of the one before."""
    keeper, data = Keeper("run", 7, 60.0), os.pread(buffer.fd, NBYTES, 0)
    address = opened(keeper)
    copy_part(address, with_digests(part("a"), data), buffer.fd, "", Throttle(0), lambda: True)
    wires = list[Wire]()
    connect = Address.connect
    monkeypatch.setattr(Address, "connect", lambda self: wires.append(connect(self)) or wires[-1])
    remote = RemotePart(address, "a", 0)
    remote.record()
    for start in (0, BLOCK):
        content = memoryview(bytearray(BLOCK))
        remote.read_into([content], start)
        assert content == data[start : start + BLOCK]
    remote.release()
    ((fd, _),) = keeper.drop_replicas(part("a").head, "")
    os.close(fd)
    assert len(wires) == 1


def test_the_digests_of_a_replica_are_not_computed(buffer: SharedBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come with it, also when the keeper computes the digests of all parts that have none."""
    keeper, content = Keeper("run", 7, 60.0), with_digests(part("a"), os.pread(buffer.fd, NBYTES, 0))
    copy_part(opened(keeper), content, buffer.fd, "", Throttle(0), lambda: True)
    computed = list[int]()
    monkeypatch.setattr(keeper_module, "Digester", computed.append)
    keeper.orphan()
    with connected(keeper) as visitor:
        assert ask(visitor, GetPart("a", 0)) == content
    keeper._digesting.submit(int).result()  # after all computations that have been requested
    assert computed == []
    ((fd, _),) = keeper.drop_replicas(content.head, "")
    os.close(fd)


def test_older_replicas_go(source: KeeperProcess, partner: KeeperProcess, buffer: SharedBuffer) -> None:
    """Only the confirmed and the newest replica stay."""
    address = partner.ask(OpenToPeers("127.0.0.1", SECRET), Address)
    for number, keep in (("a", ""), ("b", "a"), ("c", "a"), ("d", "c")):
        source.hold(part(number), buffer)
        source.ask(Copy(number, address, 0.0, keep), Done)
        assert copied(source) == CopyStatus(number)
        with closing(found("test-partner")) as keeper:
            assert [head.id for head in keeper.found.heads] == ([keep] if keep else []) + [number]


def test_a_copy_that_is_given_up(source: KeeperProcess, partner: KeeperProcess, buffer: SharedBuffer) -> None:
    """If the memory is needed, the copy ends, and the partner holds nothing of it."""
    address = partner.ask(OpenToPeers("127.0.0.1", SECRET), Address)
    source.hold(part("a"), buffer)
    source.ask(Copy("a", address, 1e6), Done)
    source.forget(["a"], but_copied=True)
    assert source.held == {"a": buffer}
    assert status_of_copy(source) == CopyStatus("a", is_running=True)
    source.forget(["a"])
    assert (source.held, buffer.is_kept) == ({}, False)
    assert copied(source) == CopyStatus("a", problem="the trainer has taken back its staging buffer", is_given_up=True)
    with closing(found("test-partner")) as keeper:
        assert keeper.found.heads == ()


def test_a_copy_that_is_given_up_for_the_next(
    source: KeeperProcess, partner: KeeperProcess, buffer: SharedBuffer
) -> None:
    """The next copy begins immediately, and the end of the one before does not change its status."""
    address = partner.ask(OpenToPeers("127.0.0.1", SECRET), Address)
    source.hold(part("a"), buffer)
    source.ask(Copy("a", address, 1e5), Done)
    source.hold(part("b"), buffer)
    with pytest.raises(WriteError, match="another state is being copied"):
        source.ask(Copy("b", address, 0.0), Done)
    source.forget(["a"])
    source.ask(Copy("b", address, 0.0), Done)
    assert copied(source) == CopyStatus("b")
    with closing(found("test-partner")) as keeper:
        assert [head.id for head in keeper.found.heads] == ["b"]


def test_a_copy_that_is_no_longer_wanted_is_not_offered() -> None:
    """An unwanted copy makes no offer, which would end the copy of a newer state of that rank."""
    keeper = Keeper("run", 7, 60.0)
    address = opened(keeper)
    with closing(address.connect()) as offering, closing(address.connect()) as joined:
        newer = ReplicaOffer(part("b").head, NBYTES, 1, "")
        copy = offering.ask(newer, ReplicaAnswer).copy
        with pytest.raises(NotCopied, match="the trainer has taken back its staging buffer"):
            copy_part(address, with_digests(part("a"), bytes(NBYTES)), 0, "", Throttle(0), lambda: False)
        assert joined.ask(msgspec.structs.replace(newer, copy=copy), ReplicaAnswer) == ReplicaAnswer()
        joined.send(Block(0, BLOCK, xxhash.xxh3_128_digest(bytes(BLOCK)), is_last=True))
        joined.send_bytes(memoryview(bytearray(BLOCK)))
        assert joined.receive(ReplicaAnswer) == ReplicaAnswer()


def test_a_copy_counts_only_beside_its_own_part(
    source: KeeperProcess, partner: KeeperProcess, buffer: SharedBuffer
) -> None:
    """The source holds a copied part until all ranks have confirmed it. If the part must go, the copy has failed."""
    source.hold(part("a"), buffer)
    source.ask(Copy("a", partner.ask(OpenToPeers("127.0.0.1", SECRET), Address), 0.0), Done)
    assert copied(source) == CopyStatus("a")
    source.forget(["a"], but_copied=True)
    assert (source.held, status_of_copy(source)) == ({"a": buffer}, CopyStatus("a"))
    source.forget(["a"])
    assert source.held == {}
    assert status_of_copy(source) == CopyStatus(
        "a", problem="the trainer has taken back its staging buffer", is_given_up=True
    )


def test_a_partner_that_another_run_has_claimed() -> None:
    """A claimed partner refuses copies of this run, also after the claim has ended, and reports why."""
    keeper = Keeper("run", 7, 60.0)
    address = opened(keeper)
    keeper.orphan()
    with connected(keeper) as visitor:
        assert ask(visitor, ClaimRequest("next")) == Done()
    with pytest.raises(NotCopied, match=r"a later run of this job \(next\) has claimed") as refused:
        copy_part(address, with_digests(part("a"), bytes(NBYTES)), 0, "", Throttle(0), lambda: True)
    assert refused.value.is_claimed


def test_what_a_claim_finds_stays(buffer: SharedBuffer) -> None:
    """A claimed partner does not complete the copy in progress, and the older run cannot remove replicas."""
    keeper = Keeper("run", 7, 60.0)
    address = opened(keeper)
    data = os.pread(buffer.fd, NBYTES, 0)
    copy_part(address, with_digests(part("a"), data), buffer.fd, "", Throttle(0), lambda: True)
    keeper.orphan()

    def claim_in_the_midst() -> bool:
        keeper._claimed_by = "next"
        return True

    with pytest.raises(NotCopied, match="has claimed"):
        copy_part(address, with_digests(part("b"), data), buffer.fd, "a", Throttle(0), claim_in_the_midst)
    with pytest.raises(OSError, match="has claimed"):
        drop_copies(address, part("b").head)
    ((fd, _),) = keeper.drop_replicas(part("a").head, "b")
    os.close(fd)


def test_a_partner_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The partner checks its free memory before it allocates, and leaves a reserve to other programs."""
    monkeypatch.setattr(replicas_module, "available_memory", lambda: NBYTES + replicas_module.RESERVE)
    keeper = Keeper("run", 7, 60.0)
    address = opened(keeper)
    before = open_descriptors()
    with pytest.raises(NotCopied, match="the partner host cannot allocate") as refused:
        copy_part(address, with_digests(part("a"), bytes(NBYTES)), 0, "", Throttle(0), lambda: True)
    assert refused.value.is_full
    eventually(lambda: open_descriptors().items() <= before.items())


def test_a_partner_that_is_gone() -> None:
    """The error has the partner's address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address("127.0.0.1", listener.getsockname()[1], SECRET)
    with pytest.raises(NotCopied, match=f"the copy to the keeper at 127.0.0.1:{address.port} has failed: "):
        copy_part(address, with_digests(part("a"), bytes(NBYTES)), 0, "", Throttle(0), lambda: True)


def test_what_is_not_whole_is_not_there() -> None:
    """A copy with a missing or a changed block is never held."""
    keeper = Keeper("run", 7, 60.0)
    address = opened(keeper)
    data = bytes(BLOCK)
    content = with_digests(part("a", nbytes=2 * BLOCK), bytes(2 * BLOCK))
    record = msgspec.msgpack.encode(content)
    for is_changed in (False, True):
        with closing(address.connect()) as wire:
            offer = ReplicaOffer(content.head, 2 * BLOCK, len(record), "")
            assert wire.ask(offer, ReplicaAnswer).copy
            with pytest.raises(ConnectionError):
                _send_a_part(wire, data, b"other" if is_changed else data, record)
    assert keeper.digested_part("a", 0, 0.0) is None
    eventually(lambda: not [name for name in _open_files() if "replica" in name])


def _send_a_part(wire: Wire, data: bytes, digested: bytes, record: bytes) -> None:
    wire.send(Block(0, BLOCK, xxhash.xxh3_128_digest(digested), is_last=True))
    wire.send_bytes(memoryview(data))
    wire.receive(ReplicaAnswer)
    wire.send(Record(xxhash.xxh3_128_digest(record)))
    wire.send_bytes(memoryview(record))
    wire.receive(ReplicaAnswer)


def _open_files() -> list[str]:
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return names


def test_a_record_that_describes_more_than_there_is() -> None:
    """The record is refused, because a read would go past the end of the buffer."""
    content = with_digests(part("a"), bytes(NBYTES))
    assert decoded(msgspec.msgpack.encode(content)) == content
    for bad in (
        replace(content, digests=content.digests[:1]),
        part("a", nbytes=2 * BLOCK),
        replace(content, nbytes=64),
    ):
        with pytest.raises(WireError, match="the extents, digests and sizes in the record do not match"):
            decoded(msgspec.msgpack.encode(bad))
    with pytest.raises(WireError, match="cannot be decoded"):
        decoded(b"\x80\x05.")


def test_the_rate() -> None:
    """All threads together send at the rate, and the first does not wait."""
    throttle = Throttle(1e6)
    threads = [threading.Thread(target=throttle.wait, args=(10_000,)) for _ in range(6)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started >= 0.05


def niceness_of_session(keeper: KeeperProcess) -> int | None:
    """Returns the niceness of a keeper's session, or None if the kernel does not schedule sessions."""
    with suppress(FileNotFoundError):
        return int(Path(f"/proc/{keeper.pid}/autogroup").read_text().split()[-1])
    return None


def runs_at(keeper: KeeperProcess, priorities: set[int]) -> bool:
    """Returns whether a keeper has threads of each of these priorities."""
    found = set[int]()
    for thread in Path(f"/proc/{keeper.pid}/task").iterdir():
        with suppress(OSError):  # it has just ended
            found.add(os.getpriority(os.PRIO_PROCESS, int(thread.name)))
    return found >= priorities


def test_copies_are_of_low_priority(source: KeeperProcess, partner: KeeperProcess, buffer: SharedBuffer) -> None:
    """Copies have a low priority, whether the kernel schedules threads or sessions."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    address = partner.ask(OpenToPeers("127.0.0.1", SECRET), Address)
    source.ask(OpenToPeers("127.0.0.1", SECRET), Address)
    assert eventually(lambda: niceness_of_session(source) in (None, 10))
    source.hold(part("a"), buffer)
    source.ask(Copy("a", address, 1e6), Done)  # it takes two seconds
    for keeper in (source, partner):
        assert eventually(functools.partial(runs_at, keeper, {own, 19}))
    source.forget(["a"])


@pytest.mark.parametrize(("seconds", "lower"), [(0.0, False), (60.0, True)], ids=["live", "kept"])
def test_digests_have_a_low_priority_unless_replicas_wait_for_them(
    buffer: SharedBuffer, seconds: float, lower: bool
) -> None:
    """Peers wait for the digests of a live state, but not for those of a state that is held for a restart."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    keeper = KeeperProcess("test-digests", "run", seconds)
    try:
        remote = RemotePart(keeper.ask(OpenToPeers("127.0.0.1", SECRET), Address), "a", 0)
        keeper.hold(part("a"), buffer)
        remote.record(60.0)  # the digests are taken
        remote.release()
        priorities = set[int]()
        for task in Path(f"/proc/{keeper.pid}/task").iterdir():
            with suppress(ProcessLookupError):  # that of the connection ends after it is released
                priorities.add(os.getpriority(os.PRIO_PROCESS, int(task.name)))
        assert priorities == {own} | ({10} if lower else set())
    finally:
        keeper.end()


def test_an_address_stays_until_another_is_requested() -> None:
    """A second request returns the same address. A request for a new one closes it, and has its own secret."""
    keeper, other = Keeper("run", 7, 60.0), bytes(32)
    first = opened(keeper)
    with connected(keeper) as trainer:
        assert ask(trainer, OpenToPeers("127.0.0.1", other)) == first
        first.connect().close()
        anew = ask(trainer, OpenToPeers("127.0.0.1", other, anew=True))
    assert isinstance(anew, Address) and anew.secret == other
    anew.connect().close()
    with pytest.raises(ConnectionRefusedError):
        first.connect()


def test_a_keeper_that_is_left(source: KeeperProcess) -> None:
    """A successor can claim a keeper that its trainer has left, even while the trainer lives."""
    assert status_of_copy(source) == CopyStatus()  # it has started
    with closing(found("test-source")) as keeper:
        assert not keeper.claim("next")
        source.leave()
        assert eventually(lambda: keeper.claim("next"))
        keeper.end()


def test_a_successor_does_not_wait_behind_others(source: KeeperProcess) -> None:
    """A keeper whose trainer is gone has the priority of any other process."""
    source.leave()
    assert eventually(lambda: niceness_of_session(source) in (None, 0))
    with closing(found("test-source")) as keeper:
        keeper.end()
