"""A state like that of Llama 3 70B with Adam, sharded by rows over any number of ranks: names, shapes and chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

LAYERS = 80
MOST_CHUNKS = 1_200_000
"""The number of chunks, of all ranks, that one process can hold: each takes 1.5 kB of Python objects."""
OPTIONS = (
    *("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize"),
    *("foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"),
)
"""The objects in an optimizer's parameter group, the same on each rank."""
_HIDDEN, _KEYS, _INNER, _WORDS = 8192, 1024, 28672, 128256
_LAYER = {
    "self_attn.q_proj": (_HIDDEN, _HIDDEN),
    "self_attn.k_proj": (_KEYS, _HIDDEN),
    "self_attn.v_proj": (_KEYS, _HIDDEN),
    "self_attn.o_proj": (_HIDDEN, _HIDDEN),
    "mlp.gate_proj": (_INNER, _HIDDEN),
    "mlp.up_proj": (_INNER, _HIDDEN),
    "mlp.down_proj": (_HIDDEN, _INNER),
    "input_layernorm": (_HIDDEN,),
    "post_attention_layernorm": (_HIDDEN,),
}
Path = tuple[str, ...]


class Piece(NamedTuple):
    """One rank's part of one item."""

    path: Path
    kind: str
    """``tensor``, of float32, or ``object``."""
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    number: int
    """The index of the chunk in the tensor."""

    @property
    def key(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True)
class Model:
    layers: int = LAYERS

    def parameters(self) -> dict[str, tuple[int, ...]]:
        found = {
            "embed_tokens.weight": (_WORDS, _HIDDEN),
            "norm.weight": (_HIDDEN,),
            "lm_head.weight": (_WORDS, _HIDDEN),
        }
        for layer in range(self.layers):
            found |= {f"layers.{layer}.{name}.weight": shape for name, shape in _LAYER.items()}
        return found

    def tensors(self) -> dict[Path, tuple[int, ...]]:
        """Returns the paths and shapes of the sharded tensors: parameters, and Adam's two averages of each."""
        found: dict[Path, tuple[int, ...]] = {}
        for name, shape in self.parameters().items():
            found[("model", name)] = shape
            found |= {("optim", "state", name, average): shape for average in ("exp_avg", "exp_avg_sq")}
        return found

    def scalars(self) -> list[Path]:
        """Returns the paths of the tensors that every rank has: Adam's count of steps for each parameter."""
        return [("optim", "state", name, "step") for name in self.parameters()]

    def objects(self) -> list[Path]:
        return [("optim", "param_groups", option) for option in OPTIONS]


def fitting(ranks: int, most_chunks: int = MOST_CHUNKS) -> Model:
    """Returns the largest model, of at most 80 layers, that has at most ``most_chunks`` chunks on all ranks."""
    layers = LAYERS
    while layers > 1 and len(Model(layers).tensors()) * ranks > most_chunks:
        layers -= 1
    return Model(layers)


def smaller(model: Model) -> Model | None:
    """Returns a model with a quarter of the layers, to separate costs per tensor from fixed costs.

    For a model of 80 layers, or of 1, returns None.
    """
    return Model(max(1, model.layers // 4)) if 1 < model.layers < LAYERS else None


def rows_of(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Returns the first row and the number of rows of a rank's ``Shard(0)``; the last ranks may have no rows."""
    step = -(-rows // ranks)
    first = min(rank * step, rows)
    return first, min(step, rows - first)


def pieces(model: Model, rank: int, ranks: int) -> Iterator[Piece]:
    """Yields what a rank writes, after DCP has assigned replicated values to one rank each.

    If a tensor has fewer rows than ranks, all empty shards have the same index, and the first of their ranks writes it.
    """
    for path, shape in model.tensors().items():
        first, count = rows_of(shape[0], rank, ranks)
        if count or first > rows_of(shape[0], rank - 1, ranks)[0] or not rank:
            yield Piece(path, "tensor", (first, *(0 for _ in shape[1:])), (count, *shape[1:]), rank)
    for number, path in enumerate(model.scalars()):
        if number % ranks == rank:
            yield Piece(path, "tensor", (), (), 0)
    for number, path in enumerate(model.objects()):
        if number % ranks == rank:
            yield Piece(path, "object", (), (), 0)
