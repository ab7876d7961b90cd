"""How many bytes 100 published versions of a model take, at several learning rates, and whether each comes out right.

``python -m benchmarks.deltas``. A small transformer is trained from its configuration until its loss settles. Then each
of 100 steps is exported in bfloat16 and published, and a copy follows.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy

from dcp_tensorizer import apply_delta, publish
from dcp_tensorizer.tools import list_versions, verify_versions
from examples.model import batch, python_sources

from .harness import Content, cell, run, spread, table
from .pages import Goal, goals, page

_CONFIG = {"vocabulary": 256, "context": 128, "width": 128, "heads": 4, "blocks": 2}
_RATES = (1e-6, 3e-6, 1e-5, 1e-4, 3e-4)
_TRAINING_RATE = 2e-3  # at most: it rises, and falls to nothing
_BATCH = 4
_WINDOW = 100  # steps whose mean loss is compared with that of as many before
_SETTLED = 0.005  # less progress than this, relative to the loss
_STEPS = 1200
_MAIN_RATE, _WANTED = 3e-6, 3.5  # per cent


class Transformer(nn.Module):
    """A decoder-only transformer over bytes, by its configuration."""

    def __init__(self, vocabulary: int, context: int, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, blocks, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """The mean loss, in nats per byte."""
        inputs, targets = windows[:, :-1], windows[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1])
        x = self.byte(inputs) + self.position(torch.arange(inputs.shape[1]))
        return cross_entropy(self.head(self.layers(x, mask, is_causal=True)).flatten(0, 1), targets.flatten())


def measure(options: argparse.Namespace, folder: Path) -> Content:
    """Trains the model, and publishes what it becomes at each learning rate."""
    torch.manual_seed(0)
    text = python_sources()
    model, optimizer, loss = _trained(text)
    return {
        "config": _CONFIG,
        "steps": _STEPS,
        "loss": loss,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "versions": options.versions,
        "rates": [_measure(folder / f"{rate:g}", model, optimizer, text, rate, options.versions) for rate in _RATES],
    }


def _trained(text: torch.Tensor) -> tuple[Transformer, torch.optim.AdamW, float]:
    """Trains until the loss has settled; returns also the loss."""
    model = Transformer(**_CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), _TRAINING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _TRAINING_RATE, _STEPS)
    losses = []
    for step in range(_STEPS):
        losses.append(_step(model, optimizer, text, step))
        schedule.step()
    before, after = (sum(losses[-n * _WINDOW :][:_WINDOW]) / _WINDOW for n in (2, 1))
    if after < (1 - _SETTLED) * before:
        raise SystemExit(f"the loss has not settled: it was {before:.3f}, and is {after:.3f}")
    return model, optimizer, after


def _step(model: Transformer, optimizer: torch.optim.AdamW, text: torch.Tensor, step: int) -> float:
    loss = model(batch(text, step, _BATCH, 0, 1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def _measure(
    folder: Path,
    model: Transformer,
    optimizer: torch.optim.AdamW,
    text: torch.Tensor,
    rate: float,
    versions: int,
) -> dict[str, Any]:
    """Goes on at a learning rate, publishes each step, and follows with a copy."""
    state = copy.deepcopy(optimizer.state_dict())
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    optimizer.load_state_dict(state)
    for group in optimizer.param_groups:
        group["lr"] = rate
    previous, same, expected = None, 0, ""
    for number in range(1 + versions):
        if number:
            _step(model, optimizer, text, _STEPS + number)
        exported = _export(folder / f"export-{number}", model)
        publish(exported, folder / "published", previous=previous, max_deltas=versions)
        apply_delta(folder / "copy", folder / "published")
        expected = _sha256(exported / "model.safetensors")
        (file,) = (folder / "copy").glob("*.safetensors")
        same += _sha256(file) == expected
        previous = exported
    apply_delta(folder / "late", folder / "published")
    (file,) = (folder / "late").glob("*.safetensors")
    deltas = [info for info in list_versions(folder / "published") if info.is_delta]
    return {
        "rate": rate,
        "percent": spread(100 * info.nbytes / info.model_nbytes for info in deltas),
        "deltas": len(deltas),
        "same": same - 1,  # the first version is whole
        "late_is_same": _sha256(file) == expected,
        "damages": len(verify_versions(folder / "published").damages),
    }


def _export(path: Path, model: Transformer) -> Path:
    path.mkdir(parents=True)
    weights = {key: value.to(torch.bfloat16).contiguous() for key, value in model.state_dict().items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(_CONFIG))
    return path


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def render(content: Content) -> str:
    """The page of results."""
    versions, rates = content["versions"], content["rates"]
    rows = [
        [
            f"{found['rate']:g}",
            cell(found["percent"], lambda percent: f"{percent:.2f}"),
            f"{found['same']} of {found['deltas']}",
            "yes" if found["late_is_same"] and not found["damages"] else "no",
        ]
        for found in rates
    ]
    header = ["learning rate", "% of the weights", "versions with the SHA-256 of the export", "all at once as well"]
    by_rate = {found["rate"]: found for found in rates}
    wanted: list[Goal] = [(f"% of the weights at {_MAIN_RATE:g}", f"<= {_WANTED}", by_rate[_MAIN_RATE]["percent"])]
    wanted += [
        (f"versions at {rate:g} with the SHA-256 of the export", f">= {versions}", found["same"])
        for rate, found in by_rate.items()
    ]
    return page(
        content,
        "Versions for inference",
        "the bytes of what `publish` writes for each step of a small transformer, in per cent of its weights in "
        "bfloat16, and whether a copy that follows has the SHA-256 of each export. A copy that begins at the end "
        "applies all of them at once.",
        f"{versions} steps of AdamW at each learning rate. Before that, {content['parameters']:,} parameters were "
        f"trained from their configuration for {content['steps']:,} steps, at most at {_TRAINING_RATE:g}, until the "
        f"loss fell by less than half a per cent in {_WINDOW} steps: to {content['loss']:.2f} nats per byte.",
        "deltas",
        table(header, rows),
        goals(wanted, form="{:.2f}".format),
    )


OPTIONS = {"versions": {"type": int, "default": 100, "help": "that are published at each learning rate"}}

if __name__ == "__main__":
    run("deltas", measure, render, about=__doc__, options=OPTIONS)
