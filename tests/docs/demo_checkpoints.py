"""Checkpoints like those that ``make demo`` leaves, made in seconds (``python -m tests.docs.demo_checkpoints FOLDER``).

The same model, and so the same keys and shapes, from one rank; a save that never finished; and, on demand, damage.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from dcp_tensorizer import TensorizerStorageWriter
from dcp_tensorizer._saving.commit import put_records
from dcp_tensorizer._storage.open import open_storage
from examples.model import ByteTransformer

from ..lab.faults import flip

STEPS = (6, 12, 18, 24, 30)
UNFINISHED = 36


def make(folder: Path) -> None:
    """Saves the steps, each with other weights, and leaves the unfinished one."""
    torch.manual_seed(0)
    model = ByteTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with TensorizerStorageWriter() as writer:
        for step in STEPS:
            for parameter in model.parameters():
                parameter.grad = torch.rand_like(parameter)
            optimizer.step()
            weights, moments = get_state_dict(model, optimizer)
            app = {"model": weights, "optimizer": moments, "step": step}
            dcp.save({"app": app}, storage_writer=writer, checkpoint_id=folder / f"step-{step:06}")
    unfinished = folder / f"step-{UNFINISHED:06}"
    unfinished.mkdir()
    put_records(open_storage(unfinished), ["0" * 32])
    (unfinished / f"__0_0_{'0' * 32}.tensors").write_bytes(b"|TENSORIZER|")


def damage(checkpoint: Path) -> None:
    """Changes one byte in the middle of a checkpoint's first file."""
    (path, *_) = sorted(checkpoint.glob("*.tensors"))
    flip(path, path.stat().st_size // 2)


if __name__ == "__main__":
    made = Path(sys.argv[1])
    make(made)
    damage(made / "step-000012")
