"""Small models in Hugging Face's layout, and their changes from version to version."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from dcp_tensorizer import publish

INDEX = "model.safetensors.index.json"


def first_state(seed: int = 0) -> dict[str, np.ndarray]:
    """Returns tensors of several dtypes and sizes: one is larger than a piece of a comparison, and one is empty."""
    random = np.random.default_rng(seed)
    return {
        "embed.weight": random.integers(0, 2**16, (700, 1100), dtype=np.uint16),
        "layers.0.weight": random.standard_normal((33, 65)).astype(np.float32),
        "layers.0.bias": random.standard_normal(7).astype(np.float16),
        "layers.1.weight": random.integers(0, 2**16, (64, 64), dtype=np.uint16),
        "scale": np.array(1.5, dtype=np.float32),
        "none": np.zeros((0, 3), dtype=np.float32),
    }


def next_state(state: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Returns the state with some low bits flipped, as after a training step; the last layer is unchanged."""
    random = np.random.default_rng(seed)
    changed = dict(state)
    for key in ("embed.weight", "layers.0.weight", "scale"):
        data = np.array(state[key], copy=True)
        view = data.reshape(-1).view(np.uint8)
        view[random.integers(0, view.size, 1 + view.size // 50)] ^= 1
        changed[key] = data
    return changed


def write_model(path: Path, state: Mapping[str, np.ndarray], *, files: int = 2, config: str = "{}") -> Path:
    """Writes a model's directory: one file without an index, or several files with one."""
    path.mkdir(parents=True)
    keys = sorted(state)
    names = (
        ["model.safetensors"]
        if files == 1
        else [f"model-{number:05d}-of-{files:05d}.safetensors" for number in range(1, files + 1)]
    )
    places = {}
    for number, name in enumerate(names):
        part = {key: state[key] for key in keys[number::files]}
        save_file(part, path / name, metadata={"format": "pt"})
        places |= dict.fromkeys(part, name)
    if files > 1:
        (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    (path / "config.json").write_text(config)
    return path


def weight_files(path: Path) -> list[Path]:
    """Returns a model's weight files in the order of their names: those that its index names, if there is an index."""
    if not (path / INDEX).exists():
        return [path / "model.safetensors"]
    return [path / name for name in sorted(set(json.loads((path / INDEX).read_text())["weight_map"].values()))]


def weights_of(path: Path) -> list[str]:
    """Returns the sorted SHA-256 of a model's weight files, because file names may differ between copies."""
    return sorted(hashlib.sha256(file.read_bytes()).hexdigest() for file in weight_files(path))


def loaded(path: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a model's directory, as the safetensors library reads them."""
    return {key: value for file in weight_files(path) for key, value in load_file(file).items()}


def not_of_versions(published: Path) -> list[str]:
    """Returns the files in a directory of versions that belong to no version, and the missing files of versions.

    Leftovers of a killed publisher's lease count for neither: ``gc`` removes them.
    """
    odd = [path.name for path in published.iterdir() if not path.is_dir() and ".publish.claim" not in path.name]
    for folder in filter(Path.is_dir, published.iterdir()):
        index = json.loads((folder / INDEX).read_text()) if (folder / INDEX).exists() else {}
        notes = index.get("metadata", {})
        ours = notes.get("dcp_tensorizer", {"files": {}})
        weights = set(index["weight_map"].values()) if "base_version" in notes else set(ours["files"])
        others = ours.get("others", {})
        stored = {f".other-{record['sha256']}-{ours['publication']}" for record in others.values()}
        differing = {path.name for path in folder.iterdir()} ^ {INDEX, *weights, *others, *stored}
        odd += [f"{folder.name}/{name}" for name in differing]
    return sorted(odd)


def publish_versions(folder: Path, count: int) -> Path:
    """Publishes versions 1 to ``count``: 1, 4, 7 ... are whole, the others deltas. The models are in ``model-N``."""
    state = first_state()
    for number in range(1, count + 1):
        write_model(folder / f"model-{number}", state)
        publish(folder / f"model-{number}", folder / "published", max_deltas=2)
        state = next_state(state, number)
    return folder / "published"
