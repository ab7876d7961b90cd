"""The package's version, also in a tree that is not installed. It is written into every index."""

__version__ = "0.1.0"
