"""The names of the formats, in a module that does not import torch."""

FORMATS = ("dcp_tensorizer", "tensorizer", "safetensors", "torch", "dcp")
