"""Serves the demo's model from one tensorizer file, without the training job or this package.

``python -m examples.serve model.tensors "def "``
"""

from __future__ import annotations

import sys

import torch
from tensorizer import TensorDeserializer

from .model import ByteTransformer

__all__ = ["load", "main"]


def load(path: str) -> ByteTransformer:
    """Returns the model with the weights of a file or URL, each verified by its stored hash."""
    with torch.device("meta"):  # the weights come from the file
        model = ByteTransformer()
    with TensorDeserializer(path, device="cpu", verify_hash=True) as weights:
        weights.load_into_module(model)
    return model.eval()


def main() -> None:
    """Prints a text and the model's continuation."""
    path, prompt = sys.argv[1:]
    print(load(path).generate(prompt.encode(), 60))


if __name__ == "__main__":
    main()
