"""A small decoder-only transformer over bytes, and the text it learns: Python's own standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

__all__ = ["CONTEXT", "ByteTransformer", "batch", "python_sources"]

CONTEXT = 128  # bytes that the model sees at once
_VOCABULARY = 256
_WIDTH = 256
_HEADS = 4
_BLOCKS = 6


class Block(nn.Module):
    """Attention, then a feed-forward layer, each on the normalised residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(_WIDTH)
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.project = nn.Linear(_WIDTH, _WIDTH)
        self.norm_feed_forward = nn.LayerNorm(_WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.project(self._attend(self.norm_attention(x)))
        return x + self.feed_forward(self.norm_feed_forward(x))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (3, _HEADS, _WIDTH // _HEADS))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class ByteTransformer(nn.Module):
    """A transformer that predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(_VOCABULARY, _WIDTH)
        self.position = nn.Embedding(CONTEXT, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(_BLOCKS))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss, in nats per byte, over windows of ``CONTEXT + 1`` bytes each."""
        inputs, targets = windows[:, :-1], windows[:, 1:]
        return cross_entropy(self.logits(inputs).flatten(0, 1), targets.flatten())

    def logits(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the logits of the next byte, for each position in windows of at most ``CONTEXT`` bytes."""
        x = self.byte(inputs) + self.position(torch.arange(inputs.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, prompt: bytes, count: int) -> bytes:
        """Continues a text by ``count`` bytes, sampled with a fixed seed: the same weights give the same text."""
        chance = torch.Generator().manual_seed(0)
        text = list(prompt)
        for _ in range(count):
            likelihood = self.logits(torch.tensor([text[-CONTEXT:]]))[0, -1].softmax(0)
            text.append(int(likelihood.multinomial(1, generator=chance)))
        return bytes(text)


def python_sources() -> torch.Tensor:
    """Returns the modules of the standard library as bytes, concatenated in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch(text: torch.Tensor, step: int, size: int, rank: int, world: int) -> torch.Tensor:
    """Returns a rank's part of a step's batch.

    The batch depends on the step alone, so that a job sees the same data on any number of ranks, and also after it has
    resumed.
    """
    starts = torch.randint(len(text) - CONTEXT, (size,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts.chunk(world)[rank]]).long()
