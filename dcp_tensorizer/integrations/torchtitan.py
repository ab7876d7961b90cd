"""Checkpoints of torchtitan, saved and loaded by this package: `TensorizerCheckpointManager`.

In the function that makes the trainer's config::

    from dcp_tensorizer.integrations.torchtitan import TensorizerCheckpointManager

    Trainer.Config(..., checkpoint=TensorizerCheckpointManager.Config(enable=True, interval=500, async_mode="async"))
"""

from __future__ import annotations

import re
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save, save

from ..reader import open_reader
from ..writer import TensorizerStorageWriter
from ._needed import needed

with needed(__name__, "torchtitan"):
    from torchtitan.components.checkpointer import MODEL, AsyncMode, CheckpointManager
    from torchtitan.tools import filesystem
    from torchtitan.tools.utils import GarbageCollection

__all__ = ["TensorizerCheckpointManager"]


class TensorizerCheckpointManager(CheckpointManager):
    """torchtitan's ``CheckpointManager`` with this package's storage.

    Folders, steps, the saved state and the steps at which it is saved are torchtitan's. Differences:

    - ``async_mode="async"`` saves while training continues. ``save`` returns when the state is copied.
    - ``async_mode="async_with_pinned_mem"`` also copies while training continues. torchtitan's trainer waits for the
      copy before the next optimizer step. The copy is in pinned memory in both modes.
    - A job resumes from any format that `open_reader` loads, also with ``initial_load_path``. So a job that saved with
      torchtitan's own manager can resume with this one.
    - Only committed checkpoints count for ``keep_latest_k``. In the asynchronous modes, an old checkpoint is removed
      after the commit of the save that takes its place: by the next save, or by ``close``. torchtitan's own manager may
      remove it before that commit. As with that manager, the save of the last step removes nothing.
    - ``close`` waits for the save in progress.

    The error of a failed save is raised once, by the next save or by ``close``. ``last_save_in_hf`` exports as
    torchtitan does.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """torchtitan's options of a ``CheckpointManager``, without additions."""

    save_future: Future[None] | None

    def __init__(self, config: Config, **components: Any) -> None:
        super().__init__(config, **components)
        if self.enable:
            # If a stager is set, torchtitan makes no other. It closes the stager with the manager.
            self.stager = TensorizerStorageWriter(overlap_staging=self.async_mode is AsyncMode.ASYNC_WITH_PINNED_MEM)

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[None] | AsyncSaveResponse | None:
        """Saves with this package, or exports as torchtitan does.

        Returns:
            After a synchronous save, None; after an export, what torchtitan's own method returns; otherwise the result
            of ``dcp.async_save``.
        """
        if to_hf:
            return super().dcp_save(  # type: ignore[no-any-return]
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
        if async_mode is not AsyncMode.DISABLED:
            return async_save(
                state_dict, storage_writer=self.stager, checkpoint_id=checkpoint_id, process_group=self.pg
            )
        save(state_dict, storage_writer=self.stager, checkpoint_id=checkpoint_id)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return None

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Loads any format that `open_reader` recognises. With ``from_hf``, loads with torchtitan's own loader."""
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        load(state_dict, storage_reader=open_reader(checkpoint_id))
        self.states[MODEL].load_state_dict(state_dict)

    def _wait_for_saving(self) -> None:
        in_progress, self.save_future = self.save_future, None  # an error is raised only once
        assert in_progress is not None
        in_progress.result()
        self._purge_stale_checkpoints()

    def _purge_stale_checkpoints(self) -> None:
        """Removes the checkpoints that are older than the ``keep_latest_k`` newest committed ones."""
        if self.save_future is not None or not self._should_purge():
            return  # called again when the save in progress is over
        matches = [re.search(r"step-(\d+)", name) for name in filesystem.listdir(self.folder)]
        paths = {int(match[1]): filesystem.join(self.folder, match.string) for match in matches if match}
        committed = [step for step, path in paths.items() if filesystem.isfile(filesystem.join(path, ".metadata"))]
        kept = sorted(committed)[-self.keep_latest_k :]
        for step in sorted(paths):
            if len(kept) == self.keep_latest_k and step < kept[0]:
                self.purge_queue.put(paths[step])

    def _close(self) -> None:
        try:
            self.maybe_wait_for_saving()
        finally:
            super()._close()
