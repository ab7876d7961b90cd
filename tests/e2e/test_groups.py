"""Saves of several process groups, which no order ties to each other."""

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter

from .ranks import run_ranks

WORLD = 2
SAVES = 2


def _start_in_another_order(rank, folder):
    """Starts a save of each group, on each rank with another one first; returns what the checkpoints hold."""
    groups = [dist.new_group(backend="gloo", timeout=timedelta(seconds=30)) for _ in range(SAVES)]
    order = range(SAVES) if rank.index == 0 else reversed(range(SAVES))
    with TensorizerStorageWriter() as writer:
        futures = [
            dcp.async_save(
                {"w": torch.full((1000,), float(number)), f"rank{rank.index}": torch.tensor(number)},
                checkpoint_id=folder / str(number),
                storage_writer=writer,
                process_group=groups[number],
            )
            for number in order
        ]
        for future in futures:
            future.result()
    found = []
    for number in range(SAVES):
        state = {"w": torch.zeros(1000), **{f"rank{index}": torch.tensor(-1) for index in range(WORLD)}}
        dcp.load(state, storage_reader=TensorizerStorageReader(folder / str(number)), no_dist=True)
        found.append([float(state["w"].min()), *(int(state[f"rank{index}"]) for index in range(WORLD))])
    return found


def test_ranks_may_start_saves_of_two_groups_in_another_order(tmp_path):
    """None waits for a save that the other rank starts later, though one thread and one writer start them."""
    for found in run_ranks(WORLD, _start_in_another_order, tmp_path):
        assert found == [[0.0, 0, 0], [1.0, 1, 1]]
