"""Models for inference: all ranks together write a model in Hugging Face's format, with `SafetensorsStorageWriter`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._formats.rename import Parts, Rules
from ._formats.safetensors import MAX_SHARD_BYTES
from ._models.layout import ModelOptions
from ._models.save import ModelSaver
from ._publish.publisher import Publish, PublishedVersion
from ._runtime.threads import Deadline
from ._runtime.validation import check_count, check_patterns, check_storage_options, check_timeout, set_fields
from ._saving.report import Reports, SaveReport
from ._saving.saver import Saver
from ._storage.open import path_to_write
from ._storage.redact import shown
from ._writer_process.options import SaveLimits, SaveOptions, Staging
from .writer import TensorizerStorageWriter

if TYPE_CHECKING:
    import torch

__all__ = ["Export", "Parts", "SafetensorsStorageWriter"]


@dataclass(frozen=True, slots=True)
class Export(ModelOptions):
    """Options for exporting models from `CheckpointManager`: ``CheckpointManager(..., export=Export("models/{}"))``.

    An export is written when a save is committed, from the save's staged copy. Calls to the manager that wait for the
    save also wait for the export. The error of a failed export is logged, and raised by ``wait`` and ``close``. The
    failure does not affect the checkpoint of that step.

    Attributes:
        path: Where to write the model; ``{}`` stands for the step. If the path has no ``{}``, and ``overwrite`` is
            True, every export replaces the previous one.
        every: Export the first save at or after each multiple of this many steps. If None, only ``at_end`` exports.
        at_end: Export the last save of the job when the manager is closed, unless an error or a signal ends the job.
        include: Patterns of the keys to export, in the flattened state dict.
        dtype, rename, max_shard_bytes, files, overwrite, publish, storage_options: As for
            `SafetensorsStorageWriter`. By default the prefix ``model.`` is removed from the keys; with another
            ``include``, pass other rules, or ``{}``.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option has a value that is not allowed; or, without ``overwrite``, several exports would go to
            one path.
        WriteError, CheckpointError: as for `SafetensorsStorageWriter`.
    """

    path: str | os.PathLike[str]
    _: KW_ONLY
    every: int | None = None
    at_end: bool = True
    include: Sequence[str] = ("model.*",)
    rename: Rules = field(default_factory=lambda: {"model.*": "*"})
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        storage_options = check_storage_options(self.storage_options)
        set_fields(
            self,
            path=path_to_write(self.path, storage_options, is_shared=True),
            every=check_count("every", self.every, optional=True),
            include=check_patterns("include", self.include),
            storage_options=storage_options,
        )
        ModelOptions.__post_init__(self)
        if self.every is not None and not self.overwrite and self.path_of(1) == self.path_of(2):
            raise ValueError(
                "every= exports several models to one path. Put {} for the step into the path, or pass overwrite=True."
            )

    def path_of(self, step: int) -> str | os.PathLike[str]:
        """Returns the path of the export of a step."""
        if isinstance(self.path, Path):
            return Path(str(self.path).replace("{}", str(step)))
        return str(self.path).replace("{}", str(step))


class SafetensorsStorageWriter(TensorizerStorageWriter):
    """Writer of models in Hugging Face's format: safetensors files with whole tensors, and an index.

    Pass the writer as ``storage_writer`` to ``dcp.async_save`` or ``dcp.save``, with the state dict of a model::

        writer = SafetensorsStorageWriter("models/final", dtype=torch.bfloat16, files=["config.json", "tokenizer.json"])
        dcp.async_save(model.state_dict(), storage_writer=writer, process_group=gloo_group)

    Every rank writes its parts of the tensors to their offsets in the files. The ranks do not gather the tensors: on
    network mounts and S3 they exchange only the bytes of file blocks in which several ranks have parts. Each file has
    the same bytes as if ``safetensors.torch.save_file`` had written it. Training waits only for the copy to the staging
    buffer, as with `TensorizerStorageWriter`.

    ``model.safetensors.index.json`` is the commit: it is written last, and atomically. A model of one file needs no
    index; without one, it is committed when the file gets its final name. If a save fails or is killed before the
    commit, the path holds the old model, or no model.

    Tied tensors are written once, under the name that comes first in the state dict. A value that is not a tensor is an
    error.

    Args:
        path: Where to save: a local directory or a mount that all ranks share, or a URL of S3. A save's
            ``checkpoint_id`` overrides it for that save.
        dtype: The dtype that floating-point tensors are cast to, bit for bit as by ``tensor.to(dtype)``.
        rename: New names, by patterns of the keys of the flattened state dict. Only ``*`` is special: the n-th ``*`` of
            a new name stands for the same text as the n-th of its pattern. The first matching pattern applies. One side
            of a rule may be `Parts`, which cut or join tensors: for example, fused experts, or fused queries, keys and
            values. The rules must be reversible, so that ``open_reader(path, rename=...)`` loads the model with them.
        max_shard_bytes: Maximum size of a file. A larger tensor gets a separate file.
        files: Files to copy to the model, such as ``config.json`` and the tokenizer's files. If an item is a directory,
            all files in it are copied, except weights and the files of a checkpoint. The coordinator reads the files
            when the save begins, and replaces existing files of the same names right after the commit. With ``dtype``,
            the copied ``config.json`` names the new dtype.
        overwrite: Replace a model at the path. If that model has an index, the names of the new files contain the
            save's id, and the files that the old index names are removed after the new index is in place. A model of
            one file without an index is replaced by a file of the same name. If False, a model at the path is an error.
        publish: Where to publish each model as the next version for inference servers, whole or as a delta. After the
            save a separate process publishes the model. Neither training nor the next save waits for that process. If
            models are saved faster than they are published, only the newest waiting model is published. With
            ``overwrite``, a model of one file also has an index, so that the next save uses another file name, and this
            file stays until it is published.

    The other arguments are those of `TensorizerStorageWriter`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value that is not allowed.
        WriteError: the path is relative, and there is no working directory; or its URL has an unknown protocol, needs a
            library that is missing, or is on a storage where several ranks cannot write one file.
        CheckpointError: ``publish`` is given, and zstd is not installed.

    A save raises, on each rank:
        WriteError: the path holds a model that must not be replaced, or a file that readers would prefer to the new
            model; safetensors cannot hold a value or a dtype; two tensors would have one name; the model cannot be
            written; or an earlier model could not be published.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        dtype: torch.dtype | None = None,
        rename: Rules | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        files: Sequence[str | os.PathLike[str]] = (),
        overwrite: bool = False,
        publish: Publish | None = None,
        cache_staged_state_dict: bool = True,
        staging: Staging = "buffer",
        overlap_staging: bool = False,
        sync_files: bool = True,
        thread_count: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        on_report: Callable[[SaveReport], object] | None = None,
        on_progress: Callable[[int, int], object] | None = None,
        limits: SaveLimits = SaveLimits(),  # noqa: B008 - it is frozen
    ) -> None:
        self._model = ModelOptions(
            dtype=dtype,
            rename=rename or {},
            max_shard_bytes=max_shard_bytes,
            files=files,
            overwrite=overwrite,
            publish=publish,
        )
        options = SaveOptions(
            cache_staged_state_dict=cache_staged_state_dict,
            staging=staging,
            overlap_staging=overlap_staging,
            overwrite=overwrite,
            sync_files=sync_files,
            thread_count=thread_count,  # type: ignore[arg-type]
            storage_options=storage_options,  # type: ignore[arg-type]
            limits=limits,
        )
        self._path = None if path is None else path_to_write(path, options.storage_options, is_shared=True)
        self._begin(options, Reports(on_report, on_progress))

    def __repr__(self) -> str:
        return shown(self, self._path, self._options.storage_options, self._model.arguments())

    def wait_published(self, timeout: float | None = None) -> PublishedVersion | None:
        """Waits until the last saved model is published; returns its version.

        Only the coordinator publishes. On other ranks, without ``publish``, and if no model was saved, returns None.

        Args:
            timeout: Timeout in seconds, after which the call returns None. If None, there is no timeout.

        Raises:
            TypeError, ValueError: the timeout is not a number of seconds.
            WriteError: a saved model could not be published, and no save has raised that error yet.
        """
        deadline = Deadline(check_timeout(timeout, least=0, optional=True))
        versions = self._saver.versions if isinstance(self._saver, ModelSaver) else None
        return None if versions is None else versions.wait(deadline)

    def _new_saver(self, reports: Reports, *, closed: bool) -> Saver:
        return ModelSaver(self._options, self._model, reports, closed=closed)
