"""The package's version, which a tree that is not installed knows, too: every index says what wrote it."""

__version__ = "0.1.0"
