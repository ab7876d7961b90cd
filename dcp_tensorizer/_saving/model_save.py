"""The session of a save of a model: the work of one rank in each of DCP's hooks, from the first to the last."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from .._index.chunks import Region
from .._index.schema import item_key
from .._runtime.threads import Deadline
from .._runtime.torch_compat import group_of_save, state_of_save
from .._staging.staged_save import StagedSave, StagedStateDict
from .._storage.open import open_storage
from .._writer_process.protocol import FileResult, WriteDone
from .._writer_process.shared_job import PartsWritten, Pieces
from ..errors import StagingError, WriteError, listed
from .destination import Destination
from .item_bytes import ItemBytes
from .keeping import KeptSave
from .model_destination import ModelDestination
from .model_layout import ModelOptions, ModelPlan, RankLayout, plan_model, rank_layout
from .model_pieces import PieceExchange, TensorPart, part_of_row, pieces_of, round_count, split
from .options import SaveOptions
from .rank_group import RankGroup
from .report import SaveCallbacks
from .save import SaveSession
from .saver import SaveDescription, Saver
from .ties import live_state, ties_of
from .versions import SavedModel, VersionsOfWriter
from .write_plan import Item, plan_with, resolve


class ModelSession(SaveSession):
    """One save of a model, as one rank sees it; all runs on the save's thread."""

    _destination: ModelDestination
    _context: ModelSaver

    def __init__(
        self, context: ModelSaver, save_id: str, destination: ModelDestination, staged_save: StagedSave | None
    ) -> None:
        super().__init__(context, save_id, destination, staged_save)
        self._ties: Mapping[str, str] = {} if staged_save is None else staged_save.ties
        self._untied: list[str] = []  # names of tensors that have elements here, and are tied to nothing
        self._order: dict[str, int] = {}
        self._model: ModelPlan | None = None

    def prepare(self, plan: SavePlan) -> SavePlan:
        """Creates the directory. The coordinator checks whether the model may be saved there.

        Returns the plan, with the tied tensors of this rank. Raises `WriteError` if the directory cannot be created, or
        holds a model that must not be replaced.
        """
        with self.or_fail():
            self._destination.open()
            if self._destination.commits:
                self._order = {item.index.fqn: number for number, item in enumerate(plan.items)}
            if self._staged_save is None and (state := live_state(state_of_save())) is not None:
                self._ties = ties_of(state)
            tied = {*self._ties, *self._ties.values()}
            self._untied = [item.index.fqn for item in plan.items if item.index.fqn not in tied and _has_elements(item)]
            return plan_with(plan, dict(self._ties))

    def answer(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Lays the files out, on the coordinator, and begins them; returns the plans with the layout.

        Raises `WriteError` if the format cannot hold the model, or the files cannot be begun.
        """
        with self.or_fail():
            ties = [plan.storage_data if isinstance(plan.storage_data, dict) else {} for plan in plans]
            options = self._destination.model
            self._model = plan_model(plans, options, path=self.path, order=self._order, ties=ties)
            files = self._destination.begin_files(self._model, self.id)
            layout = rank_layout(self._model, files, self.id)
            return [plan_with(plan, layout) for plan in plans]

    def _commit(self, metadata: Metadata, results: list[list[WriteResult]]) -> set[str]:
        """Makes the save the model at its path; returns the files of the one that it replaces."""
        assert self._model is not None
        parts: dict[int, dict[int, Mapping[str, str]]] = {}  # by the number of the file
        for result in (result for of_rank in results for result in of_rank):
            for number, of_file in result.storage_data.items():
                parts.setdefault(number, {}).update(of_file)
        self._begin_commit(metadata)
        return self._destination.commit_files(self._model, parts)

    def _committed(self) -> None:
        """Lets the model be published as the next version, if that is wanted.

        If it raises `WriteError`, the model is saved, and the one before could not be published.
        """
        if (versions := self._context.versions) is not None:
            destination, staged = self._destination, self._staged_save
            context = None if staged is None else staged.context
            step = None if self._record is None else self._record.step
            versions.add(SavedModel(destination.storage, destination.index, context, destination.hold(), step))

    def end(self) -> None:
        """Drops the files unless they are a model by now, and releases the directory. Idempotent."""
        if self._model is not None:
            self._destination.drop_files()
        super().end()

    def _write(self, plan: SavePlan, planner: SavePlanner) -> tuple[list[Item], WriteDone, list[WriteResult]]:
        layout = plan.storage_data
        if not isinstance(layout, RankLayout):
            raise WriteError(
                f"{self.path}: the plan has no layout: give the save a planner that keeps the plans' storage_data"
            )
        self.id = layout.save_id
        ranks = RankGroup(group_of_save() if layout.ranks > 1 else None, self.path)
        if ranks.size != layout.ranks:
            raise WriteError(f"{self.path}: {layout.ranks} ranks have planned the save, and its group has {ranks.size}")
        job = _RankJob(self, layout)
        with ExitStack() as shown:
            others_failed = job.run(plan, planner, ranks, lambda own: shown.enter_context(self._progress(own)))
            if (job.error is not None or others_failed) and self._destination.commits:
                self._destination.drop_files()
            if job.error is not None:
                raise job.error
        done = job.done
        names = [layout.files[number].file for number in sorted(job.touched)]
        files = tuple(FileResult(file.name, file.nbytes, ()) for file in names)
        written = WriteDone(files, done.seconds, done.copy_seconds, done.write_seconds, attempts=done.attempts)
        result = WriteResult(MetadataIndex(f"rank {self._destination.rank}"), done.nbytes, done.parts)
        return job.items, written, [result]

    def _progress(self, own: Pieces) -> AbstractContextManager[Callable[[int], object]]:
        return self._context.callbacks.progress(self.path, lambda: int(own.nbytes.sum()))

    def items_of(self, plan: SavePlan, planner: SavePlanner, layout: RankLayout) -> list[Item]:
        """The items that this rank writes; raises `WriteError`, naming the key, if one cannot be written."""
        omitted = frozenset() if self._staged_save is None else self._staged_save.omitted
        items = resolve(plan, planner, self._is_staged, omitted)
        try:
            rows = layout.find([item.fqn for item in items])
        except KeyError as error:
            raise WriteError(f"{self.path}: {error.args[0]!r} was not planned") from None
        if untied := layout.dropped(self._untied):
            raise WriteError(
                f"{listed(untied)} {'is' if len(untied) == 1 else 'are'} tied to another tensor on some rank, and not "
                f"on rank {self._destination.rank}: tie it on all ranks, or on none"
            )
        for item in items:
            if item.kind != "tensor":
                raise WriteError(
                    f"{item.fqn!r} is a tensor of a class of its own, which safetensors cannot hold: save what "
                    f"it is made of, or leave it out"
                )
        return [
            item for item, of_item in zip(items, rows, strict=True) if layout.file[of_item[0]] >= 0 and item.has_bytes
        ]

    def headers(self) -> list[torch.Tensor]:
        """The headers of the files on the coordinator, which writes them; none on other ranks."""
        files = () if self._model is None else self._model.files
        return [torch.frombuffer(bytearray(file.header), dtype=torch.uint8) for file in files]

    def write_pieces(
        self,
        layout: RankLayout,
        pieces: Pieces,
        items: Sequence[Item],
        dtypes: Sequence[torch.dtype],
        progress: Callable[[int], object],
    ) -> PartsWritten:
        """Writes pieces of this rank's items; raises `WriteError`."""
        context = self._context
        return context.engine.client.write_shared(
            self._destination.storage,
            self._destination.rank,
            layout.files,
            pieces,
            items,
            dtypes,
            self._staged_save,
            context.options.write,
            lambda: context.closed,
            progress,
        )


def _has_elements(item: WriteItem) -> bool:
    return item.tensor_data is not None and 0 not in item.tensor_data.chunk.sizes


class ModelSaver(Saver):
    """Begins the saves of a writer of models."""

    source: StagedSave | None = None

    def __init__(
        self,
        options: SaveOptions,
        model: ModelOptions,
        callbacks: SaveCallbacks,
        *,
        closed: bool = False,
    ) -> None:
        super().__init__(options, callbacks, closed=closed)
        self.model = model
        if model.dtype is not None:
            self.stager.dtype_of = model.stored_dtype  # nothing else needs what this writer stages
        self.versions = None if model.publish is None else VersionsOfWriter(model.publish, options.write)

    def stage(
        self, state_dict: dict[str, Any], save: SaveDescription, path: str | os.PathLike[str] | None
    ) -> StagedStateDict:
        """Copies a state dict into the staging buffer, and notes its tied tensors; see `Saver.stage`."""
        ties: Mapping[str, str] = {}
        with suppress(Exception):  # for a value that cannot be saved, staging or the planner reports more
            ties = ties_of(state_dict)
        staged = super().stage(state_dict, save, path)
        staged.staged_save.ties = ties
        return staged

    def begin(
        self,
        path: str | os.PathLike[str] | None,
        directory: str | None,
        staged_save: StagedSave | None,
        error: StagingError | None = None,
    ) -> SaveSession:
        """Begins a save of what was staged for it, or of `source`: see `Saver.begin`."""
        return super().begin(path, directory, staged_save or self.source, error)

    def close(self, deadline: Deadline) -> None:
        """Waits for the saves of this writer, and for what is being published: see `Saver.close`."""
        super().close(deadline)
        if self.versions is not None:
            self.versions.end(deadline)

    def _destination(self, where: str | Path, staged_save: StagedSave | None) -> ModelDestination:
        storage = open_storage(where, self.options.write.storage_options, self.options.limits.timeout)
        return ModelDestination(self, storage, staged_save, self.model, self.versions)

    def _session(self, destination: Destination, staged_save: StagedSave | None, kept: KeptSave | None) -> ModelSession:
        assert isinstance(destination, ModelDestination)
        return ModelSession(self, self.save_id, destination, staged_save)


class _RankJob:
    """The part of a rank in writing a model: first its own blocks, then in rounds those that it shares with others.

    A rank that fails still takes part in the next collective, to tell the others, so that no rank waits for it in vain.
    """

    def __init__(self, session: ModelSession, layout: RankLayout) -> None:
        self._session = session
        self._layout = layout
        self._dtypes: list[torch.dtype] = []
        self._sources: list[Item] = []
        self.error: BaseException | None = None
        self.done = PartsWritten()
        self.items: list[Item] = []
        self.touched: set[int] = set()
        self._progress: Callable[[int], object] = lambda nbytes: None

    def run(
        self,
        plan: SavePlan,
        planner: SavePlanner,
        ranks: RankGroup,
        begin: Callable[[Pieces], Callable[[int], object]],
    ) -> bool:
        """Resolves the items, and writes everything; returns whether another rank has failed.

        ``begin`` takes the pieces that this rank has, and returns a function for the bytes written so far. Both call
        the user.
        """
        exchange: PieceExchange | None = None
        try:
            pieces = self._pieces(plan, planner)
            self._progress = begin(pieces)
            own, shared = split(pieces, self._layout)
            self._write(own)
            if self._layout.has_granules:
                source = ItemBytes([item.tensor for item in self._sources], self._dtypes)
                exchange = PieceExchange(shared, self._layout, ranks, source.fill)
        except BaseException as error:
            self.error = error
        for number in range(round_count(self._layout)):
            if self._round(number, exchange, ranks):
                return True
        failed = ranks.gather([self.error is not None])
        return bool(failed.any())

    def _pieces(self, plan: SavePlan, planner: SavePlanner) -> Pieces:
        layout = self._layout
        self.items = self._session.items_of(plan, planner, layout)
        self._sources = list(self.items)
        shapes = {item_key(item.index): item for item in plan.items}
        rows = layout.find([item.fqn for item in self.items])
        parts: list[TensorPart] = []
        for source, (item, of_item) in enumerate(zip(self.items, rows, strict=True)):
            data = shapes[item.key].tensor_data
            assert data is not None
            self._dtypes.append(layout.dtypes[int(layout.dtype[of_item[0]])])
            chunk = Region(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
            parts += (part for row in of_item for part in part_of_row(layout, row, tuple(data.size), chunk, source))
        for number, header in enumerate(self._session.headers()):
            whole = Region((0,), (len(header),))
            parts.append(TensorPart(number, 0, 1, whole.size, whole, len(self._sources)))
            self._add(f"header {number}", header)
        return pieces_of(parts)

    def _add(self, name: str, content: torch.Tensor) -> None:
        """Adds a source that is not a tensor of the state dict."""
        self._sources.append(Item((name, None), f"\0{name}", "tensor", content, True))
        self._dtypes.append(torch.uint8)

    def _write(self, pieces: Pieces) -> None:
        """Writes pieces of the sources. Only sources that are used are passed on."""
        if not len(pieces):
            return
        self.touched.update(np.unique(pieces.file).tolist())
        used, number = np.unique(pieces.source, return_inverse=True)
        chosen = Pieces(pieces.file, pieces.offset, pieces.nbytes, number.reshape(-1).astype(np.int64), pieces.start)
        sources = [self._sources[n] for n in used.tolist()]
        dtypes = [self._dtypes[n] for n in used.tolist()]
        before = self.done.nbytes
        self.done += self._session.write_pieces(
            self._layout, chosen, sources, dtypes, lambda nbytes: self._progress(before + nbytes)
        )

    def _round(self, number: int, exchange: PieceExchange | None, ranks: RankGroup) -> bool:
        """Exchanges one window, and writes what has arrived; returns whether a rank has failed."""
        counts = [0] * (2 * ranks.size)
        if self.error is None and exchange is not None:
            try:
                counts = exchange.counts(number)
            except BaseException as error:
                self.error = error
        rows = ranks.gather([self.error is not None, *counts])
        if rows[:, 0].any():
            return True
        assert exchange is not None
        received = exchange.swap(number, rows[:, 1:])
        try:
            pieces = received.own
            if len(received.others):
                self._add(f"received {number}", torch.from_numpy(received.content))
                source = np.full(len(received.others), len(self._sources) - 1, dtype=np.int64)
                came = received.others
                came = Pieces(came.file, came.offset, came.nbytes, source, came.start)
                pieces = Pieces.joined([pieces, came])
            self._write(pieces)
        except BaseException as error:
            self.error = error
        finally:
            if len(received.others):
                del self._sources[-1], self._dtypes[-1]
        return False
