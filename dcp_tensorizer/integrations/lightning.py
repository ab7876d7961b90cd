"""Strategies for Lightning's Trainer and Fabric, which save with this package while training goes on.

For the Trainer::

    from dcp_tensorizer.integrations.lightning import TensorizerStrategy

    trainer = Trainer(strategy=TensorizerStrategy(), ...)

For Fabric::

    from dcp_tensorizer.integrations.lightning import TensorizerFabricStrategy

    fabric = Fabric(strategy=TensorizerFabricStrategy(parallelize), ...)

A checkpoint is a directory like those of Lightning's ``ModelParallelStrategy``, which loads it under `install`. Values
other than model and optimizers are in its ``meta.pt``, and also in the checkpoint itself, from which these strategies
load them. Otherwise a save that is killed while it replaces another would leave the new ``meta.pt`` beside old weights.
"""

from __future__ import annotations

import inspect
import io
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
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
from torch.optim import Optimizer

from .._job.ranks import Heartbeats, OwnGroup
from .._runtime.forks import free_in_child
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


class _Asynchronous:
    """The common part of both strategies: one writer, and one save in progress.

    Takes the arguments of ``ModelParallelStrategy``, and ``writer_options`` of `TensorizerStorageWriter`. Raises
    `TypeError` or `ValueError` for bad arguments, and if ``save_distributed_checkpoint`` is False.
    """

    is_global_zero: bool
    broadcast: Callable[[Any], Any]

    def __init__(self, *args: Any, writer_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        given = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        if not given.get("save_distributed_checkpoint", True):
            raise ValueError(
                "save_distributed_checkpoint=False asks for one file with all of the state, and this strategy has each "
                "rank save its shards: leave it out, or use Lightning's own strategy"
            )
        super().__init__(*args, **kwargs)
        self._writer = TensorizerStorageWriter(**(writer_options or {}))
        self._heartbeats: Heartbeats | None = None
        self._save: Future[None] | None = None
        self._after_commit: list[Callable[[], object]] = []
        self._cleaning = free_in_child(threading.Lock())

    def wait_for_save(self) -> None:
        """Waits until the save in progress is committed, and the checkpoint that it replaces is removed.

        Raises:
            CheckpointException: it failed; raised only once.
        """
        save, self._save = self._save, None
        if save is not None:
            save.result()
            self._clean()

    def teardown(self) -> None:
        """Waits for the save in progress, see `wait_for_save`, and destroys the process group of the saves."""
        try:
            self.wait_for_save()
        finally:
            if self._heartbeats is not None:
                self._heartbeats.close()
                self._heartbeats = None
            super().teardown()  # type: ignore[misc]

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Waits, with ``overlap_staging``, until the parameters may be changed."""
        with self._writer.lock():
            return super().optimizer_step(*args, **kwargs)  # type: ignore[misc]

    def _start_save(self, path: Path, state: dict[str, Any], meta: dict[str, Any], *, has_buffers: bool) -> None:
        """Stages the state once the save before is over, and saves it while training goes on. A collective.

        ``state`` is that of the model and the optimizers, ``meta`` everything else, of which rank 0's is saved first,
        as a file. The checkpoint's directory is made. With ``has_buffers``, which the next forward pass may change, it
        waits until the state is copied. Raises `CheckpointException` if the save before failed, and `WriteError` if
        rank 0 could not write ``meta.pt``.
        """
        self.wait_for_save()
        if self._heartbeats is None:
            self._heartbeats = Heartbeats(OwnGroup())
            self._heartbeats.watch_saves(self._writer.saver)
        replaced = path.with_name(f"{path.name}.replaced")
        failure = None
        if self.is_global_zero:
            try:
                if path.is_file():  # it stays until its replacement is committed
                    path.replace(replaced)
                content = io.BytesIO()
                torch.save(meta, content)
                path.mkdir(parents=True, exist_ok=True)
                unfinished = path / f".{_META_FILE}"
                unfinished.write_bytes(content.getvalue())
                unfinished.replace(path / _META_FILE)
                state = {**state, _META_KEY: content.getvalue()}
            except Exception as error:
                failure = f"rank 0 could not write {path / _META_FILE}: {error!r}"
        if failure := self.broadcast(failure):  # so that the others do not wait for rank 0
            raise WriteError(failure)
        group = self._heartbeats.group
        saved = async_save(state, storage_writer=self._writer, checkpoint_id=path, process_group=group)
        self._save = saved if isinstance(saved, Future) else saved.upload_completion
        if has_buffers:
            self._writer.synchronize_staging()
        if self.is_global_zero and replaced.is_file():
            self._when_committed(lambda: replaced.unlink(missing_ok=True))

    def _when_committed(self, action: Callable[[], object]) -> None:
        """Calls ``action`` when the save in progress is committed; if that save fails, with the next commit."""
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
    """A strategy for Lightning's ``Trainer``: its ``ModelParallelStrategy`` with saves while training goes on.

    ``trainer.save_checkpoint`` and ``ModelCheckpoint`` return when the state is copied from the device. The checkpoint
    that a save replaces is removed after the commit, and stays if the save fails. The error of a failed save is raised
    by the next save, or at the end of ``trainer.fit``, which waits for the last one.

    It also loads checkpoints of Lightning's ``ModelParallelStrategy``, and takes its arguments: ``data_parallel_size``,
    ``tensor_parallel_size``, ``process_group_backend`` and ``timeout``.

    Args:
        writer_options: Options of `TensorizerStorageWriter`.
    """

    def setup(self, trainer: Trainer) -> None:
        """Called by the trainer before it trains.

        Raises:
            ValueError: a ``ModelCheckpoint`` has ``save_last="link"``: the link would be made before the commit.
        """
        if any(getattr(callback, "save_last", None) == "link" for callback in trainer.checkpoint_callbacks):
            raise ValueError(
                'ModelCheckpoint(save_last="link") links to a checkpoint that is not committed yet, and a job that is '
                "killed then could not resume. Pass save_last=True."
            )
        super().setup(trainer)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state, on its device."""
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state, on its device."""
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return get_optimizer_state_dict(self.model, inner)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Begins a save. A collective.

        Raises:
            TypeError: there are ``storage_options``, which mean nothing here.
            CheckpointException: the save before failed.
            WriteError: the directory or its ``meta.pt`` could not be written.
        """
        _refuse(storage_options=storage_options)
        state = {"state_dict": checkpoint.pop("state_dict")}
        has_buffers = _has_buffers(self.model, state["state_dict"])
        state |= {f"optimizer_{n}": value for n, value in enumerate(checkpoint.pop("optimizer_states", []))}
        self._start_save(_local(self.broadcast(filepath)), state, checkpoint, has_buffers=has_buffers)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint when the save in progress is committed."""
        remove = super().remove_checkpoint
        self._when_committed(lambda: remove(filepath))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads model and optimizers, and returns everything else. A collective."""
        self.wait_for_save()
        path = _local(self.broadcast(checkpoint_path))
        if path.is_file():
            return super().load_checkpoint(path, weights_only)  # type: ignore[no-any-return]
        optimizers = {f"optimizer_{n}": optimizer for n, optimizer in enumerate(self.optimizers)}
        strict = self.lightning_module.strict_loading
        return _load(path, ("state_dict", self.model), optimizers, strict, weights_only)


class TensorizerFabricStrategy(_Asynchronous, FabricModelParallelStrategy):
    """A strategy for Lightning's ``Fabric``: its ``ModelParallelStrategy`` with saves while training goes on.

    ``fabric.save`` returns when the state is copied from the device. The error of a failed save is raised by the next
    save, or by ``fabric.strategy.wait_for_save()``. Call that after the last save, because Fabric has no end of its
    own.

    It also loads checkpoints of Lightning's ``ModelParallelStrategy``, and takes its arguments: ``parallelize_fn``,
    ``data_parallel_size``, ``tensor_parallel_size``, ``process_group_backend`` and ``timeout``.

    Args:
        writer_options: Options of `TensorizerStorageWriter`.
    """

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Any = None,  # noqa: A002 - the base class names it so
    ) -> None:
        """Begins a save. A collective.

        Raises:
            TypeError: there are ``storage_options`` or a ``filter``, which mean nothing here.
            ValueError: the state has no model, or several.
            CheckpointException: the save before failed.
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
        """Loads the model and the optimizers of a state, and sets its other values. A collective.

        A value with ``load_state_dict``, such as a scheduler, gets its saved state. Without ``strict``, parts of the
        model and other values that the checkpoint lacks stay as they are.

        Returns:
            The saved values that the state does not have.

        Raises:
            ValueError: the state has no model, or several.
            KeyError: the state has a value that was not saved, and ``strict`` is true.
        """
        self.wait_for_save()
        path = _local(self.broadcast(path))
        if path.is_file() or not isinstance(state, dict):
            return super().load_checkpoint(path, state, strict, weights_only)  # type: ignore[no-any-return]
        optimizers = {key: value for key, value in state.items() if isinstance(value, Optimizer)}
        model = _model_of(state)
        meta = _load(path, model, optimizers, strict, weights_only)
        for key in state.keys() - optimizers.keys() - {model[0]}:
            if key in meta and isinstance(state[key], Stateful):
                state[key].load_state_dict(meta.pop(key))
            elif key in meta:
                state[key] = meta.pop(key)
            elif strict:
                raise KeyError(f"{path} has no {key!r}, which the state has. Leave it out, or pass strict=False.")
        return meta


def _local(path: Any) -> Path:
    """A path; raises `ValueError` for a URL, which would become a local directory."""
    if "://" in str(path):
        raise ValueError(f"{path} is a URL, and Lightning's strategies save to paths. Pass a path that all nodes see.")
    return Path(path)


def _refuse(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise TypeError(f"{name} is not supported for a checkpoint of shards. Leave it out.")


def _model_of(state: Mapping[str, Any]) -> tuple[str, nn.Module]:
    models = [(key, value) for key, value in state.items() if isinstance(value, nn.Module)]
    if len(models) != 1:
        raise ValueError(f"the state must have one model, got {len(models)}. Save each by itself.")
    return models[0]


def _has_buffers(model: nn.Module, state: Mapping[str, Any]) -> bool:
    """Returns whether a model's state has more than parameters, such as the statistics of BatchNorm."""
    return not state.keys() <= dict(model.named_parameters(remove_duplicate=False)).keys()


def _load(
    path: Path,
    model: tuple[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    strict: bool,
    weights_only: bool | None,
) -> dict[str, Any]:
    """Loads a model and its optimizers, by key; returns the other values.

    All are checked before any changes. Without ``strict`` the model may have keys that the checkpoint lacks.
    """
    meta: dict[str, Any] = {_META_KEY: b""}
    load(meta, storage_reader=open_reader(path), planner=LoadPlanner(allow_partial_load=True))
    key, module = model
    state: dict[str, Any] = {key: get_model_state_dict(module)}
    state |= {name: get_optimizer_state_dict(module, optimizer) for name, optimizer in optimizers.items()}
    for part in [state] if strict else [{name: state[name]} for name in (*optimizers, key)]:
        load(part, storage_reader=open_reader(path), planner=LoadPlanner(allow_partial_load=not strict and key in part))
        state |= part
    module.load_state_dict(state[key], strict=strict)
    for name, optimizer in optimizers.items():
        set_optimizer_state_dict(module, optimizer, state[name])
    content = meta[_META_KEY] or (path / _META_FILE).read_bytes()  # Lightning's own checkpoints lack the key
    return torch.load(io.BytesIO(content), weights_only=weights_only)  # type: ignore[no-any-return]
