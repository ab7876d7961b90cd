"""Saves of several ranks in one process, up to the point where data is written: the planners' results."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

Place = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


@dataclass
class Shards:
    """A rank's chunks of a sharded tensor. It has the method that DCP calls on a DTensor to plan a save."""

    shape: tuple[int, ...]
    places: Sequence[Place]
    dtype: torch.dtype = torch.float32
    kind: WriteItemType = WriteItemType.SHARD

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, torch.Size(start)),
                self.kind,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(start), torch.Size(size)),
                    TensorProperties(dtype=self.dtype),
                    torch.Size(self.shape),
                ),
            )
            for start, size in self.places
        ]


@dataclass
class Planned:
    """The results of a planned save: the ranks' plans, the metadata that a rank receives, and the sizes of messages."""

    plans: list[SavePlan]
    metadata: Metadata
    sent: list[int]
    answered: list[int]
    broadcast: int


def plan_save(planners: Sequence[DefaultSavePlanner], states: Sequence[dict[str, Any]]) -> Planned:
    """Calls the planners of all ranks as DCP does, and pickles all that DCP sends from rank to rank."""
    sent = []
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        planner.set_up_planner(state, None, rank == 0)
        sent.append(pickle.dumps(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan([pickle.loads(plan) for plan in sent])
    answers = [pickle.dumps(plan) for plan in plans]
    final = [planner.finish_plan(pickle.loads(answer)) for planner, answer in zip(planners, answers, strict=True)]
    metadata.version, metadata.storage_meta = "1.0.0", StorageMeta("path", "id")
    broadcast = pickle.dumps(metadata)
    return Planned(final, pickle.loads(broadcast), [*map(len, sent)], [*map(len, answers)], len(broadcast))


def shard(shape: tuple[int, ...], rank: int, ranks: int) -> Shards:
    """A rank's rows, as FSDP divides them: the last ranks may have fewer or none."""
    per_rank = -(-shape[0] // ranks)
    start = min(shape[0], rank * per_rank)
    count = min(per_rank, shape[0] - start)
    return Shards(shape, [((start, *(0 for _ in shape[1:])), (count, *shape[1:]))])
