"""Ranks omit the tables that the coordinator has promised, in the same save, to know."""

from __future__ import annotations

import dataclasses

import pytest
from torch.distributed.checkpoint.planner import SavePlan

from dcp_tensorizer._index.locations import RankLocations
from dcp_tensorizer._saving.tables import KnownTables, Offer, SaveTables
from dcp_tensorizer._tensor_file.names import StoredItem
from dcp_tensorizer.errors import WriteError

PLAN = SavePlan([], planner_data={"w": ("w",)})


def part(rank: int = 1, save: str = "a", offset: int = 0, seed: int = 0) -> RankLocations:
    """Returns a rank's locations. The table is the same for all seeds, and the digests are not."""
    file = f"__{rank}_0_{save * 32}.tensors"
    item = StoredItem(file, "w", offset, 4, "bfloat16", "tensor", bytes([seed]) * 8)
    return RankLocations.of(rank, {("w", (rank,)): item}, {file: 100})


def save(
    rank: KnownTables, coordinator: KnownTables, written: RankLocations, save_id: str
) -> tuple[bool, RankLocations]:
    """Saves from one rank. Returns whether it sent its table, and the locations that the coordinator completed."""
    here, there = SaveTables(rank, save_id), SaveTables(coordinator, f"{save_id} of the coordinator")
    sent = here.shortened(written, there.answer(here.offer(PLAN)))
    (whole,) = there.completed([sent])
    return bool(sent.table), whole


def test_a_table_is_sent_once() -> None:
    """A rank sends each table once. Digests are sent each time, and the completed section is whole each time."""
    rank, coordinator = KnownTables(), KnownTables()
    sent = []
    for number, offset in enumerate([0, 0, 8, 0, 8]):
        written = part(save="abcde"[number], offset=offset, seed=number)
        was_sent, whole = save(rank, coordinator, written, str(number))
        assert whole == written and whole.section == written.section
        sent.append(was_sent)
    assert sent == [True, False, True, False, False]


def test_another_coordinator_is_sent_everything() -> None:
    """A restarted coordinator, or that of another group, promises nothing, and gets the table."""
    rank = KnownTables()
    for coordinator in (KnownTables(), KnownTables()):
        assert [save(rank, coordinator, part(), name)[0] for name in "ab"] == [True, False]


def test_answers_to_other_saves_count_for_nothing() -> None:
    """A rank ignores the answer to another save, and sends a table that a failed save has not delivered."""
    rank, coordinator = KnownTables(), KnownTables()
    save(rank, coordinator, part(), "a")
    stale = SaveTables(coordinator, "b").answer(SaveTables(rank, "a").offer(PLAN))
    assert stale.storage_data == Offer("a", (part().table_digest,), save="b")
    assert SaveTables(rank, "b").shortened(part(), stale).table == part().table
    assert SaveTables(rank, "b").shortened(part(), PLAN).table == part().table
    SaveTables(rank, "c").shortened(part(offset=8), PLAN)
    assert save(rank, coordinator, part(offset=8), "d")[0]


def test_what_is_promised_is_kept() -> None:
    """The coordinator holds promised tables until the save ends, even if its cache is full in between."""
    rank, coordinator = KnownTables(), KnownTables(max_bytes=len(part().table))
    save(rank, coordinator, part(), "a")
    here, there = SaveTables(rank, "b"), SaveTables(coordinator, "c")
    answer = there.answer(here.offer(PLAN))
    coordinator.cached.add(part(rank=2).table_digest, part(rank=2).table)
    assert coordinator.cached.find(part().table_digest) is None
    sent = here.shortened(part(), answer)
    assert (sent.table, there.completed([sent])) == (b"", [part()])
    assert coordinator.cached.find(part(rank=2).table_digest) is None


def test_a_table_that_the_coordinator_does_not_know_is_an_error() -> None:
    """An unknown table fails the commit with the rank's number, so that no incomplete index is written."""
    with pytest.raises(WriteError, match=r"rank 1 has not sent the locations of its data"):
        SaveTables(KnownTables(), "a").completed([part()._replace(table=b"")])


def test_plans_are_otherwise_as_they_were() -> None:
    """An offer changes only its plan, and a plan without an offer gets no answer."""
    known = KnownTables()
    assert SaveTables(known, "a").offer(PLAN).storage_data == Offer("a", ())
    assert SaveTables(known, "a").answer(PLAN) is PLAN
    known.sent.append(b"digest")
    offered = SaveTables(known, "a").offer(PLAN)
    assert offered == dataclasses.replace(PLAN, storage_data=Offer("a", (b"digest",)))
    assert PLAN.storage_data is None
    assert SaveTables(known, "b").answer(offered).storage_data == Offer("a", (), save="b")


def test_all_ranks_are_told_the_id_of_the_save() -> None:
    """A rank takes the save's id from the answer to its own save, and from no other answer."""
    answer = SaveTables(KnownTables(), "b").answer(SaveTables(KnownTables(), "a").offer(PLAN))
    assert [SaveTables(KnownTables(), rank).save_of(answer) for rank in "ac"] == ["b", ""]
    assert SaveTables(KnownTables(), "a").save_of(PLAN) == ""
