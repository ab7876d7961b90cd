"""The names of the formats, known without an import of torch."""

FORMATS = ("dcp_tensorizer", "tensorizer", "safetensors", "torch", "dcp")
