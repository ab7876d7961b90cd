"""Operations during which the machine crashes, and what a crash may leave: the old state, the new one, or nothing."""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException

from dcp_tensorizer import SafetensorsStorageWriter, TensorizerStorageReader, TensorizerStorageWriter
from dcp_tensorizer._saving.commit import begin
from dcp_tensorizer._storage.local import LocalStorage
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer.errors import NotCommitted, WriteError
from dcp_tensorizer.tools import ConvertOptions, collect, convert
from dcp_tensorizer.tools._formats.registry import open_checkpoint

from .crash_states import crash_states, materialise, recorded

__all__ = ["SCENARIOS", "Scenario", "enumerate_crashes"]

_tensors = 1  # the tensors of a checkpoint, each in a separate file; a checkpoint also has an object


class Scenario(NamedTuple):
    """An operation, and what it may leave.

    Attributes:
        prepare: Makes the files that exist before the operation.
        run: Runs the operation.
        allowed: For each checkpoint, the steps that may be found afterwards; None if it may be missing.
    """

    prepare: Callable[[Path], None]
    run: Callable[[Path], None]
    allowed: Mapping[str, set[int | None]]


def _state(step: int) -> dict[str, Any]:
    tensors = {f"w{number}": torch.full((40 + number,), float(step)) for number in range(_tensors)}
    return {**tensors, "step": step}


@contextmanager
def _quietly() -> Any:
    """Without torch's warning that it saves in a single process, and with each tensor in a file of its own."""
    with warnings.catch_warnings(), mock.patch.object(LocalStorage, "max_file_bytes", 1):
        warnings.simplefilter("ignore")
        yield


def _save(path: Path, step: int, **options: Any) -> None:
    with _quietly(), TensorizerStorageWriter(path, **options) as writer:
        dcp.save(_state(step), storage_writer=writer, no_dist=True)


def _save_alone(path: Path, step: int) -> None:
    with _quietly(), TensorizerStorageWriter(path) as writer:
        dcp.save(_state(step), storage_writer=writer, use_collectives=False)


def _load(path: Path) -> int | None:
    """The step of the checkpoint at a path; None if there is none. Anything else is an error."""
    state = _state(0)
    try:
        with _quietly():
            dcp.load(state, storage_reader=TensorizerStorageReader(path), no_dist=True)
    except CheckpointException as error:
        (cause, _), *_ = error.failures.values()
        if isinstance(cause, NotCommitted):
            return None
        raise cause from None
    for value in state.values():
        assert torch.equal(torch.as_tensor(value, dtype=torch.float32).unique(), torch.tensor([float(state["step"])]))
    return int(state["step"])


# Open from one save to the next, so that the writer knows the files of the first save.
_reusing: list[TensorizerStorageWriter] = []


def _prepare_reuse(path: Path) -> None:
    """A checkpoint of step 2, whose files the next save will link."""
    _reusing.append(TensorizerStorageWriter(reuse_unchanged=True))
    with _quietly():
        dcp.save(_state(2), storage_writer=_reusing[-1], checkpoint_id=path, no_dist=True)


def _save_reusing(path: Path) -> None:
    with _quietly(), _reusing.pop() as writer:
        dcp.save(_state(2), storage_writer=writer, checkpoint_id=path, no_dist=True)
        assert writer.last_report is not None
        assert writer.last_report.reused_nbytes == writer.last_report.nbytes


def _collect(path: Path, keep: int | None = None) -> None:
    collect(path, keep_latest=keep)


def _prepare_steps(root: Path) -> None:
    for step in (1, 2):
        _save(root / f"step-{step}", step)


def _fail(path: Path, step: int) -> None:
    """A save that dies before its commit, and leaves all of its files."""
    dead = mock.patch("dcp_tensorizer._saving.save.commit", side_effect=WriteError("dead"))
    with dead, suppress(CheckpointException):
        _save(path, step)


def _save_model(path: Path, step: int, max_shard_bytes: int = 1) -> None:
    options: dict[str, Any] = {"max_shard_bytes": max_shard_bytes, "overwrite": True}
    with _quietly(), tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({"step": step}))
        with SafetensorsStorageWriter(path, files=[f"{folder}/config.json"], **options) as writer:
            dcp.save({f"w{n}": torch.full((40 + n,), float(step)) for n in (0, 1)}, storage_writer=writer, no_dist=True)


def _load_model(path: Path) -> int | None:
    """The step of the model at a path, as Hugging Face's libraries find it; None if there is none.

    Its configuration is never newer than its weights, and not missing. Just after the commit the old configuration may
    still be there.
    """
    names, index = [path / "model.safetensors"], path / "model.safetensors.index.json"
    if not names[0].exists():
        if not index.exists():
            return None
        names = [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    tensors = {key: tensor for name in names for key, tensor in load_file(name).items()}
    assert {key: len(tensor) for key, tensor in tensors.items()} == {"w0": 40, "w1": 41}
    (step,) = {value for tensor in tensors.values() for value in tensor.unique().tolist()}
    assert 0 < json.loads((path / "config.json").read_text())["step"] <= step
    return int(step)


def _convert(to: str) -> Scenario:
    return Scenario(
        lambda root: _save(root / "source", 1),
        lambda root: _quiet_convert(root / "source", root / "target", to),
        {"source": {1}, "target": {1, None}},
    )


def _quiet_convert(source: Path, target: Path, to: str) -> None:
    with _quietly():
        convert(source, target, to, options=ConvertOptions(include=["w*"]))


SCENARIOS: dict[str, Scenario] = {
    "first save": Scenario(lambda root: None, lambda root: _save(root / "c", 2), {"c": {2, None}}),
    "overwrite": Scenario(lambda root: _save(root / "c", 1), lambda root: _save(root / "c", 2), {"c": {1, 2}}),
    "overwrite=False": Scenario(
        lambda root: None, lambda root: _save(root / "c", 2, overwrite=False), {"c": {2, None}}
    ),
    "a rank by itself": Scenario(
        lambda root: _save_alone(root / "c", 1), lambda root: _save_alone(root / "c", 2), {"c": {1, 2}}
    ),
    "save over a dead one": Scenario(
        lambda root: (_save(root / "c", 1), _fail(root / "c", 2))[0],
        lambda root: _save(root / "c", 3),
        {"c": {1, 3}},
    ),
    "a save that reuses": Scenario(
        lambda root: (_save(root / "new", 1), _prepare_reuse(root / "old"))[0],
        lambda root: _save_reusing(root / "new"),
        {"old": {2}, "new": {1, 2}},
    ),
    "an overwrite that reuses": Scenario(
        lambda root: _prepare_reuse(root / "c"), lambda root: _save_reusing(root / "c"), {"c": {2}}
    ),
    "gc --keep 1": Scenario(_prepare_steps, lambda root: _collect(root, keep=1), {"step-1": {1, None}, "step-2": {2}}),
    "gc of a dead save": Scenario(
        lambda root: (_save(root / "c", 1), _fail(root / "c", 2), _fail(root / "d", 3))[0],
        lambda root: _collect(root),
        {"c": {1}, "d": {None}},
    ),
    "a model": Scenario(lambda root: None, lambda root: _save_model(root / "model", 2), {"model": {2, None}}),
    "a model over another": Scenario(
        lambda root: _save_model(root / "model", 1), lambda root: _save_model(root / "model", 2), {"model": {1, 2}}
    ),
    "a model of one file over another": Scenario(
        lambda root: _save_model(root / "model", 1, 1000),
        lambda root: _save_model(root / "model", 2, 1000),
        {"model": {1, 2}},
    ),
} | {f"convert --to {to}": _convert(to) for to in ("dcp_tensorizer", "safetensors", "tensorizer", "dcp")}


def enumerate_crashes(scenario: Scenario, folder: Path, tensors: int = 1) -> Counter[str]:
    """Counts the states in which a crash may leave a scenario's directory, by what is found there.

    Raises `AssertionError` if a state is not allowed, or if the clean-up by ``gc`` or by the next save changes it.

    Args:
        scenario: One of `SCENARIOS`.
        folder: An empty folder for the files.
        tensors: The number of tensors in each checkpoint. The number of states grows exponentially with it.
    """
    global _tensors
    _tensors = tensors
    root = folder / "root"
    root.mkdir()
    scenario.prepare(root)
    with recorded(root) as recording:
        scenario.run(root)
    counts: Counter[str] = Counter()
    for state in crash_states(recording):
        replayed = folder / "state"
        materialise(state, replayed)
        found = {name: _look(replayed / name) for name in scenario.allowed}
        for name, step in found.items():
            assert step in scenario.allowed[name], (name, step, state)
        _collect(replayed)
        for name in filter(lambda name: (replayed / name).is_dir(), found):
            begin(open_storage(replayed / name), 1.0).release()
        assert {name: _look(replayed / name) for name in found} == found
        counts[", ".join(f"{name}: {'nothing' if step is None else step}" for name, step in found.items())] += 1
        shutil.rmtree(replayed)
    shutil.rmtree(root)
    return counts


def _look(path: Path) -> int | None:
    """The step of what is at a path, in whatever format; None if there is nothing."""
    if not path.exists():
        return None
    if path.name == "model":
        return _load_model(path)
    if path.name != "target":
        return _load(path)
    view = open_checkpoint(str(path), {})
    steps = {float(value) for tensor in view.tensors.values() for value in tensor.read_all().unique()}
    (step,) = steps
    assert len(view.tensors) == _tensors
    return int(step)
