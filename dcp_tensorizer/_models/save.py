"""One rank's part in saving a model as a directory in Hugging Face's format.

The coordinator lays out the files, and creates them under temporary names, which readers ignore. All ranks write the
files. The coordinator completes them, and writes the index last. The commit is the writing of the index, or, for a
model of one file without an index, the completion of that file.
"""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from .._formats.safetensors import file_names, index_of
from .._formats.safetensors_header import ADAPTER, INDEX, SINGLE, files_named
from .._index.schema import item_key
from .._publish.model import OtherFile, is_other_file, other_files
from .._runtime.direct_memory import direct_memory
from .._runtime.process_context import ProcessContext
from .._runtime.threads import Deadline
from .._runtime.torch_compat import group_of_save, state_of_save
from .._saving.commit import (
    abort_uploads,
    files_of_models,
    marks_of_uploads,
    put_records,
    put_replaced,
    put_uploads,
    recorded_uploads,
    remove,
    remove_records,
    remove_uploads,
)
from .._saving.report import Reports
from .._saving.save import Save, SaveDescription
from .._saving.saver import Saver
from .._saving.write_plan import Item, plan_with, resolve
from .._staging.staged_save import StagedSave, StagedStateDict
from .._storage.base import Refused, SharedFile, Storage, temporary_file_name
from .._storage.open import NOT_SHARED
from .._tensor_file.dtypes import dtype_name
from .._tensor_file.names import is_of_save, is_ours, metadata_file_name
from .._tensor_file.regions import Region
from .._writer_process.options import SaveOptions
from .._writer_process.protocol import WriteDone
from .._writer_process.shared_job import Pieces, SharedFilePart
from ..errors import NotCommitted, ReadError, StagingError, WriteError, listed
from .layout import ModelOptions, ModelPlan, RankLayout, plan_model, rank_layout
from .pieces import (
    PieceExchange,
    RankGroup,
    SharedFiles,
    fill_of,
    pieces_of,
    round_count,
    split,
)
from .ties import ties_of
from .versions import SavedModel, VersionsOfWriter

_WEIGHTS = re.compile(
    r"\.(safetensors|bin|pt|pth|gguf|ggml|h5|keras|msgpack|ot|onnx|onnx[._]data|tflite|tensors|distcp|index\.json)$"
    r"|\.ckpt(\.|$)|^(__\d+)?\.metadata\.tmp$",
    re.IGNORECASE,
)
"""The names of files that hold weights in some format, or list such files, besides those that `is_of_save` finds."""

_CONFIG = "config.json"
_DTYPES = ("torch_dtype", "dtype")  # transformers' key for the weights' dtype: before release 4.56, and since then


class _OtherFile(NamedTuple):
    """A file of ``files=``, written under a temporary name."""

    file: SharedFile
    parts: Mapping[int, Mapping[str, str]]
    replaces: bool  # whether the directory already had weights, or a file of this name


class ModelSave(Save):
    _saver: ModelSaver

    def __init__(self, saver: ModelSaver, save_id: str, where: str | Path, staged: StagedSave | None) -> None:
        super().__init__(saver, save_id, where, staged)
        self.model = saver.model
        self._ties: Mapping[str, str] = {} if staged is None else staged.ties
        self._untied: list[str] = []  # names of tensors that have elements on this rank, and are not tied
        self._order: dict[str, int] = {}
        self._plan: ModelPlan | None = None
        self._index_before: bytes | None = None
        self._index: bytes | None = None  # the index that the commit has written; None if the model is one file
        self._is_adapter = self.model.is_adapter
        self._single = ADAPTER if self._is_adapter else SINGLE
        self._has_single = False
        self._is_fresh = True
        self._begun: tuple[SharedFile, ...] = ()
        self._others: tuple[_OtherFile, ...] = ()
        self._beside: dict[str, OtherFile] = {}  # if the writer publishes: the files beside the weights
        self._completed: tuple[str, ...] = ()
        self._left: set[str] = set()
        self._dead: list[str] = []
        self._held: deque[Callable[[], None]] | None = None

    # --- DCP's hooks ------------------------------------------------------------------------------------------------

    def prepare(self, plan: SavePlan) -> SavePlan:
        """Creates the directory. The coordinator checks whether the model may be saved there.

        Returns the plan, with the tied tensors of this rank.
        """
        with self.or_fail():
            self.open()
            if self.commits:
                self._order = {item.index.fqn: number for number, item in enumerate(plan.items)}
            state = state_of_save() if self._staged is None else None
            if isinstance(state, Mapping) and not isinstance(state, StagedStateDict):  # the model's own tensors
                self._ties = ties_of(state)
            tied = {*self._ties, *self._ties.values()}
            untied = [(item.index.fqn, item.tensor_data) for item in plan.items if item.index.fqn not in tied]
            self._untied = [fqn for fqn, data in untied if data is not None and 0 not in data.chunk.sizes]
            return plan_with(plan, dict(self._ties))

    def answer(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Lays out and creates the files; returns the plans with the layout. Called on the coordinator."""
        with self.or_fail():
            ties = [plan.storage_data if isinstance(plan.storage_data, dict) else {} for plan in plans]
            model = self._plan = plan_model(plans, self.model, path=self.path, order=self._order, ties=ties)
            layout = rank_layout(model, self._in_time(lambda: self._begin_files(model)), self.id)
            return [plan_with(plan, layout) for plan in plans]

    def _complete(self, metadata: Metadata, results: list[list[WriteResult]]) -> set[str]:
        """Commits the save as the model at its path; returns the files of the model that it replaces."""
        plan = self._plan
        assert plan is not None
        parts: dict[int, dict[int, Mapping[str, str]]] = {}  # by the number of the file
        for result in (result for of_rank in results for result in of_rank):
            for number, of_file in result.storage_data.items():
                parts.setdefault(number, {}).update(of_file)
        return self._in_time(lambda: self._commit_files(plan, parts))

    def _committed(self) -> None:
        """If the writer publishes, publishes the model as the next version, in the background.

        Raises `WriteError` if an earlier model could not be published. This model is saved nevertheless.
        """
        if (versions := self._saver.versions) is not None:
            context = None if self._staged is None else self._staged.context
            record = self._description.record
            step = None if record is None else record.step
            versions.add(SavedModel(self.storage, self._index, self._beside, context, self.hold(), step))

    def end(self) -> None:
        if self._plan is not None:
            self._drop_files()
        super().end()

    def write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        self._lap("plan")
        with self.whole_or_nothing(), ExitStack() as shown:
            layout = plan.storage_data
            if not isinstance(layout, RankLayout):
                raise WriteError(
                    f"{self.path}: the plan has no layout. Use a planner that does not change the plans' storage_data."
                )
            self.id = layout.save_id
            ranks = RankGroup(group_of_save() if layout.ranks > 1 else None, self.path)
            if ranks.size != layout.ranks:
                raise WriteError(
                    f"{self.path}: {layout.ranks} ranks have planned the save, but the size of this rank's process "
                    f"group is {ranks.size}. Pass the same process_group on all ranks."
                )
            job = _RankJob(self, layout)
            progress = self._saver.reports.progress
            has_failed = job.run(
                plan,
                planner,
                ranks,
                lambda pieces: shown.enter_context(progress(self.path, lambda: int(pieces.nbytes.sum()))),
            )
            if has_failed and self.commits:
                self._drop_files()
            if job.error is not None:
                raise job.error
        self._end_write(job.items, job.done)
        return [WriteResult(MetadataIndex(f"rank {self.rank}"), job.done.nbytes, job.done.parts)]

    def items_of(self, plan: SavePlan, planner: SavePlanner, layout: RankLayout) -> list[Item]:
        """Returns this rank's items that are in the files; raises `WriteError`, naming a key that cannot be written."""
        buffer = None if self._staged is None else self._staged.buffer
        items = resolve(plan, planner, buffer, self._description.omitted)
        try:
            rows = layout.find([item.fqn for item in items])
        except KeyError as error:
            raise WriteError(
                f"{self.path}: {error.args[0]!r} is not in the coordinator's plan. Use a planner that keeps the items "
                f"of all ranks' plans."
            ) from None
        if untied := layout.dropped(self._untied):
            raise WriteError(
                f"{listed(untied)} {'is' if len(untied) == 1 else 'are'} tied to another tensor on some rank, but not "
                f"on rank {self.rank}. Tie the tensors on all ranks, or on none."
            )
        for item in items:
            if item.kind != "tensor":
                raise WriteError(
                    f"{item.fqn!r} is a tensor subclass, which safetensors cannot hold. Save its inner tensors, or "
                    f"leave it out of the state dict."
                )
        return [
            item for item, of_item in zip(items, rows, strict=True) if layout.file[of_item[0]] >= 0 and item.has_bytes
        ]

    def headers(self) -> list[torch.Tensor]:
        """Returns the files' headers on the coordinator, which writes all of them; on other ranks, an empty list."""
        files = () if self._plan is None else self._plan.files
        return [torch.frombuffer(bytearray(file.header), dtype=torch.uint8) for file in files]

    def write_pieces(
        self,
        layout: RankLayout,
        pieces: Pieces,
        items: Sequence[Item],
        dtypes: Sequence[torch.dtype],
        progress: Callable[[int], object],
    ) -> WriteDone:
        """Writes pieces, whose sources are ``items``."""
        saver = self._saver
        files = SharedFiles(self.storage, self.rank, saver.options, layout.files, pieces, dtypes)
        return saver.engine.client.write(files, items, self._staged, lambda: saver.closed, progress)

    # --- the directory ----------------------------------------------------------------------------------------------

    def _check_free(self, storage: Storage) -> None:
        if self.metadata_rank is not None:
            raise WriteError(f"{storage.path}: all ranks write a model together. Leave use_collectives at True.")
        if not self.commits:
            return
        if storage.head(metadata_file_name()) is not None:
            raise WriteError(f"{storage.path} holds a checkpoint. Save the model to another path.")
        self._index_before = None if self._is_adapter else storage.read(INDEX)
        self._has_single = storage.head(self._single) is not None
        names: list[str] = []
        with suppress(NotCommitted):  # the directory does not exist
            names = [file.name for file in storage.listing()[0]]
        recorded = recorded_uploads(storage, names)  # none on storages that list incomplete files
        needed = set() if self._saver.versions is None else self._saver.versions.files_needed(storage.location)
        uploads = {save_id: files for save_id, files in recorded.items() if needed.isdisjoint(files)}
        self._left = set(files_of_models(storage, names, marks_of_uploads(uploads)))
        has_model = self._index_before is not None or self._has_single
        weights = set() if has_model else {name for name in names if name.endswith(".safetensors")}
        others = sorted(weights - self._left)
        if (has_model or others) and not self.model.overwrite:
            what = f"{others[0]}, which no index lists" if others else "a model already"
            raise WriteError(f"{storage.path} holds {what}. Save to another path, or pass overwrite=True.")
        self._is_fresh = not has_model and not weights
        dead = list(uploads) if abort_uploads(storage, uploads) else []
        if self._left:  # leftovers stay until the commit, and so do the records that prove which save wrote them
            self._dead = dead
        else:
            with suppress(OSError):
                remove_uploads(storage, *dead)

    def _begin_files(self, plan: ModelPlan) -> list[SharedFilePart]:
        """Creates the files of a model. On failure, removes them and raises `WriteError`. Called on the coordinator."""
        storage, count = self.storage, len(plan.files)
        if self._is_adapter and count > 1:
            raise WriteError(
                f"{storage.path}: PEFT loads only adapters of one file, but this adapter needs {count} files. Raise "
                f"max_shard_bytes."
            )
        if self._has_single and (count > 1 or self._index_before is not None):
            raise WriteError(
                f"{storage.path} holds {self._single}, which readers prefer to an index, but the new model needs an "
                f"index. Save to another path."
            )
        # The files of a model stay until the model is published, even if the next save replaces the model earlier.
        has_readers = self.model.publish is not None and self.model.overwrite
        if self._has_single and has_readers:
            raise WriteError(
                f"{storage.path} holds {self._single}, which a save would replace even while that file is still being "
                f"published. Save to another path."
            )
        is_alone = self._is_fresh or self._has_single or self._is_adapter
        is_lone = count == 1 and self._index_before is None and is_alone and not has_readers
        names = [self._single] if is_lone else file_names(count, "" if self._is_fresh else self.id)
        granules = [storage.granule_of(layout.nbytes) for layout in plan.files]
        if not all(granules):
            raise WriteError(f"{storage.path}: {NOT_SHARED}")
        others = self._other_files()
        if self._saver.versions is not None:
            self._beside.update((name, content) for name, content in others.items() if is_other_file(name))
        put_records(storage, [self.id])
        try:
            # Recorded before the uploads begin, because this process may be killed.
            put_uploads(storage, self.id, dict.fromkeys([*names, *others], ""))
            for name, layout in zip(names, plan.files, strict=True):
                with storage.writing(f"create {storage.path}/{name}"):
                    self._begun += (storage.begin_shared(name, layout.nbytes, save_id=self.id),)
            for name, content in others.items():
                if (before := storage.read(name)) != content:
                    with storage.writing(f"write {storage.path}/{name}"):
                        self._write_other(name, content, replaces=before is not None or not self._is_fresh)
            begun = [*self._begun, *(other.file for other in self._others)]
            put_uploads(storage, self.id, {file.name: file.token for file in begun})
        except BaseException:
            self._drop()
            raise
        return [SharedFilePart(file, granule) for file, granule in zip(self._begun, granules, strict=True)]

    def _write_other(self, name: str, content: bytes, *, replaces: bool) -> None:
        """Writes a file of the user's under a temporary name. Raises `OSError` if it cannot be written."""
        storage, nbytes = self.storage, len(content)
        file = storage.begin_shared(name, nbytes, save_id=self.id)
        self._others += (_OtherFile(file, {}, replaces),)
        memory = direct_memory(max(1, nbytes))[:nbytes]
        memory[:] = content
        granule = storage.granule_of(nbytes)
        step = granule if granule > 1 else max(1, nbytes)
        sink = storage.open_shared(file, sync=self._saver.options.sync_files)
        try:
            for start in range(0, max(1, nbytes), step):
                sink.put(start, memory[start : start + step])
            sink.complete()
        finally:
            sink.abort()
        self._others = (*self._others[:-1], _OtherFile(file, sink.parts, replaces))

    def _drop_files(self) -> None:
        if self._begun or self._completed or self._others:
            self._clean_up(self._drop)

    def _drop(self) -> None:
        begun, self._begun = self._begun, ()
        others, self._others = self._others, ()
        completed, self._completed = self._completed, ()
        if completed:
            with suppress(Exception):
                self.storage.remove(*completed)
        for file, _, _ in others:
            with suppress(Exception):  # another save may have replaced the file
                if self.storage.is_marked(file.name, temporary_file_name(file.name, self.id)):
                    self.storage.remove(file.name)
        for file in (*begun, *(file for file, _, _ in others)):
            with suppress(Exception):
                self.storage.abort_shared(file)
        self._forget()

    def _forget(self, *names: str) -> None:
        self._unmark(*names)
        with suppress(Exception):
            remove_uploads(self.storage, self.id)

    def _unmark(self, *names: str) -> None:
        with suppress(Exception):
            self.storage.unmark(self.id, *names)
            remove_records(self.storage, [self.id])

    def _commit_files(self, plan: ModelPlan, parts: Mapping[int, Mapping[int, Mapping[str, str]]]) -> set[str]:
        """Commits the files as the model at the path, when all ranks have written their parts.

        Called on the coordinator. ``parts`` are the `Sink.parts` of all ranks, by the number of the file. Returns the
        files of the replaced model, for removal. Raises `WriteError` in three cases: the save is not committed (the
        previous model is then untouched), it is unknown whether the save is committed, or the save is committed but one
        of the user's `files` could not be replaced.
        """
        storage, sync = self.storage, self._saver.options.sync_files
        is_lone = self._begun[0].name == self._single
        self._check_commit()
        if self._saver.versions is not None:
            with suppress(NotCommitted):  # the directory has no files yet
                self._beside = other_files(storage) | self._beside
        for other in self._others:
            if not other.replaces:
                with storage.writing(f"write {storage.path}/{other.file.name}"):
                    storage.complete_shared(other.file, other.parts, replace=False)
        if sync and is_lone and self._others:  # before the model appears
            with storage.writing(f"write {storage.path}"):
                storage.sync_directory()
        for number, file in enumerate(self._begun):
            with storage.writing(f"write {storage.path}/{file.name}"):
                storage.complete_shared(file, parts.get(number, {}), replace=is_lone and self._has_single)
            if not is_lone:
                self._completed += (file.name,)
        if sync:
            with storage.writing(f"write {storage.path}"):
                storage.sync_directory()
        names = {file.name for file in self._begun}
        others = self._others
        replaced = self._left - names
        if not is_lone:
            with suppress(ValueError):  # the index is unreadable
                replaced |= files_named(self._index_before) - names
            storage.mark(self.id, *replaced)
            self._dead += put_replaced(storage, replaced - self._left)
            self._index = index_of({file.name: of.tensors for file, of in zip(self._begun, plan.files, strict=True)})
            try:
                self._check_commit()
                # Another save may have removed these files as those of a dead save. If so, `put_if` finds the other
                # save's index, and writes nothing.
                if not storage.put_if(INDEX, self._index_before, self._index, sync=sync, save_id=self.id):
                    raise Refused(f"{storage.path}: another save has just written a model. Save to another path.")
            except (Refused, ReadError):
                storage.unmark(self.id, *replaced)
                raise
            except WriteError:  # the index may be in place, or arrive later, so all files stay
                self._begun = self._others = self._completed = ()
                raise
        self._begun = self._others = self._completed = ()
        replacing = [other for other in others if other.replaces]
        for other in replacing:
            with storage.writing(f"replace {storage.path}/{other.file.name} (the new model is committed)"):
                storage.complete_shared(other.file, other.parts, replace=True)
        if replacing and sync:
            with storage.writing(f"write {storage.path}"):
                storage.sync_directory()
        names |= {other.file.name for other in others}
        if replaced:
            with suppress(OSError):
                storage.unmark(self.id, *names)
                remove_uploads(storage, self.id)  # otherwise the model's files would count as those of a dead save
        else:
            self._forget(*names)
        return replaced

    def _other_files(self) -> dict[str, bytes]:
        """Returns the contents of the files that ``files=`` lists, by name.

        Of a directory, returns those of all its files except weights and a checkpoint's files. Raises `Refused` if a
        file is unreadable, or is named like weights or like a file of a checkpoint.
        """
        found: dict[str, bytes] = {}
        for given in self.model.files:
            path = Path(given)
            try:
                for file in sorted(path.iterdir()) if path.is_dir() else [path]:
                    if path.is_dir() and (not file.is_file() or _WEIGHTS.search(file.name) or is_of_save(file.name)):
                        continue
                    if file.name.endswith((".safetensors", ".safetensors.index.json")) or is_ours(file.name):
                        raise Refused(
                            f"files= has {file}, which is named like weights or like a file of a checkpoint. Leave it "
                            f"out."
                        )
                    found[file.name] = file.read_bytes()
                    if file.name == _CONFIG and self.model.dtype is not None:
                        found[_CONFIG] = _with_dtype(found[_CONFIG], dtype_name(self.model.dtype))
            except OSError as error:
                raise Refused(f"files= has {given}, which cannot be read: {error}. Fix it, or leave it out.") from error
        return found

    def remove(self, names: Iterable[str]) -> None:
        """Removes the files of a replaced model, and then the records that prove which save wrote them."""

        def clean_up() -> None:
            if remove(self.storage, names):
                with suppress(Exception):
                    remove_uploads(self.storage, *self._dead)
                # This save's record in S3 stays: a later save that replaces this model may have rewritten the record.
                self._unmark(*names)

        names = tuple(names)
        self._after_held(lambda: self._clean_up(clean_up))

    def _release(self) -> None:
        self._after_held(super()._release)

    def hold(self) -> Callable[[], None]:
        """Delays the removal of files, and the release of the directory, until the returned function is called.

        The function may be called on any thread.
        """
        self._held = deque()

        def release() -> None:
            held, self._held = self._held, None
            _run_all(held)

        return release

    def _after_held(self, operation: Callable[[], None]) -> None:
        held = self._held
        if held is None:
            operation()
            return
        held.append(operation)
        # Another thread or a signal handler may have called `release`. A lock would block the handler.
        if self._held is None:
            _run_all(held)


class ModelSaver(Saver):
    source: StagedSave | None = None

    def __init__(
        self,
        options: SaveOptions,
        model: ModelOptions,
        reports: Reports,
        *,
        closed: bool = False,
    ) -> None:
        super().__init__(options, reports, closed=closed)
        self.kind = ModelSave
        self.model = model
        if model.dtype is not None:
            self.stager.dtype_of = model.stored_dtype  # no other writer uses this writer's staged copies
        self.versions = None if model.publish is None else VersionsOfWriter(model.publish, options)

    def stage(
        self, state_dict: dict[str, Any], save: SaveDescription, path: str | os.PathLike[str] | None
    ) -> StagedStateDict:
        ties: Mapping[str, str] = {}
        with suppress(Exception):  # for a value that cannot be saved, staging or the planner raises a better error
            ties = ties_of(state_dict)
        staged = super().stage(state_dict, save, path)
        staged.staged_save.ties = ties
        return staged

    def begin(
        self,
        path: str | os.PathLike[str] | None,
        staged_save: StagedSave | None,
        context: ProcessContext | None = None,
        error: StagingError | None = None,
    ) -> Save:
        return super().begin(path, staged_save or self.source, context, error)

    def close(self, deadline: Deadline) -> None:
        super().close(deadline)
        if self.versions is not None:
            self.versions.end(deadline)


class _RankJob:
    """A rank's work in writing a model: first its own blocks, then, in rounds, those shared with other ranks.

    A rank that fails still takes part in the next collective, to report the failure, so that no rank hangs.
    """

    def __init__(self, save: ModelSave, layout: RankLayout) -> None:
        self._save = save
        self._layout = layout
        self._dtypes: list[torch.dtype] = []
        self._sources: list[Item] = []
        self.error: BaseException | None = None
        self.done = WriteDone((), 0.0, 0.0, 0.0)
        self.items: list[Item] = []
        self._progress: Callable[[int], object] = lambda nbytes: None

    def run(
        self,
        plan: SavePlan,
        planner: SavePlanner,
        ranks: RankGroup,
        begin: Callable[[Pieces], Callable[[int], object]],
    ) -> bool:
        """Resolves and writes the items; returns whether any rank has failed.

        ``begin`` takes this rank's pieces, and returns a function that reports the bytes written so far. Both call the
        user's ``on_progress``.
        """
        exchange: PieceExchange | None = None
        try:
            pieces = self._pieces(plan, planner)
            self._progress = begin(pieces)
            own, shared = split(pieces, self._layout)
            self._write(own)
            if self._layout.has_granules:
                fill = fill_of([item.tensor for item in self._sources], self._dtypes)
                exchange = PieceExchange(shared, self._layout, ranks, fill)
        except BaseException as error:
            self.error = error
        for number in range(round_count(self._layout)):
            if self._round(number, exchange, ranks):
                return True
        failed = ranks.gather([self.error is not None])
        return bool(failed.any())

    def _pieces(self, plan: SavePlan, planner: SavePlanner) -> Pieces:
        layout = self._layout
        self.items = self._save.items_of(plan, planner, layout)
        self._sources = list(self.items)
        shapes = {item_key(item.index): item for item in plan.items}
        rows = layout.find([item.fqn for item in self.items])
        found: list[Pieces] = []
        for source, (item, of_item) in enumerate(zip(self.items, rows, strict=True)):
            data = shapes[item.key].tensor_data
            assert data is not None
            self._dtypes.append(layout.dtypes[int(layout.dtype[of_item[0]])])
            chunk = Region(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
            found += (pieces_of(layout, row, tuple(data.size), chunk, source) for row in of_item)
        for number, header in enumerate(self._save.headers()):
            columns = number, 0, len(header), len(self._sources), 0
            found.append(Pieces(*(np.array([column], dtype=np.int64) for column in columns)))
            self._add(f"header {number}", header)
        return Pieces.joined(found)

    def _add(self, name: str, content: torch.Tensor) -> None:
        """Adds a source of bytes that is not an item of the state dict."""
        self._sources.append(Item((name, None), f"\0{name}", "tensor", content, True))
        self._dtypes.append(torch.uint8)

    def _write(self, pieces: Pieces) -> None:
        if not len(pieces):
            return
        used, number = np.unique(pieces.source, return_inverse=True)
        chosen = Pieces(pieces.file, pieces.offset, pieces.nbytes, number.reshape(-1).astype(np.int64), pieces.start)
        sources = [self._sources[n] for n in used.tolist()]
        dtypes = [self._dtypes[n] for n in used.tolist()]
        before = self.done.nbytes
        self.done += self._save.write_pieces(
            self._layout, chosen, sources, dtypes, lambda nbytes: self._progress(before + nbytes)
        )

    def _round(self, number: int, exchange: PieceExchange | None, ranks: RankGroup) -> bool:
        """Exchanges one window, and writes its pieces.

        Returns True if a rank had failed before this exchange, which then does not take place.
        """
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
        pieces, received, content = exchange.swap(number, rows[:, 1:])
        try:
            if len(received):
                self._add(f"received {number}", torch.from_numpy(content))
                source = np.full(len(received), len(self._sources) - 1, dtype=np.int64)
                moved = Pieces(received.file, received.offset, received.nbytes, source, received.start)
                pieces = Pieces.joined([pieces, moved])
            self._write(pieces)
        except BaseException as error:
            self.error = error
        finally:
            if len(received):
                del self._sources[-1], self._dtypes[-1]
        return False


def _with_dtype(content: bytes, dtype: str) -> bytes:
    """Replaces the weights' dtype in a configuration of transformers, and in the configurations nested in it.

    Returns other content unchanged.
    """
    try:
        config = json.loads(content)
    except ValueError:
        return content
    configs = [config] if isinstance(config, dict) else []
    is_changed = False
    for one in configs:
        changed = {key: dtype for key in _DTYPES if isinstance(one.get(key), str) and one[key] != dtype}
        is_changed = is_changed or bool(changed)
        one |= changed
        parts = ((key, value) for key, value in one.items() if isinstance(value, dict))
        configs += [value for key, value in parts if key.endswith("_config") and key != "quantization_config"]
    return json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n" if is_changed else content


def _run_all(operations: deque[Callable[[], None]] | None) -> None:
    """Runs operations, each once, even if another thread runs the same queue."""
    while operations:
        try:
            operation = operations.popleft()
        except IndexError:
            return
        operation()
