"""Serves the demo's model from one tensorizer file: nothing of the training job, and not this package, is needed.

``python -m examples.serve model.tensors "def "``
"""

from __future__ import annotations

import sys

import torch
from tensorizer import TensorDeserializer

from .model import ByteTransformer

__all__ = ["load", "main"]


def load(path: str) -> ByteTransformer:
    """The model with the weights of a file or URL, each checked against the hash that is stored with it."""
    with torch.device("meta"):  # the weights come from the file
        model = ByteTransformer()
    with TensorDeserializer(path, device="cpu", verify_hash=True) as weights:
        weights.load_into_module(model)
    return model.eval()


def main() -> None:
    """Prints how the model continues a text."""
    path, prompt = sys.argv[1:]
    print(load(path).generate(prompt.encode(), 60))


if __name__ == "__main__":
    main()
