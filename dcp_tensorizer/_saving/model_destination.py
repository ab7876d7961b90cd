"""Where a model goes: a directory as Hugging Face has it, whose index, or lone file, makes the save the model there."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .._format.names import metadata_file_name
from .._format.safetensors import file_names, index_of
from .._format.safetensors_header import ADAPTER, INDEX, SINGLE, files_named
from .._format.tensor_bytes import dtype_name
from .._runtime.direct_memory import direct_memory
from .._staging.staged_save import StagedSave
from .._storage.base import Refused, SharedFile, Storage, temporary_file_name
from .._storage.open import NOT_SHARED
from .._writer_process.shared_job import SharedFilePart
from ..errors import NotCommitted, ReadError, WriteError
from .commit import files_of_models, put_records, remove, remove_records
from .context import SaveContext
from .destination import Destination
from .model_layout import ModelOptions, ModelPlan
from .uploads import abort_uploads, marks_of_uploads, put_replaced, put_uploads, recorded_uploads, remove_uploads
from .versions import VersionsOfWriter

_WEIGHTS = re.compile(
    r"\.(safetensors|bin|pt|pth|gguf|ggml|h5|keras|msgpack|ot|onnx|onnx[._]data|tflite|tensors|index\.json)$"
    r"|\.ckpt(\.|$)",
    re.IGNORECASE,
)
"""The ends of the names of files that hold weights in some format, or list them."""

_CONFIG = "config.json"
_DTYPES = ("torch_dtype", "dtype")  # transformers' name of the weights' dtype in it, until release 4.56 and since then


class _OtherFile(NamedTuple):
    """A file of the user's that is complete, and has a temporary name."""

    file: SharedFile
    parts: Mapping[int, Mapping[str, str]]
    replaces: bool  # whether it would change what is there already: a model, or another file of its name


class ModelDestination(Destination):
    """The directory of a model, as one rank uses it in one save.

    The coordinator begins the files, all ranks write them, and the coordinator completes them. Until then they have
    other names, which no reader takes for a model's.

    Attributes:
        model: The options.
        index: What the commit has put into the index; None if the model is one file.
    """

    def __init__(
        self,
        context: SaveContext,
        storage: Storage,
        staged_save: StagedSave | None,
        model: ModelOptions,
        versions: VersionsOfWriter | None = None,
    ) -> None:
        super().__init__(context, storage, staged_save)
        self.model = model
        self.index: bytes | None = None
        self._versions = versions
        self._index: bytes | None = None
        self._is_adapter = model.is_adapter
        self._single = ADAPTER if self._is_adapter else SINGLE
        self._has_single = False
        self._is_fresh = True
        self._begun: tuple[SharedFile, ...] = ()
        self._others: tuple[_OtherFile, ...] = ()
        self._completed: tuple[str, ...] = ()
        self._save_id = ""
        self._left: set[str] = set()
        self._dead: list[str] = []
        self._held: deque[Callable[[], None]] | None = None

    def _check_free(self, storage: Storage) -> None:
        if self.metadata_rank is not None:
            raise WriteError(f"{storage.path}: a model is written by all ranks together: leave use_collectives at True")
        if not self.commits:
            return
        if storage.head(metadata_file_name()) is not None:
            raise WriteError(f"{storage.path} holds a checkpoint: save the model to another path")
        self._index = None if self._is_adapter else storage.read(INDEX)
        self._has_single = storage.head(self._single) is not None
        names = _names_in(storage)
        recorded = recorded_uploads(storage, names)  # elsewhere `begin` has removed what dead saves have left
        needed = set() if self._versions is None else self._versions.files_needed(storage.location)
        uploads = {save_id: files for save_id, files in recorded.items() if needed.isdisjoint(files)}
        self._left = set(files_of_models(storage, names, marks_of_uploads(uploads)))
        has_model = self._index is not None or self._has_single
        weights = set() if has_model else {name for name in names if name.endswith(".safetensors")}
        others = sorted(weights - self._left)
        if (has_model or others) and not self.model.overwrite:
            what = f"{others[0]}, which no index lists" if others else "a model already"
            raise WriteError(f"{storage.path} holds {what}: save to another path, or pass overwrite=True")
        self._is_fresh = not has_model and not weights
        dead = list(uploads) if abort_uploads(storage, uploads) else []
        if self._left:  # they stay until there is a model, and with them the records that prove whose they are
            self._dead = dead
        else:
            with suppress(OSError):
                remove_uploads(storage, *dead)

    def begin_files(self, plan: ModelPlan, save_id: str) -> list[SharedFilePart]:
        """Begins the files of a model, on the coordinator; raises `WriteError`, and then none of them is left."""
        return self._in_time(lambda: self._begin_files(plan, save_id))

    def _begin_files(self, plan: ModelPlan, save_id: str) -> list[SharedFilePart]:
        storage, count = self.storage, len(plan.files)
        if self._is_adapter and count > 1:
            raise WriteError(
                f"{storage.path}: PEFT loads an adapter of one file, and this one has {count}: raise max_shard_bytes="
            )
        if self._has_single and (count > 1 or self._index is not None):
            raise WriteError(
                f"{storage.path} holds {self._single}, which readers prefer to the index of several files, and this "
                f"model has {count}: save to another path"
            )
        # What is being published must stay as it is, while the next save replaces it.
        has_readers = self.model.publish is not None and self.model.overwrite
        if self._has_single and has_readers:
            raise WriteError(
                f"{storage.path} holds {self._single}, which a save would replace while it is still being published: "
                f"save to another path, whose models get an index then"
            )
        is_alone = self._is_fresh or self._has_single or self._is_adapter
        is_lone = count == 1 and self._index is None and is_alone and not has_readers
        names = [self._single] if is_lone else file_names(count, "" if self._is_fresh else save_id)
        granules = [storage.granule_of(layout.nbytes) for layout in plan.files]
        if not all(granules):
            raise WriteError(f"{storage.path}: {NOT_SHARED}")
        others = self._other_files()
        self._save_id = save_id
        put_records(storage, [save_id])
        try:
            put_uploads(
                storage, save_id, dict.fromkeys([*names, *others], "")
            )  # before they begin: this process may be killed
            for name, layout in zip(names, plan.files, strict=True):
                with storage.writing(f"create {storage.path}/{name}"):
                    self._begun += (storage.begin_shared(name, layout.nbytes, save_id=save_id),)
            for name, content in others.items():
                if (before := storage.read(name)) != content:
                    with storage.writing(f"write {storage.path}/{name}"):
                        self._write_other(name, content, replaces=before is not None or not self._is_fresh)
            begun = [*self._begun, *(other.file for other in self._others)]
            put_uploads(storage, save_id, {file.name: file.token for file in begun})
        except BaseException:
            self._drop()
            raise
        return [SharedFilePart(file, granule) for file, granule in zip(self._begun, granules, strict=True)]

    def _write_other(self, name: str, content: bytes, *, replaces: bool) -> None:
        """Writes a file of the user's under a temporary name; raises `OSError`."""
        storage, nbytes = self.storage, len(content)
        file = storage.begin_shared(name, nbytes, save_id=self._save_id)
        self._others += (_OtherFile(file, {}, replaces),)
        memory = direct_memory(max(1, nbytes))[:nbytes]
        memory[:] = content
        granule = storage.granule_of(nbytes)
        step = granule if granule > 1 else max(1, nbytes)
        sink = storage.open_shared(file, sync=self._context.options.write.sync_files)
        try:
            for start in range(0, max(1, nbytes), step):
                sink.put(start, memory[start : start + step])
            parts = sink.finish()
        finally:
            sink.close()
        self._others = (*self._others[:-1], _OtherFile(file, parts, replaces))

    def drop_files(self) -> None:
        """Drops the files that were begun, if they are not a model by now. Idempotent."""
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
            with suppress(Exception):  # another save may have replaced it
                if self.storage.is_marked(file.name, temporary_file_name(file.name, self._save_id)):
                    self.storage.remove(file.name)
        for file in (*begun, *(file for file, _, _ in others)):
            with suppress(Exception):
                self.storage.abort_shared(file)
        self._forget()

    def _forget(self, *names: str) -> None:
        """Removes the record of the save, and the temporary names in it."""
        self._unmark(*names)
        with suppress(Exception):
            remove_uploads(self.storage, self._save_id)

    def _unmark(self, *names: str) -> None:
        with suppress(Exception):
            self.storage.unmark(self._save_id, *names)
            remove_records(self.storage, [self._save_id])

    def commit_files(self, plan: ModelPlan, parts: Mapping[int, Mapping[int, Mapping[str, str]]]) -> set[str]:
        """Makes the files the model at the path, on the coordinator, when all ranks have written their parts.

        ``parts`` is what the ranks have written, by the number of the file. Returns the files of the model that it
        replaces, which can be removed. Raises `WriteError` if it is not the model there; then the one before is
        untouched.
        """
        return self._in_time(lambda: self._commit_files(plan, parts))

    def _commit_files(self, plan: ModelPlan, parts: Mapping[int, Mapping[int, Mapping[str, str]]]) -> set[str]:
        storage, sync = self.storage, self._context.options.write.sync_files
        is_lone = self._begun[0].name == self._single
        self._check_commit()
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
            replaced |= _named_files(self._index) - names
            storage.mark(self._save_id, *replaced)
            self._dead += put_replaced(storage, replaced - self._left)
            self.index = index_of({file.name: of.tensors for file, of in zip(self._begun, plan.files, strict=True)})
            try:
                self._check_commit()
                # Another save may have removed these files as a dead one's. If so, its index is here by now.
                if not storage.put_if(INDEX, self._index, self.index, sync=sync, save_id=self._save_id):
                    raise Refused(f"{storage.path}: another save has put a model there just now; this one is dropped")
            except (Refused, ReadError):
                storage.unmark(self._save_id, *replaced)
                raise
            except WriteError:  # the index may be in place, or arrive later, so all files stay
                self._begun = self._others = self._completed = ()
                raise
        self._begun = self._others = self._completed = ()
        self._replace_others([other for other in others if other.replaces])
        names |= {other.file.name for other in others}
        if replaced:
            with suppress(OSError):
                storage.unmark(self._save_id, *names)
                remove_uploads(storage, self._save_id)  # the index names them: they must not count as a dead save's
        else:
            self._forget(*names)
        return replaced

    def _replace_others(self, others: Sequence[_OtherFile]) -> None:
        """Replaces files of the user's beside the model that is committed; raises `WriteError`."""
        storage = self.storage
        for other in others:
            with storage.writing(f"replace {storage.path}/{other.file.name} beside the new model, which is in place"):
                storage.complete_shared(other.file, other.parts, replace=True)
        if others and self._context.options.write.sync_files:
            with storage.writing(f"write {storage.path}"):
                storage.sync_directory()

    def _other_files(self) -> dict[str, bytes]:
        """The user's other files, by name; raises `Refused` if one is unreadable or named like a file of the model."""
        found: dict[str, bytes] = {}
        for given in self.model.files:
            path = Path(given)
            try:
                for file in sorted(path.iterdir()) if path.is_dir() else [path]:
                    if path.is_dir() and (not file.is_file() or _WEIGHTS.search(file.name)):
                        continue
                    if file.name.endswith((".safetensors", ".safetensors.index.json")):
                        raise Refused(f"files= has {file}, which would be taken for a part of the model: leave it out")
                    found[file.name] = file.read_bytes()
                    if file.name == _CONFIG and self.model.dtype is not None:
                        found[_CONFIG] = _with_dtype(found[_CONFIG], dtype_name(self.model.dtype))
            except OSError as error:
                raise Refused(f"{given}, which files= has, cannot be read: {error}") from error
        return found

    def remove(self, names: Iterable[str]) -> None:
        """Removes the files of a model that was replaced, and then the records that prove whose they were."""

        def clean_up() -> None:
            if remove(self.storage, names):
                with suppress(Exception):
                    remove_uploads(self.storage, *self._dead)
                self._unmark(*names)  # the uploads of this save may be recorded again by now, by one that replaces it

        names = tuple(names)
        self._after_held(lambda: self._clean_up(clean_up))

    def end(self) -> None:
        """Releases the directory, so that others may clean up there. Idempotent."""
        self._after_held(super().end)

    def hold(self) -> Callable[[], None]:
        """Delays the removal of files, and the release of the directory, until the returned function is called.

        It may be called on any thread.
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
        if self._held is None:  # another thread, or a signal's handler, has released it: a lock would not let that in
            _run_all(held)


def _with_dtype(content: bytes, dtype: str) -> bytes:
    """A configuration of transformers that names the weights' dtype, if it named one before; it may have others in it.

    Otherwise, and if it is something else, it stays as it is.
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
    """Runs operations, each once, even if another thread runs them too."""
    while operations:
        try:
            operation = operations.popleft()
        except IndexError:
            return
        operation()


def _names_in(storage: Storage) -> list[str]:
    """The names of the files in a directory; none if it does not exist."""
    try:
        return [file.name for file in storage.listing()[0]]
    except NotCommitted:
        return []


def _named_files(index: bytes | None) -> set[str]:
    """The files that an index lists; none if it cannot be read, or they are elsewhere."""
    with suppress(ValueError):
        return files_named(index)
    return set()
