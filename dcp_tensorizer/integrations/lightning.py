"""Strategies for Lightning's Trainer and Fabric that save with this package while training continues.

For the Trainer::

    from dcp_tensorizer.integrations.lightning import TensorizerStrategy

    trainer = Trainer(strategy=TensorizerStrategy(), ...)

For Fabric::

    from dcp_tensorizer.integrations.lightning import TensorizerFabricStrategy

    fabric = Fabric(strategy=TensorizerFabricStrategy(parallelize), ...)

A checkpoint is a directory like those of Lightning's ``ModelParallelStrategy``, which can load it after
`dcp_tensorizer.install`. Values other than model and optimizers are in its ``meta.pt``. A copy of these values is saved
together with the weights, and the strategies of this module load that copy. So a killed save that leaves a new
``meta.pt`` beside old weights does no damage.
"""

from __future__ import annotations

import inspect
import io
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from .._job.options import check_no_local_folder, options_of_reader
from .._job.ranks import Heartbeats, OwnGroup
from .._runtime.forks import free_in_child
from .._writer_process.options import SaveLimits
from ..errors import WriteError
from ..planner import LoadPlanner
from ..reader import open_reader
from ..writer import TensorizerStorageWriter
from ._needed import needed

with needed(__name__, "lightning"):
    from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
    from lightning.pytorch import Trainer
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.strategies import ModelParallelStrategy

__all__ = ["TensorizerFabricStrategy", "TensorizerStrategy"]

_META_FILE = "meta.pt"
_META_KEY = "lightning_meta"
_REQUEUE = "hpc_ckpt_"  # Lightning's prefix for the checkpoint that it saves before it requeues a Slurm job
_UNFINISHED = "requeue.unfinished"


class _Asynchronous:
    """Common base of both strategies, with one writer and at most one save in progress.

    Takes the arguments of ``ModelParallelStrategy``, and the options of the writer and of readers.
    """

    is_global_zero: bool
    broadcast: Callable[[Any], Any]

    def __init__(
        self,
        *args: Any,
        writer_options: Mapping[str, Any] | None = None,
        reader_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        given = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        if not given.get("save_distributed_checkpoint", True):
            raise ValueError(
                "save_distributed_checkpoint=False asks for one file with the whole state, but with this strategy each "
                "rank saves its shards. Leave it out, or use Lightning's own strategy."
            )
        options = dict(writer_options or {})
        check_no_local_folder(options)
        super().__init__(*args, **kwargs)
        self._writer = TensorizerStorageWriter(**options)
        self._reader_options = options_of_reader(".", options, options.get("limits", SaveLimits()), reader_options)
        self._heartbeats: Heartbeats | None = None
        self._save: Future[None] | None = None
        self._after_commit: list[Callable[[], object]] = []
        self._cleaning = free_in_child(threading.RLock())  # Lightning saves in a signal handler

    def wait_for_save(self) -> None:
        """Waits until the save in progress is committed, and the checkpoint that it replaces is removed.

        Raises:
            CheckpointException: the save failed; raised only once.
        """
        save, self._save = self._save, None
        if save is not None:
            save.result()
            self._clean()

    def teardown(self) -> None:
        """Waits for the save in progress (`wait_for_save`), and destroys the process group of the saves."""
        try:
            self.wait_for_save()
        finally:
            if self._heartbeats is not None:
                self._heartbeats.close()
                self._heartbeats = None
            with suppress(NotImplementedError):  # Fabric's own teardown reads `checkpoint_io`, which raises this
                super().teardown()  # type: ignore[misc]

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Takes an optimizer step. With ``overlap_staging``, first waits until the parameters may change."""
        with self._writer.lock():
            return super().optimizer_step(*args, **kwargs)  # type: ignore[misc]

    def _start_save(self, path: Path, state: dict[str, Any], meta: dict[str, Any], *, has_buffers: bool) -> None:
        """Waits for the previous save, stages the state, and saves it while training continues. Collective.

        ``state`` is that of the model and the optimizers, and ``meta`` everything else. Before staging, rank 0 makes
        the checkpoint's directory, and writes its own ``meta`` to ``meta.pt``. If the model has buffers
        (``has_buffers``), the call waits until the state is copied, because the next forward pass may change the
        buffers. Raises `CheckpointException` if the previous save failed, `ValueError` if ``meta`` has a sharded
        DTensor, and `WriteError` if rank 0 could not write ``meta.pt``.
        """
        for keys, value in pytree.tree_leaves_with_path(meta):
            if isinstance(value, DTensor) and not all(placement.is_replicate() for placement in value.placements):
                raise ValueError(
                    f"state{pytree.keystr(keys)} is a sharded DTensor, but except for the model and the optimizers, "
                    "only rank 0's values are saved. Pass its full_tensor(), or save it with dcp.save."
                )
        self.wait_for_save()
        if self._heartbeats is None:
            self._heartbeats = Heartbeats(OwnGroup())
            self._heartbeats.watch_saves(self._writer.saver)
        replaced = path.with_name(f"{path.name}.replaced")
        content = io.BytesIO()

        def write_meta() -> None:
            if path.is_file():  # an old file stays until its replacement is committed
                path.replace(replaced)
            torch.save(meta, content)
            path.mkdir(parents=True, exist_ok=True)
            unfinished = path / f".{_META_FILE}"
            unfinished.write_bytes(content.getvalue())
            unfinished.replace(path / _META_FILE)

        self._on_rank_0(write_meta, path / _META_FILE)
        if self.is_global_zero:
            state = {**state, _META_KEY: content.getvalue()}
        group = self._heartbeats.group
        saved = async_save(state, storage_writer=self._writer, checkpoint_id=path, process_group=group)
        self._save = saved if isinstance(saved, Future) else saved.upload_completion
        if has_buffers:
            self._writer.synchronize_staging()
        if self.is_global_zero and replaced.is_file():
            self._when_committed(lambda: replaced.unlink(missing_ok=True))

    def _on_rank_0(self, write: Callable[[], object], path: Path) -> None:
        """Calls ``write`` on rank 0, which writes ``path``. If it fails, raises `WriteError` on all ranks."""
        failure = None
        if self.is_global_zero:
            try:
                write()
            except Exception as error:
                failure = f"rank 0 could not write {path}: {error!r}"
        if failure := self.broadcast(failure):  # so that the other ranks do not wait for rank 0
            raise WriteError(failure)

    def _when_committed(self, action: Callable[[], object]) -> None:
        """Calls ``action`` after the commit of the save in progress, or after the next commit if that save fails.

        Without a save in progress, calls it immediately.
        """
        self._after_commit.append(action)
        if self._save is None:
            self._clean()
        else:
            self._save.add_done_callback(lambda save: self._clean() if save.exception() is None else None)

    def _clean(self) -> None:
        with self._cleaning:
            while self._after_commit:
                self._after_commit.pop(0)()


class TensorizerStrategy(_Asynchronous, ModelParallelStrategy):
    """Strategy for Lightning's ``Trainer``: its ``ModelParallelStrategy``, with saves while training continues.

    ``trainer.save_checkpoint`` and ``ModelCheckpoint`` return when the state is copied from the device; with
    ``overlap_staging``, possibly earlier. The checkpoint that a save replaces is removed after the commit, and stays
    if the save fails. If a save fails, the next save raises the error. If the last save fails, ``trainer.fit`` raises
    the error at its end, after waiting for the save. When Lightning requeues a job of Slurm, its save of
    ``hpc_ckpt_...`` returns after the commit.

    The strategy also loads checkpoints of Lightning's ``ModelParallelStrategy``, and takes its arguments:
    ``data_parallel_size``, ``tensor_parallel_size``, ``process_group_backend`` and ``timeout``.

    Args:
        writer_options: Options of `TensorizerStorageWriter`, without ``local`` and ``max_unflushed``.
        reader_options: Options of `TensorizerStorageReader`, with the defaults of `CheckpointManager`: the timeout and
            the key are the writer's. ``{"encryption": None}`` loads a checkpoint that is not encrypted.
    """

    def setup(self, trainer: Trainer) -> None:
        """Sets up the strategy.

        Raises:
            ValueError: a ``ModelCheckpoint`` has ``save_last="link"``: the link would be made before the commit.
        """
        if any(getattr(callback, "save_last", None) == "link" for callback in trainer.checkpoint_callbacks):
            raise ValueError(
                'ModelCheckpoint(save_last="link") links to a checkpoint that is not committed yet, and a job that is '
                "killed before the commit could not resume from the link. Pass save_last=True."
            )
        super().setup(trainer)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the model's state, on its device."""
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the optimizer's state, on its device."""
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return get_optimizer_state_dict(self.model, inner)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Begins a save. Collective.

        Raises:
            TypeError: ``storage_options`` is given, which is not supported.
            ValueError: the path is a URL, or a value outside the model and the optimizers is a sharded DTensor.
            CheckpointException: the previous save failed.
            WriteError: the directory or its ``meta.pt`` could not be written.
        """
        _refuse(storage_options=storage_options)
        state = {"state_dict": checkpoint.pop("state_dict")}
        has_buffers = _has_buffers(self.model, state["state_dict"])
        state |= {f"optimizer_{n}": value for n, value in enumerate(checkpoint.pop("optimizer_states", []))}
        path = _local(self.broadcast(filepath))
        if not path.name.startswith(_REQUEUE):
            self._start_save(path, state, checkpoint, has_buffers=has_buffers)
            return
        # When this returns, Lightning requeues the job, which loads the last path with this prefix, committed or not.
        unfinished = path.with_name(_UNFINISHED)
        self._start_save(unfinished, state, checkpoint, has_buffers=has_buffers)
        self.wait_for_save()
        self._on_rank_0(lambda: unfinished.replace(path), path)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint after the commit of the save in progress, or immediately if there is none."""
        remove = super().remove_checkpoint
        self._when_committed(lambda: remove(filepath))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads model and optimizers, and returns everything else. Collective."""
        self.wait_for_save()
        path = _local(self.broadcast(checkpoint_path))
        if path.is_file():
            return super().load_checkpoint(path, weights_only)  # type: ignore[no-any-return]
        optimizers = {f"optimizer_{n}": optimizer for n, optimizer in enumerate(self.optimizers)}
        strict = self.lightning_module.strict_loading
        return _load(path, ("state_dict", self.model), optimizers, strict, weights_only, self._reader_options)


class TensorizerFabricStrategy(_Asynchronous, FabricModelParallelStrategy):
    """Strategy for Lightning's ``Fabric``: its ``ModelParallelStrategy``, with saves while training continues.

    ``fabric.save`` returns when the state is copied from the device; with ``overlap_staging``, possibly earlier. If
    a save fails, the next save or ``fabric.strategy.wait_for_save()`` raises the error. Call ``wait_for_save()`` after
    the last save, because Fabric never calls the strategy's ``teardown``. Values other than the model and the
    optimizers are saved as they are on rank 0.

    The strategy also loads checkpoints of Lightning's ``ModelParallelStrategy``, and takes its arguments:
    ``parallelize_fn``, ``data_parallel_size``, ``tensor_parallel_size``, ``process_group_backend`` and ``timeout``.

    Args:
        writer_options: Options of `TensorizerStorageWriter`, without ``local`` and ``max_unflushed``.
        reader_options: Options of `TensorizerStorageReader`, with the defaults of `CheckpointManager`: the timeout and
            the key are the writer's. ``{"encryption": None}`` loads a checkpoint that is not encrypted.
    """

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Any = None,  # noqa: A002 - the base class names it so
    ) -> None:
        """Begins a save. Collective.

        Raises:
            TypeError: ``storage_options`` or ``filter`` is given, which are not supported.
            ValueError: the state has no model, or several, or the path is a URL, or a value outside the model and the
                optimizers is a sharded DTensor.
            CheckpointException: the previous save failed.
            WriteError: the directory or its ``meta.pt`` could not be written.
        """
        _refuse(storage_options=storage_options, filter=filter)
        name, model = _model_of(state)
        saved: dict[str, Any] = {}
        meta: dict[str, Any] = {}
        for key, value in state.items():
            if isinstance(value, nn.Module):
                saved[key] = get_model_state_dict(value)
            elif isinstance(value, Optimizer):
                saved[key] = get_optimizer_state_dict(model, value)
            else:
                meta[key] = value.state_dict() if isinstance(value, Stateful) else value
        has_buffers = _has_buffers(model, saved[name])
        self._start_save(_local(self.broadcast(path)), saved, meta, has_buffers=has_buffers)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads the model and the optimizers of a state, and sets its other values. Collective.

        A value with ``load_state_dict``, such as a scheduler, gets its saved state. Without ``strict``, parts of the
        model and other values that the checkpoint lacks stay unchanged.

        Returns:
            The saved values that the state does not have.

        Raises:
            ValueError: the state has no model, or several, or the path is a URL.
            KeyError: the state has a value that was not saved, and ``strict`` is true.
        """
        self.wait_for_save()
        path = _local(self.broadcast(path))
        if path.is_file() or not isinstance(state, dict):
            return super().load_checkpoint(path, state, strict, weights_only)  # type: ignore[no-any-return]
        optimizers = {key: value for key, value in state.items() if isinstance(value, Optimizer)}
        model = _model_of(state)
        meta = _load(path, model, optimizers, strict, weights_only, self._reader_options)
        for key in state.keys() - optimizers.keys() - {model[0]}:
            if key in meta and isinstance(state[key], Stateful):
                state[key].load_state_dict(meta.pop(key))
            elif key in meta:
                state[key] = meta.pop(key)
            elif strict:
                raise KeyError(f"{path} has no {key!r}, which the state has. Leave it out, or pass strict=False.")
        return meta


def _local(path: Any) -> Path:
    """Returns a path. Raises `ValueError` for a URL, which would become a local directory."""
    if "://" in str(path):
        raise ValueError(f"{path} is a URL, but Lightning's checkpoints must be local. Pass a path that all nodes see.")
    return Path(path)


def _refuse(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise TypeError(f"{name} is not supported for a checkpoint of shards. Leave it out.")


def _model_of(state: Mapping[str, Any]) -> tuple[str, nn.Module]:
    models = [(key, value) for key, value in state.items() if isinstance(value, nn.Module)]
    if len(models) != 1:
        raise ValueError(f"the state must have exactly one model, got {len(models)}. Use one checkpoint per model.")
    return models[0]


def _has_buffers(model: nn.Module, state: Mapping[str, Any]) -> bool:
    """Returns whether a model's state has values other than parameters, such as the running statistics of BatchNorm."""
    return not state.keys() <= dict(model.named_parameters(remove_duplicate=False)).keys()


def _load(
    path: Path,
    model: tuple[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    strict: bool,
    weights_only: bool | None,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Loads a model and its optimizers, by key. Returns the other values.

    With ``strict``, checks all keys before it changes a value. Without ``strict``, the model may have keys that the
    checkpoint lacks.
    """
    meta: dict[str, Any] = {_META_KEY: b""}
    load(meta, storage_reader=open_reader(path, **options), planner=LoadPlanner(allow_partial_load=True))
    key, module = model
    state: dict[str, Any] = {key: get_model_state_dict(module)}
    state |= {name: get_optimizer_state_dict(module, optimizer) for name, optimizer in optimizers.items()}
    for part in [state] if strict else [{name: state[name]} for name in (*optimizers, key)]:
        planner = LoadPlanner(allow_partial_load=not strict and key in part)
        load(part, storage_reader=open_reader(path, **options), planner=planner)
        state |= part
    module.load_state_dict(state[key], strict=strict)
    for name, optimizer in optimizers.items():
        set_optimizer_state_dict(module, optimizer, state[name])
    content = meta[_META_KEY] or (path / _META_FILE).read_bytes()  # Lightning's own checkpoints lack the key
    return torch.load(io.BytesIO(content), weights_only=weights_only)  # type: ignore[no-any-return]
