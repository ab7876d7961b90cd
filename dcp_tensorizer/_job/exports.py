"""Exports of a job: models for inference, written from the state that a save has staged."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from .._memory.survival import OnStaged
from .._models.save import ModelSaver
from .._models.ties import ties_of
from .._models.versions import NotPublished
from .._runtime.patterns import matches
from .._runtime.threads import Deadline
from .._runtime.torch_compat import flatten_state_dict
from .._staging.staged_save import StagedStateDict
from .._storage.lease import Lease
from ..errors import WriteError, describe, listed, unwrap
from ..models import Export, SafetensorsStorageWriter
from ..planner import SavePlanner
from ..writer import TensorizerStorageWriter
from .ranks import Heartbeats
from .steps import Step

logger = logging.getLogger("dcp_tensorizer")


class Exports:
    """Exports of one rank. Each staged state stays until the next one is staged, so that it can be exported.

    The argument ``writer`` is the job's writer. The attribute ``writer`` writes the models. ``owner`` is the lease of
    the saves' folder.
    """

    def __init__(
        self,
        export: Export,
        writer: TensorizerStorageWriter,
        heartbeats: Heartbeats,
        owner: Lease,
    ) -> None:
        self._export = export
        self._heartbeats = heartbeats
        options = writer.saver.options
        self.writer = SafetensorsStorageWriter(
            **export.arguments(),
            staging=options.staging,
            sync_files=options.sync_files,
            thread_count=options.thread_count,
            storage_options=export.storage_options,
            limits=options.limits,
        )
        self.writer.saver.owner = owner
        self._planner = SavePlanner()
        self._staged: StagedStateDict | None = None
        self._owns_staged = False  # whether this object frees the buffer of `_staged`
        self._exported = 0
        self._continued_from = 0

    def continue_from(self, step: int) -> None:
        """Records that the job resumes from a step: no export is due for the steps up to it."""
        self._continued_from = self._exported = step

    def is_due(self, step: int) -> bool:
        every = self._export.every
        return every is not None and step // every > self._exported // every

    def release_staged(self) -> None:
        """Frees the buffer of the last state, unless the keeper does.

        Call it before the next state is staged. `close` also calls it.
        """
        staged, self._staged = self._staged, None
        if staged is not None and self._owns_staged and staged.staged_save.buffer is not None:
            staged.staged_save.buffer.is_kept = False

    def retaining(self, ties: Mapping[str, str], on_staged: OnStaged | None) -> OnStaged:
        """Returns a function that retains a staged state for its export, and then calls ``on_staged``.

        A buffer has one owner, which frees it: with ``on_staged``, the keeper, and otherwise this object.
        """

        def retain(staged: StagedStateDict) -> None:
            staged.staged_save.ties = ties
            self._staged, self._owns_staged = staged, on_staged is None
            if on_staged is not None:
                on_staged(staged)

        return retain

    def run(self, saved: Step) -> Exception | None:
        """Exports the state that was staged last. Collective. Returns the error, or None."""
        staged = self._staged
        if staged is None:
            return None
        self._exported = saved.number
        path = self._export.path_of(saved.number)
        saver = self.writer.saver
        assert isinstance(saver, ModelSaver)
        saver.source = staged.staged_save
        try:
            save(
                self._chosen(staged),
                checkpoint_id=path,
                storage_writer=self.writer,
                planner=self._planner,
                process_group=self._heartbeats.group,
            )
        except (Exception, CheckpointException) as error:  # CheckpointException does not derive from Exception
            cause = unwrap(error)
            is_exported = isinstance(cause, NotPublished)
            what = "exported, but an earlier export was not published" if is_exported else "saved, but not exported"
            failure = WriteError(f"step {saved.number} was {what}: {describe(cause)}")
            failure.__cause__ = cause
            logger.error("%s", failure)
            return failure
        finally:
            saver.source = None
        return None

    def run_last(self, saved: Step | None) -> Exception | None:
        """Exports the last save of the job, if ``at_end`` is set and an export of the save is still missing.

        Collective. Returns the error, or None. The step that the job resumed from is not exported again.
        """
        if (
            not self._export.at_end
            or saved is None
            or saved.number == self._exported
            or saved.number <= self._continued_from
        ):
            return None
        return self.run(saved)

    @property
    def publishes(self) -> bool:
        return self._export.publish is not None

    def wait_published(self, deadline: Deadline) -> Exception | None:
        try:
            self.writer.wait_published(deadline.left)
        except WriteError as error:
            return error
        return None

    def close(self) -> None:
        self.release_staged()
        self.writer.close(0.0)

    def _chosen(self, staged: StagedStateDict) -> dict[str, Any]:
        # `StagedStateDict.items` would bind the state to a save; `dict` copies it without calling `items`.
        flat, _ = flatten_state_dict(dict(staged))
        omitted = staged.staged_save.description.omitted
        chosen = {key: value for key, value in flat.items() if matches((key,), self._export.include)}
        if not chosen:
            raise WriteError(
                f"Export(include=) must match a key of the state, got {listed(list(self._export.include))}. The state "
                f"has {listed(list(flat))}."
            )
        return {key: value for key, value in chosen.items() if key not in omitted}


def ties_in(collected: Mapping[str, Any]) -> Mapping[str, str]:
    with suppress(Exception):  # staging or the planner reports the error
        return ties_of(collected)
    return {}
